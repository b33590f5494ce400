"""Lemma 1 of the paper on a real loop: how queries, keys and scores repeat, the tail operator, and decay.

    python -m experiments.loopguard.rotary [--model NAME|FOLDER] [--max-new-tokens 512] [--layer N ...] [--out figures]

The model continues the beginning of the typical text greedily until it loops. Queries and keys are those before rotary,
after query and key norms, without the scale. Quantities at a shift of one period P (blue) stand beside P + 1 (orange)
and ordinary text at P (grey). Lemma 1 holds by construction, so Eq. 13 is compared with the model's own scores; its
offset is printed with the wrong sign (`R(wt) q . R(wi) k = q . R(w (i - t)) k`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Complex, Float, Int
from plotly.subplots import make_subplots
from torch import Tensor

from experiments.drawn import save
from experiments.queries_and_keys import queries_and_keys
from experiments.record import Row, record
from experiments.script import run
from sinkscope.display.style import BLUE, GREEN, GREY, ORANGE, figure_of
from sinkscope.errors import SinkscopeError
from sinkscope.interventions.decode import greedy
from sinkscope.loops.signals import tail_period
from sinkscope.measure import Setup
from sinkscope.models.checks import attending_layers
from sinkscope.models.hooks import first_tensor, on_input
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.tap.call import Attention
from sinkscope.tap.tap import listening

TAIL = 32  # positions of the window (the paper's B_t), rounded up to whole periods
PERIODS = 8  # periods that follow a disturbed one
DIRECTIONS = 4  # of a disturbance
SMALL, LARGE = 0.01, 1.0  # sizes of a disturbance, relative to the norm of the hidden state
ENERGY = 0.999  # share of the hidden states' squared norm in the tail subspace
CHECKED = 4  # queries whose scores with every earlier key are compared with Eq. 13
CURVE_POINTS = 256


@dataclass(frozen=True)
class Rotation:
    """The rotation of one layer: `exp(i * omega_j * t)`, and the factor of queries and keys (YaRN; 1 elsewhere)."""

    angle: Complex[Tensor, "pos block"]
    scale: float

    @classmethod
    def of(cls, cos: Float[Tensor, "pos turned"], sin: Float[Tensor, "pos turned"]) -> Rotation:
        """Build it from the tables that the model passes to its attention, for positions 0, 1, 2, ...

        Most families list each frequency twice, in two consecutive halves; gpt-oss lists it once.
        """
        half = cos.shape[-1] // 2
        if torch.equal(cos[:, :half], cos[:, half:]):
            cos, sin = cos[:, :half], sin[:, :half]
        angle = torch.complex(cos.float(), sin.float())
        return cls(angle / angle.abs().clamp_min(1e-12), float(angle[0, 0].abs()))

    def blocks(self, x: Float[Tensor, "*head d_head"]) -> Complex[Tensor, "*head block"]:
        """Dimensions that rotate together, as complex numbers; unrotated dimensions come last, in pairs."""
        turned = 2 * self.angle.shape[1]
        parts: list[Tensor] = []
        for part in (x[..., :turned].float(), x[..., turned:].float()):
            real, imaginary = part.chunk(2, -1)
            parts.append(torch.complex(real.contiguous(), imaginary.contiguous()))
        return torch.cat(parts, -1)

    def factor(self, d_head: int) -> Float[Tensor, " block"]:
        """Factor of a block's product in a score: the square of `scale` for rotated blocks, otherwise 1."""
        factor = self.angle.real.new_ones(d_head // 2)
        factor[: self.angle.shape[1]] = self.scale**2
        return factor

    def scores(
        self,
        query: Float[Tensor, "head query d_head"],
        key: Float[Tensor, "head key d_head"],
        query_pos: Int[Tensor, " query"],
        key_pos: Int[Tensor, " key"],
    ) -> Float[Tensor, "head query key"]:
        """Eq. 13: scores from queries and keys before rotary and the distances alone."""
        q = self.blocks(query)
        k = self.blocks(key)
        factor = self.factor(query.shape[-1])
        columns: list[Tensor] = []
        for number, position in enumerate(query_pos.tolist()):
            offset = key_pos - position
            turn = self.angle[offset.abs()]  # the table begins at position 0
            turn = torch.where(offset[:, None] < 0, turn.conj(), turn)
            still = turn.new_ones(len(turn), k.shape[-1] - turn.shape[1])
            moved = torch.cat([turn, still], 1) * factor
            columns.append((q[:, number, None].conj() * moved * k).sum(-1).real)
        return torch.stack(columns, 1)


class LayerTail:
    """What passes through one attention module while the model reads a sequence."""

    def __init__(self, tail: int) -> None:
        self.tail = tail
        self.rotation: Rotation | None = None
        self.pairs: dict[bool, tuple[Tensor, Tensor]] = {}  # queries and keys, by whether they are rotated
        self.sums: list[Tensor] = []  # values in the window, weighted by attention
        self.masses: list[Tensor] = []

    def on_entry(self, _module: Any, _args: Any, kwargs: Row) -> None:
        """Keep the first rotation; the module is called once more with a rotation by zero."""
        tables = kwargs.get("position_embeddings")
        if tables is not None and self.rotation is None:
            self.rotation = Rotation.of(tables[0][0], tables[1][0])

    def on_queries_and_keys(self, rotated: bool, query: Tensor, key: Tensor) -> None:
        """Keep them, one key for each query head."""
        group = query.shape[1] // key.shape[1]
        repeated = repeat(key[0].float(), "kv_head pos d_head -> (kv_head group) pos d_head", group=group)
        self.pairs[rotated] = query[0].float(), repeated

    def on_attention(self, call: Attention) -> None:
        """Add the attention and the values in the window."""
        value = call.value[0].float()

        def add(first: int, probs: Tensor) -> None:
            rows = torch.arange(first, first + probs.shape[2])[:, None]
            keys = torch.arange(probs.shape[3])
            near = probs[0] * ((keys <= rows) & (keys > rows - self.tail))
            self.masses.append(near.sum(-1))
            grouped = rearrange(near, "(kv_head group) query key -> kv_head group query key", kv_head=len(value))
            summed = einsum(grouped, value, "kv_head group query key, kv_head key d -> kv_head group query d")
            self.sums.append(rearrange(summed, "kv_head group query d -> (kv_head group) query d"))

        call.show(add, by_mask=True)

    def numbers(self, period: int) -> dict[str, Tensor]:
        """Numbers of each head over the tail that depend on no shift, and the drift of the tail operator (Eq. 4)."""
        assert self.rotation is not None
        (query, key), (own_query, own_key) = self.pairs[False], self.pairs[True]
        length = query.shape[1]
        tail = self.tail
        rows = torch.linspace(length // 2, length - 1, CHECKED).long().unique()
        keys = torch.arange(length)
        own = einsum(own_query[:, rows], own_key, "head query d, head key d -> head query key")
        difference = self.rotation.scores(query[:, rows], key, rows, keys) - own
        seen = keys <= rows[:, None]
        sums = torch.cat(self.sums, 1)
        return {
            "query_norm": query[:, -tail:].norm(dim=-1).median(-1).values,
            "key_norm": key[:, -2 * tail :].norm(dim=-1).median(-1).values,
            "spread": self.window(0).std((1, 2), correction=0),
            "error": (difference.abs() * seen).amax((1, 2)) / (own.abs() * seen).amax((1, 2)).clamp_min(1e-12),
            "tail_mass": torch.cat(self.masses, 1)[:, -tail:].mean(-1),
            "drift": movement(sums, period)[:, -tail:].median(-1).values,
            "step_drift": movement(sums, 1)[:, -tail:].median(-1).values,
        }

    def window(self, shift: int) -> Float[Tensor, "head query key"]:
        """The model's scores of the last queries, `shift` positions earlier, with the `tail` keys up to each."""
        query, key = self.pairs[True]
        end = query.shape[1] - shift
        tail = self.tail
        keys = key[:, end - 2 * tail + 1 : end].unfold(1, tail, 1)
        return einsum(query[:, end - tail : end], keys, "head query d, head query d key -> head query key")

    def shifted(self, shift: int) -> dict[str, Tensor]:
        """Differences between queries, keys and scores that are `shift` positions apart, and the bound of Eq. 15."""
        assert self.rotation is not None
        query, key = self.pairs[False]
        length = query.shape[1]
        tail = self.tail
        first = length - 2 * tail + 1  # the earliest key that a query of the tail sees in its window
        then_query = query[:, length - tail - shift : length - shift]
        then_key = key[:, first - shift : length - shift]
        delta_q = (query[:, length - tail :] - then_query).norm(dim=-1).amax(-1)
        delta_k = (key[:, first:] - then_key).norm(dim=-1).amax(-1)
        change = (self.window(0) - self.window(shift)).abs()
        factor = self.rotation.factor(query.shape[-1])
        of_query = (self.rotation.blocks(then_query).abs() * factor).sum(-1) * delta_k[:, None]
        of_key = (self.rotation.blocks(then_key).abs() * factor).sum(-1) * delta_q[:, None]
        both = (delta_q * delta_k)[:, None, None]
        bound = of_key.unfold(-1, tail, 1) + of_query[..., None] + factor.sum() * both
        whole_key = (then_key.norm(dim=-1) * delta_q[:, None]).unfold(-1, tail, 1)
        whole_query = (then_query.norm(dim=-1) * delta_k[:, None])[..., None]
        whole = float(factor.max()) * (whole_key + whole_query + both)
        # an angle of n radians is itself rounded, to n eps at most
        own_query, own_key = self.pairs[True]
        largest = own_query.norm(dim=-1).amax(-1) * own_key.norm(dim=-1).amax(-1)
        rounding = (8 + length) * torch.finfo(torch.float32).eps * largest
        excess = (change - rounding[:, None, None]).clamp_min(0)
        return {
            "delta_q": delta_q,
            "delta_k": delta_k,
            "change": change.mean((1, 2)),
            "bound": bound.mean((1, 2)),
            "whole_bound": whole.mean((1, 2)),
            "tightness": (excess / bound.clamp_min(1e-12)).amax((1, 2)),
        }

    def curve(self, shift: int) -> Float[Tensor, " pos"]:
        """How far the tail operator of all heads together moves in `shift` positions, over its length."""
        together = rearrange(torch.cat(self.sums, 1), "head pos d -> 1 pos (head d)")
        return torch.cat([torch.full((shift,), torch.nan), movement(together, shift)[0]])


def movement(sums: Float[Tensor, "head pos d"], shift: int) -> Float[Tensor, "head moved"]:
    """Distance between vectors `shift` positions apart, over the length of the later one."""
    now = sums[:, shift:]
    then = sums[:, :-shift]
    return (now - then).norm(dim=-1) / now.norm(dim=-1).clamp_min(1e-12)


@torch.no_grad()
def tails(target: Target, ids: Int[Tensor, " pos"], layers: list[int], tail: int) -> dict[int, LayerTail]:
    """Read `ids` once and keep what the attention of each layer computes."""
    by_layer = {}
    for each in layers:
        by_layer[each] = LayerTail(tail)

    def see(call: Attention) -> None:
        if call.layer in by_layer:
            by_layer[call.layer].on_attention(call)

    with ExitStack() as stack:
        for layer, part in by_layer.items():
            attention = target.sub(layer, target.adapter.attn)
            stack.enter_context(target.hooks((attention, "pre", part.on_entry)))
        stack.enter_context(listening(target, see))
        stack.enter_context(
            queries_and_keys(target, lambda i, rotated, q, k: by_layer[i].on_queries_and_keys(rotated, q, k), layers)
        )
        target.forward(ids[None])
    return by_layer


class Disturbed:
    """A model that has read a sequence up to its last periods, and can be disturbed there repeatedly.

    The tokens continue unchanged, as greedy decoding would as long as its choices stay the same: a hidden state affects
    later steps only through the keys and values that it left in the cache.
    """

    @torch.no_grad()
    def __init__(self, target: Target, ids: Int[Tensor, " pos"], period: int, periods: int, seed: int = 0) -> None:
        from transformers import DynamicCache

        self.target = target
        self.period = period
        self.periods = periods
        self.seed = seed
        self.start = len(ids) - (periods + 1) * period
        self.rest = repeat(ids[self.start :], "pos -> row pos", row=DIRECTIONS + 1)
        self.states: dict[int, list[Tensor]] = {layer: [] for layer in range(target.n_layers)}  # entering each layer
        self.cache: Any = DynamicCache()  # without sliding windows, so that it can be cropped
        layers = []
        for i, module in enumerate(target.layers):
            layers.append((module, "pre", on_input(partial(self._keep, i))))
        with target.hooks(*layers):
            target.forward(ids[None, : self.start], past_key_values=self.cache, use_cache=True)
            self.cache.batch_repeat_interleave(DIRECTIONS + 1)
            self._pass()

    def _keep(self, layer: int, states: Tensor) -> None:
        self.states[layer].append(first_tensor(states)[0].float())

    def _pass(self) -> Tensor:
        out = self.target.forward(self.rest, past_key_values=self.cache, use_cache=True).last_hidden_state
        self.cache.crop(-self.rest.shape[1])
        return out

    @torch.no_grad()
    def decay(self, layer: int, size: float, *, within: bool = False) -> Row | None:
        """Disturb the input of a layer for one period, orthogonally to the tail subspace or `within` it.

        Returns:
            "change", the relative change of the last hidden state in that period and in each that follows, and "kept",
            the share of directions under which all later choices stay; None if no direction is orthogonal.
        """
        period = self.period
        hidden = torch.cat(self.states[layer])
        _, singular, right = torch.linalg.svd(
            hidden[self.start - self.periods * period : self.start], full_matrices=False
        )
        energy = singular.square().cumsum(0) / singular.square().sum()
        basis = right[: int((energy < ENERGY).sum()) + 1]
        if not within and basis.shape[0] == basis.shape[1]:
            return None
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(DIRECTIONS, period, basis.shape[1], generator=generator)
        inside = noise @ basis.T @ basis
        if within:
            noise = inside
        else:
            noise = noise - inside
        length = hidden[self.start : self.start + period].norm(dim=-1, keepdim=True)
        push = noise / noise.norm(dim=-1, keepdim=True) * length * size

        def pushed(states: Tensor) -> Tensor:
            states = states.clone()
            states[1:, :period] += push.to(states)
            return states

        with self.target.hooks((self.target.layers[layer], "pre", on_input(pushed))):
            out = self._pass()
        sizes = (out[1:] - out[:1]).float().norm(dim=-1) / out[:1].float().norm(dim=-1)
        by_period = rearrange(sizes.square(), "row (period token) -> period (row token)", token=period)
        logits = self.target.hf.get_output_embeddings()
        rows = []
        for row in out:
            rows.append(logits(row[period:]).argmax(-1))
        choices = torch.stack(rows)  # row by row: vocabularies are large
        return {
            "layer": layer,
            "size": size,
            "within": within,
            "dimensions": len(basis),
            "change": by_period.mean(1).sqrt().tolist(),
            "kept": float((choices[1:] == choices[:1]).all(1).float().mean()),
        }


def decays(setup: Setup, ids: Tensor, layers: list[int], period: int, periods: int) -> list[Row]:
    """Small disturbances orthogonal to the tail subspace and inside it, and large ones, of every layer."""
    disturbed = Disturbed(setup.target, ids, period, periods, setup.seed)
    found: list[Row] = []
    for layer in layers:
        for size, within in ((SMALL, False), (SMALL, True), (LARGE, False)):
            decay = disturbed.decay(layer, size, within=within)
            if decay is not None:
                found.append(decay)
    return found


def measure(setup: Setup, prompt: list[int], new: int, layers: list[int]) -> Row:
    """All numbers: heads as `[layer head]`, curves as `[layer position]`."""
    target = setup.target
    ids = torch.tensor([*prompt, *greedy(target, torch.tensor([prompt]), new)[0]])
    loop = tail_period(ids.tolist(), repeats=3, shortest=24)
    if loop is None:
        raise SinkscopeError(f"the {len(ids)} tokens end in no loop: give more --max-new-tokens, or another prompt")
    period = loop.period
    copies = (len(ids) - loop.start) // loop.period
    tail = period * max(1, min(-(-TAIL // period), (len(ids) - loop.start - period) // (2 * period)))
    ordinary = text_rows(setup.tokenizer, setup.text, 1, len(ids), setup.bos)[0]
    own = tails(target, ids, layers, tail)
    plain = tails(target, ordinary, layers, tail)
    stride = -(-len(ids) // CURVE_POINTS)
    positions = torch.arange(0, len(ids), stride + (stride + 1) % 2)  # an odd stride shows all phases of a period
    rows: list[dict[str, Tensor]] = []
    curves: list[dict[str, Tensor]] = []
    for layer in layers:
        row = own[layer].numbers(period) | own[layer].shifted(period)
        if period > 1:
            row |= {f"other_{name}": value for name, value in own[layer].shifted(period + 1).items()}
        control = plain[layer].numbers(period) | plain[layer].shifted(period)
        row |= {f"healthy_{name}": value for name, value in control.items()}
        rows.append(row)
        both = {"period": own[layer].curve(period), "step": own[layer].curve(1)}
        curves.append(both | {"healthy_period": plain[layer].curve(period)})
    periods = min(PERIODS, (copies - 1) // 2)
    heads = {}
    for name in rows[0]:
        heads[name] = [row[name].tolist() for row in rows]
    drift = {}
    for name in curves[0]:
        drift[name] = [curve[name][positions].tolist() for curve in curves]
    return {
        "tokens": len(ids),
        "prompt_tokens": len(prompt),
        "period": period,
        "onset": loop.start,
        "repeated": setup.tokenizer.decode(ids[-period:].tolist()),
        "tail": tail,
        "heads": heads,
        "positions": positions.tolist(),
        "drift": drift,
        "decays": decays(setup, ids, layers, period, periods),
        "healthy_decays": decays(setup, ordinary, layers, period, periods),
    }


def array(values: Any) -> np.ndarray:
    """Numbers of a record, NaN where it has none."""
    return np.array(values, dtype=float)


def median(values: Any) -> float:
    """The median; of an even number of values the upper one of the middle."""
    return float(np.percentile(array(values), 50, method="higher"))


def summary(result: Row) -> str:
    """The conclusion in one sentence."""
    heads = result["heads"]
    period = result["period"]
    spread = array(heads["spread"])
    change, other, healthy = (
        median(array(heads[name]) / spread) if name in heads else math.nan
        for name in ("change", "other_change", "healthy_change")
    )
    return (
        f"Scores one period ({period} tokens) apart differ by {change:.1%} of their spread; one token further apart "
        f"they differ by {other:.0%}, and in ordinary text by {healthy:.0%} (median over heads)"
    )


def details(result: Row) -> list[str]:
    """Eq. 13 beside the model, Eq. 15, the tail operator, and what remains of a disturbance after one period."""
    heads = {name: array(values) for name, values in result["heads"].items()}
    lines = [
        f"Eq. 13 agrees with the model's own scores to {heads['error'].max():.1e} of the largest score.",
        f"Differences reach at most {heads['tightness'].max():.0%} of the bound of Eq. 15, which is "
        f"{median(heads['bound'] / heads['spread']):.1%} of the spread "
        f"({median(heads['whole_bound'] / heads['spread']):.1%} without blocks).",
        f"The tail operator moves by {median(heads['drift']):.1%} of its length in a period and by "
        f"{median(heads['step_drift']):.1%} in a step (ordinary text: {median(heads['healthy_drift']):.0%} and "
        f"{median(heads['healthy_step_drift']):.0%}).",
    ]
    for name, where, within in (
        ("decays", "orthogonal", False),
        ("decays", "inside", True),
        ("healthy_decays", "ordinary text, orthogonal", False),
    ):
        left = []
        for d in result[name]:
            if d["size"] == SMALL and d["within"] == within:
                left.append(d["change"][1] / d["change"][0])
        lines.append(f"After one period {median(left):.2f} of a small disturbance is left ({where}).")
    return lines


def figure(data: Row) -> Any:
    """Four panels: distances of queries and keys, of scores, the tail operator along the text, and decay."""
    result = data["result"]
    period = result["period"]
    heads = {name: array(values) for name, values in result["heads"].items()}
    titles = [
        "Queries and keys a shift apart",
        "Scores a shift apart",
        "Tail operator (Eq. 4)",
        "Decay of a disturbance",
    ]
    fig: Any = make_subplots(rows=2, cols=2, subplot_titles=titles, horizontal_spacing=0.09, vertical_spacing=0.16)
    shifts = (
        ("", f"{period} apart", BLUE),
        ("other_", f"{period + 1} apart", ORANGE),
        ("healthy_", "ordinary text", GREY),
    )
    layers, count = heads["spread"].shape
    at = (np.arange(layers)[:, None] + (np.arange(count) + 0.5) / count * 0.8 - 0.4).ravel()

    def dots(name: str, norm: str, title: str, color: str, symbol: str, col: int, shown: bool) -> None:
        if name in heads:
            y = np.maximum((heads[name] / heads[norm]).ravel(), 1e-6)  # an exact repetition shows on a logarithmic axis
            marker = {"color": color, "symbol": symbol, "size": 6}
            fig.add_scatter(x=at, y=y, mode="markers", marker=marker, name=title, showlegend=shown, row=1, col=col)

    for prefix, title, color in shifts:
        dots(f"{prefix}delta_q", "query_norm", title, color, "circle", 1, True)
        dots(f"{prefix}delta_k", "key_norm", f"keys, {title}", color, "x-thin-open", 1, False)
        dots(f"{prefix}change", "spread", title, color, "circle", 2, False)
    dots("bound", "spread", "bound of Eq. 15", GREEN, "line-ew-open", 2, True)
    for name, title, color in (("period", "", BLUE), ("step", "in 1 step", ORANGE), ("healthy_period", "", GREY)):
        first = period
        if name == "step":
            first = 1
        seen = np.array(result["positions"]) >= first
        middle = np.median(array(result["drift"][name])[:, seen], axis=0)
        x = np.array(result["positions"])[seen]
        fig.add_scatter(x=x, y=middle, name=title, line_color=color, showlegend=bool(title), row=2, col=1)
    fig.add_vline(result["onset"], line={"color": GREY, "dash": "dot"}, row=2, col=1)
    parts = (
        ("decays", False, SMALL, "orthogonal", BLUE),
        ("decays", True, SMALL, "inside the tail subspace", GREEN),
        ("healthy_decays", False, SMALL, "ordinary text", GREY),
        ("decays", False, LARGE, "as large as the state", ORANGE),
    )
    for name, within, size, title, color in parts:
        left = []
        for d in result[name]:
            if d["size"] == size and d["within"] == within:
                left.append(d["change"])
        if left:
            middle = np.median(array(left) / array(left)[:, :1], axis=0)
            fig.add_scatter(y=middle, name=f"disturbed {title}", line_color=color, row=2, col=2)
    fig.update_yaxes(type="log", exponentformat="power")
    for place, title in enumerate(("layer", "layer", "position (dotted: the loop begins)", "periods later")):
        fig.update_xaxes(title_text=title, row=place // 2 + 1, col=place % 2 + 1)
    return figure_of(fig, None, summary(result), width=1400, height=950, legend=-0.08, bottom=80)


def main(
    *,
    model: str | None = None,
    max_new_tokens: int = 512,
    layer: Sequence[int] | None = None,
    out: Path = Path("figures"),
) -> None:
    """Make what the module describes.

    Args:
        model: Short name, hub id or folder; default: the model in the package.
        layer: May be given again; default: all.
    """
    started = time.perf_counter()
    setup = Setup.open(model, dtype="float32", device="cpu", loading="whole")
    layers = attending_layers(setup.target, layer)
    result = measure(setup, setup.ids[0].tolist(), max_new_tokens, layers)
    settings = {"model": setup.target.name, "max_new_tokens": max_new_tokens, "layers": layers}
    save("rotary", record("loopguard-rotary", result, settings, started=started), figure, out)
    print("\n".join([f"{summary(result)}.", *details(result)]))


if __name__ == "__main__":
    run(main)
