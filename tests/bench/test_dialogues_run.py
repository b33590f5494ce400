"""Dialogues answered by policies: what is planted comes out, a kill changes nothing, and every number is recomputed."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from organisms.tiny import tiny_model

import sinkscope as ss
from sinkscope.app.cli import main
from sinkscope.bench.dialogues.form import POSITIONS, Dialogue, DialogueTurn, write_dialogues
from sinkscope.bench.dialogues.recall import recall_dialogue, recall_dialogues
from sinkscope.bench.dialogues.run import Said, cells_of, run_dialogues
from sinkscope.bench.dialogues.tables import Answered, Dialogues, Near, tabulate_dialogues
from sinkscope.bench.files import open_folder, read_folder
from sinkscope.bench.loopbench.metrics import read_run
from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result
from sinkscope.interventions.base import Event
from sinkscope.kv import Progressive
from sinkscope.kv.loopserve import tokens_read
from sinkscope.kv.loopserve.sparse_prompts import PromptRead
from sinkscope.lines.choice import HeadLines
from sinkscope.lines.sparse import Sparsity

SOME = recall_dialogues(3, turns=2, total=160)
SHORT = recall_dialogues(2, turns=2, total=100)
MODEL = {"name": "tiny", "family": "llama", "n_layers": 3, "d_model": 32, "d_mlp": 64, "fingerprint": "f00"}


@cache
def model() -> Any:
    return ss.load("recall", backend="hf")


def _records(folder: Path) -> tuple[Said, ...]:
    return tuple(replace(record, seconds=0.0) for record in read_folder(folder, Said, "dialogues").records)


def _group(made: Dialogues, method: str, position: str) -> Answered:
    return next(g for g in made.groups if (g.method, g.position) == (method, position))


def test_full_is_right_everywhere_and_a_window_where_what_is_needed_lies_in_it(tmp_path: Path) -> None:
    """With one hop the first token of an answer comes from the prompt; the other two need three things in the cache:

    the turn's marker, the key asked about and the fact. StreamingLLM has those among its first four and latest tokens,
    so a question at the begin of a long later turn is lost, and one at the end is if the turn's marker is.
    """
    budget = 60
    lengths = {0: (100, 100), 2: (100, 50), 3: (80, 52)}
    dialogues = [recall_dialogue(seed, turns=2, tokens=each, hops=1) for seed, each in lengths.items()]
    given: dict[str, Any] = {"out": tmp_path / "r", "budget": budget, "batch_size": 9, "max_new_tokens": 6}
    run_dialogues(model(), dialogues, ["full", "streaming"], **given)
    made = tabulate_dialogues([tmp_path / "r"])
    for position in (*POSITIONS, "all"):
        full = _group(made, "full", position)
        assert (full.score, full.same, full.questions) == (1.0, 1.0, 18 if position == "all" else 6)
        assert full.read == pytest.approx(full.prompt_tokens + 1.5)  # two steps, each with its own token
    said = {r.prompt: r.text.split() for r in _records(tmp_path / "r") if r.method == "streaming"}
    found: dict[tuple[str, int], set[bool]] = {}
    for position in POSITIONS:
        for dialogue in dialogues:
            words = ["<s>"]
            for number, turn in enumerate(dialogue.turns):
                words += turn.prompts[position].split()
                marker = words.index(f"turn{number + 1}")
                key = words.index("ask", marker) + 1
                fact = next(i for i, w in enumerate(words) if w == "fact" and words[i + 1] == words[key])
                oldest = len(words) + 1 - (budget - 4)  # when the last token is to come
                kept = all(place < 4 or place >= oldest for place in (marker, key, fact + 4))
                answer = turn.answers[0].split()
                name = f"{dialogue.id} {position} {number}"
                assert (said[name] in (answer, answer[:-1])) == kept, name
                found.setdefault((position, number), set()).add(kept)
                if position == "begin" and number and [*lengths.values()][dialogues.index(dialogue)][1] >= budget:
                    assert not kept
                words += answer
    assert found["end", 0] == found["begin", 0] == found["end", 1] == {True, False}


def test_tokens_read_are_those_of_two_other_counts(tmp_path: Path) -> None:
    given: dict[str, Any] = {"out": tmp_path / "r", "budget": 24, "positions": ["end"], "max_new_tokens": 20}
    run_dialogues(model(), SHORT[:1], ["h2o", "progressive-0"], **given)
    records = _records(tmp_path / "r")
    for record in (r for r in records if r.method == "h2o"):
        assert record.read == 25.0  # the budget, and the token itself
    turn = SHORT[0].turns[0].prompts["end"]
    ids = model().tokenizer(turn, return_tensors="pt")
    with Progressive(budget=24, after=0).on(model()) as run:
        out = model().generate(**ids, do_sample=False, max_new_tokens=20)
    record = next(r for r in records if (r.method, r.turn) == ("progressive-0", 0))
    assert record.tokens == tuple(out[0, ids["input_ids"].shape[1] :].tolist())
    assert record.read == pytest.approx(tokens_read(run)[0][0], abs=1e-3)


def test_batches_change_nothing(tmp_path: Path) -> None:
    given: dict[str, Any] = {"budget": 40, "positions": ["middle"], "max_new_tokens": 8}
    for size in (1, 4):
        run_dialogues(model(), SHORT, ["tova"], out=tmp_path / str(size), batch_size=size, **given)
    assert _records(tmp_path / "1") == _records(tmp_path / "4")


def test_cells_are_those_of_the_shape(tmp_path: Path) -> None:
    """A-shape and Tri-shape counted cell by cell; MInference fills its share, and one line more would exceed it."""
    methods = [
        "full",
        "a-shape:first=3:local=9",
        "tri-shape:first=3:local=9:dense_rows=7",
        "minference:budget=0.3",
        "loopserve-p:paper:alpha=0.5:dense_above=inf:variant=exact",
        "loopserve:alpha=0.9",
    ]
    hf, tokenizer = tiny_model("llama", num_hidden_layers=2)
    run_dialogues(
        hf,
        SOME[:2],
        methods,
        out=tmp_path / "r",
        positions=["end"],
        batch_size=3,
        budget=64,
        tokenizer=tokenizer,
        max_new_tokens=3,
    )
    found = {(r.method, r.prompt): r for r in _records(tmp_path / "r")}
    for (method, name), record in found.items():
        n = record.prompt_tokens
        seen = [sum(key < 3 or query - key < 9 for key in range(query + 1)) for query in range(n)]
        if method == "full":
            assert record.cells is None
        elif "shape" in method:
            cells = [query + 1 if "tri" in method and query >= n - 7 else seen[query] for query in range(n)]
            assert record.cells == pytest.approx(sum(cells) / (n * (n + 1) / 2), abs=1e-4)
        elif method.startswith("minference"):
            assert record.cells is not None and 0.28 < record.cells <= 0.3
        elif "inf" in method:
            assert record.cells is not None and record.cells < 0.7
        else:
            assert record.cells == 1.0  # shorter than what it makes sparse
        if not method.startswith("loopserve:") and record.read is not None:
            steps = len(record.tokens) - 1
            assert record.read == pytest.approx(n + (steps + 1) / 2), name
    made = tabulate_dialogues([tmp_path / "r"])
    shapes = _group(made, "a-shape:first=3:local=9", "end")
    assert shapes.cells == fmean(r.cells or 0 for r in found.values() if r.method.startswith("a-shape"))
    assert shapes.budget == 1.0 and _group(made, "minference", "end").budget == 0.3


def test_heads_and_layers_that_were_dense_count_as_all_their_cells() -> None:
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    sparsity = Sparsity((0.2, 0.4), (0.5, 1.0), (False, True))
    some = PromptRead(HeadLines(nothing, nothing, 4), sparsity).event_data()
    assert some["attended"] == pytest.approx(0.6)
    events = [
        Event(row, 0, 9, layer, None, "prefill", data)
        for row, layer, data in ((0, 0, some), (0, 1, {"dense": "sliding window"}), (1, 0, {"dense": "soft cap"}))
    ]
    assert [cells_of(events, row) for row in range(3)] == [pytest.approx(0.8), 1.0, None]


def test_killed_it_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def work(folder: Path) -> None:
        given: dict[str, Any] = {"positions": ["begin", "end"], "budget": 40, "batch_size": 2, "max_new_tokens": 6}
        run_dialogues(model(), SHORT, ["full", "streaming"], out=folder, **given)

    work(whole)
    for lines in (1, 9):
        child = multiprocessing.get_context("fork").Process(target=work, args=(cut,))
        child.start()
        runs, end = cut / "runs.jsonl", time.monotonic() + 30
        while not (runs.exists() and runs.read_bytes().count(b"\n") >= lines):
            assert time.monotonic() < end
            time.sleep(0.002)
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
    with runs.open("ab") as file:
        file.write(b'{"model": "cut sho')
    assert len(_records(cut)) < len(_records(whole)) == 16
    work(cut)
    assert _records(cut) == _records(whole)
    one, other = tabulate_dialogues([whole]), tabulate_dialogues([cut])
    assert one.text() == other.text() and one.groups == other.groups


def test_other_settings_and_a_second_writer_are_refused(tmp_path: Path) -> None:
    hf, tokenizer = tiny_model("llama", num_hidden_layers=1)
    given: dict[str, Any] = {"out": tmp_path / "r", "tokenizer": tokenizer, "max_new_tokens": 2, "positions": ["end"]}
    run_dialogues(hf, SOME[:1], ["full"], budget=20, **given)
    with pytest.raises(SinkscopeError, match="budget was 20, now 30"):
        run_dialogues(hf, SOME[:1], ["full"], budget=30, **given)
    with pytest.raises(SinkscopeError, match="prompts was"):
        run_dialogues(hf, SOME[:2], ["full"], budget=20, **given)
    with pytest.raises(SinkscopeError, match="no folder of `sinkscope loopbench run`"):
        read_run(tmp_path / "r")
    settings = json.loads((tmp_path / "r/settings.json").read_text())
    dialogues = [json.loads(line) for line in (tmp_path / "r/prompts.jsonl").read_text().splitlines()]
    settings.pop("prompts")
    with (
        open_folder(tmp_path / "r", settings, dialogues, Said),
        pytest.raises(SinkscopeError, match="being written by another"),
    ):
        run_dialogues(hf, SOME[:1], ["full"], budget=20, **given)


# --- Scores ----------------------------------------------------------------------------------------------------------


def _said(dialogue: str, turn: int, text: str, **changes: Any) -> Said:
    given = {
        "method": "full",
        "position": "end",
        "tokens": (1, 2, 3),
        "read": 9.0,
        "cells": None,
        "prompt_tokens": 10,
        **changes,
    }
    return Said(
        model="f00",
        prompt=f"{dialogue} {given['position']} {turn}",
        dialogue=dialogue,
        turn=turn,
        text=text,
        ended="eos",
        seconds=1.0,
        **given,
    )


def _folder(path: Path, records: Sequence[Said], **changes: Any) -> Path:
    prompts = dict.fromkeys(POSITIONS, "?")
    turns = [
        {"prompts": prompts, "answers": [answer], "depends": [], "answerable": known}
        for answer, known in (("the blue whale", True), ("yes", False))
    ]
    dialogues = [{"id": f"q-{i}", "task": "qasper", "turns": turns, "classes": []} for i in range(2)]
    settings = {"command": "dialogues", "model": MODEL, "budget": 64, "history": "gold", **changes}
    with open_folder(path, settings, dialogues, Said) as store:
        store.append(records)
    return path


def test_scores_intervals_and_counts_are_recomputed(tmp_path: Path) -> None:
    other = {"method": "h2o", "read": 4.0}
    records = [
        _said("q-0", 0, "a blue whale"),
        _said("q-0", 1, "no"),
        _said("q-1", 0, "blue fish", tokens=(7,), read=None),
        _said("q-0", 0, "whale", position="begin", prompt_tokens=30),
        _said("q-0", 0, "blue whale", **other),
        _said("q-0", 1, "yes", tokens=(1, 2, 4), **other),
    ]
    made = tabulate_dialogues([_folder(tmp_path / "r", records)])
    end = _group(made, "full", "end")
    assert end.score == pytest.approx((1 + 0 + 0.5) / 3)
    assert (end.dialogues, end.questions, end.unanswerable) == (2, 3, 1)
    assert (end.read, end.length, end.prompt_tokens) == (9.0, pytest.approx(7 / 3), 10.0)
    for edge in (end.low, end.high):  # where the score is 1.96 standard errors away
        assert abs(edge - end.score) == pytest.approx(1.959964 * math.sqrt(edge * (1 - edge) / 3))
    both = _group(made, "full", "all")
    assert both.score == pytest.approx(fmean([1, 0, 0.5, 2 / 3])) and both.questions == 4
    assert both.prompt_tokens == 15.0
    h2o = _group(made, "h2o", "end")
    assert (h2o.score, h2o.same, h2o.read, h2o.budget) == (1.0, 0.5, 4.0, 64)
    assert [(g.method, g.position) for g in made.groups] == [
        ("full", "begin"),
        ("full", "end"),
        ("full", "all"),
        ("h2o", "end"),
    ]
    assert made.details() == ["qasper by tiny: full 54.2%, h2o 64 100.0%"]
    assert made.conclusion() == (
        "On qasper by tiny, h2o 64 scores 100.0% on 2 questions (95 %: 34% to 100%); the full cache scores 54.2% on 4 "
        "questions (95 %: 17% to 87%)."
    )
    assert [row["budget"] for row in made.rows()] == [None, None, None, 64], "the whole cache has no budget"
    assert Result.from_dict(json.loads(made.to_json())) == made


def test_several_budgets_stand_beside_each_other(tmp_path: Path) -> None:
    full, part = _said("q-0", 0, "whale"), _said("q-0", 0, "whale", method="h2o")
    folders = [_folder(tmp_path / "a", [full, part]), _folder(tmp_path / "b", [full, part], budget=0.5)]
    made = tabulate_dialogues(folders)
    assert [(g.method, g.budget) for g in made.groups] == [("full", 1.0), ("h2o", 0.5), ("h2o", 64)]
    assert made.details() == ["qasper by tiny: full 66.7%, h2o 0.5 66.7%, h2o 64 66.7%"]
    other = _folder(tmp_path / "c", [_said("q-0", 0, "fish")])
    with pytest.raises(SinkscopeError, match=r"c and another folder both hold full .* but not the same: of other"):
        tabulate_dialogues([folders[0], other])
    with pytest.raises(SinkscopeError, match="both hold h2o 64 on qasper by tiny: give one of them"):
        tabulate_dialogues([folders[0], folders[0]])


def test_figure_has_the_numbers_and_html_is_escaped(tmp_path: Path) -> None:
    named = {**MODEL, "name": "<script>x</script>"}
    records = [_said("q-0", 0, "a blue whale"), _said("q-0", 0, "fish", method="h2o", position="middle")]
    made = tabulate_dialogues([_folder(tmp_path / "r", records, model=named)])
    data = json.loads(made.figure().to_json())["data"]
    bars = {t["name"]: (t["x"], t["y"]) for t in data if t["type"] == "bar"}
    dots = {t["name"]: (t["x"], t["y"]) for t in data if t["type"] == "scatter"}
    assert dots == {"full": ([9.0], [1.0]), "h2o": ([9.0], [0.0])}
    sizes = [t["marker"]["size"] for t in data if t["type"] == "scatter"]
    assert sizes[0] > sizes[1]  # the later one does not cover the earlier
    assert bars == {"question at middle": (["h2o 64"], [0.0]), "question at end": (["full"], [1.0])}
    assert "<script>x" not in made.to_html() + made.figure().to_json()


# --- Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--methods", "h20"], "method 'h20' is unknown: did you mean 'h2o'? expected some of full, streaming"),
        (["--methods", ","], "no name is given"),
        (["--positions", "start"], "positions=('start',): expected some of begin, middle, end"),
        (["--budget", "0"], "--budget 0: expected a number of tokens from 1"),
        (["--dialogues", "none.jsonl"], "'none.jsonl': no such file"),
        (["--budget", "48", "--methods", "snapkv"], "SnapKV: budget=48 is below"),
        (["--max-new-tokens", "40000"], "dialogue 'recall-0', turn 1, question at begin"),
        (["--chat"], "the tokenizer of recall has no chat template"),
        (["--methods", "tova:budget=0.001"], "TOVA: budget=0.001 of a prompt of"),
        (["--settings", "paper", "--budget", "64"], "--settings paper has budgets of its own"),
        (["--settings", "equal", "--budget", "64"], "share=64: expected a share of the context"),
        (["--settings", "equal"], "SnapKV: budget=0.125 of a prompt of"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["dialogues", "run", "--out", "r", "--count", "1", *words]) == 2
    error = capsys.readouterr().err
    assert says in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "r").exists()


def test_a_folder_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dialogues", "table", str(tmp_path)]) == 2
    assert "is no folder of `sinkscope dialogues run`" in capsys.readouterr().err
    with pytest.raises(SinkscopeError, match="has no answer in it yet"):
        tabulate_dialogues([_folder(tmp_path / "r", [])])


def test_commands_on_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write_dialogues(SOME, tmp_path / "d.jsonl"), tmp_path / "r"
    words = ["dialogues", "run", "--dialogues", str(file), "--count", "1", "--methods", "full", "--out", str(out)]
    assert main([*words, "--positions", "end,begin"]) == 0
    assert "full 100.0%" in capsys.readouterr().out
    assert main(["dialogues", "table", str(out), "--json", str(tmp_path / "t.json")]) == 0
    made = Dialogues.load(tmp_path / "t.json")
    assert [(g.position, g.questions) for g in made.groups] == [("begin", 2), ("end", 2), ("all", 4)]


def test_tables_load_no_torch(tmp_path: Path) -> None:
    run, near = str(_folder(tmp_path / "r", [_said("q-0", 0, "whale")])), tmp_path / "n"
    settings = {"command": "dialogues fidelity", "model": MODEL, "budget": 64, "along": "gold"}
    with open_folder(near, settings, [{"id": "q-0", "task": "text", "turns": [], "classes": []}], Near) as store:
        store.append(
            [
                Near(
                    model="f00",
                    method="full",
                    prompt="q-0 end 0",
                    dialogue="q-0",
                    position="end",
                    turn=0,
                    prompt_tokens=9,
                    kl=(0.0,),
                    agree=(True,),
                    kept=(),
                    read=None,
                    cells=None,
                    seconds=1.0,
                )
            ]
        )
    code = (
        "import sys; from sinkscope.app.cli import main\n"
        "codes = [main(['dialogues', 'table', folder]) for folder in sys.argv[1:]]\n"
        "heavy = {'torch', 'transformers', 'plotly', 'pandas', 'numpy'}\n"
        "print(codes, sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, run, str(near)], capture_output=True, text=True)
    assert done.stderr == "[0, 0] []\n"
    assert "full 66.7%" in done.stdout and "full KL 0, 100.0% agree" in done.stdout


class _EnoughError(Exception):
    pass


def test_chat_template_wraps_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids that reach the model, against the conversation written by hand."""
    hf, tokenizer = tiny_model("llama", num_hidden_layers=1)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"
    turns = tuple(
        DialogueTurn(dict.fromkeys(POSITIONS, text), (answer,), (0,)) for text, answer in (("is it", "a"), ("b", "c"))
    )
    given: dict[str, Any] = {"out": tmp_path / "r", "tokenizer": tokenizer, "batch_size": 2, "positions": ["end"]}
    seen: list[Any] = []

    def look(_model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> None:
        seen.extend(ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True))
        raise _EnoughError

    monkeypatch.setattr(type(hf), "generate", look)
    for chat in (True, False):
        with pytest.raises(_EnoughError):
            run_dialogues(hf, [Dialogue("x", "recall", turns)], ["full"], chat=chat, **given)
        assert not (tmp_path / "r/settings.json").exists()  # nothing was finished, so other settings may follow
    assert seen == [
        tokenizer("user is it assistant", add_special_tokens=False)["input_ids"],
        tokenizer("user is it assistant a user b assistant", add_special_tokens=False)["input_ids"],
        tokenizer("is it")["input_ids"],
        tokenizer("is it\n\na\n\nb")["input_ids"],
    ]
