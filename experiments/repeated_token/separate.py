"""First and later tokens after an attention layer, separated by a plane and by the best neuron (Yona et al., Fig. 4).

    python -m experiments.repeated_token.separate [--model NAME] [--layer 0] [--neuron N] [--count N] [--out figures]

First tokens stand alone, without BOS; later ones come from typical text. Half of the tokens and half of the texts are
held out, in both classes at once, so a token tells nothing of its class. As the control everything is repeated with
labels drawn per token, and the margin is two standard errors over tokens and texts that are drawn again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import torch
from einops import einsum, rearrange, reduce
from jaxtyping import Bool, Float, Int
from scipy.stats import rankdata
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

import sinkscope as ss
from experiments.drawn import save
from experiments.record import Row, record
from experiments.script import run
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.measure import Setup
from sinkscope.results.style import BLUE, GREY, figure_of
from sinkscope.sinks.tokens import first_tokens

PER_TOKEN = 4  # largest number of later positions per token, so that frequent words do not dominate
CLEAR = 8  # without BOS the first few tokens may still be marked as the first is: later positions begin here
SHUFFLES = 5  # draws of the control
REFITS = 16  # draws for the margin
SEPARABLE = 0.99  # AUROC from which a sentence says "separates"
ABOVE_CHANCE = 0.1  # an AUROC less its margin must exceed chance by this much to say that anything separates

Labels = Bool[np.ndarray, " sample"]
Values = Float[np.ndarray, "sample k"]
Method = Callable[[Values, Labels, Labels], Float[np.ndarray, " sample"]]
"""Scores of all samples, higher for first tokens; fitted with these labels to the samples marked for training."""


@dataclass(frozen=True)
class Split:
    """The samples, first tokens before later ones.

    Attributes:
        texts: Sequences of one token, and pieces of text.
        places: Of each sample, which of these sequences it is in, and where.
        tokens: Its token.
        first: Whether it stands first.
        held: Whether it is held out.
    """

    texts: list[Int[Tensor, "row pos"]]
    places: list[Int[Tensor, "sample 2"]]
    tokens: Int[np.ndarray, " sample"]
    first: Labels
    held: Labels


def split_tokens(ids: Int[Tensor, "row pos"], words: list[int], bos: int | None, seed: int) -> Split:
    """Hold out half of the tokens and half of the texts, and take later positions where both halves agree."""
    generator = torch.Generator().manual_seed(seed)
    firsts = torch.tensor(words)[torch.randperm(len(words), generator=generator)]
    token_held = torch.randint(2, (int(max(ids.max(), firsts.max())) + 1,), generator=generator).bool()
    token_held[firsts] = torch.arange(len(firsts)) % 2 == 1
    text_held = torch.randperm(len(ids), generator=generator) % 2 == 1
    begin = 1
    if bos is None:
        begin = CLEAR
    width = ids.shape[1] - begin
    places: list[tuple[int, int]] = []
    taken: dict[int, int] = {}
    for place in torch.randperm(len(ids) * width, generator=generator).tolist():
        row = place // width
        pos = place % width + begin
        token = int(ids[row, pos])
        if token != bos and token_held[token] == text_held[row] and taken.get(token, 0) < PER_TOKEN:
            taken[token] = taken.get(token, 0) + 1
            places.append((row, pos))
    later = torch.tensor(places).reshape(-1, 2)
    tokens = torch.cat([firsts, ids[later[:, 0], later[:, 1]]])
    first = np.arange(len(tokens)) < len(firsts)
    held = token_held[tokens].numpy()
    for of_class in (first, ~first):
        if min((of_class & held).sum(), (of_class & ~held).sum()) < 2:
            raise SinkscopeError("too few tokens to train on some and hold out others; raise --count or --texts")
    alone = torch.stack([torch.arange(len(firsts)), torch.zeros(len(firsts), dtype=torch.long)], 1)
    return Split([rearrange(firsts, "first -> first 1"), ids], [alone, later], tokens.numpy(), first, held)


def offered(setup: Setup, layer: int, *places: str) -> list[str]:
    """Those of some sites of a layer that this architecture has."""
    sites: list[str] = []
    for place in places:
        with suppress(UnsupportedError):
            ss.trace(setup.target, setup.ids[:1, :2], f"blocks.{layer}.{place}")
            sites.append(f"blocks.{layer}.{place}")
    return sites


def samples(setup: Setup, split: Split, sites: list[str]) -> list[Values]:
    """What a layer has at the sites, at the place of each sample."""
    values: list[list[Tensor]] = []
    for _ in sites:
        values.append([])
    for ids, places in zip(split.texts, split.places, strict=True):
        traced = ss.trace(setup.target, ids, sites, batch_size=64)
        for site, kept in zip(sites, values, strict=True):
            kept.append(traced[site][places[:, 0], places[:, 1]].float())
    return [torch.cat(kept).numpy() for kept in values]


def auroc(values: Values, first: Labels) -> Float[np.ndarray, " k"]:
    """Probability that a value of the first class exceeds one of the other, ties counted half; for every column."""
    ones = int(first.sum())
    ranks = rankdata(values, axis=0)[first].sum(0)
    return (ranks - ones * (ones + 1) / 2) / (ones * (len(first) - ones))


def coordinates(resid: Values, train: Labels) -> Values:
    """Samples in coordinates that the training samples span; each residual dimension is centred and scaled by these."""
    data = resid.astype(float)
    deviation = data[train].std(0)
    scaled = (data - data[train].mean(0)) / np.where(deviation > 0, deviation, 1)
    _, sizes, basis = np.linalg.svd(scaled[train], full_matrices=False)
    return einsum(scaled, basis[sizes > 1e-6 * sizes[0]], "sample d_model, k d_model -> sample k")


def plane(values: Values, first: Labels, train: Labels) -> Float[np.ndarray, " sample"]:
    """Scores by LDA."""
    lda = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto", priors=[0.5, 0.5])
    return lda.fit(values[train], first[train]).decision_function(values)


def best_column(values: Values, first: Labels) -> tuple[int, float]:
    """The neuron that separates best, and its sign; of equally good ones, the one with the widest gap."""
    area = auroc(values, first)
    sign = np.where(area < 0.5, -1.0, 1.0)
    turned = values * sign
    gap = (turned[first].min(0) - turned[~first].max(0)) / np.ptp(values, axis=0).clip(min=1e-12)
    column = int((np.maximum(area, 1 - area) + 1e-9 * gap).argmax())
    return column, float(sign[column])


def best_neuron(values: Values, first: Labels, train: Labels) -> Float[np.ndarray, " sample"]:
    """Pre-activations of the neuron that separates best, turned so that first tokens are higher."""
    column, sign = best_column(values[train], first[train])
    return sign * values[:, column]


def held_out(method: Method, values: Values, first: Labels, train: Labels) -> float:
    """AUROC of a method on the samples that it was not fitted to."""
    return float(auroc(method(values, first, train)[~train, None], first[~train])[0])


def measured(method: Method, values: Values, split: Split, seed: int) -> dict[str, float]:
    """AUROC on held-out samples, its margin, and the mean with labels that are drawn at random per token."""
    train = ~split.held
    kinds, kind = np.unique(split.tokens, return_inverse=True)
    chance: list[float] = []
    for draw in range(SHUFFLES):
        order = torch.randperm(len(kinds), generator=torch.Generator().manual_seed(seed + draw)).numpy()
        chance.append(held_out(method, values, (order % 2 == 0)[kind], train))
    generator = torch.Generator().manual_seed(seed)
    firsts = len(split.places[0])
    group = np.concatenate([np.arange(firsts), firsts + split.places[1][:, 0].numpy()])  # a token, or a text
    again: list[float] = []
    for _ in range(REFITS):
        picks: list[Int[np.ndarray, " pick"]] = []
        for side in (train & split.first, train & ~split.first, split.held & split.first, split.held & ~split.first):
            members, of_group = np.unique(group[side], return_inverse=True)
            drawn_members = torch.randint(len(members), (len(members),), generator=generator)
            times = drawn_members.bincount(minlength=len(members)).numpy()
            picks.append(np.flatnonzero(side).repeat(times[of_group]))
        drawn = np.concatenate(picks)
        again.append(held_out(method, values[drawn], split.first[drawn], train[drawn]))
    area = held_out(method, values, split.first, train)
    return {"auroc": area, "margin": 2 * float(np.std(again, ddof=1)), "shuffled_auroc": float(np.mean(chance))}


def separate(setup: Setup, layer: int, count: int, neuron: int | None) -> Row:
    """A row for each method, and the scores and pre-activations of the samples."""
    words = []
    for word in first_tokens(setup.target, setup.ids, count, setup.seed):
        if word != setup.bos:
            words.append(word)
    split = split_tokens(setup.ids, words, setup.bos, setup.seed)
    resid_sites = offered(setup, layer, "hook_resid_mid") or offered(setup, layer, "hook_resid_pre", "hook_attn_out")
    factors = offered(setup, layer, "mlp.hook_pre", "mlp.hook_pre_linear")  # none of a mixture
    traced = samples(setup, split, [*resid_sites, *factors])
    resid = reduce(traced[: len(resid_sites)], "site sample d_model -> sample d_model", "sum")
    values = coordinates(resid, ~split.held)
    rows = [{"method": "plane", "neuron": None, **measured(plane, values, split, setup.seed)}]
    columns = {"score": plane(values, split.first, ~split.held)}
    names = ("neuron",)
    if len(factors) == 2:
        names = ("gate neuron", "up neuron")
    for name, pre in zip(names, traced[len(resid_sites) :], strict=False):
        best = neuron
        if best is None:
            best, _ = best_column(pre[~split.held], split.first[~split.held])
        else:
            pre = pre[:, [best]]
        rows.append({"method": name, "neuron": f"L{layer}.N{best}", **measured(best_neuron, pre, split, setup.seed)})
        columns[name] = pre[:, best if neuron is None else 0]
    columns |= {"first": split.first, "held_out": split.held}
    of_samples: Row = {name: column.tolist() for name, column in columns.items()}
    of_samples["token"] = [setup.tokenizer.decode([token]) for token in split.tokens.tolist()]
    return {"layer": layer, "methods": rows, "samples": of_samples}


def sentence(row: Row, layer: int) -> str:
    """Whether a method separates first tokens, with its control: only what exceeds chance by more than its margin."""
    verdict = "does not separate"
    if row["auroc"] - row["margin"] > max(0.5, row["shuffled_auroc"]) + ABOVE_CHANCE:
        verdict = "partly separates"
        if row["auroc"] >= SEPARABLE:
            verdict = "separates"
    if row["neuron"] is None:
        what = "a plane"
    else:
        what = f"the {row['method']} {row['neuron']}"
    return (
        f"After the attention of layer {layer}, {what} {verdict} first tokens from later ones: held-out AUROC "
        f"{row['auroc']:.4f} ± {row['margin']:.4f}, and {row['shuffled_auroc']:.2f} with shuffled labels"
    )


def figure(data: Row) -> go.Figure:
    """Draw first and later tokens by the plane and by the best neuron."""
    result = data["result"]
    rows = result["methods"]
    of_samples = result["samples"]
    best = max(rows[1:] or rows, key=lambda row: row["auroc"])
    across = of_samples.get(best["method"], of_samples["score"])
    first = np.array(of_samples["first"])
    held = np.array(of_samples["held_out"])
    fig = go.Figure()
    for stands_first, color in ((False, GREY), (True, BLUE)):
        for held_out_side, symbol in ((False, "circle-open"), (True, "circle")):
            group = np.flatnonzero((first == stands_first) & (held == held_out_side))
            text = []
            for sample in group:
                text.append(repr(of_samples["token"][sample]))
            fig.add_scatter(
                x=np.array(of_samples["score"])[group],
                y=np.array(across)[group],
                text=text,
                mode="markers",
                marker={"color": color, "symbol": symbol, "opacity": 0.75},
                name=f"{'first' if stands_first else 'later'}, {'held out' if held_out_side else 'fitted'}",
            )
    fig.add_vline(0, line={"color": GREY, "dash": "dot"})
    fig.update_xaxes(title_text=f"score by the plane (AUROC {rows[0]['auroc']:.4f})")
    fig.update_yaxes(title_text=f"pre-activation of the {best['method']} {best['neuron']} (AUROC {best['auroc']:.4f})")
    return figure_of(fig, None, sentence(rows[0], result["layer"]), width=900, height=560, legend=-0.17)


def main(
    *,
    model: str | None = None,
    layer: int = 0,
    neuron: int | None = None,
    count: int = 1024,
    texts: int = 128,
    out: Path = Path("figures"),
) -> None:
    """Make what the module describes.

    Args:
        model: Short name, hub id or folder; default: the model in the package.
        layer: Layer of the attention, and of the neurons.
        neuron: Examine this neuron, by both factors, instead of the best one.
        count: Tokens of the text to put first.
        texts: Pieces of typical text, 64 tokens each.
    """
    started = time.perf_counter()
    setup = Setup.open(model, texts=texts)
    result = separate(setup, layer, count, neuron)
    for row in result["methods"]:
        print(sentence(row, layer))
    settings = {"model": setup.target.name, "layer": layer, "count": count, "texts": texts}
    save("separate", record("separate", result, settings, started=started, device=setup.target.device), figure, out)


if __name__ == "__main__":
    run(main)
