"""How much attention copies of a token, and the first token of a text, get from the text behind (Fig. 1, Fig. 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from plotly.subplots import make_subplots
from torch import Tensor

from experiments.papers.repeated_token.circuit import Word, first_tokens
from sinkscope.engine.attention import AttentionRows
from sinkscope.engine.tap import attention_rows
from sinkscope.errors import SinkscopeError
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, mean_of, measurement
from sinkscope.models.inputs import check_length
from sinkscope.models.layers import layer_window
from sinkscope.models.text import kind_rows, text_rows
from sinkscope.results.style import COLOURS, GREY, figure_of
from sinkscope.sinks.spikes.find import spike_of

BEFORE = 1  # BOS before the copies; without BOS, a token of text
BEHIND = 64  # tokens of text behind them, whose attention is read
TEXTS = 4  # one of each kind
LEAST = 1e-5  # attention that is drawn
WORDS = ("the", " poem", " company")
"""The paper's word, and two others."""


@dataclass(frozen=True)
class Read:
    """A word and the layer that reads its copies."""

    word: Word
    layer: int

    def __str__(self) -> str:
        return f"layer {self.layer}"


@dataclass(frozen=True, kw_only=True)
class Received(
    Row,
    table="received",
    title="attention of the text behind",
    note="Mean over heads and the 64 tokens behind the copies, with the margin over texts of four kinds. The control "
    "has prose in the place of copies.",
):
    """Attention to the copies of one word, beside that to the text in their place and to its first token."""

    key: Read
    copies: Mean = column("all\ncopies", "share", "Attention to all copies together.")
    control: Mean = column("control: text\nin their place", "share", "Attention to these positions in natural text.")
    largest: Mean = column("the copy that\ngets most", "fine_share", "Attention to a single copy, the largest.")
    first: Mean = column("first token\nof text", "fine_share", "Attention to the first token, without copies.")

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        return f"copies of {self.key.word}"


@dataclass(frozen=True, kw_only=True)
class Attention(Result):
    """Attention by position at chosen layers: in text with copies of each word, and in natural text.

    Attributes:
        received: A row for each word and layer.
        layers: The layers.
        curves: Attention to each position before the last tokens, of each word and last of natural text.
        copies: Number of copies.
    """

    received: tuple[Received, ...]
    layers: tuple[int, ...]
    curves: Float[np.ndarray, "condition layer pos"]
    copies: int

    def conclusion(self) -> str:
        """Return what copies of the first word receive in the first layer, beside text in their place and the sink."""
        row = self.received[0]
        more = sum(row.copies.value > row.control.value for row in self.received)
        return (
            f"In {row.label}, the first behind the spike, {self.copies:,} copies of {row.key.word} get "
            f"{row.text('copies')} of the attention of the text behind (as a control, text in their place: "
            f"{row.text('control')}); of all words and layers copies get more in {more} of {len(self.received)}. There "
            f"the copy that gets most has {row.text('largest')}, and the first token of natural text "
            f"{row.text('first')}."
        )

    def figure(self) -> Any:
        """Draw the attention to each position: copies above, natural text below, a column for each layer."""
        words = [row.key.word.text for row in self.received if row.key.layer == self.layers[0]]
        titles = [f"layer {layer}" for layer in self.layers]
        fig: Any = make_subplots(
            2, len(titles), subplot_titles=titles, shared_xaxes=True, shared_yaxes=True, vertical_spacing=0.06
        )
        styles = [*zip([f"copies of {word!r}" for word in words], COLOURS, strict=False), ("natural text", GREY)]
        for (name, colour), of_layers in zip(styles, self.curves, strict=True):
            for at, curve in enumerate(of_layers):
                place = {"row": 2 if colour == GREY else 1, "col": at + 1}
                fig.add_scatter(y=curve, name=name, line={"color": colour}, showlegend=at == 0, **place)
        fig.update_yaxes(type="log", exponentformat="power", dtick=1, range=[np.log10(LEAST), 0.2])
        fig.update_xaxes(range=[-0.03 * self.copies, 1.03 * self.copies])
        fig.update_yaxes(title_text="attention received", col=1)
        fig.update_xaxes(title_text="position", row=2)
        return figure_of(fig, self, width=1100, height=620, legend=-0.13)


@measurement(loading="fits")
def attention(setup: Setup, *, words: Sequence[str] = WORDS, copies: Natural = 1000) -> Attention:
    """Read the attention that text gives to copies before it, at the layers behind the spike.

    Args:
        words: The words; of each, its first token.
        copies: Number of copies.
    """
    if len({*words}) < len(words) or len(words) > len(COLOURS):
        raise SinkscopeError(f"--words has {len(words)} words: give at most {len(COLOURS)}, each once")
    length = BEFORE + copies + BEHIND
    check_length(setup.target, f"a text of --copies {copies} and {BEFORE + BEHIND} tokens around them", length)
    text = texts_of(setup, length)
    layers = layers_behind(setup)
    read: list[Float[Tensor, "text layer pos"]] = []
    for token in first_tokens(setup, words):
        rows = text.clone()
        rows[:, BEFORE:-BEHIND] = token
        read.append(received_at(setup, rows, layers))
        setup.progress("words", len(read), len(words) + 1)
    natural = received_at(setup, text, layers)
    made: list[Received] = []
    for word, received in zip(words, read, strict=True):
        for at, layer in enumerate(layers):
            of_copies, of_text = received[:, at, BEFORE:], natural[:, at, BEFORE:]
            numbers = {
                "copies": of_copies.sum(-1),
                "control": of_text.sum(-1),
                "largest": of_copies.amax(-1),
                "first": natural[:, at, 0],
            }
            means = {name: mean_of(values) or Mean(0.0) for name, values in numbers.items()}
            made.append(Received(key=Read(Word(word), layer), **means))
    curves = torch.stack([*read, natural]).mean(1).double().numpy().round(6)
    return Attention(received=tuple(made), layers=tuple(layers), curves=curves, copies=copies)


def texts_of(setup: Setup, length: int) -> Int[Tensor, "text pos"]:
    """Return texts on which nothing was chosen: the user's, or prose with a text of each kind behind it."""
    text = text_rows(setup.tokenizer, setup.halves.report, TEXTS, length, setup.bos)
    if not setup.own_text:
        around = kind_rows(setup.tokenizer, "report", len(text), BEFORE + BEHIND, setup.bos)
        text[:, :BEFORE], text[:, -BEHIND:] = around[:, :BEFORE], around[:, BEFORE:]
    return text


def layers_behind(setup: Setup) -> list[int]:
    """Return the two layers behind where the first token's spike begins, the middle one, and the last, as the paper.

    Where some layers see the whole text, those with a sliding window are left out: they do not see the first token.
    """
    circuit = spike_of(setup)
    begin = 0 if circuit is None else circuit.spike.layers[0]
    attending = setup.target.attending
    behind = [layer for layer in attending if layer > begin] or attending[-1:]
    behind = [layer for layer in behind if layer_window(setup.target.config, layer) is None] or behind
    return sorted({*behind[:2], behind[len(behind) // 2], behind[-1]})


@torch.no_grad()
def received_at(setup: Setup, rows: Int[Tensor, "text pos"], layers: Sequence[int]) -> Float[Tensor, "text layer pos"]:
    """Return the attention of the last tokens to each position before them, mean over heads and these tokens.

    Args:
        setup: The model.
        rows: The texts.
        layers: The layers.
    """
    begin = rows.shape[1] - BEHIND
    received = torch.zeros(len(rows), len(layers), begin)
    for number in range(len(rows)):

        def add(shown: AttentionRows, number: int = number) -> None:
            received[number, layers.index(shown.layer)] += shown.probs[0, :, :, :begin].sum((0, 1)).cpu()

        with attention_rows(setup.target, add, layers=[*layers], begin=begin, at_once=False):
            setup.target.forward(rows[number : number + 1])
    return received / (BEHIND * setup.target.n_heads)
