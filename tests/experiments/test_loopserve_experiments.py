"""The experiments on LoopServe: the paper's numbers, how answers are counted, the controls, the page."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from bench_kit import made_record
from organisms.tiny import tiny_model

import sinkscope as ss
from experiments.loopserve import ablation, default, fidelity, figure8, longeval, paper, runs, sweeps, table1, turns
from experiments.loopserve.build import SETS
from sinkscope.bench.methods import METHODS, read_method
from sinkscope.bench.record import BenchRecord, open_run
from sinkscope.bench.tasks.recall import POSITIONS, Recall, recall_dialogue
from sinkscope.files.provenance import ModelInfo
from sinkscope.files.rate import wilson
from sinkscope.lines.choice import draw_of, sample_queries
from sinkscope.models.target import Target

ROOT = Path(__file__).parents[2]


def said(position: str = "end", dialogue: str = "recall-0", **changed: Any) -> BenchRecord:
    """An answer made by hand."""
    settings = {"part": position, **changed.pop("settings", {})}
    metrics = {"score": 0.0, "prefix": 0.0, "prompt_tokens": 100, "seconds": 0.1, **changed.pop("metrics", {})}
    return made_record(prompt=f"{dialogue} {position}", settings=settings, metrics=metrics, **changed)


def test_tables_of_the_paper_are_whole_but_for_one_column_of_trec() -> None:
    lost = []
    for model, places in paper.TABLE1.items():
        assert set(places) == set(POSITIONS)
        for place, tasks in places.items():
            assert set(tasks) == set(SETS)
            for task, numbers in tasks.items():
                assert tuple(numbers) == paper.METHODS and set(numbers) <= set(METHODS)
                lost += [(model, place, task, method) for method, number in numbers.items() if number is None]
    assert lost == [("qwen2.5", place, "trec", "loopserve") for place in ("begin", "middle", "end")]
    # Rows whose labels are displaced in the text, a row counted from either side, and the corners.
    table = paper.TABLE1
    assert table["llama-3.1"]["begin"]["multi_news"]["minference"] == 20.25
    assert table["llama-3.1"]["end"]["trec"] | {} == dict(
        zip(paper.METHODS, (59.05, 56.53, 58.54, 58.54, 58.54, 52.51, 59.55, 59.05, 60.31), strict=True)
    )
    assert table["qwen2.5"]["middle"]["samsum"]["streaming"] == 13.83
    assert table["llama-3.1"]["begin"]["multifieldqa_en"]["full"] == 45.70
    assert table["qwen2.5"]["end"]["samsum"]["loopserve"] == 39.85
    assert paper.mean("qwen2.5", "end", "h2o", ("qasper", "trec")) == pytest.approx((14.17 + 58.29) / 2)


def test_ours_comes_from_finished_folders_and_the_rest_is_not_run(tmp_path: Path) -> None:
    folder = _qasper_run(tmp_path / "run", "meta-llama/Llama-3.1-8B-Instruct")
    rows = table1.paper_rows([str(folder)])
    ours = {(r["position"], r["task"], r["method"]): r["ours"] for r in rows if r["ours"] is not None}
    # One token of F1 in two answers: 100 % and, of "Ellen" for "Ellen Varga", 2/3.
    assert ours == {("end", "qasper", "snapkv"): pytest.approx(100 * fmean([1, 2 / 3]))}
    assert all(row["ours"] is None for row in rows if row["model"] != "llama-3.1")
    line = next(line for line in table1.table(rows).splitlines() if line.startswith("| llama-3.1 | end | qasper |"))
    assert line.count("not run") == 8 and "35.95 / 83.33" in line
    assert "68.85 / not run | lost / not run |" in table1.table(rows)
    none = table1.paper_rows()
    assert len(none) == 2 * 3 * 11 * 9 and all(row["ours"] is None for row in none)
    small = _qasper_run(tmp_path / "small", "meta-llama/Llama-3.2-3B-Instruct")
    eight = {r["method"]: r["ours"] for r in table1.table8_rows([str(small)]) if r["task"] == "qasper"}
    assert eight == {"adakv": None, "snapkv": pytest.approx(500 / 6), "minference": None, "loopserve": None}


def _qasper_run(folder: Path, name: str) -> Path:
    model = asdict(ModelInfo(name, "llama", 1, 1, 1, "f00"))
    settings = {"model": model, "device": "cpu", "dtype": "float32", "attention": "sdpa"}
    with open_run(folder, settings, []) as store:
        scores = [1.0, 2 / 3]
        store.append(
            said(dialogue="q", method="snapkv:1024", turn=turn, metrics={"score": score}, settings={"set": "qasper"})
            for turn, score in enumerate(scores)
        )
    return folder


def test_scores_and_how_far_a_chain_was_followed() -> None:
    suite = runs.Suite("s", Recall(count=1, turns=2, total=300, least=120, hops=2))
    numbers = {  # score and prefix of each method by place and turn
        "full": {("begin", 0): (1, 1), ("begin", 1): (1, 1), ("end", 0): (1, 1), ("end", 1): (1, 1)},
        "tova:0.125": {("begin", 0): (0, 4 / 6), ("begin", 1): (0, 0), ("end", 0): (0, 4 / 6), ("end", 1): (1, 1)},
    }
    records = [
        said(place, turn=turn, method=method, metrics={"score": float(score), "prefix": float(prefix)})
        for method, by_place in numbers.items()
        for (place, turn), (score, prefix) in by_place.items()
    ]
    rows = {row["position"]: row for row in runs.rows_of(suite, records, "full")}
    assert set(rows) == {"begin", "end", "all"}
    assert rows["all"]["score"] == rows["all"]["prefix"] == rows["all"]["same"] == 1
    rows = {row["position"]: row for row in runs.rows_of(suite, records, "tova:0.125")}
    assert rows["begin"]["prefix"] == pytest.approx((4 / 6 + 0) / 2) and rows["begin"]["score"] == 0
    assert rows["end"]["prefix"] == pytest.approx((4 / 6 + 1) / 2) and rows["end"]["score"] == 0.5
    rate = wilson(1, 4)
    assert (rows["all"]["score"], rows["all"]["low"], rows["all"]["high"]) == (rate.share, rate.low, rate.high)
    assert [row["score"] for row in runs.turns_of(suite, records, "tova:0.125")] == [0, 0.5]
    assert [row["turn"] for row in runs.turns_of(suite, records, "tova:0.125")] == [1, 2]
    assert runs.rows_of(suite, records, "adakv:0.125") == []


def test_random_controls_hold_the_budget_and_are_the_same_every_time() -> None:
    model: Any = tiny_model("llama")[0]
    ids = torch.tensor([[(7 * i) % 50 + 4 for i in range(60)]])

    def kept(name: str) -> list[Any]:
        with read_method(runs.specs([name])[0], 20).make().on(model), torch.no_grad():
            out = model.generate(
                ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, eos_token_id=None, pad_token_id=0
            )
            return [layer.pos.tolist() for layer in out.past_key_values.layers]

    one, again, votes = kept("random:20:window=8"), kept("random:20:window=8"), kept("snapkv:20:window=8")
    assert one == again != votes
    for layer in one:
        for head in layer[0]:
            assert len([p for p in head if 0 <= p < 60]) == 20 and set(range(52, 60)) <= set(head)
    assert one[0] != one[1], "every layer has its own"
    assert kept("random-progressive:20") == kept("random-progressive:20")


def test_what_the_sample_misses_the_prompt_loses() -> None:
    """The last token alone looks for the key asked about: lines chosen without its row do not have that cell."""
    model: Any = ss.load("recall", backend="hf")
    turn = recall_dialogue(3, turns=1, tokens=500, hops=1, position="begin").turns[0]
    inputs = model.tokenizer(turn.text, return_tensors="pt")

    def first(method: str) -> str:
        with read_method(method, 0.125).make().on(model), torch.no_grad():
            return model.tokenizer.decode(model(**inputs).logits[0, -1].argmax())

    wanted = turn.answers[0].split()[0]
    draws = [sample_queries(501, 48, draw_of(1, layer, 501, 501)) for layer in range(model.config.num_hidden_layers)]
    assert not any(500 in draw for draw in draws), "this prompt's last query is in a sample"
    drawn = "paper:variant=exact:alpha=0.995:seed=1"
    assert first(f"loopserve-p:{drawn}") != wanted != first("loopserve-p:paper:seed=1")
    assert first(f"loopserve-p:{drawn}:recent=16") == wanted
    assert first("loopserve-p:shortest=0") == wanted
    assert first("loopserve-p:alpha=1.0:shortest=0") == wanted


def test_every_method_of_the_experiments_can_be_made() -> None:
    methods = [
        *runs.specs(table1.OWN),
        *runs.specs(table1.LONGER),
        *runs.specs(list(ablation.NAMES.values())),
        *runs.specs(list(turns.NAMES.values())),
        *sweeps.methods_of(runs.SWEPT_KEPT).values(),
        *sweeps.methods_of(runs.SWEPT_CHAIN).values(),
        *runs.specs([text.format(value) for _, _, text, values in fidelity.CURVES for value in values]),
    ]
    for spec in methods:
        method = read_method(spec)
        assert method.spec == spec and (method.make() is not None or spec == "full")
    assert len(sweeps.methods_of(runs.SWEPT_KEPT)) + len(sweeps.methods_of(runs.SWEPT_CHAIN)) == sum(
        len(values) for *_, values in sweeps.CURVES
    ), "two curves of a panel have the same name"
    assert {panel for panel, *_ in sweeps.CURVES} == set(sweeps.TITLES)
    assert {panel for panel, *_ in fidelity.CURVES} == set(fidelity.TITLES)


def test_pieces_of_a_dialogue_are_its_tokens_and_the_facts_that_it_needs() -> None:
    facts = [fact for number in range(3) for fact in figure8.chain(figure8.turns_at("end", 3, 160), number)]
    assert len(set(facts)) == 6
    for place in POSITIONS:
        marked = 0
        for turn in figure8.turns_at(place, 3, 160):
            words, parts = turn.text.split(), figure8.pieces(turn, facts)
            kinds = [kind for kind, tokens in parts for _ in range(tokens)]
            assert len(kinds) == len(words) + len(turn.answers[0].split())
            assert kinds[words.index("ask")] == kinds[words.index("ask") + 4] == figure8.QUESTION
            assert kinds.count(figure8.QUESTION) == 5 and kinds[len(words) :] == [figure8.ANSWER] * 6
            marked += kinds.count(figure8.NEEDED)
        assert marked == 6 * 5, "a fact has five words, and is said once"


def test_questions_for_the_default_hold_the_right_history() -> None:
    for where, (count, turns_, tokens) in default.SIZES.items():
        asked = default.asked(where)
        assert len(asked) == 3 * count and all(answer.endswith(".") for _, answer in asked)
        assert {len(prompt.split()) for prompt, _ in asked} == {turns_ * tokens + 3 * (turns_ - 1)}
    first = recall_dialogue(default.FIRST, turns=3, tokens=600, hops=1, position="begin").turns
    begun = f"{first[0].text} {first[0].answers[0]} {first[1].text} {first[1].answers[0]} "
    assert default.asked(default.THIRD)[0] == (begun + first[2].text, first[2].answers[0])


def test_the_suites_are_what_their_rules_say() -> None:
    target = Target.of(ss.load("recall", backend="hf", probe=False))
    for suite in (runs.KEPT, runs.CHAIN, runs.LONG, runs.SWEPT_KEPT, runs.SWEPT_CHAIN, runs.NINE, runs.NINE_CHAIN):
        prompts, task = suite.task.prompts(target), suite.task
        assert len(prompts) == 3 * task.count and {len(prompt.turns) for prompt in prompts} == {task.turns}
        shortest = min(len(turn.text.split()) for prompt in prompts for turn in prompt.turns)
        assert shortest >= task.least and runs.SHARE * task.least > 32
        if task.hops > 1:
            assert 3 * task.hops > 16 + 1, "LoopServe's first 16 steps would be the whole answer"
    assert runs.LONG.task.least > 4096 + 128, "Table 7's windows would cover everything"


def test_means_of_fidelity() -> None:
    steps = {"kl": (0.0, 1.0, 2.0, 5.0), "agree": (1.0, 1.0, 0.0, 0.0), "kept": (0.5, 0.7, 0.9)}
    near = made_record("tova", "a", tokens=(1, 2, 3, 4), steps=steps, metrics={"cells": 0.25})
    other = replace(near, prompt="b", steps={**steps, "kl": (0.0, 0.0, 0.0, 4.0)})
    row = fidelity.row_of([near, other, replace(near, method="h2o")], "tova")
    assert (row["answers"], row["tokens"], row["kl"], row["late"]) == (2, 8, 1.5, 2.75)
    assert row["kl_by_answer"] == [2.0, 1.0] and row["agree"] == 0.5 and row["kept"] == pytest.approx(0.7)
    assert row["cells"] == 0.25


def test_the_page_has_every_part_of_the_paper() -> None:
    text = (ROOT / "docs/papers/loopserve.md").read_text(encoding="utf-8")
    first = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    parts = " ".join(first)
    for name, numbers in (
        ("Obs.", range(1, 5)),
        ("Algorithm", range(1, 7)),
        ("Table", range(1, 9)),
        ("Fig.", range(1, 14)),
    ):
        for number in numbers:
            assert re.search(rf"{re.escape(name)} {number}\b", parts), (name, number)
    assert "Theorem 1" in parts


def test_longeval_s_table_is_what_was_measured_and_holds_nothing_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [
        {
            "prompt": "Remember these lines.\n"
            + "".join(f"line {i}{n}: REGISTER_CONTENT is <{10 * n + i}>\n" for i in range(8))
            + "\nNow the record is over. What is in line 3?",
            "expected_number": 10 * n + 3,
        }
        for n in range(3)
    ]
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    made = longeval.measure(None, "lines", file, count=2, length=64, new=8)
    weights = ss.line_weights(None, [row["prompt"] for row in prompts[:2]], length=64)
    assert weights.etas[1] == 0.1
    for name in ("mass", "inputs_random", "segments"):
        assert made["shown"][name] == pytest.approx(weights.mean(name)[1], abs=1e-6)
    tokens = made["tokens"]
    assert [each["position"] for each in tokens["positions"]] == ["begin", "middle", "end"]
    assert made["shown"]["end"] == tokens["positions"][2]["overlap"][1] == made["shown"]["last"]
    assert "REGISTER" not in json.dumps(made)
    rows = longeval.table([made]).splitlines()
    assert len(rows) == 2 + len(longeval.ROWS) and rows[2].endswith(f"| {weights.mean('mass')[1]:.0%} |")


def test_the_page_shows_the_committed_numbers() -> None:
    page = (ROOT / "docs/papers/loopserve.md").read_text(encoding="utf-8")
    record = json.loads((ROOT / "figures/loopserve_longeval.json").read_text(encoding="utf-8"))
    assert longeval.rewritten(page, longeval.table(record["result"]["sources"])) == page
    assert longeval.rewritten("a " + " b ".join(longeval.MARKS) + " c", "new").count("new") == 1
    assert set(record["settings"]["files"]) == {"5_topics.jsonl", "200_lines.jsonl"}
