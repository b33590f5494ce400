"""The documentation says what is so: its Python runs, in order, page by page, with the model in the package."""

from __future__ import annotations

import json
import os
import re
import sys
from functools import cache, partial
from pkgutil import resolve_name
from types import ModuleType

import pytest
import torch
from repository import ROOT, ran
from torch.testing import assert_close

import sinkscope
from sinkscope.files.envelope import kinds
from sinkscope.kv import registry
from sinkscope.models import adapters
from sinkscope.results.result import Result
from tools import outputs

STRANGER = ROOT / "tests/fixtures/attention_entropy.py"
BUNDLED = ROOT / "sinkscope/models/bundled/model.safetensors"
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)

pytestmark = [
    pytest.mark.skipif(not BUNDLED.is_file(), reason="needs the model in the package"),
    pytest.mark.few_texts,
]


def blocks(page: str) -> list[str]:
    return _BLOCK.findall((ROOT / page).read_text())


@cache
def found():
    """What `find_sinks()` says of the model in the package, for all pages."""
    return sinkscope.find_sinks()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the Python of a page as one module, with `shorter` numbers where they are given; its names come back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))  # pages register policies of their own

    def running(page, shorter=None):
        module = ModuleType("page")  # dataclasses look their module up
        monkeypatch.setitem(sys.modules, "page", module)
        monkeypatch.setitem(vars(sinkscope), "find_sinks", found)
        for written in shorter or {}:
            assert any(written in source for source in blocks(page)), written
        for i, source in enumerate(blocks(page)):
            for written, instead in (shorter or {}).items():
                source = source.replace(written, instead)
            exec(compile(source, f"{page} block {i}", "exec", dont_inherit=True), module.__dict__)
        return module.__dict__

    return running


def test_the_examples_of_extending_are_short_and_do_what_the_page_says(run, monkeypatch):
    monkeypatch.setattr(adapters, "ADAPTERS", dict(adapters.ADAPTERS))  # the page registers one
    names = run("docs/extending.md")
    for source in blocks("docs/extending.md"):
        limit = 60 if "@measurement" in source else 20
        assert sum(bool(line.strip()) for line in source.splitlines()) <= limit
    assert any(
        source == STRANGER.read_text() for source in blocks("docs/extending.md")
    )  # the page shows what is tested
    assert names["kurtosis"](torch.randn(2, 3, 1000)).mean().item() == pytest.approx(
        3, abs=0.3
    )  # of a normal distribution
    assert names["row"].down == "mlp.c_proj"


def test_what_the_page_on_design_adds_to_a_step_is_what_plain_transformers_says(run):
    """An edit as a stranger copies it from the page."""
    names = run("docs/design.md")
    model, ids = names["model"], names["ids"]
    size = ids.shape[1]
    with torch.no_grad():
        whole = model(ids).logits
        sees = torch.ones(size, size, dtype=torch.bool).tril()
        sees[:, 1] = False
        sees[1, 1] = True
        hidden = model(ids, attention_mask=sees[None, None], use_cache=False).logits
        with names["HideSecond"]().on(model):
            assert_close(model(ids).logits, hidden, atol=1e-4, rtol=1e-4)
    assert (hidden - whole).abs().max() > 0.01


HOLDS = {
    "docs/measure/compare.md": lambda found, frame, **_: (
        len(found.results[0].moved) > 0 and {"name", "change", "change_margin"} <= set(frame.columns)
    ),
    "docs/policies.md": lambda usage, **_: usage.mean_held[0] < 0.6 * usage.read_tokens,
    "docs/check_cache.md": lambda result, **_: result.exit_code == 1 and "1 of 2 checks" in result.conclusion(),
    "docs/recall_model.md": lambda **_: True,
    "docs/measure/masks.md": lambda variance, norms, in_dims, **_: (
        variance[0] > 0.9 > 0.3 > variance[1] and norms[0] > 10 * norms[1] and in_dims[0] > 0.99 > 0.1 > in_dims[1]
    ),
    "docs/measure/attack.md": lambda **_: True,
    "docs/measure/barcode.md": lambda **_: True,
    "docs/kv.md": lambda to_first, **_: len(to_first) == 4,
    "docs/measure/training.md": lambda logged, trainer, **_: (
        [(row["step"], row["spike_layer"]) for row in logged] == [(0, 1), (2, 1), (4, 1)]
        and sum("loss" in row for row in trainer.state.log_history) == 4
    ),
}
SHORTER = {"docs/measure/attack.md": {'ss.load("llama-2-7b")': "ss.load()", '"Sch", "Com"': '"the", "of"'}}


@pytest.mark.parametrize(("page", "holds"), HOLDS.items())
def test_the_python_of_a_page_runs_and_does_what_it_says(run, page, holds):
    assert holds(**run(page, SHORTER.get(page)))


def test_the_page_of_the_cache_names_functions():
    rows = re.findall(r"^\| (\d) \| .+ \| `(.+)` \|$", (ROOT / "docs/kv.md").read_text(), re.M)
    assert [int(number) for number, _ in rows] == [*range(1, 9)]
    assert None not in [resolve_name(name) for _, name in rows]


@pytest.mark.slow
def test_the_guard_of_the_page_takes_back_a_loop_and_stop_only_ends_the_row(run):
    looping = r"again: The bird said, \"I want to play with the bird.\""  # so that the loop begins with the first token
    names = run("docs/guard.md", {"max_new_tokens=150": "max_new_tokens=100", "again and again:": looping})
    taken = names["told"].events[0].data
    assert taken["taken_back"] > 0 and taken["kept_count"] < taken["cached_before"]
    (event,) = names["run"].events  # of the last example, "stop"
    assert event.data["kept_count"] == event.data["cached_before"]
    assert event.data["generated"] == len(names["out"][0]) - names["inputs"].input_ids.shape[1] - 1


@pytest.mark.slow
def test_the_prompt_of_the_page_is_sparse_in_some_heads_and_reads_less_than_all(run):
    names = run("docs/serve.md", {"max_new_tokens=60": "max_new_tokens=48"})
    dense = [layer["dense_heads"] for layer in names["prefill"]]
    assert max(dense) > 0 and min(dense) < 8
    assert names["run"].usage[0].mean_read[0] < 0.5 * names["inputs"].input_ids.shape[1]


_MARKED = re.compile(r"((?:^<!-- (?:test|output): [^\n]*-->\n)*)^```(\w+)\n(.*?)^```", re.M | re.S)
_WITH = re.compile(r'<!-- test: with "(.+?)" for "(.+?)", because (.+?) -->')
_SKIPPED = re.compile(r"<!-- test: skipped, because (.+?) -->")
_OUTPUT = re.compile(r"<!-- output: (.+?) -->")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_readme_from_top_to_bottom(tmp_path, monkeypatch):
    """Every block runs as written, in order, in an empty folder; its marks name the few exceptions and their reasons.

    Output that is shown is what the command prints.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sinkscope").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sinkscope "$@"\n')
    (programs / "sinkscope").chmod(0o755)
    paths = f"{programs}{os.pathsep}{os.environ['PATH']}"
    shell = partial(ran, folder=tmp_path / "here", PATH=paths, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    module = ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)
    for number, (marks, language, source) in enumerate(_MARKED.findall((ROOT / "README.md").read_text()), 1):
        name = f"block {number} of the README"
        for there, written, _ in _WITH.findall(marks):  # what stands in for what tests do not have
            assert written in source, f"{written!r} is not in the block below its mark"
            source = source.replace(written, there)
        if _SKIPPED.search(marks):
            continue
        if language == "python":
            exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
        if language == "bash":
            done = shell(["bash", "-euo", "pipefail", "-c", source])
            assert done.returncode == 0, f"{name}:\n{source}\n{done.stderr[-2000:]}"
        for command in _OUTPUT.findall(marks):
            if outputs.REAL in command and outputs.REAL not in os.environ:
                continue
            done = shell(["bash", "-c", command])
            missing = {*source.splitlines()} - {*done.stdout.splitlines(), "..."}
            assert not missing, f"{name}: {command} does not print {missing}"
    assert {"llama", "sinkscope-demo", "report.html", "answers.html", "runs", "sinks.html"} <= {*os.listdir()}


_IMAGE = re.compile(r"!\[[^\]]+\]\(([^)]+)\)")


@pytest.mark.parametrize("page", sorted((ROOT / "docs/measure").glob("*.md")), ids=lambda page: page.stem)
def test_a_conclusion_that_a_page_quotes_is_that_of_a_figure_that_it_shows(page):
    text = page.read_text()
    quoted = [" ".join(quote.replace("\n> ", " ").split()) for quote in re.findall(r"^> (.+(?:\n> .+)*)", text, re.M)]
    files = [(page.parent / image[1]).with_suffix(".json") for image in _IMAGE.finditer(text)]
    results = [file for file in files if json.loads(file.read_text())["kind"] in kinds()]
    assert quoted or not results  # figures of scripts are no results and have no conclusion
    said: set[str] = set()
    for result in map(Result.load, results):
        said |= {f"Conclusion: {result.conclusion()}", *result.details()}
    assert {*quoted} <= said
