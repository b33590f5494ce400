"""All results of a folder on one page: markup in files is text, and damaged files are named."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from sample_results import sample_find_sinks, with_writers, writer

import sinkscope as ss
from sinkscope import loops
from sinkscope.bench.benchmark import run as run_bench
from sinkscope.bench.table import bench_table
from sinkscope.files.plain import visible
from sinkscope.opening.load import load
from sinkscope.results.notation import Neuron
from sinkscope.sinks.spikes.tables import Role

WORSE = "<img src=x onerror=alert(1)>&lt;</script><script>alert(2)</script><!--<script>\u2028"


def fill(folder: Path, text: str) -> Path:
    """Results of two forms, with `text` wherever a tokenizer or a file could have put it."""
    found = sample_find_sinks(settings={text: text, "list": [text]})
    neurons = [Neuron(9, None, number) for number in range(30)]
    many = with_writers(found.spikes[0], *(writer(neuron, 0.1, 0.9, Role.LOWERS) for neuron in neurons))
    model = replace(found.model, name=text.replace("/", ""), family=text, fingerprint=text)
    made = replace(found.provenance, argv=("sinkscope", text))
    replace(found, model=model, spikes=(many,), provenance=made).save(folder / "below/sinks.json")
    # The loop is prose, whatever the text is: of markup, fewer are loops.
    loops.check([f"{text} " + "and the same again here " * 300, text], name=text).save(folder / "loops.json")
    return folder


class Reader(HTMLParser):
    """What a browser makes of a page: its tags with the names of their attributes, and what is read."""

    def __init__(self, page: Path):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]):
        self.tags.append((tag, [name for name, _ in attrs]))

    def handle_data(self, data: str):
        self.text += "" if self.cdata_elem == "script" else data


def report_of(folder: Path) -> Reader:
    ss.report(folder)
    return Reader(folder / "report.html")


def test_markup_from_files_is_text_and_nothing_is_fetched(tmp_path):
    attacked, plain = report_of(fill(tmp_path / "a", WORSE)), report_of(fill(tmp_path / "b", "wo/rd"))
    assert attacked.tags == plain.tags
    assert attacked.text.count(visible(WORSE)) > 10
    assert "content=\"default-src 'none'; " in (tmp_path / "a/report.html").read_text().replace("&#39;", "'")


def test_damaged_and_foreign_files_are_left_out_and_listed(tmp_path, typed):
    folder, page = fill(tmp_path / "results", WORSE), tmp_path / "new/all.html"
    whole = json.loads((folder / "below/sinks.json").read_text())
    empty = {"of": "x", "first": "x", "results": []}
    strange = f"{WORSE[:28]}\n\x1b[2J.json"
    damaged = {
        "foreign.json": ('{"a": 1}', "is not a result of sinkscope: expected an object with schema, kind and result"),
        "failing.json": (json.dumps(whole | {"kind": "compare", "result": empty}), "it failed (IndexError: "),
        strange: ("{", "is not a JSON file"),
    }
    for name, (content, _) in damaged.items():
        (folder / name).write_text(content)
    (folder / "notes.txt").write_text("not JSON")
    (folder / ".hidden.json").write_text("{")
    assert typed(f"report {folder} --out {page}").out == f"{page}: 2 results, 3 left out\n"
    shown = re.findall(r"<h2>.*? <small>(.*?)</small></h2>", page.read_text())
    assert sorted(shown) == ["below/sinks.json", "loops.json"]
    left = Reader(page).text.rpartition("3 files left out")[2].replace("\n", "")
    for name, (_, reason) in damaged.items():
        assert visible(name).replace("\n", "") in left and reason in left


def test_folders_of_runs_are_their_tables(tmp_path):
    talks, near = tmp_path / "talks", tmp_path / "below/near"
    run_bench(load("recall"), "recall:samples=1:turns=1:lengths=200:hops=1", ["full"], out=talks, max_new_tokens=4)
    shutil.copytree(talks, near)
    settings = json.loads((near / "settings.json").read_text())
    (near / "settings.json").write_text(json.dumps({**settings, "command": "scan"}))
    text = report_of(tmp_path).text
    assert bench_table([str(talks)]).conclusion() in text
    assert "below/near: near is no folder of `sinkscope bench`: give what --out was given" in text
