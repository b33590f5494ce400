"""Whether one attention layer tells first from later tokens by a plane, or by one neuron (Yona et al. 2025, Fig. 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.results import Result
from sinkscope.sinks.first_token.after_attention import After, Factor, after_attention
from sinkscope.sinks.first_token.classify import Method, Plane, Space, auroc, margin
from sinkscope.sinks.first_token.holdout import Samples, draw_samples
from sinkscope.sinks.first_token.locate import Progress, Setup, setup
from sinkscope.sinks.first_token.tokens import first_tokens, single_token

SHUFFLES = 5  # draws of the control
SHOWN = 800  # points of the drawing


@dataclass(frozen=True)
class Separator:
    """One way to tell first from later tokens. AUROC 1: perfectly, 0.5: not at all.

    Attributes:
        method: "LDA", "logistic regression", "gate neuron", "up neuron", or "neuron" where the MLP has no gate.
        neuron: its number; None for a plane.
        expert: its expert in a mixture.
        auroc: on tokens and texts that were held out.
        train_auroc: on those it was chosen on.
        margin: on the held-out ones, lowest first token less highest later one, over the range of all; above 0 a
            threshold separates perfectly.
        shuffled_auroc: held out, with a label drawn per token instead of the true one, mean of 5 draws: what is above
            0.5 there was learned from tokens that are on both sides of the split.
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
    """A token in the drawing.

    Attributes:
        token: its string.
        position: in its text; 0 for a first token.
        first: it stood first.
        held_out: it was not trained on.
        plane: its place along the direction of LDA, 0 between the two means and 1 apart.
        across: its place along the direction of most variance across that.
        gate: pre-activation of the best gate neuron (of the best neuron, without a gate); None without neurons.
        up: of the best up neuron; None without.
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
    """How far the residual stream after an attention layer tells first from later tokens.

    Attributes:
        layer: whose attention.
        separators: LDA, logistic regression, and the best neuron of the layer's MLP by gate and by up pre-activation.
        perfect_neurons: per factor searched, how many neurons separate the tokens they were searched on perfectly.
        neurons_searched: how many were looked at, per factor.
        bos_first: BOS lies on the side of first tokens (LDA, which was not trained on it); None without BOS.
        dims: residual dimensions that LDA weighs most, largest first.
        missed: held-out first tokens on the side of later ones (LDA).
        first_tokens: number of first tokens, training and held out.
        later_tokens: number of later ones, training and held out.
        points: some of the tokens, drawn at random, as many of either kind.
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

    def rows(self) -> list[dict[str, Any]]:
        """One row per way to separate."""
        return [dict(vars(s)) for s in self.separators]

    def summary(self) -> str:
        """What was found, in a few lines."""
        (f, fh), (n, nh) = self.first_tokens, self.later_tokens
        lines = [
            f"{self.model.name} ({self.model.family}), residual stream after the attention of layer {self.layer}",
            f"Trained on {f} first and {n} later tokens; held out: {fh} and {nh}, other tokens in other texts.",
        ]
        for s in self.separators[:2]:
            lines.append(f"{s.method}: AUROC {s.auroc:.4f} held out, {s.shuffled_auroc:.2f} with shuffled labels.")
        for s in self.separators[2:]:
            name = f"{s.neuron}" if s.expert is None else f"{s.neuron} of expert {s.expert}"
            found = self.perfect_neurons[s.method]
            lines.append(
                f"Best {s.method} {name}: AUROC {s.auroc:.4f} held out; {found} of {self.neurons_searched} separate "
                "perfectly where they were searched."
            )
        lines.append(f"{len(self.missed)} of {fh} held-out first tokens lie with the later ones (LDA).")
        if self.bos_first is not None:
            lines.append(f"BOS {'lies' if self.bos_first else 'does not lie'} with the first tokens.")
        return "\n".join(lines)


def separability(
    model: object = None,
    *,
    tokenizer: Any = None,
    bos: bool | None = None,
    text: str | Path | None = None,
    tokens: Sequence[str] | None = None,
    count: int = 1024,
    texts: int = 128,
    layer: int = 0,
    batch_size: int = 64,
    seed: int = 0,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Separability:
    """Tell first from later tokens behind an attention layer: by a plane, and by the best single neuron of its MLP.

    First tokens are many different ones, each alone and without BOS; later tokens come from typical text. Half of the
    tokens and half of the texts are held out, in both classes at once, so that nothing can be known from the token.

    Args:
        model: None (the bundled model), short name, hub id, folder, `.gguf` file, or a live model of any kind.
        tokenizer: for live models that carry none.
        bos: begin texts with BOS; None: where the tokenizer has one.
        text: file of typical text; None: the neutral text that ships.
        tokens: strings to put first, one token each; None: `count` tokens of the text, drawn by the seed.
        count: how many to draw.
        texts: pieces of 64 tokens of typical text.
        layer: whose attention.
        batch_size: sequences of a pass.
        seed: of random draws.
        revision: of a hub id.
        dtype: of the weights of a model given by name.
        device: for models given by name; None: the first cuda device if there is one.
        trust_remote_code: run code that comes with the checkpoint (it is then loaded whole).
        progress: called as `progress(what, done, total)`.

    Raises:
        SinkscopeError: bad input; the message is one line and says what to do.
    """
    if count < 4:
        raise SinkscopeError(f"--count {count}: some first tokens are trained on and some held out; give 4 or more")
    if texts < 2:
        raise SinkscopeError(f"--texts {texts}: one is trained on and one held out; give 2 or more")
    if batch_size < 1:
        raise SinkscopeError(f"--batch-size {batch_size}: at least one sequence is needed; give 1 or more")
    made = setup(
        model,
        tokenizer=tokenizer,
        bos=bos,
        text=text,
        texts=texts,
        seed=seed,
        revision=revision,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    target = made.target
    if not 0 <= layer < target.n_layers:
        raise SinkscopeError(f"--layer {layer} is not in the model: it has layers 0 to {target.n_layers - 1}")
    words = (
        [single_token(target.tokenizer, t) for t in tokens] if tokens else first_tokens(target, made.ids, count, seed)
    )
    samples = draw_samples(made.ids, list(dict.fromkeys(w for w in words if w != made.bos)), made.bos, seed)
    firsts = samples.firsts if made.bos is None else torch.cat([torch.tensor([made.bos]), samples.firsts])
    alone = torch.stack([torch.arange(len(firsts)), torch.zeros(len(firsts), dtype=torch.long)], 1)
    seen = After.join(
        after_attention(target, layer, firsts[:, None], alone, batch_size, progress),
        after_attention(target, layer, samples.ids, samples.later, batch_size, progress),
    )
    work = _Work(made, samples, firsts, seen)
    return Separability(
        model=made.info(),
        settings={
            "bos": made.bos is not None,
            "text": None if text is None else Path(text).name,
            "texts": len(made.ids),
            "tokens": None if tokens is None else list(tokens),
            "count": count,
            "layer": layer,
            "batch_size": batch_size,
            "seed": seed,
            "revision": revision,
        },
        provenance=made.provenance(),
        layer=layer,
        **work.measure(),
    )


@dataclass(frozen=True)
class _Work:
    made: Setup
    samples: Samples
    firsts: Int[Tensor, " first"]  # BOS before the others, where texts begin with it
    seen: After

    def measure(self) -> dict[str, Any]:
        """Everything of the result that is computed from what was seen."""
        s = self.samples
        special = len(self.firsts) - len(s.firsts)  # BOS is neither trained on nor held out: it is asked about
        first = torch.arange(len(self.firsts) + len(s.later)) < len(self.firsts)
        held = torch.cat([torch.zeros(special, dtype=torch.bool), s.first_held, s.later_held])
        train = ~held
        train[:special] = False
        tokens = torch.cat([self.firsts, s.later_tokens])
        shuffled = [_by_token(tokens, self.made.seed + i) for i in range(SHUFFLES)]

        space = Space.of(self.seen.resid, train)
        lda, logistic = space.plane("LDA", first), space.plane("logistic regression", first)
        planes: list[Separator] = []
        fitted: tuple[tuple[Method, Plane], ...] = (("LDA", lda), ("logistic regression", logistic))
        for method, plane in fitted:
            scores = plane.scores[:, None]
            chance = [auroc(space.plane(method, by).scores[held, None], by[held]) for by in shuffled]
            planes.append(
                Separator(
                    method,
                    None,
                    None,
                    float(auroc(scores[held], first[held])),
                    float(auroc(scores[train], first[train])),
                    float(margin(scores[held], first[held])),
                    float(torch.stack(chance).mean()),
                )
            )

        neurons, perfect, best = [], {}, {}
        for name in dict.fromkeys(factor.name for factor in self.seen.factors):
            factors = [f for f in self.seen.factors if f.name == name]
            separator, values, count = _best_neuron(factors, first, train, held, shuffled)
            neurons.append(separator)
            perfect[separator.method], best[name] = count, values
        return {
            "separators": (*planes, *neurons),
            "perfect_neurons": perfect,
            "neurons_searched": sum(f.values.shape[1] for f in self.seen.factors) // max(1, len(neurons)),
            "bos_first": bool(lda.scores[0] > 0) if special else None,
            "dims": tuple(space.weights(lda).abs().topk(5).indices.tolist()),
            "missed": tuple(map(self._string, tokens[first & held & (lda.scores < 0)].tolist())),
            "first_tokens": (int((first & train).sum()), int((first & held).sum())),
            "later_tokens": (int((~first & train).sum()), int((~first & held).sum())),
            "points": self._points(tokens, first, held, _unit(lda.scores, first, train), space.across(lda), best),
        }

    def _string(self, token: int) -> str:
        return self.made.target.tokenizer.decode([token])

    def _points(
        self, tokens: Tensor, first: Tensor, held: Tensor, plane: Tensor, across: Tensor, best: dict[str, Tensor]
    ) -> tuple[Point, ...]:
        positions = torch.cat([torch.zeros(len(self.firsts), dtype=torch.long), self.samples.later[:, 1]])
        gate, up = best.get("gate", best.get("")), best.get("up")
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(self.made.seed))
        shown = torch.cat([order[first[order]][: SHOWN // 2], order[~first[order]][: SHOWN // 2]]).tolist()
        return tuple(
            Point(
                self._string(int(tokens[i])),
                int(positions[i]),
                bool(first[i]),
                bool(held[i]),
                float(plane[i]),
                float(across[i]),
                None if gate is None else float(gate[i]),
                None if up is None else float(up[i]),
            )
            for i in shown
        )


def _best_neuron(
    factors: Sequence[Factor],
    first: Bool[Tensor, " n"],
    train: Bool[Tensor, " n"],
    held: Bool[Tensor, " n"],
    shuffled: list[Tensor],
) -> tuple[Separator, Tensor, int]:
    """The best neuron of all experts, its values, and how many are perfect on the training samples."""
    candidates = [(f, *_search(f.values, first, train)) for f in factors]
    factor, at, area, *_ = max(candidates, key=lambda c: (c[2], c[3]))
    values = factor.values[:, at, None]
    values = values if _upward(values[train], first[train]) else -values
    chance = []
    for by in shuffled:
        other, place, *_ = max(((f, *_search(f.values, by, train)) for f in factors), key=lambda c: (c[2], c[3]))
        column = other.values[:, place, None]
        column = column if _upward(column[train], by[train]) else -column
        chance.append(float(auroc(column[held], by[held])))
    name = f"{factor.name} neuron".strip()
    out, gap = float(auroc(values[held], first[held])), float(margin(values[held], first[held]))
    separator = Separator(name, at, factor.expert, out, area, gap, sum(chance) / len(chance))
    return separator, factor.values[:, at], sum(c[4] for c in candidates)


def _search(values: Tensor, first: Tensor, train: Tensor) -> tuple[int, float, float, int]:
    """(neuron, AUROC, margin, number of perfect ones) over every neuron, whichever sign it separates with."""
    there = values[train]
    area = auroc(there, first[train])
    sign = torch.where(area < 0.5, -1.0, 1.0)
    area = torch.maximum(area, 1 - area)
    gap = margin(there * sign, first[train])
    best = int((area.double() + 1e-9 * gap.double()).argmax())
    return best, float(area[best]), float(gap[best]), int((area == 1).sum())


def _upward(values: Tensor, first: Tensor) -> bool:
    return float(auroc(values, first)) >= 0.5


def _by_token(tokens: Int[Tensor, " n"], seed: int) -> Bool[Tensor, " n"]:
    """A random label per token: whoever knows a token knows its label, so it is learned where tokens leak."""
    generator = torch.Generator().manual_seed(seed)
    kinds, which = tokens.unique(return_inverse=True)
    return (torch.randperm(len(kinds), generator=generator) % 2 == 0)[which]


def _unit(scores: Tensor, first: Tensor, train: Tensor) -> Tensor:
    """Scores moved and scaled so that the means of the two classes are at 0.5 and -0.5."""
    ones, others = scores[first & train].mean(), scores[~first & train].mean()
    return (scores - (ones + others) / 2) / (ones - others)
