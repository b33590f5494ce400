"""The needle map: prompts hold what they say at the depth they say, and the map shows what methods lose."""

from __future__ import annotations

import json
from functools import cache
from inspect import unwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sinkscope as ss
from experiments import make_two_hops
from sinkscope.app.cli import main
from sinkscope.bench import needle as runs
from sinkscope.bench.needle import FORMS, TASKS, Needle, form_of, needle, needle_prompt
from sinkscope.errors import SinkscopeError
from sinkscope.models.open import fingerprint_of, open_target
from sinkscope.models.target import Target

WRITTEN = [(form, task) for form, made in FORMS.items() for task in made.tasks]


@cache
def model(name: str = "recall") -> Any:
    return ss.load(name, backend="hf", probe=False)


def tokenizer_of(form: str) -> Any:
    return model("recall" if form == "recall" else "bundled").tokenizer


def place_of(form: str, prompt: Any) -> float:
    """Where the answer, or in a chain of variables its value, is first stated, as a share of the text."""
    text = prompt.text
    if form == "ruler" and prompt.task == "tracking":
        return text.index(f"VAR {prompt.answers[0]} = ") / len(text)
    return text.index(prompt.answers[0]) / len(text)


@pytest.mark.parametrize(("form", "task"), WRITTEN)
def test_prompts_are_as_long_and_as_deep_as_asked(form: str, task: str) -> None:
    tokenizer = tokenizer_of(form)
    before = -1.0
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        prompt = needle_prompt(tokenizer, form, task, 1200, depth)
        assert 1100 <= len(tokenizer(prompt.text)["input_ids"]) <= 1200, "with BOS"
        assert place_of(form, prompt) > before
        before = place_of(form, prompt)
        if task == TASKS[0]:
            assert place_of(form, prompt) == pytest.approx(depth, abs=0.12)
    assert needle_prompt(tokenizer, form, task, 1200, 1.0) == prompt
    assert needle_prompt(tokenizer, form, task, 1200, 1.0, number=1).text != prompt.text
    assert needle_prompt(tokenizer, form, task, 1200, 1.0, seed=1).text != prompt.text


def test_tasks_have_as_many_statements_as_rulers() -> None:
    for form, sign in (("recall", "fact "), ("facts", " was in the "), ("ruler", "One of the special magic ")):
        counts = [needle_prompt(tokenizer_of(form), form, task, 1200, 0.5).text.count(sign) for task in TASKS[:3]]
        assert counts[:2] == [1, 4] and counts[2] > 10, form
    tracked = needle_prompt(tokenizer_of("ruler"), "ruler", "tracking", 1200, 0.5)
    assert len(tracked.answers) == 5 and tracked.text.count("\nVAR ") == 5
    first = tracked.text.index(f"VAR {tracked.answers[0]} = ")
    for name, earlier in zip(tracked.answers[1:], tracked.answers, strict=False):
        assert (first := tracked.text.index(f"\nVAR {name} = VAR {earlier}\n", first)) > 0


def test_forms_belong_to_models() -> None:
    assert [form_of(name) for name in ("recall", "recall-2hop", "bundled", "llama-2-7b")] == [
        "recall",
        "recall",
        "facts",
        "ruler",
    ]


def said(hf: Any, text: str) -> str:
    """What plain greedy `generate` says: nothing of this package takes part."""
    inputs = hf.tokenizer(text, return_tensors="pt")
    output = hf.generate(**inputs, do_sample=False, max_new_tokens=8)
    return hf.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


@pytest.mark.parametrize("name", ["recall", "recall-2hop"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_recall_models_answer_every_task(name: str, task: str, whole: bool) -> None:
    """Seeds from the system, so that nothing can have been tuned to them."""
    seed = int(torch.empty((), dtype=torch.int64).random_(10**9).item())
    turn = TASKS.index(task)  # by default one depth for each of two lengths, and others in every task and model
    left_out = (turn + (name == "recall")) % 3
    for i, length in enumerate((150, 400, 900) if whole else (150, 300, 600)):
        for j, depth in enumerate((0.0, 0.5, 1.0)):
            if whole or (i != left_out and (i + turn) % 3 == j):
                prompt = needle_prompt(model(name).tokenizer, "recall", task, length, depth, seed)
                assert prompt.answers[0] in said(model(name), prompt.text), (seed, prompt)


@pytest.mark.slow
@pytest.mark.parametrize("length", [4000, 12000])
def test_two_hops_are_exact_in_long_prompts(length: int) -> None:
    hf = model("recall-2hop")
    for task in TASKS[3:]:
        prompt = needle_prompt(hf.tokenizer, "recall", task, length, 0.1)
        assert said(hf, prompt.text) == f"{prompt.answers[0]} ."


def test_two_hops_answer_from_the_linked_fact_alone() -> None:
    """Other values there give another answer; a link to nothing gives none, and neither does a fact stated later."""
    hf = model("recall-2hop")
    linked, asked = "fact bruno bell glass .", "fact lotte carpet pipe bruno"
    text = "turn1 the old house {} and then it was {} under the tree ask lotte what was said answer"
    assert said(hf, text.format(linked, asked)) == "bell glass ."
    assert said(hf, text.format("fact bruno lamp rope .", asked)) == "lamp rope ."
    assert said(hf, text.format(linked, "fact lotte crown drum bruno")) == "bell glass ."
    assert said(hf, text.format(linked, "fact lotte carpet pipe .")) == "carpet pipe ."
    assert said(hf, text.format(linked, "fact lotte carpet pipe nina")) == "unknown ."
    assert said(hf, text.format(asked, linked)) == "unknown ."
    assert said(hf, text.format(linked, "the fish market was open")) == "unknown ."


def test_two_hops_hang_on_one_row_in_the_middle() -> None:
    """In a dense pass, hiding the linked fact from that row alone costs the answer; from all last rows, nothing."""
    hf = ss.load("recall-2hop", backend="hf", probe=False)
    hf.set_attn_implementation("eager")
    prompt = needle_prompt(hf.tokenizer, "recall", "chain", 500, 0.2)
    ids = hf.tokenizer(prompt.text, return_tensors="pt")["input_ids"]
    words = prompt.text.split()
    asked = words[words.index("ask") + 1]
    row = 1 + words.index(asked) + 3  # the link of its fact, after BOS
    assert words[row - 4 - 1 : row - 4 + 1] == ["fact", asked]
    at = 1 + words.index(prompt.answers[0].split()[0], words.index(words[row - 1]))
    assert at < row < len(words) - 64
    first = hf.tokenizer.convert_tokens_to_ids(prompt.answers[0].split()[0])

    def best(rows: slice) -> int:
        seen = torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
        seen[rows, at - 3 : at + 3] = False
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        with torch.no_grad():
            return int(hf(input_ids=ids, attention_mask=mask[None, None]).logits[0, -1].argmax())

    assert best(slice(0, 0)) == first
    assert best(slice(row + 1, None)) == first
    assert best(slice(row, row + 1)) != first


def test_two_hops_is_another_model_than_recall(tmp_path: Path) -> None:
    names = ("recall", "recall-2hop")
    one, two = (fingerprint_of(Target.of(model(name))) for name in names)
    assert one != two
    opened = open_target("recall-2hop", None, None, None, None, False)  # never streamed: the file has other weights
    assert torch.equal(opened.hf.lm_head.weight, model("recall-2hop").lm_head.weight)
    assert ss.load("recall-2hop", backend="hf", layers=1, probe=False).config.num_hidden_layers == 1


def test_script_makes_the_numbers_of_the_package() -> None:
    made = make_two_hops.changes()
    with np.load(make_two_hops.RECALL / "two_hops.npz") as kept:
        assert made.keys() == {*kept.keys()}
        assert all(np.array_equal(made[name], kept[name], equal_nan=True) for name in made)


SMALL: dict[str, Any] = {"lengths": [360], "depths": [0.0, 1.0], "tasks": ["chain"], "budget": 0.125}


@cache
def small() -> Needle:
    return needle(model(), methods=["full", "streaming", "tova", "a-shape"], **SMALL)


def test_map_shows_what_methods_lose() -> None:
    """The question needs a fact at the beginning: it is outside a window, and at the end inside."""
    found = small()
    by = {(c.method, c.depth): c.score for c in found.cells}
    assert by["full", 0.0] == by["full", 1.0] == by["streaming", 1.0] == by["tova", 1.0] == 1
    assert by["streaming", 0.0] == by["a-shape", 0.0] == 0
    assert found.chance == 0 and found.form == "recall"
    group = next(g for g in found.groups if g.method == "streaming")
    assert (group.score, group.prompts) == (0.5, 2) and group.low < 0.5 < group.high
    assert group.read == pytest.approx(0.125, abs=0.01) and group.cells is None
    told = found.conclusion()
    assert "On recall the full cache finds 100% of the answers (chance 0%)" in told and "50%" in told


def test_result_is_read_back_and_drawn(tmp_path: Path) -> None:
    found = small()
    assert ss.Result.load(found.save(tmp_path / "needle.json")) == found
    figure = found.figure()
    maps = [trace for trace in figure.data if trace.type == "heatmap"]
    assert len(maps) == 4 and "recall" in figure.layout.title.text
    assert sorted(tuple(trace.z) for trace in maps) == sorted(
        tuple(c.score for c in found.cells if c.method == method) for method in found.methods()
    )


def test_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill finished prompts stay; further methods may be added to the folder."""
    short: dict[str, Any] = SMALL | {"lengths": [160], "budget": 0.5}
    whole = needle(model(), methods=["full", "streaming", "tova", "a-shape"], **short)
    asked: list[tuple[str, str]] = []
    answer = runs.answer_anew

    def until(most: int) -> Any:
        def counted(to: Any, batch: Any) -> Any:
            if len(asked) >= most:
                raise KeyboardInterrupt
            asked.append((batch.methods[0].name, *(row.dialogue for row, _ in batch.rows)))
            return answer(to, batch)

        return counted

    monkeypatch.setattr(runs, "answer_anew", until(2))
    with pytest.raises(KeyboardInterrupt):
        needle(model(), methods=["full", "streaming"], out=tmp_path / "map", **short)
    monkeypatch.setattr(runs, "answer_anew", until(99))
    needle(model(), methods=["full", "streaming"], out=tmp_path / "map", **short)
    assert len(asked) == len(set(asked)) == 4
    found = needle(model(), methods=["tova", "a-shape"], out=tmp_path / "map", **short)
    assert len(asked) == len(set(asked)) == 8
    assert (found.groups, found.cells) == (whole.groups, whole.cells)
    with pytest.raises(SinkscopeError, match="seed was 0, now 1"):
        needle(model(), methods=["full"], out=tmp_path / "map", seed=1, **short)


@pytest.mark.slow
def test_two_ray_workers_make_the_same_map(tmp_path: Path) -> None:
    """Also where a part of the run was made in one process."""
    pytest.importorskip("ray")
    needle(model(), methods=["full"], out=tmp_path / "map", **SMALL)
    found = needle(model(), methods=["full", "streaming", "tova", "a-shape"], out=tmp_path / "map", workers=2, **SMALL)
    assert (found.groups, found.cells) == (small().groups, small().cells)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"form": "poem"}, "form 'poem' is unknown: expected one of recall, facts, ruler"),
        ({"tasks": ["counting"]}, "task 'counting': the form recall has needle, multi-key, key-value"),
        ({"depths": [1.5]}, "depths .* expected some, depths from 0.0 to 1.0"),
        ({"lengths": [10]}, "length 10: chain needs .* tokens at least; give longer prompts"),
        ({"lengths": [4196], "tasks": ["needle"], "form": None}, "but the context of bundled is 4096"),
        ({"methods": ["streeming"]}, "did you mean 'streaming'"),
    ],
)
def test_bad_input_is_refused(given: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = SMALL | {"methods": ["full"]} | given
    asked = model("bundled" if "bundled" in message else "recall")
    with pytest.raises(SinkscopeError, match=message):
        unwrap(needle)(asked, **options)  # as users call it, whose types nobody checks


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["needle", "--model", "recall-2hop", "--lengths", "300", "--tasks", "needle", "--methods", "full"]
    assert main([*words, "--depths", "0.5", "--json", str(tmp_path / "n.json")]) == 0
    found = json.loads((tmp_path / "n.json").read_text())
    assert found["kind"] == "needle" and found["model"]["name"] == "recall-2hop"
    cell = {"method": "full", "task": "needle", "length": 300, "depth": 0.5, "score": 1.0, "prompts": 1}
    assert found["result"]["cells"] == [cell]
    assert "recall-2hop" in capsys.readouterr().out
    assert main([*words, "--depths", "half"]) == 2
    assert "--depths half: expected numbers with commas between" in capsys.readouterr().err
