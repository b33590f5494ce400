"""Whether one attention layer separates first from later tokens by a plane or one neuron (Yona et al. 2025, Fig. 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.console import Progress, silent
from sinkscope.files.notation import neuron_name, read_neuron
from sinkscope.interventions.edits import site_of
from sinkscope.measure import Count, Option, Positive, Result, Setup, measurement
from sinkscope.models.experts import bind, gate_up
from sinkscope.models.target import Target
from sinkscope.sinks.tokens import first_tokens
from sinkscope.trace.run import trace

PER_TOKEN = 4  # largest number of later positions per token, so that frequent words do not dominate
CLEAR = 8  # without BOS the first few tokens may still be marked as the first is: later positions begin here
_LEAST = 2  # smallest number of samples of a class on either side


@dataclass(frozen=True)
class Samples:
    """The first and later tokens to be separated.

    Attributes:
        firsts: Tokens to put first.
        first_held: Which of them are held out.
        ids: The texts.
        later: Places in the texts, as (row, position).
        later_held: Which of these places are held out.
        bos: BOS, if texts begin with it.
    """

    firsts: Int[Tensor, " first"]
    first_held: Bool[Tensor, " first"]
    ids: Int[Tensor, "row pos"]
    later: Int[Tensor, "later 2"]
    later_held: Bool[Tensor, " later"]
    bos: int | None

    @property
    def later_tokens(self) -> Int[Tensor, " later"]:
        """The tokens at the later places."""
        return self.ids[self.later[:, 0], self.later[:, 1]]


def draw_samples(ids: Int[Tensor, "row pos"], words: list[int], bos: int | None, seed: int) -> Samples:
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
    held_token = torch.randint(2, (int(max(ids.max(), firsts.max())) + 1,), generator=generator).bool()
    held_token[firsts] = torch.arange(len(firsts)) % 2 == 1
    held_text = torch.randperm(len(ids), generator=generator) % 2 == 1

    start = CLEAR if bos is None else 1
    later, held, seen = [], [], dict[int, int]()
    for place in (torch.randperm(len(ids) * (ids.shape[1] - start), generator=generator)).tolist():
        row, pos = divmod(place, ids.shape[1] - start)
        token = int(ids[row, pos + start])
        if token == bos or bool(held_token[token] != held_text[row]) or seen.get(token, 0) == PER_TOKEN:
            continue
        seen[token] = seen.get(token, 0) + 1
        later.append((row, pos + start))
        held.append(bool(held_token[token]))
    made = Samples(firsts, held_token[firsts], ids, torch.tensor(later).view(-1, 2), torch.tensor(held).bool(), bos)
    for name, sides in (("first", made.first_held), ("later", made.later_held)):
        if min(int(sides.sum()), int((~sides).sum())) < _LEAST:
            raise SinkscopeError(
                f"{len(sides)} {name} tokens are too few to train on some and hold out others; give more words, or a "
                "longer --text"
            )
    return made


@dataclass(frozen=True)
class Factor:
    """Pre-activations from one input projection ("gate", "up", or "" if there is only one) of one expert."""

    name: str
    expert: int | None
    values: Float[Tensor, "n neuron"]


@dataclass(frozen=True)
class After:
    """A layer at `n` places.

    Attributes:
        resid: Residual stream after the attention (`hook_resid_mid`; with parallel residual, where the MLP does not
            read that stream, `hook_resid_pre` + `hook_attn_out`).
        factors: Pre-activations of all neurons of the layer's MLP.
    """

    resid: Float[Tensor, "n d_model"]
    factors: tuple[Factor, ...]

    @classmethod
    def join(cls, *parts: After) -> After:
        """Concatenate several."""
        columns = zip(*(p.factors for p in parts), strict=True)
        factors = tuple(Factor(c[0].name, c[0].expert, torch.cat([f.values for f in c])) for c in columns)
        return cls(torch.cat([p.resid for p in parts]), factors)


@torch.no_grad()
def after_attention(
    target: Target,
    layer: int,
    ids: Int[Tensor, "row pos"],
    places: Int[Tensor, "n 2"],
    batch_size: int,
    progress: Progress = silent,
) -> After:
    """The layer at `places`, given as (row, position) of `ids`, in their order."""
    a, mixture = target.adapter, target.is_mixture(layer)
    gated = a.gate is not None or a.fused_gate_up
    names = [] if mixture else [("gate", "hook_pre"), ("up", "hook_pre_linear")] if gated else [("", "hook_pre")]
    resid = [f"blocks.{layer}.hook_resid_mid"]
    try:
        trace(target, ids[:1, :1], resid)
    except UnsupportedError:
        resid = [f"blocks.{layer}.hook_resid_pre", f"blocks.{layer}.hook_attn_out"]
    parts: list[list[Tensor]] = []
    order: list[Tensor] = []
    for start in range(0, len(ids), batch_size):
        rows = ids[start : start + batch_size]
        here = ((places[:, 0] >= start) & (places[:, 0] < start + len(rows))).nonzero().flatten()
        row, pos = places[here, 0] - start, places[here, 1]
        order.append(here)
        experts: list[Tensor] = []

        def keep(
            _module: object, args: tuple[Any, ...], kwargs: dict[str, Any], experts: list[Tensor] = experts
        ) -> None:
            experts.append(bind(args, kwargs)[0].detach())

        sites = [f"blocks.{layer}.mlp.{name}" for _, name in names]
        with target.hooks(*([(target.sub(layer, a.experts or ""), "pre", keep)] if mixture else [])):
            got = trace(target, rows, [*resid, *sites])
        seen = [torch.stack([got[site].float() for site in resid]).sum(0), *(got[site] for site in sites)]
        seen += [hidden.reshape(*rows.shape, -1).cpu() for hidden in experts]
        parts.append([tensor[row, pos] for tensor in seen])
        progress("sequences", start + len(rows), len(ids))
    back = torch.cat(order).argsort()
    stream, *read = (torch.cat(tensors)[back] for tensors in zip(*parts, strict=True))
    if mixture:
        return After(stream, _experts(target, layer, read[0]))
    return After(stream, tuple(Factor(name, None, values) for (name, _), values in zip(names, read, strict=True)))


def _experts(target: Target, layer: int, hidden: Float[Tensor, "n d_model"]) -> tuple[Factor, ...]:
    """Both factors of every expert, whether or not the router would have asked it, and of a shared one."""
    factors = []
    with target.loaded(layer):
        module: Any = target.sub(layer, target.adapter.experts or "")
        for expert in range(int(module.num_experts)):
            both = gate_up(module, expert, hidden.to(target.device))
            factors += [Factor(n, expert, v.float().cpu()) for n, v in zip(("gate", "up"), both, strict=True)]
        for name in ("gate", "up") if target.has_shared(layer) else ():
            factors.append(Factor(name, None, target.mlp_part(layer, name)(hidden.to(target.device)).float().cpu()))
    return tuple(factors)


Method = Literal["LDA", "logistic regression"]
SHUFFLES = 5  # draws of the control
SHOWN = 800  # points in the figure
_COLUMNS = 2048  # columns sorted at a time


SEPARABLE = 0.99  # AUROC from which the conclusion says "separable"
CHANCE = 0.1  # an AUROC must exceed that with shuffled labels by this much


@dataclass(frozen=True)
class Separator:
    """One way to separate first from later tokens. AUROC 1 is perfect separation, 0.5 is none.

    Attributes:
        method: "LDA", "logistic regression", "gate neuron", "up neuron", or "neuron" where the MLP has no gate.
        neuron: Its number. None for a plane.
        expert: Its expert in a mixture.
        auroc: AUROC on held-out tokens and texts.
        train_auroc: AUROC on the tokens that the separator was chosen on.
        margin: Lowest held-out first token minus highest later one, relative to the range of all. Above 0 a threshold
            separates perfectly.
        shuffled_auroc: Control: held-out AUROC with labels drawn at random per token, mean of 5 draws. Anything above
            0.5 was learned from tokens that are on both sides of the split.
    """

    method: str
    neuron: int | None
    expert: int | None
    auroc: float
    train_auroc: float
    margin: float
    shuffled_auroc: float


@dataclass(frozen=True)
class Point:
    """A token in the figure.

    Attributes:
        token: The token as text.
        position: Position in its text; 0 for a first token.
        first: Whether it stood first.
        held_out: Whether it was held out from training.
        plane: Its coordinate along the direction of LDA; the two means lie 1 apart, around 0.
        across: Its coordinate along the direction of most variance orthogonal to that.
        gate: Pre-activation of the best gate neuron (of the best neuron, without a gate). None without neurons.
        up: Pre-activation of the best up neuron. None without one.
    """

    token: str
    position: int
    first: bool
    held_out: bool
    plane: float
    across: float
    gate: float | None
    up: float | None


@dataclass(frozen=True, kw_only=True)
class Separability(Result):
    """How well the residual stream after an attention layer separates first from later tokens.

    Attributes:
        layer: Layer whose attention was examined.
        separators: LDA, logistic regression, and the best neuron of the layer's MLP by gate and by up pre-activation.
        perfect_neurons: For each factor searched, how many neurons separate the tokens they were searched on perfectly.
        neurons_searched: How many neurons were examined per factor; 1 if the neuron was given.
        bos_first: Whether BOS lies on the side of first tokens (by LDA, which was not trained on it). None without BOS.
        dims: Residual dimensions with the largest LDA weights, largest first.
        missed: Held-out first tokens on the side of later ones (by LDA).
        first_tokens: Number of first tokens, training and held out.
        later_tokens: Number of later tokens, training and held out.
        points: A random sample of the tokens, with equal numbers of both kinds.
    """

    kind: ClassVar[str] = "separate"

    layer: int
    separators: tuple[Separator, ...]
    perfect_neurons: dict[str, int]
    neurons_searched: int
    bos_first: bool | None
    dims: tuple[int, ...]
    missed: tuple[str, ...]
    first_tokens: tuple[int, int]
    later_tokens: tuple[int, int]
    points: tuple[Point, ...]

    def shown_rows(self) -> list[dict[str, Any]]:
        """One row per way to separate, with the layer of its neuron."""
        return [row | {"layer": self.layer} for row in self.rows()]

    def conclusion(self) -> str:
        """Whether a plane, or the neuron requested, separates first tokens, compared with shuffled labels."""
        plane = max(self.separators[:2], key=lambda s: s.auroc)
        where = f"after the attention of layer {self.layer}"
        if self.settings.get("neuron") is None:
            return (
                f"First tokens {_verdict(plane)} {where}: a plane ({plane.method}) reaches AUROC {plane.auroc:.4f} on "
                f"held-out tokens and texts, and {plane.shuffled_auroc:.2f} with shuffled labels."
            )
        best = max(self.separators[2:], key=lambda s: s.auroc)
        input_ = "" if best.method == "neuron" else f" by its {best.method.partition(' ')[0]} input"
        return (
            f"First tokens {_verdict(best, 'neuron')} {where}: {neuron_name(self.layer, best.expert, best.neuron)} "
            f"reaches AUROC {best.auroc:.4f}{input_} on held-out tokens and texts, and {best.shuffled_auroc:.2f} with "
            f"shuffled labels; a plane ({plane.method}) reaches {plane.auroc:.4f}."
        )

    def details(self) -> list[str]:
        """The samples, the other separators, and the tokens on the wrong side."""
        (f, fh), (n, nh) = self.first_tokens, self.later_tokens
        lines = [
            f"The separators were trained on {f} first and {n} later tokens, and tested on {fh} first and {nh} later "
            "tokens, which are other tokens in other texts.",
        ]
        for s in self.separators:
            line = f"{self.named(s)} reaches AUROC {s.auroc:.4f}, and {s.shuffled_auroc:.2f} with shuffled labels"
            if s.neuron is not None and self.neurons_searched > 1:
                found = self.perfect_neurons[s.method]
                line += f"; {found} of {self.neurons_searched} neurons separate the training tokens perfectly"
            lines.append(line + ".")
        lines.append(f"{len(self.missed)} of {fh} held-out first tokens lie on the side of later ones (LDA).")
        if self.bos_first is not None:
            lines.append(f"BOS {'lies' if self.bos_first else 'does not lie'} on the side of first tokens.")
        return lines

    def named(self, separator: Separator) -> str:
        """The name of a separator, for the beginning of a sentence."""
        method, expert, neuron = separator.method, separator.expert, separator.neuron
        name = "" if neuron is None else f" {neuron_name(self.layer, expert, neuron)}"
        return f"{method[0].upper()}{method[1:]}{name}"


def _verdict(separator: Separator, by: str = "plane") -> str:
    if separator.auroc >= SEPARABLE:
        return f"are separable by a {by}"
    better = separator.auroc > separator.shuffled_auroc + CHANCE
    return f"are only partly separable by a {by}" if better else f"are not separable by a {by}"


@measurement(
    group="Sinks",
    figure="sinkscope.figures.first_token:draw_separability",
    command="separate",
    quick={"count": 128, "texts": 32},
    scan={
        "order": 25,
        "seconds": [2.0, 4.0],
        "quick": {"count": 128, "texts": 32},
        "numbers": {
            "AUROC of a plane, first against later": ["separators.1.auroc", "separators.1.shuffled_auroc"],
        },
    },
)
def separability(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    count: Annotated[int, Option(min=4)] = 1024,
    texts: Annotated[int, Option(min=2)] = 128,
    layer: Count = 0,
    neuron: Annotated[str | int | None, Option(metavar="NEURON")] = None,
    expert: Count | None = None,
    batch_size: Positive = 64,
) -> Separability:
    """Separate first from later tokens after an attention layer, by a plane and by the best single neuron of its MLP.

    First tokens are many different tokens, each alone and without BOS; later tokens come from typical text. Half of the
    tokens and half of the texts are held out, in both classes at once, so the token itself carries no information about
    its class.

    Args:
        tokens: Words to put first, one token each. By default `count` tokens of the text, drawn by the seed.
        count: Number of tokens of the text to put first.
        texts: Number of pieces of typical text, 64 tokens each.
        layer: Layer whose attention output is examined, and whose MLP contains the neurons.
        neuron: Examine the gate and up factor of this neuron, such as L0.N338, instead of searching for the best one. A
            number alone is a neuron of `layer`.
        expert: Expert of a mixture that contains the neuron.
        batch_size: Sequences per pass.

    Example:
        sinkscope separate --model llama-2-7b --layer 0
    """
    target, bos = setup.target, setup.bos
    if neuron is not None:
        number = str(neuron).isdigit()
        layer, neuron, expert = (layer, int(neuron), expert) if number else site_of(read_neuron(str(neuron)))
        setup.record(layer=layer, expert=expert, neuron=neuron)
    elif expert is not None:
        raise SinkscopeError(f"--expert {expert} says whose --neuron is looked at: give --neuron, too")
    target.check_site(layer, neuron, expert)
    setup.record(texts=len(setup.ids))
    words = first_tokens(target, setup.ids, count, setup.seed, tokens)
    samples = draw_samples(setup.ids, [w for w in words if w != bos], bos, setup.seed)
    firsts = samples.firsts if bos is None else torch.cat([torch.tensor([bos]), samples.firsts])
    alone = torch.stack([torch.arange(len(firsts)), torch.zeros(len(firsts), dtype=torch.long)], 1)
    seen = After.join(
        after_attention(target, layer, firsts[:, None], alone, batch_size, setup.progress),
        after_attention(target, layer, samples.ids, samples.later, batch_size, setup.progress),
    )

    special = len(firsts) - len(samples.firsts)  # BOS is neither trained on nor held out; it is only classified
    first = torch.arange(len(firsts) + len(samples.later)) < len(firsts)
    held = torch.cat([torch.zeros(special, dtype=torch.bool), samples.first_held, samples.later_held])
    train = ~held
    train[:special] = False
    ids = torch.cat([firsts, samples.later_tokens])
    labels = _Labels(first, train, held, [_by_token(ids, setup.seed + i) for i in range(SHUFFLES)])

    space = Space.of(seen.resid, train)
    lda = space.plane("LDA", first)
    neurons, perfect, best = [], {}, {}
    factors = seen.factors
    if neuron is not None:
        factors = [replace(f, values=f.values[:, [neuron]]) for f in factors if f.expert == expert]
    for name in dict.fromkeys(factor.name for factor in factors):
        separator, best[name], found = _best_neuron([f for f in factors if f.name == name], labels)
        neurons.append(separator if neuron is None else replace(separator, neuron=neuron))
        perfect[separator.method] = found
    strings = [setup.tokenizer.decode([int(t)]) for t in ids]
    gate, up = best.get("gate", best.get("")), best.get("up")
    places = torch.cat([torch.zeros(len(firsts), dtype=torch.long), samples.later[:, 1]])
    plane, across = _unit(lda.scores, first, train), space.across(lda)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(setup.seed))
    shown = torch.cat([order[first[order]][: SHOWN // 2], order[~first[order]][: SHOWN // 2]]).tolist()
    return Separability(
        layer=layer,
        separators=(_plane(space, "LDA", labels), _plane(space, "logistic regression", labels), *neurons),
        perfect_neurons=perfect,
        neurons_searched=sum(f.values.shape[1] for f in factors) // max(1, len(neurons)),
        bos_first=bool(lda.scores[0] > 0) if special else None,
        dims=tuple(space.weights(lda).abs().topk(5).indices.tolist()),
        missed=tuple(strings[i] for i in (first & held & (lda.scores < 0)).nonzero().flatten().tolist()),
        first_tokens=(int((first & train).sum()), int((first & held).sum())),
        later_tokens=(int((~first & train).sum()), int((~first & held).sum())),
        points=tuple(
            Point(
                strings[i],
                int(places[i]),
                bool(first[i]),
                bool(held[i]),
                float(plane[i]),
                float(across[i]),
                None if gate is None else float(gate[i]),
                None if up is None else float(up[i]),
            )
            for i in shown
        ),
    )


def auroc(values: Float[Tensor, "n k"], first: Bool[Tensor, " n"]) -> Float[Tensor, " k"]:
    """Probability that a value of the first class exceeds one of the other, ties counted half; for every column."""
    areas = []
    for part in values.split(_COLUMNS, 1):
        ones, others = part[first].T.contiguous(), part[~first].T.contiguous().sort(1).values
        below = torch.searchsorted(others, ones) + torch.searchsorted(others, ones, right=True)
        areas.append(below.double().mean(1).div(2 * others.shape[1]).float())
    return torch.cat(areas)


def margin(values: Float[Tensor, "n k"], first: Bool[Tensor, " n"]) -> Float[Tensor, " k"]:
    """Lowest value of the first class minus highest of the other, relative to the range of all; above 0: no overlap."""
    span = (values.max(0).values - values.min(0).values).clamp(min=1e-12)
    return (values[first].min(0).values - values[~first].max(0).values) / span


@dataclass(frozen=True)
class Plane:
    """A direction in the residual stream and the position of each sample along it.

    Attributes:
        scores: Score of each sample; above 0 is the first class.
        way: The direction, in the coordinates of the space.
    """

    scores: Float[Tensor, " n"]
    way: Float[Tensor, " k"]


@dataclass(frozen=True)
class Space:
    """Samples in coordinates that the training samples span; these may be fewer than the residual dimensions.

    Anything outside that span has no influence on either method.
    """

    coordinates: Float[Tensor, "n k"]
    basis: Float[Tensor, "k d_model"]
    train: Bool[Tensor, " n"]

    @classmethod
    def of(cls, samples: Float[Tensor, "n d_model"], train: Bool[Tensor, " n"]) -> Space:
        """Each residual dimension is centred and scaled by its mean and deviation over the training samples."""
        data = samples.double()
        deviation, mean = torch.std_mean(data[train], 0, correction=0)
        scaled = (data - mean) / torch.where(deviation > 0, deviation, torch.ones_like(deviation))
        _, sizes, basis = torch.linalg.svd(scaled[train], full_matrices=False)
        basis = basis[sizes > 1e-6 * sizes[0]]
        return cls(scaled @ basis.T, basis, train)

    def plane(self, method: Method, first: Bool[Tensor, " n"]) -> Plane:
        """The plane that `method` places between the classes of the training samples."""
        from threadpoolctl import threadpool_limits  # comes with scikit-learn

        with threadpool_limits(torch.get_num_threads()):  # more threads do not help problems of this size
            fitted = _model(method).fit(self.coordinates[self.train].numpy(), first[self.train].numpy())
            scores = fitted.decision_function(self.coordinates.numpy())
        way = torch.from_numpy(fitted.coef_[0]).double()
        return Plane(torch.from_numpy(scores).float(), way / way.norm())

    def weights(self, plane: Plane) -> Float[Tensor, " d_model"]:
        """The plane's weight of each residual dimension, when each is scaled to unit variance."""
        return plane.way @ self.basis

    def across(self, plane: Plane) -> Float[Tensor, " n"]:
        """Coordinates of all samples along the direction of most variance orthogonal to the plane's."""
        rest = self.coordinates - (self.coordinates @ plane.way)[:, None] * plane.way
        return rest @ torch.linalg.svd(rest[self.train], full_matrices=False)[2][0]


def _model(method: Method) -> Any:
    if method == "LDA":
        from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

        return LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto", priors=[0.5, 0.5])
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(class_weight="balanced", max_iter=2000)


@dataclass(frozen=True)
class _Labels:
    """What the samples are, and labels of the control."""

    first: Bool[Tensor, " n"]
    train: Bool[Tensor, " n"]
    held: Bool[Tensor, " n"]
    shuffled: list[Tensor]


def _plane(space: Space, method: Method, labels: _Labels) -> Separator:
    first, train, held = labels.first, labels.train, labels.held
    scores = space.plane(method, first).scores[:, None]
    chance = [auroc(space.plane(method, by).scores[held, None], by[held]) for by in labels.shuffled]
    out, there, gap = (
        auroc(scores[held], first[held]),
        auroc(scores[train], first[train]),
        margin(scores[held], first[held]),
    )
    return Separator(method, None, None, float(out), float(there), float(gap), float(torch.stack(chance).mean()))


def _best_neuron(factors: Sequence[Factor], labels: _Labels) -> tuple[Separator, Tensor, int]:
    """The best neuron of all experts, its values, and how many are perfect on the training samples."""
    held, chance = labels.held, []
    for by in labels.shuffled:
        *_, column, _ = _search(factors, by, labels.train)
        chance.append(float(auroc(column[held], by[held])))
    factor, at, area, values, perfect = _search(factors, labels.first, labels.train)
    name = f"{factor.name} neuron".strip()
    out, gap = (float(score(values[held], labels.first[held])) for score in (auroc, margin))
    separator = Separator(name, at, factor.expert, out, area, gap, sum(chance) / len(chance))
    return separator, factor.values[:, at], perfect


def _search(factors: Sequence[Factor], first: Tensor, train: Tensor) -> tuple[Factor, int, float, Tensor, int]:
    """The neuron that separates best, with whichever sign.

    Returns:
        Its factor, its number, its AUROC on the training samples, its values `[n 1]` with that sign, and the number
        of neurons that separate perfectly.
    """
    found: list[tuple[float, float, Factor, int]] = []
    perfect = 0
    for factor in factors:
        there = factor.values[train]
        area = auroc(there, first[train])
        gap = margin(there * torch.where(area < 0.5, -1.0, 1.0), first[train])
        area = torch.maximum(area, 1 - area)
        best = int((area.double() + 1e-9 * gap.double()).argmax())
        found.append((float(area[best]), float(gap[best]), factor, best))
        perfect += int((area == 1).sum())
    area, _, factor, at = max(found, key=lambda one: one[:2])
    values = factor.values[:, at, None]
    upward = float(auroc(values[train], first[train])) >= 0.5
    return factor, at, area, values if upward else -values, perfect


def _by_token(tokens: Int[Tensor, " n"], seed: int) -> Bool[Tensor, " n"]:
    """A random label per token: whoever knows a token knows its label, so it is learned where tokens leak."""
    generator = torch.Generator().manual_seed(seed)
    kinds, which = tokens.unique(return_inverse=True)
    return (torch.randperm(len(kinds), generator=generator) % 2 == 0)[which]


def _unit(scores: Tensor, first: Tensor, train: Tensor) -> Tensor:
    """Scores moved and scaled so that the means of the two classes are at 0.5 and -0.5."""
    ones, others = scores[first & train].mean(), scores[~first & train].mean()
    return (scores - (ones + others) / 2) / (ones - others)
