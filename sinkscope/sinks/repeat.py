"""What n repetitions of a token do to a model (Yona et al. 2025, Fig. 1 to 9).

1. A sequence is what texts begin with, and one token n times. One causal pass has every n.
2. Norm: each copy on the direction of each spike of the first token. Attention: what text after the copies gives to
   them. Probability: that the token comes once more.
3. Two controls at the position of the last copy: one copy after ordinary tokens, and ordinary tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from sinkscope.engine.attention import AttentionRows
from sinkscope.engine.tap import attention_rows
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.hooks.trace import trace
from sinkscope.measure import Mean, Setup, mean_of, measurement
from sinkscope.models.arithmetic import without_autocast
from sinkscope.models.draws import draws
from sinkscope.models.target import Target
from sinkscope.models.text import beginning, text_rows
from sinkscope.sinks.repeat_result import Quantity, Repeat
from sinkscope.sinks.repeat_tables import AtLastCopy, Filled
from sinkscope.sinks.spikes.find import sinks_of
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.spikes.survey import rows_at_once
from sinkscope.sinks.thresholds import HALF
from sinkscope.sinks.tokens import TokenRows, pick_tokens, prefix_of, repeated, repetition_limit, token_texts

CURVE_POINTS = 160  # numbers of repetitions on a curve, evenly spaced in their logarithm
SEQUENCES = 4  # sequences per pass
TAIL = 64  # tokens of natural text after the repetitions; their attention is read


def refuse_all(*, tokens: Sequence[str] | None, **_: Any) -> None:
    """Refuse the word "all" alone, by which one may mean the vocabulary."""
    if tokens is not None and [*tokens] == ["all"]:
        raise SinkscopeError(
            "--tokens all is one word, and not the vocabulary: give words, with commas between them, or ' all' (with "
            "its space) to repeat that word"
        )


@measurement(loading="fits", check=refuse_all)
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
    other_tokens = rows.clone()
    ordinary = ids[~torch.isin(ids, rows[:, -1])]
    drawn = torch.randint(len(ordinary), (len(rows), count), generator=draws(setup.seed, "tokens beside copies"))
    other_tokens[:, -count:] = ordinary[drawn]
    return append_copy(other_tokens, rows), other_tokens


def append_copy(other_tokens: TokenRows, rows: TokenRows) -> TokenRows:
    """Put one copy after other tokens, at the position of the last copy of each row."""
    return torch.cat([other_tokens[:, :-1], rows[:, -1:]], 1)


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
    controls = [torch.stack(read(control))[..., -1] for control in contrasts(setup, rows, count)]
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
    target = setup.target
    count, length = rows.shape
    ids, at_copies = texts_after_copies(setup, rows, about["copies"])
    keys = torch.stack([spike.place.matches(ids) & ~at_copies, at_copies], 2).float()
    received = attention_from(target, ids, keys, length, target.forward).mean(-1) / TAIL  # row place layer
    visible = torch.arange(length, ids.shape[1])[:, None] + 1
    times = received / (keys.cumsum(1)[:, -TAIL:] / visible).mean(1)[..., None]
    n_rows = (1, count, count)  # of natural text, of copies, of one copy
    layer = next((number for number in target.attending if number > spike.layers[0]), target.attending[-1])
    natural, copies, one_copy = received[:, 1, layer].split(n_rows)
    shares = torch.stack([copies, one_copy, natural.expand(count)])
    return Repeat(
        **about,
        effects=tuple(effect_of_copies(shares, spike.layers)),
        spikes=(spike.layers,),
        conditions=("natural text", "copies", "one copy"),
        values=torch.stack([part.mean(0) for part in times.split(n_rows)]).numpy(),
        tokens=(spike.place.label.words, "the copies' positions"),
        at=np.arange(target.n_layers),
        shown=layer,
    )


def texts_after_copies(
    setup: Setup, rows: TokenRows, n_copies: int
) -> tuple[Int[Tensor, "sequence column"], Bool[Tensor, "sequence column"]]:
    """Put the same natural text after natural text, after the copies of each token, and after one copy of each.

    Args:
        setup: The model and its text.
        rows: The sequences, each of which repeats a token.
        n_copies: Number of copies at their ends.

    Returns:
        The texts, in this order; and where the copies stand, or what is there instead.
    """
    length = rows.shape[1]
    before = length - n_copies
    natural = text_rows(setup.tokenizer, setup.halves.report, 1, length + TAIL, setup.bos)
    natural[:, :before] = rows[:1, :before]
    one_copy, _ = contrasts(setup, rows, n_copies)
    ids = torch.cat([natural[:, :-TAIL], rows, one_copy])
    ids = torch.cat([ids, natural[:, -TAIL:].expand(len(ids), -1)], 1)
    at_copies = torch.zeros_like(ids, dtype=torch.bool)
    at_copies[:, before:-TAIL] = True
    return ids, at_copies


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
    for row_numbers in torch.arange(len(ids)).split(SEQUENCES):

        def add(rows: AttentionRows, row_numbers: Tensor = row_numbers) -> None:
            kinds = keys[row_numbers].to(rows.probs.device)
            with without_autocast(kinds.device):
                to_kinds = einsum(rows.probs, kinds, "row head query key, row key kind -> row kind head")
            received[row_numbers, :, rows.layer] += to_kinds.cpu()

        with attention_rows(target, add, begin=begin, at_once=False):
            run(ids[row_numbers])
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
    along_of_spikes = along_spikes(target, spikes, repeated(before, tokens, limit))
    return [[half_reached(row[len(before) :] / row[0]) for row in along] for along in along_of_spikes]
