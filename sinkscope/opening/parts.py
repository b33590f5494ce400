"""Find where a model keeps its parts.

1. A small random model of the same class is made. If the class makes none, or its modules have other names than those
   of the user's row, the user's own model stands in for it.
2. Names propose places, and sums say which of them are right (`opening.places`).
3. One pass over the small model proves them (`opening.proof`). A wrong adapter is refused; a site that cannot be proved
   is noted, and refused when somebody asks for it.
4. One pass over the user's own model confirms them. This holds for models of the same structure: of
   modules of the same classes and sizes. Where a function was replaced in the model, which may compute anything, it
   holds for this object alone.
"""

from __future__ import annotations

import copy
import threading
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from sinkscope.errors import SinkscopeError, UnsupportedError, first_line
from sinkscope.models.adapters import (
    DRAFT,
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
from sinkscope.models.hooks import apart, evaluating, forward_parameters, has_hooks, without_autocast
from sinkscope.models.target import Target, parts_of
from sinkscope.opening.places import kinds_of, proposed, sample_of
from sinkscope.opening.proof import Proof, prove

EXPECTED_MODEL = "give a decoder-only causal language model, such as llama-2-7b or gpt2"
_APART = ("_name_or_path", "transformers_version", "dtype", "architectures", "eos_token_id", "pad_token_id")
"""What two models may have of their own in a configuration, and keep their parts in the same places."""
_AHEAD = 1e-4  # share of the largest logit by which an unread token may change logits
_LOCK = threading.RLock()


_WRAPPERS = ("nnsight", "sinkscope")
"""Packages whose functions in the place of a method call the module's own."""


@dataclass(frozen=True)
class Structure:
    """The structure of a model.

    Attributes:
        modules: What each module is.
        kinds: For each layer, the number of the first one that is made in the same way.
        is_own: Whether somebody put functions into modules of this object.
    """

    modules: tuple[Any, ...]
    kinds: tuple[int, ...]
    is_own: bool


@dataclass(frozen=True)
class _Places:
    """Where a class of models has its parts, and what the proof on a small one says."""

    adapter: Found
    numbers: tuple[int, ...]
    proof: Proof


Key = tuple[Any, ...]
"""A class, a row and a configuration, with or without a structure."""
_PLACES: dict[Key, _Places] = {}
_PROVED: dict[Key, Proof] = {}
_OF_OBJECTS: WeakKeyDictionary[nn.Module, dict[Key, Proof]] = WeakKeyDictionary()
"""Proofs of objects with functions of their own."""


@cpu_by_default()
def adapter_of(target: Target) -> Found:
    """Return the adapter of a model, whose own is not read; sites that cannot be proved are noted in it.

    Raises:
        UnsupportedError: Nothing is proposed, or the proof refuses it.
    """
    hf, row = target.hf, row_of(target.hf.config.model_type)
    if getattr(hf.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{target.name} ({type(hf).__name__}) is an encoder-decoder model: {EXPECTED_MODEL}")
    if getattr(hf.config, "alibi", False):
        raise UnsupportedError(f"{target.name} adds ALiBi to its masks, which is not served: use another model")
    settings = hf.config.to_dict()
    for name in _APART:
        settings.pop(name, None)
    key = type(hf), row, str(sorted(settings.items(), key=str))
    with _LOCK, without_autocast(hf.device), without_autocast(torch.device("cpu")):
        structure = structure_of(hf, layers_at(hf, stack_of(hf)))
        places = _places_of(key, target, structure)
        own = _own_proof(key, target, places, structure)
    problem = places.proof.problem or own.problem
    if problem is not None:
        raise _refusal(target, places, problem)
    return replace(places.adapter, unproved=_unproved(places, own, structure))


def _unproved(places: _Places, own: Proof, structure: Structure) -> tuple[tuple[str, str], ...]:
    """Sites that cannot be proved, and why; layers of a kind share what was found in the first of it."""
    unproved: dict[str, str] = {}
    for proof, firsts in ((own, structure.kinds), (places.proof, places.numbers)):
        for layer, first in enumerate(firsts):
            reasons = proof.unproved.get(layer, proof.unproved.get(first, {}))
            for part, reason in reasons.items():
                unproved[f"blocks.{layer}.{part}"] = reason
    return tuple(sorted(unproved.items()))


def _refusal(target: Target, places: _Places, problem: str) -> UnsupportedError:
    """The error for an adapter that the proof refuses, on a small model of the class or only on the object."""
    if _reads_ahead(target):
        return UnsupportedError(
            f"{target.name} is not causal, because later tokens change what it reads: {EXPECTED_MODEL}"
        )
    if places.proof.problem is None:
        return UnsupportedError(
            f"{target.name} does not compute what its class {type(target.hf).__name__} does: {problem}; measure it "
            "without what was replaced in it, or with the change in its weights and configuration"
        )
    return UnsupportedError(
        f"model type {places.adapter.model_type!r} has a row, proposed by names or registered, that is refused: "
        f"{problem}; change what is wrong and register it: "
        f"sinkscope.models.adapters.register({shown_row(places.adapter)})"
    )


@torch.no_grad()
def _reads_ahead(target: Target) -> bool:
    """Whether another last token changes the logits of the first; False of a model that cannot be run so."""
    ids = torch.tensor([[2, 3, 4, 5], [2, 3, 4, 6]], device=target.hf.device)
    with suppress(Exception):
        first, changed = target.hf(ids).logits[:, 0].float()
        return bool((first - changed).abs().max() > _AHEAD * first.abs().max())
    return False


# -- the class ---------------------------------------------------------------------------------------------------------


def _places_of(key: Key, target: Target, structure: Structure) -> _Places:
    """Steps 1 to 3, of classes that are not known."""
    if key in _PLACES:
        return _PLACES[key]
    hf, row = target.hf, key[1]
    numbers = kinds_of(hf)
    with suppress(Exception):  # a class may take no configuration alone, or not that of a changed model
        sample = sample_of(hf, numbers)
        whole, small = (parts_of(layers_at(model, row.layers)[0], row) if row else {} for model in (hf, sample))
        if small.keys() >= whole.keys():
            target = Target(sample, sample, "hf", DRAFT)
    if target.hf is hf:  # it stands in
        key, numbers = (*key, structure.modules), list(structure.kinds)
    if key in _PLACES:
        return _PLACES[key]
    places = _proposed_and_proved(target, numbers, row)
    if target.hf is not hf or not structure.is_own:  # functions of a user's are not kept alive
        _PLACES[key] = places
    return places


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
        draft = replace(draft, base=_base_path(hf, stack), layers=stack)
        with evaluating(hf):
            adapter = proposed(replace(target, adapter=draft), numbers, row)
            if row is not None:
                adapter = replace(adapter, **vars(row))
            own, layers = adapter, layers_at(hf, stack)
            if adapter.rows and len(layers) < len(numbers):
                own = replace(adapter, rows=tuple(adapter.rows[number] for number in layer_kinds(layers)))
            return _Places(adapter, tuple(numbers), prove(replace(target, adapter=own), {*numbers}))
    except (MemoryError, torch.OutOfMemoryError, SinkscopeError):
        raise
    except Exception as error:  # a model may do anything in a pass
        if not isinstance(error, NotInferredError):
            error = NotInferredError(f"a pass raised {type(error).__name__}: {first_line(error)}")
        if row is not None:
            return _Places(draft, tuple(numbers), Proof(str(error)))
        raise not_inferred(draft, error) from None


def _base_path(model: Any, stack: str) -> str:
    """Path of the innermost module around the layers that takes token ids."""
    base = stack
    while base and "input_ids" not in forward_parameters(type(model.get_submodule(base))):
        base = base.rpartition(".")[0]
    return base


# -- the object --------------------------------------------------------------------------------------------------------


def _own_proof(key: Key, target: Target, places: _Places, structure: Structure) -> Proof:
    """Step 4: the proof of the user's own model."""
    if target.processes > 1:  # transformers itself splits plain modules, and each process has a part of the heads
        return Proof()
    hf, key = target.hf, (*key, structure.modules)
    known = _OF_OBJECTS.setdefault(hf, {}) if structure.is_own else _PROVED
    if key in known:
        return known[key]
    target = replace(target, adapter=places.adapter)
    _refuse_shared(target)
    _refuse_renamed(target)
    if target.kind == "hf" and target.resident:
        with suppress(Exception):
            twin = without_hooks(hf)
            target = replace(target, model=twin, hf=twin)
    with evaluating(target.hf), apart():
        proof = Context().run(prove, target, structure.kinds)  # in which no policy of a block sees attention
    known[key] = proof
    return proof


def _refuse_shared(target: Target) -> None:
    """Refuse a model in which a layer, or a part of it, stands at several places, so that an edit would act on all.

    Raises:
        UnsupportedError: It is such a model.
    """
    places: dict[nn.Module, int] = {}
    for number, layer in enumerate(target.layers):
        for part in (layer, *[target.sub(number, part) for part in target.paths[number]]):
            if places.setdefault(part, number) != number:
                raise UnsupportedError(
                    f"{target.name} has one module in layers {places[part]} and {number}, so that what is said of one "
                    "of them would be of the other as well: put a copy (copy.deepcopy) at each place"
                )


_WEIGHTS = ("q", "k", "v", "fused_qkv", "o", "down", "up", "gate", "experts", "shared_gate")
"""Parts of a layer that hold weights themselves."""


def _refuse_renamed(target: Target) -> None:
    """Refuse a model in which a part of its class is missing while weights stand under a name that is not known.

    Raises:
        UnsupportedError: It is such a model; the message shows the row to write.
    """
    adapter = target.adapter
    for number, layer in enumerate(target.layers):
        row, paths = adapter.rows[number] if adapter.rows else adapter, target.paths[number]
        missing: dict[str, Any] = {}
        known: tuple[str, ...] = ()
        for part in _WEIGHTS:
            if part in paths:
                known += (f"{paths[part]}.",)
            elif getattr(row, part):
                missing[part] = "..."
        if not missing or adapter.experts is not None or hasattr(layer, "original_component"):
            continue
        for path, module in layer.named_modules():
            is_linear = any(weight.ndim == 2 for weight in module.parameters(recurse=False))
            if is_linear and not f"{path}.".startswith(known):
                error = NotInferredError(f"layer {number} of {target.name} has no {', '.join(missing)}, but {path!r}")
                raise not_inferred(replace(adapter, **missing), error)


# -- the structure -----------------------------------------------------------------------------------------------------


def structure_of(hf: nn.Module, layers: list[nn.Module]) -> Structure:
    """Return the structure of a model, which changes if somebody replaces a module, a size or a function.

    Args:
        hf: The model.
        layers: Its decoder layers.
    """
    described = dict[nn.Module, Any]()
    parts = list[Any]()
    is_own = False
    for path, module in hf.named_modules():
        cls: Any = type(module)
        functions = _functions(module)
        is_own = is_own or bool(functions)
        words = [cls, cls.forward, *functions]
        for name, weight in module.named_parameters(recurse=False):
            words += (name, weight.shape, weight.dtype)
        described[module] = tuple(words)
        parts += (path, described[module])
    firsts = dict[Any, int]()
    kinds = list[int]()
    for number, layer in enumerate(layers):
        own = list[Any]()
        for path, module in layer.named_modules():
            own += (path, described[module])
        kinds.append(firsts.setdefault(tuple(own), number))
    return Structure(tuple(parts), tuple(kinds), is_own)


def _functions(module: nn.Module) -> list[Any]:
    """Functions that stand in the place of what the class has; none of those that only call that."""
    functions = list[Any]()
    for name, value in list(vars(module).items()):  # another thread may enter or leave a block
        if name[0] == "_" or not (name == "forward" or isinstance(value, FunctionType | MethodType | partial)):
            continue
        if name == "forward" and hasattr(module, "_hf_hook"):  # accelerate brings weights, and calls what stood here
            value = vars(module).get("_old_forward", value)
        names = {str(getattr(each, "__module__", None)).partition(".")[0] for each in (type(value), value)}
        function = getattr(value, "__func__", value)
        if names.isdisjoint(_WRAPPERS) and function is not getattr(type(module), name, None):
            functions.append(function)
    return functions


def without_hooks(model: nn.Module) -> nn.Module:
    """Return a model, or one with the same weights in modules of its own, which have none of the hooks of its user.

    Raises:
        Exception: Somebody has put something into a module that cannot be copied.
    """
    if not any(has_hooks(module) for module in model.modules()):
        return model
    copies: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for name, value in list(vars(module).items()):  # another thread may enter or leave a block
            if "_forward_" in name and "hooks" in name:  # another thread's may be among them, which are not copied
                copies[id(value)] = type(value)()
    return copy.deepcopy(model, copies)
