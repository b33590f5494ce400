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
from sinkscope.results.headline import Headline, Verdict, verdict_of
from sinkscope.results.notation import word_list
from sinkscope.results.style import GREY, figure_of
from sinkscope.results.table import Row, Subject, whole
from sinkscope.sinks.repeat_tables import (
    AtLastCopy,
    CopiesKey,
    Filled,
    Given,
    GivenKey,
    LikelyToken,
    Places,
    RepeatedToken,
    Text,
    TokenKey,
)
from sinkscope.sinks.spikes.find import sinks_of
from sinkscope.sinks.spikes.spike import Spike, layers_words
from sinkscope.sinks.spikes.survey import rows_at_once
from sinkscope.sinks.thresholds import HALF
from sinkscope.sinks.tokens import TokenRows, pick_tokens, prefix_of, repeated, repetition_limit, token_texts

CURVE_POINTS = 160  # numbers of repetitions on a curve, evenly spaced in their logarithm
SEQUENCES = 4  # sequences per pass
TAIL = 64  # tokens of natural text after the repetitions; their attention is read
Quantity = Literal["norm", "attention", "probability"]


@dataclass(frozen=True, kw_only=True)
class Repeat(Result):
    """One reading of a model over the number of repetitions of a token.

    Attributes:
        quantity: What was read. "norm": projection on the direction of each spike, as a share of the first token's;
            "attention": attention that the last 64 tokens, which are natural text, give to places, over what each place
            would get if all tokens got the same; "probability": probability that the token comes once more.
        copies: Number of copies of each token.
        effects: What the last copy has in each spike, or which share of the attention the copies get, mean over
            tokens; beside one copy at the position of the last, and other tokens there.
        ids: Ids of the repeated tokens.
        conditions: The spikes; of attention the sequences; of probabilities "intact".
        tokens: The repeated tokens; with "attention" the places.
        at: Numbers of repetitions; with "attention" layers.
        values: What was read. NaN where there is nothing to read.
        shown: Which of `at` the table and the effects are about.
        repeats: First number of repetitions that reaches half of the first token's projection; with "probability" the
            first from which on the probability stays below a half. NaN if never.
        spikes: Layers of the spikes; empty with "probability".
        below_again: First number of repetitions after that which has less than half again. NaN if none has.
    """

    quantity: Quantity
    copies: int
    effects: tuple[AtLastCopy, ...]
    ids: tuple[int, ...]
    conditions: tuple[str, ...]
    tokens: tuple[str, ...]
    at: Int[np.ndarray, " n"]
    values: Float[np.ndarray, "condition token n"]
    shown: int = -1
    repeats: Float[np.ndarray, "condition token"] | None = None
    spikes: tuple[tuple[int, int], ...] = ()
    below_again: Float[np.ndarray, "condition token"] | None = None

    def effect(self, filled: Filled, layers: tuple[int, int] | None) -> AtLastCopy:
        """Return what is read of a spike after copies, or after what a control has instead."""
        return next(row for row in self.effects if (row.key, row.layers) == (filled, layers))

    def copies_shown(self) -> AtLastCopy:
        """Return what the last copy has of the spike that most tokens reach; of several, the first."""
        shown = self.effects[0]
        for row in self.effects:
            if row.key is Filled.COPIES and len(self.reaching(row.layers)) > len(self.reaching(shown.layers)):
                shown = row
        return shown

    def nearest_control(self) -> tuple[AtLastCopy, AtLastCopy]:
        """Return what the last copy has, and the control that comes nearest to it in the same spike."""
        copies = self.copies_shown()
        controls = [self.effect(filled, copies.layers) for filled in (Filled.ONE_COPY, Filled.OTHERS)]
        return copies, min(controls, key=lambda row: abs(copies.share.value - row.share.value))

    def verdict(self) -> Verdict:
        """Return whether the last copy has more than what the nearest control has."""
        copies, control = self.nearest_control()
        return verdict_of(copies.share.value, control.share.value, copies.share.margin)

    def conclusion(self) -> str:
        """Say how many tokens reach a spike, how much attention copies get, or from where on one more is unlikely."""
        copies, control = self.nearest_control()
        beside = f"as a control, after {control.label}: {control.text('share')}"
        not_shown = self.verdict() is Verdict.NOT_SHOWN
        match self.quantity:
            case "norm":
                begin = "Not shown to come of repetition: " if not_shown and self.reaching(copies.layers) else ""
                words = self.reached_words()
                words = f"{begin}{words[0].lower()}{words[1:]}" if begin else words
                of_several = f"In {layers_words(*copies.layers)} the" if copies.layers and self.spikes[1:] else "The"
                return f"{words} {of_several} last copy has {copies.text('share')} of it on average ({beside})."
            case "attention":
                begin = "Not shown to come of repetition: " if not_shown else ""
                return (
                    f"{begin}{self.copies:,} copies of a token get {copies.text('share')} of the attention of later "
                    f"text in layer {self.shown} ({beside})."
                )
            case "probability":
                return f"{self.stopped_words()} After {self.copies:,} copies it is {copies.text('share')} ({beside})."

    def stopped_words(self) -> str:
        """Return from how many copies on one more is unlikely, and for how many tokens."""
        counts = self.stopping()
        begin = "The probability that a token comes once more falls below 50% and stays there"
        tokens = f"for {len(counts)} of {len(self.ids)} tokens"
        if not counts:
            return f"{begin} {tokens} within {self.copies:,} copies."
        first, last = min(counts), max(counts)
        span = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        return f"{begin} {tokens}, from {span} copies on."

    def stopping(self) -> list[int]:
        """Return the numbers of copies from which on one more is unlikely, of the tokens that stop."""
        rows = [row for row in self.by_token() if isinstance(row, LikelyToken)]
        return [int(row.repeats.value) for row in rows if row.repeats is not None]

    def reaching(self, layers: tuple[int, int] | None) -> list[RepeatedToken]:
        """Return the tokens whose copies reach half of a spike that the first of them has not."""
        rows = [row for row in self.by_token() if isinstance(row, RepeatedToken) and row.key.layers == layers]
        return [row for row in rows if row.apart is None and row.repeats is not None]

    def reached_words(self) -> str:
        """Return how many tokens reach half of each spike, which have it at once, and which fall below it again."""
        reached: list[str] = []
        for layers in self.spikes:
            tokens = [row for row in self.by_token() if isinstance(row, RepeatedToken) and row.key.layers == layers]
            counted = self.reaching(layers)
            words = f"{len(counted)} of {len(tokens)} tokens in {layers_words(*layers)}"
            apart = sum(row.apart is not None for row in tokens)
            again = sum(row.below is not None for row in counted)
            more: list[str] = []
            if again:
                more.append(f"{again} of them fall{'s' * (again == 1)} below it again")
            if apart:
                more.append(f"{apart} more ha{'s' if apart == 1 else 've'} it with the first copy")
            reached.append(f"{words} ({'; '.join(more)})" if more else words)
        return (
            f"Within {self.copies:,} copies, half of the first token's norm spike is reached by {word_list(reached)}."
        )

    def by_token(self) -> list[Row]:
        """Return what each token does, in each spike; nothing where attention is read."""
        rows: list[Row] = []
        if self.repeats is None:
            return rows
        for number, repeats in enumerate(self.repeats):
            layers = self.spikes[number] if self.spikes else None
            for token, reached in enumerate(repeats.tolist()):
                first, last = (Mean(float(self.values[number, token, at])) for at in (0, -1))
                key = TokenKey(self.tokens[token], layers)
                count = whole(int(reached)) if np.isfinite(reached) else None
                if layers is None:
                    rows.append(LikelyToken(key=key, first=first, last=last, repeats=count))
                    continue
                below = np.nan if self.below_again is None else self.below_again[number, token]
                rows.append(
                    RepeatedToken(
                        key=key,
                        first=first,
                        last=last,
                        repeats=None if first.value >= HALF else count,
                        below=whole(int(below)) if np.isfinite(below) else None,
                        apart="first copy" if first.value >= HALF else None,
                    )
                )
        return rows

    def given(self) -> list[Given]:
        """Return the attention that later text gives in the layer that is shown; nothing of other quantities."""
        rows: list[Given] = []
        if self.quantity != "attention":
            return rows
        for number, text in enumerate(Text):
            for place, places in enumerate(Places):
                times = Mean(float(self.values[number, place, self.shown]))
                rows.append(Given(key=GivenKey(text, places), times=times))
        return rows

    def subjects(self) -> list[Subject]:
        """Return what the last copy has beside its controls, and what each token does."""
        titles = {
            "norm": "% of the first token's norm spike",
            "attention": f"Share of the attention of later text, layer {self.shown}",
            "probability": "Probability that the token comes once more",
        }
        title = f"{titles[self.quantity]}; {self.copies:,} copies of each of {len(self.ids)} tokens"
        return [Subject(title, (*self.effects, *self.by_token(), *self.given()), "repeat")]

    def compared(self) -> list[Subject]:
        """Return a subject for each spike, by which those of two models are paired."""
        subjects: list[Subject] = []
        for layers in dict.fromkeys(row.layers for row in self.effects):
            effects = [row for row in self.effects if row.layers == layers]
            tokens = [row for row in self.by_token() if row.key.layers == layers]
            key = CopiesKey(layers)
            names = self.tokens if self.quantity != "attention" else ()
            subjects.append(Subject(str(key), (*effects, *tokens, *self.given()), key, names))
        return subjects

    def headlines(self) -> list[Headline]:
        """Return what the last copy has beside the nearest control; that tokens stop has none."""
        if self.quantity == "probability":
            found = f"below 50% for {len(self.stopping())} of {len(self.ids)} tokens"
            return [Headline("one more copy", found, "none", Verdict.NO_CONTROL)]
        copies, control = self.nearest_control()
        words = {"norm": "spike of the last copy", "attention": "attention on copies"}
        beside = f"{control.text('share', margin=False)} (no copies)"
        return [Headline(words[self.quantity], copies.text("share"), beside, self.verdict())]

    def figure(self) -> go.Figure:
        """Draw a line per token and a panel per condition."""
        x = "layer" if self.quantity == "attention" else "repetitions"
        conditions = [*map(escape, self.conditions)]
        rows: list[dict[str, Any]] = []
        for condition, token, number in np.ndindex(self.values.shape):
            about = {"condition": conditions[condition], "token": escape(self.tokens[token])}
            rows.append({**about, x: int(self.at[number]), self.quantity: self.values[condition, token, number]})
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
    """Measure what repeating a token does to its norm, to attention, or to the probability that it comes again.

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
    layers = [spike.layers for spike in spikes]
    return read_copies(setup, about, rows, names, partial(along_spikes, target, spikes), half_reached, layers)


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


def effect_of_copies(values: Float[Tensor, "kind token"], layers: tuple[int, int] | None) -> list[AtLastCopy]:
    """Return what copies have, mean over tokens, and the two controls.

    Args:
        values: What copies have, and one copy at the position of the last, and other tokens there.
        layers: The spike. None: it is about no spike.
    """
    share = mean_of(values[0])
    assert share is not None
    rows = [AtLastCopy(key=Filled.COPIES, layers=layers, share=share)]
    for filled, of_control in zip((Filled.ONE_COPY, Filled.OTHERS), values[1:].mean(1).tolist(), strict=True):
        rows.append(AtLastCopy(key=filled, layers=layers, share=Mean(of_control)))
    return rows


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
    spikes: Sequence[tuple[int, int]] = (),
) -> Repeat:
    """Read the copies, and what one copy and other tokens have at the position of the last.

    Args:
        setup: The model and its text.
        about: What is read, of which tokens, and how many copies.
        rows: The sequences, each of which repeats a token.
        conditions: Names of what is read.
        read: Reads sequences, in each condition.
        turn: The number of repetitions after which a token turns; None if it does not.
        spikes: The layers of the spikes that are read; none of probabilities.
    """
    count: int = about["copies"]
    texts = token_texts(setup.target, about["ids"])
    values = torch.stack(read(rows))[..., -count:]
    effects: list[AtLastCopy] = []
    setup.progress("repetitions", 1, 2)
    controls = [torch.stack(read(others))[..., -1] for others in contrasts(setup, rows, count)]
    last = torch.stack([values[..., -1], *controls])
    for number in range(len(conditions)):
        effects += effect_of_copies(last[:, number], spikes[number] if spikes else None)
    counts = np.unique(np.geomspace(1, count, CURVE_POINTS).round().astype(int))
    return Repeat(
        **about,
        tokens=texts,
        conditions=tuple(conditions),
        effects=tuple(effects),
        at=counts,
        values=values[:, :, counts - 1].numpy(),
        repeats=np.array([[turn(row) for row in of_condition] for of_condition in values], dtype=float),
        spikes=tuple(spikes),
        below_again=np.array(
            [[below_again(row) for row in of_spike] for of_spike in values[: len(spikes)]], dtype=float
        )
        if spikes
        else None,
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
    return Repeat(
        **about,
        effects=tuple(effect_of_copies(shares, spike.layers)),
        spikes=(spike.layers,),
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


def below_again(along: Float[Tensor, " copy"]) -> int | None:
    """Return the first number of copies with less than half of the spike after half was reached; None: none has."""
    reached = half_reached(along)
    if reached is None:
        return None
    below = (along[reached:] < HALF).nonzero().flatten()
    return reached + int(below[0]) + 1 if len(below) else None


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
