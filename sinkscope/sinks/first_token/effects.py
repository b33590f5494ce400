"""What edits of single components do to one position: its norm in each layer and the attention it receives.

All edits run side by side in one forward pass: one row per edit, after a row that stays intact. A streamed model is
therefore read once for any number of edits, and every value that is written comes from the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.files.notation import head_name
from sinkscope.interventions.edits import expert_hook
from sinkscope.models.target import Target, first_tensor, norm_of, on_hidden, on_input, on_output
from sinkscope.sinks.first_token.found import LOST, Carrier, FirstTokenAttention, Sites
from sinkscope.trace.attention import attention_rows

Kind = Literal[
    "token embedding",
    "position embedding",
    "attention",
    "head",
    "mlp",
    "key bias",
    # These are separate only in sums (see `attribution`) and cannot be swapped.
    "attention bias",
    "sink neurons",
    "norm bias",
    "input bias",
]
_ELEMENTS = 1 << 25  # largest number of elements of the widest activation in a batch


class Component(NamedTuple):
    """A part of the model that writes into the residual stream, or the bias of a layer's keys."""

    kind: Kind
    layer: int | None = None
    head: int | None = None

    def __str__(self) -> str:
        if self.layer is None:
            return self.kind
        if self.head is not None:
            return head_name(self.layer, self.head)
        return f"{'MLP' if self.kind == 'mlp' else self.kind} of layer {self.layer}"


class Edit(NamedTuple):
    """One intervention.

    Attributes:
        zero: Neurons silenced at every position, as (layer, neuron) or (layer, expert, neuron).
        swap: Components that write at the position what they write at the source position of the intact text. A key
            bias is instead removed at every position.
        add: A (layer, vectors `[text d_model]`) pair; the vectors are added at the position to the output of that
            layer's MLP.
    """

    zero: Sites = ()
    swap: tuple[Component, ...] = ()
    add: tuple[tuple[int, Tensor], ...] = ()


@dataclass(frozen=True)
class Effects:
    """The state of the position under each edit.

    Attributes:
        norms: L2 norm of the residual stream after each layer, without the dimensions that were left out.
        attention: Mean attention from later queries to the position; of no layer if it was not requested.
        intact_norms: The same norms without an edit.
        intact_attention: The same attention without an edit.
    """

    norms: Float[Tensor, "edit text layer"]
    attention: Float[Tensor, "edit text _ head"]
    intact_norms: Float[Tensor, "text layer"]
    intact_attention: Float[Tensor, "text _ head"]

    def drops(self, layer: int) -> Float[Tensor, " edit"]:
        """Share of the norm after a layer that each edit takes away, median over texts."""
        return (1 - self.norms[..., layer] / self.intact_norms[:, layer]).median(1).values

    def lost(self, heads: Sequence[tuple[int, int]]) -> tuple[list[float], list[float]]:
        """For each edit, the share of `heads` that lose half of their attention to the position, and the mean drop."""
        layer, head = torch.tensor(heads).T
        intact = self.intact_attention[:, layer, head].median(0).values
        drops = 1 - self.attention[:, :, layer, head].median(1).values / intact
        return (drops >= LOST).float().mean(1).tolist(), drops.mean(1).tolist()


@torch.no_grad()
def effects(
    target: Target,
    ids: Int[Tensor, "text pos"],
    edits: Sequence[Edit],
    *,
    at: int = 0,
    source: int = -1,
    upto: int | None = None,
    attention: bool = False,
    without: Sequence[int] = (),
) -> Effects:
    """Run every edit on every text in as few passes as memory allows.

    Args:
        target: The model.
        ids: The texts.
        edits: The edits; each takes one row of a batch.
        at: The position that swaps edit, and where effects are read.
        source: The position whose values replace those of swapped components.
        upto: The last layer to run. None: all.
        attention: Whether to read attention.
        without: Residual dimensions that norms leave out.

    Returns:
        Norms and attention under each edit. Entries of layers that were not run are missing at the end.
    """
    per_row = len(ids) * ids.shape[1] * max(target.d_mlp, target.d_model)
    size = max(1, _ELEMENTS // per_row - 1)
    parts = [
        _Pass(target, ids, edits[i : i + size], at, source % ids.shape[1], without).run(upto, attention)
        for i in range(0, max(len(edits), 1), size)
    ]
    norms, paid = (torch.cat([part[1:] for part in every]) for every in zip(*parts, strict=True))
    return Effects(norms, paid, *(intact[0] for intact in parts[0]))


def attention_behind(
    target: Target, ids: Int[Tensor, "text pos"], layer: int, zeroed: Sites, control: Sites
) -> FirstTokenAttention | None:
    """What zeroing neurons does to the attention behind a layer; None if there is nothing to zero or no such layer."""
    layers = list(range(layer + 1, min(layer + 4, target.n_layers)))
    if not layers or not zeroed:
        return None
    seen = effects(target, ids[:1], [Edit(zero=zeroed), Edit(zero=control)], upto=layers[-1], attention=True)
    rows = (seen.intact_attention, *seen.attention)
    return FirstTokenAttention(tuple(layers), *(float(row[0, layers].mean()) for row in rows))


def attending(target: Target, row: Int[Tensor, " pos"], at: int, layers: int, eps: float) -> list[tuple[int, int]]:
    """The (layer, head) pairs whose mean attention to one position of one text exceeds `eps`."""
    paid = effects(target, row[None], [], at=at, upto=layers - 1, attention=True).intact_attention[0]
    return [(layer, head) for layer, head in (paid > eps).nonzero().tolist()]


class _Pass:
    """One batch: for each edit all texts, the intact ones first."""

    def __init__(
        self, target: Target, ids: Tensor, edits: Sequence[Edit], at: int, source: int, without: Sequence[int]
    ) -> None:
        self.target, self.texts, self.at, self.source = target, len(ids), at, source
        self.ids = ids.repeat(len(edits) + 1, 1)
        self.edits = edits
        self.without = without

    def run(self, upto: int | None, attention: bool) -> tuple[Tensor, Tensor]:
        """Norms `[edit text layer]` and attention `[edit text layer head]`, the intact texts first."""
        target, last = self.target, self.target.n_layers - 1 if upto is None else upto
        norms: list[Tensor] = []
        received = torch.zeros(len(self.ids), target.n_layers, target.n_heads)

        def layer_done(out: Any) -> None:
            norms.append(norm_of(first_tensor(out)[:, self.at], self.without))

        def rows(layer: int, first: int, probs: Tensor) -> None:
            later = probs[:, :, max(0, self.at + 1 - first) :, self.at]
            received[:, layer] += later.sum(-1).cpu() / max(1, self.ids.shape[1] - self.at - 1)

        done = ((layer, "post", on_output(layer_done)) for layer in target.layers)
        with attention_rows(target, rows) if attention else nullcontext(), target.hooks(*self._hooks(), *done):
            target.forward(self.ids, upto=upto)
        each = (-1, self.texts)
        paid = received[:, : last + 1 if attention else 0]
        return torch.stack(norms, -1).cpu().unflatten(0, each), paid.unflatten(0, each)

    def _rows(self, edit: int) -> slice:
        return slice((edit + 1) * self.texts, (edit + 2) * self.texts)

    def _hooks(self) -> list[tuple[Any, str, Any]]:
        silenced: dict[tuple[int, int | None], dict[int, list[int]]] = {}  # (layer, expert) -> neuron -> edits
        swapped: dict[Component, list[int]] = {}
        added: dict[int, list[tuple[int, Tensor]]] = {}
        for number, edit in enumerate(self.edits):
            for site in edit.zero:
                mlp = (site[0], site[1] if len(site) == 3 else None)
                silenced.setdefault(mlp, {}).setdefault(site[-1], []).append(number)
            for component in edit.swap:
                swapped.setdefault(component, []).append(number)
            for layer, vectors in edit.add:
                added.setdefault(layer, []).append((number, vectors))
        hooks = [self._silence(*mlp, neurons) for mlp, neurons in silenced.items()]
        hooks += [self._add(layer, several) for layer, several in added.items()]
        return hooks + [hook for component, numbers in swapped.items() for hook in self._swap(component, numbers)]

    def _silence(self, layer: int, expert: int | None, neurons: dict[int, list[int]]) -> tuple[Any, str, Any]:
        order = list(neurons)
        mask = torch.zeros(len(self.ids), len(order), dtype=torch.bool)
        for column, numbers in enumerate(neurons.values()):
            for number in numbers:
                mask[self._rows(number), column] = True

        def zeroed(flat: Tensor) -> Tensor:
            values = flat.reshape(len(self.ids), -1, len(order))  # experts and OPT run batch and position together
            return values.masked_fill(mask[:, None].to(flat.device), 0).reshape(flat.shape)

        if expert is not None:
            experts = self.target.sub(layer, self.target.adapter.experts or "")
            return experts, "post", expert_hook(expert, order, "post", zeroed)

        def before(post: Tensor) -> Tensor:
            return post.index_copy(-1, torch.tensor(order, device=post.device), zeroed(post[..., order]))

        return self.target.mlp_part(layer, "down"), "pre", on_input(before)

    def _add(self, layer: int, several: list[tuple[int, Tensor]]) -> tuple[Any, str, Any]:
        def written(tensor: Tensor) -> Tensor:
            whole = tensor.reshape(len(self.ids), -1, tensor.shape[-1]).clone()
            for number, vectors in several:
                whole[self._rows(number), self.at] += vectors.to(whole.device, whole.dtype)
            return whole.reshape(tensor.shape)

        return self.target.sub(layer, self.target.adapter.mlp), "post", on_hidden(written)

    def _swap(self, component: Component, numbers: list[int]) -> list[tuple[Any, str, Any]]:
        target, adapter, kind, layer = self.target, self.target.adapter, component.kind, component.layer or 0
        rows = [self._rows(number) for number in numbers]

        def replaced(tensor: Tensor) -> Tensor:
            """The tensor of a component, `[row pos ...]` or flat, with the source's value at the position."""
            whole = tensor.reshape(len(self.ids), -1, tensor.shape[-1]).clone()
            for some in rows:
                whole[some, self.at] = whole[: self.texts, self.source]
            return whole.reshape(tensor.shape)

        def unbiased(out: Tensor) -> Tensor:
            new, bias = out.clone(), _bias(target.sub(layer, adapter.k or ""))
            for some in rows:
                new[some] -= 0 if bias is None else bias
            return new

        def one_head(z: Tensor) -> Tensor:
            heads = list(z.chunk(target.n_heads, -1))
            heads[component.head or 0] = replaced(heads[component.head or 0])
            return torch.cat(heads, -1)

        if kind == "position embedding":
            return self._positions(rows)
        if kind == "head":
            return [(target.sub(layer, adapter.o), "pre", on_input(one_head))]
        if kind == "key bias":
            return [(target.sub(layer, adapter.k or ""), "post", on_output(unbiased))]
        writer = {"attention": adapter.attn, "mlp": adapter.mlp}.get(kind)
        return [(target.embedding if writer is None else target.sub(layer, writer), "post", on_hidden(replaced))]

    def _positions(self, rows: list[slice]) -> list[tuple[Any, str, Any]]:
        """The learned position embedding is what the first layer gets beyond the token embedding."""
        held: dict[str, Tensor] = {}

        def embedded(out: Any) -> None:
            held["tokens"] = first_tensor(out).detach()[: self.texts].clone()

        def before(entering: Tensor) -> Tensor:
            hidden = entering.clone()
            places = hidden[: self.texts] - held["tokens"]
            for some in rows:
                hidden[some, self.at] += places[:, self.source] - places[:, self.at]
            return hidden

        return [(self.target.embedding, "post", on_output(embedded)), (self.target.layers[0], "pre", on_input(before))]


def writers(target: Target, count: int) -> list[Component]:
    """Everything that writes into the residual stream: embeddings, and the attention and MLP of the first layers."""
    embeddings = [Component("token embedding")]
    if target.adapter.absolute_positions:
        embeddings.append(Component("position embedding"))
    return embeddings + [Component(kind, i) for i in range(count) for kind in ("attention", "mlp")]


def has_key_bias(target: Target, layer: int) -> bool:
    """Whether the keys of a layer have a separate bias that can be removed (not one of a fused projection)."""
    return target.adapter.k is not None and _bias(target.sub(layer, target.adapter.k)) is not None


def _bias(module: Any) -> Tensor | None:
    """Of a linear module, also below a bridge's wrapper."""
    return getattr(getattr(module, "original_component", module), "bias", None)


def carriers(
    target: Target, ids: Int[Tensor, "text pos"], heads: Sequence[tuple[int, int]], at: int = 0
) -> tuple[Carrier, ...]:
    """Replace each component at the position by what it writes at a later one, to see whose absence ends the sink.

    "position" is what remains when everything written at the position is replaced.
    """
    last = max(layer for layer, _ in heads)
    parts = writers(target, last)
    biases = [Component("key bias", i) for i in range(last + 1) if has_key_bias(target, i)]
    sets = [(c,) for c in parts] + ([tuple(biases)] if biases else [])
    edits = [Edit(swap=some) for some in (*sets, tuple(parts))]
    source = (at + ids.shape[1]) // 2
    seen = effects(target, ids, edits, at=at, source=source, upto=last, attention=True)
    lost, drops = seen.lost(heads)
    names = ["key bias" if s[0].kind == "key bias" else str(s[0]) for s in sets]
    found = [Carrier(*row) for row in zip(names, lost, drops, strict=False)]
    return (*found, Carrier("position", 1 - lost[-1], 1 - drops[-1]))


def carried_by(found: Sequence[Carrier]) -> str | None:
    """The component that most heads of the sink need; of several, the one nearest to the heads. None if no single one.

    What an attention layer or an MLP writes without making a spike is called the mark.
    """
    needed = [c.name for c in found if c.needed]
    if "key bias" in needed:
        return "key bias"
    if any("layer" in name for name in needed):
        return "mark"
    return next((name for name in needed if "embed" in name), next(iter(needed), None))


def maker(target: Target, ids: Int[Tensor, "text pos"], layer: int, without: Sequence[int]) -> str | None:
    """The component without which the first token's spike after `layer` is gone; None if there is no single one."""
    candidates = writers(target, layer + 1)
    edits = [Edit(swap=(c,)) for c in candidates]
    drops = effects(target, ids, edits, source=ids.shape[1] // 2, upto=layer, without=without).drops(layer)
    best = int(drops.argmax())
    return str(candidates[best]) if float(drops[best]) >= 0.5 else None
