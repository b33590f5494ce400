"""The one reader: batches of texts, each row under an edit of its own, and the three things that are read of them.

Whatever is asked of a place (needs, effects, controls, marks, conditions, purpose) is a `Batch` for `read`.

1. The edits of the rows act: `row_edits.py` has each kind.
2. A pass starts at the first layer at which anything acts, from what the survey kept there.
3. It ends at the last peak or the last layer whose attention is read; for the loss, at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinkscope.engine.attention import AttentionRows
from sinkscope.engine.tap import attention_rows
from sinkscope.files.progress import report_progress
from sinkscope.models.hooks import Hook, on_hidden
from sinkscope.models.target import LayerInput, Target
from sinkscope.sinks.spikes.row_edits import RowEdit, means_of, removal
from sinkscope.sinks.spikes.spike import Parts, Spike, mean_by_row
from sinkscope.sinks.spikes.survey import MOST_NUMBERS, rows_at_once, to_place
from sinkscope.sinks.thresholds import NARROWEST
from sinkscope.sinks.tokens import TokenRows

LOGITS = 1 << 23  # logits of a text at most: of very large vocabularies, every second token is read, or fewer
AT_ONCE = 16  # tokens whose logits become losses together: of more, each time new memory would be taken
SomeParts = TypeVar("SomeParts", bound=Parts)


@dataclass(frozen=True, eq=False)
class Batch:
    """Texts that are read together.

    Attributes:
        spikes: The spikes whose projections are read.
        ids: The tokens of each row.
        places: The place of each spike in them; edits act at the first, and attention to it is read.
        texts: Number of each row's text in the survey, from whose states a pass may start. None: it is in none.
        edits: What is done to the rows.
    """

    spikes: tuple[Spike, ...]
    ids: TokenRows
    places: Bool[Tensor, "row spike pos"]
    texts: Int[Tensor, " row"] | None = None
    edits: tuple[RowEdit, ...] = ()

    @property
    def target(self) -> Target:
        """The model."""
        return self.spikes[0].survey.target

    def under(self, *edits: RowEdit) -> Batch:
        """Return the rows under some edits in addition."""
        return replace(self, edits=(*self.edits, *edits))

    def take(self, rows: Int[Tensor, " row"], length: int | None = None) -> Batch:
        """Return some of the rows, or their first tokens."""
        return Batch(
            self.spikes,
            self.ids[rows, :length],
            self.places[rows, :, :length],
            None if self.texts is None else self.texts[rows],
            tuple(edit.take(rows, length) for edit in self.edits),
        )

    def until_place(self) -> Batch:
        """Return the tokens up to the last of the place alone: later ones change nothing before them."""
        last = int(self.places[:, 0].nonzero()[:, 1].max())
        return self.take(torch.arange(len(self.ids)), last + 1)

    @contextmanager
    def acting(self, *readers: Hook) -> Iterator[None]:
        """Context manager in which the edits act, and then hooks that read."""
        with ExitStack() as stack:
            for edit in self.edits:
                stack.enter_context(edit.acting(self.target, self.places[:, 0]))
            stack.enter_context(self.target.hooks(*readers))
            yield

    def inputs(self) -> dict[str, Any]:
        """Return what the model is given beside the tokens."""
        inputs: dict[str, Any] = {}
        for edit in self.edits:
            inputs |= edit.inputs(self.target)
        return inputs


class Reading(NamedTuple):
    """What is read of each row.

    Attributes:
        along: Projection of the place on each spike's direction after its peak, as a share of the spike; NaN where the
            row does not have the place.
        intact: The same in the row's text without an edit; NaN if it is in none.
        attention: Attention to the place of the first spike, mean over the later queries that see it; 0 in layers that
            are not read.
        loss: Loss of the next tokens, in nats; NaN where it is not read.
    """

    along: Float[Tensor, "row spike"]
    intact: Float[Tensor, "row spike"]
    attention: Float[Tensor, "row layer head"]
    loss: Float[Tensor, "row following"]


@torch.no_grad()
def read(batch: Batch, heads: Sequence[int] = (), *, loss: bool = False, since: int = 0) -> Reading:
    """Read rows under their edits, in a single pass if the model is streamed: it is then read from disk once.

    Args:
        batch: The rows.
        heads: Layers whose attention is read.
        loss: Whether the loss is read, of a model in memory.
        since: The first position whose attention and loss are read.
    """
    target = batch.target
    count, length = batch.ids.shape
    layers = sorted({*heads} & {*target.attending})
    size = count
    positions = None
    if target.resident:
        size = rows_at_once(length, max(target.d_mlp, target.d_model))
    if target.resident and loss:
        words = int(target.config.vocab_size)
        step = -(-length * words // LOGITS)
        positions = torch.arange(step - 1, length - 1, step)
        positions = positions[positions >= since]
        size = min(size, max(1, 2 * MOST_NUMBERS // (max(1, len(positions)) * words)))
    passes: list[Reading] = []
    for rows in torch.arange(count).split(size):
        one_pass = _Pass(batch.take(rows), layers, since)
        one_pass.run(positions)
        passes.append(one_pass.reading)
        if size < count:
            report_progress("removals", len(passes), -(-count // size))
    return Reading(*map(torch.cat, zip(*passes, strict=True)))


@dataclass(eq=False)
class _Pass:
    """Rows that are read in one pass, and what is read of them.

    Attributes:
        batch: The rows.
        layers: Layers whose attention is read.
        since: The first position whose attention is read.
        reading: What is read; filled in the pass.
    """

    batch: Batch
    layers: Sequence[int]
    since: int
    reading: Reading = field(init=False)

    def __post_init__(self) -> None:
        rows, length = self.batch.ids.shape
        target = self.batch.target
        along, intact = torch.full((2, rows, len(self.batch.spikes)), torch.nan)
        if self.batch.texts is not None:
            for number, spike in enumerate(self.batch.spikes):
                intact[:, number] = spike.intact[self.batch.texts]
        attention = torch.zeros(rows, target.n_layers, target.n_heads)
        self.reading = Reading(along, intact, attention, torch.full((rows, max(length - 1, 0)), torch.nan))

    def run(self, positions: Int[Tensor, " following"] | None) -> None:
        """Read the rows. Before the layer at which the pass starts, nothing acts and nothing is read.

        Args:
            positions: Positions whose loss is read. None: the pass ends as soon as all else is read.
        """
        batch = self.batch
        target = batch.target
        first_layer = min([target.n_layers - 1, *self.layers, *(edit.first_layer for edit in batch.edits)])
        last_layer = max([*self.layers, *(spike.peak for spike in batch.spikes)])
        start = None
        if batch.texts is not None:
            start = batch.spikes[0].survey.start(first_layer, batch.texts, batch.ids.shape[1])
        hooks: list[Hook] = []
        for number, spike in enumerate(batch.spikes):
            if start is None or spike.peak >= first_layer:
                hooks.append(on_hidden(target.layers[spike.peak], "post", partial(self.see_peak, number)))
            else:  # it is as the survey saw it: nothing acts up to there
                self.reading.along[:, number] = self.reading.intact[:, number]
        with ExitStack() as stack:
            if self.layers:
                stack.enter_context(attention_rows(target, self.see_attention, layers=[*self.layers]))
            stack.enter_context(batch.acting(*hooks))
            if positions is None:
                target.forward(batch.ids, last_layer=last_layer, start=start, **batch.inputs())
            else:
                self.reading.loss[:, positions] = losses_at(target, batch.ids, positions, start)

    def see_peak(self, number: int, hidden: Tensor) -> None:
        """Keep the projection of the place on a spike's direction, after its peak."""
        place = self.batch.places[:, number]
        states = hidden.reshape(*place.shape, -1)[place.to(hidden.device)].float().cpu()
        self.reading.along[:, number] = mean_by_row(self.batch.spikes[number].along(states), place)

    def see_attention(self, rows: AttentionRows) -> None:
        """Keep the attention of a layer to the place; narrow windows show it to too few queries."""
        received, n_queries = rows.given_later(since=self.since)
        if rows.is_narrow(NARROWEST):
            received = torch.zeros_like(received)
            n_queries = torch.zeros_like(n_queries)
        self.reading.attention[:, rows.layer] = to_place(received, n_queries, self.batch.places[:, :1])


# --- losses ---


@torch.no_grad()
def losses_at(
    target: Target, ids: TokenRows, positions: Tensor, start: LayerInput | None = None
) -> Float[Tensor, "row following"]:
    """Measure the loss of the tokens after some positions, in nats."""
    logits = target.logits_at(ids, positions, start).flatten(0, 1)
    following = ids[:, positions + 1].to(logits.device)
    losses = list[Tensor]()
    for rows, tokens in zip(logits.split(AT_ONCE), following.flatten().split(AT_ONCE), strict=True):
        losses.append(cross_entropy(rows.float(), tokens, reduction="none"))
    return torch.cat(losses).reshape(following.shape).cpu()


def intact_losses(spike: Spike) -> Float[Tensor, "text following"]:
    """Return the loss of the next tokens of a survey without an edit, which is read once; NaN where it is not read."""
    survey = spike.survey
    if not survey.losses:
        batch = Batch((spike,), survey.ids, spike.place.mask[:, None], texts=torch.arange(len(survey.ids)))
        survey.losses.append(read(batch, loss=True).loss)
    return survey.losses[0]


# --- what is left of a spike ---


def batch_of(
    spike: Spike,
    sets: Sequence[Parts],
    texts: Int[Tensor, " row"],
    set_of: Int[Tensor, " row"],
    *,
    others: Sequence[Spike] = (),
    everywhere: bool = False,
) -> Batch:
    """Return rows that read some texts of a survey, each without a set of parts.

    Args:
        spike: The spike, at whose place parts are removed.
        sets: The sets.
        texts: Number of each row's text in the survey.
        set_of: Number of each row's set.
        others: Other spikes that are read.
        everywhere: Whether neurons are zeroed at every position; else at the place alone.
    """
    spikes = (spike, *others)
    places = torch.stack([member.place.mask[texts] for member in spikes], 1)
    means = means_of(spike, dict.fromkeys(chain(*sets)))
    edits = removal(sets, set_of, means, everywhere=everywhere)
    return Batch(spikes, spike.survey.ids[texts], places, texts, edits)


def left_at_place(spike: Spike, sets: Sequence[Parts], others: Sequence[Spike] = ()) -> Float[Tensor, "set spike text"]:
    """Measure what is left of a spike, and of others, in each text that has its place, with parts removed there.

    The passes end at their peaks and at the place. Texts that are alike up to the place, such as BOS alone, are read
    once.
    """
    mask = spike.place.mask
    texts = spike.texts
    end = int(mask[texts].any(0).nonzero().max()) + 1
    ids = spike.survey.ids[texts, :end]
    place = mask[texts, :end]
    if bool((ids == ids[0]).all() & (place == place[0]).all()):
        texts = texts[:1]
    set_of = torch.arange(len(sets)).repeat_interleave(len(texts))
    batch = batch_of(spike, sets, texts.repeat(len(sets)), set_of, others=others)
    reading = read(batch.until_place())
    along = reading.along.reshape(len(sets), len(texts), -1)
    return share_left(along.transpose(1, 2), reading.intact[: len(texts)].T)


def left_of(spike: Spike, sets: Sequence[SomeParts], others: Sequence[Spike] = ()) -> dict[SomeParts, list[float]]:
    """Return what is left of a spike, and of others, without each set at the place; strongest effect first."""
    if not sets:
        return {}
    left = left_at_place(spike, sets, others).nanmean(-1).nan_to_num(1.0)
    ordered = dict[SomeParts, list[float]]()
    for number in left[:, 0].abs().argsort(stable=True).tolist():
        ordered[sets[number]] = left[number].tolist()
    return ordered


def share_left(
    edited: Float[Tensor, "*edit text"], intact: Float[Tensor, "*intact text"]
) -> Float[Tensor, "*edit text"]:
    """Divide the mean over texts under each edit by the intact one, and add how far each text moves that ratio."""
    mean = intact.nanmean(-1, keepdim=True)
    left = edited.nanmean(-1, keepdim=True) / mean
    return left + (edited - left * intact) / mean
