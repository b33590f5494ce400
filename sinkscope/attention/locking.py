"""Which heads lock onto the repetitive suffix, and when (Xu et al. 2026, sections 1 and 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.attention.texts import (
    Mark,
    QueryHead,
    healthy_ids,
    loop_of,
    marks,
    prompt_ids,
)
from sinkscope.errors import SinkscopeError
from sinkscope.files.tables import cell
from sinkscope.interventions.base import Event
from sinkscope.interventions.decode import decode
from sinkscope.kv.session import AttentionRows, Observe
from sinkscope.loops.signals import WindowNovelty, collapse_point, diversity
from sinkscope.measure import Option, Positive, Result, Setup, measurement
from sinkscope.models.inputs import read_row

_QUERIES = 32  # rows converted to offsets at a time


@dataclass(frozen=True)
class Track:
    """Attention of one layer over a sequence, per query head and position.

    Attributes:
        mass: Share of attention on the suffix.
        shared: Share on the same suffix offsets as `shift` positions earlier; 0 for the first positions.
        width: Effective number of suffix positions it is spread over (exponential of its entropy).
    """

    mass: Float[Tensor, "head pos"]
    shared: Float[Tensor, "head pos"]
    width: Float[Tensor, "head pos"]


class Overlaps:
    """Accepts the attention rows of one sequence in order; they may arrive in any number of calls.

    The first position, where sinks are, is never part of the suffix. Memory: three numbers per head and position, and
    `shift` rows of `suffix` offsets.
    """

    def __init__(self, layers: list[int], suffix: int, shift: int) -> None:
        self.layers, self.suffix, self.shift = layers, suffix, shift
        self.before: dict[int, Tensor] = {}  # the last `shift` rows: head row offset
        self.found: dict[int, list[Tensor]] = {layer: [] for layer in layers}  # each [3 head pos]

    def observe(self) -> Observe:
        """The observer to enter as a context manager."""
        return Observe(self.see, self.layers)

    def see(self, rows: AttentionRows) -> None:
        """Process some rows of one layer."""
        probs, groups = rows.probs[0], rows.probs.shape[1] // rows.pos.shape[1]
        pos = rows.pos[0].repeat_interleave(groups, 0)[:, None]  # head 1 slot
        for start in range(0, probs.shape[1], _QUERIES):
            part = slice(start, start + _QUERIES)
            back = rows.query_pos[0, part, None] - pos  # head query slot
            inside = (pos > 0) & (back >= 0) & (back < self.suffix)
            cut = probs[:, part] * inside
            offsets = cut.new_zeros(*cut.shape[:2], self.suffix)
            offsets.scatter_add_(2, back.clamp(0, self.suffix - 1), cut)
            self._take(rows.layer, offsets)

    def _take(self, layer: int, offsets: Float[Tensor, "head query offset"]) -> None:
        # Missing rows are replaced by empty ones, which share nothing.
        before = self.before.get(layer, offsets.new_zeros(len(offsets), self.shift, self.suffix))
        both = torch.cat([before, offsets], 1)
        mass = offsets.sum(-1)
        share = offsets / mass[..., None].clamp_min(1e-12)
        width = torch.special.entr(share).sum(-1).exp()
        shared = torch.minimum(offsets, both[:, : -self.shift]).sum(-1)
        self.before[layer] = both[:, -self.shift :].clone()
        self.found[layer].append(torch.stack([mass, shared, width]).cpu())

    def tracks(self) -> dict[int, Track]:
        """What was seen, by layer."""
        return {layer: Track(*torch.cat(parts, 2)) for layer, parts in self.found.items()}


SUFFIX = 256  # positions, or three periods if longer: the window that LoopGuard monitors
LOCKED = 0.2  # gain from which a head counts as locked
POINTS = 512  # most points of a curve


@dataclass(frozen=True)
class LockingHead(QueryHead):
    """One query head late in the loop, and at the same positions of ordinary text.

    Attributes:
        score: Mass x stability: share of attention on the same offsets of the suffix as one period earlier.
        mass: Share of attention on the suffix.
        stability: Score divided by mass.
        width: Effective number of suffix positions that the attention is spread over.
        healthy_score: `score` in ordinary text, at a shift of one loop period; None without a control.
        healthy_mass: `mass` in ordinary text.
        healthy_stability: `stability` in ordinary text.
        gain: Score minus healthy score; heads are ranked by it.
        onset: Position from which the score stays above half way; None if the gain is too small to tell.
    """

    score: float
    mass: float
    stability: float
    width: float
    healthy_score: float | None
    healthy_mass: float | None
    healthy_stability: float | None
    gain: float
    onset: int | None

    @property
    def locked(self) -> bool:
        """Whether the head counts as locked."""
        return self.gain >= LOCKED


@dataclass(frozen=True, kw_only=True)
class Locking(Result):
    """Head locking in a loop.

    Attributes:
        tokens: Prompt and generated ids.
        prompt_tokens: How many of these tokens belong to the prompt.
        period: Period of the loop in tokens. None if the text does not loop; scores then compare rows one step apart.
        loop_onset: Position of the first token of the loop.
        suffix: Length of the suffix in positions.
        heads: Every head, largest gain first.
        locking_onset: Position from which the locked heads' mean score stays above half way; None if no head locks.
        last_new: Position of the last token that ended a 4-gram not seen in the preceding `window` tokens; everything
            later repeats.
        collapse: Position from which diversity has collapsed (type-token ratio of the last `window` tokens below 0.2
            until the end; only full windows count, so it comes late by construction).
        window: Number of tokens in these windows.
        positions: Positions at which the curves are sampled.
        locked_curve: Mean score of the locked heads at `positions`; empty if no head locks.
        other_curve: Mean score of all other heads.
        healthy_curve: Mean score of the locked heads in ordinary text.
        diversity: Windowed type-token ratio of the generated text; None within the prompt.
        marks: What interventions did.
    """

    kind: ClassVar[str] = "locking"
    columns: ClassVar[tuple[str, ...]] = (
        "head",
        "score",
        "healthy_score",
        "gain",
        "mass",
        "stability",
        "onset",
        "width",
    )

    tokens: int
    prompt_tokens: int
    period: int | None
    loop_onset: int | None
    suffix: int
    heads: tuple[LockingHead, ...]
    locking_onset: int | None
    last_new: int | None
    collapse: int | None
    window: int
    positions: tuple[int, ...]
    locked_curve: tuple[float, ...]
    other_curve: tuple[float, ...]
    healthy_curve: tuple[float, ...]
    diversity: tuple[float | None, ...]
    marks: tuple[Mark, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row per head, at most 16."""
        return [vars(h) for h in self.heads[:16]]

    def conclusion(self) -> str:
        """How many heads lock onto the loop, compared with ordinary text."""
        if self.period is None:
            return f"The {self.tokens} tokens end in no loop, so no head can lock onto one."
        control = any(h.healthy_score is not None for h in self.heads)
        than = "than in ordinary text" if control else "than none at all (no control was run)"
        if self.loop_onset is None:
            return f"The {self.tokens} tokens are in no loop of period {self.period}, so no head can lock onto one."
        return (
            f"{sum(h.locked for h in self.heads)} of {len(self.heads)} heads lock onto the repetition of period "
            f"{self.period}: at least {LOCKED:.0%} more of their attention lies on the same offsets as one period "
            f"before {than}."
        )

    def details(self) -> list[str]:
        """Where the loop begins, which heads lock, and when."""
        if self.period is None:
            return ["The scores compare rows one step apart and rank nothing."]
        if self.loop_onset is None:
            lines = [f"Rows {self.period} steps apart are compared anyway."]
        else:
            lines = [f"The loop begins at position {self.loop_onset} of {self.tokens}."]
        if locked := [h for h in self.heads if h.locked]:
            shown = ", ".join(f"{h} ({h.score:.2f})" for h in locked[:8])
            lines.append(f"Locked heads and their scores: {shown}{', ...' if len(locked) > 8 else ''}.")
            collapsed = "has not collapsed" if self.collapse is None else f"collapses at {self.collapse}"
            lines.append(
                f"They lock at position {cell(self.locking_onset)}; the last new 4-gram ends at "
                f"{cell(self.last_new)}; the type-token ratio of the last {self.window} tokens {collapsed}."
            )
        return lines


@measurement(
    group="Loops",
    figure="sinkscope.figures.attention:draw_locking",
    loading="whole",
    edits=True,
    quick={"max_new_tokens": 24, "suffix": 32},
)
def locking(
    setup: Setup,
    prompt: Annotated[str | Sequence[int] | None, Option("--prompt-file", metavar="FILE|-", reads="text")] = None,
    *,
    ids: Annotated[Sequence[int] | None, Option(hidden=True)] = None,
    max_new_tokens: Positive = 512,
    layers: Annotated[Sequence[int] | None, Option(min=0)] = None,
    period: Positive | None = None,
    suffix: Positive = SUFFIX,
    window: Positive = SUFFIX,
    control: bool | Sequence[int] = True,
) -> Locking:
    """Rank heads by how much of their attention locks onto the loop's own repetition, and say when it begins.

    At every position, the attention on the suffix is indexed by offset (distance back) and compared with the row one
    period earlier. The score is the share on the same offsets, which is mass on the suffix times stability. A head that
    always looks one token back scores high in any text, so heads are ranked by the increase over ordinary text. If the
    text does not loop, `period` is None (Xu et al. 2026, sections 1 and 3.2).

    Args:
        prompt: Text to continue greedily until it loops; from Python also ids. By default the beginning of the typical
            text.
        ids: A complete sequence to measure instead of generating one.
        max_new_tokens: Tokens to generate.
        layers: Measure this layer. By default all layers.
        period: Period of the loop, if it is known. By default it is detected at the end of the text.
        suffix: Length of the suffix in positions; three periods if that is longer.
        window: Number of tokens for the windowed type-token ratio.
        control: Compare with ordinary text of the same length; from Python also the ids of such a text.

    Example:
        sinkscope locking --model qwen3-1.7b --max-new-tokens 500
    """
    if prompt is not None and ids is not None:
        raise SinkscopeError("a prompt and ids are given: expected one of them")
    wanted = setup.target.chosen_layers(layers)
    setup.progress("locking", 0, 3)
    whole, prompted, events = _sequence(setup, prompt, ids, max_new_tokens, period)
    loop = loop_of(whole, prompted)
    shift = period or loop.period or 1
    reach = max(suffix, 3 * shift)
    setup.progress("locking", 1, 3)
    own = _tracks(setup, whole, prompted, wanted, reach, shift)
    setup.progress("locking", 2, 3)
    ordinary = _control(setup, control, len(whole))
    plain = None if ordinary is None else _tracks(setup, ordinary, prompted, wanted, reach, shift)
    setup.progress("locking", 3, 3)
    first = prompted if loop.onset is None else loop.onset
    heads = _heads(own, plain, first, shift)
    some = [(h.layer, h.head) for h in heads if h.locked and (loop.period or period)]
    rest = [(h.layer, h.head) for h in heads if (h.layer, h.head) not in some]
    positions = tuple(range(0, len(whole) - 1, -(-len(whole) // POINTS)))
    mean, calm = _mean(own, some, shift), None if plain is None else _mean(plain, some, shift)
    answer = whole[prompted:]
    point = collapse_point(answer, window)
    ratio: list[float | None] = [*([None] * prompted), *diversity(answer, window)]
    return Locking(
        tokens=len(whole),
        prompt_tokens=prompted,
        period=period or loop.period,
        loop_onset=loop.onset if loop.period is not None and shift % loop.period == 0 else None,
        suffix=reach,
        heads=heads,
        window=window,
        positions=positions,
        locking_onset=None if mean is None else _onset(mean, 0.0 if calm is None else float(calm[first:].mean())),
        last_new=_last_new(whole, window),
        collapse=None if point is None else prompted + point - 1,
        locked_curve=_at(mean, positions),
        other_curve=_at(_mean(own, rest, shift), positions),
        healthy_curve=_at(calm, positions),
        diversity=tuple(ratio[p] for p in positions),
        marks=marks(events),
    )


def _sequence(
    setup: Setup, prompt: str | Sequence[int] | None, ids: Sequence[int] | None, new: int, period: int | None
) -> tuple[list[int], int, list[Event]]:
    """Ids, how many of them are the prompt, and what interventions did while the rest was generated."""
    if ids is not None:
        whole = read_row(setup.target, ids)
        _check_period(period, len(whole))
        return whole, 1, []
    start = prompt_ids(setup, prompt)
    setup.target.check_length("the prompt", len(start), new)
    _check_period(period, len(start) + new)  # before the work
    answer, events = decode(setup.target, start, new, setup.edit)
    _check_period(period, len(start) + len(answer))
    return [*start, *answer], len(start), events


def _tracks(setup: Setup, ids: list[int], prompt: int, layers: list[int], suffix: int, shift: int) -> dict[int, Track]:
    """In one pass, or token by token where interventions make a difference between the two."""
    watch = Overlaps(layers, suffix, shift)
    if setup.edit is None:
        with watch.observe().on(setup.target):
            setup.target.forward(torch.tensor([ids[:-1]]))
    else:
        decode(setup.target, ids[:prompt], len(ids) - prompt, setup.edit | watch.observe(), ids[prompt:])
    return watch.tracks()


def _check_period(period: int | None, tokens: int) -> None:
    if period is not None and 2 * period > tokens:
        raise SinkscopeError(
            f"period {period}: expected at most {tokens // 2}, half of the {tokens} tokens; give a smaller one, or "
            "more tokens"
        )


def _control(setup: Setup, control: bool | Sequence[int], length: int) -> list[int] | None:
    if isinstance(control, bool):
        found = healthy_ids(setup, length) if control else None
        return None if found is None else found.tolist()
    given = read_row(setup.target, control)
    if len(given) < length:
        raise SinkscopeError(f"a control of {len(given)} ids: expected {length}, as many as the sequence has")
    return given[:length]


def _heads(own: dict[int, Track], plain: dict[int, Track] | None, first: int, shift: int) -> tuple[LockingHead, ...]:
    """Every head over the second half of the loop, ranked."""
    found: list[LockingHead] = []
    for layer, track in own.items():
        late = slice((first + track.mass.shape[1]) // 2, None)
        mass, score, width = (t[:, late].mean(1) for t in (track.mass, track.shared, track.width))
        other = None if plain is None else plain[layer]
        calm = None if other is None else (other.mass[:, late].mean(1), other.shared[:, late].mean(1))
        for h in range(len(mass)):
            there = None if calm is None else (float(calm[0][h]), float(calm[1][h]))
            gain = float(score[h]) - (0.0 if there is None else there[1])
            found.append(
                LockingHead(
                    layer=layer,
                    head=h,
                    score=float(score[h]),
                    mass=float(mass[h]),
                    stability=_over(float(score[h]), float(mass[h])),
                    width=float(width[h]),
                    healthy_score=there and there[1],
                    healthy_mass=there and there[0],
                    healthy_stability=there and _over(there[1], there[0]),
                    gain=gain,
                    onset=_onset(_smooth(track.shared[h], shift), float(score[h]) - gain) if gain >= LOCKED else None,
                )
            )
    return tuple(sorted(found, key=lambda h: -h.gain))


def _smooth(values: Tensor, shift: int) -> Tensor:
    """Mean over the last period (at least 8 positions) at every position."""
    width = max(8, shift)
    total = torch.nn.functional.pad(values.cumsum(0), (width, 0))
    counts = torch.arange(1, len(values) + 1).clamp(max=width)
    return (total[width:] - total[:-width]) / counts


def _mean(tracks: dict[int, Track], heads: list[tuple[int, int]], shift: int) -> Tensor | None:
    if not heads:
        return None
    return _smooth(torch.stack([tracks[layer].shared[head] for layer, head in heads]).mean(0), shift)


def _onset(curve: Tensor, low: float) -> int | None:
    """First position from which the curve stays above half way between `low` and the mean of its last quarter."""
    half = (low + float(curve[-max(1, len(curve) // 4) :].mean())) / 2
    below = (curve < half).nonzero()
    first = 0 if not len(below) else int(below[-1]) + 1
    return first if first < len(curve) else None


def _last_new(ids: list[int], window: int, n: int = 4) -> int | None:
    """Position of the last token whose n-gram does not lie in the `window` tokens up to it once more, earlier."""
    novelty = WindowNovelty(max(window, n), n, 1)
    new = [bool(novelty.add(token, at)) for at, token in enumerate(ids)]
    return max((at for at, first in enumerate(new) if first and at >= n - 1), default=None)


def _at(curve: Tensor | None, positions: tuple[int, ...]) -> tuple[float, ...]:
    return () if curve is None else tuple(curve[list(positions)].tolist())


def _over(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
