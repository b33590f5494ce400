"""How few vertical and slash lines carry the attention, and how far they agree between texts (Li et al. 2025, sec. 3).

1. Attention of every layer is computed anew from queries and keys, some rows at a time, and summed along all lines.
2. Observation 1 of LoopServe: the share on the heaviest lines, beside the same share on other lines of as many cells.
3. Observations 2 and 3: how many of them are heaviest in another text, and in the other half of the text, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

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
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.line_weights import (
    ByHead,
    Chosen,
    agreement_by_layer,
    by_chance,
    in_both,
    mean_numbers,
    weighed,
)

ORDINARY_TOKENS = 512  # tokens of a piece of ordinary text
SHORTEST_TEXT = 16  # tokens; with fewer, a tenth of the lines is almost none
ETAS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
PAPER_ETA = 0.1  # the paper: a tenth of the lines carries about 90 % of the attention
PerHead = Float[np.ndarray, "eta layer head"]


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
    "the cell counts once. Heaviest: in each head and text, one after the other by the attention that each holds "
    "beyond those chosen before it (with --whole: by all that it holds).",
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


FIELDS = tuple(column.key for column in HeadLines.columns())


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
        mass, *controls = (row for row in subject.rows if isinstance(row, Mass))
        return mass, max(controls, key=lambda row: row.share.value), subject

    def conclusion(self) -> str:
        """Return the mass on the heaviest lines beside that on the strongest others."""
        mass, control, subject = self.strongest()
        words = (
            f"he {subject.key} of lines (columns and diagonals of each head's attention) hold {mass.text('share')} of "
            f"the attention; as a control, other lines that cover as many cells hold at most {control.text('share')} "
            f"({control.label})."
        )
        if mass.share.value - control.share.value <= (mass.share.margin or 0.0):
            return f"Not shown that it matters which lines: t{words}"
        return f"T{words}"

    def headlines(self) -> list[Headline]:
        """Return the mass on the heaviest lines beside that on the strongest others."""
        mass, control, subject = self.strongest()
        verdict = verdict_of(mass.share.value, control.share.value, mass.share.margin)
        names = {On.OTHER_TEXT: "another text's", On.NEAREST: "nearest", On.LAST_QUERIES: "last queries'"}
        found, beside = mass.text("share"), f"{control.text('share')} ({names[control.key]})"
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
    whole: bool = False,
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
        whole: Let a line weigh all the attention that it holds, as the paper's sums do. By default it weighs what it
            holds beyond lines of the other kind that were chosen before it.

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
    n_layers = len(wanted)
    read: list[tuple[Chosen, dict[str, ByHead]]] = []  # of one text after the other, layer by layer

    @torch.no_grad()
    def see(call: Attention) -> None:
        if call.layer in wanted and not call.is_repeated:
            before = read[-n_layers][0] if len(read) >= n_layers else None
            read.append(weighed(scores_of(setup.target, call), shares, before, whole))
            setup.progress("layers", len(read), n_layers * len(rows))

    with setup.edited(), tapped(setup.target, Listener(see)):
        for ids in rows:
            setup.target.forward(ids[None])
    arrays = mean_numbers([numbers for _, numbers in read], n_layers)
    if len(rows) > 1:
        chosen = [lines_of_text for lines_of_text, _ in read]
        arrays["inputs"] = agreement_by_layer(chosen, n_layers, in_both)
        arrays["inputs_random"] = agreement_by_layer(chosen, n_layers, by_chance)
    return LineWeights(etas=shares, tokens=tuple(map(len, rows)), layers=tuple(wanted), **arrays)


def scores_of(target: Target, call: Attention) -> Scores:
    """Return the parts of the scores of a layer in a forward pass of one text.

    Raises:
        UnsupportedError: Attention is neither causal nor a sliding window.
    """
    visible = shown(call.visible().mask())[0, 0]
    keys = visible.shape[1]
    past = keys - len(visible)
    window = int(visible[-1].sum())
    if not torch.equal(visible, torch.ones_like(visible).tril(past).triu(past - window + 1)):
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
