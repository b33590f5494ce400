"""Find the adapter of a model: where it keeps its parts.

1. An adapter is known if a model of the same class, row and configuration was opened before.
2. Otherwise a twin of the model is called, with its weights and without the user's hooks. If weights are quantised,
   wrapped, split or elsewhere, a small random model of the same configuration is called instead.
3. A table of names proposes where each kind of layer has its parts; a registered row says it (`inference.propose`).
4. If several modules have such names, sums of a pass tell which is right. They also measure constant factors
   (`inference.sums`).
5. Edits, sums and recomputed attention prove the adapter on the weights of the model (`inference.proof`). A wrong
   adapter is refused; a site that cannot be proved is noted, and refused when somebody asks for it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from sinkscope.engine.internals import without_hooks
from sinkscope.errors import UnsupportedError
from sinkscope.models.adapters import DRAFT, Adapter, Found, layer_kinds, row_of, shown_row, stack_of
from sinkscope.models.checkpoints.config import cpu_by_default, cut_depth, new_model
from sinkscope.models.hooks import without_autocast
from sinkscope.models.target import Target, longest_context
from sinkscope.opening.inference.proof import PROBED_TOKENS, probe
from sinkscope.opening.inference.propose import propose
from sinkscope.opening.inference.sums import token_ids


class ModelKey(NamedTuple):
    """What models have in common that share an adapter: their class, the row of their type, their configuration."""

    kind: type
    row: Adapter | None
    config: str


_KNOWN: dict[ModelKey, Found] = {}
_LOCK = threading.RLock()
_MODES = threading.Lock()
_EVALUATED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # how many hold a module that was training
_APART = ("_name_or_path", "transformers_version", "dtype", "architectures", "eos_token_id", "pad_token_id")
"""What two models may have of their own in a configuration, and keep their parts in the same places."""
_TOKENS = 64  # in the vocabulary of a small model
_LENGTH = 9  # tokens of a text
_AHEAD = 1e-4  # share of the largest logit by which an unread token may change logits
EXPECTED_MODEL = "give a decoder-only causal language model, such as llama-2-7b or gpt2"


@cpu_by_default()
def adapter_of(target: Target, *, proves: bool = True, every_layer: bool = False) -> Found:
    """Return the adapter of a model.

    Sites that cannot be proved are noted in it, by default in the first layer of each kind.

    Args:
        target: The model; its own adapter is not read.
        proves: Whether an adapter that names propose is refused if the probe finds a problem.
        every_layer: Whether all layers are probed, also those of an adapter that is known. A row of the user's own is
            then refused, too. Of weights that are elsewhere, or split over processes, this is left out.

    Raises:
        UnsupportedError: Nothing is proposed, or the probe refuses it.
    """
    # Another thread may be opening a model of the same configuration.
    with _LOCK, without_autocast(target.hf.device), without_autocast(torch.device("cpu")):
        key = _key(target.hf)
        is_known = key in _KNOWN
        # In other processes, or brought for each call (but not read layer by layer).
        is_elsewhere = target.is_offloaded or target.processes > 1
        # By modules that are not those of transformers with plain weights.
        is_wrapped = target.kind == "bridge" or bool(getattr(target.hf, "is_quantized", False))
        runs_itself = not is_elsewhere and not is_wrapped
        if not is_known:
            _KNOWN[key] = _inferred(target, proves, every_layer and runs_itself, runs_itself)
        if every_layer and (is_known or not runs_itself) and not is_elsewhere:
            target = replace(target, adapter=_KNOWN[key])
            report = probe(target)
            if report.problem is not None:
                raise _refusal(target, report.problem)
            _KNOWN[key] = _noted(target.adapter, report.unproved)
        return _KNOWN[key]


def _inferred(target: Target, proves: bool, every_layer: bool, runs_itself: bool) -> Found:
    """Steps 2 to 5: what `adapter_of` returns of a model that is not known."""
    hf = target.hf
    row = row_of(hf.config.model_type)
    if getattr(hf.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{target.name} ({type(hf).__name__}) is an encoder-decoder model: {EXPECTED_MODEL}")
    if getattr(hf.config, "alibi", False):
        raise UnsupportedError(f"{target.name} adds ALiBi to its masks, which is not served: use another model")
    if not runs_itself:
        sample = sample_of(hf)
        target = Target(sample, sample, "hf", DRAFT)
    elif target.kind == "hf" and target.resident:  # other threads go on with the model, and hooks on it are the user's
        with suppress(Exception):
            twin = without_hooks(hf)
            target = replace(target, model=twin, hf=twin)
    with evaluating(target.hf):
        _refuse_short_context(target)
        adapter = propose(target.hf, row)
        numbers = layer_kinds(hf.get_submodule(adapter.layers).children())
        adapter = replace(adapter, rows=tuple(adapter.rows[number] for number in numbers if adapter.rows))
        target = replace(target, adapter=adapter)
        firsts = layer_kinds(target.layers)  # of the sample, which may have fewer kinds than a quantised model
        report = probe(target, every_layer=every_layer)
    if report.problem is not None and (every_layer or (proves and row is None)):
        raise _refusal(target, report.problem)
    if report.unproved:  # layers of a kind share what was found in the first of it
        problems = dict[int, dict[str, str]]()
        for layer, number in enumerate(numbers):
            problems[layer] = report.unproved.get(layer, report.unproved[firsts[number]])
        return _noted(adapter, problems)
    if report.problem is not None:  # the model does not run so
        return replace(adapter, unproved=(("*", report.problem),))
    return adapter


@torch.no_grad()
def _refuse_short_context(target: Target) -> None:
    """Refuse a model that cannot read as many tokens as the probe, as one with few learned positions."""
    longest = longest_context(target.hf.config.get_text_config())
    if longest is None or longest >= PROBED_TOKENS:
        return
    try:
        target.hf(torch.zeros(1, PROBED_TOKENS, dtype=torch.long, device=target.hf.device))
    except IndexError:
        raise UnsupportedError(
            f"{target.name} has a context of {longest} tokens, and the probe of its parts reads {PROBED_TOKENS}: use "
            "a model with a longer context"
        ) from None


@contextmanager
def evaluating(hf: nn.Module) -> Iterator[None]:
    """Context manager in which no dropout acts; after the last that overlap, every module has the mode it had."""
    with _MODES:
        training = [module for module in hf.modules() if module.training or module in _EVALUATED]
        for module in training:
            _EVALUATED[module] = _EVALUATED.get(module, 0) + 1
            module.training = False
    try:
        yield
    finally:
        with _MODES:
            for module in training:
                _EVALUATED[module] -= 1
                if not _EVALUATED[module]:
                    del _EVALUATED[module]
                    module.training = True


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
        return bool((first - changed).abs().max() > _AHEAD * first.abs().max())
    return False


def _key(hf: Any) -> ModelKey:
    """The key of a model's adapter; names, types and versions in its configuration do not count."""
    config = hf.config.to_dict()
    for name in _APART:
        config.pop(name, None)
    return ModelKey(type(hf), row_of(hf.config.model_type), str(sorted(config.items(), key=str)))


def sample_of(hf: Any) -> Any:
    """Return a random model of a configuration, in float32: the first layer of each kind and those before it."""
    config = copy.deepcopy(hf.config)
    config.distributed_config = None  # it is whole in every process
    text = config.get_text_config()
    kinds = layer_kinds(hf.get_submodule(stack_of(hf)).children())
    cut_depth(text, max(*kinds, 1) + 1)  # at least two
    text.vocab_size, text.pad_token_id = _TOKENS, 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return new_model(config).float().eval().requires_grad_(False)
