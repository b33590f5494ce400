"""Step 5, the effects: what the needed set of a spike does, beside what others do that write as much.

1. Zeroed at the place alone, and everywhere: the difference is what it does elsewhere.
2. With the place hidden from later tokens in the layers after its first, with the set as it is and zeroed: what goes
   through attention to the place.
3. Controls: the busiest other neurons, and random sets, zeroed everywhere.

Each outcome is read in texts that did not choose the set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from sinkscope.errors import UnsupportedError
from sinkscope.measure.margin import interval_of, margin_of, resampled_margin
from sinkscope.sinks.spikes.controls import EqualSets, equal_sets, other_components
from sinkscope.sinks.spikes.edited import Edit, RowReading, SpikeTexts, intact_losses, read_batch
from sinkscope.sinks.spikes.needs import Needs
from sinkscope.sinks.spikes.records import Alone, Control, Controls, Effects, OtherLeft, Outcome
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.thresholds import READS

BESIDE_TEXTS = 8  # texts in which controls, and removals everywhere, are read: two of each kind
ALONE_TEXTS = 4  # texts in which needed neurons are removed one by one: one of each kind
ALONE_UNITS = 8  # needed units that are removed one by one


@dataclass(frozen=True, eq=False)
class SpikeEffects:
    """The effects of a spike's needed set."""

    effects: Effects
    controls: Controls
    alone: tuple[Alone, ...]


@torch.no_grad()
def effects_of(
    spike: Spike, needs: Needs, chosen: Survey, numbered: Mapping[int, Spike], seed: int
) -> SpikeEffects | None:
    """Measure what the needed set of a spike does; None if nothing is needed.

    Args:
        spike: The spike, in the texts in which it is measured.
        needs: What it needs.
        chosen: The survey that found it, which tells what neurons write.
        numbered: Other spikes in the same texts, by their numbers.
        seed: Seed of random sets.
    """
    if not needs.needed:
        return None
    texts = SpikeTexts.of(spike, tuple(numbered.values()))
    measure = OutcomeReader(texts, tuple(numbered))
    at_place = kept_by_text(measure.outcomes([Edit(needs.needed)])[0])
    if not needs.units:
        sets = other_components([(part,) for part in needs.order], needs.needed)
        random = measure.control([Edit(parts) for parts in sets], at_place, None) if sets else None
        return SpikeEffects(Effects(at_place.outcome, None, None, None, None), Controls(None, random), ())
    few = measure.first(BESIDE_TEXTS)
    (everywhere,) = few.outcomes([Edit(needs.needed, everywhere=True)])
    after = range(min(unit[0].layer for unit in needs.units) + 1, spike.survey.target.n_layers)
    hidden = both = None
    if measure.whole:
        hidden, both = measure.hidden(after, at_place)
    every = {neuron for unit in needs.writers.units for neuron in unit}
    equal, controls = equal_sets(chosen, needs.units, every, seed), Controls(None, None)
    if equal is not None:
        controls = controls_of(few, equal, at_place)
    elsewhere, whole = None, float(everywhere.rise.nanmean())
    if whole > 0:
        elsewhere = 1 - float(at_place.rise[: len(everywhere.rise)].nanmean()) / whole
    effects = Effects(at_place.outcome, everywhere.outcome, hidden, both, elsewhere)
    return SpikeEffects(effects, controls, alone_of(measure, needs, at_place))


def controls_of(measure: OutcomeReader, equal: EqualSets, effect: OutcomeByText) -> Controls:
    """Measure what other neurons do that write as much."""
    busiest = measure.control([Edit(equal.busiest, everywhere=True)], effect, equal.norms[0])
    random = None
    if equal.random:
        norm = float(np.mean(equal.norms[1:]))
        random = measure.control([Edit(parts, everywhere=True) for parts in equal.random], effect, norm)
    return Controls(busiest, random)


def alone_of(measure: OutcomeReader, needs: Needs, effect: OutcomeByText) -> tuple[Alone, ...]:
    """Measure what single needed units do, strongest effect on the spike first."""
    units, records = [unit for unit in needs.alone if unit in needs.units][:ALONE_UNITS], list[Alone]()
    outcomes = [effect]
    if len(needs.units) > 1:
        outcomes = measure.first(ALONE_TEXTS).outcomes([Edit(unit) for unit in units])
    for unit, by_text in zip(units, outcomes, strict=True):
        outcome = by_text.outcome
        for neuron in unit:
            what = outcome.left, outcome.heads[1], outcome.loss, outcome.interval
            records.append(Alone(neuron.layer, neuron.expert, neuron.neuron, *what))
    return tuple(records)


@dataclass(frozen=True, eq=False)
class OutcomeByText:
    """An outcome, with the rise of the loss and what is left in each text."""

    outcome: Outcome
    rise: Float[Tensor, " text"]
    left: Float[Tensor, " text"]


def kept_by_text(measured: OutcomeByText) -> OutcomeByText:
    """Return the same with the numbers of each text in its record, by which models are compared."""
    by_text = {"left_by_text": tuple(measured.left.tolist())}
    if measured.outcome.loss is not None:
        by_text["loss_by_text"] = tuple(measured.rise.tolist())
    return replace(measured, outcome=replace(measured.outcome, **by_text))


@dataclass(frozen=True, eq=False)
class OutcomeReader:
    """What reads outcomes in the texts of a spike.

    Attributes:
        texts: The texts.
        numbers: Numbers of the other spikes.
    """

    texts: SpikeTexts
    numbers: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether heads and loss are read: at the first token, or where heads attend to the place."""
        return self.texts.spike.place.is_first or bool(self.texts.readers.any())

    def first(self, count: int) -> OutcomeReader:
        """Return the same in the first texts."""
        return replace(self, texts=replace(self.texts, rows=self.texts.rows[:count]))

    def outcomes(self, edits: Sequence[Edit], *, losses: bool = True) -> list[OutcomeByText]:
        """Measure each edit in all texts.

        Args:
            edits: The edits.
            losses: Whether the loss is read.
        """
        outcomes: list[OutcomeByText] = []
        rows = torch.arange(len(self.texts.rows))
        if not self.whole and not any(edit.everywhere for edit in edits):
            for left in self.texts.at_place(edits, read_others=True):
                nothing = torch.full_like(left[0], torch.nan)
                outcomes.append(OutcomeByText(self._outcome(left, None, nothing, 0, len(rows)), nothing, left[0]))
            return outcomes
        edit_of = torch.arange(len(edits)).repeat_interleave(len(rows))
        reading = self._read(edits, rows.repeat(len(edits)), edit_of, losses=losses)
        for number in range(len(edits)):
            outcomes.append(self._by_text(_part(reading, edit_of == number), rows))
        return outcomes

    def hidden(self, layers: range, effect: OutcomeByText) -> tuple[Outcome | None, Outcome | None]:
        """Hide the place from later tokens in some layers, with the needed set as it is, and zeroed.

        Keys can be hidden where layers mix positions by attention alone. What is at the place then reaches no later
        token: the second outcome is put together from the others.

        Args:
            layers: The layers.
            effect: What the set does at the place.
        """
        target, rows = self.texts.spike.survey.target, torch.arange(len(self.texts.rows))
        if not len(layers) or not set(layers) <= set(target.attending):
            return None, None
        none = torch.zeros(len(rows), dtype=torch.long)
        try:
            hidden = self._by_text(self._read([Edit()], rows, none, layers), rows).outcome
        except UnsupportedError:  # layers keep states, or compute attention inside: no key can be hidden
            return None, None
        others: list[OtherLeft] = []
        for spike, at_place, behind in zip(self.texts.others, effect.outcome.others, hidden.others, strict=True):
            same = not bool((spike.place.mask & ~self.texts.spike.place.mask).any())
            others.append(at_place if same else behind)
        left = effect.outcome.left, effect.outcome.left_margin
        return hidden, replace(hidden, left=left[0], left_margin=left[1], others=tuple(others))

    def control(self, edits: Sequence[Edit], effect: OutcomeByText, norm: float | None) -> Control:
        """Measure other sets: one set in all texts, or several, each in texts of its own.

        Args:
            edits: The sets.
            effect: What the needed set does.
            norm: What they write, over what the needed set writes.
        """
        count = max(len(self.texts.rows), len(edits))
        rows = torch.arange(count) % len(self.texts.rows)
        edit_of = torch.arange(count) % len(edits)
        if not self.whole:
            left = self.texts.at_place(edits)[:, 0]
            left = left[edit_of, rows] if left.shape[1] == len(self.texts.rows) else left[edit_of, 0]
            measured = OutcomeByText(
                self._outcome(left[None], None, torch.full_like(left, torch.nan), 0, count), left * torch.nan, left
            )
        else:
            measured = self._by_text(self._read(edits, rows, edit_of), rows)
        reached = 0
        for number in range(len(edits)):
            own = edit_of == number
            if measured.outcome.loss is None:
                reached += bool(measured.left[own].mean() <= effect.left[rows[own] % len(effect.left)].mean())
            else:
                reached += bool(measured.rise[own].mean() >= effect.rise[rows[own]].mean())
        size = float(np.mean([len(edit.parts) for edit in edits]))
        return Control(**vars(measured.outcome), sets=len(edits), reached=reached, norm=norm, count=size)

    # --- reading ---

    def _read(
        self,
        edits: Sequence[Edit],
        rows: Int[Tensor, " row"],
        edit_of: Int[Tensor, " row"],
        hidden: range | None = None,
        *,
        losses: bool = True,
    ) -> RowReading:
        """Read texts, by their numbers among those of the spike, each under an edit."""
        batch = self.texts.batch(edits, self.texts.rows[rows], edit_of)
        return read_batch(replace(batch, hidden=hidden), whole=True, losses=losses)

    def _by_text(self, reading: RowReading, rows: Int[Tensor, " row"]) -> OutcomeByText:
        """Return the outcome of rows, each of which reads a text."""
        texts, numbers = self.texts, self.texts.rows[rows]
        left = texts.left_of(reading.along[None], numbers)[0]
        change = reading.loss
        if bool(change.isfinite().any()):
            change = (change - intact_losses(texts.spike.survey)[numbers]).masked_fill(~texts.counted[rows], torch.nan)
        tokens, rise = int(change.isfinite().sum()), change.nanmean(1)
        before = texts.attention[..., rows]
        attention = reading.attention.permute(1, 2, 0)
        outcome = self._outcome(left, (before, attention), rise, tokens, len(rows))
        return OutcomeByText(outcome, rise, left[0])

    def _outcome(
        self,
        left: Float[Tensor, "spike text"],
        attention: tuple[Float[Tensor, "layer head text"], Float[Tensor, "layer head text"]] | None,
        rise: Float[Tensor, " text"],
        tokens: int,
        texts: int,
    ) -> Outcome:
        """Return the record of what was read."""
        heads, margins, loss, interval = (0, 0), (None, None), None, None
        if attention is not None:
            (before, margin), (after, margin_after) = map(count_readers, attention)
            heads, margins = (before, after), (margin, margin_after)
        if bool(rise.isfinite().any()):
            loss, bounds = float(rise.nanmean()), interval_of(rise.numpy())
            interval = None if bounds is None else (bounds.low, bounds.high)
        others: list[OtherLeft] = []
        for number, share in zip(self.numbers, left[1:].nanmean(1).tolist(), strict=False):
            if share == share:  # else its place is in none of these texts
                others.append(OtherLeft(number, share))
        return Outcome(
            left=float(left[0].nanmean()),
            left_margin=margin_of(left[0].numpy()),
            heads=heads,
            heads_margin=margins,
            loss=loss,
            interval=interval,
            tokens=tokens,
            others=tuple(others),
        )


def _part(reading: RowReading, rows: Bool[Tensor, " row"]) -> RowReading:
    return RowReading(reading.along[:, rows], reading.attention[rows], reading.loss[rows])


def count_readers(received: Float[Tensor, "layer head text"]) -> tuple[int, float | None]:
    """Return how many heads give more than 0.3 of their attention, mean over texts, and the margin of this count."""
    attention = received.flatten(0, 1).double()
    if not attention.numel():
        return 0, None

    def count(sample: Int[np.ndarray, "sample text"]) -> Float[np.ndarray, " sample"]:
        times = one_hot(torch.from_numpy(sample), attention.shape[1]).sum(1).double()  # how often each text was drawn
        return (attention @ times.T > READS * sample.shape[1]).sum(0).double().numpy()

    return int((attention.mean(1) > READS).sum()), resampled_margin(count, attention.shape[1])
