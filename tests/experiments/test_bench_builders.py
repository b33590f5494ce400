"""Prompts built from LongBench's files, and honest texts."""

from __future__ import annotations

import zipfile

import pytest
from refusals import refused
from repository import ROOT

from experiments.longbench import LongBenchRecord, read_longbench
from experiments.loopbench import build as loop_build
from experiments.loopserve import build as serve_build

NEWS = ROOT / "experiments/loopbench/news.jsonl"


def records(count: int) -> list[LongBenchRecord]:
    text = "Paper {}.\nIt was written in the year {}.\nIt has {} pages.\nNobody read it twice."
    years = range(1900, 1900 + count)
    return [LongBenchRecord("", text.format(y, y, y - 1897), "When was it written?", (str(y),), ()) for y in years]


def test_longbench_files_are_read_and_lines_are_named(tmp_path):
    found = read_longbench("multi_news", NEWS)
    assert len(found) == 12 and found[0].context and not found[0].answers
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(NEWS, "data/multi_news.jsonl")
    assert read_longbench("multi_news", tmp_path / "data.zip") == found
    (tmp_path / "x.jsonl").write_text('{"_id": "a"}\n')
    with refused("line 1 has no 'context'"):
        read_longbench("multi_news", tmp_path / "x.jsonl")


@pytest.mark.parametrize(("bench", "source"), [("dc", NEWS), ("ri", NEWS.with_name("stories.jsonl"))])
def test_loopbench_prompts_reach_the_mean_and_repeat(bench, source):
    def made():
        words = lambda text, **_: {"input_ids": text.split()}  # noqa: E731
        return loop_build.build(bench, read_longbench("", source), words, 20, 260, 0)

    rows, sign = made(), {"dc": loop_build.DC_TAIL.strip(), "ri": loop_build.DRAFT}[bench]
    assert len({row["id"] for row in rows}) == 20 and rows == made()
    assert sum(len(row["prompt"].split()) for row in rows) / 20 == pytest.approx(260, rel=0.03)
    assert all(row["set"] == bench and row["prompt"].rstrip().endswith(sign) for row in rows)


def test_algorithm_1_loses_no_answer():
    for dialogue in serve_build.build("qasper", records(40), count=60):
        said = ""
        for prompts, answers in dialogue:
            said += prompts["end"]
            assert f"in the year {answers[0]}." in said


def test_algorithm_3_asks_held_out_examples():
    context = "\n".join(f"Question: what is {i}?\nType: T{i % 3}" for i in range(12))
    record = LongBenchRecord("a", context, "Question: what is x?\nType:", ("T1",), ("T0", "T1", "T2", "T9"))
    (built,) = serve_build.build("trec", [record], turns=3)
    assert len({prompts["end"].splitlines()[-2] for prompts, _ in built}) == 3
    rows = serve_build.rows_of("trec", [built], serve_build.classes_of([record]))
    assert [row["part"] for row in rows] == ["begin", "middle", "end"]
    assert sorted(rows[0]["turns"][0]["answers"]) == ["T0", "T1", "T2", "T9"]
    with refused("no record of trec has the 40 examples"):
        serve_build.build("trec", [record], turns=20)
