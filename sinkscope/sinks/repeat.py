"""What n repetitions of a token do to a model (Yona et al. 2025, Fig. 1 to 9).

1. A sequence is what texts begin with, and one token n times. One causal pass has every n.
2. Norm: each copy on the direction of each spike of the first token. Attention: what text after the copies gives to
   them. Probability: that the token comes once more.
3. Two controls at the position of the last copy: one copy after ordinary tokens, and ordinary tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Annotated, Any, Literal

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
import torch
from einops import einsum
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from sinkscope.engine.attention import AttentionRows
from sinkscope.engine.tap import attention_rows
from sinkscope.errors import UnsupportedError
from sinkscope.hooks.trace import trace
from sinkscope.measure import Mean, Result, Setup, mean_of, measurement
from sinkscope.models.arithmetic import without_autocast
from sinkscope.models.draws import draws
from sinkscope.models.target import Target
from sinkscope.models.text import beginning, text_rows
from sinkscope.results.notation import percent, word_list
from sinkscope.results.row import Row
from sinkscope.results.style import GREY, figure_of
from sinkscope.results.tables import Table, long_table
from sinkscope.sinks.spikes.find import sinks_of
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.spikes.survey import rows_at_once
from sinkscope.sinks.thresholds import HALF
from sinkscope.sinks.tokens import TokenRows, pick_tokens, prefix_of, repeated, repetition_limit, token_texts

CURVE_POINTS = 160  # numbers of repetitions on a curve, evenly spaced in their logarithm
SEQUENCES = 4  # sequences per pass
TAIL = 64  # tokens of natural text after the repetitions; their attention is read
SENTENCES = {
    "norm": "Half of the first token's spike is reached by {reached} within {copies:,} copies ({control} of it).",
    "attention": "{copies:,} copies of a token get {share} of the attention in layer {layer} ({control}).",
    "probability": "After {copies:,} copies of a token, it comes next with a probability of {share} ({control}).",
}
"""What is said of the last copy."""
Quantity = Literal["norm", "attention", "probability"]


@dataclass(frozen=True, kw_only=True)
class Repeat(Result):
    """One reading of a model over the number of repetitions of a token.

    Attributes:
        quantity: What was read. "norm": projection on the direction of each spike, as a share of the first token's;
            "attention": attention that the last 64 tokens, which are natural text, give to places, over what each place
            would get if all tokens got the same; "probability": probability that the token comes once more.
        copies: Number of copies of each token.
        effects: What the last copy has in each condition, or which share of the attention the copies get, mean over
            tokens; beside one copy at the position of the last, and other tokens there.
        ids: Ids of the repeated tokens.
        conditions: The spikes; of attention the sequences; of probabilities "intact".
        tokens: The repeated tokens; with "attention" the places.
        at: Numbers of repetitions; with "attention" layers.
        values: What was read. NaN where there is nothing to read.
        shown: Which of `at` the table and the effects are about.
        repeats: First number of repetitions that reaches half of the first token's projection; with "probability" the
            first from which on the probability stays below a half. NaN if never.
    """

    quantity: Quantity
    copies: int
    effects: tuple[Row, ...]
    ids: tuple[int, ...]
    conditions: tuple[str, ...]
    tokens: tuple[str, ...]
    at: Int[np.ndarray, " n"]
    values: Float[np.ndarray, "condition token n"]
    shown: int = -1
    repeats: Float[np.ndarray, "condition token"] | None = None

    def conclusion(self) -> str:
        """Say how many words converge in each spike, how much attention copies get, or how likely one more is."""
        effect = self.effects[0]
        reached: list[str] = []
        for condition, repeats in zip(self.conditions, () if self.repeats is None else self.repeats, strict=False):
            reached.append(f"{int((repeats > 1).sum())} of {len(self.tokens)} tokens in {condition}")
        control = f"{effect.note}: {percent(effect.get('control'))}"
        words = {"copies": self.copies, "layer": self.shown, "reached": word_list(reached)}
        return SENTENCES[self.quantity].format(**words, control=control, share=effect.numbers["share"])

    def rows(self) -> Table:
        """Return a row per condition and token."""
        columns = {self.quantity: self.values[:, :, self.shown], "repeats": self.repeats}
        return long_table(columns, condition=self.conditions, token=self.tokens)

    def figure(self) -> go.Figure:
        """Draw a line per token and a panel per condition."""
        x = "layer" if self.quantity == "attention" else "repetitions"
        conditions = [*map(escape, self.conditions)]
        axes: dict[str, Any] = {"condition": conditions, "token": [*map(escape, self.tokens)], x: self.at.tolist()}
        rows = long_table({self.quantity: self.values}, **axes)
        shown: dict[str, Any] = {"x": x, "y": self.quantity, "color": "token", "facet_col": "condition"}
        fig: Any = px.line(rows, render_mode="svg", **shown, log_x=x == "repetitions", log_y=x == "layer")
        fig.update_yaxes(exponentformat="power")
        if self.repeats is not None:
            fig.add_hline(HALF, line={"color": GREY, "dash": "dot"})
        return figure_of(fig, self, width=1200, height=480)


@measurement(loading="fits")
def repeat(
    setup: Setup,
    *,
    quantity: Quantity = "norm",
    tokens: Sequence[str] | None = None,
    max_repeats: Annotated[int, Field(ge=2)] | None = None,
) -> Repeat:
    """Measure what n repetitions of a token do to its norm, its attention or the next token's probability.

    One causal pass per token contains every number of repetitions. A sequence is BOS and the repetitions;
    without BOS, a word of the text that is not repeated stands first (Yona et al. 2025, Fig. 1, 2, 6
    and section 5). `patch` says what a patch changes.

    Args:
        quantity: What is read. "norm": projection of the repeated token on each spike of the first token; "attention"
            that copies and the sink receive; "probability" that the token comes once more.
        tokens: Words to repeat, each one token. By default five words of the text.
        max_repeats: Number of repetitions. By default 1,024, or what the context holds.

    Raises:
        UnsupportedError: There is no spike that copies could reach, or the model gives no logits.
    """
    target = setup.target
    words = pick_tokens(setup, tokens)
    # What stands before a text stands first. Any token in first place is marked, so it must not be a repeated one.
    before = [*beginning(setup.tokenizer, setup.bos)] or prefix_of(setup, words)
    count = repetition_limit(target, max_repeats, len(before) + (TAIL if quantity == "attention" else 0))
    setup.record(max_repeats=count)
    rows = repeated(before, words, count)
    about = {"quantity": quantity, "copies": count, "ids": tuple(words)}
    if quantity == "probability":
        return read_copies(setup, about, rows, ["intact"], partial(chances_of, target, words), stopped_after)
    sinks = sinks_of(setup)
    if quantity == "attention" and sinks.spikes:
        return read_attention(setup, about, rows, sinks.spikes[0].spike)
    spikes = [circuit.spike for circuit in sinks.at_first]
    if not spikes:
        raise UnsupportedError("the first token has no norm spike with which copies could be compared: see `why_sink`")
    names = [spike.name for spike in spikes]
    return read_copies(setup, about, rows, names, partial(along_spikes, target, spikes), half_reached)


# --- readings ---


def contrasts(setup: Setup, rows: TokenRows, count: int) -> tuple[TokenRows, TokenRows]:
    """Make two controls of equal length: ordinary tokens that end with one copy, and ordinary tokens alone."""
    ids = setup.ids[:, 1:].unique()
    others = rows.clone()
    ordinary = ids[~torch.isin(ids, rows[:, -1])]
    drawn = torch.randint(len(ordinary), (len(rows), count), generator=draws(setup.seed, "tokens beside copies"))
    others[:, -count:] = ordinary[drawn]
    return append_copy(others, rows), others


def append_copy(others: TokenRows, rows: TokenRows) -> TokenRows:
    """Put one copy after other tokens, at the position of the last copy of each row."""
    return torch.cat([others[:, :-1], rows[:, -1:]], 1)


def effect_of_copies(values: Float[Tensor, "kind token"], name: str, about: str, words: tuple[str, ...]) -> list[Row]:
    """Return what copies have, mean over tokens, beside the nearer of two controls, and the rows of both.

    Args:
        values: What copies have, and one copy at the position of the last, and other tokens there.
        name: What that is, in a few words.
        about: The spike or the condition.
        words: The tokens.
    """
    share = mean_of(values[0], "share")
    rows = list[Row]()
    for control, own in zip(("one copy", "other tokens"), values[1:].mean(1).tolist(), strict=True):
        rows.append(Row("controls", control, {"share": Mean(own, kind="share")}, name, about))
    assert share is not None
    nearest = min(rows, key=lambda row: abs(row.get("share") - share.value))
    numbers = {"share": share, "control": nearest.numbers["share"]}
    return [Row("findings", name, numbers, nearest.name, about, words), *rows]


def chances_of(target: Target, words: list[int], rows: TokenRows) -> list[Float[Tensor, "row pos"]]:
    """Read at each position of each row how likely a word is that is to come next, another word in each row."""

    def of_words(logits: Float[Tensor, "row pos vocab"]) -> Float[Tensor, "row pos word"]:
        return logits.float().softmax(-1)[..., words]

    return [trace(target, rows, ["logits"], of_words, batch_size=1)["logits"].diagonal(dim1=0, dim2=2).T]


def stopped_after(probability: Float[Tensor, " n"]) -> int | None:
    """Return the first n from which on the probability stays below a half; None if it does not, or never was above."""
    likely = (probability >= HALF).nonzero().flatten().tolist()
    if not likely or likely[-1] == len(probability) - 1:
        return None
    return likely[-1] + 2


def read_copies(
    setup: Setup,
    about: dict[str, Any],
    rows: TokenRows,
    conditions: Sequence[str],
    read: Callable[[TokenRows], list[Float[Tensor, "row pos"]]],
    turn: Callable[[Float[Tensor, " n"]], int | None],
) -> Repeat:
    """Read the copies, and what one copy and other tokens have at the position of the last.

    Args:
        setup: The model and its text.
        about: What is read, of which tokens, and how many copies.
        rows: The sequences, each of which repeats a token.
        conditions: Names of what is read.
        read: Reads sequences, in each condition.
        turn: The number of repetitions after which a token turns; None if it does not.
    """
    count: int = about["copies"]
    texts = token_texts(setup.target, about["ids"])
    values = torch.stack(read(rows))[..., -count:]
    effects: list[Row] = []
    setup.progress("repetitions", 1, 2)
    controls = [torch.stack(read(others))[..., -1] for others in contrasts(setup, rows, count)]
    last = torch.stack([values[..., -1], *controls])
    for number, condition in enumerate(conditions):
        name = f"{about['quantity']} with copies of a token"
        effects += effect_of_copies(last[:, number], name, condition, texts)
    counts = np.unique(np.geomspace(1, count, CURVE_POINTS).round().astype(int))
    return Repeat(
        **about,
        tokens=texts,
        conditions=tuple(conditions),
        effects=tuple(effects),
        at=counts,
        values=values[:, :, counts - 1].numpy(),
        repeats=np.array([[turn(row) for row in of_condition] for of_condition in values], dtype=float),
    )


def read_attention(setup: Setup, about: dict[str, Any], rows: TokenRows, spike: Spike) -> Repeat:
    """Measure the attention that natural text gives to the place of the spike, and to the copies before it.

    The effect is the share of all attention that the copies together get in the first layer whose heads can read the
    spike. Controls: the same positions of natural text that ends with one copy, and of natural text.

    Args:
        setup: The model and its text; the context has room for the tail.
        about: What is read, of which tokens, and how many copies.
        rows: The sequences, each of which repeats a token.
        spike: The spike.
    """
    target, place, (count, length) = setup.target, spike.place, rows.shape
    before = length - about["copies"]
    natural = text_rows(target.tokenizer, setup.halves.report, 1, length + TAIL, setup.bos)
    natural[:, :before] = rows[:1, :before]
    single, _ = contrasts(setup, rows, about["copies"])
    ids = torch.cat([natural[:, :-TAIL], rows, single])
    ids = torch.cat([ids, natural[:, -TAIL:].expand(len(ids), -1)], 1)
    there = torch.zeros_like(ids, dtype=torch.bool)
    there[:, before:-TAIL] = True
    keys = torch.stack([place.matches(ids) & ~there, there], 2).float()
    received = attention_from(target, ids, keys, length, target.forward).mean(-1) / TAIL  # row place layer
    visible = torch.arange(length, ids.shape[1])[:, None] + 1
    times = received / (keys.cumsum(1)[:, -TAIL:] / visible).mean(1)[..., None]
    parts = (1, count, count)
    layer = next((number for number in target.attending if number > spike.layers[0]), target.attending[-1])
    usual, copies, one_copy = received[:, 1, layer].split(parts)
    shares = torch.stack([copies, one_copy, usual.expand(count)])
    texts = token_texts(target, about["ids"])
    return Repeat(
        **about,
        effects=tuple(effect_of_copies(shares, "attention with copies of a token", spike.name, texts)),
        conditions=("natural text", "copies", "one copy"),
        values=torch.stack([part.mean(0) for part in times.split(parts)]).numpy(),
        tokens=(place.label.words, "the copies' positions"),
        at=np.arange(target.n_layers),
        shown=layer,
    )


@torch.no_grad()
def attention_from(
    target: Target,
    ids: TokenRows,
    keys: Float[Tensor, "row pos kind"],
    begin: int,
    run: Callable[[TokenRows], object],
) -> Float[Tensor, "row kind layer head"]:
    """Sum the attention from the positions from `begin` on to kinds of keys over these queries.

    NaN in layers without softmax attention.

    Args:
        target: The model.
        ids: The sequences.
        keys: Which positions belong to which kind; 1 or 0.
        begin: The first of the positions whose attention is read.
        run: Runs some of the sequences through the model.
    """
    received = torch.full((len(ids), keys.shape[2], target.n_layers, target.n_heads), torch.nan)
    received[:, :, target.attending] = 0
    for some in torch.arange(len(ids)).split(SEQUENCES):

        def add(rows: AttentionRows, some: Tensor = some) -> None:
            kinds = keys[some].to(rows.probs.device)
            with without_autocast(kinds.device):
                to_kinds = einsum(rows.probs, kinds, "row head query key, row key kind -> row kind head")
            received[some, :, rows.layer] += to_kinds.cpu()

        with attention_rows(target, add, begin=begin, at_once=False):
            run(ids[some])
    return received


# --- copies ---


@torch.no_grad()
def along_spikes(target: Target, spikes: Sequence[Spike], rows: TokenRows) -> list[Float[Tensor, "row pos"]]:
    """Project every position on each spike's direction after its peak, as a share of the spike."""

    def project(states: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos spike"]:
        return torch.stack([spike.along(states.float().cpu()) for spike in spikes], -1)

    sites = [f"blocks.{spike.peak}.hook_resid_post" for spike in spikes]
    along = trace(target, rows, sites, project, batch_size=rows_at_once(rows.shape[1], target.d_mlp))
    return [along[site][..., number] for number, site in enumerate(sites)]


def half_reached(along: Float[Tensor, " copy"]) -> int | None:
    """Return the first number of copies that reaches half of the first token's projection and stays there for the next.

    None: no number does.
    """
    reaches = along >= HALF
    reaches[:-1] &= reaches[1:].clone()
    reached = reaches.nonzero().flatten()
    return int(reached[0]) + 1 if len(reached) else None


def copies_of(
    target: Target, spikes: Sequence[Spike], tokens: Sequence[int], before: Sequence[int], limit: int
) -> list[list[int | None]]:
    """Return the first number of copies of each token that reaches half of each spike; None: no number does.

    Args:
        target: The model.
        spikes: Spikes of the first token.
        tokens: Ids of the tokens.
        before: What stands before the copies; copies are compared with its first token.
        limit: Largest number of copies.
    """
    each = along_spikes(target, spikes, repeated(before, tokens, limit))
    return [[half_reached(row[len(before) :] / row[0]) for row in along] for along in each]
