"""Step 7, the conditions: what makes a position the place of a spike.

An ordinary position gets the place's token, sees only itself, has its position id, each alone and together; each is
taken away at the place (Barbero et al. 2025, Sun et al. 2024, and later papers each claim one).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress, product
from math import inf

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import one_hot

from sinkscope.measure.margin import count_above, mean_of
from sinkscope.models.draws import draws
from sinkscope.sinks.spikes.edited import Batch, Reading, read
from sinkscope.sinks.spikes.row_edits import Hidden, Positions, RowEdit, takes_positions
from sinkscope.sinks.spikes.spike import Spike, at_position
from sinkscope.sinks.spikes.why_tables import ONE_OTHER, Cause, Condition, Conditioned
from sinkscope.sinks.thresholds import READS
from sinkscope.sinks.tokens import Mask, TokenRows

TEXTS = 8  # two of each kind
FIRST = 16
LAST = 40  # ordinary positions are drawn from these on, up to here
SHIFT = 32  # by which the start is shifted
BEFORE = 4  # tokens that the place sees before itself
DRAWS = 4  # positions of each text that see one other token: it matters much which both are


@torch.no_grad()
def conditions_of(spikes: Sequence[Spike], seed: int) -> list[list[Conditioned]]:
    """Ask what makes a position the place of spikes of the first token, of each; empty if the texts are too short.

    Args:
        spikes: The spikes, in texts that did not find them.
        seed: Seed of the ordinary positions, tokens and others.
    """
    by_spike: list[list[Conditioned]] = [[] for _ in spikes]
    survey = spikes[0].survey
    if survey.ids.shape[1] <= LAST:
        return by_spike
    layers = survey.target.attending
    batches = given_to_ordinary(spikes, seed) | taken_at_place(spikes, seed)
    for condition, batch in batches.items():
        reading = read(batch, layers)
        for number, (spike, rows) in enumerate(zip(spikes, by_spike, strict=True)):
            rows.append(conditioned(condition, reading, number, spike))
    reading = read(one_other_drawn(spikes, survey.ids, seed).until_place())
    for number, rows in enumerate(by_spike):
        by_text = reading.along[:, number].reshape(DRAWS, -1).mean(0)
        left = mean_of(by_text, "share")
        assert left is not None
        rows.append(Conditioned(key=ONE_OTHER, left=left))
    return by_spike


def conditioned(condition: Condition, reading: Reading, number: int, spike: Spike) -> Conditioned:
    """Return the row of a spike under a condition.

    Args:
        condition: The condition.
        reading: What was read.
        number: Number of the spike among those that were read.
        spike: The spike.
    """
    left = mean_of(reading.along[:, number], "share")
    assert left is not None
    attention = reading.attention[:, [*spike.reading_layers]].permute(1, 2, 0)
    return Conditioned(key=condition, left=left, heads=count_above(attention, READS))


def given_to_ordinary(spikes: Sequence[Spike], seed: int) -> dict[Condition, Batch]:
    """Return rows whose ordinary position gets some of the causes; without position ids, it gets no other one."""
    survey = spikes[0].survey
    ids = survey.ids[:TEXTS]
    batches: dict[Condition, Batch] = {}
    for is_given in product((False, True), repeat=len(Cause)):
        causes = tuple(compress(Cause, is_given))
        if takes_positions(survey.target) or Cause.ID not in causes:
            batches[Condition(causes)] = rows_at(spikes, ids, ordinary_positions(ids, seed), causes)
    return batches


def taken_at_place(spikes: Sequence[Spike], seed: int) -> dict[Condition, Batch]:
    """Return rows whose first position lacks one of the causes; its id is shifted where the model has as many."""
    target = spikes[0].survey.target
    ids = spikes[0].survey.ids[:TEXTS]
    n_texts, length = ids.shape
    column = torch.randint(FIRST, length, (n_texts,), generator=draws(seed, "other tokens of conditions"))
    other_token = ids.roll(1, 0)[torch.arange(n_texts), column]
    first = torch.zeros(n_texts, dtype=torch.long)
    batches = {
        Condition((Cause.TOKEN,), at_place=True): rows_at(spikes, with_token(ids, first, other_token), first),
        Condition((Cause.ALONE,), at_place=True): place_sees(spikes, ids, BEFORE),
    }
    if takes_positions(target) and length + SHIFT <= (target.max_positions or inf):
        shifted = torch.arange(length).expand_as(ids) + SHIFT
        batches[Condition((Cause.ID,), at_place=True)] = rows_at(spikes, ids, first).under(Positions(shifted))
    return batches


def rows_at(
    spikes: Sequence[Spike], ids: TokenRows, positions: Int[Tensor, " row"], causes: Collection[Cause] = ()
) -> Batch:
    """Return rows that are read at one position each.

    Args:
        spikes: The spikes.
        ids: The tokens.
        positions: The position of each row.
        causes: What each position gets of what is special about the first token.
    """
    place = one_hot(positions, ids.shape[1]).bool()
    edits: list[RowEdit] = []
    if Cause.TOKEN in causes:
        ids = with_token(ids, positions, ids[:, 0])
    if Cause.ALONE in causes:
        edits.append(Hidden(torch.ones_like(place), queries=place))
    if Cause.ID in causes:
        edits.append(Positions(torch.where(place, 0, torch.arange(ids.shape[1]))))
    places = place[:, None].expand(-1, len(spikes), -1)
    return Batch(tuple(spikes), ids, places, edits=tuple(edits))


def with_token(ids: TokenRows, positions: Int[Tensor, " row"], tokens: Int[Tensor, " row"]) -> TokenRows:
    """Return texts in which another token stands at one position each."""
    return ids.scatter(1, positions[:, None], tokens[:, None])


def place_sees(spikes: Sequence[Spike], ids: TokenRows, n_before: int) -> Batch:
    """Return rows with so many tokens before the first position, which it alone sees."""
    ids = torch.cat([ids[:, ids.shape[1] - n_before :], ids], 1)
    column = torch.arange(ids.shape[1])
    places = at_position(ids, n_before)[:, None].expand(-1, len(spikes), -1)
    hidden = Hidden((column < n_before).expand_as(ids), queries=(column > n_before).expand_as(ids))
    positions = Positions((column - n_before).clamp(min=0).expand_as(ids))
    return Batch(tuple(spikes), ids, places, edits=(hidden, positions))


def one_other_drawn(spikes: Sequence[Spike], ids: TokenRows, seed: int) -> Batch:
    """Return positions that see themselves and one other token, which is not the first: several draws in each text."""
    generator = draws(seed, "one other token of conditions")
    positions: list[Tensor] = []
    seen_positions: list[int] = []
    for _ in range(DRAWS):
        positions.append(torch.randint(FIRST, LAST, (len(ids),), generator=generator))
        for position in positions[-1].tolist():
            seen_positions.append(int(torch.randint(1, position, (1,), generator=generator)))
    batch = rows_at(spikes, ids.repeat(DRAWS, 1), torch.cat(positions))
    keys: Mask = ~one_hot(torch.tensor(seen_positions), ids.shape[1]).bool()
    return batch.under(Hidden(keys, queries=batch.places[:, 0]))


def ordinary_positions(ids: TokenRows, seed: int) -> Int[Tensor, " text"]:
    """Draw an ordinary position in each text."""
    return torch.randint(FIRST, LAST, (len(ids),), generator=draws(seed, "ordinary positions of conditions"))
