"""Which heads lock onto the repetitive suffix, and when (Xu et al. 2026, sections 1 and 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from sinkscope.attention._decode import Mark, decode, joined, loaded, marks
from sinkscope.attention._loop import check_room, checked_ids, chosen_layers, healthy_ids, loop_of, opened, prompt_ids
from sinkscope.attention._overlap import Overlaps, Track
from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Event, Intervention
from sinkscope.interventions.sink_patch import SinkPatch
from sinkscope.loops.signals import WINDOW, collapse_point, diversity
from sinkscope.results import Result
from sinkscope.sinks.first_token.locate import Progress, Setup

SUFFIX = 256  # positions, or three periods if these are more: the window that LoopGuard watches
LOCKED = 0.2  # gain from which a head counts as locked
POINTS = 512  # of a curve


@dataclass(frozen=True)
class LockingHead:
    """One query head late in the loop, and at the same positions of ordinary text.

    Attributes:
        layer: its layer.
        head: which head.
        score: mass x stability: share of attention on the same offsets of the suffix as one period earlier.
        mass: share on the suffix.
        stability: score over mass.
        width: on how many positions of the suffix, in effect.
        healthy_score: `score` in ordinary text, one period of the loop apart; None without a control.
        healthy_mass: `mass` there.
        healthy_stability: `stability` there.
        gain: score less healthy score: what heads are ranked by.
        onset: position from which the score stays above half way; None if the gain is too small to say.
    """

    layer: int
    head: int
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
        """Whether it counts as locked."""
        return self.gain >= LOCKED


@dataclass(frozen=True, kw_only=True)
class Locking(Result):
    """Head locking in a loop.

    Attributes:
        tokens: prompt and generated ids.
        prompt_tokens: of them, those of the prompt.
        period: of the loop; None: no loop, and scores are of steps one apart.
        loop_onset: position of the first token of the loop.
        suffix: positions that the suffix is long.
        heads: every head, those that the loop locks most first.
        locking_onset: position from which the locked heads' mean score stays above half way; None without any.
        last_new: position of the last token that ended a 4-gram which was new to `window` tokens: what comes later
            repeats.
        collapse: position where diversity has collapsed (type-token ratio of the last `window` tokens below 0.2 for
            good; whole windows count, so it is late by construction).
        window: of these.
        positions: of the curves.
        locked_curve: mean score of the locked heads at `positions`; empty if there are none.
        other_curve: of all other heads.
        healthy_curve: of the locked heads in ordinary text.
        diversity: windowed type-token ratio of what was generated; None within the prompt.
        marks: what interventions did.
    """

    kind: ClassVar[str] = "locking"

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

    def summary(self) -> str:
        """What was found, in a few lines."""
        m = self.model
        lines = [f"{m.name} ({m.family}, {m.n_layers} layers)"]
        if self.period is None:
            lines.append(f"No loop in {self.tokens} tokens: the scores are of steps one apart, and rank nothing.")
            return "\n".join(lines)
        if self.loop_onset is None:
            lines.append(
                f"No loop of period {self.period} in {self.tokens} tokens: steps {self.period} apart are compared all "
                "the same."
            )
        else:
            lines.append(f"Loop of period {self.period} from position {self.loop_onset} of {self.tokens}.")
        locked = [h for h in self.heads if h.locked]
        control = any(h.healthy_score is not None for h in self.heads)
        than = "in ordinary text" if control else "nothing (no control)"
        lines.append(
            f"{len(locked)} of {len(self.heads)} heads are locked: on the same offsets as a period before lie at least "
            f"{LOCKED:.0%} more of their attention than {than}."
        )
        if locked:
            shown = ", ".join(f"{h.layer}.{h.head} ({h.score:.2f})" for h in locked[:8])
            lines.append(f"{shown}{', ...' if len(locked) > 8 else ''}.")
            begins = "" if self.loop_onset is None else f"the loop begins at {self.loop_onset}, "
            collapsed = "has not collapsed" if self.collapse is None else f"has collapsed at {self.collapse}"
            lines.append(
                f"They lock at position {_or_dash(self.locking_onset)}; {begins}the last new 4-gram ends at "
                f"{_or_dash(self.last_new)}, the type-token ratio of the last {self.window} tokens {collapsed}."
            )
        return "\n".join(lines)


def locking(
    model: object = None,
    prompt: str | Sequence[int] | None = None,
    *,
    ids: Sequence[int] | None = None,
    max_new_tokens: int = 512,
    layers: Sequence[int] | None = None,
    period: int | None = None,
    suffix: int = SUFFIX,
    window: int = WINDOW,
    interventions: Intervention | None = None,
    patch: SinkPatch | str | PathLike[str] | None = None,
    control: bool | Sequence[int] = True,
    tokenizer: Any = None,
    bos: bool | None = None,
    text: str | Path | None = None,
    seed: int = 0,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Locking:
    """Rank heads by how much of their attention a loop locks onto its own repetition.

    At every position the attention on the suffix is laid out by offset (how far back) and compared with the row one
    period earlier: the score is the share that lies on the same offsets, which is mass on the suffix times stability.
    A head that always looks one token back scores high in any text, so heads are ranked by what the loop adds.

    Args:
        model: None (the bundled model), short name, hub id, folder, `.gguf` file, or a live model of any kind.
        prompt: text or ids that are continued greedily; None: the beginning of the typical text.
        ids: a whole sequence instead of generating one.
        max_new_tokens: how many to generate.
        layers: which to measure; None: all.
        period: where it is known; None: that of the loop at the end.
        suffix: positions, raised to three periods if they are more.
        window: of the type-token ratio.
        interventions: cache policies, guards and others, while generating and measuring.
        patch: a `SinkPatch` or the path of a patch.json.
        control: ordinary text of the same length, which the scores are held against; or its ids; False: none.
        tokenizer: for live models that carry none.
        bos: begin sequences with BOS; None: where the tokenizer has one.
        text: file of ordinary text; None: the text that ships.
        seed: kept in the result; nothing is drawn.
        revision: of a hub id.
        dtype: of the weights of a model given by name.
        device: for models given by name; None: the first cuda device if there is one.
        trust_remote_code: run code that comes with the checkpoint.
        progress: called as `progress(what, done, total)`.

    No loop is an answer: `period` is None.

    Raises:
        UnsupportedError: attention that cannot be watched (Falcon).
        SinkscopeError: bad input; the message is one line and says what to do.
    """
    if prompt is not None and ids is not None:
        raise SinkscopeError("a prompt and ids are given: expected one of them")
    for name, value in (("period", period), ("suffix", suffix), ("window", window)):
        if value is not None and value < 1:
            raise SinkscopeError(f"{name} {value}: expected 1 or more")
    made = opened(
        model,
        tokenizer=tokenizer,
        bos=bos,
        text=text,
        seed=seed,
        revision=revision,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    wanted = chosen_layers(made, layers)
    edit = joined(loaded(patch), interventions)
    events: list[Event] = []

    def done(n: int) -> None:
        if progress is not None:
            progress("locking", n, 3)

    done(0)
    if ids is None:
        start = prompt_ids(made, prompt)
        check_room(made, len(start), max_new_tokens)
        _check_period(period, len(start) + max_new_tokens)
        new, events = decode(made.target, start, max_new_tokens, edit)
        whole = [*start, *new]
    else:
        whole = checked_ids(made, ids)
        start = whole[:1]
    _check_period(period, len(whole))
    loop = loop_of(whole, len(start))
    shift = period or loop.period or 1
    reach = max(suffix, 3 * shift)
    done(1)
    own = _tracks(made, whole, len(start), wanted, reach, shift, edit)
    done(2)
    ordinary = _control(made, control, len(whole))
    plain = None if ordinary is None else _tracks(made, ordinary, len(start), wanted, reach, shift, edit)
    done(3)
    first = len(start) if loop.onset is None else loop.onset
    heads = _heads(own, plain, first, shift)
    positions = tuple(range(0, len(whole) - 1, -(-len(whole) // POINTS)))
    some = [h for h in heads if h.locked] if loop.period or period else []
    mean = _mean(own, [(h.layer, h.head) for h in some], shift)
    rest = _mean(own, [(h.layer, h.head) for h in heads if h not in some], shift)
    calm = None if plain is None else _mean(plain, [(h.layer, h.head) for h in some], shift)
    point = collapse_point(whole[len(start) :], window)
    ratio: list[float | None] = [*([None] * len(start)), *diversity(whole[len(start) :], window)]
    return Locking(
        model=made.info(),
        settings={
            "prompt": prompt if prompt is None or isinstance(prompt, str) else list(prompt),
            "ids": None if ids is None else list(ids),
            "max_new_tokens": max_new_tokens,
            "layers": layers,
            "period": period,
            "suffix": suffix,
            "window": window,
            "interventions": None if edit is None else repr(edit),
            "control": control if isinstance(control, bool) else list(control),
            "bos": made.bos is not None,
            "text": None if text is None else Path(text).name,
            "seed": seed,
            "revision": revision,
        },
        provenance=made.provenance(),
        tokens=len(whole),
        prompt_tokens=len(start),
        period=period or loop.period,
        loop_onset=loop.onset if loop.period is not None and shift % loop.period == 0 else None,
        suffix=reach,
        heads=heads,
        window=window,
        positions=positions,
        locking_onset=None if mean is None else _onset(mean, 0.0 if calm is None else float(calm[first:].mean())),
        last_new=_last_new(whole, window),
        collapse=None if point is None else len(start) + point - 1,
        locked_curve=_at(mean, positions),
        other_curve=_at(rest, positions),
        healthy_curve=_at(calm, positions),
        diversity=tuple(ratio[p] for p in positions),
        marks=marks(events),
    )


def _tracks(
    made: Setup, ids: list[int], prompt: int, layers: list[int], suffix: int, shift: int, edit: Intervention | None
) -> dict[int, Track]:
    """In one pass, or token by token where interventions make a difference between the two."""
    watch = Overlaps(layers, suffix, shift)
    if edit is None:
        with watch.observe().on(made.target):
            made.target.forward(torch.tensor([ids[:-1]]))
    else:
        decode(made.target, ids[:prompt], len(ids) - prompt, edit | watch.observe(), ids[prompt:])
    return watch.tracks()


def _check_period(period: int | None, tokens: int) -> None:
    if period is not None and 2 * period > tokens:
        raise SinkscopeError(
            f"period {period}: expected at most {tokens // 2}, half of the {tokens} tokens; give a smaller one, or "
            "more tokens"
        )


def _control(made: Setup, control: bool | Sequence[int], length: int) -> list[int] | None:
    if isinstance(control, bool):
        found = healthy_ids(made, length) if control else None
        return None if found is None else found.tolist()
    given = checked_ids(made, control)
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
    seen: dict[tuple[int, ...], int] = {}
    last = None
    for end in range(n - 1, len(ids)):
        gram = tuple(ids[end - n + 1 : end + 1])
        if end - seen.get(gram, -len(ids) - window) > window - n:
            last = end
        seen[gram] = end
    return last


def _at(curve: Tensor | None, positions: tuple[int, ...]) -> tuple[float, ...]:
    return () if curve is None else tuple(curve[list(positions)].tolist())


def _over(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
