"""Whether one attention layer separates first from later tokens by a plane or one neuron (Yona et al. 2025, Fig. 4)."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
import plotly.graph_objects as go
import torch
from einops import einsum, rearrange, reduce
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.console import Progress, silent
from sinkscope.files.notation import agreeing, counted, neuron_name, read_neuron
from sinkscope.interventions.edits import site_of
from sinkscope.measure import Count, Number, Option, Result, Setup, measurement
from sinkscope.measure.style import BLUE, GREY, finished
from sinkscope.models.target import Target, on_input
from sinkscope.sinks.tokens import first_tokens
from sinkscope.trace.run import trace

PER_TOKEN = 4  # largest number of later positions per token, so that frequent words do not dominate
CLEAR = 8  # without BOS the first few tokens may still be marked as the first is: later positions begin here
CLASS_MINIMUM = 2  # smallest number of samples of a class on either side of the split
BATCH_TEXTS = 64
SHUFFLES = 5  # draws of the control
REFITS = 16  # planes fitted to tokens and texts that are drawn again, for the margin
SORTED_COLUMNS = 2048  # columns sorted at a time
SEPARABLE = 0.99  # AUROC from which the conclusion says "separates"
ABOVE_CHANCE = 0.1  # an AUROC must exceed 0.5, and that with shuffled labels, by this much to say "partly"


@dataclass(frozen=True)
class TokenSplit:
    """The first and later tokens to be separated; half of the tokens and half of the texts are held out.

    Attributes:
        firsts: Tokens to put first.
        first_held: Which of them are held out.
        ids: The texts.
        later: Places in the texts, as (row, position).
        later_held: Which of these places are held out.
    """

    firsts: Int[Tensor, " first"]
    first_held: Bool[Tensor, " first"]
    ids: Int[Tensor, "row pos"]
    later: Int[Tensor, "later 2"]
    later_held: Bool[Tensor, " later"]

    @property
    def later_tokens(self) -> Int[Tensor, " later"]:
        """The tokens at the later places."""
        return self.ids[self.later[:, 0], self.later[:, 1]]


def split_tokens(ids: Int[Tensor, "row pos"], words: list[int], bos: int | None, seed: int) -> TokenSplit:
    """Hold out half of the tokens and half of the texts, and take later positions where both halves agree.

    Args:
        ids: Typical text.
        words: Tokens to put first, without BOS.
        bos: BOS, if texts begin with it.
        seed: Seed of the draw.

    Raises:
        SinkscopeError: Too few words, or a text too short for both classes on both sides of the split.
    """
    generator = torch.Generator().manual_seed(seed)
    firsts = torch.tensor(words)[torch.randperm(len(words), generator=generator)]
    token_held = torch.randint(2, (int(max(ids.max(), firsts.max())) + 1,), generator=generator).bool()
    token_held[firsts] = torch.arange(len(firsts)) % 2 == 1
    text_held = torch.randperm(len(ids), generator=generator) % 2 == 1

    begin = CLEAR if bos is None else 1
    width = ids.shape[1] - begin
    places: list[tuple[int, int]] = []
    places_held: list[bool] = []
    times_taken: dict[int, int] = {}
    for place in torch.randperm(len(ids) * width, generator=generator).tolist():
        row, pos = place // width, place % width + begin
        token = int(ids[row, pos])
        taken = times_taken.get(token, 0)
        if token == bos or bool(token_held[token] != text_held[row]) or taken == PER_TOKEN:
            continue
        times_taken[token] = taken + 1
        places.append((row, pos))
        places_held.append(bool(token_held[token]))
    later_held = torch.tensor(places_held).bool()
    for name, held in (("first", token_held[firsts]), ("later", later_held)):
        if min(int(held.sum()), int((~held).sum())) < CLASS_MINIMUM:
            raise SinkscopeError(
                f"{len(held)} {name} tokens are too few to train on some and hold out others; raise --count, or give a "
                "longer --text"
            )
    return TokenSplit(firsts, token_held[firsts], ids, torch.tensor(places), later_held)


@dataclass(frozen=True)
class FactorValues:
    """Pre-activations from one input projection ("gate", "up", or "" if there is only one) of one expert."""

    name: str
    expert: int | None
    values: Float[Tensor, "sample neuron"]


@torch.no_grad()
def layer_samples(
    target: Target,
    layer: int,
    ids: Int[Tensor, "row pos"],
    places: Int[Tensor, "sample 2"],
    progress: Progress = silent,
) -> tuple[Float[Tensor, "sample d_model"], list[FactorValues]]:
    """Read a layer at `places`, given as (row, position) of `ids`.

    Returns:
        The residual stream after the attention (`hook_resid_mid`; with parallel residual, where the MLP does not read
        that stream, `hook_resid_pre` + `hook_attn_out`), and the pre-activations of all neurons of the layer's MLP.
    """
    adapter, sites = target.adapter, [f"blocks.{layer}.hook_resid_mid"]
    if adapter.mid is None:
        sites = [f"blocks.{layer}.hook_resid_pre", f"blocks.{layer}.hook_attn_out"]
    path = target.path(layer, adapter.mlp)
    if path == target.path(layer, adapter.down):  # the MLP is no module of its own
        path = adapter.up
    resid: list[Tensor] = []
    mlp_inputs: list[Tensor] = []
    keep_input = on_input(lambda hidden: mlp_inputs.append(hidden.detach().flatten(0, -2)))
    for rows in ids.split(BATCH_TEXTS):
        with target.hooks((target.sub(layer, path or ""), "pre", keep_input)):
            values = trace(target, rows, sites)
        resid.append(rearrange([value.float() for value in values.values()], "site row pos d -> (row pos) d site"))
        progress("sequences", len(resid) * BATCH_TEXTS, len(ids))
    flat = places[:, 0] * ids.shape[1] + places[:, 1]
    mlp_input = torch.cat(mlp_inputs)
    with target.loaded(layer):
        factors = _factors(target, layer, mlp_input[flat.to(mlp_input.device)])
    return reduce(torch.cat(resid)[flat], "sample d site -> sample d", "sum"), factors


def _factors(target: Target, layer: int, mlp_input: Float[Tensor, "sample d_model"]) -> list[FactorValues]:
    """The factors of a dense MLP, or of every expert, whether or not the router chose it, and of a shared one."""
    adapter = target.adapter
    pairs: list[tuple[int | None, Sequence[Tensor]]] = []
    for expert in range(target.n_experts(layer)):
        pairs.append((expert, target.experts(layer).factors(expert, mlp_input)))
    if target.has_mlp(layer, None):
        up = target.mlp_part(layer, "up")(mlp_input)
        if adapter.fused_gate_up:
            pairs.append((None, up.chunk(2, -1)))
        elif target.has_part(layer, adapter.gate):
            pairs.append((None, (target.mlp_part(layer, "gate")(mlp_input), up)))
        else:
            pairs.append((None, (up,)))
    factors: list[FactorValues] = []
    for expert, outputs in pairs:
        names = ("gate", "up")
        if len(outputs) == 1:
            names = ("",)
        for name, values in zip(names, outputs, strict=True):
            factors.append(FactorValues(name, expert, values.float().cpu()))
    return factors


def auroc(values: Float[Tensor, "sample k"], first: Bool[Tensor, " sample"]) -> Float[Tensor, " k"]:
    """Probability that a value of the first class exceeds one of the other, ties counted half; for every column."""
    areas: list[Tensor] = []
    for columns in values.split(SORTED_COLUMNS, 1):
        ones = rearrange(columns[first], "sample k -> k sample").contiguous()
        others = rearrange(columns[~first], "sample k -> k sample").contiguous().sort(1).values
        below = torch.searchsorted(others, ones) + torch.searchsorted(others, ones, right=True)
        areas.append(reduce(below.double(), "k sample -> k", "mean").div(2 * others.shape[1]).float())
    return torch.cat(areas)


def margin(values: Float[Tensor, "sample k"], first: Bool[Tensor, " sample"]) -> Float[Tensor, " k"]:
    """Lowest value of the first class minus highest of the other, relative to the range of all; above 0: no overlap."""
    span = (values.max(0).values - values.min(0).values).clamp(min=1e-12)
    return (values[first].min(0).values - values[~first].max(0).values) / span


def training_coordinates(
    samples: Float[Tensor, "sample d_model"], train: Bool[Tensor, " sample"]
) -> Float[Tensor, "sample k"]:
    """Samples in coordinates that the training samples span; anything outside that span has no influence on a plane.

    Each residual dimension is centred and scaled by its mean and deviation over the training samples.
    """
    data = samples.double()
    deviation, mean = torch.std_mean(data[train], 0, correction=0)
    scaled = (data - mean) / torch.where(deviation > 0, deviation, torch.ones_like(deviation))
    _, sizes, basis = torch.linalg.svd(scaled[train], full_matrices=False)
    basis = basis[sizes > 1e-6 * sizes[0]]
    return einsum(scaled, basis, "sample d_model, k d_model -> sample k")


def plane_scores(
    coordinates: Float[Tensor, "sample k"], first: Bool[Tensor, " sample"], train: Bool[Tensor, " sample"]
) -> Float[Tensor, "sample 1"]:
    """Scores of all samples by LDA, fitted to the training samples.

    They are moved and scaled so that the means of the two fitted classes are at 0.5 and -0.5.
    """
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    if not coordinates.shape[1]:  # all samples are alike
        return torch.zeros(len(first), 1)
    lda = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto", priors=[0.5, 0.5])
    lda.fit(coordinates[train].numpy(), first[train].numpy())
    scores = torch.from_numpy(lda.decision_function(coordinates.numpy())).float()
    ones, others = scores[first & train].mean(), scores[~first & train].mean()
    return rearrange((scores - (ones + others) / 2) / (ones - others), "sample -> sample 1")


@dataclass(frozen=True)
class BestNeuron:
    """The neuron that separates the training samples best, by one factor of its input.

    Attributes:
        name: The neuron.
        pre_activation: Its pre-activations.
        sign: Their sign with which first tokens are higher.
    """

    name: str
    pre_activation: Float[Tensor, "sample 1"]
    sign: float

    @property
    def scores(self) -> Float[Tensor, "sample 1"]:
        """The pre-activations, turned so that first tokens are higher."""
        return self.sign * self.pre_activation


def best_neuron(
    layer: int, factors: Sequence[FactorValues], first: Bool[Tensor, " sample"], train: Bool[Tensor, " sample"]
) -> BestNeuron:
    """Search all neurons of all experts with either sign; of equal neurons, the one with the widest gap is best."""
    best_score, best = -1.0, BestNeuron("", torch.zeros(len(first), 1), 1.0)
    for factor in factors:
        there = factor.values[train]
        area = auroc(there, first[train])
        sign = torch.where(area < 0.5, -1.0, 1.0)
        gap = margin(there * sign, first[train])
        area = torch.maximum(area, 1 - area)
        score = area.double() + 1e-9 * gap.double()
        neuron = int(score.argmax())
        if float(score[neuron]) > best_score:
            name = neuron_name(layer, factor.expert, neuron)
            best = BestNeuron(name, factor.values[:, neuron, None], float(sign[neuron]))
            best_score = float(score[neuron])
    return best


def _best_scores(
    layer: int, factors: Sequence[FactorValues], train: Bool[Tensor, " sample"], first: Bool[Tensor, " sample"]
) -> Float[Tensor, "sample 1"]:
    return best_neuron(layer, factors, first, train).scores


@dataclass(frozen=True)
class LabelledSamples:
    """Which samples stood first, which are fitted and which are held out, and random labels for the control."""

    first: Bool[Tensor, " sample"]
    train: Bool[Tensor, " sample"]
    held: Bool[Tensor, " sample"]
    shuffled: list[Bool[Tensor, " sample"]]

    @classmethod
    def of(cls, split: TokenSplit, specials: int, seed: int) -> LabelledSamples:
        """First tokens, then later ones; the first samples are special tokens, neither fitted nor held out.

        A shuffled label belongs to a token: whoever knows a token knows its label, so it is learned where tokens leak.
        """
        neither = torch.zeros(specials, dtype=torch.bool)
        first = torch.arange(specials + len(split.firsts) + len(split.later)) < specials + len(split.firsts)
        train = torch.cat([neither, ~split.first_held, ~split.later_held])
        held = torch.cat([neither, split.first_held, split.later_held])
        special_ids = split.ids[0, :specials]
        ids = torch.cat([special_ids, split.firsts, split.later_tokens])
        kinds, which = ids.unique(return_inverse=True)
        shuffled: list[Tensor] = []
        for draw_number in range(SHUFFLES):
            generator = torch.Generator().manual_seed(seed + draw_number)
            labels = torch.randperm(len(kinds), generator=generator) % 2 == 0
            shuffled.append(labels[which])
        return cls(first, train, held, shuffled)

    def held_out_auroc(self, score: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        """AUROC on held-out samples of a method fitted to the true labels, and the mean over shuffled ones."""
        held = self.held
        chance = [auroc(score(labels)[held], labels[held]) for labels in self.shuffled]
        return float(auroc(score(self.first)[held], self.first[held])), float(torch.stack(chance).mean())


def margin_of_plane(
    coordinates: Float[Tensor, "sample k"], labels: LabelledSamples, groups: Int[Tensor, " sample"], seed: int
) -> float:
    """Two standard errors of a plane's held-out AUROC: tokens and texts are drawn again, and the plane is fitted again.

    Args:
        coordinates: The samples.
        labels: Their classes, and which are held out.
        groups: Samples that are drawn together: those of one text.
        seed: Seed of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    areas: list[Tensor] = []
    for _ in range(REFITS):
        drawn: list[Tensor] = []
        for side in (labels.train, labels.held):
            for of_class in (labels.first, ~labels.first):
                members = (side & of_class).nonzero().flatten()
                kinds, which = groups[members].unique(return_inverse=True)
                picks = torch.randint(len(kinds), (len(kinds),), generator=generator)
                drawn.append(members.repeat_interleave(picks.bincount(minlength=len(kinds))[which]))
        again = torch.cat(drawn)
        first = labels.first[again]
        train = torch.arange(len(again)) < len(drawn[0]) + len(drawn[1])
        areas.append(auroc(plane_scores(coordinates[again], first, train)[~train], first[~train]))
    return 2 * float(torch.cat(areas).std())


@dataclass(frozen=True, kw_only=True)
class Separability(Result):
    """How well the residual stream after an attention layer separates first from later tokens.

    AUROC 1 is perfect separation, 0.5 is none.

    Attributes:
        layer: Layer whose attention was examined, and whose MLP contains the neurons.
        method: "plane" (LDA), "gate neuron" and "up neuron", or "neuron" where the MLP has no gate.
        neuron: The neuron of each method; empty for the plane.
        auroc: AUROC on held-out tokens and texts.
        margin: Two standard errors of the plane's AUROC over tokens and texts. None in results of earlier versions.
        shuffled_auroc: Control: held-out AUROC with labels drawn at random per token, mean of 5 draws. Anything above
            0.5 was learned from tokens that are on both sides of the split.
        tokens: The samples. BOS comes first, if there is one.
        first: Which of these stood first.
        held_out: Which of these were held out. BOS was neither fitted nor held out.
        score: Their scores by the plane; above 0 lies the side of first tokens.
        pre_activation: Their pre-activations at the neuron of each method that has one.
    """

    kind: ClassVar[str] = "separate"

    layer: int
    method: tuple[str, ...]
    neuron: tuple[str, ...]
    auroc: Float[np.ndarray, " method"]
    shuffled_auroc: Float[np.ndarray, " method"]
    margin: float | None = None
    tokens: tuple[str, ...]
    first: Bool[np.ndarray, " sample"]
    held_out: Bool[np.ndarray, " sample"]
    score: Float[np.ndarray, " sample"]
    pre_activation: Float[np.ndarray, "sample factor"]

    @property
    def missed(self) -> list[str]:
        """Held-out first tokens on the side of later ones."""
        return [self.tokens[sample] for sample in np.flatnonzero(self.first & self.held_out & (self.score < 0))]

    def rows(self) -> list[dict[str, Any]]:
        """One row per method."""
        rows: list[dict[str, Any]] = []
        for number, (method, neuron) in enumerate(zip(self.method, self.neuron, strict=True)):
            row: dict[str, Any] = {"method": method, "neuron": neuron or None}
            for name in ("auroc", "shuffled_auroc"):
                row[name] = float(getattr(self, name)[number])
            rows.append(row)
        return rows

    def conclusion(self) -> str:
        """Whether a plane, or the neuron that was requested, separates first tokens, beside shuffled labels."""
        best, what, error = 0, "a plane", self.margin or 0.0
        if self.settings.get("neuron") is not None:
            best = 1 + int(self.auroc[1:].argmax())
            what, error = f"the {self.method[best]} {self.neuron[best]}", 0.0
        reached, chance = self.auroc[best], self.shuffled_auroc[best]
        verdict = "does not separate"
        if reached > max(chance, 0.5) + max(ABOVE_CHANCE, error):
            verdict = "separates" if reached >= SEPARABLE else "partly separates"
        within = f" ± {error:.2g}" if error else ""
        return (
            f"After the attention of layer {self.layer}, {what} {verdict} first tokens from later ones: held-out AUROC "
            f"{reached:.4f}{within}, and {chance:.2f} with shuffled labels."
        )

    def numbers(self) -> list[Number]:
        """AUROC of the plane."""
        reached, chance = float(self.auroc[0]), float(self.shuffled_auroc[0])
        return [Number("AUROC of a plane, first against later", reached, chance, self.margin)]

    def details(self) -> list[str]:
        """The samples, and the tokens on the wrong side."""
        first, later = int(self.first.sum()), int((~self.first).sum())
        held, missed = int((self.first & self.held_out).sum()), len(self.missed)
        lie = agreeing(missed, "lies", "lie")
        return [
            f"{counted(first, 'first token')} and {counted(later, 'later token')} were read; half of the tokens and of "
            "the texts were held out.",
            f"{missed} of {counted(held, 'held-out first token')} {lie} on the side of later ones.",
        ]


def draw(result: Separability) -> go.Figure:
    """First and later tokens by the plane and by the best neuron."""
    best = int(result.auroc[1:].argmax())
    named = html.escape(f"{result.method[1 + best]} {result.neuron[1 + best]}")
    fig = go.Figure()
    for first, color in ((False, GREY), (True, BLUE)):
        for held_out, symbol in ((False, "circle-open"), (True, "circle")):
            group = np.flatnonzero((result.first == first) & (result.held_out == held_out))
            fig.add_scatter(
                x=result.score[group],
                y=result.pre_activation[group, best],
                text=[html.escape(repr(result.tokens[sample])) for sample in group],
                mode="markers",
                marker={"color": color, "symbol": symbol, "opacity": 0.75},
                name=f"{'first' if first else 'later'}, {'held out' if held_out else 'fitted'}",
            )
    fig.add_vline(0, line={"color": GREY, "dash": "dot"})
    fig.update_xaxes(title_text=f"score by the plane (AUROC {result.auroc[0]:.4f})")
    fig.update_yaxes(title_text=f"pre-activation of the {named} (AUROC {result.auroc[1 + best]:.4f})")
    return finished(fig, result, width=900, height=560, legend=-0.17)


@measurement(group="Sinks", figure=draw, command="separate", quick={"count": 128, "texts": 32})
def separability(
    setup: Setup,
    *,
    count: Annotated[int, Option(min=4)] = 1024,
    texts: Annotated[int, Option(min=2)] = 128,
    layer: Count = 0,
    neuron: Annotated[str | None, Option(metavar="NEURON")] = None,
) -> Separability:
    """Separate first from later tokens after an attention layer, by a plane and by the best single neuron of its MLP.

    First tokens are many different tokens, each alone and without BOS; later tokens come from typical text. Half of the
    tokens and half of the texts are held out, in both classes at once, so the token itself carries no information about
    its class. The paper's "gate" may be either factor of the MLP, so both are searched.

    Args:
        count: Number of tokens of the text to put first, drawn by the seed.
        texts: Number of pieces of typical text, 64 tokens each.
        layer: Layer whose attention output is examined, and whose MLP contains the neurons.
        neuron: Examine this neuron, such as L0.N338, by both of its factors instead of searching for the best one.

    Example:
        sinkscope separate --model llama-2-7b --layer 0
    """
    target, bos = setup.target, setup.bos
    site = None if neuron is None else site_of(read_neuron(neuron))
    if site is not None:
        target.check_site(*site)
        layer = site.layer
    target.check_site(layer)
    setup.record(texts=len(setup.ids), layer=layer)
    words = [word for word in first_tokens(target, setup.ids, count, setup.seed) if word != bos]
    split = split_tokens(setup.ids, words, bos, setup.seed)
    specials = torch.tensor([] if bos is None else [bos], dtype=torch.long)  # only classified
    firsts = torch.cat([specials, split.firsts])
    labels = LabelledSamples.of(split, len(specials), setup.seed)
    alone = torch.zeros(len(firsts), 2, dtype=torch.long)
    alone[:, 0] = torch.arange(len(firsts))
    first_resid, first_factors = layer_samples(
        target, layer, rearrange(firsts, "first -> first 1"), alone, setup.progress
    )
    later_resid, later_factors = layer_samples(target, layer, split.ids, split.later, setup.progress)
    train = labels.train
    later_texts = len(firsts) + split.later[:, 0]
    coordinates = training_coordinates(torch.cat([first_resid, later_resid]), train)
    plane = plane_scores(coordinates, labels.first, train)
    methods, neurons = ["plane"], [""]
    areas = [labels.held_out_auroc(lambda of: plane_scores(coordinates, of, train))]
    factors: dict[str, list[FactorValues]] = {}
    for one, other in zip(first_factors, later_factors, strict=True):
        values = torch.cat([one.values, other.values])
        if site is None:
            factors.setdefault(one.name, []).append(FactorValues(one.name, one.expert, values))
        elif one.expert == site.expert:
            factors[one.name] = [FactorValues(one.name, one.expert, values[:, [site.neuron]])]
    pre_activations: list[Tensor] = []
    for name, searched in factors.items():
        best = best_neuron(layer, searched, labels.first, train)
        methods.append(f"{name} neuron".strip())
        neurons.append(best.name if site is None else str(site))
        areas.append(labels.held_out_auroc(partial(_best_scores, layer, searched, train)))
        pre_activations.append(best.pre_activation)
    tokens = torch.cat([firsts, split.later_tokens]).tolist()
    return Separability(
        layer=layer,
        method=tuple(methods),
        neuron=tuple(neurons),
        auroc=np.array([area for area, _ in areas]),
        shuffled_auroc=np.array([chance for _, chance in areas]),
        margin=margin_of_plane(coordinates, labels, torch.cat([torch.arange(len(firsts)), later_texts]), setup.seed),
        tokens=tuple(setup.tokenizer.decode([token]) for token in tokens),
        first=labels.first.numpy(),
        held_out=labels.held.numpy(),
        score=plane[:, 0].numpy(),
        pre_activation=torch.cat(pre_activations, 1).numpy(),
    )
