from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from report_kit import BAD, WORSE, Reader, files_shown, fill, made_report, read_report, spoil

from sinkscope.bench.benchmark import run as run_bench
from sinkscope.bench.table import bench_table
from sinkscope.files.plain import visible
from sinkscope.opening.load import load


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("filled") / "results"
    fill(folder, WORSE)
    return folder


@pytest.fixture
def folder(filled, tmp_path):
    return Path(shutil.copytree(filled, tmp_path / "results"))


@pytest.fixture(scope="module")
def whole(filled, tmp_path_factory):
    """The report of `folder`, for those who only read."""
    return made_report(shutil.copytree(filled, tmp_path_factory.mktemp("whole") / "results"))


@pytest.fixture(scope="module")
def seen(whole):
    """What a reader sees of it."""
    return read_report(whole)


def test_markup_from_files_is_text(seen, tmp_path):
    fill(tmp_path / "plain", "wo/rd")
    attacked, plain = seen, read_report(made_report(tmp_path / "plain"))
    assert attacked.tags == plain.tags
    assert {name for name, _ in attacked.attributes} == {name for name, _ in plain.attributes}
    assert not [value for name, value in attacked.attributes if name == "src"]
    assert attacked.text.count(visible(WORSE)) > 10


def test_nothing_is_fetched(seen):
    policy = next(value for name, value in seen.attributes if name == "content" and value and "default" in value)
    assert policy.startswith("default-src 'none'; ")
    addresses = [value or "" for name, value in seen.attributes if name in ("src", "href", "action", "srcset")]
    assert all(address.startswith("#") for address in addresses)


REASONS = {
    "cut.json": "is not a JSON file",
    "foreign.json": "is not a result of sinkscope: expected an object with schema, kind and result",
    "older.json": "has schema 1, and this version reads 6",
    "unknown.json": f"holds the unknown kind {BAD!r}",
    "uneven.json": "",
}


def test_damaged_and_foreign_files_are_left_out_and_listed(folder, tmp_path, typed):
    spoil(folder)
    page = tmp_path / "new/all.html"
    said = typed(f"report {folder} --out {page}")
    assert said.out == f"{page}: 4 results, 6 left out\n"
    text = read_report(page).text
    assert "6 files left out" in text and len(files_shown(page)) == 4
    left = text[text.rindex("6 files left out") :]
    for file, reason in REASONS.items():
        assert file in left and reason in left
    assert "img" not in Reader(page.read_text().rpartition("6 files left out")[2]).tags
    assert not (folder / "report.html").exists()


def test_folders_of_runs_are_their_tables(tmp_path):
    talks, near = tmp_path / "talks", tmp_path / "below/near"
    task = "recall:samples=1:turns=1:lengths=200:hops=1"
    run_bench(load("recall"), task, ["full"], out=talks, max_new_tokens=4)
    shutil.copytree(talks, near)
    settings = json.loads((near / "settings.json").read_text())
    (near / "settings.json").write_text(json.dumps({**settings, "command": "atlas"}))
    page = made_report(tmp_path)
    text = read_report(page).text
    assert files_shown(page) == ["talks"]
    assert "is no folder of `sinkscope bench`: give what --out was given" in text
    assert bench_table([str(talks)]).conclusion() in text
