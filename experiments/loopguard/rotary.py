"""Appendix A of the paper on a real loop: how scores and the tail operator repeat, and whether a perturbation decays.

    python -m experiments.loopguard.rotary [--model NAME|FOLDER] [--max-new-tokens 512] [--layer N ...] [--out figures]

The model continues a text greedily until it loops. Quantities at a shift of one period P
(blue) stand beside P + 1 (orange) and ordinary text at P (grey). The bound of Eq. 15 holds by construction (the
triangle and the Cauchy-Schwarz inequality), so it is not measured.

For appendix A.3, the keys and values of the last 32 tokens in the cache are disturbed by noise of 1 %, and the text
goes on. What counts is how far the keys and values of each new token are from those without the noise, in parts of
that 1 %: in the loop (blue), after its copies were taken out of the cache (orange), and in ordinary text (grey).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from experiments.drawn import draw
from experiments.record import Row, write_record
from experiments.script import run
from sinkscope.engine.attention import Attention
from sinkscope.engine.tap import listening
from sinkscope.errors import SinkscopeError
from sinkscope.generation.decode import decode
from sinkscope.loops.text.signals import tail_period
from sinkscope.measure import Setup
from sinkscope.models.grouped_heads import per_query_head
from sinkscope.models.inputs import attending_layers
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.results.style import BLUE, GREY, ORANGE, figure_of, panels

NOISE, DRAWS, STEPS = 0.01, 4, 96
TAIL = 32  # positions of the window (the paper's B_t), rounded up to whole periods
SHIFTS = (
    ("", "a period apart", BLUE),
    ("other_", "a token further apart (right: one token apart)", ORANGE),
    ("healthy_", "ordinary text", GREY),
)


class LayerTail:
    """Queries and keys after rotary of one layer, and its values in the window, weighted by attention.

    Attributes:
        query: `[head pos d_head]`.
        key: The same, one for each query head.
        sums: The tail operator (Eq. 4) of each position, in parts `[head pos d_value]`.
    """

    def __init__(self, call: Attention, tail: int) -> None:
        self.tail = tail
        self.query = call.query[0].float()
        heads = len(self.query)
        self.key = per_query_head(call.key, heads)[0].float().expand(heads, -1, -1)
        value = per_query_head(call.value, heads)[0].float().expand(heads, -1, -1)
        self.sums: list[Tensor] = []

        def add(first: int, probs: Tensor) -> None:
            rows = torch.arange(first, first + probs.shape[2])[:, None]
            keys = torch.arange(probs.shape[3])
            near = probs[0] * ((keys <= rows) & (keys > rows - tail))
            self.sums.append(einsum(near, value, "head query key, head key d -> head query d"))

        call.show(add, gives_output=False)

    def window(self, shift: int) -> Float[Tensor, "head query key"]:
        """Scores of the last queries, `shift` positions earlier, with the `tail` keys up to each."""
        end = self.query.shape[1] - shift
        tail = self.tail
        keys = self.key[:, end - 2 * tail + 1 : end].unfold(1, tail, 1)
        return einsum(self.query[:, end - tail : end], keys, "head query d, head query d key -> head query key")

    def change(self, shift: int) -> Float[Tensor, " head"]:
        """Mean difference of scores that are `shift` positions apart, over the spread of the scores."""
        now = self.window(0)
        return (now - self.window(shift)).abs().mean((1, 2)) / now.std((1, 2), correction=0)

    def drift(self, shift: int) -> Float[Tensor, " head"]:
        """How far the tail operator moves in `shift` positions, over its length; median over the tail."""
        sums = torch.cat(self.sums, 1)
        now = sums[:, shift:]
        moved = (now - sums[:, :-shift]).norm(dim=-1) / now.norm(dim=-1).clamp_min(1e-12)
        return moved[:, -self.tail :].median(-1).values


@torch.no_grad()
def tails(target: Target, ids: Int[Tensor, " pos"], layers: list[int], tail: int) -> dict[int, LayerTail]:
    """Read `ids` once and keep what the attention of each layer computes."""
    by_layer: dict[int, LayerTail] = {}

    def see(call: Attention) -> None:
        if call.layer in layers:
            by_layer[call.layer] = LayerTail(call, tail)

    with listening(target, see):
        target.forward(ids[None])
    return by_layer


@torch.no_grad()
def decay(model: Any, ids: list[int], kept: int, told: list[int]) -> list[float]:
    """How far the keys and values of tokens that follow a text are from those without noise, over the noise.

    Args:
        model: of transformers.
        ids: The text.
        kept: Number of first positions that stay in the cache.
        told: The tokens that follow.
    """
    random = torch.Generator().manual_seed(0)
    cache = model(torch.tensor([ids] * (1 + DRAWS)), use_cache=True).past_key_values
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :kept], layer.values[:, :, :kept]
        for entries in (layer.keys, layer.values):
            near = entries[1:, :, -TAIL:]
            near *= 1 + NOISE * torch.randn(near.shape, generator=random)
    rows = torch.tensor([told] * (1 + DRAWS))
    model(rows, past_key_values=cache, position_ids=torch.arange(len(ids), len(ids) + len(told)).expand_as(rows))
    moved: list[Tensor] = []
    for layer in cache.layers[1:]:  # those of the first layer depend on the tokens alone
        for entries in (layer.keys, layer.values):
            new = entries[:, :, kept:]
            moved.append((new[1:] - new[:1]).norm(dim=-1) / new[:1].norm(dim=-1))
    return (torch.stack(moved).mean((0, 1, 2)) / NOISE).tolist()


def measure(setup: Setup, prompt: list[int], new: int, layers: list[int]) -> Row:
    """All numbers, as `[layer head]`."""
    target = setup.target
    ids = torch.tensor([*prompt, *decode(target, torch.tensor([prompt]), new)[0][0]])
    loop = tail_period(ids.tolist(), repeats=3, shortest=24)
    if loop is None:
        raise SinkscopeError(f"the {len(ids)} tokens end in no loop: give more --max-new-tokens, or another prompt")
    period = loop.period
    tail = period * max(1, min(-(-TAIL // period), (len(ids) - loop.start - period) // (2 * period)))
    length = len(ids)
    text = text_rows(setup.tokenizer, setup.text, 1, length + STEPS, setup.bos)[0]
    ordinary = text[:length]
    own = tails(target, ids, layers, tail)
    plain = tails(target, ordinary, layers, tail)
    heads: dict[str, list[list[float]]] = {}
    for prefix, of_layer, shift in (("", own, period), ("other_", own, period + 1), ("healthy_", plain, period)):
        heads[f"{prefix}change"] = [of_layer[layer].change(shift).tolist() for layer in layers]
    for prefix, of_layer, shift in (("", own, period), ("step_", own, 1), ("healthy_", plain, period)):
        heads[f"{prefix}drift"] = [of_layer[layer].drift(shift).tolist() for layer in layers]
    own_ids, further = ids.tolist(), (ids[-period:].tolist() * STEPS)[:STEPS]
    perturbed = {
        "in the loop": decay(target.hf, own_ids, length, further),
        "after a cut": decay(target.hf, own_ids, loop.start, further),
        "ordinary text": decay(target.hf, ordinary.tolist(), length, text[length:].tolist()),
    }
    return {
        "perturbed": perturbed,
        "tokens": length,
        "period": period,
        "repeated": setup.tokenizer.decode(ids[-period:].tolist()),
        "heads": heads,
    }


def summary(result: Row) -> str:
    """The conclusion in one sentence."""
    middle = {name: float(np.median(values)) for name, values in result["heads"].items()}
    return (
        f"Scores one period ({result['period']} tokens) apart differ by {middle['change']:.1%} of their spread; one "
        f"token further apart by {middle['other_change']:.0%}, in ordinary text by {middle['healthy_change']:.0%} "
        "(median over heads)"
    )


def figure(data: Row) -> Any:
    """A dot for each head: how far scores, and the tail operator, are from those a shift apart."""
    result = data["result"]
    titles = ["scores a shift apart, over their spread", "tail operator (Eq. 4) a shift apart, over its length"]
    fig = panels([*titles, "what a perturbation of the cache leaves at each step"])
    layers, count = np.array(result["heads"]["change"]).shape
    at = (np.arange(layers)[:, None] + (np.arange(count) + 0.5) / count * 0.8 - 0.4).ravel()
    for prefix, title, colour in SHIFTS:
        for column, name in ((1, f"{prefix}change"), (2, f"{prefix.replace('other', 'step')}drift")):
            y = np.maximum(np.array(result["heads"][name]).ravel(), 1e-6)  # exact repetitions on a logarithmic axis
            fig.add_scatter(
                x=at, y=y, mode="markers", name=title, marker_color=colour, showlegend=column == 1, row=1, col=column
            )
    for (state, curve), (_, _, colour) in zip(result["perturbed"].items(), SHIFTS, strict=True):
        fig.add_scatter(y=curve, mode="lines", name=state, line_color=colour, row=1, col=3)
    fig.update_yaxes(type="log", dtick=1, exponentformat="power")
    fig.update_xaxes(title_text="layer", dtick=max(1, layers // 6))
    fig.update_xaxes(title_text="new tokens", dtick=16, row=1, col=3)
    return figure_of(fig, None, summary(result), width=1400, height=560, legend=-0.2)


def main(
    *,
    model: str | None = None,
    prompt: str | None = None,
    max_new_tokens: int = 512,
    layer: Sequence[int] | None = None,
    out: Path = Path("figures"),
) -> None:
    """Make what the module describes.

    Args:
        model: Short name, hub id or folder; default: the model in the package.
        prompt: What the model continues; default: the beginning of the typical text.
        layer: May be given again; default: all.
    """
    setup = Setup.open(model, dtype="float32", device="cpu", loading="whole")
    layers = attending_layers(setup.target, layer)
    ids = setup.ids[0].tolist()
    if prompt is not None:
        ids = setup.tokenizer(prompt)["input_ids"]
    result = measure(setup, ids, max_new_tokens, layers)
    settings = {"model": setup.target.name, "max_new_tokens": max_new_tokens, "layers": layers}
    draw(write_record(out / "rotary.json", "loopguard-rotary", result, settings), figure)


if __name__ == "__main__":
    run(main)
