"""Measurements that listen at the tap: attention rows, a few queries at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from jaxtyping import Float
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.models.hooks import Hook, on_output
from sinkscope.models.target import Target
from sinkscope.tap.call import Attention
from sinkscope.tap.stock import eager
from sinkscope.tap.tap import listening

RowObserver = Callable[[int, int, Tensor], None]
VisibleRowObserver = Callable[[int, int, Tensor, Callable[[], Tensor]], None]


def attention_rows(target: Target, observer: RowObserver, **options: Any) -> AbstractContextManager[None]:
    """Context manager: every forward pass in this context shows its attention rows to `observer`.

    Args:
        target: The model.
        observer: Called as `observer(layer, first_query, rows)`; rows `[batch head query key]`, float32, after
            softmax. Learned sink logits take part, so that rows then sum to less than one. Keys are those in the
            cache: under a cache policy only the ones it keeps, so a key's index is not its position.
        options: As for `visible_rows`.

    A TransformerBridge, and a model outside transformers' attention interface (BLOOM, Falcon, GPT-J, MPT and others),
    itself builds whole query x key matrices, which are passed on in one piece.
    """
    return visible_rows(target, lambda layer, first, rows, _visible: observer(layer, first, rows), **options)


@contextmanager
def visible_rows(
    target: Target,
    observer: VisibleRowObserver,
    *,
    layers: list[int] | None = None,
    rows_per_chunk: int = 256,
    whole: bool = True,
    begin: int = 0,
    proving: bool = False,
) -> Iterator[None]:
    """Do as `attention_rows`, and also tell the observer which keys the queries see.

    Args:
        target: The model.
        observer: Called as `observer(layer, first_query, rows, visible)`; `visible()` gives `[batch 1 query key]`, what
            the mask shows. Of a model that builds its matrices itself it is where some head has attention.
        layers: Layers to show. None shows all.
        rows_per_chunk: Number of queries shown at a time; memory is `batch x head x rows_per_chunk x key`.
        whole: Whether the rows of all heads are shown. If not, a process of several shows those of the heads that it
            holds, and the observer gathers what it makes of them, which is smaller (`target.shards.gather`).
        begin: The first query whose row is shown.
        proving: As for `listening`.
    """
    wanted = target.attending
    if layers is not None:
        wanted = [layer for layer in wanted if layer in layers]

    def see(call: Attention) -> None:
        layer = call.layer

        def tell(first: int, rows: Tensor) -> None:
            if whole:
                rows = target.shards.gather(rows, target.n_heads, 1)
            observer(layer, first, rows, lambda: call.visible(slice(first, first + rows.shape[2])))

        if layer in wanted:
            call.show(tell, needs_mask=True, first=begin, chunk=rows_per_chunk)

    is_bridge = target.kind == "bridge"
    if not is_bridge and target.adapter.attention_interface:
        with listening(target, see, proving=proving):
            yield
        return
    hooks = list[Hook]()
    for layer in wanted:

        def read(output: Any, layer: int = layer) -> None:
            rows = output if is_bridge else _returned_rows(target, layer, output)
            rows = rows[:, :, begin:]
            if whole:
                rows = target.shards.gather(rows, target.n_heads, 1)
            observer(layer, begin, rows.float(), lambda: (rows > 0).any(1, keepdim=True))

        if is_bridge:
            module = target.model.hook_dict[f"blocks.{layer}.attn.hook_pattern"]
        else:
            module = target.sub(layer, "attn")
        hooks.append((module, "post", on_output(read)))
    with nullcontext() if is_bridge else eager(target), target.hooks(*hooks):
        yield


def _returned_rows(target: Target, layer: int, output: Any) -> Float[Tensor, "batch head query key"]:
    """The attention rows that a module outside transformers' attention interface returns beside its output."""
    rows = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    if not isinstance(rows, Tensor) or rows.ndim != 4:
        raise UnsupportedError(
            f"layer {layer} of {target.name} does not return its attention, which is computed inside its module: use "
            "another model for attention"
        )
    return rows


def check_attention_visible(target: Target) -> None:
    """Refuse a model whose attention does not go through transformers, because its queries and keys are not visible."""
    if not target.adapter.attention_interface or target.kind == "bridge":
        raise UnsupportedError(
            f"queries and keys of this {target.adapter.model_type} model ({target.kind}) are not offered, because its "
            "attention has a form of its own: give another model, or the plain Hugging Face model of a bridge"
        )
