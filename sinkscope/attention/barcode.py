"""Barcodes: attention of heads over generation steps, step x position (Xu et al. 2026, appendix E, Fig. 5)."""

from __future__ import annotations

import html
import io
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
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
from sinkscope.files.output import ARRAYS, write_output
from sinkscope.interventions.decode import decode, watched
from sinkscope.kv.session import AttentionRows, Observe
from sinkscope.lines.deterministic_scatter import add_at
from sinkscope.measure import Option, Output, Positive, Result, Setup, measurement

_SHADES = " ·░▒▓█"
_EVERY = 0.1  # seconds between two pictures
_FULL = 0.25  # share of attention that is the darkest shade


class Live:
    """Draws rows of attention as they arrive.

    `with Live("title") as live: live(step, row)`; each row is `[column]` and sums to one. On a terminal the picture is
    drawn on standard error and erased at the end; in a notebook it stays in the cell.
    """

    def __init__(self, title: str, enabled: bool = True) -> None:
        self.title = title
        self.place = _place() if enabled else None
        self.rows: list[Tensor] = []
        self._shown = 0.0
        self._screen: Any = None

    def __enter__(self) -> Live:
        if self.place == "terminal":
            from rich.console import Console
            from rich.live import Live as Screen

            self._screen = Screen(console=Console(stderr=True), transient=True, auto_refresh=False)
            self._screen.start()
        elif self.place == "notebook":
            from IPython.display import display

            self._screen = display({"text/plain": self.title}, raw=True, display_id=True)
        return self

    def __call__(self, step: int, row: Tensor) -> None:
        """One more row."""
        if self.place is None:
            return
        self.rows.append(row)
        if time.perf_counter() - self._shown >= _EVERY:
            self.draw()

    def draw(self) -> None:
        """The picture as it is now."""
        self._shown = time.perf_counter()
        if self.place == "terminal":
            from rich.text import Text

            size = shutil.get_terminal_size()
            shown = Text("\n".join(self.picture(size.columns - 1, size.lines - 2)), no_wrap=True)
            self._screen.update(shown, refresh=True)
        elif self.rows:
            body = "\n".join(self.picture(120, 40))
            cell = f'<pre style="line-height:1; font-size:9px">{html.escape(body)}</pre>'
            self._screen.update({"text/plain": body, "text/html": cell}, raw=True)

    def picture(self, width: int, height: int) -> list[str]:
        """Lines of at most `width` characters: a title, then the last steps, or groups of steps where they are many."""
        lines = max(1, height - 1)
        rows = torch.stack(self.rows).float() if self.rows else torch.zeros(0, 1)
        group = -(-len(rows) // lines) if len(rows) else 1
        shown = [f"{self.title}: step {len(self.rows)}, position 0 to {rows.shape[1] - 1}, down: steps"[:width]]
        for start in range(0, len(rows), group):
            mean = rows[start : start + group].mean(0)
            columns = torch.stack([part.sum() for part in mean.split(-(-len(mean) // width))])
            shade = ((columns / _FULL).clamp(0, 1).sqrt() * (len(_SHADES) - 1)).round().long()
            shown.append("".join(_SHADES[int(s)] for s in shade))
        return shown

    def __exit__(self, *_: object) -> None:
        if self.place == "terminal":
            self._screen.stop()
        elif self.place == "notebook" and self.rows:
            self.draw()


def _place() -> str | None:
    """Where a picture can be shown."""
    shell = sys.modules.get("IPython")
    if shell is not None and getattr(shell.get_ipython(), "kernel", None) is not None:
        return "notebook"
    return "terminal" if sys.stderr.isatty() else None


Head = tuple[int, int]
"""(layer, query head)."""
NEAR_STEPS, NEAR = 96, 192  # last steps and nearest positions that are always kept unbinned


class Recorder:
    """Keeps the attention row of the last query in every call, for a single sequence.

    Memory: `steps x heads x bins` numbers of two bytes (raw: `steps x heads x positions` of four), and a window of the
        last `NEAR_STEPS` steps.
    """

    def __init__(
        self,
        heads: list[Head],
        steps: int,
        positions: int,
        bins: int | None,
        on_step: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        """Allocate the memory.

        Args:
            heads: Heads to keep, by layer.
            steps: Maximum number of rows.
            positions: Total length of prompt and new tokens.
            bins: Number of columns; adjacent positions are summed. None keeps one column per position.
            on_step: Called with the step and the mean row over the kept heads, `[column]`.
        """
        self.heads, self.steps, self.positions, self.on_step = heads, steps, positions, on_step
        self.columns = positions if bins is None else min(bins, positions)
        self.dtype = torch.float32 if bins is None else torch.float16
        self.layers: dict[int, list[int]] = {}
        for layer, head in heads:
            self.layers.setdefault(layer, []).append(head)
        self.wide: dict[int, Tensor] = {}  # by layer: step head column
        self.near: dict[int, Tensor] = {}  # by layer: step (modulo NEAR_STEPS) head offset
        self.done = 0  # steps that are complete
        self._row: Tensor | None = None

    def observe(self) -> Observe:
        """The observer to enter as a context manager."""
        return Observe(self.see, list(self.layers), last=1)

    def see(self, rows: AttentionRows) -> None:
        """Keep the last query's row of the heads of one layer."""
        here, at = self.layers[rows.layer], rows.call.past + rows.call.index.shape[1] - 1
        if rows.layer not in self.wide:
            device = rows.probs.device
            self.wide[rows.layer] = torch.zeros(self.steps, len(here), self.columns, dtype=self.dtype, device=device)
            self.near[rows.layer] = torch.zeros(NEAR_STEPS, len(here), NEAR, device=device)
        step = rows.call.step
        if step >= self.steps:
            return
        groups = rows.probs.shape[1] // rows.pos.shape[1]
        pos = rows.pos[0].repeat_interleave(groups, 0)[here]
        probs = rows.probs[0, here, -1] * (pos >= 0)
        column = (pos.clamp(min=0) * self.columns) // self.positions
        wide = add_at(probs.new_zeros(len(here), self.columns), column, probs, 1.5)  # a row sums to one up to rounding
        self.wide[rows.layer][step] = wide.to(self.dtype)
        back = at - pos
        near = probs.new_zeros(len(here), NEAR)
        near.scatter_add_(1, back.clamp(0, NEAR - 1), probs * (back < NEAR))
        self.near[rows.layer][step % NEAR_STEPS] = near
        self._told(rows.layer, step, wide)

    def _told(self, layer: int, step: int, wide: Tensor) -> None:
        last = layer == max(self.layers)
        if last:
            self.done = step + 1
        if self.on_step is None:
            return
        total = wide.sum(0).cpu()
        self._row = total if self._row is None else self._row + total
        if last:
            self.on_step(step, self._row / len(self.heads))
            self._row = None

    def array(self, head: Head) -> Float[Tensor, "step column"]:
        """All steps of one head."""
        layer, number = head
        return self.wide[layer][: self.done, self.layers[layer].index(number)].cpu()

    def recent(self, head: Head) -> Float[Tensor, "step offset"]:
        """The last steps of one head, in order, indexed by how far a position lies behind the query."""
        layer, number = head
        first = max(0, self.done - NEAR_STEPS)
        order = [step % NEAR_STEPS for step in range(first, self.done)]
        return self.near[layer][order, self.layers[layer].index(number)].cpu()

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        kept: list[Any] = [*self.wide.values(), *self.near.values()]
        return sum(t.numel() * t.element_size() for t in kept)


RAW_HEADS = 4  # most heads that can be kept position by position
SHOWN = 4  # heads drawn if none are named, each from a different layer
STEPS, COLUMNS = 96, 192  # largest size of a picture


@dataclass(frozen=True)
class Picture:
    """Attention of one head, averaged over adjacent steps and summed over adjacent positions.

    Attributes:
        shares: One string per line of steps: thousandths of the attention, one number per column, separated by spaces.
        first_step: Step of the first line; each line covers `steps` steps.
        steps: Generation steps per line.
        first_position: Position of the first column; each column covers `positions` positions.
        positions: Positions per column.
    """

    shares: tuple[str, ...]
    first_step: int
    steps: int
    first_position: int
    positions: float

    def values(self) -> list[list[float]]:
        """The shares as numbers, line by line."""
        return [[int(word) / 1000 for word in line.split()] for line in self.shares]


@dataclass(frozen=True)
class HeadBarcode(QueryHead):
    """One head of the barcode.

    Attributes:
        first: Mean share of attention on the first position (where sinks are), over the last steps.
        near: Mean share on the last `NEAR` positions.
        overlap: Share that two rows one period apart put on the same offsets of these positions; None without a loop.
        healthy_overlap: The same in the control.
        whole: All steps and positions; None if the head is not shown.
        late: The last steps and positions, one by one.
        healthy_whole: `whole` of the control.
        healthy_late: `late` of the control.
    """

    first: float
    near: float
    overlap: float | None
    healthy_overlap: float | None
    whole: Picture | None = None
    late: Picture | None = None
    healthy_whole: Picture | None = None
    healthy_late: Picture | None = None


@dataclass(frozen=True, kw_only=True)
class Barcode(Result):
    """Attention over generation steps.

    `arrays` holds every step of every requested head. It is available only on the result that `barcode` returned; files
    hold only the pictures.

    Attributes:
        prompt_tokens: Length of the prompt.
        steps: Number of generated tokens.
        bins: Columns of `arrays`; for raw attention, one column per position.
        period: Period in tokens of the loop that the text ends in. None if it does not loop.
        onset: Position of the loop's first token.
        ended: Whether the sequence ended before `max_new_tokens`.
        heads: The requested heads; the heads that are shown come first.
        marks: What interventions did.
        nbytes: Size of the arrays in bytes.
    """

    kind: ClassVar[str] = "barcode"

    prompt_tokens: int
    steps: int
    bins: int
    period: int | None
    onset: int | None
    ended: bool
    heads: tuple[HeadBarcode, ...]
    marks: tuple[Mark, ...]
    nbytes: int

    @property
    def arrays(self) -> dict[Head, Float[Tensor, "step column"]]:
        """Every step of each head by (layer, head); empty on a result read from a file."""
        return self.__dict__.get("_arrays", {})

    def rows(self) -> list[dict[str, Any]]:
        """One row per head, at most 16."""
        names = ("layer", "head", "first", "near", "overlap", "healthy_overlap")
        return [{name: getattr(h, name) for name in names} for h in self.heads[:16]]

    def conclusion(self) -> str:
        """How the text ends, and which head repeats its attention most, compared with ordinary text."""
        if self.period is None:
            near = max(self.heads, key=lambda h: h.near)
            return (
                f"The {self.steps} generated tokens end in no loop; {near} looks nearest, with "
                f"{near.near:.0%} of its attention on the last {NEAR} positions."
            )
        found = max(self.heads, key=_gain)
        told = f"The {self.steps} generated tokens end in a loop of period {self.period} from position {self.onset}"
        if found.overlap is None:
            return f"{told}, too short to compare one period with the next."
        plain = found.healthy_overlap
        beside = "no control was run" if plain is None else f"in ordinary text {plain:.0%}"
        return (
            f"{told}: {found} repeats most, with {found.overlap:.0%} of its attention on the same "
            f"offsets as one period before ({beside})."
        )

    def details(self) -> list[str]:
        """What was recorded, and what interventions did."""
        lines = [
            f"{self.prompt_tokens} prompt tokens; {_heads(len(self.heads))}, {self.bins} columns, "
            f"{self.nbytes / 2**20:.1f} MiB of attention."
        ]
        for kind in dict.fromkeys(mark.kind for mark in self.marks):
            steps = [mark.step for mark in self.marks if mark.kind == kind]
            shown = ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")
            lines.append(f"{kind}: at {len(steps)} steps ({shown}).")
        return lines

    def save_arrays(self, path: str | PathLike[str]) -> Path:
        """Write `arrays` as a compressed .npz, with names such as "5.3" (layer, head).

        Raises:
            SinkscopeError: The result was read from a file and has no arrays, or the file cannot be written.
        """
        if not self.arrays:
            raise SinkscopeError("this result was read from a file, which holds pictures only: record it again")
        packed = io.BytesIO()
        np.savez_compressed(packed, **{f"{la}.{h}": a.numpy() for (la, h), a in self.arrays.items()})  # pyright: ignore[reportArgumentType]
        return write_output(path, packed.getvalue())


@measurement(
    group="Loops",
    figure="sinkscope.figures.attention:draw_barcode",
    loading="whole",
    edits=True,
    quick={"max_new_tokens": 24, "layers": [0]},
    outputs=[Output("npz", "Write every step of every head.", Barcode.save_arrays, kind=ARRAYS)],
)
def barcode(
    setup: Setup,
    prompt: Annotated[str | Sequence[int] | None, Option("--prompt-file", metavar="FILE|-", reads="text")] = None,
    *,
    layers: Annotated[Sequence[int] | None, Option(min=0)] = None,
    heads: Annotated[Sequence[tuple[int, int]] | None, Option(metavar="L0.H4", reads="head")] = None,
    max_new_tokens: Positive = 512,
    bins: Positive = 512,
    raw: bool = False,
    control: bool = True,
    live: bool = False,
) -> Barcode:
    """Generate greedily and record the attention of the last token, step by step.

    The result shows attention by step and position for a loop and for ordinary text (Xu et al. 2026, appendix E, Fig.
    5). A model whose attention cannot be observed (Falcon) raises an `UnsupportedError`.

    Args:
        prompt: Text to continue; from Python also ids. By default the beginning of the typical text.
        layers: All heads of this layer. By default all layers.
        heads: Only this head. Up to four named heads are shown in the given order.
        max_new_tokens: Generation steps.
        bins: Number of columns into which positions are summed.
        raw: Keep one column per position instead, for up to four heads.
        control: Record ordinary text of the same length as well.
        live: Show the mean over the heads as it grows, on a terminal or in a notebook.

    Example:
        sinkscope barcode --live --html barcode.html
    """
    kept = _chosen(setup, layers, heads)
    if raw and len(kept) > RAW_HEADS:
        raise SinkscopeError(f"{len(kept)} heads one position at a time: expected up to {RAW_HEADS}; give --head")
    start = prompt_ids(setup, prompt)
    setup.target.check_length("the prompt", len(start), max_new_tokens)
    positions = len(start) + max_new_tokens
    with Live(f"{setup.target.name}, mean over {_heads(len(kept))}", live) as shown:

        def told(step: int, row: Tensor) -> None:
            shown(step, row)
            if not live:  # one of them draws
                setup.progress("steps", step + 1, max_new_tokens)

        own = Recorder(kept, max_new_tokens, positions, None if raw else bins, told)
        new, events = decode(setup.target, start, max_new_tokens, watched(setup.edit, own.observe()))
    loop = loop_of([*start, *new], len(start))
    ordinary = healthy_ids(setup, len(start) + len(new)) if control else None
    plain = None
    if ordinary is not None:
        ids = ordinary.tolist()
        plain = Recorder(kept, len(new), positions, COLUMNS)
        decode(setup.target, ids[: len(start)], len(new), watched(setup.edit, plain.observe()), ids[len(start) :])
    measured = [_head(own, plain, head, loop.period) for head in kept]
    named = set(kept[:SHOWN]) if heads is not None else _picked(measured)
    measured.sort(key=lambda h: (h.layer, h.head) not in named)
    length = len(start) + len(new)
    result = Barcode(
        prompt_tokens=len(start),
        steps=len(new),
        bins=own.columns,
        period=loop.period,
        onset=loop.onset,
        ended=len(new) < max_new_tokens,
        heads=tuple(_pictured(h, own, plain, length) if (h.layer, h.head) in named else h for h in measured),
        marks=marks(events),
        nbytes=own.nbytes,
    )
    object.__setattr__(result, "_arrays", {head: own.array(head) for head in kept})
    return result


def _heads(count: int) -> str:
    return "1 head" if count == 1 else f"{count} heads"


def _chosen(setup: Setup, layers: Sequence[int] | None, heads: Sequence[Head] | None) -> list[Head]:
    count = setup.target.n_heads
    if heads is None:
        return [(layer, head) for layer in setup.target.chosen_layers(layers) for head in range(count)]
    if layers is not None:
        raise SinkscopeError("layers and heads are given: expected one of them")
    wanted = list(dict.fromkeys((int(layer), int(head)) for layer, head in heads))
    for layer, head in wanted:
        setup.target.check_site(layer, head=head)
    return wanted


def _head(own: Recorder, plain: Recorder | None, head: Head, period: int | None) -> HeadBarcode:
    recent = own.recent(head)
    return HeadBarcode(
        *head,
        first=float(own.array(head)[-len(recent) :, 0].float().mean()),
        near=float(recent.sum(-1).mean()),
        overlap=_overlap(recent, period),
        healthy_overlap=None if plain is None else _overlap(plain.recent(head), period),
    )


def _overlap(rows: Float[Tensor, "step offset"], period: int | None) -> float | None:
    """Share of attention that rows a period apart put on the same offsets."""
    if period is None or len(rows) <= period:
        return None
    return float(torch.minimum(rows[period:], rows[:-period]).sum(-1).mean())


def _gain(h: HeadBarcode) -> float:
    return h.near if h.overlap is None else h.overlap - (h.healthy_overlap or 0.0)


def _picked(heads: list[HeadBarcode]) -> set[Head]:
    """In each layer the head that the loop changes most, and among those the heads that it changes most."""
    best: dict[int, HeadBarcode] = {}
    for h in heads:
        if h.layer not in best or _gain(h) > _gain(best[h.layer]):
            best[h.layer] = h
    return {(h.layer, h.head) for h in sorted(best.values(), key=_gain, reverse=True)[:SHOWN]}


def _pictured(h: HeadBarcode, own: Recorder, plain: Recorder | None, length: int) -> HeadBarcode:
    head = h.layer, h.head
    return replace(
        h,
        whole=_whole(own, head, length),
        late=_late(own, head, length),
        healthy_whole=None if plain is None else _whole(plain, head, length),
        healthy_late=None if plain is None else _late(plain, head, length),
    )


def _whole(recorder: Recorder, head: Head, length: int) -> Picture:
    wide = recorder.array(head).float()
    used = -(-length * recorder.columns // recorder.positions)  # columns beyond were never reached
    wide = wide[:, :used]
    steps = -(-len(wide) // STEPS)
    lines = torch.stack([part.mean(0) for part in wide.split(steps)])
    group = -(-used // COLUMNS)
    padded = torch.nn.functional.pad(lines, (0, -used % group))
    return _picture(
        padded.unflatten(1, (-1, group)).sum(-1),
        0,
        steps,
        0,
        group * recorder.positions / recorder.columns,
    )


def _late(recorder: Recorder, head: Head, length: int) -> Picture:
    """Offsets turned into positions again, as far back as every line reaches."""
    near = recorder.recent(head)
    first = max(0, length - NEAR)
    lines = torch.zeros(len(near), length - first)
    for i, row in enumerate(near):
        query = length - 1 - len(near) + i  # the last token is generated, not read
        back = torch.arange(0, min(NEAR, query - first + 1))
        lines[i, query - first - back] = row[back]
    return _picture(lines, recorder.done - len(near), 1, first, 1.0)


def _picture(lines: Tensor, first_step: int, steps: int, first_position: int, positions: float) -> Picture:
    shares = (lines * 1000).round().int().tolist()
    return Picture(tuple(" ".join(map(str, line)) for line in shares), first_step, steps, first_position, positions)
