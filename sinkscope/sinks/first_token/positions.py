"""A text as the model sees it: norm of each token, attention that it receives, and values of the sink neurons."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import plotly.graph_objects as go
import torch
from einops import rearrange, reduce
from jaxtyping import Float, Int
from plotly.subplots import make_subplots
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Option, Result, Setup, measurement
from sinkscope.measure.style import BLUE, ORANGE, finished
from sinkscope.models.target import norm_of
from sinkscope.sinks.first_token.context import SinkContext
from sinkscope.sinks.first_token.layer_scan import SPIKE_RATIO, scan_layers
from sinkscope.sinks.first_token.layer_view import flat_number, view_layer
from sinkscope.sinks.first_token.sets import neurons_of
from sinkscope.trace.attention import attention_rows
from sinkscope.trace.run import trace

SPIKE_SHARE = 0.5  # a token's norm spikes from this share of BOS's norm on (Yona et al. 2025, Table 1)


@dataclass(frozen=True, kw_only=True)
class TokenPositions(Result):
    """Norm and attention received of every token of a text, layer by layer.

    Attributes:
        tokens: The tokens.
        layer: The sink layer. If no MLP makes a sink, the layer after which a token stands out most.
        norm: L2 norm of the residual stream after each layer.
        attention: Attention that each position receives, mean over heads and later queries; NaN at the last position.
        bos_norm: Norm of BOS after each layer (of the first token of typical text, if the tokenizer has no BOS).
        typical_norm: Median norm over later positions of typical text.
        neurons: The neurons of the sink layer in the set that makes the spike.
        activation: Their `hook_post` at each position (in a mixture, times the routing weight). None if there are none.
    """

    kind: ClassVar[str] = "positions"
    percent: ClassVar[tuple[str, ...]] = ("of_bos",)
    glossary: ClassVar[dict[str, str]] = {"of_bos": "norm after the sink layer over that of BOS"}

    tokens: tuple[str, ...]
    layer: int
    norm: Float[np.ndarray, "layer pos"]
    attention: Float[np.ndarray, "layer pos"]
    bos_norm: Float[np.ndarray, " layer"]
    typical_norm: Float[np.ndarray, " layer"]
    neurons: tuple[str, ...] = ()
    activation: Float[np.ndarray, "neuron pos"] | None = None

    @property
    def spikes(self) -> list[int]:
        """Positions with at least half of BOS's norm and three times the typical one after `layer`."""
        bar = SPIKE_RATIO * self.typical_norm[self.layer]
        if self.bos_norm[self.layer] > bar:
            bar = max(bar, SPIKE_SHARE * self.bos_norm[self.layer])
        return np.flatnonzero(self.norm[self.layer] >= bar).tolist()

    def rows(self) -> list[dict[str, Any]]:
        """One row per token."""
        columns = {
            "position": range(len(self.tokens)),
            "token": [repr(token) for token in self.tokens],
            "norm": self.norm[self.layer].tolist(),
            "of_bos": (self.norm[self.layer] / self.bos_norm[self.layer]).tolist(),
            "attention": self.attention.mean(0).tolist(),
        }
        if self.activation is not None:
            columns |= dict(zip(self.neurons, self.activation.tolist(), strict=True))
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def conclusion(self) -> str:
        """Which tokens have a norm spike, beside typical text."""
        norm, typical, spikes = self.norm[self.layer], self.typical_norm[self.layer], self.spikes
        if not spikes:
            return (
                f"No token has a norm spike: the largest norm is {norm.max():.4g}, and typical text has {typical:.4g}."
            )
        names = ", ".join(f"{self.tokens[pos]!r} ({norm[pos]:.4g})" for pos in spikes[:3])
        return (
            f"After layer {self.layer}, {len(spikes)} of {len(self.tokens)} tokens have a norm spike, first {names}; "
            f"typical text has {typical:.4g}."
        )


def draw(result: TokenPositions) -> go.Figure:
    """Norm over the typical one and attention received, layer by position."""
    ratio = np.log10(result.norm / rearrange(result.typical_norm, "layer -> layer 1"))
    names = [f"{pos} {html.escape(repr(token))}" for pos, token in enumerate(result.tokens)]
    fig = make_subplots(cols=2, subplot_titles=["Norm over the typical one, log10", "Attention received"])
    fig.add_heatmap(z=ratio, x=names, colorscale=["#f7f7f7", BLUE], zmin=0, colorbar_x=0.45, row=1, col=1)
    fig.add_heatmap(z=result.attention, x=names, colorscale=["#f7f7f7", ORANGE], zmin=0, row=1, col=2)
    fig.update_yaxes(title_text="layer", autorange="reversed", dtick=1)
    return finished(fig, result, width=1400, height=520, bottom=150)


@measurement(group="Sinks", figure=draw, command="positions", quick={"passage": "the first token takes it all"})
def token_positions(
    setup: Setup, passage: Annotated[str | None, Option(argument=True, metavar="TEXT")] = None
) -> TokenPositions:
    """Measure norm, sink neurons and attention received of every token of a text, layer by layer.

    A token has a norm spike if its norm after the sink layer is at least half of BOS's and three times the typical one
    (Yona et al. 2025, Table 1). Without a text, a piece of the typical text is read.

    Args:
        passage: The text.

    Example:
        sinkscope positions "Sch Com" --model llama-2-7b --no-bos
    """
    target, pieces, bos = setup.target, setup.ids, getattr(setup.tokenizer, "bos_token_id", None)
    ids = pieces[:1] if passage is None else _ids(setup, passage)
    setup.record(passage=None)  # the result contains the tokens instead
    if setup.bos is None and bos is not None:  # norms are compared with BOS even if the text has none
        pieces = torch.cat([torch.full((len(pieces), 1), bos), pieces[:, :-1]], 1)
    typical = scan_layers(target, pieces, whole=True, progress=setup.progress)
    norm, attention = _norm_and_attention(setup, ids, typical.shared_dims)
    layer, neurons, activation = typical.sink_layer, (), None
    if layer is None:
        layer = int((norm.max(1) / np.array(typical.typical_norm)).argmax())
    else:
        generator = torch.Generator().manual_seed(setup.seed)
        context = SinkContext(target, pieces, typical, layer, generator)
        neurons = [neuron for neuron in neurons_of(context).neurons if neuron.layer == layer]
    if neurons:
        flat = [flat_number(target, layer, neuron.expert, neuron.neuron) for neuron in neurons]
        post = view_layer(target, layer, ids, torch.ones_like(ids, dtype=torch.bool)).post[:, flat]
        activation = rearrange(post, "pos neuron -> neuron pos").cpu().numpy()
    return TokenPositions(
        tokens=tuple(setup.tokenizer.decode([token]) for token in ids[0].tolist()),
        layer=layer,
        norm=norm,
        attention=attention,
        bos_norm=np.array(typical.first_norm),
        typical_norm=np.array(typical.typical_norm),
        neurons=tuple(map(str, neurons)),
        activation=activation,
    )


def _ids(setup: Setup, text: str) -> Int[Tensor, "1 pos"]:
    """The text's tokens, after BOS if there is one."""
    ids = setup.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not text.strip() or set(ids) <= {setup.tokenizer.unk_token_id}:
        raise SinkscopeError(f"the text {text!r} has no word that this tokenizer knows: give another text")
    if setup.bos is not None and ids[0] != setup.bos:
        ids = [setup.bos, *ids]
    setup.target.check_length("the text", len(ids))
    return torch.tensor([ids])


@torch.no_grad()
def _norm_and_attention(
    setup: Setup, ids: Int[Tensor, "1 pos"], without: Sequence[int]
) -> tuple[Float[np.ndarray, "layer pos"], Float[np.ndarray, "layer pos"]]:
    """Norm after each layer, and the mean attention that each position gets from later queries."""
    length = ids.shape[1]
    received = torch.zeros(setup.n_layers, length)

    def add(layer: int, first_query: int, probs: Float[Tensor, "1 head query key"]) -> None:
        from_later = probs[0].tril(first_query - 1)
        received[layer] += reduce(from_later, "head query key -> key", "sum").cpu() / setup.n_heads

    with attention_rows(setup.target, add):
        norms = trace(setup.target, ids, ["blocks.*.hook_resid_post"], lambda resid: norm_of(resid, without))
    later_queries = torch.arange(length - 1, -1, -1)
    attention = torch.where(later_queries > 0, received / later_queries, torch.nan)
    return torch.cat(list(norms.values())).numpy(), attention.numpy()
