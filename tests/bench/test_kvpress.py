"""Results in the layout of kvpress's evaluation: what it writes is read, and what is written here comes back."""

from __future__ import annotations

import ast
import csv
import json
import re
from pathlib import Path

import pytest
import yaml
from bench_kit import SETTINGS, made_record

from sinkscope.bench.prompt import Prompt, Turn
from sinkscope.bench.record import open_run
from sinkscope.bench.table import bench_table
from sinkscope.errors import SinkscopeError

CONFIG = """dataset: ruler
data_dir: '4096'
model: meta-llama/Llama
device: cpu
press_name: {press}
compression_ratio: {ratio}
key_channel_compression_ratio: null
fraction: 1.0
model_kwargs: {{}}
press_init_command: SnapKVPress(compression_ratio=0.75, window_size=64, kernel_size=5)
seed: 42
"""
# As kvpress writes it: columns in any order, and arrays of numpy.
ROWS = """compression_ratio,max_new_tokens,answer,predicted_answer,question,task
{ratio},8,['7213' '99'], it is 7213.,Which?,niah_multikey_1
{ratio},8,['7213' '99'],"7213, and
99",Which?,niah_multikey_1
{ratio},8,"['it\\'s' 'no']",yes,Which?,qa_1
{ratio},8,"[""a dog"" 'Cat']",the CAT sat,Which?,qa_1
"""


def results(home: Path, press: str, ratio: float) -> Path:
    folder = home / f"ruler__4096__meta-llama--Llama__{press}__{ratio:.2f}"
    folder.mkdir(parents=True)
    (folder / "predictions.csv").write_text(ROWS.format(ratio=ratio).replace("\\'", ""))
    (folder / "config.yaml").write_text(CONFIG.format(press=press, ratio=ratio))
    (folder / "metrics.json").write_text('{"niah_multikey_1": {"string_match": 75.0}, "qa_1": {"string_match": 50.0}}')
    return folder


def test_what_kvpress_wrote_is_scored_as_it_scores(tmp_path: Path):
    folder = results(tmp_path, "snapkv", 0.75)
    results(tmp_path, "no_press", 0.0)
    table = bench_table([tmp_path])
    full, snapkv = table.groups
    assert (full.method, snapkv.method, snapkv.set, snapkv.model) == (
        *("full", "snapkv:0.25", "4096", "meta-llama/Llama"),
    )
    of_kvpress = json.loads((folder / "metrics.json").read_text())
    assert {part: 100 * score for part, score in snapkv.parts.items()} == {
        part: each["string_match"] for part, each in of_kvpress.items()
    }
    assert (snapkv.score, snapkv.answers, snapkv.metrics["compression_ratio"]) == (0.625, 4, 0.75)
    assert table.conclusion().startswith("Task ruler 4096, score: snapkv:0.25 62% (")
    assert bench_table([folder]).groups == (snapkv,)


def test_what_is_written_is_the_same_table_when_it_is_read(tmp_path: Path):
    prompts, records = [], []
    for number in range(4):
        id, part = f"p{number}", "ab"[number % 2]
        prompts.append(Prompt(id, (Turn("which, of 'these'?", ("red", "it's")),), "s", part))
        for method, value in (("full", 1.0), ("h2o:0.25:recent=0.5", float(number == 1))):
            metrics = {"score": value, "prompt_tokens": 8}
            said = f'a\n"b", {id}'
            records.append(made_record(method, id, settings={"part": part}, metrics=metrics, text=said))
    with open_run(tmp_path / "run", SETTINGS, prompts) as folder:
        folder.append(records)
    written = bench_table([tmp_path / "run"], kvpress=tmp_path / "out")
    folder = tmp_path / "out/file__s__tiny__h2o-recent-0.5__0.75"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {folder.name, "file__s__tiny__no_press__0.00"}
    rows = list(csv.DictReader((folder / "predictions.csv").read_text().splitlines(keepends=True)))
    assert [row["predicted_answer"] for row in rows] == [f'a\n"b", p{number}' for number in range(4)]
    assert ast.literal_eval(rows[0]["answer"]) == ["red", "it's"]
    assert json.loads((folder / "metrics.json").read_text()) == {"a": {"score": 0.0}, "b": {"score": 50.0}}
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["press_name"], config["compression_ratio"], config["model"]) == ("h2o-recent=0.5", 0.75, "tiny")
    back = bench_table([tmp_path / "out"])
    assert [group.method for group in back.groups] == ["full", "h2o-recent=0.5:0.25"]
    for name in ("score", "low", "high", "parts", "answers"):
        assert [getattr(group, name) for group in written.groups] == [getattr(group, name) for group in back.groups]
    with pytest.raises(SinkscopeError, match=r"is there already: give another folder to --kvpress"):
        bench_table([tmp_path / "run"], kvpress=tmp_path / "out")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.yaml", "dataset: [", "cannot be read: "),
        ("config.yaml", "dataset: ruler\n", "is missing"),
        ("predictions.csv", "a,b\n1,2\n", "have no score in a row"),
        ("predictions.csv", "", "cannot be read: "),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, file: str, content: str, words: str):
    folder = results(tmp_path, "snapkv", 0.75)
    (folder / file).write_text(content)
    with pytest.raises(SinkscopeError, match=f"{re.escape(words)}.*give the results of kvpress's evaluation"):
        bench_table([folder])
