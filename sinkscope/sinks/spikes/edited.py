"""Edits of one spike side by side: rows of one pass, of which each has an edit of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinkscope.files.progress import report_progress
from sinkscope.hooks.edit.hook_points import neurons_point
from sinkscope.hooks.edit.sites import groups_of
from sinkscope.measure.batch import rows_at_once
from sinkscope.models.hooks import Hook, first_tensor, on_output
from sinkscope.models.target import LayerInput, Target
from sinkscope.results.parts import Neuron
from sinkscope.sinks.spikes.components import hook_points_of
from sinkscope.sinks.spikes.spike import Part, Parts, Spike
from sinkscope.sinks.spikes.survey import given_later, to_place
from sinkscope.sinks.tokens import Mask, TokenRows
from sinkscope.tap.tap import visible_rows

LOGITS = 1 << 21  # logits of a text at most: of large vocabularies, every second position is read, or fewer

Written = Mapping[Part, Float[Tensor, " d"]]
"""What a component or a head writes at the place instead: its mean over ordinary positions."""


class Effects(NamedTuple):
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


@dataclass(frozen=True, eq=False)
class EditedTexts:
    """Texts, their edits, and what is read: all texts under the first edit, then all under the second, and so on.

    Attributes:
        target: The model.
        ids: The texts.
        place: The positions of the spike in them.
        spike: The spike whose projection is read.
        edits: The parts that each edit removes: neurons are zeroed everywhere, other parts are replaced at the place.
        means: What replaced parts write instead.
        begin: Gives what enters a layer, at which the pass may then start. None: it starts at the first.
        whole: Whether the attention of the layers that can read the spike is read; else the pass ends at the peak.
        every_loss: Whether the loss of every token is read, however large the vocabulary is. None: no loss is read.
        paired: Whether each text is read under the edit of its number alone, as one edit.
    """

    target: Target
    ids: TokenRows
    place: Mask
    spike: Spike
    edits: Sequence[Parts]
    means: Written = field(default_factory=dict)
    begin: Callable[[int], LayerInput | None] | None = None
    whole: bool = False
    every_loss: bool | None = None
    paired: bool = False

    @torch.no_grad()
    def run(self) -> Effects:
        """Run the texts. Edits of a streamed model are rows of one pass, because it is read from disk once."""
        size = len(self.edits)
        if self.paired:
            return self._run_once()
        if self.target.resident:
            size = rows_at_once(self.ids.numel(), max(self.target.d_mlp, self.target.d_model))
        passes, starts = list[Effects](), range(0, len(self.edits), size)
        for number, start in enumerate(starts, 1):
            passes.append(replace(self, edits=self.edits[start : start + size])._run_once())
            report_progress("removals", number, len(starts))
        return Effects(*map(torch.cat, zip(*passes, strict=True)))

    def _run_once(self) -> Effects:
        """Run all edits in one pass."""
        target, shape = self.target, (self._times, len(self.ids))
        effects = Effects(
            along=torch.zeros(shape[0], int(self.place.sum())),
            attention=torch.zeros(shape[0], target.n_layers, target.n_heads, shape[1]),
            loss=torch.full((*shape, self.ids.shape[1] - 1), torch.nan),
        )
        ids, place, start = self._of_edits(self.ids), self._of_edits(self.place), self._start()

        def at_peak(output: Any) -> None:
            hidden = first_tensor(output)
            states = hidden.reshape(*place.shape, -1)[place.to(hidden.device)].float().cpu()
            effects.along[:] = self.spike.along(states).reshape(effects.along.shape)

        def attend(layer: int, _first: int, probs: Tensor, visible: Callable[[], Tensor]) -> None:
            given, seen = given_later(probs, visible)
            received = to_place(given.cpu(), seen, place[:, None])
            effects.attention[:, layer] = rearrange(received, "(edit text) head -> edit head text", text=shape[1])

        listening, last = nullcontext(), self.spike.peak
        layers = [layer for layer in target.attending if layer in self.spike.reading_layers]
        if self.whole and layers:
            listening = visible_rows(target, attend, layers=layers, rows_per_chunk=ids.shape[1])
            last = max(last, *layers)
        with listening, target.hooks(*self._hooks(), (target.layers[self.spike.peak], "post", on_output(at_peak))):
            if self.every_loss is not None and target.resident:
                positions = positions_read(target, ids.shape[1], every=self.every_loss)
                effects.loss[:, :, positions] = losses_at(target, ids, positions, start).unflatten(0, shape)
            else:
                target.forward(ids, last_layer=last, start=start)
        return effects

    def _start(self) -> LayerInput | None:
        """Where the pass starts: before it, no edit differs and nothing is read."""
        layers = [self.spike.peak, *(part.layer or 0 for edit in self.edits for part in edit)]
        if self.whole:
            layers.append(self.spike.first + 1)
        start = None if self.begin is None else self.begin(min(layers))
        return None if start is None else replace(start, hidden=self._of_edits(start.hidden))

    @property
    def _times(self) -> int:
        """How often each text is read."""
        return 1 if self.paired else len(self.edits)

    def _of_edits(self, values: Shaped[Tensor, "text ..."]) -> Shaped[Tensor, "row ..."]:
        """The same values for each edit."""
        return values.repeat(self._times, *[1] * (values.dim() - 1))

    def _hooks(self) -> list[Hook]:
        """The hooks that carry out the edits."""
        parts = dict.fromkeys(chain.from_iterable(self.edits))
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
        having = torch.tensor([part in edit for edit in self.edits])
        if self.paired:
            return having[:, None, None]
        return repeat(having, "edit -> (edit text) 1 1", text=len(self.ids))

    def _replaced(self, part: Part) -> list[Hook]:
        """At the place, a component or a head writes its mean over ordinary positions."""
        where = self._rows_with(part) & self._of_edits(self.place)[..., None]
        mean = self.means[part]
        return [place.rows(where, lambda values: mean.to(values)) for place in hook_points_of(self.target, part)]


def positions_read(target: Target, length: int, *, every: bool) -> Tensor:
    """Return the positions of a text whose loss is read: each, or as many as a large vocabulary allows."""
    positions = torch.arange(length - 1)
    if every:
        return positions
    step = -(-len(positions) * int(target.config.vocab_size) // LOGITS)
    return positions[step - 1 :: step]


@torch.no_grad()
def losses_at(target: Target, ids: TokenRows, positions: Tensor, start: LayerInput | None) -> Float[Tensor, "row some"]:
    """Return the loss of the tokens after some positions, in nats.

    Args:
        target: The model.
        ids: The texts.
        positions: The positions.
        start: Where the pass begins. None: at the first layer.
    """
    logits = target.logits_at(ids, positions, start)
    following = ids[:, positions + 1].to(logits.device)
    loss = cross_entropy(logits.float().flatten(0, 1), following.flatten(), reduction="none")
    return loss.reshape(following.shape).cpu()
