"""Find where a model keeps its parts.

1. A small random model of the same class is made. If the class makes none, or somebody wrote a row of parts, the user's
   own model stands in for it.
2. One pass over it is read. Names propose places, and sums say which of them are right (`opening.places`); what passes
   in another one must then be what the adapter says (`opening.proof`). A wrong adapter is refused; a site that cannot
   be proved is noted, and refused when somebody asks for it.
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
from sinkscope.errors import UnsupportedError
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
from sinkscope.models.target import Target
from sinkscope.opening.places import proposed, sample_of
from sinkscope.opening.proof import EXPECTED_MODEL, Record, prove, read

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
    settings = hf.config.to_dict() | dict.fromkeys(_APART)
    structure, functions = structure_of(hf)
    key = type(hf), row, str(sorted(settings.items(), key=str)), structure
    with _LOCK, torch.inference_mode(False), without_autocast(hf.device), without_autocast(torch.device("cpu")):
        if key in _KNOWN:
            return _KNOWN[key]
        numbers = kinds_of(layers_at(hf, stack_of(hf)))
        known = (*key[:3], *numbers)
        if known not in _OF_CLASSES or row is not None:
            _OF_CLASSES[known] = _of_class(target, numbers, row)
        adapter, unproved = _OF_CLASSES[known]
        own = _own_proof(replace(target, adapter=adapter), numbers)
        adapter = replace(adapter, unproved=tuple(sorted((own | unproved).items())))
        if not functions:  # which may compute anything, and are not kept alive
            _KNOWN[key] = adapter
    return adapter


# -- the class ---------------------------------------------------------------------------------------------------------


def _of_class(target: Target, numbers: list[int], row: Adapter | None) -> tuple[Found, dict[str, str]]:
    """Steps 1 and 2: propose an adapter by one pass over a model, and prove it by the same.

    Raises:
        UnsupportedError: Some part was not found, or is not where it is proposed; the message shows the row to write.
    """
    layers = {*numbers, min(1, len(numbers) - 1)}  # the second one may read what the first has kept
    if row is None or target.processes > 1:
        with suppress(Exception):  # a class may take no configuration alone, or not that of a changed model
            sample = sample_of(target.hf, max(layers) + 1)
            target = Target(sample, sample, "hf", DRAFT, name=target.name)
    stack = stack_of(target.hf)  # which a wrapper of the object lends
    draft = replace(Found(**vars(row or DRAFT)), model_type=str(target.hf.config.model_type), layers=stack)
    adapter = None
    try:
        with evaluating(target.hf), apart():
            draft = replace(draft, base=_base_path(target.hf, stack))
            records = _read(replace(target, adapter=draft), layers)
            adapter = proposed(records, numbers, row)
            return adapter, prove(replace(target, adapter=adapter), numbers)
    except NotInferredError as error:
        if adapter is None and row is None:
            raise not_inferred(draft, error) from None
        raise UnsupportedError(
            f"model type {draft.model_type!r} has a row, proposed by names or registered, that is refused: {error}; "
            f"change what is wrong and register it: sinkscope.models.adapters.register({shown_row(adapter or draft)})"
        ) from None


def _read(target: Target, layers: set[int]) -> dict[int, Record]:
    """What passes all modules of some layers; their attention, if it is seen."""
    with suppress(Exception):  # attention outside transformers' interface is not seen
        records = read(target, layers)
        if any(record.call is not None for record in records.values()):
            return records
    return read(replace(target, adapter=replace(target.adapter, attention_interface=False)), layers)


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
        UnsupportedError: It has parts at other places than its class, or computes something else.
    """
    _check_layers(target)
    if target.processes > 1:  # transformers has split plain modules, and each process has a part of the heads
        return {}
    own = target
    if target.kind != "hf" and any(weight.is_inference() for weight in target.hf.parameters()):
        raise UnsupportedError(
            f"the weights of {target.name} were made in inference mode, where nothing of the wrapper around it can be "
            "proved: make the model outside of torch.inference_mode(), or give it without the wrapper"
        )
    if target.kind == "hf" and target.resident:
        with suppress(Exception):  # somebody has put something into a module that cannot be copied
            twin = _twin(target.hf)
            own = replace(target, model=twin, hf=twin)
    try:
        with evaluating(own.hf), apart():
            return Context().run(prove, own, numbers)  # in which no policy of a block sees attention
    except NotInferredError as error:
        raise UnsupportedError(
            f"{target.name} does not compute what its class {type(target.hf).__name__} does: {error}; measure it "
            "without what was replaced in it, or with the change in its weights and configuration"
        ) from None


def _twin(model: nn.Module) -> nn.Module:
    """A model, or one with the same weights in modules of its own, which have none of the hooks of its user.

    Weights that were made in inference mode, and have no gradients, are copied.
    """
    weights = [*model.parameters(), *model.buffers()]
    if not any(map(has_hooks, model.modules())) and not any(weight.is_inference() for weight in weights):
        return model
    copies: dict[int, Any] = {id(weight): weight for weight in weights}
    for weight in filter(torch.Tensor.is_inference, weights):
        copies[id(weight)] = nn.Parameter(weight.clone(), False) if isinstance(weight, nn.Parameter) else weight.clone()
    for module in model.modules():
        for name, value in list(vars(module).items()):  # another thread may enter or leave a block
            if "_forward_" in name and "hooks" in name:
                copies[id(value)] = type(value)()
    return copy.deepcopy(model, copies)


def _check_layers(target: Target) -> None:
    """Refuse modules that stand at several places, so that an edit would act on all, and weights of unknown names.

    Raises:
        UnsupportedError: A layer, or a part of it, is in several layers; or a part of the class is missing in a layer
            while weights stand under a name that is not known: the message shows the row to write.
    """
    places: dict[nn.Module, int] = {}
    for number, layer in enumerate(target.layers):
        paths, row = target.paths[number], target.adapter.rows[number]
        for part in (layer, *[layer.get_submodule(path) for path in paths.values()]):
            if places.setdefault(part, number) != number:
                raise UnsupportedError(
                    f"{target.name} has one module in layers {places[part]} and {number}, so that what is said of one "
                    "of them would be of the other as well: put a copy (copy.deepcopy) at each place"
                )
        missing: dict[str, Any] = {part: "..." for part in _WEIGHTS if getattr(row, part) and part not in paths}
        known = tuple(f"{paths[part]}." for part in _WEIGHTS if part in paths)
        unknown = [path for path, weight in layer.named_parameters() if weight.ndim == 2 and not path.startswith(known)]
        if missing and unknown and not hasattr(layer, "original_component"):
            error = NotInferredError(
                f"layer {number} of {target.name} has no {', '.join(missing)}, but {unknown[0].rpartition('.')[0]!r}"
            )
            raise not_inferred(replace(target.adapter, **missing), error)


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
        if str(getattr(value, "__module__", None)).partition(".")[0] not in _WRAPPERS:
            functions.append(value)
    return functions
