"""What is asked of a place: tables of cases, each read by the one reader (`read`) and told in a `Row`.

- Effects: the needed set removed at the place, and everywhere; the place hidden; and controls, which write as much.
- Alone: the units of the needed set, one by one.
- Conditions: an ordinary position gets the place's token, sees only itself, has its position id, each alone and
  together; each is taken away at the place (Barbero et al. 2025, Sun et al. 2024, and later papers each claim one).
- Purpose: what later tokens lose without the place, or with another value there.

Everything is read in texts that did not choose what is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from sinkscope.errors import UnsupportedError
from sinkscope.measure.margin import mean_of, resampled_margin
from sinkscope.models.draws import draws
from sinkscope.results.row import Mean, Row, row_of
from sinkscope.sinks.spikes.controls import equal_sets, other_components
from sinkscope.sinks.spikes.edited import Batch, SpikeTexts, intact_losses, read, takes_positions
from sinkscope.sinks.spikes.needs import Needs
from sinkscope.sinks.spikes.places import at_position
from sinkscope.sinks.spikes.records import AS_IT_IS, CAUSES, NO_EQUAL, ONE_OTHER, PURPOSE_CONTROLS, TAKEN, TAKEN_SIGHT
from sinkscope.sinks.spikes.spike import Parts, Spike
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.thresholds import READS
from sinkscope.sinks.tokens import TokenRows

FEW, ALONE = 8, 4  # texts of controls and of removals everywhere; texts of units that are removed alone
UNITS = 8  # units that are removed alone
TEXTS = 8  # texts of conditions and purpose, two of each kind
FIRST, LAST = 16, 40  # ordinary positions are drawn from these on, up to here
SHIFT = 32  # by which the start is shifted
BEFORE = 4  # tokens that the place sees before itself
DRAWS = 4  # positions of each text that see one other token: it matters much which both are
BEGIN = 16  # tokens from here on are read for the purpose: all come after the keys that are hidden
KEYS = range(4, 12)  # ordinary keys that may be hidden
TAKERS = (1, 2)  # positions that may take over


def count_readers(received: Float[Tensor, "layer head text"]) -> Mean:
    """Return how many heads give more than 0.3 of their attention, mean over texts, and the margin of this count."""
    attention = received.flatten(0, 1).double()

    def count(sample: Int[np.ndarray, "sample text"]) -> Float[np.ndarray, " sample"]:
        times = one_hot(torch.from_numpy(sample), attention.shape[1]).sum(1).double()  # how often each text was drawn
        return (attention @ times.T > READS * sample.shape[1]).sum(0).double().numpy()

    margin = resampled_margin(count, attention.shape[1]) if attention.numel() else None
    by_text = tuple((attention > READS).sum(0).double().tolist())
    return Mean(float((attention.mean(1) > READS).sum()), margin, by_text, "count")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is done to the texts of a spike.

    Attributes:
        table: The table in which it stands.
        name: What is done.
        sets: Parts that are removed; several sets are read in turn, each in texts of its own.
        everywhere: Whether they are removed at every position.
        hide: The position that later tokens do not see; "place" is that of the spike.
        value: What later tokens read at the place instead of its value.
        layers: Layers in which that holds. None: all.
        texts: Number of texts. None: all.
        norm: Mean norm of what the sets write, over that of the needed set. None: they are no neurons.
        note: What else there is to say.
    """

    table: str
    name: str
    sets: Sequence[Parts] = ((),)
    everywhere: bool = False
    hide: int | Literal["place"] | None = None
    value: Literal["zero", "mean"] | None = None
    layers: Sequence[int] | None = None
    texts: int | None = None
    norm: float | None = None
    note: str = ""


def measure(
    case: Case,
    texts: SpikeTexts,
    layers: Sequence[int],
    *,
    like: Row | None = None,
    losses: bool = True,
    since: int = 0,
) -> Row:
    """Measure a case.

    Args:
        case: The case.
        texts: The texts.
        layers: Layers whose attention is read. Empty: neither heads nor loss is read.
        like: What the needed set does, which the sets may do as well: those that do are counted.
        losses: Whether the loss is read.
        since: The first position that is read.
    """
    chosen = texts.rows[: case.texts]
    count = max(len(chosen), len(case.sets))
    rows, edit_of = torch.arange(count) % len(chosen), torch.arange(count) % len(case.sets)
    batch = texts.batch(case.sets, chosen[rows], edit_of)
    batch = replace(batch, everywhere=case.everywhere, value=case.value, layers=case.layers)
    if case.hide is not None:
        hidden = batch.places[0] if case.hide == "place" else at_position(batch.ids, case.hide)
        batch = replace(batch, unseen=hidden[:, None].expand(-1, hidden.shape[1], -1))
    seen = read(batch, layers, loss=losses and bool(layers), since=since)
    left = texts.left_of(seen.along.T[None], chosen[rows])[0, 0]
    rise = torch.full((count,), torch.nan)
    numbers: dict[str, Mean | float | None] = {"left": mean_of(left, "share")}
    if layers:
        numbers["heads"] = count_readers(seen.attention[:, [*layers]].permute(1, 2, 0))
        if not since:
            numbers["intact"] = count_readers(texts.attention[..., rows])
    if bool(seen.loss.isfinite().any()):
        place = batch.places[0].int()
        counted = (place.cumsum(1) > place)[:, :-1]  # queries after the first position of the place
        change = (seen.loss - intact_losses(texts.spike)[chosen[rows]]).masked_fill(~counted, torch.nan)
        rise = change.nanmean(1)
        numbers |= {"loss": mean_of(rise), "tokens": int(change.isfinite().sum())}
    if like is not None:  # sets that raise the loss as much in the same texts, or leave as little of the spike
        what, sign, own = ("loss", 1, rise) if "loss" in like.numbers else ("left", -1, left)
        known, reached = sign * torch.tensor(like.numbers[what].by_text), 0
        for number in range(len(case.sets)):
            some = edit_of == number
            reached += bool(sign * own[some].mean() >= known[rows[some]].mean())
        numbers |= {"sets": len(case.sets), "reached": reached}
        numbers["size"] = Mean(float(np.mean([len(parts) for parts in case.sets])), kind="count")
        numbers["norm"] = None if case.norm is None else Mean(case.norm, kind="share")
    return row_of(case.table, case.name, case.note, **numbers)


# --- effects ---


@torch.no_grad()
def effects_of(texts: SpikeTexts, needs: Needs, chosen: Survey, hidden: Row | None, seed: int) -> list[Row]:
    """Measure what the needed set of a spike does, beside what others do that write as much, and each unit of it;
    nothing if none is needed.

    Args:
        texts: The texts of the spike.
        needs: What it needs.
        chosen: The survey that found it, which tells what neurons write.
        hidden: What hiding the place does. None: it was not measured.
        seed: Seed of random sets.
    """
    if not needs.needed:
        return []
    reading, removed = texts.spike.reading_layers, partial(Case, table="effects", sets=(needs.needed,))
    layers = reading if texts.whole else ()
    at_place = measure(removed(name="at place"), texts, layers)
    if not needs.units:
        others = other_components([(part,) for part in needs.order], needs.needed)
        if not others:
            return [at_place, row_of("controls", "random", "there are no other components")]
        control = Case(table="controls", name="random", sets=others, note="another component replaced")
        return [at_place, measure(control, texts, layers, like=at_place)]
    rows = [at_place, measure(removed(name="everywhere", everywhere=True, texts=FEW), texts, reading)]
    rows += [] if hidden is None else [hidden]
    candidates = {neuron for unit in needs.writers.units for neuron in unit}
    equal = equal_sets(chosen, needs.units, candidates, seed)
    alone = alone_of(texts, needs, at_place)
    if equal is None:
        return [*rows, row_of("controls", "busiest", "no other neuron of these layers writes anything"), *alone]
    control = partial(Case, table="controls", everywhere=True, texts=FEW, note="" if equal.enough else NO_EQUAL)
    controls = [control(name="busiest", sets=(equal.busiest,), norm=equal.norms[0])]
    if equal.random:
        controls.append(control(name="random", sets=equal.random, norm=float(np.mean(equal.norms[1:]))))
    return [*rows, *(measure(case, texts, layers, like=at_place) for case in controls), *alone]


def alone_of(texts: SpikeTexts, needs: Needs, at_place: Row) -> list[Row]:
    """Measure what single needed units do, strongest effect first; a single one is the set at the place."""
    layers, rows = texts.spike.reading_layers if texts.whole else (), list[Row]()
    for unit in [unit for unit in needs.alone if unit in needs.units][:UNITS]:
        row = at_place
        if len(needs.units) > 1:
            row = measure(Case(table="alone", name="", sets=(unit,), texts=ALONE), texts, layers)
        rows += [replace(row, table="alone", name=str(neuron)) for neuron in unit]
    return rows


@torch.no_grad()
def hidden_of(texts: SpikeTexts, first_writer: int) -> Row | None:
    """Measure what it does to hide the place from later tokens in the layers after the first that writes its spike.

    None: no head reads the place, or no key can be hidden there, because layers keep states or attend inside.
    """
    target = texts.spike.survey.target
    later = range(first_writer + 1, target.n_layers)
    if not texts.whole or not later or not {*later} <= {*target.attending}:
        return None
    case = Case(table="effects", name="hidden", hide="place", layers=later, note=from_layer(later))
    try:
        return measure(case, texts, texts.spike.reading_layers)
    except UnsupportedError:
        return None


# --- purpose ---


@torch.no_grad()
def purpose_of(spike: Spike, first_writer: int, hidden: Row | None, seed: int) -> list[Row]:
    """Ask what the attention to the first token is for; empty of short texts, and of a model that is streamed.

    Args:
        spike: The spike.
        first_writer: The layer of the first part that it needs; later layers are changed.
        hidden: What it costs to hide the place there.
        seed: Seed of the ordinary key.
    """
    survey, target = spike.survey, spike.survey.target
    ids = survey.ids[:TEXTS]
    if ids.shape[1] <= 2 * BEGIN or not target.resident:
        return []
    texts = SpikeTexts(spike, torch.arange(len(ids)))
    ordinary = KEYS[int(torch.randint(len(KEYS), (1,), generator=draws(seed, "ordinary key of purpose")))]
    received = survey.attention[target.attending].mean((0, 1, 2))[KEYS.start : KEYS.stop]
    attended = KEYS[int(received.argmax())]
    later = range(first_writer + 1, target.n_layers)
    case = partial(Case, table="purpose", layers=later, note=from_layer(later))
    cases = [
        case(name="intact", layers=None, note=""),
        case(name="hidden in all layers", hide="place", layers=None, note=""),
        case(name="hidden", hide="place"),
        case(name="value zero", value="zero"),
        case(name="mean value", value="mean"),
    ]
    for name, key in (("ordinary key hidden", ordinary), ("most attended key hidden", attended)):
        note = f"position {key}, {from_layer(later)}"
        cases.append(case(name=name, table=PURPOSE_CONTROLS, hide=key, note=note))
    rows: list[Row] = []
    for one in cases:
        row = measure(one, texts, target.attending, since=BEGIN)
        numbers = {name: mean for name, mean in row.numbers.items() if name != "left"}
        if one.name == "hidden in all layers":
            numbers |= takers(one, texts)
        if one.name == "hidden" and hidden is not None:  # one number: over all texts that report
            numbers |= {name: hidden.numbers[name] for name in ("loss", "tokens") if name in hidden.numbers}
        if one.name == "intact":
            del numbers["loss"], numbers["tokens"]
        rows.append(replace(row, numbers=numbers))
    return rows


def from_layer(layers: range) -> str:
    """Return in which layers a place is hidden or changed."""
    return f"from layer {layers.start} on"


def takers(case: Case, texts: SpikeTexts) -> dict[str, Mean]:
    """Return which of the next positions takes over most, and how many heads attend to it."""
    counts: dict[int, Mean] = {}
    batch = texts.batch((), texts.rows, torch.zeros(len(texts.rows), dtype=torch.long))
    unseen = batch.places[0][:, None].expand(-1, batch.ids.shape[1], -1)
    for position in TAKERS:
        there = replace(batch, places=(at_position(batch.ids, position),), unseen=unseen, layers=case.layers)
        seen = read(there, batch.target.attending, since=BEGIN)
        counts[position] = count_readers(seen.attention[:, batch.target.attending].permute(1, 2, 0))
    taker = max(counts, key=lambda position: counts[position].value)
    return {"taker": Mean(float(taker), kind="count"), "taker_heads": counts[taker]}


# --- conditions ---


def with_position(
    batch: Batch,
    token: Int[Tensor, " row"] | None = None,
    sees: Bool[Tensor, "row key"] | None = None,
    start: bool = False,
) -> Batch:
    """Give the position of each row another token, let it see itself and some others alone, or give it position id 0.

    Args:
        batch: The rows.
        token: The tokens. None: its own.
        sees: The others. None: all.
        start: Whether it has position id 0.
    """
    place, ids, unseen, positions = batch.places[0], batch.ids, batch.unseen, batch.positions
    if token is not None:
        ids = torch.where(place, token[:, None], ids)
    if sees is not None:
        unseen = place[..., None] & ~sees[:, None]
    if start:
        positions = torch.where(place, 0, torch.arange(ids.shape[1]))
    return replace(batch, ids=ids, unseen=unseen, positions=positions)


def place_sees(batch: Batch, more: int) -> Batch:
    """Put so many tokens before the first position, which it alone sees."""
    ids = torch.cat([batch.ids[:, batch.ids.shape[1] - more :], batch.ids], 1)
    at = torch.arange(ids.shape[1])
    unseen = (at[:, None] > more) & (at < more)
    places = (at_position(ids, more),) * len(batch.places)
    positions = (at - more).clamp(min=0).expand_as(ids)
    return replace(batch, ids=ids, places=places, positions=positions, unseen=unseen.expand(len(ids), -1, -1))


def at_positions(spikes: Sequence[Spike], ids: TokenRows, at: Int[Tensor, " row"]) -> Batch:
    """Return rows that are read at one position each."""
    return Batch(tuple(spikes), ids, (torch.arange(ids.shape[1]) == at[:, None],) * len(spikes))


def ordinary_positions(spikes: Sequence[Spike], seed: int) -> Batch:
    """Draw an ordinary position in each text."""
    ids = spikes[0].survey.ids[:TEXTS]
    at = torch.randint(FIRST, LAST, (len(ids),), generator=draws(seed, "ordinary positions of conditions"))
    return at_positions(spikes, ids, at)


def with_causes(batch: Batch, causes: Sequence[str]) -> Batch:
    """Give the position of each row what is special about the first token."""
    token, alone, start = (cause in causes for cause in CAUSES)
    nothing = torch.zeros_like(batch.places[0])
    return with_position(batch, batch.ids[:, 0] if token else None, nothing if alone else None, start)


@torch.no_grad()
def conditions_of(spikes: Sequence[Spike], seed: int) -> list[list[Row]]:
    """Ask what makes a position the place of spikes of the first token, of each; empty if the texts are too short.

    Args:
        spikes: The spikes, in texts that did not find them.
        seed: Seed of the ordinary positions, tokens and others.
    """
    by_spike: list[list[Row]] = [[] for _ in spikes]
    if not spikes or spikes[0].survey.ids.shape[1] <= LAST:
        return by_spike
    survey, target, ordinary = spikes[0].survey, spikes[0].survey.target, ordinary_positions(spikes, seed)
    ids, generator = ordinary.ids, draws(seed, "other tokens of conditions")
    at = torch.randint(FIRST, ids.shape[1], (len(ids),), generator=generator)
    token = ids.roll(1, 0)[torch.arange(len(ids)), at]
    first = at_positions(spikes, ids, torch.zeros(len(ids), dtype=torch.long))
    takes, later = takes_positions(target), torch.arange(ids.shape[1]).expand_as(ids) + SHIFT
    cases: dict[str, Batch] = {}
    for has in product((False, True), repeat=3):
        causes = [cause for cause, there in zip(CAUSES, has, strict=True) if there]
        if takes or not has[2]:
            cases[", ".join(causes) or AS_IT_IS] = with_causes(ordinary, causes)
    cases[TAKEN["its token"]] = with_position(first, token)
    cases[TAKEN["alone"]] = place_sees(first, BEFORE)
    if takes and int(later.max()) < (target.max_positions or int(later.max()) + 1):
        cases[TAKEN["id 0"]] = replace(first, positions=later)
    read_heads = {*cases}
    cases["random token, alone"] = with_causes(with_position(ordinary, token), ["alone"])
    cases[ONE_OTHER] = one_other_drawn(spikes, survey.ids, seed)
    cases[TAKEN_SIGHT.format(1)] = place_sees(first, 1)
    for name, batch in cases.items():
        layers, texts = target.attending, len(survey.ids) if name == ONE_OTHER else len(ids)
        if name not in read_heads:
            layers, batch = [], batch.until_place()
        seen = read(batch, layers)
        for number, (spike, rows) in enumerate(zip(spikes, by_spike, strict=True)):
            left = mean_of(seen.along[:, number].reshape(-1, texts).mean(0), "share")
            received = seen.attention[:, [*spike.reading_layers]].permute(1, 2, 0)
            rows.append(row_of("conditions", name, left=left, heads=count_readers(received) if layers else None))
    return by_spike


def one_other_drawn(spikes: Sequence[Spike], ids: TokenRows, seed: int) -> Batch:
    """Return positions that see themselves and one other token, which is not the first: several draws in each text."""
    generator, at, others = draws(seed, "one other token of conditions"), list[Tensor](), list[int]()
    for _ in range(DRAWS):
        at.append(torch.randint(FIRST, LAST, (len(ids),), generator=generator))
        for position in at[-1].tolist():
            others.append(int(torch.randint(1, position, (1,), generator=generator)))
    batch = at_positions(spikes, ids.repeat(DRAWS, 1), torch.cat(at))
    return with_position(batch, sees=one_hot(torch.tensor(others), ids.shape[1]).bool())
