"""The first layers' heads at many first tokens: what each of them, and each set of them, carries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.sinks.first_token.ablation import DRAWS
from sinkscope.sinks.first_token.head_replacement import Geometry, Replacement, geometry
from sinkscope.sinks.first_token.locate import Progress, Setup

HALF = 0.5  # of the sink neurons' activation: below it the sink counts as gone, from it on as there


@dataclass(frozen=True)
class Head:
    """A head of the first layers; drops are shares of the sink neurons' activation at a first token.

    Attributes:
        layer: where it is.
        head: query head.
        serves: number of first tokens in whose smallest sufficient set of heads it is.
        drop: lost where this head's output is replaced by its later-position mean; mean over the first tokens.
        largest_drop: the same at the first token where most is lost.
        bos_drop: the same at BOS; None without BOS.
        alone: kept where all other heads of the layer are replaced and this one is not: the largest over first tokens;
            None outside the marking layer.
        control: change at later positions where the same replacement is made there instead, 95 % of the positions;
            None outside the marking layer.
        self_attention: of later positions of typical text to themselves, over what uniform attention would give.
        served_self_attention: the same at tokens that it serves; None if none is in the text.
        self_cosine: of query and key at one position (rotary does not change it).
        served_self_cosine: the same at tokens that it serves.
        same_cosine: of a query and an earlier key of the same token, before rotary.
        same_cosine_rotary: after it.
        other_cosine: of a query and an earlier key of another token, before rotary.
        other_cosine_rotary: after it.
    """

    layer: int
    head: int
    serves: int
    drop: float
    largest_drop: float
    bos_drop: float | None
    alone: float | None
    control: float | None
    self_attention: float | None
    served_self_attention: float | None
    self_cosine: float | None
    served_self_cosine: float | None
    same_cosine: float | None
    same_cosine_rotary: float | None
    other_cosine: float | None
    other_cosine_rotary: float | None


@dataclass(frozen=True)
class First:
    """A token that stood first, and the heads that mark it.

    Attributes:
        token: its string.
        id: its id.
        activation: of the sink neurons, over that at the first token of typical text.
        fires: that is at least half.
        layer_drop: lost with all heads of the marking layer replaced; None if it does not fire, or no layer marks.
        heads: the smallest set of heads of that layer that keeps half of it, all others replaced; empty as above.
        kept: what they keep.
        set_drop: lost with these replaced and all others not.
        control_drop: largest loss with as many other heads replaced, 20 random draws; None where there are not as many.
        drops: lost with each head of the marking layer replaced.
    """

    token: str
    id: int
    activation: float
    fires: bool
    layer_drop: float | None
    heads: tuple[int, ...]
    kept: float | None
    set_drop: float | None
    control_drop: float | None
    drops: tuple[float, ...]


@dataclass(frozen=True)
class Marking:
    """What the heads of the first layers carry at many first tokens."""

    made: Setup
    bench: Replacement
    batch_size: int | None
    progress: Progress | None

    def measure(self, words: list[int]) -> dict[str, Any]:
        """Everything of the result that is measured behind the sink neurons."""
        layers, heads = self.bench.shape
        bos = self.made.bos
        firsts = torch.tensor(words if bos is None else [bos, *(w for w in words if w != bos)])
        usual, intact = self._intact(self.made.ids[:, 0]), self._intact(firsts)
        size = usual.norm(dim=-1).median()
        activation = intact @ torch.nn.functional.normalize(usual.mean(0), dim=0) / size
        fires = activation >= HALF
        tokens, base = firsts[fires], intact[fires]

        everything = torch.ones(1, layers, heads, dtype=torch.bool)
        whole = torch.eye(layers, dtype=torch.bool)[:, :, None].expand(-1, -1, heads)
        each = torch.eye(layers * heads, dtype=torch.bool).view(-1, layers, heads)
        lost = 1 - self._kept(tokens, base, torch.cat([everything, whole, each]))
        all_drop, layer_drop, drops = (
            lost[:, 0],
            lost[:, 1 : 1 + layers],
            lost[:, 1 + layers :].unflatten(1, (layers, heads)),
        )
        medians = [float(layer_drop[:, i].median()) for i in range(layers)] if len(tokens) else []
        marking = max(range(layers), key=medians.__getitem__) if medians else None
        marking = None if marking is None or medians[marking] < HALF else marking
        sets: list[_Served] = []
        alone = control = None
        if marking is not None:
            alone = self._alone(tokens, base, marking)
            sets = self._sets(tokens, base, marking, drops[:, marking] + alone)
            control = self._control(marking, usual.mean(0))
        served = [(int(t), s.heads) for t, s in zip(tokens, sets, strict=False)]
        rows = iter(range(len(tokens)))
        listed = tuple(
            self._first(int(t), float(a), bool(f), next(rows) if f else None, marking, layer_drop, drops, sets)
            for t, a, f in zip(firsts, activation, fires, strict=True)
        )
        single = sum(len(heads) == 1 for _, heads in served) / len(served) if served else None
        return {
            "answer": _answer(single, float(all_drop.median()) if len(tokens) else None),
            "marking_layer": marking,
            "layer_drops": tuple(medians),
            "all_drop": float(all_drop.median()) if len(tokens) else None,
            "single_share": single,
            "heads": self._heads(drops, marking, alone, control, served, bool(fires[0]) and bos is not None),
            "first_tokens": listed,
        }

    def _intact(self, tokens: Int[Tensor, " token"]) -> Float[Tensor, "token d_model"]:
        none = torch.zeros(len(tokens), *self.bench.shape, dtype=torch.bool)
        return self.bench.written(tokens[:, None], none, batch_size=self.batch_size)[:, 0]

    def _kept(
        self,
        tokens: Int[Tensor, " token"],
        base: Float[Tensor, "token d_model"],
        edits: Bool[Tensor, "edit layer head"],
    ) -> Float[Tensor, "token edit"]:
        """Activation of the sink neurons over the intact one, for every first token and every edit."""
        return self._kept_each(tokens, base, edits.expand(len(tokens), -1, -1, -1))

    def _kept_each(
        self,
        tokens: Int[Tensor, " token"],
        base: Float[Tensor, "token d_model"],
        edits: Bool[Tensor, "token edit layer head"],
    ) -> Float[Tensor, "token edit"]:
        count = edits.shape[1]
        if not len(tokens) or not count:
            return torch.zeros(len(tokens), count)
        ids = tokens.repeat_interleave(count)[:, None]
        out = self.bench.written(ids, edits.flatten(0, 1), batch_size=self.batch_size, progress=self.progress)[:, 0]
        along = (out.unflatten(0, (-1, count)) * base[:, None]).sum(-1)
        return along / base.square().sum(-1, keepdim=True)

    def _at(self, layer: int, chosen: Bool[Tensor, "... head"]) -> Bool[Tensor, "... layer head"]:
        """Edits of one layer."""
        out = torch.zeros(*chosen.shape[:-1], *self.bench.shape, dtype=torch.bool)
        out[..., layer, :] = chosen
        return out

    def _alone(self, tokens: Tensor, base: Tensor, layer: int) -> Float[Tensor, "token head"]:
        heads = self.bench.shape[1]
        return self._kept(tokens, base, self._at(layer, ~torch.eye(heads, dtype=torch.bool)))

    def _sets(self, tokens: Tensor, base: Tensor, layer: int, score: Float[Tensor, "token head"]) -> list[_Served]:
        """Per first token the shortest run of its best heads that keeps half, held against as many others."""
        heads = self.bench.shape[1]
        rank = score.argsort(1, descending=True).argsort(1)  # of each head, 0 the best
        sizes = torch.arange(1, heads + 1)
        kept = self._kept_each(tokens, base, self._at(layer, rank[:, None] >= sizes[None, :, None]))
        enough = kept >= HALF
        enough[:, -1] = True  # nothing is replaced there
        size = enough.int().argmax(1) + 1
        generator = torch.Generator().manual_seed(self.made.seed)
        edits = torch.zeros(len(tokens), DRAWS + 1, heads, dtype=torch.bool)
        for i, n in enumerate(size.tolist()):
            edits[i, 0] = rank[i] < n
            others = (rank[i] >= n).nonzero().flatten()
            for draw in range(1, DRAWS + 1):
                edits[i, draw, others[torch.randperm(len(others), generator=generator)[:n]]] = True
        lost = 1 - self._kept_each(tokens, base, self._at(layer, edits))
        return [
            _Served(
                tuple(sorted((rank[i] < n).nonzero().flatten().tolist())),
                float(kept[i, n - 1]),
                float(lost[i, 0]),
                float(lost[i, 1:].max()) if heads - n >= n else None,
            )
            for i, n in enumerate(size.tolist())
        ]

    def _control(self, layer: int, way: Float[Tensor, " d_model"]) -> Float[Tensor, " head"]:
        """Change along the sink neurons' direction where the same is done at later positions, over its size."""
        heads = self.bench.shape[1]
        chosen = torch.cat([torch.zeros(1, heads, dtype=torch.bool), torch.eye(heads, dtype=torch.bool)])
        ids = self.made.ids[:1].expand(heads + 1, -1)
        size = None if self.batch_size is None else max(1, self.batch_size // ids.shape[1])
        out = self.bench.written(ids, self._at(layer, chosen), later=True, batch_size=size, progress=self.progress)
        along = out @ way / way.square().sum()
        return (along[1:] - along[:1]).abs().quantile(0.95, dim=1)

    def _first(
        self,
        token: int,
        activation: float,
        fires: bool,
        row: int | None,
        marking: int | None,
        layer_drop: Tensor,
        drops: Tensor,
        sets: list[_Served],
    ) -> First:
        string = self.made.target.tokenizer.decode([token])
        if row is None or marking is None:
            return First(string, token, activation, fires, None, (), None, None, None, ())
        s = sets[row]
        return First(
            string,
            token,
            activation,
            fires,
            float(layer_drop[row, marking]),
            s.heads,
            s.kept,
            s.drop,
            s.control,
            tuple(drops[row, marking].tolist()),
        )

    def _heads(
        self,
        drops: Float[Tensor, "token layer head"],
        marking: int | None,
        alone: Tensor | None,
        control: Tensor | None,
        served: list[tuple[int, tuple[int, ...]]],
        bos_first: bool,
    ) -> tuple[Head, ...]:
        layers, heads = self.bench.shape
        shapes, text = geometry(self.made.target, self.made.ids, list(range(layers)))
        found = []
        for layer in range(layers if len(drops) else 0):
            for head in range(heads):
                lost, here = drops[:, layer, head], layer == marking
                own = [token for token, its in served if here and head in its]
                found.append(
                    Head(
                        layer,
                        head,
                        len(own),
                        float(lost.mean()),
                        float(lost.max()),
                        float(lost[0]) if bos_first else None,
                        float(alone[:, head].max()) if here and alone is not None else None,
                        float(control[head]) if here and control is not None else None,
                        **_shape(shapes[layer], head, torch.isin(text, torch.tensor(own, dtype=torch.long))),
                    )
                )
        return tuple(sorted(found, key=lambda h: (-h.serves, -h.drop)))


@dataclass(frozen=True)
class _Served:
    heads: tuple[int, ...]
    kept: float
    drop: float
    control: float | None


def _answer(single: float | None, all_drop: float | None) -> str:
    if all_drop is None:
        return "no token fires"
    if single is None:
        return "several layers" if all_drop >= HALF else "no head"
    return "single head" if single >= HALF else "several heads"


def _shape(g: Geometry, head: int, own: Bool[Tensor, " token"]) -> dict[str, float | None]:
    return {
        "self_attention": _number(g.attention[head].mean()),
        "served_self_attention": _number(g.attention[head][own].mean()),
        "self_cosine": _number(g.own[head].mean()),
        "served_self_cosine": _number(g.own[head][own].mean()),
        "same_cosine": _number(g.same[0][head]),
        "same_cosine_rotary": _number(g.same[1][head]),
        "other_cosine": _number(g.other[0][head]),
        "other_cosine_rotary": _number(g.other[1][head]),
    }


def _number(value: Tensor) -> float | None:
    return None if math.isnan(float(value)) else float(value)
