"""Texts under edits on their way upward through a model, side by side, one row per edit and text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from einops import einsum, rearrange, reduce, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.hooks.edit.edits import expert_hook
from sinkscope.models.hooks import first_tensor, on_hidden, on_input, on_output
from sinkscope.models.norms import norm_of
from sinkscope.models.target import KEPT_POSITIONS, NOT_READ, Entering, LayerInput, Target
from sinkscope.results.parts import Component, Head
from sinkscope.sinks.removal.components import Edit, key_bias, key_projection, writers, writing_modules
from sinkscope.sinks.tokens import TokenRows
from sinkscope.tap.observers import visible_rows

KEY_BIAS, POSITIONS = Component("key bias"), Component("position embedding")
BATCH_ELEMENTS = 1 << 25  # largest number of elements of the widest activation in a batch
At = int | Int[Tensor, " text"]
"""A position, the same in every text or one of each."""
Hook = tuple[Any, str, Any]  # module, "pre" or "post", and the function, as `Target.hooks` takes them


@dataclass(frozen=True, eq=False)
class Trial:
    """Texts, edits of them, and what is read.

    Attributes:
        ids: The texts.
        edits: The edits; each takes as many rows of a batch as there are texts.
        at: The position that swaps edit, and where effects are read; one, or one of each text.
        places: Positions that swaps edit, and whose attention is read in sum. None: this one.
        swapped: Other positions that swaps edit instead.
        source: The position whose values replace those of swapped components; one, or one of each text.
        upto: The last layer to run. None: all.
        attention: Whether to read attention.
        behind: The first layer whose attention is read; that of earlier layers is 0.
        without: Residual dimensions that norms leave out.
        directions: Directions of the residual stream after each layer on which it is projected; None: that is not read.
        entering: What entered each layer when the texts were read intact.
        intact: The same texts, perhaps longer, on their way without an edit, if a trial has read them before.
        keep: Whether what the intact texts show is kept for later trials, which may swap any component.
    """

    ids: TokenRows
    edits: Sequence[Edit]
    at: At = 0
    places: Bool[Tensor, "text pos"] | None = None
    swapped: Bool[Tensor, "text pos"] | None = None
    source: At = -1
    upto: int | None = None
    attention: bool = False
    behind: int = 0
    without: Sequence[int] = ()
    directions: Float[Tensor, "layer d_model"] | None = None
    entering: Entering = NOT_READ
    intact: Rows | None = None
    keep: bool = False

    @property
    def begin(self) -> int:
        """The first layer in which the intact texts run: before it, no edit differs and nothing is read."""
        begins = [edit.begin for edit in self.edits if edit.begin is not None]
        begin = min(begins, default=max(self.entering.inputs, default=0))
        if self.keep:
            begin = 0
        if self.attention:
            begin = min(begin, self.behind)
        if self.upto is not None:
            begin = min(begin, self.upto)
        return self.entering.latest(begin)


class Rows:
    """One batch: all texts under the first edit, then all of them under the second, and so on.

    An edited text is as the intact one up to the first layer that the edit changes, so its rows join the others there.
    What they need of the intact texts is kept by the batch that has these texts, as its first edit.

    Attributes:
        intact: The batch that has the intact texts; this one, if no other is given.
        entered: What entered the layers in the intact texts.
        written: What components wrote at the source position of the intact texts, by the component and the number of
            the module that writes it.
        source_norms: Norm of the source position of the intact texts after each layer, if what they show is kept.
        norms: Norm of the position after each layer.
        along: Its projection on the directions, if there are any.
        received: Attention to the position, summed over later queries that see it.
        seeing: The number of these queries.
    """

    def __init__(self, target: Target, trial: Trial, edits: Sequence[Edit], intact: Rows | None = None) -> None:
        self.target = target
        self.trial = trial
        self.edits = edits
        self.intact = intact or self
        self.entered = dict(trial.entering.inputs)
        self.written: dict[tuple[Component | Head, int], Tensor] = {}
        self.keeps = target.skips_layers and trial.ids.numel() <= KEPT_POSITIONS
        texts, length = trial.ids.shape
        self._at = (torch.as_tensor(trial.at) % length).expand(texts)
        self._places = torch.zeros(texts, length, dtype=torch.bool)
        self._places[torch.arange(texts), self._at] = True
        if trial.places is not None:
            self._places = trial.places
        self._swapped = self._places if trial.swapped is None else trial.swapped
        self._source = (torch.as_tensor(trial.source) % length).expand(texts)
        self._begins = self._first_layers()
        self._layer = min(self._begins, default=0)  # the next to run
        self._joined = 0  # edits whose rows are on their way
        self._next: LayerInput | None = None
        rows = texts * len(edits)
        self.norms = torch.full((rows, target.n_layers), torch.nan)
        self.along = torch.full((rows, target.n_layers), torch.nan)
        self.received = torch.zeros(rows, target.n_layers, target.n_heads)
        self.seeing = torch.zeros(rows, target.n_layers)
        self.source_norms = torch.full((texts, target.n_layers), torch.nan)

    def _first_layers(self) -> list[int]:
        """The layer in which the rows of each edit join, in order."""
        if self.intact is not self:
            return [self.intact.joins(edit) for edit in self.edits]
        return [self.trial.begin, *map(self.joins, self.edits[1:])]

    def joins(self, edit: Edit) -> int:
        """The layer in which the rows of an edit of these texts join the others."""
        if not self.keeps:
            return self.trial.begin
        if edit.begin is None:
            return self.target.n_layers
        return edit.begin

    @property
    def depth(self) -> int:
        """Number of layers up to the last that is wanted."""
        if self.trial.upto is None:
            return self.target.n_layers
        return self.trial.upto + 1

    @property
    def texts(self) -> int:
        """Number of texts."""
        return len(self.trial.ids)

    @property
    def count(self) -> int:
        """Number of rows on their way."""
        return self.texts * self._joined

    def by_row(self, tensor: Tensor) -> Float[Tensor, "row pos d"]:
        """An activation with separate rows; experts and OPT run row and position together."""
        return rearrange(tensor.flatten(0, -2), "(row pos) d -> row pos d", row=self.count)

    @property
    def attention(self) -> Float[Tensor, "row layer head"]:
        """Mean attention from later queries that see the position."""
        return self.received / self.seeing.clamp(min=1)[..., None]

    def read(self) -> tuple[Float[Tensor, "what edit text depth"], Float[Tensor, "edit text _ head"]]:
        """Norms and projections in each layer up to the last that was wanted, and attention; of no layer if unread."""
        edits, intact = len(self.edits), self.intact
        joined = torch.arange(self.target.n_layers) >= torch.tensor(self._begins)[:, None]
        joined = joined.repeat_interleave(self.texts, 0)
        read = torch.stack([self.norms, self.along])
        unedited = torch.stack([intact.norms, intact.along])[:, : self.texts].repeat(1, edits, 1)
        read = torch.where(joined, read, unedited)[..., : self.depth]
        attention = self.attention[:, :0]
        if self.trial.attention:
            unedited = intact.attention[: self.texts].repeat(edits, 1, 1)
            attention = torch.where(joined[..., None], self.attention, unedited)[:, : self.depth]
        return read.unflatten(1, (edits, self.texts)), attention.unflatten(0, (edits, self.texts))

    def run(self, upto: int) -> None:
        """Go on to the end of a layer, or to the last layer that is wanted; nothing to do if it has been passed."""
        if self.trial.upto is not None:
            upto = min(upto, self.trial.upto)
        while self._layer <= upto:
            self._join()
            later = [begin - 1 for begin in self._begins if begin > self._layer]
            last = min([upto, *later])
            if self._joined:
                self._forward(last)
            self._layer = last + 1

    def _join(self) -> None:
        """The rows of the edits that begin at the next layer join the others."""
        joining = sum(begin <= self._layer for begin in self._begins) - self._joined
        if joining and self._layer:
            known = Entering({self._layer: self.intact.entered[self._layer]})
            entering = known.part(slice(None), self.trial.ids.shape[1]).at(self._layer, joining)
            if self._next is not None and entering is not None:
                entering = replace(entering, hidden=torch.cat([self._next.hidden, entering.hidden]))
            self._next = entering
        self._joined += joining

    def _forward(self, last: int) -> None:
        """Run the rows to the end of a layer."""
        trial, target = self.trial, self.target
        rows = torch.arange(self.count)
        at = self._at.repeat(self._joined)
        layer = self._layer
        wanted = {self.joins(edit) for edit in trial.edits}

        def layer_done(output: Any) -> None:
            nonlocal layer
            hidden = first_tensor(output)
            self.norms[: self.count, layer] = norm_of(hidden[rows, at], trial.without)
            if trial.directions is not None and layer < len(trial.directions):
                direction = trial.directions[layer].to(hidden.device)
                self.along[: self.count, layer] = (hidden[rows, at].float() @ direction).cpu()
            if trial.keep and self.intact is self:
                at_source = hidden[torch.arange(self.texts), self._source]
                self.source_norms[:, layer] = norm_of(at_source, trial.without)
            layer += 1
            self._next = LayerInput(layer, hidden, isinstance(output, tuple))
            if self.intact is self and self.keeps and (trial.keep or layer in wanted):
                self.entered[layer] = replace(self._next, hidden=hidden[: self.texts].clone())

        def attention_read(
            number: int,
            first: int,
            probs: Float[Tensor, "row head query key"],
            visible: Callable[[], Bool[Tensor, "row _ query key"]],
        ) -> None:
            queries = torch.arange(first, first + probs.shape[2])
            keys = self._places.repeat(self._joined, 1).to(probs.device)[:, : probs.shape[-1]]
            later = queries > rearrange(keys.int().argmax(1).cpu(), "row -> row 1")
            sees = visible().expand(self.count, -1, -1, -1)[:, 0]
            later &= (sees.to(probs.device) & rearrange(keys, "row key -> row 1 key")).any(-1).cpu()
            to_position = einsum(probs, keys.to(probs.dtype), "row head query key, row key -> row head query").cpu()
            to_position = to_position * rearrange(later, "row query -> row 1 query")
            self.received[: self.count, number] += reduce(to_position, "row head query -> row head", "sum")
            self.seeing[: self.count, number] += later.sum(1)
            if number == trial.upto and queries[-1] == trial.ids.shape[1] - 1:
                target.stop()  # nothing after it is wanted

        hooks = self._hooks(layer, last)
        hooks += [(module, "post", on_output(layer_done)) for module in target.layers[layer : last + 1]]
        listening = nullcontext()
        if trial.attention and last >= trial.behind:
            listening = visible_rows(target, attention_read, layers=list(range(trial.behind, last + 1)))
        ids = repeat(trial.ids, "text pos -> (edit text) pos", edit=self._joined)
        with listening, target.hooks(*hooks):
            target.forward(ids, upto=last, start=self._next)

    # --- hooks ---

    def _hooks(self, first: int, last: int) -> list[Hook]:
        """The hooks that keep what is needed of the intact texts, and carry out the edits, in some layers."""
        silenced: dict[tuple[int, ...], list[tuple[int, range]]] = {}  # (layer) or (layer, expert): neurons, their rows
        swapped: dict[Component | Head, list[int]] = {}
        for number, edit in enumerate(self.edits[: self._joined]):
            rows = range(number * self.texts, (number + 1) * self.texts)
            for site in edit.zero:
                silenced.setdefault(site[:-1], []).append((site[-1], rows))
            for component in edit.swap:
                swapped.setdefault(component, []).extend(rows)
        hooks = []
        if self.intact is self:
            for component in self._kept():
                if first <= (component.layer or 0) <= last:
                    hooks += self._keep(component)
        for mlp, neurons in silenced.items():
            if first <= mlp[0] <= last:
                hooks.append(self._silence(mlp, neurons))
        for component, its_rows in swapped.items():
            if component == KEY_BIAS:
                hooks += self._unbias(range(first, last + 1), torch.tensor(its_rows))
            elif first <= (component.layer or 0) <= last:
                hooks += self._swap(component, torch.tensor(its_rows))
        return hooks

    def _kept(self) -> list[Component | Head]:
        """Components whose writing is kept; that of all heads of a layer is kept together."""
        components = [component for edit in self.trial.edits for component in edit.swap if component != KEY_BIAS]
        if self.trial.keep:
            components = [*writers(self.target, self.target.n_layers)]
            layers = [one.layer or 0 for one in components if one.kind == "attention"]
            components += [Head(layer, 0) for layer in layers]
        return list(dict.fromkeys(map(_whole, components)))

    def _keep(self, component: Component | Head) -> list[Hook]:
        texts = torch.arange(self.texts)
        token_embeddings: list[Tensor] = []

        def keep(number: int, output: Tensor) -> None:
            self.written[component, number] = self.by_row(output)[texts, self._source].clone()

        def embedded(output: Tensor) -> None:
            token_embeddings[:] = [output.detach()[: self.texts].clone()]

        def keep_positions(entering: Tensor) -> None:
            """The learned position embedding is what the first layer gets beyond the token embedding."""
            positions = entering[: self.texts] - token_embeddings[0]
            self.written[component, 0] = positions[texts, self._source] - positions[texts, self._at]

        points = _points(self.target, component)
        if component == POSITIONS:
            ((module, when, on),) = points
            return [(self.target.embedding, "post", on_hidden(embedded)), (module, when, on(keep_positions))]
        return [(module, when, on(partial(keep, number))) for number, (module, when, on) in enumerate(points)]

    def _swap(self, component: Component | Head, rows: Int[Tensor, " swapped"]) -> list[Hook]:
        row, at = self._swapped[rows % self.texts].nonzero().T
        row, text = rows[row], rows[row] % self.texts

        def replaced(number: int, output: Tensor) -> Tensor:
            """What a component writes, with the source's value at the position."""
            whole = self.by_row(output).clone()
            written = self.intact.written[_whole(component), number][text]
            columns = slice(None)
            if isinstance(component, Head):
                width = whole.shape[-1] // self.target.n_heads
                columns = slice(component.head * width, (component.head + 1) * width)
            if component == POSITIONS:
                written = whole[row, at] + written
            whole[row, at, columns] = written[:, columns]
            return whole.reshape(output.shape)

        points = _points(self.target, component)
        return [(module, when, on(partial(replaced, number))) for number, (module, when, on) in enumerate(points)]

    def _unbias(self, layers: range, rows: Int[Tensor, " swapped"]) -> list[Hook]:
        def unbiased(layer: int, keys: Tensor) -> Tensor:
            without = keys.clone()
            bias = key_bias(self.target, layer)  # a streamed layer is there only now
            assert bias is not None
            without[rows] -= bias
            return without

        biased = [layer for layer in layers if key_bias(self.target, layer) is not None]
        return [(key_projection(self.target, layer), "post", on_output(partial(unbiased, layer))) for layer in biased]

    def _silence(self, mlp: tuple[int, ...], neurons: list[tuple[int, range]]) -> Hook:
        numbers = list(dict.fromkeys(neuron for neuron, _ in neurons))
        mask = torch.zeros(self.count, 1, len(numbers), dtype=torch.bool)
        for neuron, rows in neurons:
            mask[rows, :, numbers.index(neuron)] = True

        def zeroed(values: Tensor) -> Tensor:
            return self.by_row(values).masked_fill(mask.to(values.device), 0).reshape(values.shape)

        def before(post: Tensor) -> Tensor:
            index = torch.tensor(numbers, device=post.device)
            return post.index_copy(-1, index, zeroed(post[..., index]))

        if len(mlp) == 1:
            return self.target.mlp_part(mlp[0], "down"), "pre", on_input(before)
        experts = self.target.experts(mlp[0])
        return experts.module, "post", expert_hook(experts, mlp[1], numbers, "post", zeroed)


def _whole(component: Component | Head) -> Component | Head:
    """The component; the first head stands for all heads of a layer, which are kept together."""
    return Head(component.layer, 0) if isinstance(component, Head) else component


def _points(target: Target, component: Component | Head) -> list[Hook]:
    """Where what a component writes passes by: modules, before or after them, and what makes a hook of a function."""
    if isinstance(component, Head):
        return [(target.output_projection(component.layer), "pre", on_input)]
    if component == POSITIONS:
        return [(target.layers[0], "pre", on_input)]
    return [(module, "post", on_hidden) for module in writing_modules(target, component)]
