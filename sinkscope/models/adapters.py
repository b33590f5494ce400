"""Where a model keeps its parts: a path for each in the plain Hugging Face model.

The paths also resolve below `bridge.original_model` and below an nnsight model, because both wrap modules in place and
keep the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from sinkscope.errors import UnsupportedError


@dataclass(frozen=True)
class Adapter:
    """Where the parts of a model are, and what short passes show of it.

    The parts of a layer are "" (the layer itself), and where it has them:

    - "attn"; "q", "k" and "v", or "fused_qkv" (the projections of the attention, separate or in one module); "o" (the
      output projection: its input is `hook_z`, heads side by side);
    - "mid" (the module whose *input* is `hook_resid_mid`); "attn_out" (what writes for the attention, if not itself: a
      norm behind it, or a part of it);
    - "mlp"; "down" (the down projection: its input is `hook_post`; of a mixture, its shared expert's); "up" (the
      linear factor, or the only input projection of an ungated MLP); "gate" (not there in an ungated MLP, or if "up"
      gives both); "post_mlp_norm" (a norm between the MLP and the residual stream);
    - "experts" (fused experts, where the layer is a mixture); "shared_gate" (the sigmoid of its output multiplies what
      the shared expert gives).
    """

    model_type: str
    layers: str  # the list of decoder layers
    base: str  # the module that maps ids to the last hidden state
    parts: tuple[Mapping[str, str], ...] = ()  # the paths in each layer; none: they are not known yet
    fused_gate_up: bool = False  # `up` returns gate and up side by side, gate first
    qkv_layout: Literal["beside", "by head"] | None = None  # what `fused_qkv` gives: q, k, v, or these of each head
    attention_interface: bool = True  # attention goes through transformers' AttentionInterface
    down_factor: float = 1.0  # between the down projection of a dense MLP and what `mlp` gives
    expert_factor: float = 1.0  # between a fused expert and what `mlp` gives
    shared_factor: float = 1.0  # between the down projection of the shared expert and what `mlp` gives
    write_factor: float = 1.0  # between what attention and MLP, or norms behind them, give and what the layer adds
    from_any_layer: bool = True  # a pass may begin at a layer: none reads what an earlier one kept
    unproved: tuple[tuple[str, str], ...] = ()  # sites that the proof at load refused, and why
    adds: bool = True  # False: what `mlp` gives is not simply added, so the layer is called again to see its effect


DRAFT = Adapter("", "", "")
"""What a `Target` has until its adapter is known."""


class NotInferredError(Exception):
    """Raised where a part of a model is not found; the message is the end of a sentence about the model."""


def not_inferred(model: Any, error: object) -> UnsupportedError:
    """Return the error for a model with a part that has no known name, or is not where its name says."""
    return UnsupportedError(
        f"the parts of model type {model.config.model_type!r} are not where names say: {error}; if it has them under "
        "other names, add these to sinkscope.opening.places.NAMES (docs/extending.md)"
    )


def stack_of(hf: nn.Module) -> str:
    """Return the path of the list of decoder layers: of the configured length, in a module with the text configuration.

    Raises:
        UnsupportedError: There is none.
    """
    model: Any = hf
    text = model.config.get_text_config()
    depth = getattr(text, "num_hidden_layers", None)
    for path, module in model.named_modules():
        if type(getattr(module, "config", None)) is type(text):  # towers for images have another one
            for name, stack in module.named_children():
                if isinstance(stack, nn.ModuleList) and len(stack) > 0 and depth in (None, len(stack)):
                    return f"{path}.{name}".strip(".")
    raise not_inferred(model, f"it has no list of {depth} layers, one for each that its configuration names")
