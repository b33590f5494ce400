"""Find where a model keeps its parts.

1. A small random model of the same class is made. If the class makes none, or its modules have other names than those
   of the user's row, the user's own model stands in for it.
2. Names propose places, and sums say which of them are right (`opening.places`).
3. One pass over the small model proves them (`opening.proof`). A wrong adapter is refused; a site that cannot be proved
   is noted, and refused when somebody asks for it.
4. One pass over the user's own model confirms them. This holds for models of the same structure (`opening.structure`);
   where a function was replaced in the model, it holds for this object alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from sinkscope.errors import SinkscopeError, UnsupportedError, first_line
from sinkscope.models.adapters import (
    DRAFT,
    PATHS,
    Adapter,
    Found,
    NotInferredError,
    layer_kinds,
    layers_at,
    not_inferred,
    row_of,
    shown_row,
    stack_of,
)
from sinkscope.models.checkpoints.config import cpu_by_default
from sinkscope.models.hooks import forward_parameters, without_autocast
from sinkscope.models.modes import apart, evaluating
from sinkscope.models.target import Target, longest_context
from sinkscope.opening.places import proposed
from sinkscope.opening.proof import Proof, prove
from sinkscope.opening.sample import TOKENS, kinds_of, sample_of
from sinkscope.opening.structure import Structure, is_hooked, structure_of, without_hooks

EXPECTED_MODEL = "give a decoder-only causal language model, such as llama-2-7b or gpt2"
_APART = ("_name_or_path", "transformers_version", "dtype", "architectures", "eos_token_id", "pad_token_id")
"""What two models may have of their own in a configuration, and keep their parts in the same places."""
_LAYOUTS: tuple[Literal["beside", "by head"] | None, ...] = ("beside", "by head", None)
_AHEAD = 1e-4  # share of the largest logit by which an unread token may change logits
_LOCK = threading.RLock()


class _Kind(NamedTuple):
    """What decides where a class of models has its parts."""

    cls: type
    row: Adapter | None
    config: str


@dataclass(frozen=True)
class _Places:
    """Where a class of models has its parts, and what the proof on a small one says."""

    adapter: Found
    numbers: tuple[int, ...]
    proof: Proof


@dataclass(frozen=True)
class _OwnProof:
    """The proof of one object; its functions are kept, so that no later one gets the identity of one of them."""

    structure: str
    functions: tuple[Any, ...]
    proof: Proof


_PLACES: dict[_Kind, _Places] = {}
_PROVED: dict[tuple[_Kind, str], Proof] = {}
_OF_OBJECT: WeakKeyDictionary[nn.Module, _OwnProof] = WeakKeyDictionary()


@cpu_by_default()
def adapter_of(target: Target, *, proves: bool = True, every_layer: bool = False) -> Found:
    """Return the adapter of a model; sites that cannot be proved are noted in it.

    Args:
        target: The model; its own adapter is not read.
        proves: Whether an adapter that names propose is refused if the proof finds a problem.
        every_layer: Whether all layers are proved, and not only the first of each kind; a row of the user's own is then
            refused, too. Of weights that are elsewhere, only the first ones are.

    Raises:
        UnsupportedError: Nothing is proposed, or the proof refuses it.
    """
    hf, row = target.hf, row_of(target.hf.config.model_type)
    _refuse_kind(target)
    with _LOCK, without_autocast(hf.device), without_autocast(torch.device("cpu")):
        layers = layers_at(hf, stack_of(hf))
        structure = structure_of(hf, layers)
        kind = _Kind(type(hf), row, _settings(hf.config))
        _refuse_short_context(target)
        places = _places_of(kind, target, structure)
        adapter = places.adapter
        own = _own_proof(kind, target, adapter, structure, every_layer)
    problem = places.proof.problem or own.problem
    if problem is not None and (every_layer or (proves and row is None)):
        raise _refusal(target, adapter, problem, of_object=places.proof.problem is None)
    if problem is not None:  # the model does not run so
        return replace(adapter, unproved=(("*", problem),))
    return replace(adapter, unproved=_unproved(places, own, structure))


def _refuse_kind(target: Target) -> None:
    """Refuse models of another kind."""
    config = target.hf.config
    if getattr(config, "is_encoder_decoder", False):
        kind = type(target.hf).__name__
        raise UnsupportedError(f"{target.name} ({kind}) is an encoder-decoder model: {EXPECTED_MODEL}")
    if getattr(config, "alibi", False):
        raise UnsupportedError(f"{target.name} adds ALiBi to its masks, which is not served: use another model")


def _settings(config: Any) -> str:
    """A configuration in one text; names, types and versions do not count."""
    settings = config.to_dict()
    for name in _APART:
        settings.pop(name, None)
    return str(sorted(settings.items(), key=str))


# -- the class ---------------------------------------------------------------------------------------------------------


def _places_of(kind: _Kind, target: Target, structure: Structure) -> _Places:
    """Steps 1 to 3, of classes that are not known."""
    if kind not in _PLACES:
        hf = target.hf
        sample, numbers = None, kinds_of(hf)
        with suppress(Exception):  # a class may take no configuration alone, or not that of a changed model
            sample = sample_of(hf, numbers)
        if sample is not None and _has_row(sample, hf, kind.row):
            small = Target(sample, sample, "hf", DRAFT)
            _PLACES[kind] = _proposed_and_proved(small, numbers, kind.row)
        else:  # kept by the structure of the model that stands in
            own = _Kind(kind.cls, kind.row, kind.config + structure.text)
            if own not in _PLACES or structure.replaced:
                _PLACES[own] = _proposed_and_proved(target, list(structure.kinds), kind.row)
            return _PLACES[own]
    return _PLACES[kind]


def _has_row(sample: Any, hf: Any, row: Adapter | None) -> bool:
    """Whether a small model has the modules that a row names in the user's model."""
    if row is None:
        return True
    for name in PATHS:
        for path in filter(None, (getattr(row, name) or "").split("|")):
            here, there = (_has(layers_at(model, row.layers)[:1], path) for model in (sample, hf))
            if there and not here:
                return False
    return True


def _has(layers: Iterable[nn.Module], path: str) -> bool:
    for layer in layers:
        with suppress(AttributeError):
            layer.get_submodule(path)
            return True
    return False


def _proposed_and_proved(target: Target, numbers: list[int], row: Adapter | None) -> _Places:
    """Propose an adapter by a model, and prove it there.

    Raises:
        UnsupportedError: Some part was not found; the message says which, and shows the row to write.
    """
    hf = target.hf
    draft = replace(DRAFT, model_type=str(hf.config.model_type))
    try:
        if row is not None:
            draft = Found(**vars(row))
        stack = stack_of(hf)
        draft = replace(draft, base=base_path(hf, stack), layers=stack)
        with evaluating(hf):
            adapter = proposed(replace(target, adapter=draft), numbers, row)
            if row is not None:
                adapter = replace(adapter, **vars(row))
            own = adapter
            layers = layers_at(hf, stack)
            if adapter.rows and len(layers) < len(numbers):
                own = replace(adapter, rows=tuple(adapter.rows[number] for number in layer_kinds(layers)))
            proof = prove(replace(target, adapter=own), {*numbers})
            for layout in _LAYOUTS:  # where attention does not show what it gets, the proof says which one is right
                if adapter.fused_qkv is None or adapter.attention_interface or not _lacks_heads(proof):
                    break
                adapter, own = replace(adapter, qkv_layout=layout), replace(own, qkv_layout=layout)
                proof = prove(replace(target, adapter=own), {*numbers})
            return _Places(adapter, tuple(numbers), proof)
    except (MemoryError, torch.OutOfMemoryError, SinkscopeError):
        raise
    except Exception as error:  # a model may do anything in a pass
        if not isinstance(error, NotInferredError):
            error = NotInferredError(f"a pass raised {type(error).__name__}: {first_line(error)}")
        if row is not None:
            return _Places(draft, tuple(numbers), Proof(str(error)))
        raise not_inferred(draft, error) from None


def _lacks_heads(proof: Proof) -> bool:
    """Whether the queries of a layer were not found."""
    return any("attn.hook_q" in problems for problems in proof.unproved.values())


def base_path(model: Any, stack: str) -> str:
    """Return the path of the innermost module around the layers that takes token ids."""
    base = stack
    while base and "input_ids" not in forward_parameters(type(model.get_submodule(base))):
        base = base.rpartition(".")[0]
    return base


# -- the object --------------------------------------------------------------------------------------------------------


def _refuse_shared(target: Target) -> None:
    """Refuse a model in which a layer, or a part of it, stands at several places, so that an edit would act on all.

    Raises:
        UnsupportedError: It is such a model.
    """
    places: dict[int, int] = {}
    for number, layer in enumerate(target.layers):
        parts = {id(layer), *[id(target.sub(number, part)) for part in target.paths[number]]}
        for part in parts:
            first = places.setdefault(part, number)
            if first != number:
                raise UnsupportedError(
                    f"{target.name} has one module in layers {first} and {number}, so that what is said of one of them "
                    "would be of the other as well: put a copy (copy.deepcopy) at each place"
                )


_WEIGHTS = ("q", "k", "v", "fused_qkv", "o", "down", "up", "gate", "experts", "shared_gate")
"""Parts of a layer that hold weights themselves."""


def _refuse_renamed(adapter: Found, layers: Sequence[nn.Module], name: str) -> None:
    """Refuse a model in which a part of its class is missing while weights stand under a name that is not known.

    Raises:
        UnsupportedError: It is such a model; the message shows the row to write.
    """
    for number, layer in enumerate(layers):
        row = adapter.rows[number] if adapter.rows else adapter
        known, missing = list[str](), dict[str, Any]()
        for part in _WEIGHTS:
            there = [path for path in filter(None, (getattr(row, part) or "").split("|")) if _has([layer], path)]
            known += there
            if getattr(row, part) and not there:
                missing[part] = "..."
        if not missing or adapter.experts is not None or hasattr(layer, "original_component"):
            continue
        for path, module in layer.named_modules():
            is_linear = any(weight.ndim == 2 for weight in module.parameters(recurse=False))
            if is_linear and not any(f"{path}.".startswith(f"{one}.") for one in known):
                error = NotInferredError(f"layer {number} of {name} has no {', '.join(missing)}, but {path!r}")
                raise not_inferred(replace(adapter, **missing), error)


def _own_proof(kind: _Kind, target: Target, adapter: Found, structure: Structure, every_layer: bool) -> Proof:
    """Step 4: the proof of the user's own model."""
    if target.processes > 1:  # transformers itself splits plain modules, and each process has a part of the heads
        return Proof()
    hf, text = target.hf, structure.text
    known = _OF_OBJECT.get(hf)
    if not every_layer and not structure.replaced and (kind, text) in _PROVED:
        return _PROVED[kind, text]
    if not every_layer and known is not None and known.structure == text:
        return known.proof
    _refuse_renamed(adapter, layers_at(hf, adapter.layers), target.name)
    target = replace(target, adapter=adapter)
    _refuse_shared(target)
    layers = range(target.n_layers) if every_layer and not target.is_offloaded else structure.kinds
    if target.kind == "hf" and target.resident and is_hooked(hf):  # hooks on it are the user's
        with suppress(Exception):
            twin = without_hooks(hf)
            target = replace(target, model=twin, hf=twin)
    with evaluating(target.hf), apart():
        proof = Context().run(prove, target, layers)  # in which no policy of a block sees attention
    if structure.replaced:
        _OF_OBJECT[hf] = _OwnProof(text, structure.replaced, proof)
    else:
        _PROVED[kind, text] = proof
    return proof


def _unproved(places: _Places, own: Proof, structure: Structure) -> tuple[tuple[str, str], ...]:
    """Sites that cannot be proved, and why; layers of a kind share what was found in the first of it."""
    unproved: dict[str, str] = {}
    for layer, (number, made_as) in enumerate(zip(places.numbers, structure.kinds, strict=True)):
        for proof, first in ((places.proof, number), (own, made_as)):
            reasons = proof.unproved.get(layer, proof.unproved.get(first, {}))
            for part, reason in reasons.items():
                unproved.setdefault(f"blocks.{layer}.{part}", reason)
    return tuple(sorted(unproved.items()))


@torch.no_grad()
def _reads_ahead(target: Target) -> bool:
    """Whether another last token changes the logits of the first; False of a model that cannot be run so."""
    ids = torch.tensor([[2, 3, 4, 5], [2, 3, 4, 6]], device=target.hf.device)
    with suppress(Exception):
        first, changed = target.hf(ids).logits[:, 0].float()
        return bool((first - changed).abs().max() > _AHEAD * first.abs().max())
    return False


def _refusal(target: Target, adapter: Found, problem: str, *, of_object: bool) -> UnsupportedError:
    """The error for an adapter that the proof refuses, on a small model of the class or only on the object."""
    if _reads_ahead(target):
        return UnsupportedError(
            f"{target.name} is not causal, because later tokens change what it reads: {EXPECTED_MODEL}"
        )
    if of_object:
        return UnsupportedError(
            f"{target.name} does not compute what its class {type(target.hf).__name__} does: {problem}; measure it "
            "without what was replaced in it, or with the change in its weights and configuration"
        )
    return UnsupportedError(
        f"model type {adapter.model_type!r} has a row, proposed by names or registered, that is refused: {problem}; "
        f"change what is wrong and register it: sinkscope.models.adapters.register({shown_row(adapter)})"
    )


@torch.no_grad()
def _refuse_short_context(target: Target) -> None:
    """Refuse a model that cannot read as many tokens as the proof, as one with few learned positions."""
    longest = longest_context(target.hf.config.get_text_config())
    if longest is None or longest >= TOKENS:
        return
    try:
        target.hf(torch.zeros(1, TOKENS, dtype=torch.long, device=target.hf.device))
    except IndexError:
        raise UnsupportedError(
            f"{target.name} has a context of {longest} tokens, and the proof of its parts reads {TOKENS}: use a model "
            "with a longer context"
        ) from None
