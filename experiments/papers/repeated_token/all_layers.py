"""How far copies of a token are from the token alone after each layer, and how that falls (Theorem D.2, Lemma D.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int

from experiments.papers.repeated_token.circuit import first_tokens
from experiments.papers.repeated_token.first_attention import PREFIX
from sinkscope.errors import SinkscopeError
from sinkscope.hooks.trace import trace
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, mean_of, measurement, optional
from sinkscope.models.inputs import check_length
from sinkscope.results.style import COLOURS, GREY, figure_of

FEWEST = 20  # copies; from a tenth of them on the exponent is fitted
POINTS = 60  # of a curve
DRAWN = 6  # layers
LEAST = 1e-5  # distance from which on it is no rounding: behind a sliding window nothing is left of the prefix


@dataclass(frozen=True, kw_only=True)
class AfterLayer(
    Row,
    table="layers",
    title="copies and the word alone, after layer",
    note="Norm of the difference of the residual stream, over that at the word alone; mean over words, with margins. "
    "Exponent: the slope of the logarithms from a tenth of the copies on; the paper's proof gives -1 or less. Behind a "
    "norm spike every word alone has the same spike, so that other words are near.",
    most=64,
):
    """The distance after one layer."""

    key: int
    first: Mean = column("first copy", "share", "The distance at the first copy.")
    last: Mean = column("last copy", "share", "The distance at the last copy.")
    control: Mean = column("control:\nother words", "share", "The same between the words alone.")
    exponent: Mean | None = optional("exponent", "number", "Slope of log distance over log number of copies.")


@dataclass(frozen=True, kw_only=True)
class AllLayers(Result):
    """Distance of copies to the word alone after each layer.

    Attributes:
        layers: A row for each layer.
        at: Numbers of copies.
        curves: The distance there, mean over words.
        copies: The largest number of copies.
    """

    layers: tuple[AfterLayer, ...]
    at: tuple[int, ...]
    curves: Float[np.ndarray, "layer copy"]
    copies: int

    def conclusion(self) -> str:
        """Return the distance after the first and the farthest layer, and how many layers are nearer than others."""
        first, far = self.layers[0], max(self.layers, key=lambda row: row.last.value)
        exponents = " and ".join(row.text("exponent") for row in (first, far) if row.exponent is not None)
        nearer = sum(row.last.value < row.control.value for row in self.layers)
        return (
            f"At copy {self.copies:,} the distance to the word alone is {first.text('last')} of its norm after layer "
            f"0, at most {far.text('last')} (layer {far.key}), and falls with exponents of {exponents or 'no size'}. "
            f"As a control, other words alone are farther than that copy after {nearer} "
            f"of {len(self.layers)} layers."
        )

    def figure(self) -> Any:
        """Draw the distance over the number of copies after some layers, and a line that falls as the proof's bound."""
        fig: Any = go.Figure()
        chosen = np.unique(np.linspace(0, len(self.layers) - 1, DRAWN).round().astype(int))
        for layer, colour in zip(chosen, COLOURS, strict=False):
            fig.add_scatter(x=self.at, y=self.curves[layer], name=f"layer {layer}", line={"color": colour})
        bound = self.curves[0][0] / np.array(self.at)
        fig.add_scatter(x=self.at, y=bound, name="1 / copies", line={"color": GREY, "dash": "dash"})
        fig.update_xaxes(type="log", dtick=1, title_text="copies")
        fig.update_yaxes(type="log", dtick=1, exponentformat="power", title_text="distance over norm")
        return figure_of(fig, self, width=900, height=520)


@measurement(loading="fits")
def all_layers(
    setup: Setup, *, words: Sequence[str] = ("cat", "dog", "the", "bla"), copies: Natural = 1000
) -> AllLayers:
    """Compare the residual stream after each layer at copies behind BOS and a prefix with that at the word alone.

    Args:
        words: The words; of each, its first token.
        copies: Number of copies.
    """
    if len({*words}) < 2 or copies < FEWEST:
        raise SinkscopeError(
            f"{len({*words})} words and {copies} copies: give two words or more, of which each is the others' control, "
            f"and {FEWEST} copies or more"
        )
    ids = first_tokens(setup, words)
    begin = [] if setup.bos is None else [setup.bos]
    begin += setup.tokenizer.encode(PREFIX, add_special_tokens=False)
    check_length(setup.target, f"a text of --copies {copies} and {len(begin)} tokens before", len(begin) + copies)
    rows = torch.cat([torch.tensor(begin).expand(len(ids), -1), ids[:, None].expand(-1, copies)], 1)
    at = np.unique(np.geomspace(1, copies, POINTS).round().astype(int))
    places = torch.tensor(at - 1) + len(begin)
    of_alone = trace(setup.target, ids[:, None], "blocks.*.hook_resid_post", lambda states: states[:, 0].float())
    of_copies = trace(
        setup.target, rows, "blocks.*.hook_resid_post", lambda states: states[:, places].float(), batch_size=1
    )
    made: list[AfterLayer] = []
    curves: list[np.ndarray] = []
    late = at >= copies / 10
    for layer, (alone, there) in enumerate(zip(of_alone.values(), of_copies.values(), strict=True)):
        norms = alone.norm(dim=-1, keepdim=True)
        distances = ((there - alone[:, None]).norm(dim=-1) / norms).double().numpy()
        other = (torch.cdist(alone, alone) / norms).sum(1).numpy() / (len(ids) - 1)
        slopes = [slope_of(at[late & (of_word > LEAST)], of_word[late & (of_word > LEAST)]) for of_word in distances]
        curves.append(distances.mean(0).round(6))
        numbers = {"first": distances[:, 0], "last": distances[:, -1], "control": other}
        means = {name: mean_of(values) or Mean(0.0) for name, values in numbers.items()}
        made.append(AfterLayer(key=layer, **means, exponent=mean_of(np.array(slopes))))
    return AllLayers(layers=tuple(made), at=tuple(at.tolist()), curves=np.stack(curves), copies=copies)


def slope_of(copies: Int[np.ndarray, " n"], distances: Float[np.ndarray, " n"]) -> float:
    """Return the slope of the logarithms; NaN of fewer than three points."""
    return float(np.polyfit(np.log(copies), np.log(distances), 1)[0]) if len(copies) > 2 else np.nan
