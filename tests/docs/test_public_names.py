"""Every public name stands on a page of functions, says what it is, and is suggested where it is misspelt."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

import pytest
import torch
from organisms.tiny import tiny_model
from repository import ROOT

import sinkscope as ss
from sinkscope import bench, kv, loops, sparse
from sinkscope.app.commands import COMMANDS
from sinkscope.engine.attention import AttentionRows
from sinkscope.measure import Measurement
from sinkscope.opening.load import target_of

PAGES = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "docs/api").glob("*.md")}
MODULES = [ss, *(import_module(f"sinkscope.{room}") for room in ss.ROOMS)]
PUBLIC: dict[str, Any] = {}
for module in MODULES:
    for public_name in module.__all__:
        PUBLIC[f"{module.__name__}.{public_name}"] = getattr(module, public_name)


def documented() -> list[Any]:
    """What the pages of functions show: objects by their paths, and all members of modules."""
    found: list[Any] = []
    for path in re.findall(r"^::: (\S+)$", "\n".join(PAGES.values()), flags=re.M):
        holder, _, name = path.rpartition(".")
        shown = getattr(import_module(holder), name)
        found.append(shown)
        if inspect.ismodule(shown):
            found += vars(shown).values()
    for section in re.findall(r"^<!-- measurements: (.+) -->$", "\n".join(PAGES.values()), flags=re.M):
        for command in COMMANDS.values():
            if command.section == section:
                found.append(command.load())
    return found


def test_every_public_name_stands_on_a_page_of_functions():
    shown = documented()
    absent: list[str] = []
    for name, value in PUBLIC.items():
        if not inspect.ismodule(value) and not any(value is other for other in shown):
            absent.append(name)
    assert absent == [], "write `::: ` and the path of each of these on a page in docs/api"


def test_what_is_public_says_what_it_is():
    silent: list[str] = []
    for name, value in PUBLIC.items():
        is_wrapper = type(value).__name__ == "_lru_cache_wrapper"
        if is_wrapper or (inspect.isclass(value) and value.__repr__ is object.__repr__):
            silent.append(name)
    assert silent == [], "give each of these a `__repr__` that says what it is"


def test_what_holds_modules_or_tensors_is_one_line():
    model = tiny_model("llama")[0]
    seen: list[AttentionRows] = []
    with kv.Observe(seen.append).on(model), torch.no_grad():
        model(torch.tensor([[1, 5, 6, 7]]))
    assert repr(seen[0]) == "AttentionRows(layer=0, first=0, probs=[1, 4, 4, 4])"
    assert repr(target_of(model)) == "Target(name='LlamaForCausalLM', kind='hf', hf=LlamaForCausalLM)"
    monitor = loops.Monitor()
    monitor.update(3)
    assert repr(monitor) == "Monitor(MonitorSettings, step=1, trigger=False)"
    assert repr(loops.Watch()) == "Watch(open=0, checked=0, problems=0)"
    scores = sparse.Scores(torch.zeros(2, 8, 4), torch.zeros(1, 8, 4), 0.5)
    assert repr(scores) == "Scores(query=[2, 8, 4], key=[1, 8, 4], scaling=0.5)"
    lines = sparse.Lines.of(torch.ones(2, 8, dtype=torch.bool), torch.zeros(2, 8, dtype=torch.bool), 8)
    assert repr(lines).startswith("Lines(columns=16, offsets=0, ")


@pytest.mark.parametrize(
    ("module", "name", "near"),
    [
        (ss, "find_sink", "find_sinks"),
        (kv, "Streaming", "StreamingLLM"),
        (kv, "snapkv", "SnapKV"),
        (loops, "chek", "check"),
        (bench, "bench_tabel", "bench_table"),
        (sparse, "Line", "Lines"),
        (ss.measure, "Results", "Result"),
    ],
)
def test_a_misspelt_name_of_a_public_module_suggests_the_nearest(module, name, near):
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'; did you mean {near}\\?$"):
        getattr(module, name)


def test_a_public_measurement_is_named_by_its_command():
    for name, value in PUBLIC.items():
        if isinstance(value, Measurement):
            assert repr(value) == f"<measurement {name.rpartition('.')[2]}>"
