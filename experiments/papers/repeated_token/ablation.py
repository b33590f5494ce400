"""What zeroing the sink neurons does to the norm of BOS and of repeated tokens (Fig. 3, Fig. 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from plotly.subplots import make_subplots

from experiments.papers.repeated_token.circuit import NO_CONTROL, PAPERS_WORDS, first_tokens, norms, sink_neurons_of
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, mean_of, measurement, optional
from sinkscope.results.notation import word_list
from sinkscope.results.style import COLOURS, figure_of


@dataclass(frozen=True)
class Input:
    """What is read: one word many times, or the words one after the other, many times."""

    words: str

    def __str__(self) -> str:
        return self.words


BOS = Input("BOS")
CYCLE = Input("the words in turn")


@dataclass(frozen=True, kw_only=True)
class Ablated(
    Row,
    table="norms",
    title="norm, % of that of BOS",
    note="After the layer in which the spike is largest; of copies, the mean over the last tenth of the sequence. "
    "Neurons are zeroed at all positions.",
):
    """Norms of one sequence, over the norm of BOS in the model as it is."""

    key: Input

    intact: Mean = column("model\nas it is", "share", "Norm over that of BOS.")
    ablated: Mean = column("sink neurons\nzeroed", "share", "The same with the sink neurons zeroed.")
    control: Mean | None = optional("control:\nothers zeroed", "share", "The same with other neurons zeroed.")


@dataclass(frozen=True, kw_only=True)
class Ablation(Result):
    """Norms of BOS and of copies with and without the sink neurons, over that of BOS.

    Attributes:
        norms: A row for BOS, for each word and for all in turn.
        neurons: The sink neurons.
        others: The control, in words; empty if there is none that writes enough.
        curves: Norm at each position of the sequence that grew most: as it is, sink neurons zeroed, others zeroed.
    """

    norms: tuple[Ablated, ...]
    neurons: tuple[str, ...]
    others: str
    curves: Float[np.ndarray, "condition pos"]

    def conclusion(self) -> str:
        """Return what is left of BOS and of the word that grew most, beside the control."""
        bos, *copies = self.norms
        most = max(copies, key=lambda row: row.intact.value)
        control = NO_CONTROL
        if self.others and bos.control is not None:
            control = f"As a control, zeroing {self.others}, leaves {bos.text('control')} and {most.text('control')}."
        return (
            f"Zeroing {word_list(self.neurons, 3)} leaves {bos.text('ablated')} of the norm of BOS, and of copies of "
            f"{most.label}, which have {most.text('intact')} of it, {most.text('ablated')}. {control}"
        )

    def figure(self) -> Any:
        """Draw the norm at each position of the sequence that grew most, as the paper's Fig. 3."""
        fig: Any = make_subplots(subplot_titles=["norm at each position of the sequence that grew most"])
        names = ("as it is", "sink neurons zeroed", "others zeroed")
        dashes = ("solid", "solid", "dash")  # the last lies on the first where the control does nothing
        for name, curve, colour, dash in zip(names, self.curves, COLOURS, dashes, strict=False):
            fig.add_scatter(y=curve, name=name, line={"color": colour, "dash": dash})
        fig.update_xaxes(title_text="position")
        fig.update_yaxes(type="log", title_text="norm")
        return figure_of(fig, self, width=900, height=460)


@measurement(loading="whole")
def ablation(setup: Setup, *, words: Sequence[str] = PAPERS_WORDS, copies: Natural = 1200) -> Ablation:
    """Read the norm of BOS and of repeated tokens with and without the sink neurons.

    Args:
        words: The words; of each, its first token.
        copies: Tokens of a sequence behind BOS.
    """
    sinks = sink_neurons_of(setup)
    ids = first_tokens(setup, words)
    begin = [] if setup.bos is None else [setup.bos]
    copies = min(copies, (setup.target.max_positions or copies + 1) - len(begin))
    setup.record(copies=copies)
    rows = torch.cat([ids[:, None].expand(-1, copies), ids.repeat(copies // len(ids) + 1)[None, :copies]])
    rows = torch.cat([torch.tensor(begin, dtype=rows.dtype).expand(len(rows), -1), rows], 1)
    read = [norms(setup, rows, sinks.site, edit) for edit in (None, sinks.ablated)]
    if sinks.control_ablated is not None:
        read.append(norms(setup, rows, sinks.site, sinks.control_ablated))
    whole = read[0][:, 0].mean()
    last = max(1, copies // 10)
    made: list[Ablated] = []
    shares = {BOS: [by_row[:, 0].mean()[None] / whole for by_row in read]}
    for at, key in enumerate([*(Input(repr(word)) for word in words), CYCLE]):
        shares[key] = [by_row[at, -last:].mean()[None] / whole for by_row in read]
    for key, values in shares.items():
        means = [mean_of(value) or Mean(0.0) for value in values]
        made.append(Ablated(key=key, intact=means[0], ablated=means[1], control=means[2] if len(means) > 2 else None))
    grown = int(read[0][:, -last:].mean(1).argmax())
    curves = np.stack([by_row[grown].numpy() for by_row in read])
    return Ablation(
        norms=tuple(made), neurons=tuple(map(str, sinks.neurons)), others=sinks.control_words, curves=curves
    )
