"""Attention over generation steps, and the heads that lock onto a loop (Xu et al. 2026, section 3.2, appendix E)."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import plotly.graph_objects as go
import torch
from einops import rearrange, reduce, repeat
from jaxtyping import Bool, Float
from plotly.subplots import make_subplots
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.attention.texts import Loop, ordinary_ids, prompt_ids
from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Event
from sinkscope.interventions.decode import decode, watched
from sinkscope.kv.session import AttentionRows, Observe
from sinkscope.lines.deterministic_scatter import add_at
from sinkscope.loops.signals import WindowNovelty
from sinkscope.measure import Number, Option, Positive, Result, Setup, measurement
from sinkscope.measure.style import BLUE, GREEN, GREY, ORANGE, finished
from sinkscope.models.inputs import read_row
from sinkscope.trace.attention import NAME, attention_name

SUFFIX = 256  # positions, or three periods if longer: the window that LoopGuard monitors
LOCK_GAIN = 0.2  # gain from which a head counts as locked
SHOWN_HEADS = 4  # heads drawn if none are named, each from a different layer
PICTURE_STEPS, PICTURE_COLUMNS = 64, 160  # largest size of the picture of all steps
CURVE_POINTS = 512  # most points of a curve along the text
NGRAM = 4  # tokens of the n-grams by which a text stops being new
_QUERIES = 32  # rows that are taken at a time
Head = tuple[int, int]
"""(layer, query head)."""


@dataclass(frozen=True)
class PictureSize:
    """How the attention of `length` positions, of which the first `prompt` are the prompt, becomes a picture.

    Row `step` is the attention by which generated token `step` was chosen, so row 0 is the prompt's last token.
    """

    length: int
    prompt: int

    @property
    def steps(self) -> int:
        """Number of generated tokens."""
        return self.length - self.prompt

    @property
    def steps_of_row(self) -> int:
        """Steps whose mean is one row of the picture."""
        return -(-self.steps // PICTURE_STEPS)

    @property
    def positions_of_column(self) -> int:
        """Positions whose sum is one column of the picture."""
        return -(-self.length // PICTURE_COLUMNS)

    @property
    def rows(self) -> int:
        """Rows of the picture."""
        return -(-self.steps // self.steps_of_row)

    @property
    def columns(self) -> int:
        """Columns of the picture."""
        return -(-self.length // self.positions_of_column)


class HeadTracks:
    """Accepts the attention rows of one layer over a sequence, in order; they may arrive in any number of calls.

    The suffix of a query are the last `suffix` positions up to its own, without the first position of the text, where
    sinks are. Memory: a picture and three numbers per position for each head, and `shift` rows of `suffix` offsets.
    """

    def __init__(self, heads: int, size: PictureSize, suffix: int, shift: int) -> None:
        self.size, self.suffix, self.shift = size, suffix, shift
        self.before = torch.zeros(heads, shift, suffix)  # the last rows by offset; missing ones share nothing
        self.parts: list[Float[Tensor, "3 head query"]] = []
        self.picture = torch.zeros(heads, size.rows, size.columns)

    def add(self, rows: AttentionRows) -> None:
        """Take some rows."""
        probs = rows.probs[0]
        group = probs.shape[0] // rows.pos.shape[1]
        pos = repeat(rows.pos[0], "kv_head slot -> (kv_head group) slot", group=group)
        for start in range(0, probs.shape[1], _QUERIES):
            part = slice(start, start + _QUERIES)
            query_pos = rows.query_pos[0, part]
            self._add_offsets(probs[:, part], pos, query_pos)
            self._add_picture(probs[:, part], pos, query_pos)

    def _add_offsets(self, probs: Tensor, pos: Tensor, query_pos: Tensor) -> None:
        """Mass on the suffix, share on the same offsets as `shift` rows before, and width."""
        back = query_pos[:, None] - pos[:, None]  # head query slot
        inside = (pos[:, None] > 0) & (back >= 0) & (back < self.suffix)
        offsets = probs.new_zeros(*probs.shape[:2], self.suffix)
        offsets.scatter_add_(2, back.clamp(0, self.suffix - 1), probs * inside)
        earlier = torch.cat([self.before.to(offsets), offsets], 1)
        mass = offsets.sum(-1)
        shares = offsets / mass[..., None].clamp_min(1e-12)
        width = torch.special.entr(shares).sum(-1).exp()
        score = torch.minimum(offsets, earlier[:, : -self.shift]).sum(-1)
        self.before = earlier[:, -self.shift :].clone()
        self.parts.append(torch.stack([score, mass, width]).cpu())

    def _add_picture(self, probs: Tensor, pos: Tensor, query_pos: Tensor) -> None:
        size = self.size
        step = (query_pos - (size.prompt - 1)).cpu()
        generated = (step >= 0) & (step < size.steps)
        if not bool(generated.any()):
            return
        step = step[generated]
        probs = probs[:, generated.to(probs.device)] * (pos >= 0)[:, None]
        heads, queries = probs.shape[:2]
        places = repeat(pos.clamp(min=0), "head slot -> (head query) slot", query=queries)
        flat = rearrange(probs, "head query slot -> (head query) slot")
        columns = add_at(flat.new_zeros(len(flat), size.columns), places // size.positions_of_column, flat, 1.5)
        by_head = rearrange(columns, "(head query) column -> head query column", head=heads).cpu()
        for number, row in enumerate((step // size.steps_of_row).tolist()):
            self.picture[:, row] += by_head[:, number]

    def tracks(self) -> Float[Tensor, "3 head pos"]:
        """Score, mass and width at every position that was seen."""
        return torch.cat(self.parts, 2)

    def mean_picture(self) -> Float[Tensor, "head row column"]:
        """The mean over the steps of each row."""
        steps = torch.full((self.size.rows,), float(self.size.steps_of_row))
        steps[-1] = self.size.steps - (self.size.rows - 1) * self.size.steps_of_row
        return self.picture / steps[:, None]


@dataclass(frozen=True, kw_only=True)
class Barcode(Result):
    """Attention over generation steps, and which heads lock onto the loop that the text ends in.

    Numbers of heads are means over the second half of the loop, or of the generated text where it does not loop.

    Attributes:
        prompt_tokens: Length of the prompt.
        steps: Number of generated tokens.
        period: Period of the loop in tokens. None if the text does not loop; scores then compare neighbouring rows.
        onset: Position of the loop's first token. None if the text does not loop.
        suffix: Length of the suffix in positions.
        layers: The layers that were measured.
        score: Share of attention on the same offsets of the suffix as one period earlier.
        mass: Share of attention on the suffix.
        width: Effective number of suffix positions that the attention is spread over (exponential of its entropy).
        control_score: `score` at the same positions of ordinary text; None without a control.
        locking_onset: Position from which the mean score of the locked heads stays above half way; None if none locks.
        last_new: Position of the last token that ended a 4-gram not seen in the 256 tokens before; later ones repeat.
        positions: Positions at which the curves are sampled.
        locked_curve: Mean score of the locked heads at `positions`; None if no head locks.
        other_curve: Mean score of all other heads.
        control_curve: Mean score of the locked heads in ordinary text.
        shown: Names of the heads that are drawn.
        attention: Share of their attention on each bin of positions, mean over each bin of steps.
        control_attention: The same in ordinary text.
        events: Steps at which interventions acted, by kind.
    """

    kind: ClassVar[str] = "barcode"
    percent: ClassVar[tuple[str, ...]] = ("score", "control_score", "gain", "mass")
    columns: ClassVar[tuple[str, ...]] = ("head", "score", "control_score", "gain", "mass", "width")
    table_rows: ClassVar[int] = 16
    glossary: ClassVar[dict[str, str]] = {"gain": "Score minus control score; a head with at least 20 % is locked."}

    prompt_tokens: int
    steps: int
    period: int | None
    onset: int | None
    suffix: int
    layers: tuple[int, ...]
    score: Float[np.ndarray, "layer head"]
    mass: Float[np.ndarray, "layer head"]
    width: Float[np.ndarray, "layer head"]
    control_score: Float[np.ndarray, "layer head"] | None = None
    locking_onset: int | None
    last_new: int | None
    positions: tuple[int, ...]
    locked_curve: Float[np.ndarray, " point"] | None
    other_curve: Float[np.ndarray, " point"] | None
    control_curve: Float[np.ndarray, " point"] | None = None
    shown: tuple[str, ...]
    attention: Float[np.ndarray, "shown row bin"]
    control_attention: Float[np.ndarray, "shown row bin"] | None = None
    events: dict[str, tuple[int, ...]]

    @property
    def gain(self) -> Float[np.ndarray, "layer head"]:
        """Score minus the control's; heads are ranked by it."""
        if self.control_score is None:
            return self.score
        return self.score - self.control_score

    @property
    def locked(self) -> list[Head]:
        """The locked heads, largest gain first; none where the text is in no loop."""
        if self.onset is None:
            return []
        return [(self.layers[row], head) for row, head in self._ranked() if self.gain[row, head] >= LOCK_GAIN]

    def rows(self) -> list[dict[str, Any]]:
        """One row per head, largest gain first."""
        rows: list[dict[str, Any]] = []
        columns = {"score": self.score, "control_score": self.control_score, "gain": self.gain}
        columns |= {"mass": self.mass, "width": self.width}
        for row, head in self._ranked():
            numbers = {name: float(values[row, head]) for name, values in columns.items() if values is not None}
            rows.append({"layer": self.layers[row], "head": head, **numbers})
        return rows

    def _ranked(self) -> list[tuple[int, int]]:
        """Places of all heads in the arrays, largest gain first."""
        order = np.argsort(-self.gain, axis=None, kind="stable")
        return [divmod(int(place), self.gain.shape[1]) for place in order]

    def conclusion(self) -> str:
        """How many heads lock onto the loop, and the strongest beside ordinary text."""
        if self.period is None:
            return f"The {self.steps} generated tokens end in no loop, so no head can lock onto one."
        best = self.rows()[0]
        control = "no control was run"
        if "control_score" in best:
            control = f"in ordinary text {best['control_score']:.0%}"
        return (
            f"{len(self.locked)} of {self.score.size} heads lock onto the loop of period {self.period}; "
            f"L{best['layer']}.H{best['head']} puts {best['score']:.0%} of its attention where it was one period "
            f"before ({control})."
        )

    def details(self) -> list[str]:
        """Where the loop begins, which heads lock and when, and what interventions did."""
        length = self.prompt_tokens + self.steps
        lines = [f"{self.prompt_tokens} prompt tokens and {self.steps} generated tokens; {self.score.size} heads."]
        if self.onset is not None:
            lines.append(f"The loop begins at position {self.onset} of {length}.")
        if self.locked:
            names = ", ".join(f"L{layer}.H{head}" for layer, head in self.locked[:8])
            more = ""
            if len(self.locked) > 8:
                more = ", ..."
            lines.append(f"Locked heads, at least {LOCK_GAIN:.0%} above ordinary text: {names}{more}.")
            lines.append(f"They lock at position {self.locking_onset}; the last new 4-gram ends at {self.last_new}.")
        for kind, steps in self.events.items():
            first = ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")
            lines.append(f"{kind}: at {len(steps)} steps ({first}).")
        return lines[:6]

    def numbers(self) -> list[Number]:
        """The share of locked heads, and the score of the strongest head beside ordinary text."""
        if self.onset is None:
            return [Number("heads that lock onto the loop", None)]
        best = self.rows()[0]
        share = Number("heads that lock onto the loop", len(self.locked) / self.score.size)
        return [share, Number("attention of the strongest head", best["score"], best.get("control_score"))]


def draw(result: Barcode) -> go.Figure:
    """Draw what the loop adds to every head, scores along the text, and below the attention of heads step by step.

    Each row below is a head: all steps, ordinary text, and the last steps position by position of both. Steps run
    downwards, and darker is more.
    """
    pictures = {"generated": result.attention}
    if result.control_attention is not None:
        pictures["ordinary text"] = result.control_attention
    rows = 1 + len(result.shown)
    titles = ["what the loop adds (score above ordinary text)", "score along the text"]
    for head in result.shown:
        titles += [f"{html.escape(head)}: {title}" for title in pictures] + [""] * (2 - len(pictures))
    fig: Any = make_subplots(rows, 2, subplot_titles=titles, horizontal_spacing=0.05, vertical_spacing=0.24 / rows)
    fig.add_heatmap(
        z=result.gain, y=result.layers, zmin=-1, zmax=1, zmid=0, colorscale="RdBu", showscale=False, row=1, col=1
    )
    fig.update_yaxes(title_text="layer (heads to the right)", autorange="reversed", row=1, col=1)
    curves = (
        ("locked heads", result.locked_curve, BLUE),
        ("other heads", result.other_curve, GREEN),
        ("locked heads, ordinary text", result.control_curve, GREY),
    )
    for name, values, color in curves:
        if values is not None:
            fig.add_scatter(x=result.positions, y=values, name=name, line_color=color, row=1, col=2)
    marks = (
        ("loop begins", result.onset, "dash"),
        ("last new 4-gram", result.last_new, "dot"),
        ("heads lock", result.locking_onset, "solid"),
    )
    for name, position, dash in marks:  # they may be close together, so their names stand in the legend
        if position is not None:
            line = {"color": ORANGE, "dash": dash, "width": 1.5}
            x = [position, position]
            fig.add_scatter(x=x, y=[0, 1], name=f"{name}: {position}", mode="lines", line=line, row=1, col=2)
    size = PictureSize(result.prompt_tokens + result.steps, result.prompt_tokens)
    top = max(0.05, float(np.quantile(result.attention, 0.99)))
    for number in range(len(result.shown)):
        for col, values in enumerate(pictures.values(), 1):
            fig.add_heatmap(
                z=np.sqrt(values[number]),
                customdata=values[number],
                dx=size.positions_of_column,
                dy=size.steps_of_row,
                zmin=0,
                zmax=top**0.5,
                colorscale="Greys",
                showscale=False,
                hovertemplate="step %{y}, position %{x}: %{customdata:.3f}<extra></extra>",
                row=number + 2,
                col=col,
            )
            fig.update_yaxes(autorange="reversed", row=number + 2, col=col)
        fig.update_yaxes(title_text="step", row=number + 2, col=1)
        for steps in result.events.values():
            if len(steps) > 40:  # so many would hide the picture
                continue
            for step in steps:
                fig.add_hline(step, line={"color": ORANGE, "width": 1}, row=number + 2, col=1)
    fig.update_xaxes(title_text="position", row=rows)
    return finished(fig, result, width=1100, height=260 * rows + 120, legend=-0.04, bottom=70)


@measurement(group="Loops", figure=draw, loading="whole", edits=True, quick={"max_new_tokens": 24, "layers": [0]})
def barcode(
    setup: Setup,
    prompt: Annotated[str | Sequence[int] | None, Option("--prompt-file", metavar="FILE|-", reads="text")] = None,
    *,
    ids: Annotated[Sequence[int] | None, Option(hidden=True)] = None,
    max_new_tokens: Positive = 512,
    layers: Annotated[Sequence[int] | None, Option(min=0)] = None,
    heads: Annotated[Sequence[tuple[int, int]] | None, Option(metavar="L0.H4", reads="head")] = None,
    control: bool | Sequence[int] = True,
) -> Barcode:
    """Draw attention step by step while a model falls into a loop, and find the heads that lock onto it.

    At every position, the attention on the suffix is indexed by offset (distance back) and compared with the row one
    period earlier. The score is the share on the same offsets. A head that always looks one token back scores high in
    any text, so heads are ranked by the increase over ordinary text (Xu et al. 2026, sections 1 and 3.2; pictures as in
    appendix E, Fig. 5). A model whose attention cannot be observed (Falcon) raises an `UnsupportedError`.

    Args:
        prompt: Text to continue greedily until it loops; from Python also ids. By default the beginning of the typical
            text.
        ids: A complete sequence to measure instead of generating one.
        max_new_tokens: Tokens to generate.
        layers: Measure this layer. By default all layers.
        heads: Draw this head, and measure only its layer. By default up to four heads that the loop changes most.
        control: Compare with ordinary text of the same length; from Python also the ids of such a text.

    Example:
        sinkscope barcode --html barcode.html
    """
    wanted, named = _chosen(setup, layers, heads)
    loop, events = _sequence(setup, prompt, ids, max_new_tokens)
    size = PictureSize(len(loop.ids), loop.prompt)
    shift = loop.period or 1
    suffix = max(SUFFIX, 3 * shift)
    begin = loop.prompt
    if loop.onset is not None:
        begin = loop.onset
    late = (begin + size.length - 1) // 2  # numbers of heads are means from here on
    setup.progress("texts", 0, 2)
    own = _recorded(setup, loop.ids, size, wanted, suffix, shift)
    setup.progress("texts", 1, 2)
    score, mass, width = own.means(late)
    gain = score
    plain = None
    control_score = None
    ordinary = _control(setup, control, size.length)
    if ordinary is not None:
        plain = _recorded(setup, ordinary, size, wanted, suffix, shift)
        control_score = plain.means(late)[0]
        gain = score - control_score
    setup.progress("texts", 2, 2)
    locked = gain >= LOCK_GAIN
    if loop.period is None:
        locked = torch.zeros_like(locked)
    named = named or _most_changed(gain, wanted)
    places = [(wanted.index(layer), head) for layer, head in named]
    positions = tuple(range(0, size.length - 1, -(-size.length // CURVE_POINTS)))
    locked_curve = own.curve(locked, shift)
    low = 0.0
    controls: dict[str, Any] = {}
    if plain is not None and control_score is not None:
        control_curve = plain.curve(locked, shift)
        if control_curve is not None:
            low = float(control_curve[begin:].mean())
        controls = {
            "control_score": control_score.numpy(),
            "control_curve": _sampled(control_curve, positions),
            "control_attention": _shown(plain.picture, places),
        }
    return Barcode(
        prompt_tokens=loop.prompt,
        steps=size.steps,
        period=loop.period,
        onset=loop.onset,
        suffix=suffix,
        layers=tuple(wanted),
        score=score.numpy(),
        mass=mass.numpy(),
        width=width.numpy(),
        locking_onset=onset_of(locked_curve, low),
        last_new=_last_new(loop.ids),
        positions=positions,
        locked_curve=_sampled(locked_curve, positions),
        other_curve=_sampled(own.curve(~locked, shift), positions),
        shown=tuple(f"L{layer}.H{head}" for layer, head in named),
        attention=_shown(own.picture, places),
        events=_steps_by_kind(events),
        **controls,
    )


def _chosen(setup: Setup, layers: Sequence[int] | None, heads: Sequence[Head] | None) -> tuple[list[int], list[Head]]:
    """The layers to measure, and the heads to draw, none if they are to be picked."""
    if heads is None:
        return setup.target.chosen_layers(layers), []
    if layers is not None:
        raise SinkscopeError("layers and heads are given: expected one of them")
    named = list(dict.fromkeys((int(layer), int(head)) for layer, head in heads))
    for layer, head in named:
        setup.target.check_site(layer, head=head)
    return sorted({layer for layer, _ in named}), named


def _sequence(
    setup: Setup,
    prompt: str | Sequence[int] | None,
    ids: Sequence[int] | None,
    new: int,
) -> tuple[Loop, list[Event]]:
    """The text with its loop, and what interventions did while it was generated."""
    if ids is not None and prompt is not None:
        raise SinkscopeError("a prompt and ids are given: expected one of them")
    if ids is not None:
        given = read_row(setup.target, ids)
        return Loop.of(given, 1), []
    start = prompt_ids(setup, prompt)
    setup.target.check_length("the prompt", len(start), new)
    answer, events = decode(setup.target, start, new, setup.edit)
    return Loop.of([*start, *answer], len(start)), events


@dataclass(frozen=True, eq=False)
class _Recording:
    """What heads attended to in one text: score, mass and width at every position, and pictures."""

    tracks: Float[Tensor, "layer 3 head pos"]
    picture: Float[Tensor, "layer head row column"]

    def means(self, late: int) -> Float[Tensor, "3 layer head"]:
        """Mean score, mass and width from a position on."""
        return reduce(self.tracks[..., late:], "layer kind head pos -> kind layer head", "mean")

    def curve(self, heads: Bool[Tensor, "layer head"], shift: int) -> Float[Tensor, " pos"] | None:
        """The mean score of some heads along the text; None if there are none."""
        if not bool(heads.any()):
            return None
        return smooth(self.tracks[:, 0][heads].mean(0), shift)


def _recorded(
    setup: Setup, ids: list[int], size: PictureSize, layers: list[int], suffix: int, shift: int
) -> _Recording:
    """Read a text in one pass, or token by token where interventions act between passes."""
    tracks = {layer: HeadTracks(setup.n_heads, size, suffix, shift) for layer in layers}
    observer = Observe(lambda rows: tracks[rows.layer].add(rows), layers)
    surrounded = attention_name(setup.target.config) == NAME  # by interventions that the caller entered
    if setup.edit is None and not surrounded:
        with observer.on(setup.target):
            setup.target.forward(torch.tensor([ids[:-1]]))
    else:
        edit = watched(setup.edit, observer)
        decode(setup.target, ids[: size.prompt], size.steps, edit, ids[size.prompt :])
    return _Recording(
        tracks=torch.stack([track.tracks() for track in tracks.values()]),
        picture=torch.stack([track.mean_picture() for track in tracks.values()]),
    )


def _control(setup: Setup, control: bool | Sequence[int], length: int) -> list[int] | None:
    if control is False:
        return None
    if control is True:
        return ordinary_ids(setup, length)
    ids = read_row(setup.target, control)
    if len(ids) < length:
        raise SinkscopeError(f"a control of {len(ids)} ids: expected {length}, as many as the sequence has")
    return ids[:length]


def _most_changed(gain: Float[Tensor, "layer head"], layers: list[int]) -> list[Head]:
    """In each layer the head that the loop changes most, and among those the heads that it changes most."""
    best, head = gain.max(1)
    order = torch.argsort(best, descending=True, stable=True)[:SHOWN_HEADS].tolist()
    return [(layers[row], int(head[row])) for row in order]


def _shown(
    pictures: Float[Tensor, "layer head row column"], places: list[Head]
) -> Float[np.ndarray, "shown row column"]:
    """The pictures of some heads, in thousandths."""
    chosen = torch.stack([pictures[row, head] for row, head in places])
    return np.round(chosen.double().numpy(), 3)


def smooth(values: Float[Tensor, " pos"], shift: int) -> Float[Tensor, " pos"]:
    """Mean over the last period (at least 8 positions) at every position."""
    width = max(8, shift)
    total = pad(values.cumsum(0), (width, 0))
    counts = torch.arange(1, len(values) + 1).clamp(max=width)
    return (total[width:] - total[:-width]) / counts


def onset_of(curve: Float[Tensor, " pos"] | None, low: float) -> int | None:
    """First position from which the curve stays above half way between `low` and the mean of its last quarter."""
    if curve is None:
        return None
    half = (low + float(curve[-max(1, len(curve) // 4) :].mean())) / 2
    below = (curve < half).nonzero()
    if not len(below):
        return 0
    first = int(below[-1]) + 1
    if first == len(curve):
        return None
    return first


def _last_new(ids: list[int]) -> int | None:
    """Position of the last token whose 4-gram does not lie in the `SUFFIX` tokens up to it once more, earlier."""
    novelty = WindowNovelty(SUFFIX, NGRAM, 1)
    last = None
    for position, token in enumerate(ids):
        is_new = bool(novelty.add(token, position))
        if is_new and position >= NGRAM - 1:
            last = position
    return last


def _sampled(curve: Tensor | None, positions: tuple[int, ...]) -> Float[np.ndarray, " point"] | None:
    if curve is None:
        return None
    return curve[list(positions)].double().numpy()


def _steps_by_kind(events: list[Event]) -> dict[str, tuple[int, ...]]:
    """The steps at which interventions acted, by the kind of the event."""
    steps: dict[str, set[int]] = {}
    for event in events:
        steps.setdefault(event.kind, set()).add(event.step)
    return {kind: tuple(sorted(own)) for kind, own in sorted(steps.items())}
