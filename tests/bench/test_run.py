"""Runs: the same answers as plain generate, in batches, after an interruption, with each kind of cache."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from bench_kit import dialogues, task, tiny, untimed
from refusals import refused

from sinkscope.bench.answer import answer_rows
from sinkscope.bench.benchmark import run as run_bench
from sinkscope.bench.record import BenchRecord, Prompt, Turn, read_run
from sinkscope.files.store import json_lines
from sinkscope.kv import H2O
from sinkscope.loops.guard import LoopGuard
from sinkscope.opening.live import target_of


def run(methods: list[str], given=None, **options) -> list[BenchRecord]:
    model, tokenizer = tiny()
    return run_bench(model, task() if given is None else given, methods, tokenizer=tokenizer, **options)


def plain(text: str, new: int = 6, edit=None) -> list[int]:
    """Greedy `generate`, without the benchmark."""
    model, tokenizer = tiny()
    inputs = tokenizer(text, return_tensors="pt")
    with nullcontext() if edit is None else edit.on(model):
        output = model.generate(**inputs, max_new_tokens=new, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def test_answers_are_those_of_generate_after_right_answers():
    records = {(r.method, r.prompt, r.turn): r for r in run(["full", "h2o:16"])}
    assert len(records) == 2 * 2 * 2
    for prompt in dialogues():
        first, second = prompt.turns
        text = "\n\n".join([first.text, first.answers[0], second.text])
        full, h2o = records["full", prompt.id, 1], records["h2o:16", prompt.id, 1]
        assert list(full.tokens) == plain(text) and list(h2o.tokens) == plain(text, edit=H2O(budget=16))
        length = full.metrics["prompt_tokens"] or 0
        assert length == len(tiny()[1](text)["input_ids"])
        assert full.metrics["read"] == length + 3 and full.metrics["cached_peak"] == length + 5
        assert h2o.metrics["read"] == h2o.metrics["cached_peak"] == 17  # after decoding steps; the prompt took more
        assert full.part == prompt.part and full.ended == "cap"


def test_no_arm_pays_for_what_is_made_once(monkeypatch):
    """Libraries compile and allocate at first use: each method answers once before its answers are measured."""
    entered = []
    enter = H2O.enter
    monkeypatch.setattr(H2O, "enter", lambda *given: (entered.append(1), enter(*given)))
    given = task(dialogues(1))
    run(["full", "h2o:16"], given)
    assert len(entered) == 1 + len(given.given[0].turns)


@pytest.mark.parametrize("method", ["h2o:16", "sampling"])
def test_neighbours_in_a_batch_change_nothing(method):
    one, both = untimed(run([method])), untimed(run([method], batch_size=2))
    assert {r.key: r.tokens for r in one} == {r.key: r.tokens for r in both}
    by_key = {r.key: r for r in both}
    for record in one:
        for name in ("read", "cached_peak", "length", "score", "chance"):
            assert record.metrics[name] == pytest.approx(by_key[record.key].metrics[name]), name


def test_an_interrupted_run_goes_on_and_ends_the_same(tmp_path):
    given = task()
    whole = untimed(run(["full", "h2o:16"], given))

    def stop(_what, done, _total):
        if done >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(["full", "h2o:16"], given, out=tmp_path / "r", progress=stop)
    kept = (tmp_path / "r/runs.jsonl").read_bytes()
    (tmp_path / "r/runs.jsonl").write_bytes(kept[:-20])  # the last line was cut short
    assert untimed(run(["full", "h2o:16"], given, out=tmp_path / "r")) == whole
    assert (tmp_path / "r/runs.jsonl").read_bytes().startswith(kept[: len(kept) // 2])
    assert len(read_run(tmp_path / "r")) == 8
    more = run(["tova:16"], given, out=tmp_path / "r")
    assert {r.method for r in more} == {"tova:16"} and len(read_run(tmp_path / "r")) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["snapkv:8:window=9"]}, "SnapKV: budget=8 is below"),
        ({"max_new_tokens": 5000}, "prompt 'd0' has"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: expected a whole number from 1"),
        ({"temperature": -1.0}, "temperature=-1.0: expected greater than or equal to 0"),
        ({"given": task((*dialogues(1), *dialogues(1)))}, "there are 2 prompts, some with the same id"),
        (
            {"given": task((Prompt("x", (Turn("a"), Turn("b")), "s"),))},
            "prompt 'x': turn 1 has no answer for the turns after it",
        ),
    ],
)
def test_impossible_runs_are_refused_before_they_begin(tmp_path, options, message):
    methods = options.pop("methods", ["full"])
    with refused(words=[message]):
        run(methods, out=tmp_path / "r", **options)
    assert not (tmp_path / "r").exists()


def test_bench_reads_the_users_own_file(tmp_path, typed):
    rows = [{"prompt": "Once upon a time", "answers": ["there"]}, {"prompt": "One day, a", "answers": ["zebra"]}]
    file = tmp_path / "mine.jsonl"
    file.write_text(json_lines(rows))
    first = typed(f"bench --task {file}:new=6 --methods full,streaming:8 --out {tmp_path}/r").out
    assert "streaming:8" in first and "score" in first and "read" in first
    groups = json.loads(typed(f"bench {tmp_path}/r --json -").out)["result"]["groups"]
    assert [(group["method"], group["answers"]) for group in groups] == [("streaming:8", 2), ("full", 2)]


def test_what_a_guard_cuts_off_is_not_counted():
    loop = [5, 6, 7] * 30
    (answer,) = answer_rows(target_of(*tiny()), [list(range(4, 24))], 90, LoopGuard(16, act="cut"), along=[loop])
    step = next(event["step"] for event in answer.events if event["kind"] == "guard")
    assert answer.metrics["cached_peak"] == 20 + step - 1
