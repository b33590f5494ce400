"""How few vertical and slash lines carry the attention, and how far they agree between texts (Li et al. 2025, sec. 3).

1. Attention of every layer is computed anew from queries and keys, some rows at a time, and summed along all lines.
2. Observation 1 of LoopServe: the share on the heaviest lines, beside the same share on other lines of as many cells.
3. Observations 2 and 3: how many of them are heaviest in another text, and in the other half of the text, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from plotly.subplots import make_subplots
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.engine.attention import Attention
from sinkscope.engine.tap import Listener, check_attention_known, check_attention_visible, tapped
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
CONTROLS = {"other_mass": "another text's lines", "near_mass": "the first column and the nearest diagonals"}
"""Fields with the attention on other lines, and what these are."""
SHARED = {
    "inputs": ("lines that two texts share", "inputs_random"),
    "segments": ("lines of a text's second half that are also its first half's", "segments_random"),
}
"""Fields that say how far lines agree, what they are, and what random lines give."""
CURVES = (
    ("mass", "heaviest lines", BLUE, "solid", 1),
    ("other_mass", "lines of another text", ORANGE, "dash", 1),
    ("near_mass", "first column and nearest diagonals, as many cells", GREEN, "dash", 1),
    ("cells", "cells covered", GREEN, "dot", 1),
    ("inputs", "between texts", BLUE, "solid", 2),
    ("inputs_random", "between texts, random lines", BLUE, "dot", 2),
    ("segments", "first half in second", ORANGE, "solid", 2),
    ("segments_relative", "within each half", ORANGE, "dash", 2),
    ("segments_random", "halves, random lines", ORANGE, "dot", 2),
)
"""What is drawn: a field, its name, colour and dash, and its panel."""
ByHead = Float[Tensor, "eta head"]


@dataclass(frozen=True, kw_only=True)
class LineWeights(Result):
    """Attention on the heaviest lines of every head, mean over the texts, and how far these lines agree.

    Attributes:
        etas: Shares of all lines that were chosen.
        tokens: Length of every text.
        layers: The layers that were measured.
        mass: Share of the attention that lies on the chosen lines; cells at crossings count once.
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
    percent = (
        "mass",
        *CONTROLS,
        "cells",
        "inputs",
        "inputs_random",
        "segments",
        "segments_relative",
        "segments_random",
    )
    columns = ("head", "mass", "other_mass", "near_mass", "cells", "inputs", "inputs_random", "segments")

    etas: tuple[float, ...]
    tokens: tuple[int, ...]
    layers: tuple[int, ...]
    mass: Float[np.ndarray, "eta layer head"]
    near_mass: Float[np.ndarray, "eta layer head"]
    other_mass: Float[np.ndarray, "eta layer head"] | None = None
    cells: Float[np.ndarray, "eta layer head"]
    inputs: Float[np.ndarray, "eta layer head"] | None = None
    inputs_random: Float[np.ndarray, "eta layer head"] | None = None
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
        return getattr(self, name).mean((1, 2))

    def shown(self, name: str) -> float:
        """Return the mean of a field over all heads, at the eta that is shown."""
        return float(self.mean(name)[self.shown_eta])

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per eta and head: eta 0.1 (or the nearest) and the smallest mass first."""
        columns = {name: getattr(self, name) for name in self.percent}
        rows = long_table(columns, eta=self.etas, layer=self.layers, head=range(self.mass.shape[2]))
        return sorted(rows, key=lambda row: (row["eta"] != self.etas[self.shown_eta], row["mass"]))

    @property
    def controls(self) -> dict[str, float]:
        """Attention on other lines, by what they are; the largest first."""
        shares = {what: self.shown(name) for name, what in CONTROLS.items() if getattr(self, name) is not None}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def conclusion(self) -> str:
        """Return the attention on the heaviest lines, compared with the control that carries most."""
        (control, most), *_ = self.controls.items()
        heaviest = f"The heaviest {self.etas[self.shown_eta]:.0%} of vertical and slash lines"
        return (
            f"{heaviest} carry {self.shown('mass'):.1%} of the attention; {control}, the strongest control, {most:.1%}."
        )

    def details(self) -> list[str]:
        """Return the cells, how many heads reach the paper's share, and how far lines agree."""
        heads = self.mass[self.shown_eta]
        return [
            f"{count_of(len(self.tokens), 'text')} of at most {max(self.tokens)} tokens; {heads.size} heads, of which "
            f"{(heads >= PAPER_MASS).sum()} reach {PAPER_MASS:.0%}.",
            f"The lines cover {self.shown('cells'):.1%} of the cells.",
            *(f"{row.name}: {row.words()}.".capitalize() for row in self.findings()[1:]),
        ]

    def findings(self) -> list[Row]:
        """Return the mass on the heaviest lines beside the strongest control, and how many of them are shared."""
        (control, most), *_ = self.controls.items()
        heaviest = f"heaviest {self.etas[self.shown_eta]:.0%}"
        by_text = self.text_mass[self.shown_eta]
        mass = Mean(self.shown("mass"), margin_of(by_text), tuple(by_text.tolist()), "share")
        texts = [f"text {number}" for number in range(len(by_text))]
        rows = [row_beside(f"attention on the {heaviest} of lines", mass, most, control, texts=texts)]
        for name, (said, random) in SHARED.items():
            if getattr(self, name) is not None:
                share = Mean(self.shown(name), kind="share")
                rows.append(row_beside(f"{heaviest} of {said}", share, self.shown(random), "random lines"))
        return rows


def draw(result: LineWeights) -> go.Figure:
    """Draw mass and agreement of the lines by eta."""
    titles = ("Attention on the lines, mean over heads", "Lines shared, mean over heads")
    fig: Any = make_subplots(2, 1, subplot_titles=titles, vertical_spacing=0.12)
    for field_name, name, color, dash, row in CURVES:
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
    wanted = attending_layers(setup.target, layers)
    rows = texts_of(setup, texts, data, count, length)
    every = len(wanted)
    seen: list[Weighed] = []  # of one text after the other, layer by layer

    def see(layer: int, scores: Scores) -> None:
        before = seen[-every].lines if len(seen) >= every else None
        seen.append(weighed(scores, shares, before, setup.seed, f"lines of layer {layer} in text {len(seen) // every}"))
        setup.progress("layers", len(seen), every * len(rows))

    with setup.edited(), scores_of(setup.target, see, wanted):
        for ids in rows:
            setup.target.forward(ids[None])
    by_layer = [over_texts(seen[layer::every]) for layer in range(every)]
    arrays: dict[str, Any] = {}
    for name in by_layer[0]:
        arrays[name] = torch.stack([each[name] for each in by_layer], 1).numpy()
    by_text = [torch.stack([one.numbers["mass"] for one in seen[n : n + every]]) for n in range(0, len(seen), every)]
    text_mass = torch.stack([mass.mean((0, 2)) for mass in by_text], 1).numpy()
    tokens = tuple(map(len, rows))
    return LineWeights(etas=shares, tokens=tokens, layers=tuple(wanted), text_mass=text_mass, **arrays)


@dataclass(frozen=True)
class Weighed:
    """What is measured of one layer and text.

    Attributes:
        lines: The heaviest lines, for each eta.
        random: As many random ones of each kind.
        numbers: What they carry, under the names of `LineWeights`.
    """

    lines: Lines
    random: Lines
    numbers: dict[str, ByHead]


def weighed(scores: Scores, etas: Sequence[float], before: Lines | None, seed: int, purpose: str) -> Weighed:
    """Weigh the heaviest lines of one layer and text, and those that were heaviest in the text before."""
    keys = scores.keys
    half = keys // 2
    first_sums = line_sums(scores.part(0, half))
    late = scores.part(half, keys)
    second_sums = line_sums(late)
    sums = second_sums + pad(first_sums, (0, keys - half))
    own = top_lines(sums, etas)
    others = {"mass": own, "near_mass": nearest_of(own)}
    if before is not None:
        others["other_mass"] = of_length(before, keys)
    on_lines = torch.zeros(len(others), len(etas), scores.heads, device=sums.device)
    for at, probs in in_blocks(scores):
        for total, chosen in zip(on_lines, others.values(), strict=True):
            for eta, seen in enumerate(chosen.rows(at)[..., : probs.shape[2]]):
                total[eta] += (probs * seen).sum((1, 2))
    numbers = dict(zip(others, on_lines / sums[:, 0].sum(1), strict=True))
    first = top_lines(first_sums, etas)
    second = top_lines(second_sums, etas, keys - half)
    halves = (
        drawn_like(part, seed, f"{purpose}, {name} half") for name, part in (("first", first), ("second", second))
    )
    numbers["cells"] = own.attended()
    numbers["segments"] = shared_by_second(first, second)
    numbers["segments_relative"] = shared_by_second(first, top_lines(line_sums(late, since=half), etas))
    numbers["segments_random"] = shared_by_second(*halves)
    random = drawn_like(own, seed, purpose)
    return Weighed(own, random, {name: values.double().cpu() for name, values in numbers.items()})


def over_texts(texts: Sequence[Weighed]) -> dict[str, ByHead]:
    """Return means over the texts, and how far their lines agree, under the names of `LineWeights`."""
    means: dict[str, ByHead] = {}
    for name in texts[-1].numbers:  # the first text has none before it
        means[name] = torch.stack([text.numbers[name] for text in texts if name in text.numbers]).mean(0)
    if len(texts) > 1:
        means["inputs"] = agreement([text.lines for text in texts])
        means["inputs_random"] = agreement([text.random for text in texts])
    return means


def drawn_like(lines: Lines, seed: int, purpose: str) -> Lines:
    """Draw as many random lines of each kind; seed and purpose are those of `models.draws.draws`."""
    heads, keys = lines.columns.shape[-2:]
    order = torch.rand(2, heads, keys, generator=draws(seed, purpose)).argsort(-1).transpose(0, 1)
    wanted = lines.both.sum(-1, keepdim=True).cpu()
    taken = torch.zeros(lines.both.shape, dtype=torch.bool)
    taken.scatter_(-1, order.expand_as(taken), torch.arange(keys) < wanted)
    columns, offsets = taken.to(lines.columns.device).unbind(-2)
    return Lines.of(columns, offsets, lines.grid.queries)


def nearest_of(lines: Lines) -> Lines:
    """Return the first column and the nearest offsets, as few as cover at least as many cells as the lines."""
    length = lengths_of(lines.grid, lines.columns.device).columns
    with_column = len(length) + (length - 1).cumsum(0)  # each offset crosses the first column once
    number = (with_column < lines.cells()[..., None]).sum(-1, keepdim=True) + 1
    index = torch.arange(len(length), device=length.device)
    return Lines.of((index == 0).expand_as(lines.columns), index < number, lines.grid.queries)


def of_length(lines: Lines, keys: int) -> Lines:
    """Return the lines that a text of another length has, too."""
    missing = keys - lines.columns.shape[-1]
    return Lines.of(pad(lines.columns, (0, missing)), pad(lines.offsets, (0, missing)), keys)


def in_both(a: Lines, b: Lines) -> Int[Tensor, "eta head"]:
    """Count the lines that are in both; a line that only the longer text has is not."""
    return (a.both & of_length(b, a.columns.shape[-1]).both).sum((-2, -1))


def agreement(texts: Sequence[Lines]) -> ByHead:
    """Return lines in both of two texts over lines in either, mean over pairs of different texts."""
    shares: list[Tensor] = []
    for one, other in combinations(texts, 2):
        both = in_both(one, other)
        either = in_both(one, one) + in_both(other, other) - both
        shares.append(both / either.clamp(min=1))
    return torch.stack(shares).double().mean(0).cpu()


def shared_by_second(a: Lines, b: Lines) -> ByHead:
    """Return the number of lines in both over number of lines of `b`."""
    return in_both(a, b) / in_both(b, b).clamp(min=1)


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

    @torch.no_grad()
    def see(call: Attention) -> None:
        if call.layer not in layers or call.is_repeated:
            return
        if call.slots_of is not None:
            raise UnsupportedError(
                "lines need every key at its position, and a cache policy has evicted some: measure the prompt, before "
                "anything was generated"
            )
        query = target.whole_heads(call.query[0], target.n_heads, 0)
        key = target.whole_heads(call.key[0], target.n_kv_heads, 0)
        sinks = None if call.sinks is None else target.whole_heads(call.sinks, target.n_heads, 0)
        observer(call.layer, Scores(query, key, call.scaling, _window(call.visible), call.softcap, sinks))

    check_attention_known(target)
    with tapped(target, Listener(see)):
        yield


def _window(visible: Visible) -> int | None:
    """The number of last keys that a query sees; None: all earlier keys."""
    if visible.is_causal:
        return None
    seen = visible.sees()[0, 0]
    keys = seen.shape[1]
    past = keys - len(seen)
    window = int(seen[-1].sum())
    if not torch.equal(seen, torch.ones_like(seen).tril(past).triu(past - window + 1)):
        raise UnsupportedError(
            "lines are of causal attention, with or without a window; this mask is neither: give texts without padding"
        )
    return None if window == keys else window
