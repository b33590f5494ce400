"""Edits of one spike side by side: rows of one pass, of which each has an edit of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinkscope.files.progress import report_progress
from sinkscope.hooks.edit.hook_points import neurons_point
from sinkscope.hooks.edit.sites import groups_of
from sinkscope.models.hooks import Hook, first_tensor, on_output
from sinkscope.models.passes.batch import rows_at_once
from sinkscope.models.target import LayerInput, Target
from sinkscope.results.parts import Neuron
from sinkscope.sinks.spikes.components import hook_points_of
from sinkscope.sinks.spikes.spike import Part, Parts, Spike
from sinkscope.sinks.spikes.survey import given_later, to_place
from sinkscope.sinks.tokens import Mask, TokenRows
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
        begin: Gives what enters a layer, at which the pass may then start. None: it starts at the first.
        whole: Whether the attention of the layers that can read the spike is read; else the pass ends at the peak.
        every_loss: Whether the loss of every token is read, however large the vocabulary is. None: no loss is read.
    """

    ids: TokenRows
    place: Mask
    spike: Spike
    edits: Sequence[Parts]
    means: Written = field(default_factory=dict)
    begin: Callable[[int], LayerInput | None] | None = None
    whole: bool = False
    every_loss: bool | None = None

    @property
    def start(self) -> LayerInput | None:
        """Where the pass starts: before it, no edit differs and nothing is read."""
        if self.begin is None:
            return None
        layers = [part.layer or 0 for edit in self.edits for part in edit]
        if self.whole:
            layers.append(self.spike.first + 1)
        return self.begin(min([self.spike.peak, *layers]))


@dataclass(frozen=True, eq=False)
class Effects:
    """What is read under each edit.

    Attributes:
        along: Projection of each position of the place on the spike's direction after the peak, as a share of the
            spike.
        attention: Attention to the place, mean over the later queries that see it; 0 before the first layer that reads
            the spike.
        loss: Loss of the next tokens, in nats; NaN where it is not read.
    """

    along: Float[Tensor, "edit case"]
    attention: Float[Tensor, "edit layer head text"]
    loss: Float[Tensor, "edit text pos"]


class EditedPass:
    """One pass: all texts under the first edit, then all of them under the second, and so on."""

    def __init__(self, target: Target, reading: Reading) -> None:
        self.target, self.reading = target, reading
        shape = len(reading.edits), len(reading.ids)
        self.effects = Effects(
            along=torch.zeros(shape[0], int(reading.place.sum())),
            attention=torch.zeros(shape[0], target.n_layers, target.n_heads, shape[1]),
            loss=torch.full((*shape, reading.ids.shape[1] - 1), torch.nan),
        )

    def run(self) -> Effects:
        """Run the texts."""
        target, reading = self.target, self.reading
        ids, start = self._of_edits(reading.ids), reading.start
        if start is not None:
            start = replace(start, hidden=self._of_edits(start.hidden))
        hooks = [*self._hooks(), (target.layers[reading.spike.peak], "post", on_output(self._peak_read))]
        listening = nullcontext()
        layers = [layer for layer in target.attending if layer in reading.spike.reading_layers]
        if reading.whole and layers:
            length = ids.shape[1]
            listening = visible_rows(target, self._attention_read, layers=layers, rows_per_chunk=length, whole=False)
        with listening, target.hooks(*hooks):
            if reading.every_loss is not None and target.resident:
                positions = positions_read(target, ids.shape[1], every=reading.every_loss)
                loss = losses_at(target, ids, positions, start)
                self.effects.loss[:, :, positions] = loss.unflatten(0, (len(reading.edits), -1))
            else:
                last = max(layers) if reading.whole and layers else 0
                target.forward(ids, last_layer=max(last, reading.spike.peak), start=start)
        return self.effects

    def _of_edits(self, values: Shaped[Tensor, "text ..."]) -> Shaped[Tensor, "row ..."]:
        """The same values for each edit."""
        return values.repeat(len(self.reading.edits), *[1] * (values.dim() - 1))

    def _peak_read(self, output: Any) -> None:
        rows, hidden = self._of_edits(self.reading.place), first_tensor(output)
        states = hidden.reshape(*rows.shape, -1)[rows.to(hidden.device)].float().cpu()
        self.effects.along[:] = self.reading.spike.along(states).reshape(self.effects.along.shape)

    def _attention_read(
        self,
        layer: int,
        _first: int,
        probs: Float[Tensor, "row head query key"],
        visible: Callable[[], Bool[Tensor, "row _ query key"]],
    ) -> None:
        given, seen = given_later(probs, visible)
        given = self.target.shards.gather(given, self.target.n_heads, 1)
        received = to_place(given.cpu(), seen, self._of_edits(self.reading.place)[:, None])
        self.effects.attention[:, layer] = rearrange(
            received, "(edit text) head -> edit head text", text=len(self.reading.ids)
        )

    # --- edits ---

    def _hooks(self) -> list[Hook]:
        """The hooks that carry out the edits."""
        parts = dict.fromkeys(chain.from_iterable(self.reading.edits))
        hooks: list[Hook] = []
        for group in groups_of(part for part in parts if isinstance(part, Neuron)):
            where = torch.cat([self._rows_with(site) for site in group.sites], -1)
            hooks.append(neurons_point(self.target, group).rows(where, torch.zeros_like))
        for part in parts:
            if not isinstance(part, Neuron):
                hooks += self._replaced(part)
        return hooks

    def _rows_with(self, part: Part) -> Bool[Tensor, "row 1 1"]:
        """The rows whose edit has this part."""
        having = torch.tensor([part in edit for edit in self.reading.edits])
        return repeat(having, "edit -> (edit text) 1 1", text=len(self.reading.ids))

    def _replaced(self, part: Part) -> list[Hook]:
        """At the place, a component or a head writes its mean over ordinary positions."""
        where = self._rows_with(part) & self._of_edits(self.reading.place)[..., None]
        mean = self.reading.means[part]
        return [place.rows(where, lambda values: mean.to(values)) for place in hook_points_of(self.target, part)]


@torch.no_grad()
def run_edits(target: Target, reading: Reading) -> Effects:
    """Run texts under edits. Those of a streamed model are rows of one pass, because it is read from disk once.

    Args:
        target: The model.
        reading: What is run; at least one edit.
    """
    size = rows_at_once(reading.ids.numel(), max(target.d_mlp, target.d_model))
    if not target.resident:
        size = len(reading.edits)
    effects, starts = list[Effects](), range(0, len(reading.edits), size)
    for number, start in enumerate(starts, 1):
        effects.append(EditedPass(target, replace(reading, edits=reading.edits[start : start + size])).run())
        report_progress("removals", number, len(starts))
    return Effects(
        along=torch.cat([one.along for one in effects]),
        attention=torch.cat([one.attention for one in effects]),
        loss=torch.cat([one.loss for one in effects]),
    )


def positions_read(target: Target, length: int, *, every: bool) -> Tensor:
    """Return the positions of a text whose loss is read: each, or as many as a large vocabulary allows."""
    positions = torch.arange(length - 1)
    if every:
        return positions
    step = -(-len(positions) * int(target.config.vocab_size) // LOGITS)
    return positions[step - 1 :: step]


@torch.no_grad()
def losses_at(
    target: Target, ids: TokenRows, positions: Tensor, start: LayerInput | None = None
) -> Float[Tensor, "row some"]:
    """Return the loss of the tokens after some positions, in nats.

    Args:
        target: The model.
        ids: The texts.
        positions: The positions.
        start: Where the pass begins.
    """
    logits = target.logits_at(ids, positions, start)
    following = ids[:, positions + 1].to(logits.device)
    loss = cross_entropy(logits.float().flatten(0, 1), following.flatten(), reduction="none")
    return loss.reshape(following.shape).cpu()
