"""Edits of one spike side by side: rows of one pass, of which each has an edit of its own, beside the intact texts.

A streamed model is therefore read once for any number of edits. The rows of an edit join in the layer of its first
part, as copies of the intact ones, where passes over the model may begin at a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, product
from typing import Any

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinkscope.files.progress import report
from sinkscope.hooks.edit.places import neurons_place
from sinkscope.hooks.edit.sites import groups_of
from sinkscope.models.hooks import Hook, first_tensor, on_output
from sinkscope.models.passes.batch import rows_at_once
from sinkscope.models.target import NO_INPUTS, LayerInput, LayerInputs, Target
from sinkscope.results.parts import Neuron
from sinkscope.sinks.spikes.components import places_of
from sinkscope.sinks.spikes.spike import Part, Parts, Spike
from sinkscope.sinks.spikes.survey import NARROWEST, Mask, TokenRows
from sinkscope.tap.observers import visible_rows

LOGITS = 1 << 22  # logits of a text at most: of large vocabularies, every second position is read, or fewer

Written = Mapping[Part, Float[Tensor, " d"]]
"""What a component or a head writes at the place instead: its mean over ordinary positions."""


@dataclass(frozen=True, eq=False)
class Reading:
    """A run: texts, their edits, and what is read.

    Attributes:
        ids: The texts.
        place: The positions of the spike in them.
        spike: The spike whose projection is read.
        edits: The parts that each edit removes: neurons are zeroed everywhere, other parts are replaced at the place.
        means: What replaced parts write instead.
        entering: What entered each layer when the texts were read.
        whole: Whether the pass runs to the end, and attention and the loss are read; else it ends at the peak.
        every_loss: Whether the loss of every token is read, however large the vocabulary is.
    """

    ids: TokenRows
    place: Mask
    spike: Spike
    edits: Sequence[Parts]
    means: Written = field(default_factory=dict)
    entering: LayerInputs = NO_INPUTS
    whole: bool = False
    every_loss: bool = False

    def first_layer(self, edit: Parts) -> int:
        """Return the layer of the first part of an edit; that of no edit is the last at which a pass can begin."""
        return min((part.layer or 0 for part in edit), default=self.spike.peak)

    @property
    def begin(self) -> int:
        """The first layer that is run: before it, no edit differs and nothing is read."""
        begin = min(map(self.first_layer, self.edits or [()]))
        if self.whole:
            begin = min(begin, self.spike.first + 1)
        return self.entering.latest(min(begin, self.spike.peak))


@dataclass(frozen=True)
class Effects:
    """What is read of the intact texts, which come first, and under each edit.

    Attributes:
        along: Projection of each position of the place on the spike's direction after the peak, as a share of the
            spike.
        attention: Attention to the place, mean over the later queries that see it; 0 before the first layer that reads
            the spike.
        loss: Mean loss of the next tokens, in nats; NaN without a whole pass over a whole model.
    """

    along: Float[Tensor, "state case"]
    attention: Float[Tensor, "state text layer head"]
    loss: Float[Tensor, "state text"]


class EditBatch:
    """One batch: all texts intact, then all of them under the first edit, and so on."""

    def __init__(self, target: Target, reading: Reading, edits: Sequence[Parts]) -> None:
        self.target, self.reading = target, reading
        self._layer = reading.begin  # the next to run
        self.edits: list[Parts] = [(), *edits]
        self._joins = [self._layer] * len(self.edits)
        if target.skips_layers:
            joins = [min(reading.first_layer(edit), reading.spike.peak) for edit in edits]
            self._joins[1:] = [max(self._layer, join) for join in joins]
        self._joined = [0]  # the intact texts, and edits
        self._next = reading.entering.at(self._layer)
        self.texts = len(reading.ids)
        shape = len(self.edits), self.texts
        self.depth = target.n_layers if reading.whole else reading.spike.peak + 1
        self.received = torch.zeros(*shape, target.n_layers, target.n_heads)
        self.queries = torch.zeros(*shape, target.n_layers)
        self.along = torch.zeros(len(self.edits), int(reading.place.sum()))
        self.loss = torch.full(shape, torch.nan)

    def run(self, upto: int) -> None:
        """Go on to the end of a layer, or to the last that is wanted; nothing to do if it has been passed."""
        last = min(upto, self.depth - 1)
        while self._layer <= last:
            self._pass(min([last, *(join - 1 for join in self._joins if join > self._layer)]))

    def _pass(self, last: int) -> None:
        """Run layers in which no edit joins but at the first."""
        joining = [n for n, join in enumerate(self._joins) if join <= self._layer and n not in self._joined]
        start = self._next
        if start is not None and joining:
            more = start.hidden[: self.texts].repeat(len(joining), *[1] * (start.hidden.dim() - 1))
            start = replace(start, hidden=torch.cat([start.hidden, more]))
        self._joined += joining
        layers = range(self._layer, last + 1)
        hooks = self._hooks(layers)
        for layer in layers:
            hooks.append((self.target.layers[layer], "post", on_output(partial(self._layer_done, layer))))
        listening = nullcontext()
        reading_layers = [layer for layer in layers if layer > self.reading.spike.first]
        if self.reading.whole and reading_layers and self.target.attending:
            listening = visible_rows(self.target, self._attention_read, layers=reading_layers, whole=False)
        ids = self._of_edits(self.reading.ids)
        to_logits = self.reading.whole and last == self.target.n_layers - 1 and self.target.resident
        with listening, self.target.hooks(*hooks):
            if to_logits:
                self._read_loss(ids, start)
            else:
                self.target.forward(ids, upto=last, start=start)
        self._layer = last + 1

    def _read_loss(self, ids: TokenRows, start: LayerInput | None) -> None:
        positions = torch.arange(ids.shape[1] - 1)
        if not self.reading.every_loss:
            step = -(-len(positions) * int(self.target.config.vocab_size) // LOGITS)
            positions = positions[step - 1 :: step]
        logits = self.target.logits_at(ids, positions, start)
        following = ids[:, positions + 1].to(logits.device)
        loss = cross_entropy(logits.float().flatten(0, 1), following.flatten(), reduction="none")
        self.loss[self._joined] = loss.reshape(len(self._joined), self.texts, -1).mean(-1).cpu()

    def _of_edits(self, values: Shaped[Tensor, "text ..."]) -> Shaped[Tensor, "row ..."]:
        """The same values for each edit that has joined."""
        return values.repeat(len(self._joined), *[1] * (values.dim() - 1))

    def _of_all(self, values: Shaped[Tensor, "row ..."]) -> Shaped[Tensor, "edit text ..."]:
        """What each edit shows; edits that are still to join show what the intact texts do."""
        of_edits = values.detach().cpu().unflatten(0, (len(self._joined), -1))
        every = of_edits[:1].repeat_interleave(len(self.edits), 0)
        every[self._joined] = of_edits
        return every

    def _layer_done(self, layer: int, output: Any) -> None:
        hidden = first_tensor(output)
        if layer == self.reading.spike.peak:
            rows = self._of_edits(self.reading.place)
            states = hidden.reshape(*rows.shape, -1)[rows.to(hidden.device)].float().cpu()
            self.along[:] = self._of_all(self.reading.spike.along(states))
        self._next = LayerInput(layer + 1, hidden, isinstance(output, tuple))

    def _attention_read(
        self,
        layer: int,
        first: int,
        probs: Float[Tensor, "row head query key"],
        visible: Callable[[], Bool[Tensor, "row _ query key"]],
    ) -> None:
        queries = torch.arange(first, first + probs.shape[2])
        keys = self._of_edits(self.reading.place).to(probs.device)[:, : probs.shape[-1]]
        later = queries > rearrange(keys.int().argmax(1).cpu(), "row -> row 1")
        sees = visible().expand(len(probs), -1, -1, -1)[:, 0]
        if not bool(sees[0, -1, 0]) and int(sees[0, -1].sum()) < NARROWEST:
            return
        later &= (sees.to(probs.device) & rearrange(keys, "row key -> row 1 key")).any(-1).cpu()
        strictly = torch.arange(probs.shape[-1], device=probs.device) < queries[:, None].to(probs.device)
        earlier = rearrange(keys, "row key -> row 1 key") & strictly  # attention of a place to itself is left out
        given = einsum(probs, earlier.to(probs.dtype), "row head query key, row query key -> row head query")
        received = (given * rearrange(later.to(given.device), "row query -> row 1 query")).sum(-1)
        self.received[:, :, layer] += self._of_all(self.target.shards.gather(received, self.target.n_heads, 1))
        self.queries[:, :, layer] += self._of_all(later.sum(1))

    # --- edits ---

    def _hooks(self, layers: range) -> list[Hook]:
        """The hooks that carry out the edits in some layers."""
        parts = dict.fromkeys(chain.from_iterable(self.edits[number] for number in self._joined))
        hooks: list[Hook] = []
        for group in groups_of(part for part in parts if isinstance(part, Neuron)):
            if group.layer in layers:
                where = torch.cat([self._rows_with(site) for site in group.sites], -1)
                hooks.append(neurons_place(self.target, group).rows(where, torch.zeros_like))
        for part in parts:
            if not isinstance(part, Neuron) and (part.layer or 0) in layers:
                hooks += self._replaced(part)
        return hooks

    def _rows_with(self, part: Part) -> Bool[Tensor, "row 1 1"]:
        """The rows whose edit has this part."""
        having = torch.tensor([part in self.edits[number] for number in self._joined])
        return repeat(having, "edit -> (edit text) 1 1", text=self.texts)

    def _replaced(self, part: Part) -> list[Hook]:
        """At the place, a component or a head writes its mean over ordinary positions."""
        where = self._rows_with(part) & self._of_edits(self.reading.place)[..., None]
        mean = self.reading.means[part]
        return [place.rows(where, lambda values: mean.to(values)) for place in places_of(self.target, part)]

    @cached_property
    def attention(self) -> Float[Tensor, "edit text layer head"]:
        """Mean attention to the place."""
        return self.received / self.queries.clamp(min=1)[..., None]


@torch.no_grad()
def run_edits(target: Target, reading: Reading) -> Effects:
    """Run texts intact and under edits. A streamed model is walked once: all pass a layer before the next is read.

    Args:
        target: The model.
        reading: What is run.
    """
    texts, length = reading.ids.shape
    size = max(1, rows_at_once(texts * length, max(target.d_mlp, target.d_model)) - 1)
    starts = range(0, max(1, len(reading.edits)), size)
    batches = [EditBatch(target, reading, reading.edits[start : start + size]) for start in starts]
    depth = batches[0].depth
    lasts = range(depth - 1, depth)
    if not target.resident and target.skips_layers:
        lasts = range(reading.begin, depth)
    total = len(lasts) * len(batches)
    for step, (last, batch) in enumerate(product(lasts, batches), 1):
        batch.run(last)
        report("removals", step, total)
    kept = [slice(None)] + [slice(1, None)] * (len(batches) - 1)  # the intact texts once
    return Effects(
        along=torch.cat([batch.along[some] for batch, some in zip(batches, kept, strict=True)]),
        attention=torch.cat([batch.attention[some] for batch, some in zip(batches, kept, strict=True)]),
        loss=torch.cat([batch.loss[some] for batch, some in zip(batches, kept, strict=True)]),
    )
