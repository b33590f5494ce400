"""The adapter of a model: proposed by names once per configuration, and proved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sinkscope.errors import UnsupportedError
from sinkscope.models.adapters import Adapter, Found, row_of, shown_row
from sinkscope.models.loading.config import cpu_by_default, first_line
from sinkscope.models.modules.stack import DRAFT, layer_kinds
from sinkscope.models.passes.positions import check_positions
from sinkscope.models.target import Target
from sinkscope.opening.inference.probe import probe
from sinkscope.opening.inference.propose import propose
from sinkscope.opening.inference.sample import sample_of
from sinkscope.opening.inference.sums import layer_sums


@dataclass(frozen=True)
class _Known:
    """The adapter of a configuration, with what was refused, and the row that it was; None if names proposed it."""

    row: Adapter | None
    adapter: Found


_KNOWN: dict[tuple[type, str], _Known] = {}  # by the class and the configuration of the model


@cpu_by_default()
def adapter_of(target: Target, *, proves: bool = True) -> Found:
    """The adapter of a model: its row if there is one, or else what its names propose, once per configuration.

    Sites that cannot be proved in the first layer of each kind are noted in it. A model whose modules are wrapped or
    quantised, or that holds no weights, is not called itself: a small one of its configuration is.

    Args:
        target: The model; its own adapter is not read.
        proves: Whether what is proposed is proved at once, in the first layers.

    Raises:
        UnsupportedError: Nothing is proposed, or the probe refuses it.
    """
    hf = target.hf
    key, row = _key(hf), row_of(hf.config.model_type)
    known = _KNOWN.get(key)
    if known is not None and known.row is row:
        return known.adapter
    is_split = target.shards.size > 1
    if is_split or target.is_elsewhere or target.kind == "bridge" or getattr(hf, "is_quantized", False):
        sample = sample_of(hf)
        target = Target(sample, sample, "hf", DRAFT)
    with evaluating(target.hf):
        adapter = propose(target.hf, row)
        numbers = layer_kinds(Target(hf, hf, "hf", adapter))
        adapter = replace(adapter, rows=tuple(adapter.rows[number] for number in numbers if adapter.rows))
        target = replace(target, adapter=adapter)
        check_positions(target)
        adapter = _with_sites(target, numbers)
        _KNOWN[key] = _Known(row, adapter)
        if proves and row is None:
            prove(replace(target, adapter=adapter), every_layer=False)
    return adapter


@contextmanager
def evaluating(hf: nn.Module) -> Iterator[None]:
    """Context manager in which no dropout acts; afterwards every module has the mode it had."""
    training = [module for module in hf.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def _with_sites(target: Target, numbers: list[int]) -> Found:
    """The adapter with the sites that cannot be proved; layers of a kind share what was found in the first of it."""
    try:
        found = {sums.layer: sums.problems for sums in layer_sums(target, sorted(set(numbers)))}
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the model does not run so; the probe says more
        return replace(target.adapter, unproved=(("*", f"a pass raised {type(error).__name__}: {first_line(error)}"),))
    noted = dict[str, str]()
    for layer, number in enumerate(numbers):
        for part, problem in found[number].items():
            noted[f"blocks.{layer}.{part}"] = problem
    return _noted(target.adapter, noted)


def _noted(adapter: Found, problems: dict[str, str]) -> Found:
    """The adapter with the sites that cannot be proved; the same object if it has them already."""
    unproved = tuple(sorted(problems.items()))
    if unproved == adapter.unproved:
        return adapter
    return replace(adapter, unproved=unproved)


@cpu_by_default()
def prove(target: Target, *, every_layer: bool = True) -> None:
    """Raise if `probe` finds a problem. Models with weights on meta are skipped.

    Raises:
        UnsupportedError: There is a problem; the message says what, and what to try.
    """
    if target.is_elsewhere or target.shards.size > 1:  # the small model of its configuration was proved
        return
    report = probe(target, every_layer=every_layer)
    problem, adapter, key = report.problem, target.adapter, _key(target.hf)
    if problem is None:
        if every_layer and target.resident:
            adapter = _noted(adapter, report.unproved)
            _KNOWN[key] = _Known(row_of(target.hf.config.model_type), adapter)
        return
    known = _KNOWN.pop(key, None)
    if known is not None and known.row is None and target.kind == "hf":
        raise UnsupportedError(
            f"model type {adapter.model_type!r} has no row, and the one that its names propose is refused: {problem}; "
            f"change what is wrong and register it: sinkscope.models.adapters.register({shown_row(adapter)})",
            page="unsupported-model",
        )
    other = 'try backend="hf", or '
    if target.kind == "hf":
        other = ""
    raise UnsupportedError(
        f"the load-time probe of this {target.config.model_type} model failed ({target.kind}): {problem}; "
        f"{other}report it with the model's name; probe=False loads it all the same",
        page="probe-failed",
    )


def _key(hf: Any) -> tuple[type, str]:
    """What models of one class and configuration have in common."""
    config = hf.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "architectures"):
        config.pop(name, None)
    return type(hf), str(sorted(config.items(), key=str))
