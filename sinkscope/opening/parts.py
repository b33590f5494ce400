"""Find where a model keeps its parts.

1. A small random model of the same class is made. If the class makes none, the user's own model stands in for it.
2. One pass over it is read. Names propose places, and sums say which of them are right (`opening.places`); what passes
   in another one must then be what the adapter says (`opening.proof`). A wrong adapter is refused; a site that cannot
   be proved is noted, and refused when somebody asks for it.
3. One pass over the user's own model confirms them. This holds for models of the same structure: of modules of the same
   classes and sizes. Where a forward was replaced in the model, which may compute anything, all is done each time.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sinkscope.errors import SinkscopeError, UnsupportedError, first_line
from sinkscope.models.adapters import Adapter, NotInferredError, not_inferred, stack_of
from sinkscope.models.arithmetic import without_autocast
from sinkscope.models.checkpoints.config import plain_by_default
from sinkscope.models.hooks import apart, evaluating, forward_parameters, has_hooks
from sinkscope.models.target import Target
from sinkscope.opening.places import proposed, sample_of
from sinkscope.opening.proof import Record, prove, read

_WRAPPERS = ("nnsight", "sinkscope")
"""Packages whose functions in the place of a forward call the module's own."""
_LOCK = threading.RLock()

Key = tuple[Any, ...]
_KNOWN: dict[Key, Adapter] = {}
"""Adapters of objects, by class, configuration and structure."""


@contextmanager
def _said(say: Callable[[object], UnsupportedError]) -> Iterator[None]:
    """Context manager in which whatever a model raises in a pass, which may be anything, is said in one line."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, SinkscopeError):
        raise
    except NotInferredError as error:
        raise say(error) from None
    except Exception as error:
        raise say(f"a forward pass raised {type(error).__name__}: {first_line(error)}") from None


@plain_by_default()
def adapter_of(target: Target) -> Adapter:
    """Return the adapter of a model, whose own is not read; sites that cannot be proved are noted in it.

    Raises:
        UnsupportedError: Nothing is proposed, or the proof refuses it.
    """
    hf = target.hf
    if getattr(hf.config, "is_encoder_decoder", False) or getattr(hf.config, "alibi", False):
        raise UnsupportedError(
            f"{target.name} ({type(hf).__name__}) is an encoder-decoder model, or adds ALiBi to its masks: this is "
            "not served; give a decoder-only causal language model, such as llama-2-7b or gpt2"
        )
    key = type(hf), str(hf.config.to_dict()), structure_of(hf)
    with _LOCK, torch.inference_mode(False), without_autocast(hf.device), without_autocast(torch.device("cpu")):
        if key in _KNOWN:
            return _KNOWN[key]
        numbers = kinds_of(hf.get_submodule(stack_of(hf)))
        adapter, unproved = _of_class(target, numbers)
        unproved |= _own_proof(replace(target, adapter=adapter), numbers)
        adapter = replace(adapter, unproved=tuple(sorted(unproved.items())))
        if not any(map(_replaced, hf.modules())):  # it may compute anything, and is not kept alive
            _KNOWN[key] = adapter
    return adapter


# -- the class ---------------------------------------------------------------------------------------------------------


def _of_class(target: Target, numbers: list[int]) -> tuple[Adapter, dict[str, str]]:
    """Steps 1 and 2: propose an adapter by one pass over a model, and prove it by another.

    Raises:
        UnsupportedError: Some part was not found, or is not where it is proposed.
    """
    layers = {*numbers, min(1, len(numbers) - 1)}  # the second one may read what the first has kept
    hf = next((module for module in target.hf.modules() if isinstance(module, PreTrainedModel)), target.hf)
    base = stack = stack_of(hf)  # which a wrapper around it lends
    with suppress(Exception):  # a class may take no configuration alone, or not that of a changed model
        hf = sample_of(hf, stack, max(layers) + 1)
        target = replace(target, model=hf, hf=hf, kind="hf", store=None)
    while base and "input_ids" not in forward_parameters(type(hf.get_submodule(base))):
        base = base.rpartition(".")[0]
    outline = Adapter(str(hf.config.model_type), stack, base)
    with _said(partial(not_inferred, hf)), evaluating(hf), apart():
        adapter = proposed(_read(replace(target, adapter=outline), layers), numbers)
        return adapter, prove(replace(target, adapter=adapter), numbers)


def _read(target: Target, layers: set[int]) -> dict[int, Record]:
    """What passes all modules of some layers; their attention, if it is seen."""
    with suppress(Exception):  # attention outside transformers' interface is not seen
        records = read(target, layers)
        if any(record.computed_rows for record in records.values()):
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
    unhooked, hf = target, target.hf
    to_copy = any(map(has_hooks, hf.modules())) or any(map(torch.is_inference, hf.parameters()))
    if target.kind == "hf" and to_copy:
        with suppress(Exception):  # somebody has put something into a module that cannot be copied
            twin = _twin(hf)
            unhooked = replace(target, model=twin, hf=twin)

    def said(reason: object) -> UnsupportedError:
        return UnsupportedError(
            f"{target.name} does not compute what its class {type(hf).__name__} does: {reason}; measure it "
            "without what was replaced in it, or with the change in its weights and configuration"
        )

    with _said(said), evaluating(unhooked.hf), apart():
        return Context().run(prove, unhooked, numbers)  # in which no policy of a block sees attention


def _twin(model: nn.Module) -> nn.Module:
    """A model with the same weights in modules of its own, which have none of the hooks of its user.

    Weights that were made in inference mode, and have no gradients, are copied.
    """
    weights = [*model.parameters(), *model.buffers()]
    copies: dict[int, Any] = {id(weight): weight for weight in weights if not weight.is_inference()}
    for attributes in map(vars, model.modules()):
        copies |= {id(attributes[name]): OrderedDict() for name in ("_forward_hooks", "_forward_pre_hooks")}
    return copy.deepcopy(model, copies)


def _check_layers(target: Target) -> None:
    """Refuse modules that stand at several places, so that an edit would act on all, and parts that are not there.

    Raises:
        UnsupportedError: A layer, or a part of it, is in several layers; or a layer with weights lacks a part.
    """
    places: dict[nn.Module, int] = {}
    for number, layer in enumerate(target.layers):
        paths = target.paths[number]
        for part in map(layer.get_submodule, paths.values()):
            if places.setdefault(part, number) != number:
                raise UnsupportedError(
                    f"{target.name} has one module in layers {places[part]} and {number}, so that what is said of one "
                    "of them would be of the other as well: put a copy (copy.deepcopy) at each place"
                )
        missing = target.adapter.parts[number].keys() - paths.keys()
        if missing and [*layer.parameters()] and not hasattr(layer, "original_component"):
            raise UnsupportedError(
                f"layer {number} of {target.name} has no {sorted(missing)}, as layers of its class have: "
                "give its modules the names that they have there"
            )


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
    attributes = vars(module)
    function = attributes.get(
        "_old_forward", attributes.get("forward")
    )  # accelerate brings weights, and calls what stood here
    if getattr(function, "__func__", function) is type(module).forward:
        return None
    return None if str(getattr(function, "__module__", None)).partition(".")[0] in _WRAPPERS else function
