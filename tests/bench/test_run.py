"""Runs: the same answers as plain generate, in batches, after an interruption, with each kind of cache."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from bench_kit import dialogues, tiny
from refusals import refused

from sinkscope.bench.benchmark import run as run_bench
from sinkscope.bench.record import BenchRecord, Prompt, Turn, read_prompts, read_run
from sinkscope.bench.task import PromptFile, row_sampler
from sinkscope.files.store import json_lines
from sinkscope.kv import H2O


def run(methods: list[str], given=None, **options) -> list[BenchRecord]:
    """Records without what differs from run to run."""
    model, tokenizer = tiny()
    task = PromptFile(given=dialogues() if given is None else given, new=6)
    records = run_bench(model, task, methods, tokenizer=tokenizer, **options)
    return [replace(record, metrics={**record.metrics, "seconds": None}) for record in records]


def test_answers_are_those_of_generate_after_right_answers():
    model, tokenizer = tiny()
    records = run(["full", "h2o:16"])
    assert len(records) == 2 * 2 * 2
    for record in records[1::2]:  # of the second turn
        (first, second), is_full = dialogues()[int(record.prompt[1:])].turns, record.method == "full"
        ids = tokenizer("\n\n".join([first.text, first.answers[0], second.text]), return_tensors="pt")["input_ids"]
        with nullcontext() if is_full else H2O(budget=16).on(model):
            written = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert record.turn and list(record.tokens) == written.tolist() and record.ended == "cap"
        costs, length = [record.metrics[name] for name in ("prompt_tokens", "read", "cached_peak")], ids.shape[1]
        # Of H2O after decoding steps; the prompt took more.
        assert costs == [length, *([length + 3, length + 5] if is_full else [17, 17])]


def test_no_arm_pays_for_what_is_made_once(monkeypatch):
    """Libraries compile and allocate at first use: each method answers once before its answers are measured."""
    entered = []
    enter = H2O.enter
    monkeypatch.setattr(H2O, "enter", lambda *given: (entered.append(1), enter(*given)))
    run(["full", "h2o:16"], dialogues(1))
    assert len(entered) == 1 + 2


@pytest.mark.parametrize("method", ["h2o:16", "sampling"])
def test_neighbours_in_a_batch_change_nothing(method):
    together = {record.key: record for record in run([method], batch_size=2)}
    for one in run([method]):
        other = together.pop(one.key)
        assert one.tokens == other.tokens and {**one.metrics} == pytest.approx({**other.metrics})
    assert not together


def test_an_interrupted_run_goes_on_and_ends_the_same(tmp_path):
    whole = run(["full", "h2o:16"])

    def stop(_what, done, _total):
        if done >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(["full", "h2o:16"], out=tmp_path / "r", progress=stop)
    kept = (tmp_path / "r/runs.jsonl").read_bytes()
    (tmp_path / "r/runs.jsonl").write_bytes(kept[:-20])  # the last line was cut short
    assert run(["full", "h2o:16"], out=tmp_path / "r") == whole
    assert (tmp_path / "r/runs.jsonl").read_bytes().startswith(kept[: len(kept) // 2])
    assert len(read_run(tmp_path / "r")) == 8
    more = run(["tova:16"], out=tmp_path / "r")
    assert {r.method for r in more} == {"tova:16"} and len(read_run(tmp_path / "r")) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["snapkv:8:window=9"]}, "SnapKV: budget=8 is below"),
        ({"max_new_tokens": 5000}, "prompt 'd0' has"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: expected a whole number from 1"),
        ({"temperature": -1.0}, "temperature=-1.0: expected greater than or equal to 0"),
        ({"given": dialogues(1) * 2}, "two prompts have the id 'd0': give each an id of its own"),
        ({"given": ()}, "the task has no prompts"),
        (
            {"given": (Prompt("x", (Turn("a"), Turn("b")), "s"),)},
            "prompt 'x': turn 1 has no answer for",
        ),
    ],
)
def test_impossible_runs_are_refused_before_they_begin(tmp_path, options, message):
    with refused(words=[message]):
        run(**{"methods": ["full"], "out": tmp_path / "r", **options})
    assert not (tmp_path / "r").exists()


FINE = {"prompt": "Once upon a time", "answers": ["there"]}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a"}, 'prompt \'0\', turn 1: no answer to score by; give "answers", or "score": false'),
        (FINE | {"answers": ["a", " "]}, "prompt '0', turn 1: an answer is empty, which any output would contain"),
        (FINE | {"metric": "needs_more:rouge"}, "failed (ModuleNotFoundError: No module named 'no_such_library')"),
        (FINE | {"metric": "needs_more:wide"}, "metric 'needs_more:wide' is 7.0: expected a number from 0 to 1"),
        (FINE | {"score": False}, "prompt '0' has no turn that is scored"),
        (
            FINE | {"answer": "x"},
            "line 1: unknown field 'answer'; known: id, set, part, turns, prompt, answers",
        ),
        ({"turns": [FINE], "metric": "f1"}, "line 1: unknown field 'metric'; known: id, set, part, turns"),
        ({"turns": [FINE | {"set": "a"}]}, "turns[0]: unknown field 'set'; known: prompt, answers, metric, score"),
    ],
)
def test_what_is_wrong_is_refused_before_a_model_is_read(row, says, tmp_path, monkeypatch, refusal):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/needs_more.py").write_text(
        "def rouge(text, answers):\n    import no_such_library\n\ndef wide(text, answers):\n    return 7\n"
    )
    (tmp_path / "mine.jsonl").write_text(json_lines([row]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "own")
    monkeypatch.setattr("sinkscope.bench.benchmark.load", lambda *_, **__: pytest.fail("a model is read"))
    assert says in refusal("bench --task mine.jsonl --methods full")


def test_a_folder_of_somebody_else_is_refused_before_a_model_is_read(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with refused("holds other files: give a new or empty folder"):
        run_bench(partial(pytest.fail, "a model is read"), "recall", ["full"], out=tmp_path)
    with refused("is a file: give the name of a folder"):
        run_bench(partial(pytest.fail, "a model is read"), "recall", ["full"], out=tmp_path / "notes.txt")


def test_the_method_that_others_are_compared_with_is_one_of_the_run(tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sinkscope.bench.benchmark.load", lambda *_, **__: pytest.fail("a model is read"))
    said = refusal("bench --task recall --methods full,h2o --beside h2o:8")
    assert said == "--beside h2o:8: expected full, h2o:256"


def test_a_text_is_compared_along_one_answer(tmp_path, monkeypatch, refusal):
    (tmp_path / "talk.jsonl").write_text(json_lines([{"turns": [FINE, FINE]}]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sinkscope.bench.benchmark.load", lambda *_, **__: pytest.fail("a model is read"))
    said = refusal("bench --task text:source=talk.jsonl --methods full")
    assert "prompt '0' has 2 turns, and --task text compares along one answer: give prompts of one turn" in said


@pytest.mark.parametrize("option", ["--device cpu", "--dtype float32", "--revision main", "--temperature 0.5"])
def test_an_option_that_does_nothing_beside_folders_is_refused(option, tmp_path, refusal):
    flag = option.split()[0]
    assert f"{flag} has no effect on {tmp_path}" in refusal(f"bench {tmp_path} {option}")


def test_turns_that_are_not_scored_are_only_said_before():
    """The answer of the second turn is the same whether the first one is scored or not."""
    both = dialogues()
    talks = [replace(talk, turns=(replace(talk.turns[0], scored=False), *talk.turns[1:])) for talk in both]
    wanted = [record for record in run(["full"], both) if record.turn == 1]
    assert run(["full"], (*talks,), batch_size=2) == wanted and len(wanted) == 2


def test_bench_reads_the_users_own_file(tmp_path, typed):
    file = tmp_path / "mine.jsonl"
    file.write_text(json_lines({"prompt": text, "answers": ["there"]} for text in ("Once upon a time", "One day, a")))
    assert "streaming:8" in typed(f"bench --task {file}:new=6 --methods full,streaming:8 --out {tmp_path}/r").out
    groups = json.loads(typed(f"bench {tmp_path}/r --json -").out)["result"]["groups"]
    assert [(group["method"], group["answers"]) for group in groups] == [("streaming:8", 2), ("full", 2)]


def test_prompts_may_be_one_json_array(tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps([FINE, FINE | {"prompt": "One day"}], indent=1))
    (tmp_path / "mine.jsonl").write_text(json_lines([FINE, FINE | {"prompt": "One day"}]))
    assert read_prompts(tmp_path / "mine.json") == read_prompts(tmp_path / "mine.jsonl")


def test_sampling_follows_the_softmax():
    logits, process = torch.tensor([2.0, 1.0, 0.0, -1.0, -9.0]), row_sampler(0.7, 0, ["dc-0001"])
    drawn = torch.cat([process(torch.empty(0), logits[None]) for _ in range(2000)])
    assert ((drawn == 0).sum(-1) == 1).all() and (drawn.isinf().sum(-1) == 4).all(), "all others are forbidden"
    off = torch.bincount(drawn.argmax(-1), minlength=5) / 2000 - (logits / 0.7).softmax(-1)
    assert off.abs().max() < 0.04, "four standard deviations"
