"""The adapter of a model: proposed by names once per configuration, and proved."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from sinkscope.errors import UnsupportedError
from sinkscope.models.adapters import DRAFT, PATHS, Adapter, Found, row_of, shown_row, stack_of
from sinkscope.models.checkpoints.config import cpu_by_default, cut_depth, first_line, new_model
from sinkscope.models.short_passes import token_ids
from sinkscope.models.target import Target, first_of_kinds, layer_kinds
from sinkscope.opening.inference.proof import attention_error
from sinkscope.opening.inference.propose import propose
from sinkscope.opening.inference.sums import layer_sums
from sinkscope.tap.internals import without_hooks


@dataclass
class ProbeReport:
    """What the probe found.

    Attributes:
        problem: What is wrong. None if nothing is.
        unproved: Why sites cannot be proved, by layer and the last part of their names.
    """

    problem: str | None = None
    unproved: dict[int, dict[str, str]] = field(default_factory=dict)


@torch.no_grad()
def probe(target: Target, *, every_layer: bool = True) -> ProbeReport:
    """Check on a few tokens that edits at the adapter's sites work as intended and attention is recomputed correctly.

    Args:
        target: The model, with an adapter. It is left unchanged.
        every_layer: Whether all layers are edited, and not only the first of each kind.

    Returns:
        What was found; `problem` says what is wrong. A wrong adapter does not raise an error.
    """
    tolerance = max(1e-3, 16 * torch.finfo(target.dtype).eps)
    if getattr(target.hf, "is_quantized", False):
        tolerance = max(tolerance, 0.2)
    report = ProbeReport()
    try:
        _check_paths(target)
        proved = layer_sums(target, list(range(target.n_layers)) if every_layer else first_of_kinds(target))
        report.unproved = {sums.layer: sums.problems for sums in proved}
        for sums in proved:
            if not all(error <= tolerance for error in sums.edits.errors):  # "not <=", so that NaN is wrong as well
                raise UnsupportedError("a moved neuron does not change the layer as the adapter says")
            if "hook_mlp_out" in sums.problems:
                reason = sums.problems["hook_mlp_out"]
                raise UnsupportedError(f"what the MLP gives is not added as the adapter says: {reason}")
        if not attention_error(target) <= tolerance:
            raise UnsupportedError("recomputed attention differs from the model's own")
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except UnsupportedError as wrong:
        report.problem = str(wrong)
    except Exception as error:
        report.problem = f"a forward pass raised {type(error).__name__}: {first_line(error)}"
    return report


def _check_paths(target: Target) -> None:
    """Refuse an adapter that names a part that no layer has."""
    adapter = target.adapter
    for name in PATHS:
        path = getattr(adapter, name)
        is_optional = path is None or (adapter.experts is not None and name in ("down", "up", "gate"))
        if not is_optional and not any(target.has_part(layer, name) for layer in range(target.n_layers)):
            raise UnsupportedError(f"the adapter names a module that is not there ({path!r} in no layer)")


_KNOWN: dict[tuple[type, Adapter | None, str], Found] = {}  # by the class, the row and the configuration of the model
_LOCK = threading.RLock()
_TOKENS = 64  # in the vocabulary of a small model
_LENGTH, AHEAD = (
    9,
    1e-4,
)  # tokens of a text, and the share of the largest logit by which one that is not read changes none
EXPECTED_MODEL = "give a decoder-only causal language model, such as llama-2-7b or gpt2"


@cpu_by_default()
def adapter_of(target: Target, *, proves: bool = True) -> Found:
    """Return the adapter of a model: its row if there is one, or else what its names propose, once per configuration.

    Sites that cannot be proved in the first layer of each kind are noted in it. A model whose modules are wrapped or
    quantised, or that holds no weights, is not called itself: a small one of its configuration is.

    Args:
        target: The model; its own adapter is not read.
        proves: Whether what is proposed is refused if the probe of the first layers finds a problem.

    Raises:
        UnsupportedError: Nothing is proposed, or the probe refuses it.
    """
    with _LOCK:  # another thread may be opening a model of the same configuration
        return _found(target, proves)


def _found(target: Target, proves: bool) -> Found:
    """What `adapter_of` returns."""
    hf = target.hf
    key, row = _key(hf), row_of(hf.config.model_type)
    if key in _KNOWN:
        return _KNOWN[key]
    if getattr(hf.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{target.name} ({type(hf).__name__}) is an encoder-decoder model: {EXPECTED_MODEL}")
    if getattr(hf.config, "alibi", False):
        raise UnsupportedError(f"{target.name} adds ALiBi to its masks, which is not served: use another model")
    if _is_elsewhere(target) or target.kind == "bridge" or getattr(hf, "is_quantized", False):
        sample = sample_of(hf)
        target = Target(sample, sample, "hf", DRAFT)
    elif target.kind == "hf" and target.resident:  # other threads go on with the model, and hooks on it are the user's
        with suppress(Exception):
            twin = without_hooks(hf)
            target = replace(target, model=twin, hf=twin)
    with evaluating(target.hf):
        adapter = propose(target.hf, row)
        numbers = layer_kinds(Target(hf, hf, "hf", adapter))
        adapter = replace(adapter, rows=tuple(adapter.rows[number] for number in numbers if adapter.rows))
        target = replace(target, adapter=adapter)
        firsts = layer_kinds(target)  # of the sample, which may have fewer kinds of layers than a quantised model
        report = probe(target, every_layer=False)
    if proves and row is None and report.problem is not None:
        raise _refusal(target, report.problem)
    if report.unproved:  # layers of a kind share what was found in the first of it
        adapter = _noted(adapter, {layer: report.unproved[firsts[number]] for layer, number in enumerate(numbers)})
    elif report.problem is not None:  # the model does not run so
        adapter = replace(adapter, unproved=(("*", report.problem),))
    _KNOWN[key] = adapter
    return adapter


def _is_elsewhere(target: Target) -> bool:
    """Whether weights are in other processes, or are brought for each call, but not read layer by layer."""
    has_meta = target.resident and any(parameter.is_meta for parameter in target.hf.parameters())
    return has_meta or target.processes > 1


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


@cpu_by_default()
def prove(target: Target) -> None:
    """Raise if `probe` finds a problem in any layer, and note the sites that cannot be proved.

    Models with weights elsewhere, or split over processes, are skipped: the small model of their configuration was
    proved.

    Raises:
        UnsupportedError: There is a problem; the message says what, and what to try.
    """
    if _is_elsewhere(target):
        return
    report = probe(target)
    if report.problem is not None:
        raise _refusal(target, report.problem)
    _KNOWN[_key(target.hf)] = _noted(target.adapter, report.unproved)


def _noted(adapter: Found, problems: dict[int, dict[str, str]]) -> Found:
    """The adapter with the sites that cannot be proved, and why, by layer and the last part of their names."""
    unproved = list[tuple[str, str]]()
    for layer, reasons in problems.items():
        unproved += [(f"blocks.{layer}.{part}", reason) for part, reason in reasons.items()]
    return replace(adapter, unproved=tuple(sorted(unproved)))


def _refusal(target: Target, problem: str) -> UnsupportedError:
    """The error for an adapter that the probe refuses; it is forgotten."""
    adapter = target.adapter
    _KNOWN.pop(_key(target.hf), None)
    if reads_ahead(target):
        return UnsupportedError(
            f"{target.name} is not causal, because later tokens change what it reads: {EXPECTED_MODEL}"
        )
    return UnsupportedError(
        f"model type {adapter.model_type!r} has a row, proposed by names or registered, that is refused: {problem}; "
        f"change what is wrong and register it: sinkscope.models.adapters.register({shown_row(adapter)})"
    )


@torch.no_grad()
def reads_ahead(target: Target) -> bool:
    """Return whether another last token changes the logits of the first; False of a model that cannot be run so."""
    ids = token_ids(target, _LENGTH)
    other = ids.clone()
    other[:, -1] = ids[:, 0]
    with suppress(Exception):
        first, changed = (target.hf(tokens).logits[:, 0].float() for tokens in (ids, other))
        return bool((first - changed).abs().max() > AHEAD * first.abs().max())
    return False


def _key(hf: Any) -> tuple[type, Adapter | None, str]:
    """What models of one class, row and configuration have in common."""
    config = hf.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "architectures"):
        config.pop(name, None)
    return type(hf), row_of(hf.config.model_type), str(sorted(config.items(), key=str))


def sample_of(hf: Any) -> Any:
    """Return a random model of a configuration, in float32: the first layer of each kind and those before it."""
    config = copy.deepcopy(hf.config)
    config.distributed_config = None  # it is whole in every process
    text = config.get_text_config()
    kinds = first_of_kinds(Target(hf, hf, "hf", replace(DRAFT, layers=stack_of(hf))))
    cut_depth(text, max(*kinds, 1) + 1)  # at least two
    text.vocab_size, text.pad_token_id = _TOKENS, 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return new_model(config).float().eval().requires_grad_(False)
