"""The list of decoder layers of a model, before anything else is known of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from sinkscope.errors import UnsupportedError
from sinkscope.models.adapters import Found, row_of, shown_row
from sinkscope.models.call_cache import parameters_of
from sinkscope.models.target import Target

DRAFT = Found("")
"""What a `Target` has until its adapter is known."""


class NotInferredError(Exception):
    """Raised where a part of a model is not found; the message is the end of a sentence about the model."""


def stack_of(hf: nn.Module) -> str:
    """Return the path of the list of decoder layers.

    Raises:
        UnsupportedError: There is none.
    """
    model: Any = hf
    row = row_of(model.config.model_type)
    if row is not None:
        return row.layers
    try:
        return _stack_path(model)
    except NotInferredError as error:
        raise not_inferred(replace(DRAFT, model_type=model.config.model_type, layers="..."), error) from None


def not_inferred(draft: Found, error: NotInferredError) -> UnsupportedError:
    """Return the error for a model of which something was not found, with the row to write."""
    row = shown_row(draft)
    return UnsupportedError(
        f"model type {draft.model_type!r} has no row, and its names propose none: {error}; if it has these parts "
        f"under other names, write its row (docs/extending.md): sinkscope.models.adapters.register({row[:-1]}, ...))"
    )


def _stack_path(model: Any) -> str:
    """Path of the list of decoder layers: a list of the configured length in a module with the text configuration.

    Raises:
        NotInferredError: There is none.
    """
    text = model.config.get_text_config()
    depth = getattr(text, "num_hidden_layers", None)
    for path, module in model.named_modules():
        if type(getattr(module, "config", None)) is type(text):  # towers for images have another one
            for name, stack in module.named_children():
                if isinstance(stack, nn.ModuleList) and len(stack) > 0 and depth in (None, len(stack)):
                    return f"{path}.{name}".strip(".")
    raise NotInferredError(f"it has no list of {depth} layers, one for each that its configuration names")


def base_path(model: Any, stack: str) -> str:
    """Return the path of the innermost module around the layers that takes token ids."""
    base = stack
    while base and "input_ids" not in parameters_of(model.get_submodule(base)):
        base = base.rpartition(".")[0]
    return base


def layer_kinds(target: Target) -> list[int]:
    """Return, for each layer, the first layer of its kind, whose parameters have the same names and shapes."""
    firsts = dict[str, int]()
    return [firsts.setdefault(layer_kind(layer), number) for number, layer in enumerate(target.layers)]


def first_of_kinds(target: Target) -> list[int]:
    """Return the first layer of each kind."""
    return sorted(set(layer_kinds(target)))


def layer_kind(layer: nn.Module) -> str:
    """Return what layers with parameters of the same names and shapes have in common."""
    shapes = [(name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()]
    return f"{type(layer).__name__} {shapes}"
