"""How few vertical and slash lines carry the attention, and how far they agree between texts (Li et al. 2025, sec. 3).

1. Attention of every layer is computed anew from queries and keys, some rows at a time, and summed along all lines.
2. Observation 1 of LoopServe: the share on the heaviest lines, beside the same share on other lines of as many cells.
3. Observations 2 and 3: how many of them are heaviest in another text, and in the other half of the text, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.engine.attention import Attention
from sinkscope.engine.tap import Listener, check_attention_known, check_attention_visible, tapped
from sinkscope.engine.visible import shown
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.output import PathName
from sinkscope.files.records import PositiveShare, check_values, checked_value
from sinkscope.files.texts import read_texts, text_of
from sinkscope.measure import Mean, Natural, Result, Setup, measurement
from sinkscope.measure.margin import margin_of
from sinkscope.measure.setup import prompt_ids
from sinkscope.models.inputs import attending_layers
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.results.headline import Headline, verdict_of
from sinkscope.results.notation import Head, percent
from sinkscope.results.style import COLOURS, figure_of
from sinkscope.results.table import Row, Subject, column, optional
from sinkscope.sparse.attention import Scores, line_sums
from sinkscope.sparse.bands import Lines, lengths_of
from sinkscope.sparse.head_lines import minference_lines, top_lines
from sinkscope.sparse.sparse import recovered

ORDINARY_TOKENS = 512  # tokens of a piece of ordinary text
SHORTEST_TEXT = 16  # tokens; with fewer, a tenth of the lines is almost none
ETAS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
PAPER_ETA = 0.1  # the paper: a tenth of the lines carries about 90 % of the attention
PerHead = Float[np.ndarray, "eta layer head"]
ByHead = Float[Tensor, "eta head"]
Chosen = Bool[Tensor, "eta head kind _"]


class On(StrEnum):
    """Which lines: the heaviest, or others of as many cells."""

    HEAVIEST = "mass"
    OTHER_TEXT = "other_mass"
    NEAREST = "near_mass"
    LAST_QUERIES = "last_mass"


@dataclass(frozen=True, kw_only=True)
class Mass(
    Row,
    table="mass",
    title="mean over heads",
    note="A line is a column (a key) or a diagonal (a distance) of a head's attention matrix; where two cross, "
    "the cell "
    "counts once. Heaviest: by the attention that they hold, in each head and text.",
):
    """How much attention lies on lines, mean over heads and texts."""

    key: On

    share: Mean = column("hold of the\nattention", "share", "Attention on the lines; crossings count once.")

    @property
    def is_control(self) -> bool:
        """Whether it is a control."""
        return self.key is not On.HEAVIEST

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        return "controls: other lines of as many cells" if self.is_control else ""

    @property
    def label(self) -> str:
        """What it is called."""
        words = {
            On.HEAVIEST: "the heaviest lines",
            On.OTHER_TEXT: "another text's heaviest",
            On.NEAREST: "first column, nearest diagonals",
            On.LAST_QUERIES: "those that the last 64 queries choose",
        }
        return words[self.key]


@dataclass(frozen=True, kw_only=True)
class Agreement(
    Row,
    table="agreement",
    title="the heaviest lines",
    note="Shared: lines of both texts over lines of either, mean over pairs of texts; of halves, the second "
    "half's lines "
    "that are the first half's. Random: as many lines of each kind, drawn at random.",
):
    """How far the heaviest lines agree, beside random lines."""

    key: Literal["inputs", "segments"]

    share: Mean = column("are\nshared", "share", "Lines of both, of those of either text, or of the second half.")
    control: Mean = column("random\nlines", "share", "The same of random lines, as many of each kind.")

    @property
    def label(self) -> str:
        """What it is called."""
        return {"inputs": "of two texts", "segments": "of both halves of a text"}[self.key]


@dataclass(frozen=True)
class HeadAt:
    """A head, and the share of all lines that were chosen."""

    eta: float
    layer: int
    head: int

    def __str__(self) -> str:
        return str(Head(self.layer, self.head))


@dataclass(frozen=True, kw_only=True)
class HeadLines(Row, table="heads", title="each head, lowest first", most=6):
    """How much attention of a head lies on lines, and how far these agree; named as the fields of `LineWeights`."""

    key: HeadAt

    mass: Mean = column("heaviest\nlines", "fine_share", "Attention on the heaviest lines.")
    other_mass: Mean | None = optional("another\ntext's", "fine_share", "Attention on those of the text before.")
    near_mass: Mean = column("nearest\nlines", "fine_share", "On the first column and nearest diagonals.")
    last_mass: Mean = column("last\nqueries'", "fine_share", "On lines that the last 64 queries choose.")
    cells: Mean = column("cells\ncovered", "fine_share", "Share of all cells that the heaviest lines cover.")
    inputs: Mean | None = optional("shared by\ntwo texts", "fine_share", "Lines of both of two texts, of either's.")
    inputs_random: Mean | None = optional("random of\ntwo texts", "fine_share", "The same of random lines.")
    segments: Mean = column("shared by\nhalves", "fine_share", "Lines of both halves of a text, of the second's.")
    segments_relative: Mean = column("shared within\nhalves", "fine_share", "The same, counted within each half.")
    segments_random: Mean = column("random of\nhalves", "fine_share", "The same of random lines.")

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        return f"heaviest {self.key.eta:.0%} of lines"


FIELDS = tuple(each.key for each in HeadLines.columns())


@dataclass(frozen=True, kw_only=True)
class LineWeights(Result):
    """Attention on the heaviest lines of every head, mean over the texts, and how far these lines agree.

    Attributes:
        etas: Shares of all lines that were chosen.
        tokens: Length of every text.
        layers: The layers that were measured.
        mass: Share of the attention that lies on the chosen lines; cells at crossings count once.
        near_mass: `mass` of the first column and the nearest offsets, as few as cover at least as many cells.
        last_mass: `mass` of vertical and slash lines that the last 64 queries choose, in MInference's proportion, of at
            most as many cells.
        other_mass: `mass` of the lines that were chosen in the text before, mean over all texts but the first; None
            with a single text.
        cells: Share of all cells that the chosen lines cover.
        inputs: Number of lines chosen in both of two texts divided by the number chosen in either (observation 2); mean
            over pairs of different texts. None with a single text.
        inputs_random: `inputs` as chance has it, for the same number of random lines of each kind.
        segments: Number of lines chosen in both halves of a text divided by the number chosen in the second
            (observation 3); vertical lines are key positions of the text.
        segments_relative: The same within each half: the second half's sums leave out keys of the first, and its
            vertical lines are counted from its beginning.
        segments_random: `segments` as chance has it, for the same number of random lines of each kind.
        text_mass: `mass` of each text, mean over heads.
    """

    etas: tuple[float, ...]
    tokens: tuple[int, ...]
    layers: tuple[int, ...]
    mass: PerHead
    near_mass: PerHead
    last_mass: PerHead
    other_mass: PerHead | None = None
    cells: PerHead
    inputs: PerHead | None = None
    inputs_random: PerHead | None = None
    segments: PerHead
    segments_relative: PerHead
    segments_random: PerHead
    text_mass: Float[np.ndarray, "eta text"]

    @property
    def shown_eta(self) -> int:
        """Index of the eta that tables show: the paper's, or the nearest."""
        return int(np.abs(np.array(self.etas) - PAPER_ETA).argmin())

    def mean(self, name: str) -> Float[np.ndarray, " eta"]:
        """Return the mean of a field over all heads."""
        return getattr(self, name).mean((1, 2))

    def shown(self, name: str) -> Mean:
        """Return the mean of a field over all heads, at the eta that is shown."""
        return Mean(float(self.mean(name)[self.shown_eta]))

    def subjects(self) -> list[Subject]:
        """Return the mass on the heaviest lines beside other lines, how far they agree, and all of it by head."""
        eta = f"{self.etas[self.shown_eta]:.0%}"
        by_text = self.text_mass[self.shown_eta]
        mass = replace(self.shown("mass"), margin=margin_of(by_text), by_text=tuple(by_text.tolist()))
        rows: list[Row] = [Mass(key=On.HEAVIEST, share=mass)]
        for on in (On.OTHER_TEXT, On.NEAREST, On.LAST_QUERIES):
            if getattr(self, on) is not None:
                rows.append(Mass(key=on, share=self.shown(on)))
        for name in ("inputs", "segments"):
            if getattr(self, name) is not None:
                rows.append(Agreement(key=name, share=self.shown(name), control=self.shown(f"{name}_random")))
        cells = percent(self.shown("cells").value)
        title = f"Attention on the heaviest {eta} of lines, which cover {cells} of the cells"
        return [Subject(title, (*rows, *self.by_head()), f"heaviest {eta}")]

    def compared(self) -> list[Subject]:
        """Return the same without the rows of heads, whose numbers have no margin."""
        (subject,) = self.subjects()
        rows = [row for row in subject.rows if not isinstance(row, HeadLines)]
        return [replace(subject, rows=tuple(rows))]

    def by_head(self) -> list[HeadLines]:
        """Return one row per eta and head: eta 0.1 (or the nearest) and the smallest mass first."""
        rows: list[HeadLines] = []
        for eta, layer, head in np.ndindex(self.mass.shape):
            numbers: dict[str, Mean] = {}
            for name in FIELDS:
                if getattr(self, name) is not None:
                    numbers[name] = Mean(float(getattr(self, name)[eta, layer, head]))
            rows.append(HeadLines(key=HeadAt(self.etas[eta], self.layers[layer], head), **numbers))
        shown = self.etas[self.shown_eta]
        return sorted(rows, key=lambda row: (row.key.eta != shown, row.mass.value))

    def strongest(self) -> tuple[Mass, Mass, Subject]:
        """Return the mass on the heaviest lines, that on the strongest others, and their subject."""
        (subject,) = self.subjects()
        mass, *others = (row for row in subject.rows if isinstance(row, Mass))
        return mass, max(others, key=lambda row: row.share.value), subject

    def conclusion(self) -> str:
        """Return the mass on the heaviest lines beside that on the strongest others."""
        mass, control, subject = self.strongest()
        words = (
            f"he {subject.key} of lines (columns and diagonals of each head's attention) hold "
            f"{mass.text('share')} of the "
            f"attention; as a control, other lines that cover as many cells hold at most {control.text('share')} "
            f"({control.label})."
        )
        if mass.share.value - control.share.value <= (mass.share.margin or 0.0):
            return f"Not shown that it matters which lines: t{words}"
        return f"T{words}"

    def headlines(self) -> list[Headline]:
        """Return the mass on the heaviest lines beside that on the strongest others."""
        mass, control, subject = self.strongest()
        verdict = verdict_of(mass.share.value, control.share.value, mass.share.margin)
        others = {On.OTHER_TEXT: "another text's", On.NEAREST: "nearest", On.LAST_QUERIES: "last queries'"}
        found, beside = mass.text("share"), f"{control.text('share')} ({others[control.key]})"
        return [Headline(f"attention on {subject.key} lines", found, beside, verdict)]

    def figure(self) -> go.Figure:
        """Draw mass and agreement of the lines by eta."""
        shares = {name: self.mean(name) for name in FIELDS if getattr(self, name) is not None}
        fig = px.line(pd.DataFrame(shares, index=self.etas), color_discrete_sequence=COLOURS)
        fig.update_yaxes(tickformat=".0%", rangemode="tozero", title_text="mean over heads")
        fig.update_xaxes(title_text="share of all lines chosen (eta)")
        return figure_of(fig, self, width=900, height=700)


NO_FIELD = "name the one of the text with --field"


def check_data(*, data: PathName | None, field: str | None = None, **_: Any) -> None:
    """Refuse a file that is missing or holds something else before a model is opened; what flows is read but once."""
    if data is not None and data != "-":
        list(read_texts(data, field, NO_FIELD))


@measurement(loading="whole", edits=["patch"], check=check_data)
def lines(
    setup: Setup,
    texts: Any = None,
    *,
    data: str | Path | None = None,
    count: Natural = 4,
    length: int | None = None,
    etas: Sequence[float] = ETAS,
    layers: Sequence[int] | None = None,
) -> LineWeights:
    """Measure how much attention lies on few columns and diagonals, and whether two texts share them.

    Attention is recomputed from queries and keys, some rows at a time, while the model runs normally. Memory grows
    linearly with the length. A second pass corrects for cells where chosen lines cross. Texts are read in one call,
    so guards and eviction policies have no effect.

    Args:
        texts: A text, or several texts or lists of ids. By default pieces of ordinary text.
        data: File of JSON lines, each with a "text" or the field that `field` names, to use instead.
        count: Number of pieces of ordinary text, or of lines of the file.
        length: Maximum tokens per text, at least 16; longer texts are shortened in the middle. By default the context,
            or 512 for ordinary text.
        etas: Shares of all lines to choose.
        layers: Layers to measure. By default all are measured.

    Raises:
        UnsupportedError: A model whose queries and keys are not accessible (a TransformerBridge, BLOOM, Falcon).
        SinkscopeError: Bad input; the message is one line and says what to do.
    """
    shares = tuple(sorted({float(eta) for eta in etas}))
    for eta in shares or (None,):
        checked_value(PositiveShare, eta, "--etas", strict=True)
    check_attention_visible(setup.target)
    check_attention_known(setup.target)
    wanted = attending_layers(setup.target, layers)
    rows = texts_of(setup, texts, data, count, length)
    every = len(wanted)
    seen: list[tuple[Chosen, dict[str, ByHead]]] = []  # of one text after the other, layer by layer

    @torch.no_grad()
    def see(call: Attention) -> None:
        if call.layer in wanted and not call.is_repeated:
            before = seen[-every][0] if len(seen) >= every else None
            seen.append(weighed(scores_of(setup.target, call), shares, before))
            setup.progress("layers", len(seen), every * len(rows))

    with setup.edited(), tapped(setup.target, Listener(see)):
        for ids in rows:
            setup.target.forward(ids[None])
    arrays: dict[str, Any] = {}
    for name in seen[-1][1]:
        values = torch.stack([numbers[name] for _, numbers in seen if name in numbers])  # no text is before the first
        by_text = values.unflatten(0, (-1, every))
        arrays[name] = by_text.mean(0).transpose(0, 1).numpy()
        if name == "mass":
            arrays["text_mass"] = by_text.mean((1, 3)).T.numpy()
    if len(rows) > 1:
        for name, shared in (("inputs", in_both), ("inputs_random", by_chance)):
            by_layer = [agreement([chosen for chosen, _ in seen[n::every]], shared) for n in range(every)]
            arrays[name] = torch.stack(by_layer, 1).numpy()
    return LineWeights(etas=shares, tokens=tuple(map(len, rows)), layers=tuple(wanted), **arrays)


def weighed(scores: Scores, etas: Sequence[float], before: Chosen | None) -> tuple[Chosen, dict[str, ByHead]]:
    """Weigh the heaviest lines of one layer and text, and those that were heaviest in the text before.

    Returns:
        The heaviest lines, and what is measured of them under the names of `LineWeights`.
    """
    keys = scores.keys
    half = keys // 2
    first_sums = line_sums(scores.part(0, half))
    late = scores.part(half, keys)
    second_sums = line_sums(late)
    sums = second_sums + pad(first_sums, (0, keys - half))
    heaviest = top_lines(sums, etas)
    own = Lines.of(heaviest[..., 0, :], heaviest[..., 1, :], keys)
    as_many = (own.cells() + 0.5) / own.grid.cells  # whatever is rounded
    others = {"mass": own, "near_mass": nearest_of(own), "last_mass": minference_lines(scores, share=as_many)}
    if before is not None:  # what a text of another length has, too
        columns, offsets = pad(before, (0, keys - before.shape[-1])).unbind(-2)
        others["other_mass"] = Lines.of(columns, offsets, keys)
    numbers = {name: recovered(scores, lines) for name, lines in others.items()}
    numbers["cells"] = own.attended()
    first = top_lines(first_sums, etas)
    second = top_lines(second_sums, etas, keys - half)
    count = in_both(second, second).clamp(min=1)
    numbers["segments"] = in_both(first, second) / count
    numbers["segments_random"] = by_chance(first, second) / count
    inside = top_lines(line_sums(late, since=half), etas)
    numbers["segments_relative"] = in_both(first, inside) / in_both(inside, inside).clamp(min=1)
    return heaviest, {name: values.double().cpu() for name, values in numbers.items()}


def nearest_of(lines: Lines) -> Lines:
    """Return the first column and the nearest offsets, as few as cover at least as many cells as the lines."""
    length, _, _ = lengths_of(lines.grid, lines.columns.device)
    with_column = len(length) + (length - 1).cumsum(0)  # each offset crosses the first column once
    number = (with_column < lines.cells()[..., None]).sum(-1, keepdim=True) + 1
    index = torch.arange(len(length), device=length.device)
    return Lines.of((index == 0).expand_as(lines.columns), index < number, lines.grid.queries)


def in_both(a: Chosen, b: Chosen) -> Int[Tensor, "eta head"]:
    """Count the lines that are in both; a line that only the longer text has is not."""
    keys = min(a.shape[-1], b.shape[-1])
    return (a[..., :keys] & b[..., :keys]).sum((-2, -1))


def by_chance(a: Chosen, b: Chosen) -> Float[Tensor, "eta head"]:
    """Return the same for random lines, as many of each kind, on average."""
    return (a.sum(-1) * b.sum(-1) / max(a.shape[-1], b.shape[-1])).sum(-1)


def agreement(texts: Sequence[Chosen], count: Callable[..., Tensor]) -> ByHead:
    """Return lines in both of two texts over lines in either, mean over pairs of different texts."""
    shares: list[Tensor] = []
    for one, other in combinations(texts, 2):
        both = count(one, other)
        either = one.sum((-2, -1)) + other.sum((-2, -1)) - both
        shares.append(both / either.clamp(min=1))
    return torch.stack(shares).double().mean(0).cpu()


def scores_of(target: Target, call: Attention) -> Scores:
    """Return the parts of the scores of a layer in a forward pass of one text.

    Raises:
        UnsupportedError: Attention is neither causal nor a sliding window.
    """
    seen = shown(call.visible().mask())[0, 0]
    keys = seen.shape[1]
    past = keys - len(seen)
    window = int(seen[-1].sum())
    if not torch.equal(seen, torch.ones_like(seen).tril(past).triu(past - window + 1)):
        raise UnsupportedError(
            "lines are of causal attention, with or without a window; this mask is neither: leave out what hides keys"
        )
    query = target.shards.gather(call.query[0], target.n_heads, 0)
    key = target.shards.gather(call.key[0], target.n_kv_heads, 0)
    sinks = None if call.sinks is None else target.shards.gather(call.sinks, target.n_heads, 0)
    return Scores(query, key, call.scaling, None if window == keys else window, call.softcap, sinks)


# --- texts ---


def texts_of(
    setup: Setup,
    texts: Any,
    data: PathName | None,
    count: int,
    length: int | None,
) -> list[Int[Tensor, " pos"]]:
    """Return ids of each text, beginning with BOS if the model has one.

    Args:
        setup: The model and ordinary text.
        texts: One text, or several texts or rows of ids; all are used.
        data: A file of JSON lines with a "text" to use instead; the first `count` are used.
        count: Number of pieces of ordinary text, or of lines of the file.
        length: Maximum tokens per text; longer texts are shortened in the middle. None: the context, or 512 for
            ordinary text.

    Raises:
        SinkscopeError: There are too few texts, a text is too short, or a number is invalid.
    """
    context = setup.target.max_positions or 1 << 30
    if length is not None and not SHORTEST_TEXT <= length <= context:
        raise SinkscopeError(f"--length {length}: expected {SHORTEST_TEXT} to {context}, the context of the model")
    least = 1
    if data is not None:
        texts = [text_of(record) for record in islice(read_texts(data, setup.data_field, NO_FIELD), count)]
    if texts is None:
        least, size = count, length or min(ORDINARY_TOKENS, context)
        rows = list(text_rows(setup.tokenizer, setup.text, count, size, setup.bos))
    else:
        check_values(Iterable[Any], texts=texts)
        rows = [_row(setup, text, length or context) for text in ([texts] if isinstance(texts, str) else texts)]
    if len(rows) < least:
        raise SinkscopeError(f"there are {len(rows)} texts: give more of them, a longer --text, or a smaller --count")
    return rows


def _row(setup: Setup, text: str | Sequence[int], most: int) -> Int[Tensor, " pos"]:
    """The ids of a text; long texts are cut in the middle, as in LongBench."""
    ids = prompt_ids(setup, text)
    if len(ids) > most:
        half = (most - (setup.bos is not None)) // 2
        ids = [*ids[: most - half], *ids[len(ids) - half :]]
    if len(ids) < SHORTEST_TEXT:
        raise SinkscopeError(f"a text has {len(ids)} tokens, at least {SHORTEST_TEXT} are needed: give a longer one")
    return torch.tensor(ids)
