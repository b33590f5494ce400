"""Find where a model keeps its parts.

1. A small random model of the same class is made. If the class makes none, or its modules have other names than those
   of the user's row, the user's own model stands in for it.
2. One pass over it is read. Names propose places, and sums say which of them are right (`opening.places`); what passed
   must then be what the adapter says (`opening.proof`). A wrong adapter is refused; a site that cannot be proved is
   noted, and refused when somebody asks for it.
3. One pass over the user's own model confirms them. This holds for models of the same structure: of modules of the same
   classes and sizes. Where a function was replaced in the model, which may compute anything, it is run each time.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sinkscope.engine.attention import without_autocast
from sinkscope.errors import SinkscopeError, UnsupportedError, first_line
from sinkscope.models.adapters import (
    DRAFT,
    Adapter,
    Found,
    NotInferredError,
    layers_at,
    not_inferred,
    row_of,
    shown_row,
    stack_of,
)
from sinkscope.models.checkpoints.config import cpu_by_default
from sinkscope.models.hooks import apart, evaluating, forward_parameters, has_hooks
from sinkscope.models.target import Target, parts_of
from sinkscope.opening.places import proposed, sample_of
from sinkscope.opening.proof import LATER, Record, prove, read

EXPECTED_MODEL = "give a decoder-only causal language model, such as llama-2-7b or gpt2"
_APART = ("_name_or_path", "transformers_version", "dtype", "architectures", "eos_token_id", "pad_token_id")
"""What two models may have of their own in a configuration, and keep their parts in the same places."""
_WRAPPERS = ("nnsight", "sinkscope")
"""Packages whose functions in the place of a method call the module's own."""
_WEIGHTS = ("q", "k", "v", "fused_qkv", "o", "down", "up", "gate", "experts", "shared_gate")
"""Parts of a layer that hold weights themselves."""
_LOCK = threading.RLock()

Key = tuple[Any, ...]
_OF_CLASSES: dict[Key, tuple[Found, dict[str, str]]] = {}
"""The adapter of a class of models and what the proof on a small one says, by class, row, configuration and kinds."""
_KNOWN: dict[Key, Found] = {}
"""Adapters of objects, by class, row, configuration and structure."""


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
    structure, functions = structure_of(hf)
    key = type(hf), row, str(sorted(settings.items(), key=str)), structure
    with _LOCK, torch.inference_mode(False), without_autocast(hf.device), without_autocast(torch.device("cpu")):
        if key not in _KNOWN:
            adapter = _proved(target, key[:3], kinds_of(layers_at(hf, stack_of(hf))), row)
            if functions:  # which may compute anything, and are not kept alive
                return adapter
            _KNOWN[key] = adapter
        return _KNOWN[key]


def _proved(target: Target, key: Key, numbers: list[int], row: Adapter | None) -> Found:
    """All steps, of objects that are not known."""
    adapter, unproved = _of_class(key, target, numbers, row)
    target = replace(target, adapter=adapter)
    _refuse_shared(target)
    _refuse_renamed(target)
    own = dict[str, str]()
    if target.processes == 1:  # else transformers has split plain modules, and each process has a part of the heads
        try:
            own = _own_proof(target, numbers)
        except NotInferredError as error:
            raise _refusal(target, str(error), of_object=True) from None
    return replace(adapter, unproved=tuple(sorted((own | unproved).items())))


def _refusal(target: Target, problem: str, *, of_object: bool = False) -> UnsupportedError:
    """The error for an adapter that the proof refuses, on a small model of the class or only on the object."""
    if LATER in problem:
        return UnsupportedError(f"{target.name} is not causal, because {problem}: {EXPECTED_MODEL}")
    if of_object:
        return UnsupportedError(
            f"{target.name} does not compute what its class {type(target.hf).__name__} does: {problem}; measure it "
            "without what was replaced in it, or with the change in its weights and configuration"
        )
    return UnsupportedError(
        f"model type {target.adapter.model_type!r} has a row, proposed by names or registered, that is refused: "
        f"{problem}; change what is wrong and register it: "
        f"sinkscope.models.adapters.register({shown_row(target.adapter)})"
    )


# -- the class ---------------------------------------------------------------------------------------------------------


def _of_class(key: Key, target: Target, numbers: list[int], row: Adapter | None) -> tuple[Found, dict[str, str]]:
    """Steps 1 and 2, of classes that are not known.

    Raises:
        UnsupportedError: Some part was not found; the message says which, and shows the row to write.
    """
    hf, key = target.hf, (*key, tuple(numbers))
    if key in _OF_CLASSES:
        return _OF_CLASSES[key]
    with suppress(Exception):  # a class may take no configuration alone, or not that of a changed model
        sample = sample_of(hf, max(*numbers, 1) + 1)
        whole, small = (parts_of(layers_at(model, row.layers)[0], row) if row else {} for model in (hf, sample))
        if small.keys() >= whole.keys():
            target = Target(sample, sample, "hf", DRAFT, name=target.name)
    draft = Found(**vars(row or DRAFT))
    draft = replace(draft, model_type=str(hf.config.model_type))
    try:
        stack = stack_of(target.hf)  # which a wrapper of the object lends
        draft = replace(draft, layers=stack, base=_base_path(target.hf, stack))
        with evaluating(target.hf), apart():
            found = _proposed_and_proved(replace(target, adapter=draft), numbers, row)
    except (MemoryError, torch.OutOfMemoryError, SinkscopeError):
        raise
    except Exception as error:  # a model may do anything in a pass
        if not isinstance(error, NotInferredError):
            error = NotInferredError(f"a pass raised {type(error).__name__}: {first_line(error)}")
        if row is None and LATER not in str(error):
            raise not_inferred(draft, error) from None
        raise _refusal(replace(target, adapter=draft), str(error)) from None
    if target.hf is not hf:
        _OF_CLASSES[key] = found
    return found


def _proposed_and_proved(target: Target, numbers: list[int], row: Adapter | None) -> tuple[Found, dict[str, str]]:
    """Propose an adapter by one pass over a model, and prove it by the same."""
    last = min(max(*numbers, 1), len(layers_at(target.hf, target.adapter.layers)) - 1)
    records: dict[int, Record] = {}
    for is_seen in (True, False):  # attention outside transformers' interface is not seen
        target = replace(target, adapter=replace(target.adapter, attention_interface=is_seen))
        records = {layer: Record(target, layer) for layer in {*numbers, last}}  # that may read what the first has kept
        with suppress(*([AttributeError, TypeError, UnsupportedError] if is_seen else [])):
            read(target, records)
        if any(record.call is not None for record in records.values()):
            break
    adapter = proposed(target, records, numbers, row)
    if row is not None:
        adapter = replace(adapter, **vars(row))
    target = replace(target, adapter=adapter)
    try:
        return adapter, prove(target, numbers, records)
    except NotInferredError as error:
        raise _refusal(target, str(error)) from None


def _base_path(model: Any, stack: str) -> str:
    """Path of the innermost module around the layers that takes token ids."""
    base = stack
    while base and "input_ids" not in forward_parameters(type(model.get_submodule(base))):
        base = base.rpartition(".")[0]
    return base


# -- the object --------------------------------------------------------------------------------------------------------


def _own_proof(target: Target, numbers: list[int]) -> dict[str, str]:
    """Step 3: the proof of the user's own model, without hooks of its user.

    Raises:
        UnsupportedError: A wrapper has replaced what its modules do, and its weights can have no gradients.
    """
    if target.kind != "hf" and any(weight.is_inference() for weight in target.hf.parameters()):
        raise UnsupportedError(
            f"the weights of {target.name} were made in inference mode, where nothing of the wrapper around it can be "
            "proved: make the model outside of torch.inference_mode(), or give it without the wrapper"
        )
    if target.kind == "hf" and target.resident:
        with suppress(Exception):  # somebody has put something into a module that cannot be copied
            twin = _twin(target.hf, [target.layers[number] for number in {*numbers}])
            target = replace(target, model=twin, hf=twin)
    with evaluating(target.hf), apart():
        return Context().run(prove, target, numbers)  # in which no policy of a block sees attention


def _twin(model: nn.Module, layers: Iterable[nn.Module]) -> nn.Module:
    """A model, or one with the same weights in modules of its own, which have none of the hooks of its user.

    Weights of these layers that were made in inference mode, and have no gradients, are copied.
    """
    weights = [*model.parameters(), *model.buffers()]
    if not any(map(has_hooks, model.modules())) and not any(weight.is_inference() for weight in weights):
        return model
    copies: dict[int, Any] = {id(weight): weight for weight in weights}
    for layer in layers:
        copies |= {id(weight): weight.clone() for weight in layer.buffers() if weight.is_inference()}
        for weight in layer.parameters():
            if weight.is_inference():
                copies[id(weight)] = nn.Parameter(weight.clone(), False)
    for module in model.modules():
        for name, value in list(vars(module).items()):  # another thread may enter or leave a block
            if "_forward_" in name and "hooks" in name:  # another thread's may be among them, which are not copied
                copies[id(value)] = type(value)()
    return copy.deepcopy(model, copies)


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


def _refuse_renamed(target: Target) -> None:
    """Refuse a model in which a part of its class is missing while weights stand under a name that is not known.

    Raises:
        UnsupportedError: It is such a model; the message shows the row to write.
    """
    adapter = target.adapter
    for number, layer in enumerate(target.layers):
        row, paths = adapter.rows[number] if adapter.rows else adapter, target.paths[number]
        missing: dict[str, Any] = {part: "..." for part in _WEIGHTS if getattr(row, part) and part not in paths}
        if not missing or adapter.experts is not None or hasattr(layer, "original_component"):
            continue
        known = tuple(f"{paths[part]}." for part in _WEIGHTS if part in paths)
        for path, module in layer.named_modules():
            has_matrix = any(weight.ndim == 2 for weight in module.parameters(recurse=False))
            if has_matrix and not f"{path}.".startswith(known):
                error = NotInferredError(f"layer {number} of {target.name} has no {', '.join(missing)}, but {path!r}")
                raise not_inferred(replace(adapter, **missing), error)


# -- the structure -----------------------------------------------------------------------------------------------------


def structure_of(module: nn.Module) -> tuple[Key, int]:
    """Return the structure of a model, which changes if somebody replaces a module, a size or a function.

    The second value is how many functions somebody put into its modules.
    """
    words, count = list[Any](), 0
    for path, part in module.named_modules():
        cls: Any = type(part)
        functions = _functions(part)
        count += len(functions)
        words += (path, cls, cls.forward, getattr(part, "is_causal", None), *functions)
        for name, weight in part.named_parameters(recurse=False):
            words += (name, weight.shape, weight.dtype)
    return tuple(words), count


def kinds_of(layers: Iterable[nn.Module]) -> list[int]:
    """Return, for each layer, the number of the first one of the same structure."""
    firsts = dict[Key, int]()
    return [firsts.setdefault(structure_of(layer)[0], number) for number, layer in enumerate(layers)]


def _functions(module: nn.Module) -> list[Any]:
    """Functions that stand in the place of what the class has; none of those that only call that."""
    functions = list[Any]()
    for name, value in list(vars(module).items()):  # another thread may enter or leave a block
        own = getattr(type(module), name, None)
        if name == "forward" and hasattr(module, "_hf_hook"):  # accelerate brings weights, and calls what stood here
            value = vars(module).get("_old_forward", value)
        if not callable(own) or not callable(value) or getattr(value, "__func__", value) is own:
            continue
        packages = {str(getattr(each, "__module__", None)).partition(".")[0] for each in (type(value), value)}
        if packages.isdisjoint(_WRAPPERS):
            functions.append(value)
    return functions
