"""Prove an adapter on a few tokens: its parts, by sums and edits, and attention that sinkscope recomputes.

Neurons and sites are checked in one pass (`inference.sums`). Recomputed attention is compared with the model's own in
passes that end after the first layers, while every window, chunk and choice of keys is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from sinkscope.engine.attention import Attention, relative_error
from sinkscope.engine.stock import eager
from sinkscope.engine.tap import attention_rows, listening
from sinkscope.errors import UnsupportedError, first_line
from sinkscope.models.adapters import PATHS, layer_kinds
from sinkscope.models.grouped_heads import head_projection, per_query_head
from sinkscope.models.hooks import Hook, on_input, on_output
from sinkscope.models.target import Target
from sinkscope.opening.inference.sums import layer_sums, token_ids

_ATTENTION_LAYERS = 2  # neighbours may differ: windows alternate
_NARROW = 6  # tokens of every window, chunk and choice of keys while attention is checked
PROBED_TOKENS = 20  # tokens of that check, so that it goes beyond all of them
_REACHES = {  # in configurations and modules: how far, or to how many keys, a layer attends, and the most meanwhile
    "sliding_window": _NARROW,
    "sliding_window_size": _NARROW,
    "attention_window_size": _NARROW,
    "attention_chunk_size": _NARROW,
    "window_size": _NARROW,
    "local_attention": _NARROW,
    "index_topk": _NARROW,
    "topk_blocks": 2,
}
_BLOCK = 2  # tokens of a block of keys, where an indexer chooses blocks


@dataclass
class ProbeReport:
    """What the probe found.

    Attributes:
        problem: What is wrong. None if nothing is.
        unproved: Why sites cannot be proved, by layer and the last part of their names.
    """

    problem: str | None = None
    unproved: dict[int, dict[str, str]] = field(default_factory=dict)


@torch.no_grad()
def probe(target: Target, *, every_layer: bool = True) -> ProbeReport:
    """Check on a few tokens that edits at the adapter's sites work as intended and attention is recomputed correctly.

    Args:
        target: The model, with an adapter. It is left unchanged.
        every_layer: Whether all layers are edited, and not only the first of each kind.

    Returns:
        What was found; `problem` says what is wrong. A wrong adapter does not raise an error.
    """
    tolerance = max(1e-3, 16 * torch.finfo(target.dtype).eps)
    if getattr(target.hf, "is_quantized", False):
        tolerance = max(tolerance, 0.2)
    report = ProbeReport()
    try:
        _check_paths(target)
        kinds = range(target.n_layers) if every_layer else layer_kinds(target.layers)
        proved = layer_sums(target, sorted({*kinds}))
        report.unproved = {sums.layer: sums.problems for sums in proved}
        for sums in proved:
            if not all(error <= tolerance for error in sums.edits.errors):  # "not <=", so that NaN is wrong as well
                raise UnsupportedError("a moved neuron does not change the layer as the adapter says")
            if "hook_mlp_out" in sums.problems:
                reason = sums.problems["hook_mlp_out"]
                raise UnsupportedError(f"what the MLP gives is not added as the adapter says: {reason}")
        if not attention_error(target) <= tolerance:
            raise UnsupportedError("recomputed attention differs from the model's own")
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except UnsupportedError as wrong:
        report.problem = str(wrong)
    except Exception as error:
        report.problem = f"a forward pass raised {type(error).__name__}: {first_line(error)}"
    return report


def _check_paths(target: Target) -> None:
    """Refuse an adapter that names a part that no layer has."""
    adapter = target.adapter
    for name in PATHS:
        path = getattr(adapter, name)
        is_optional = path is None or (adapter.experts is not None and name in ("down", "up", "gate"))
        if not is_optional and not any(name in paths for paths in target.paths):
            raise UnsupportedError(f"the adapter names a module that is not there ({path!r} in no layer)")


def attention_error(target: Target) -> float:
    """Return the largest distance of recomputed attention rows of the first layers from the model's own weights.

    Raises:
        UnsupportedError: They cannot be compared; the message says why.
    """
    adapter, layers = target.adapter, target.attending[:_ATTENTION_LAYERS]
    chunks: dict[int, list[Tensor]] = {}
    values, outputs, heads = dict[int, Tensor](), dict[int, Any](), dict[int, Tensor]()

    def keep_rows(layer: int, _first: int, rows: Tensor) -> None:
        chunks.setdefault(layer, []).append(rows)

    def keep_values(call: Attention) -> None:
        values[call.layer] = call.value.float()

    def keep_projected(layer: int, output: Tensor) -> None:
        value = head_projection("v", target, output).transpose(1, 2).float()
        most = getattr(target.sub(layer, "attn"), "clip_qkv", None) or torch.inf  # MPT
        values[layer] = value.clamp(-most, most)

    hooks, projected = list[Hook](), list[Hook]()
    for layer in layers:
        hooks.append((target.sub(layer, "attn"), "post", on_output(partial(outputs.__setitem__, layer))))
        if adapter.learned_sinks or not adapter.attention_interface:
            hooks += target.part_hooks(layer, "o", "pre", on_input(partial(heads.__setitem__, layer)))
        part = "v"
        if adapter.qkv_layout is not None and part not in target.paths[layer]:
            part = "fused_qkv"
        projected += target.part_hooks(layer, part, "post", on_output(partial(keep_projected, layer)))
    ids = token_ids(target, PROBED_TOKENS)
    # SDPA drops a soft cap, and eager attention does not: what is compared is computed in one way.
    capped = getattr(target.config.get_text_config(), "attn_logit_softcapping", None) is not None
    with _narrowed(target):
        tap = listening(target, keep_values, proving=True) if adapter.attention_interface else target.hooks(*projected)
        with (
            eager(target) if capped else nullcontext(),
            tap,
            attention_rows(target, keep_rows, layers=layers, rows_per_chunk=3, proving=True),
        ):
            target.forward(ids, last_layer=layers[-1])
        with eager(target), target.hooks(*hooks):  # not under the tap, which may replace the model's attention
            target.forward(ids, last_layer=layers[-1])
    errors = [0.0]
    for layer in layers:
        if layer not in chunks:
            raise UnsupportedError(f"no attention was recomputed in layer {layer}")
        rows, own = torch.cat(chunks[layer], 2), outputs[layer][1].float()
        if rows.shape[1] != target.n_heads:
            raise UnsupportedError(f"layer {layer} has {rows.shape[1]} heads, and the configuration {target.n_heads}")
        if rows.shape != own.shape:
            raise UnsupportedError(
                f"recomputed attention has shape {tuple(rows.shape)}, the model's own {tuple(own.shape)}"
            )
        if layer in heads and layer in values:
            value = per_query_head(values[layer], rows.shape[1])
            weighted = rearrange(rows @ value, "row head query d_head -> row query (head d_head)")
            errors.append(relative_error(weighted, heads[layer].float().reshape(1, PROBED_TOKENS, -1)))
        if not adapter.attention_interface:
            errors.append(float((rows.sum(-1) - 1).abs().max()))
        if adapter.learned_sinks:  # some models take the share of the sinks off the output, not the weights
            rows = rows / rows.sum(-1, keepdim=True)
            own = own / own.sum(-1, keepdim=True)
        errors.append(float((rows - own).abs().max()))
    return float(torch.tensor(errors).max())  # NaN if one is


@contextmanager
def _narrowed(target: Target) -> Iterator[None]:
    """Context manager in which every window, chunk and choice of keys is small, so that few tokens go beyond it."""
    owners: list[Any] = [*target.configs]
    for layer in target.layers:
        owners += layer.modules()
    with ExitStack() as stack:
        for owner in owners:
            most = dict(_REACHES)
            if hasattr(owner, "topk_blocks"):
                most["block_size"] = _BLOCK
            for name, narrow in most.items():
                reach = getattr(owner, name, None)
                if isinstance(reach, int) and reach > narrow:
                    stack.callback(setattr, owner, name, reach)
                    setattr(owner, name, narrow)
        yield
