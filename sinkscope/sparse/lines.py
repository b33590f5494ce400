"""How few vertical and slash lines carry the attention, and how far they agree between texts (Li et al. 2025, sec. 3).

Observation 1 of LoopServe: how much attention the heaviest lines carry. Observations 2 and 3: how many of them are the
same in another text, and in the other half of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go
import torch
from einops import einsum, rearrange, reduce
from jaxtyping import Bool, Float
from plotly.subplots import make_subplots
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from sinkscope.engine.attention import Attention
from sinkscope.engine.tap import check_attention_visible, listening
from sinkscope.engine.visible import Visible
from sinkscope.errors import UnsupportedError
from sinkscope.files.records import PositiveShare, checked_value
from sinkscope.measure import Mean, Natural, Result, Row, Setup, measurement
from sinkscope.measure.attention_texts import check_data, texts_of
from sinkscope.measure.margin import margin_of
from sinkscope.models.draws import draws
from sinkscope.models.inputs import attending_layers
from sinkscope.models.target import Target
from sinkscope.results.notation import count_of
from sinkscope.results.row import row_beside
from sinkscope.results.style import BLUE, GREEN, GREY, ORANGE, figure_of, long_table
from sinkscope.sparse.attention import Scores, in_blocks, line_sums
from sinkscope.sparse.bands import Lines, lengths_of
from sinkscope.sparse.head_lines import top_lines

ETAS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
PAPER_ETA, PAPER_MASS = 0.1, 0.9  # the paper: a tenth of the lines carries about 90 % of the attention
CONTROLS = {
    "other_mass": "another text's lines",
    "near_mass": "the first column and the nearest diagonals",
    "random_mass": "random lines of the same total length",
}
"""Fields with the attention on other lines, and what these are."""
TITLES = ("Attention on the lines, mean over heads", "Lines shared, mean over heads")
_SHARES = ("inputs", "inputs_random", "segments", "segments_relative", "segments_random")


@dataclass(frozen=True, kw_only=True)
class LineWeights(Result):
    """Attention on the heaviest lines of every head, mean over the texts, and how far these lines agree.

    Attributes:
        etas: Shares of all lines that were chosen.
        tokens: Length of every text.
        layers: The layers that were measured.
        mass: Share of the attention that lies on the chosen lines; cells at crossings count once.
        random_mass: `mass` of random lines with the same total length of each kind as the chosen ones.
        near_mass: `mass` of the first column and the nearest offsets, as few as cover at least as many cells.
        other_mass: `mass` of the lines that were chosen in the text before, mean over all texts but the first; None
            with a single text.
        cells: Share of all cells that the chosen lines cover.
        inputs: Number of lines chosen in both of two texts divided by the number chosen in either (observation 2); mean
            over pairs of different texts. None with a single text.
        inputs_random: `inputs` for the same number of random lines of each kind.
        segments: Number of lines chosen in both halves of a text divided by the number chosen in the second
            (observation 3); vertical lines are key positions of the text.
        segments_relative: The same within each half: the second half's sums leave out keys of the first, and its
            vertical lines are counted from its beginning.
        segments_random: `segments` for the same number of random lines of each kind.
        text_mass: `mass` of each text, mean over heads.
    """

    page = "measure/lines"
    glossary: ClassVar[dict[str, str]] = {"eta": "Share of all lines that were chosen."}
    percent = ("mass", *CONTROLS, "cells", *_SHARES)
    columns = ("head", "mass", "other_mass", "near_mass", "random_mass", "cells", "inputs", "inputs_random", "segments")

    etas: tuple[float, ...]
    tokens: tuple[int, ...]
    layers: tuple[int, ...]
    mass: Float[np.ndarray, "eta layer head"]
    random_mass: Float[np.ndarray, "eta layer head"]
    near_mass: Float[np.ndarray, "eta layer head"]
    other_mass: Float[np.ndarray, "eta layer head"] | None
    cells: Float[np.ndarray, "eta layer head"]
    inputs: Float[np.ndarray, "eta layer head"] | None
    inputs_random: Float[np.ndarray, "eta layer head"] | None
    segments: Float[np.ndarray, "eta layer head"]
    segments_relative: Float[np.ndarray, "eta layer head"]
    segments_random: Float[np.ndarray, "eta layer head"]
    text_mass: Float[np.ndarray, "eta text"]

    @property
    def shown_eta(self) -> int:
        """Index of the eta that tables show: the paper's, or the nearest."""
        return int(np.abs(np.array(self.etas) - PAPER_ETA).argmin())

    def mean(self, name: str) -> Float[np.ndarray, " eta"]:
        """Return the mean of a field over all heads."""
        return reduce(getattr(self, name), "eta layer head -> eta", "mean")

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per eta and head: eta 0.1 (or the nearest) and the smallest mass first."""
        columns = {name: getattr(self, name) for name in self.percent}
        rows = long_table(columns, eta=self.etas, layer=self.layers, head=range(self.mass.shape[2]))
        return sorted(rows, key=lambda row: (row["eta"] != self.etas[self.shown_eta], row["mass"]))

    def shown(self, name: str) -> float:
        """Return the mean of a field over all heads, at the eta that is shown."""
        return float(self.mean(name)[self.shown_eta])

    @property
    def controls(self) -> dict[str, float]:
        """Attention on other lines, by what they are; the largest first."""
        shares: dict[str, float] = {}
        for name, what in CONTROLS.items():
            if getattr(self, name) is not None:
                shares[what] = self.shown(name)
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def conclusion(self) -> str:
        """Return the attention on the heaviest lines, compared with the control that carries most."""
        (control, most), *_ = self.controls.items()
        beside = f"{control}, the strongest control, {most:.1%}"
        if most >= self.shown("mass"):
            beside = f"{control} carry as much, {most:.1%}"
        return (
            f"The heaviest {self.etas[self.shown_eta]:.0%} of vertical and slash lines carry {self.shown('mass'):.1%} "
            f"of the attention; {beside}."
        )

    def details(self) -> list[str]:
        """Return the cells, how many heads reach the paper's share, and how far lines agree."""
        heads = self.mass[self.shown_eta]
        lines = [
            f"{count_of(len(self.tokens), 'text')} of at most {max(self.tokens)} tokens; {heads.size} heads.",
            f"The lines cover {self.shown('cells'):.1%} of the cells.",
            *(f"{control[0].upper()}{control[1:]} carry {most:.1%}." for control, most in [*self.controls.items()][1:]),
            f"{(heads >= PAPER_MASS).sum()} of {heads.size} heads reach {PAPER_MASS:.0%}.",
        ]
        if self.inputs is not None:
            same, chance = self.shown("inputs"), self.shown("inputs_random")
            lines.append(f"Between two texts {same:.1%} of the lines are the same (random {chance:.1%}).")
        same, chance = self.shown("segments"), self.shown("segments_random")
        lines.append(f"Of a text's second half, {same:.1%} of the lines are those of its first (random {chance:.1%}).")
        return lines

    def findings(self) -> list[Row]:
        """Return the mass on the heaviest lines beside the strongest control, and how many of them two texts share."""
        eta, margin = self.etas[self.shown_eta], margin_of(self.text_mass[self.shown_eta])
        label = f"attention on the heaviest {eta:.0%} of lines"
        (control, most), *_ = self.controls.items()
        by_text = tuple(map(float, self.text_mass[self.shown_eta]))
        mass = Mean(self.shown("mass"), margin, by_text, "share")
        rows = [row_beside(label, mass, most, control, texts=[f"text {text}" for text in range(len(by_text))])]
        if self.inputs is not None:
            label = f"heaviest {eta:.0%} of lines that two texts share"
            shared, random = Mean(self.shown("inputs"), kind="share"), self.shown("inputs_random")
            rows.append(row_beside(label, shared, random, "random lines"))
        return rows


def draw(result: LineWeights) -> go.Figure:
    """Draw mass and agreement of the lines by eta."""
    fig: Any = make_subplots(2, 1, subplot_titles=TITLES, vertical_spacing=0.12)
    curves = (
        ("mass", "heaviest lines", BLUE, "solid", 1),
        ("other_mass", "lines of another text", ORANGE, "dash", 1),
        ("near_mass", "first column and nearest diagonals, as many cells", GREEN, "dash", 1),
        ("random_mass", "random lines of the same length", GREY, "dash", 1),
        ("cells", "cells covered", GREEN, "dot", 1),
        ("inputs", "between texts", BLUE, "solid", 2),
        ("inputs_random", "between texts, random lines", BLUE, "dot", 2),
        ("segments", "first half in second", ORANGE, "solid", 2),
        ("segments_relative", "within each half", ORANGE, "dash", 2),
        ("segments_random", "halves, random lines", ORANGE, "dot", 2),
    )
    for field_name, name, color, dash, row in curves:
        if getattr(result, field_name) is not None:
            line = {"color": color, "dash": dash}
            fig.add_scatter(x=result.etas, y=result.mean(field_name), name=name, line=line, row=row, col=1)
    fig.add_hline(PAPER_MASS, line={"color": GREY, "dash": "dot", "width": 1}, row=1, col=1)
    fig.update_yaxes(tickformat=".0%", rangemode="tozero")
    fig.update_xaxes(title_text="share of all lines chosen (eta)")
    return figure_of(fig, result, width=900, height=1000, legend=-0.07, bottom=90)


@measurement(
    figure=draw,
    loading="whole",
    edits=True,
    check=check_data,
)
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
    """Measure how much attention the heaviest lines of every head carry, and how far they agree between texts.

    Attention is recomputed from queries and keys, some rows at a time, while the model runs normally. Memory grows
    linearly with the length. A second pass corrects for cells where chosen lines cross. Each text is read in one
    call: what acts later, as a guard or a policy that evicts once the prompt was read, changes nothing here.

    Args:
        texts: A text, or several texts or lists of ids. By default pieces of ordinary text.
        data: File of JSON lines, each with a "text", to use instead.
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
        checked_value(PositiveShare, eta, "--etas ", strict=True)
    setup.record(etas=shares)
    target = setup.target
    wanted = attending_layers(setup.target, layers)
    rows = texts_of(setup, texts, data, count, length)
    measured: dict[str, list[Float[Tensor, "eta head"]]] = {}  # of one text after the other, layer by layer
    chosen: list[Lines] = []
    random: list[Lines] = []

    def see(layer: int, scores: Scores) -> None:
        drawn = setup.seed, f"lines of layer {layer} in text {len(chosen) // len(wanted)}"
        before = None if len(chosen) < len(wanted) else chosen[-len(wanted)]
        own, numbers = weighed(scores, shares, before, *drawn)
        for name, values in numbers.items():
            measured.setdefault(name, []).append(values.double().cpu())
        chosen.append(Lines.of(own.columns.cpu(), own.offsets.cpu(), scores.keys))
        random.append(drawn_like(chosen[-1], *drawn, cells=False))
        setup.progress("layers", len(chosen), len(wanted) * len(rows))

    with setup.edited(), scores_of(target, see, wanted):
        for ids in rows:
            target.forward(ids[None])
    arrays: dict[str, Any] = {"inputs": None, "inputs_random": None, "other_mass": None}
    for name, values in measured.items():  # all but the first text have one before them
        mean = reduce(torch.stack(values), "(text layer) eta head -> eta layer head", "mean", layer=len(wanted))
        arrays[name] = mean.numpy()
    if len(rows) > 1:
        layer_count = len(wanted)
        for name, drawn in (("inputs", chosen), ("inputs_random", random)):
            shared = [agreement(drawn[layer::layer_count]) for layer in range(layer_count)]
            arrays[name] = torch.stack(shared, 1).numpy()
    mass = torch.stack(measured["mass"])
    arrays["text_mass"] = reduce(mass, "(text layer) eta head -> eta text", "mean", text=len(rows)).numpy()
    return LineWeights(etas=shares, tokens=tuple(map(len, rows)), layers=tuple(wanted), **arrays)


def weighed(
    scores: Scores, etas: Sequence[float], before: Lines | None, seed: int, purpose: str
) -> tuple[Lines, dict[str, Float[Tensor, "eta head"]]]:
    """The heaviest lines of one layer and text, and what is measured of them, under the names of `LineWeights`."""
    keys, half = scores.keys, scores.keys // 2
    first_sums, late = line_sums(scores.part(0, half)), scores.part(half, keys)
    second_sums = line_sums(late)
    sums = second_sums + pad(first_sums, (0, keys - half))
    own = top_lines(sums, etas)
    as_long = drawn_like(own, seed, f"{purpose}, as long", cells=True)
    others = {"mass": own.both, "random_mass": as_long.both, "near_mass": nearest_of(own).both}
    if before is not None:  # of lines that only the longer text has, none is in the other
        there = before.both.to(own.columns.device)
        others["other_mass"] = pad(there[..., :keys], (0, max(0, keys - there.shape[-1])))
    weights = weight_on(scores, torch.cat(list(others.values()))) / sums[:, 0].sum(1)
    first, second = top_lines(first_sums, etas), top_lines(second_sums, etas, keys - half)
    inside = top_lines(line_sums(late, since=half), etas)
    first_random = drawn_like(first, seed, f"{purpose}, first half", cells=False)
    second_random = drawn_like(second, seed, f"{purpose}, second half", cells=False)
    return own, {
        **dict(zip(others, weights.split(len(etas)), strict=True)),
        "cells": own.attended(),
        "segments": shared_by_second(first, second),
        "segments_relative": shared_by_second(first, inside),
        "segments_random": shared_by_second(first_random, second_random),
    }


def drawn_like(lines: Lines, seed: int, purpose: str, *, cells: bool) -> Lines:
    """Draw random lines in place of these, per kind: the same number, or with `cells` the same lengths.

    Seed and purpose are those of `models.draws.draws`.
    """
    generator, both = draws(seed, purpose), lines.both
    length = lengths_of(lines.grid, both.device).columns.cpu()
    if not cells:
        length = torch.ones_like(length)
    order = torch.rand(2, both.shape[-3], len(length), generator=generator).argsort(-1).transpose(0, 1)
    drawn = length[order]
    reached = drawn.cumsum(-1) - drawn / 2  # a line is taken if more than half of it still fits
    wanted = (both.cpu() * length).sum(-1, keepdim=True)
    taken = torch.zeros_like(both, device="cpu").scatter_(-1, order.expand_as(both), reached < wanted)
    columns, offsets = taken.to(both.device).unbind(-2)
    return Lines.of(columns, offsets, lines.grid.queries)


def nearest_of(lines: Lines) -> Lines:
    """Return the first column and the nearest offsets, as few as cover at least as many cells as the lines."""
    length = lengths_of(lines.grid, lines.columns.device).columns
    with_column = len(length) + (length - 1).cumsum(0)  # each offset crosses the first column once
    number = (with_column < lines.cells()[..., None]).sum(-1, keepdim=True) + 1
    index = torch.arange(len(length), device=length.device)
    first = (index == 0).expand_as(lines.columns)
    return Lines.of(first, index < number, lines.grid.queries)


def agreement(lines: Sequence[Lines]) -> Float[Tensor, "eta head"]:
    """Return lines in both of two texts over lines in either, mean over pairs of different texts."""
    by_key = [rearrange(text.both, "eta head kind key -> key kind eta head") for text in lines]
    chosen = pad_sequence(by_key, batch_first=True).float()  # lines that only one text can have are not shared
    both = einsum(chosen, chosen, "text key kind eta head, other key kind eta head -> text other eta head")
    counts = reduce(chosen, "text key kind eta head -> text eta head", "sum")
    overlap = both / (counts[:, None] + counts - both).clamp(min=1)
    first, second = torch.triu_indices(len(lines), len(lines), 1)
    return overlap[first, second].double().mean(0)


def shared_by_second(a: Lines, b: Lines) -> Float[Tensor, "eta head"]:
    """Return the number of lines in both over number of lines of `b`."""
    keys = min(a.grid.keys, b.grid.keys)  # lines that only one can have are not shared
    both = a.both[..., :keys] & b.both[..., :keys]
    return both.sum((-2, -1)) / b.both.sum((-2, -1)).clamp(min=1)


def weight_on(scores: Scores, lines: Bool[Tensor, "choice head kind key"]) -> Float[Tensor, "choice head"]:
    """Sum the attention of the cells on the lines, for several choices.

    Cells where lines cross count once.
    """
    weights = torch.zeros(lines.shape[:2], device=scores.query.device)
    for at, probs in in_blocks(scores):
        keys = probs.shape[2]
        by_kind = lines[..., :keys].transpose(1, 2)
        for number, (columns, offsets) in enumerate(by_kind):
            seen = Lines.of(columns, offsets, keys).rows(at)
            weights[number] += (probs * seen).sum((1, 2))
    return weights


@contextmanager
def scores_of(target: Target, observer: Callable[[int, Scores], None], layers: list[int]) -> Iterator[None]:
    """Show, as a context manager, the parts of the scores of every forward pass of one sequence to `observer`.

    Args:
        target: The model; plain or nnsight.
        observer: Called as `observer(layer, scores)`.
        layers: The layers to watch.

    Raises:
        UnsupportedError: The model is a TransformerBridge, which has its own attention, or outside transformers'
            attention interface (BLOOM, Falcon, GPT-J, MPT); attention is neither causal nor a sliding window; or tokens
            were evicted from the cache.
    """
    check_attention_visible(target)

    def see(call: Attention) -> None:
        if call.layer not in layers or call.is_repeated:
            return
        if call.slots_of is not None:
            raise UnsupportedError(
                "lines need every key at its position, and a cache policy has evicted some: measure the prompt, before "
                "anything was generated"
            )
        window = _window(call.visible)
        with torch.no_grad():
            query = target.whole_heads(call.query[0], target.n_heads, 0)
            key = target.whole_heads(call.key[0], target.n_kv_heads, 0)
            sinks = call.sinks
            if sinks is not None:
                sinks = target.whole_heads(sinks, target.n_heads, 0)
            observer(call.layer, Scores(query, key, call.scaling, window, call.softcap, sinks))

    with listening(target, see):
        yield


def _window(visible: Visible) -> int | None:
    """The number of last keys that a query sees; None: all earlier keys."""
    if visible.is_causal:
        return None
    seen = visible.sees()[0, 0]
    keys = seen.shape[1]
    window = int(seen[-1].sum())
    past = keys - len(seen)
    if not torch.equal(seen, torch.ones_like(seen).tril(past).triu(past - window + 1)):
        raise UnsupportedError(
            "lines are of causal attention, with or without a window; this mask is neither: give texts without padding"
        )
    if window == keys:
        return None
    return window
