"""The documentation says what is so: its Python runs, in order, page by page, with the model in the package."""

from __future__ import annotations

import json
import os
import re
import sys
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from covering import slow
from repository import ROOT, ran

import sinkscope
from sinkscope.files.envelope import kinds
from sinkscope.kv import registry
from sinkscope.results.result import Result
from tools import outputs

STRANGER = ROOT / "tests/fixtures/attention_entropy.py"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)

pytestmark = pytest.mark.few_texts


@cache
def found():
    """What `find_sinks()` says of the model in the package, for all pages."""
    return sinkscope.find_sinks()


def extends(kurtosis, NAMES, **_):
    """The numbers of its functions; the measurement that it shows is the one that other tests install."""
    shown = BLOCK.findall((ROOT / "docs/extending.md").read_text())
    of_normal = kurtosis(torch.randn(2, 3, 1000)).mean().item()
    return abs(of_normal - 3) < 0.3 and "thinker" in NAMES["mlp"] and STRANGER.read_text() in shown


@torch.no_grad()
def hides_the_second(model, ids, HideSecond, **_):
    """An edit as a stranger copies it from the page does what plain transformers does under a mask."""
    sees = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    sees[2:, 1] = sees[0, 1] = False
    hidden = model(ids, attention_mask=sees[None, None], use_cache=False).logits
    with HideSecond().on(model):
        torch.testing.assert_close(model(ids).logits, hidden, atol=1e-4, rtol=1e-4)
    return (hidden - model(ids).logits).abs().max() > 0.01


def takes_back(told, run, out, inputs, **_):
    """The first example takes back a loop; "stop" ends the row one token behind the alarm."""
    taken, stopped = told.events[0].data, run.events[0].data
    written = len(out[0]) - inputs.input_ids.shape[1]
    assert taken["taken_back"] > 0 and taken["kept_count"] < taken["cached_before"]
    return stopped["kept_count"] == stopped["cached_before"] and stopped["generated"] == written - 1


def reads_less(run, inputs, prefill, **_):
    """The prompt is sparse in some heads, and decoding reads less than all."""
    dense = [layer["dense_heads"] for layer in prefill]
    return max(dense) > 0 and min(dense) < 8 and run.usage[0].mean_read[0] < 0.5 * inputs.input_ids.shape[1]


HOLDS = {
    "docs/extending.md": extends,
    "docs/design.md": hides_the_second,
    "docs/measure/compare.md": lambda found, frame, **_: (
        len(found.results[0].moved) > 0 and {"row", "change", "change_margin"} <= set(frame.columns)
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
SLOW = {"docs/guard.md": takes_back, "docs/serve.md": reads_less}
LOOP = r"again: The bird said, \"I want to play with the bird.\""  # so that the loop begins with the first token
SHORTER = {
    "docs/measure/attack.md": {'ss.load("llama-2-7b")': "ss.load()", '"Sch", "Com"': '"the", "of"'},
    "docs/guard.md": {"max_new_tokens=150": "max_new_tokens=100", "again and again:": LOOP},
    "docs/serve.md": {"max_new_tokens=60": "max_new_tokens=48"},
}


@pytest.mark.parametrize(("page", "holds"), [*HOLDS.items(), *(slow(*case) for case in SLOW.items())])
def test_the_python_of_a_page_runs_and_does_what_it_says(page, holds, tmp_path, monkeypatch):
    """As one module, with shorter numbers where they are given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))  # pages register some of their own
    monkeypatch.setitem(vars(sinkscope), "find_sinks", found)
    module = ModuleType("page")  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, "page", module)
    text = (ROOT / page).read_text()
    for written, instead in SHORTER.get(page, {}).items():
        assert written in text
        text = text.replace(written, instead)
    for number, source in enumerate(BLOCK.findall(text)):
        exec(compile(source, f"{page} block {number}", "exec", dont_inherit=True), module.__dict__)
    assert holds(**module.__dict__)


MARKED = re.compile(r"((?:^<!-- (?:test|output): [^\n]*-->\n)*)^```(\w+)\n(.*?)^```", re.M | re.S)
WITH = re.compile(r'<!-- test: with "(.+?)" for "(.+?)", because ')


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_readme_from_top_to_bottom(tmp_path, monkeypatch):
    """Every block runs as written, in order, in an empty folder; its marks name the few exceptions and their reasons.

    Output that is shown is what the command prints.
    """
    monkeypatch.chdir(tmp_path)
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = partial(ran, folder=tmp_path, PATH=paths, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1")
    module = ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)
    for number, (marks, language, source) in enumerate(MARKED.findall((ROOT / "README.md").read_text()), 1):
        name = f"block {number} of the README"
        if "<!-- test: skipped, because " in marks:
            continue
        for there, written in WITH.findall(marks):  # what stands in for what tests do not have
            assert written in source, f"{written!r} is not in the block below its mark"
            source = source.replace(written, there)
        if language == "python":
            exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
        if language == "bash":
            done = shell(["bash", "-euo", "pipefail", "-c", source])
            assert done.returncode == 0, f"{name}:\n{source}\n{done.stderr[-2000:]}"
        for command in re.findall("<!-- output: (.+?) -->", marks):
            if outputs.REAL in command and outputs.REAL not in os.environ:
                continue
            missing = {*source.splitlines()} - {*shell(["bash", "-c", command]).stdout.splitlines(), "..."}
            assert not missing, f"{name}: {command} does not print {missing}"
    assert {"llama", "view.html", "sinks.json", "answer.txt", "answers"} <= {*os.listdir()}


@pytest.mark.parametrize("page", sorted((ROOT / "docs/measure").glob("*.md")), ids=lambda page: page.stem)
def test_a_conclusion_that_a_page_quotes_is_that_of_a_figure_that_it_shows(page):
    text = page.read_text()
    quoted = {" ".join(quote.replace("\n> ", " ").split()) for quote in re.findall(r"^> (.+(?:\n> .+)*)", text, re.M)}
    said: set[str] = set()
    for image in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text):
        file = (page.parent / image).with_suffix(".json")
        if json.loads(file.read_text())["kind"] in kinds():  # figures of scripts are no results
            result = Result.load(file)
            said |= {f"Conclusion: {result.conclusion()}", *result.details()}
    remedy = "python -m tools.figures makes figures again; then quote what their conclusions say now"
    assert quoted <= said, f"{page.name} quotes what is no longer said: {quoted - said}: {remedy}"
    assert bool(quoted) == bool(said), f"{page.name} shows a figure and quotes no conclusion of it"
