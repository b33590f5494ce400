"""Find where a model keeps its parts.

1. A small random model of the same class is made. If the class makes none, or somebody wrote a row of parts, the user's
   own model stands in for it.
2. One pass over it is read. Names propose places, and sums say which of them are right (`opening.places`); what passes
   in another one must then be what the adapter says (`opening.proof`). A wrong adapter is refused; a site that cannot
   be proved is noted, and refused when somebody asks for it.
3. One pass over the user's own model confirms them. This holds for models of the same structure: of modules of the same
   classes and sizes. Where a forward was replaced in the model, which may compute anything, it is run each time.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sinkscope.engine.attention import without_autocast
from sinkscope.errors import UnsupportedError
from sinkscope.models import adapters
from sinkscope.models.adapters import (
    DRAFT,
    Adapter,
    Found,
    NotInferredError,
    not_inferred,
    stack_of,
)
from sinkscope.models.checkpoints.config import plain_by_default
from sinkscope.models.hooks import apart, evaluating, forward_parameters, has_hooks
from sinkscope.models.target import Target
from sinkscope.opening.places import proposed, sample_of
from sinkscope.opening.proof import EXPECTED_MODEL, Record, prove, read

_APART = ("_name_or_path", "transformers_version", "dtype", "architectures", "eos_token_id", "pad_token_id")
"""What two models may have of their own in a configuration, and keep their parts in the same places."""
_WRAPPERS = ("nnsight", "sinkscope")
"""Packages whose functions in the place of a forward call the module's own."""
_WEIGHTS = ("q", "k", "v", "fused_qkv", "o", "down", "up", "gate", "experts", "shared_gate")
"""Parts of a layer that hold weights themselves."""
_LOCK = threading.RLock()

Key = tuple[Any, ...]
_OF_CLASSES: dict[Key, tuple[Found, dict[str, str]]] = {}
"""The adapter of a class of models and what the proof on a small one says, by class, row, configuration and kinds."""
_KNOWN: dict[Key, Found] = {}
"""Adapters of objects, by class, row, configuration and structure."""


@plain_by_default()
def adapter_of(target: Target) -> Found:
    """Return the adapter of a model, whose own is not read; sites that cannot be proved are noted in it.

    Raises:
        UnsupportedError: Nothing is proposed, or the proof refuses it.
    """
    hf, row = target.hf, adapters.ADAPTERS.get(target.hf.config.model_type)
    if getattr(hf.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{target.name} ({type(hf).__name__}) is an encoder-decoder model: {EXPECTED_MODEL}")
    if getattr(hf.config, "alibi", False):
        raise UnsupportedError(f"{target.name} adds ALiBi to its masks, which is not served: use another model")
    settings = hf.config.to_dict() | dict.fromkeys(_APART)
    key = type(hf), row, str(sorted(settings.items(), key=str)), structure_of(hf)
    with _LOCK, torch.inference_mode(False), without_autocast(hf.device), without_autocast(torch.device("cpu")):
        if key in _KNOWN:
            return _KNOWN[key]
        numbers = kinds_of(hf.get_submodule(stack_of(hf)))
        known = (*key[:3], *numbers)
        if known not in _OF_CLASSES or row is not None:
            _OF_CLASSES[known] = _of_class(target, numbers, row)
        adapter, unproved = _OF_CLASSES[known]
        own = _own_proof(replace(target, adapter=adapter), numbers)
        adapter = replace(adapter, unproved=tuple(sorted((own | unproved).items())))
        if not any(map(_replaced, hf.modules())):  # it may compute anything, and is not kept alive
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
    base = stack = stack_of(target.hf)  # which a wrapper of the object lends
    while base and "input_ids" not in forward_parameters(type(target.hf.get_submodule(base))):
        base = base.rpartition(".")[0]
    settings: dict[str, Any] = {"model_type": str(target.hf.config.model_type), "layers": stack, "base": base}
    adapter = Found(**(vars(row or DRAFT) | settings))
    try:
        with evaluating(target.hf), apart():
            adapter = proposed(_read(replace(target, adapter=adapter), layers), numbers, row)
            return adapter, prove(replace(target, adapter=adapter), numbers)
    except NotInferredError as error:
        raise not_inferred(adapter, error) from None


def _read(target: Target, layers: set[int]) -> dict[int, Record]:
    """What passes all modules of some layers; their attention, if it is seen."""
    with suppress(Exception):  # attention outside transformers' interface is not seen
        records = read(target, layers)
        if any(record.call is not None for record in records.values()):
            return records
    return read(replace(target, adapter=replace(target.adapter, attention_interface=False)), layers)


# -- the object --------------------------------------------------------------------------------------------------------


def _own_proof(target: Target, numbers: list[int]) -> dict[str, str]:
    """Step 3: the proof of the user's own model, without hooks of its user.

    Raises:
        UnsupportedError: It has parts at other places than its class, or computes something else.
    """
    _check_layers(target)
    if target.processes > 1:  # transformers has split plain modules, and each process has a part of the heads
        return {}
    own, made_apart = target, any(weight.is_inference() for weight in target.hf.parameters())
    if target.kind != "hf" and made_apart:
        raise UnsupportedError(
            f"the weights of {target.name} were made in inference mode, where nothing of the wrapper around it can be "
            "proved: make the model outside of torch.inference_mode(), or give it without the wrapper"
        )
    if target.kind == "hf" and (made_apart or any(map(has_hooks, target.hf.modules()))):
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
    """A model with the same weights in modules of its own, which have none of the hooks of its user.

    Weights that were made in inference mode, and have no gradients, are copied.
    """
    weights = [*model.parameters(), *model.buffers()]
    copies: dict[int, Any] = {id(weight): weight for weight in weights if not weight.is_inference()}
    for module in model.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            copies[id(vars(module)[name])] = OrderedDict()
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


def structure_of(module: nn.Module) -> Key:
    """Return the structure of a model, which changes if somebody replaces a module, a size or a forward."""
    words = list[Any]()
    for path, part in module.named_modules():
        cls: Any = type(part)
        words += (path, cls, cls.forward, getattr(part, "is_causal", None), _replaced(part))
        for name, weight in part.named_parameters(recurse=False):
            words += (name, weight.shape, weight.dtype)
    return tuple(words)


def kinds_of(layers: Iterable[nn.Module]) -> list[int]:
    """Return, for each layer, the number of the first one of the same structure."""
    firsts = dict[Key, int]()
    return [firsts.setdefault(structure_of(layer), number) for number, layer in enumerate(layers)]


def _replaced(module: nn.Module) -> Any:
    """The function that somebody put in the place of a module's forward; None if there is none, or it calls that."""
    own = vars(module)
    function = own.get("_old_forward", own.get("forward"))  # accelerate brings weights, and calls what stood here
    if getattr(function, "__func__", function) is type(module).forward:
        return None
    return None if str(getattr(function, "__module__", None)).partition(".")[0] in _WRAPPERS else function
