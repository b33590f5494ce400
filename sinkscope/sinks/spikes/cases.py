"""Cases: texts of a spike under edits, what is read of them, and the row that tells it.

Everything is read in texts that did not choose what is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.measure.margin import count_above, mean_of
from sinkscope.results.mean import Mean
from sinkscope.results.table import whole
from sinkscope.sinks.spikes.edited import Batch, batch_of, intact_losses, read, share_left
from sinkscope.sinks.spikes.row_edits import Hidden, RowEdit
from sinkscope.sinks.spikes.spike import Parts, Spike
from sinkscope.sinks.spikes.tables import Edit, Effect
from sinkscope.sinks.thresholds import READS
from sinkscope.sinks.tokens import Mask


@dataclass(frozen=True, eq=False)
class Case:
    """Texts that have a spike, under edits.

    Attributes:
        spike: The spike.
        sets: Sets of parts that are removed in turn, one in each row.
        text_of: Number of each row's text among those of the spike.
        set_of: Number of each row's set.
        batch: The rows.
    """

    spike: Spike
    sets: Sequence[Parts]
    text_of: Int[Tensor, " row"]
    set_of: Int[Tensor, " row"]
    batch: Batch

    def under(self, *edits: RowEdit) -> Case:
        """Return the same texts under some edits in addition."""
        return replace(self, batch=self.batch.under(*edits))

    def hiding(self, keys: Mask, layers: Sequence[int] | None = None) -> Case:
        """Return the same texts, in which later tokens do not see some positions of the texts of the survey."""
        return self.under(Hidden(keys[self.spike.texts[self.text_of]], layers=layers))

    def read(self, heads: Sequence[int], since: int = 0) -> CaseReading:
        """Read the texts.

        Args:
            heads: Layers whose attention is read. Empty: neither heads nor loss is read.
            since: The first position whose attention and loss are read.
        """
        reading = read(self.batch, heads, loss=bool(heads), since=since)
        left = share_left(reading.along[:, 0], reading.intact[:, 0])
        attention = None
        if heads:
            attention = reading.attention[:, [*heads]].permute(1, 2, 0)
        case = CaseReading(self, left, attention)
        if not bool(reading.loss.isfinite().any()):
            return case
        place = self.batch.places[:, 0].int()
        is_later = (place.cumsum(1) > place)[:, :-1]  # queries after the first position of the place
        intact = intact_losses(self.spike)[self.spike.texts[self.text_of]]
        rise = (reading.loss - intact).masked_fill(~is_later, torch.nan)
        return replace(case, rise=rise.nanmean(1), n_tokens=int(rise.isfinite().sum()))


@dataclass(frozen=True, eq=False)
class CaseReading:
    """What is read of a spike in the texts of a case.

    Attributes:
        case: The case.
        left: What is left of the spike.
        attention: Attention to the place, of the heads that are read. None: none are.
        rise: Rise of the loss of a token after the place, in nats. None: it is not read.
        n_tokens: Number of these tokens.
    """

    case: Case
    left: Float[Tensor, " row"]
    attention: Float[Tensor, "layer head row"] | None = None
    rise: Float[Tensor, " row"] | None = None
    n_tokens: int = 0

    @property
    def heads(self) -> Mean | None:
        """How many heads attend to the place."""
        return None if self.attention is None else count_above(self.attention, READS)

    @property
    def heads_without_edit(self) -> Mean | None:
        """How many heads attend to the place in the same texts without an edit."""
        if self.attention is None:
            return None
        return count_above(self.case.spike.attention[..., self.case.text_of], READS)

    @property
    def loss(self) -> Mean | None:
        """Rise of the loss, mean over texts."""
        return None if self.rise is None else mean_of(self.rise)

    @property
    def tokens(self) -> Mean | None:
        """Number of the tokens whose loss is read."""
        return None if self.rise is None else whole(self.n_tokens)

    def sets_that_reach(self, needed: CaseReading) -> int:
        """Return how many sets raise the loss as much as the needed parts in the same texts.

        Where no loss is read, it is those that leave as little of the spike.

        Args:
            needed: All texts of the spike without the needed parts.
        """
        count = 0
        for number in range(len(self.case.sets)):
            rows = self.case.set_of == number
            texts = self.case.text_of[rows]
            if self.rise is not None and needed.rise is not None:
                count += bool(self.rise[rows].mean() >= needed.rise[texts].mean())
            else:
                count += bool(self.left[rows].mean() <= needed.left[texts].mean())
        return count


def case_of(
    spike: Spike, sets: Sequence[Parts] = ((),), *, n_texts: int | None = None, everywhere: bool = False
) -> Case:
    """Return texts of a spike, each without one of several sets of parts, in turn.

    Args:
        spike: The spike.
        sets: The sets; if they are more than texts, texts are repeated.
        n_texts: Number of texts. None: all.
        everywhere: Whether neurons are zeroed at every position; else at the place alone.
    """
    texts = spike.texts[:n_texts]
    row = torch.arange(max(len(texts), len(sets)))
    text_of = row % len(texts)
    set_of = row % len(sets)
    return Case(spike, sets, text_of, set_of, batch_of(spike, sets, texts[text_of], set_of, everywhere=everywhere))


def effect_of(key: Edit, reading: CaseReading, *, parts: Parts = (), since: int | None = None) -> Effect:
    """Return the row of a case.

    Args:
        key: What is done.
        reading: What was read.
        parts: The parts that the row names.
        since: The first layer that is changed. None: all are.
    """
    return Effect(
        key=key,
        parts=parts,
        since=since,
        left=mean_of(reading.left, "share"),
        heads=reading.heads,
        intact=reading.heads_without_edit,
        loss=reading.loss,
        tokens=reading.tokens,
    )


def control_of(key: Edit, reading: CaseReading, needed: CaseReading, norm: float | None = None) -> Effect:
    """Return the row of a control, with the number of its sets that do as much as the needed parts.

    Args:
        key: What is done.
        reading: What was read without the sets of the control.
        needed: What was read without the needed parts, in all texts of the spike.
        norm: Mean norm of what the sets write, over that of the needed parts. None: they are no neurons.
    """
    sets = reading.case.sets
    effect = effect_of(key, reading)
    if len(sets) > 1:
        effect = replace(effect, sets=whole(len(sets)), reached=whole(reading.sets_that_reach(needed)))
    size = Mean(sum(map(len, sets)) / len(sets), kind="count")
    return replace(effect, size=size, norm=None if norm is None else Mean(norm, kind="share"))
