"""The runner: what a record holds, whatever batch it came in, and that it is the model's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loopbench_kit import assert_same, prompts, tiny
from organisms import tiny_model

from sinkscope.bench.loopbench.metrics import Continued, fresh_sentences, read_run
from sinkscope.bench.loopbench.prompts import honest_texts
from sinkscope.bench.loopbench.run import run_loopbench
from sinkscope.bench.loopbench.samplers import sampled
from sinkscope.bench.loopbench.tables import tabulate
from sinkscope.bench.methods import METHODS
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import Budget, read_setting
from sinkscope.loops import Monitor, MonitorSettings

CAP, WINDOW, BUDGET = 52, 16, 24
SOME = [prompts()[i] for i in (3, 1, 2)]


def _run(folder: Path, methods: list[str], count: int = 5, **options: Any) -> dict[tuple[str, str], Continued]:
    model, tokenizer = tiny()
    given = {"max_new_tokens": CAP, "window": WINDOW, "budget": BUDGET, "every": 16, "tokenizer": tokenizer, **options}
    run_loopbench(model, given.pop("prompts", prompts(count)), methods, out=folder, **given)
    return {(r.method, r.prompt): r for r in read_run(folder).records}


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, str], Continued]]:
    folder = tmp_path_factory.mktemp("runs") / "one"
    return folder, _run(folder, ["full", "streaming", "stop-monitor"], prompts=SOME)


def test_records_do_not_depend_on_the_batch(one_by_one: Any, tmp_path: Path) -> None:
    """Greedy, sampled, stopped and evicting methods, with rows that end early beside rows that do not."""
    folder, alone = one_by_one
    together = _run(tmp_path / "four", list(dict.fromkeys(m for m, _ in alone)), prompts=SOME, batch_size=2)
    assert_same(together.values(), alone.values())
    assert {r.ended for r in alone.values()} == {"eos", "stopped", "cap"}
    assert {r.batch_size for r in together.values()} == {2, 1}
    assert tabulate([tmp_path / "four"]).groups == tabulate([folder]).groups


@pytest.mark.slow
def test_no_method_depends_on_the_batch(tmp_path: Path) -> None:
    alone = _run(tmp_path / "one", list(METHODS), budget=68)
    together = _run(tmp_path / "three", list(METHODS), budget=68, batch_size=3)
    assert_same(together.values(), alone.values())


def test_tokens_and_confidence_are_the_models_own(one_by_one: Any) -> None:
    """Against one pass over prompt and answer, without a cache."""
    model, tokenizer = tiny()
    for prompt in SOME:
        found = one_by_one[1]["full", prompt.id]
        ids = tokenizer(prompt.prompt)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *found.tokens]])).logits[0, len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(found.tokens)
        torch.testing.assert_close(torch.tensor(found.top1), logits.softmax(-1).amax(-1), atol=1e-4, rtol=0)
        assert found.prompt_tokens == len(ids)
        assert found.text == tokenizer.decode(found.tokens, skip_special_tokens=True)
        assert (found.ended == "eos") == (found.tokens[-1] == tokenizer.eos_token_id)
        assert tokenizer.eos_token_id not in found.tokens[:-1]


def test_cached_tokens_in_closed_form(one_by_one: Any) -> None:
    """Of the full cache: prompt and all but the last token. StreamingLLM: the budget, and the token at work."""
    for (method, _), found in one_by_one[1].items():
        sizes = [found.prompt_tokens + k for k in range(len(found.tokens))]
        if method == "streaming":
            sizes = [size if k == 0 else min(size, BUDGET + 1) for k, size in enumerate(sizes)]
        assert found.cached_peak == max(sizes)
        assert found.cached_mean == pytest.approx(sum(sizes) / len(sizes), abs=1e-3)


def test_signals_are_the_monitors(one_by_one: Any) -> None:
    found = one_by_one[1]["full", "dc-3"]
    monitor, fired = Monitor(MonitorSettings.paper(window=WINDOW, stride=1)), []
    for k, token in enumerate(found.tokens):
        step = monitor.update(token, found.top1[k + 1] if k + 1 < len(found.tokens) else 0.0)
        if step.trigger:
            fired.append(step.step)
        if step.step in found.signals["step"]:
            at = found.signals["step"].index(step.step)
            for name in ("ttr", "cr", "novelty", "streak"):
                assert found.signals[name][at] == pytest.approx(getattr(step, name), abs=1e-6)
    assert found.signals["step"] == sorted({*range(16, len(found.tokens) + 1, 16), len(found.tokens)})
    assert set(found.detected) == {"repeats", "full", "p1", "ttr", "cr", "stall", "tail"}


def test_the_guard_is_full_until_it_fires_where_the_monitor_says(tmp_path: Path) -> None:
    found = _run(tmp_path / "r", ["full", "loopguard:paper"], max_new_tokens=80, window=32, budget=40, prompts=SOME[:1])
    full, guarded = found["full", "dc-3"], found["loopguard:paper", "dc-3"]
    at = full.detected["full"]
    assert at is not None and 64 <= at < 80
    assert [(e["kind"], e["step"], e["position"]) for e in guarded.events] == [
        ("guard", at, guarded.prompt_tokens + at - 1)
    ]
    assert guarded.tokens[:at] == full.tokens[:at]
    assert guarded.cached_peak < full.cached_peak
    assert [g.positions for g in tabulate([tmp_path / "r"]).groups] == [(), (at,)]


def test_two_wiki_ends_before_any_window_and_the_guard_is_full(tmp_path: Path) -> None:
    found = _run(
        tmp_path / "r", ["full", "loopguard"], prompts=prompts(2, "2wiki"), max_new_tokens=None, window=256, budget=64
    )
    for i in range(2):
        full, guarded = found["full", f"2wiki-{i}"], found["loopguard", f"2wiki-{i}"]
        assert len(full.tokens) <= 32
        assert guarded.tokens == full.tokens
        assert not guarded.events
    answers = tabulate([tmp_path / "r"]).answers
    assert [(a.method, a.questions, a.same) for a in answers] == [("full", 2, 1.0), ("loopguard", 2, 1.0)]


def test_a_grid_of_temperatures_and_seeds_is_sampled_resumed_and_widened(tmp_path: Path) -> None:
    """Against decoding token by token without a cache, with the random numbers that the seed and the prompt say."""
    model, tokenizer = tiny()
    grid: dict[str, Any] = {"prompts": SOME, "max_new_tokens": 20, "window": 16, "budget": 68, "seeds": 2, "seed": 5}
    _run(tmp_path / "r", ["full"], temperatures=(0.7,), **grid)
    there = (tmp_path / "r" / "runs.jsonl").read_bytes()
    _run(tmp_path / "r", ["full", "streaming", "stop-monitor"], temperatures=(0.0, 0.7, 1.5), batch_size=3, **grid)
    assert (tmp_path / "r" / "runs.jsonl").read_bytes().startswith(there)
    records = read_run(tmp_path / "r").records
    full = {(r.temperature, r.seed, r.prompt): r for r in records if r.method == "full"}
    assert len(records) == 3 * len(full) == 3 * len(SOME) * (1 + 2 + 2)  # greedy decoding needs no second seed
    assert {key[:2] for key in full} == {(0.0, 5), (0.7, 5), (0.7, 6), (1.5, 5), (1.5, 6)}
    for (temperature, seed, name), found in full.items():
        ids = tokenizer(next(p.prompt for p in SOME if p.id == name))["input_ids"]
        draw = sampled(temperature, seed, name) if temperature else (lambda _ids, scores, _n: scores)
        with torch.no_grad():  # one pass without a cache: each token hangs on those before it
            logits = model(torch.tensor([[*ids, *found.tokens]])).logits[0, len(ids) - 1 :]
        for token, scores in zip(found.tokens[:12], logits, strict=False):
            assert int(draw(torch.tensor(ids), scores, 0).argmax()) == token
            ids = [*ids, token]
    assert full[0.7, 5, "dc-1"].tokens != full[0.7, 6, "dc-1"].tokens
    groups = {(g.method, g.temperature): g for g in tabulate([tmp_path / "r"]).groups}
    assert {(m, t): g.runs for (m, t), g in groups.items()} == {
        (m, t): len(SOME) * (2 if t else 1) for m in ("full", "streaming", "stop-monitor") for t in (0.0, 0.7, 1.5)
    }


def test_text_after_the_cut_is_scored_by_a_clean_pass_over_prompt_and_text(tmp_path: Path) -> None:
    model, tokenizer = tiny()
    found = _run(tmp_path / "r", ["full", "loopguard"], max_new_tokens=120, window=32, budget=40, prompts=SOME[:1])
    for method in ("full", "loopguard"):
        record = found[method, "dc-3"]
        cut = record.events[0]["step"] if method == "loopguard" else record.detected["repeats"]
        assert record.cut == cut and cut is not None
        ids, after = tokenizer(SOME[0].prompt)["input_ids"], record.tokens[cut + 1 :]
        with torch.no_grad():  # each token from the prompt and what came after the cut alone
            logits = model(torch.tensor([[*ids, *after]])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        said = [-float(row[token]) for row, token in zip(logits, after, strict=True)]
        assert record.nll == pytest.approx(sum(said) / len(said), abs=1e-3)
    assert found["full", "dc-3"].nll != found["loopguard", "dc-3"].nll
    groups = {g.method: g for g in tabulate([tmp_path / "r"]).groups}
    for method, group in groups.items():
        assert (group.alarmed, group.alarm) == (1, found[method, "dc-3"].cut)
        assert group.perplexity == pytest.approx(2.718281828 ** (found[method, "dc-3"].nll or 0))


@pytest.mark.parametrize(
    ("after", "whole", "share"),
    [
        ("ran. The cat sat. The dog ran! The cat  SAT? Why not", True, 2 / 4),  # "The cat sat" stood before
        ("ran. The cat sat. The dog ran! The cat  SAT? Why not", False, 1 / 3),
        ("a\nb\nc\nb\nc", True, 2 / 4),  # lines are sentences
        ("no end in sight", True, None),
        ("", True, None),
    ],
)
def test_new_sentences(after: str, whole: bool, share: float | None) -> None:
    assert fresh_sentences("Once. The cat sat.\nThen the", after, whole=whole) == share


def test_honest_texts_are_read_not_written(tmp_path: Path) -> None:
    model, tokenizer = tiny()
    texts = honest_texts()[:2]
    found = _run(tmp_path / "r", ["full", "streaming"], prompts=texts)
    assert list(found) == [("text", text.id) for text in texts]
    for text in texts:
        ids = tokenizer(text.prompt)["input_ids"][: CAP + 1]
        record = found["text", text.id]
        assert list(record.tokens) == ids[1:]
        for at in (1, 20, CAP):  # each from its own prefix
            with torch.no_grad():
                p = model(torch.tensor([ids[:at]])).logits[0, -1].softmax(-1).max()
            assert record.top1[at - 1] == pytest.approx(float(p), abs=1e-4)
    table = tabulate([tmp_path / "r"])
    assert table.detections[0].texts == 2
    assert table.summary().endswith(f": alarms on {table.detections[0].text_alarms:.1%} of 2")


def test_progress_counts_new_tokens_to_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    _run(
        tmp_path / "r",
        ["full", "stop-pattern"],
        3,
        batch_size=2,
        max_new_tokens=32,
        progress=lambda what, n, of: seen.append((n, of)),
    )
    assert seen[-1] == (2 * 3 * 32, 2 * 3 * 32)
    assert [n for n, _ in seen] == sorted(n for n, _ in seen)
    assert len(seen) > 4 * 32


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"methods": ["full", "h20"]}, "method 'h20' is unknown: did you mean 'h2o'?"),
        ({"methods": []}, "no method is given"),
        ({"max_new_tokens": 31}, "window W = 32 is more than max_new_tokens = 31"),
        ({"prompts": []}, "there are no prompts"),
        ({"prompts": prompts(1) * 2}, f"two prompts have the same id {prompts(1)[0].id!r}: give each set once"),
        ({"methods": ["full", "snapkv"], "budget": 0.01}, "SnapKV: budget=0.01 of a prompt of"),
        ({"methods": ["full", "loopguard"], "budget": 0.01}, "anchors"),
        ({"budget": 0}, "budget=0: expected a number of tokens from 1"),
        ({"budget": 1.5}, "budget=1.5"),
        ({"methods": ["loopguard"], "budget": 31}, "31"),
        ({"methods": ["snapkv"], "budget": 31}, "below the"),
        ({"batch_size": 0}, "batch_size=0: expected a whole number from 1"),
        ({"seed": -1}, "seed=-1"),
        ({"seeds": 0}, "seeds=0: expected a whole number from 1"),
        (
            {"temperatures": (0.0, -0.5)},
            "temperatures: [1] is -0.5, expected 0, which is greedy, or a number from",
        ),
        ({"temperatures": (float("nan"),)}, "temperatures: [0] is nan"),
        ({"max_new_tokens": 1020}, "but the context of"),
        ({"tokenizer": None}, "carries no tokenizer"),
    ],
)
def test_refused_before_anything_is_written(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    options = dict(changes)
    with pytest.raises(SinkscopeError) as refused:
        _run(tmp_path / "r", options.pop("methods", ["full"]), **{"max_new_tokens": 70, "window": 32, **options})
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "r").exists()


def test_what_does_not_work_on_a_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("falcon")
    run = {"max_new_tokens": 32, "window": 16, "tokenizer": tokenizer}
    with pytest.raises(UnsupportedError, match="attention of falcon cannot be replaced"):
        run_loopbench(model, prompts(1), ["full", "h2o"], out=tmp_path / "r", **run)
    assert not (tmp_path / "r").exists()
    run_loopbench(model, prompts(1), ["full"], out=tmp_path / "r", **run)
    assert len(read_run(tmp_path / "r").records) == 1


@pytest.mark.parametrize(("text", "budget"), [("64", 64), ("0.5", 0.5), ("1.0", 1.0)])
def test_budget_of_the_command_line(text: str, budget: float) -> None:
    assert repr(read_setting(text, Budget, "--budget ")) == repr(budget)


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "0.0", "many", ""])
def test_bad_budget_of_the_command_line(text: str) -> None:
    with pytest.raises(SinkscopeError, match=r"--budget .*: expected a number of tokens from 1, or a fraction"):
        read_setting(text, Budget, "--budget ")


def test_the_folder_says_how_it_was_made(one_by_one: Any) -> None:
    folder, _ = one_by_one
    settings = json.loads((folder / "settings.json").read_text())
    assert {settings[name] for name in ("max_new_tokens", "window", "budget", "every")} == {CAP, WINDOW, BUDGET, 16}
    assert settings["model"]["n_layers"] == 2 and settings["dtype"] == "float32"
    assert read_run(folder).prompts["dc-1"]["prompt"] == prompts()[1].prompt
    assert list(read_run(folder).prompts) == [prompt.id for prompt in SOME]


def test_settings_and_policies_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom sinkscope.kv import Policy\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Newest(Policy):\n    decay: float = 1.0\n"
        "    def scores(self, at):\n        return self.decay * at.kv.pos.float()\n"
    )
    monkeypatch.chdir(tmp_path)
    methods = ["mine:Newest", "mine:Newest:decay=2.0", "streaming:first=1", "streaming:first=4"]
    found = _run(tmp_path / "r", methods, 2, max_new_tokens=32, batch_size=2)
    assert {method for method, _ in found} == set(methods)
    for (method, prompt), record in found.items():
        if method.startswith("mine:"):
            assert record.tokens == found["mine:Newest", prompt].tokens
    made = tabulate([tmp_path / "r"])
    assert [g.method for g in made.groups] == ["streaming:first=1", "streaming:first=4", *methods[:2]]
    assert "mine:Newest:decay=2.0" in made.text() and made.figure() is not None
    for wrong, says in (
        ("mine:Nothing", "cannot be imported"),
        ("mine:Newest:size=3", "has no setting 'size=3'"),
        ("streamin", "did you mean 'streaming'"),
        ("dry:base=2", "it has none"),
    ):
        with pytest.raises(SinkscopeError, match=says):
            _run(tmp_path / "w", [wrong], 1)
