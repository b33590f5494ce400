"""Where an architecture keeps its parts: one row of data per `model_type`, and `register` for rows of your own.

All paths are those of the plain Hugging Face model. They also resolve below `bridge.original_model` and below an
nnsight model, because both wrap modules in place and keep the names, so one row serves all three kinds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from torch import nn

from sinkscope.errors import UnsupportedError


@dataclass(frozen=True)
class Adapter:
    """Module paths of one architecture; those marked (layer) are relative to a decoder layer ("": the layer).

    Where layers are of several kinds, a path may be several, separated by "|": a layer has the first that is there.
    """

    model_type: str
    layers: str = "model.layers"
    attn: str = "self_attn"  # (layer)
    mlp: str = "mlp"  # (layer)
    down: str = (
        "mlp.down_proj"  # (layer) the down projection: its input is `hook_post`; of a mixture, its shared expert's
    )
    up: str | None = "mlp.up_proj"  # (layer) the linear factor, or the only input projection of an ungated MLP
    gate: str | None = "mlp.gate_proj"  # (layer) None: ungated, or `up` gives both
    q: str | None = "self_attn.q_proj"  # (layer)
    k: str | None = "self_attn.k_proj"  # (layer)
    v: str | None = "self_attn.v_proj"  # (layer)
    o: str | None = "self_attn.o_proj"  # (layer) its input is `hook_z`, heads side by side
    fused_qkv: str | None = None  # (layer)
    mid: str | None = "post_attention_layernorm"  # (layer) the module whose *input* is `hook_resid_mid`
    attn_out: str | None = (
        None  # (layer) what writes for the attention: a norm behind it, or a part of it; None: `attn`
    )
    post_mlp_norm: str | None = None  # (layer) norm between the MLP and the residual stream
    experts: str | None = None  # (layer) fused experts, where the layer is a mixture
    shared_gate: str | None = None  # (layer) the sigmoid of its output multiplies what the shared expert gives


@dataclass(frozen=True)
class Found(Adapter):
    """An adapter with what short passes show of the model: these fields are measured, and written by nobody."""

    rows: tuple[Adapter, ...] = field(default=(), compare=False, repr=False)  # of each layer, where their parts differ
    base: str = "model"  # the module that maps ids to the last hidden state
    fused_gate_up: bool = False  # `up` returns gate and up side by side, gate first
    qkv_layout: Literal["beside", "by head"] | None = "beside"  # what `fused_qkv` gives: q, k, v, or these of each head
    attention_interface: bool = True  # attention goes through transformers' AttentionInterface
    attn_factor: float = 1.0  # between what `attn_out` gives and what the layer adds
    down_factor: float = 1.0  # between the down projection of a dense MLP and what `mlp` gives
    expert_factor: float = 1.0  # between a fused expert and what `mlp` gives
    shared_factor: float = 1.0  # between the down projection of the shared expert and what `mlp` gives
    write_factor: float = 1.0  # between what `mlp`, or the norm behind it, gives and what the layer adds
    from_any_layer: bool = True  # a pass may begin at a layer: none reads what an earlier one kept
    unproved: tuple[tuple[str, str], ...] = ()  # sites that the proof at load refused, and why
    adds: bool = True  # False: what `mlp` gives is not simply added, so the layer is called again to see its effect


PATHS = (
    *("attn", "q", "k", "v", "fused_qkv", "o", "mid", "attn_out"),
    *("mlp", "down", "up", "gate", "post_mlp_norm", "experts", "shared_gate"),
)
"""Fields of an adapter that name a part of a layer."""
ADAPTERS: dict[str, Adapter] = {}
"""Registered rows, by `model_type`. The package itself needs none: names propose them."""


def register(adapter: Adapter) -> Adapter:
    """Register the adapter of another architecture; everything that accepts a model then accepts this one.

    `sinkscope.load` checks a row on a few tokens before it returns the model, as `opening.proof` does. A later
    row of the same `model_type` takes the place of an earlier one.
    """
    ADAPTERS[adapter.model_type] = adapter
    return adapter


DRAFT = Found("")
"""What a `Target` has until its adapter is known."""


class NotInferredError(Exception):
    """Raised where a part of a model is not found; the message is the end of a sentence about the model."""


def stack_of(hf: nn.Module) -> str:
    """Return the path of the list of decoder layers: of the configured length, in a module with the text configuration.

    Raises:
        UnsupportedError: There is none.
    """
    model: Any = hf
    row = ADAPTERS.get(model.config.model_type)
    if row is not None:
        return row.layers
    text = model.config.get_text_config()
    depth = getattr(text, "num_hidden_layers", None)
    for path, module in model.named_modules():
        if type(getattr(module, "config", None)) is type(text):  # towers for images have another one
            for name, stack in module.named_children():
                if isinstance(stack, nn.ModuleList) and len(stack) > 0 and depth in (None, len(stack)):
                    return f"{path}.{name}".strip(".")
    missing = f"it has no list of {depth} layers, one for each that its configuration names"
    draft = replace(DRAFT, model_type=model.config.model_type, layers="...")
    raise not_inferred(draft, NotInferredError(missing)) from None


def not_inferred(draft: Found, error: NotInferredError) -> UnsupportedError:
    """Return the error for a model with a part that is not where names, or a row, say; it shows the row to write."""
    settings = [repr(draft.model_type)]
    for part in fields(Adapter)[1:]:
        value = getattr(draft, part.name)
        if value != part.default:
            settings.append(f"{part.name}={value!r}")
    return UnsupportedError(
        f"the parts of model type {draft.model_type!r} are not where names, or a row, say: {error}; if it has them "
        "elsewhere, write its row (docs/extending.md): sinkscope.models.adapters.register"
        f"(Adapter({', '.join(settings)}, ...))"
    )
