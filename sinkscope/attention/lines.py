"""How few vertical and slash lines carry the attention (Li et al. 2025, LoopServe, section 3.1, observation 1)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.attention._line_data import Input, Text, checked_etas, inputs
from sinkscope.attention._line_picture import Picture, pictured
from sinkscope.attention._line_tap import scores_of
from sinkscope.attention.generation import chosen_layers
from sinkscope.errors import SinkscopeError
from sinkscope.lines.choice import HeadLines, top_lines
from sinkscope.lines.sums import Scores, crossings, line_sums
from sinkscope.measure import Setup
from sinkscope.results import Result
from sinkscope.sinks.first_token.locate import Progress

ETAS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
MOST = 0.9  # share of the attention that the paper says a tenth of the lines carries
SHOWN = 8  # heaviest lines of a head that are kept


@dataclass(frozen=True)
class Line:
    """One line of the first text.

    Attributes:
        at: key position of a vertical line, offset (query less key position) of a slash line.
        share: of the head's attention.
    """

    at: int
    share: float


@dataclass(frozen=True)
class HeadWeights:
    """One query head; means over the texts, and one number per eta where there are several.

    Attributes:
        layer: its layer.
        head: which head.
        mass: share of its attention on the chosen lines, cells at crossings once.
        line_sums: the same with the weights of the lines added up, so cells at crossings twice.
        random_mass: `mass` of random lines: of each kind as many as have the same length together.
        cells: share of all cells that the chosen lines cover.
        vertical: share of the chosen lines that are vertical.
        top_vertical: the heaviest in the first text.
        top_slash: the heaviest in the first text.
    """

    layer: int
    head: int
    mass: tuple[float, ...]
    line_sums: tuple[float, ...]
    random_mass: tuple[float, ...]
    cells: tuple[float, ...]
    vertical: tuple[float, ...]
    top_vertical: tuple[Line, ...]
    top_slash: tuple[Line, ...]


@dataclass(frozen=True, kw_only=True)
class LineWeights(Result):
    """What the heaviest lines carry.

    Attributes:
        etas: shares of all lines that were chosen.
        inputs: the texts.
        mass: mean over the heads, per eta; so the next three.
        line_sums: see `HeadWeights`.
        random_mass: see `HeadWeights`.
        cells: see `HeadWeights`.
        heads: every head that was measured, by layer.
        picture: the attention map of one of them with its lines.
    """

    kind: ClassVar[str] = "line-weights"
    percent: ClassVar[tuple[str, ...]] = ("mass", "line_sums", "random_mass", "cells", "vertical")

    etas: tuple[float, ...]
    inputs: tuple[Input, ...]
    mass: tuple[float, ...]
    line_sums: tuple[float, ...]
    random_mass: tuple[float, ...]
    cells: tuple[float, ...]
    heads: tuple[HeadWeights, ...]
    picture: Picture

    def _at(self) -> int:
        """Which eta tables show: that of the paper, or the nearest."""
        return min(range(len(self.etas)), key=lambda i: abs(self.etas[i] - 0.1))

    def rows(self) -> list[dict[str, Any]]:
        """Up to 16 heads at eta 0.1 (or the nearest), those whose lines carry least first."""
        i = self._at()
        names = ("mass", "line_sums", "random_mass", "cells", "vertical")
        heads = sorted(self.heads, key=lambda h: h.mass[i])[:16]
        return [
            {"layer": h.layer, "head": h.head, "eta": self.etas[i], **{name: getattr(h, name)[i] for name in names}}
            for h in heads
        ]

    def summary(self) -> str:
        """What was found, in a few lines."""
        m, i = self.model, self._at()
        tokens = sorted(x.tokens for x in self.inputs)
        size = f"{tokens[0]}" if tokens[0] == tokens[-1] else f"{tokens[0]} to {tokens[-1]}"
        many = len(self.inputs) != 1
        whole = sum(h.mass[i] >= MOST for h in self.heads)
        fewest = next((eta for eta, mass in zip(self.etas, self.mass, strict=True) if mass >= MOST), None)
        need = f"up to eta {self.etas[-1]:g} none" if fewest is None else f"eta {fewest:g} is the first that"
        return "\n".join(
            [
                f"{m.name} ({m.family}, {m.n_layers} layers), {len(self.inputs)} text{'s' * many} of {size} tokens, "
                f"{len(self.heads)} heads",
                f"The heaviest {self.etas[i]:.0%} of all vertical and slash lines carry {self.mass[i]:.1%} of the "
                f"attention (line by line, crossings twice, {self.line_sums[i]:.1%}); they cover {self.cells[i]:.1%} "
                f"of the cells, and random lines of the same length together carry {self.random_mass[i]:.1%}.",
                f"{whole} of {len(self.heads)} heads reach {MOST:.0%} there; on average {need} does.",
            ]
        )


def line_weights(
    model: object = None,
    texts: Sequence[Text] | None = None,
    *,
    data: str | os.PathLike[str] | None = None,
    count: int = 4,
    length: int | None = None,
    etas: Sequence[float] = ETAS,
    layers: Sequence[int] | None = None,
    head: tuple[int, int] | None = None,
    tokenizer: Any = None,
    bos: bool | None = None,
    text: str | Path | None = None,
    seed: int = 0,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> LineWeights:
    """Weigh every vertical and slash line of every head, and say what the heaviest carry together.

    Attention is made again from queries and keys, some rows at a time, while the model runs on its own: memory grows
    with the length, never with its square. A second time it is made to count what lies where chosen lines cross.

    Args:
        model: None (the bundled model), short name, hub id, folder, `.gguf` file, or a live plain or nnsight model.
        texts: texts or ids; None: pieces of ordinary text.
        data: file of prompts instead: LongBench's `samsum.jsonl`, LongEval's topic retrieval, or JSON lines with a
            "prompt".
        count: pieces of ordinary text, or prompts of the file.
        length: most tokens of each text, at least 16; longer ones lose their middle. None: what the context holds, for
            ordinary text 512.
        etas: shares of all `2 n` lines to choose.
        layers: which to measure; None: all.
        head: (layer, head) whose attention map is shown; None: one with both kinds of lines.
        tokenizer: for live models that carry none.
        bos: begin sequences with BOS; None: where the tokenizer has one.
        text: file of ordinary text; None: the text that ships.
        seed: of the random lines.
        revision: of a hub id.
        dtype: of the weights of a model given by name.
        device: for models given by name; None: the first cuda device if there is one.
        trust_remote_code: run code that comes with the checkpoint.
        progress: called as `progress(what, done, total)`.

    Raises:
        UnsupportedError: a model whose queries and keys cannot be had (a TransformerBridge, Falcon).
        SinkscopeError: bad input; the message is one line and says what to do.
    """
    shares = checked_etas(etas)
    made = Setup.open(
        model,
        loading="whole",
        tokenizer=tokenizer,
        bos=bos,
        text=text,
        seed=seed,
        revision=revision,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    target, wanted = made.target, chosen_layers(made, layers)
    if head is not None and not (head[0] in wanted and 0 <= head[1] < target.n_heads):
        raise SinkscopeError(
            f"head {head[0]}.{head[1]} is not measured: expected one of layers {wanted[0]} to {wanted[-1]}, heads 0 to "
            f"{target.n_heads - 1}"
        )
    rows = inputs(made, texts, data, count, length)
    generator = torch.Generator().manual_seed(seed)
    found: dict[int, list[_Found]] = {layer: [] for layer in wanted}
    done = 0

    def weigh(layer: int, scores: Scores) -> None:
        nonlocal done
        found[layer].append(_weighed(scores, shares, generator))
        done += 1
        if progress is not None:
            progress("layers", done, len(wanted) * len(rows))

    with scores_of(target, weigh, wanted):
        for _, ids in rows:
            target.forward(ids[None])
    heads = tuple(_head(layer, h, found[layer]) for layer in wanted for h in range(target.n_heads))
    shown = head or _both_kinds(heads)
    return LineWeights(
        model=made.info(),
        settings={
            "texts": None if texts is None else [t if isinstance(t, str) else list(t) for t in texts],
            "data": None if data is None else Path(data).name,
            "count": count,
            "length": length,
            "etas": list(shares),
            "layers": None if layers is None else list(layers),
            "head": None if head is None else list(head),
            "bos": made.bos is not None,
            "text": None if text is None else Path(text).name,
            "seed": seed,
            "revision": revision,
        },
        provenance=made.provenance(),
        etas=shares,
        inputs=tuple(one for one, _ in rows),
        heads=heads,
        picture=pictured(target, rows[0][1], *shown),
        **{name: _mean([getattr(h, name) for h in heads]) for name in ("mass", "line_sums", "random_mass", "cells")},
    )


@dataclass(frozen=True, eq=False)
class _Found:
    """One layer and text, shares of each head's attention."""

    mass: Float[Tensor, "choice head"]
    line_sums: Float[Tensor, "choice head"]
    random_mass: Float[Tensor, "choice head"]
    cells: Float[Tensor, "choice head"]
    vertical: Float[Tensor, "choice head"]
    tops: tuple[Float[Tensor, "2 head place"], Float[Tensor, "2 head place"]]  # vertical, slash: share and where


def _weighed(scores: Scores, etas: Sequence[float], generator: torch.Generator) -> _Found:
    vertical, slash = line_sums(scores)
    total = vertical.sum(1)
    own = top_lines(vertical, slash, etas)
    drawn = own.random(generator, cells=True)
    both = HeadLines(torch.cat([own.vertical, drawn.vertical]), torch.cat([own.slash, drawn.slash]), own.queries)
    summed = (vertical * both.vertical).sum(2) + (slash * both.slash).sum(2)
    mass = (summed - crossings(scores, both.vertical, both.slash)) / total
    n = len(etas)
    tops = [
        torch.stack([top.values / total[:, None], top.indices.float()]).cpu()
        for top in (kind.topk(min(SHOWN, kind.shape[1]), 1) for kind in (vertical, slash))
    ]
    return _Found(
        mass[:n].cpu(),
        (summed[:n] / total).cpu(),
        mass[n:].cpu(),
        own.density().cpu(),
        (own.vertical.sum(2) / own.counts()).cpu(),
        (tops[0], tops[1]),
    )


def _head(layer: int, head: int, found: list[_Found]) -> HeadWeights:
    def mean(name: str) -> tuple[float, ...]:
        return _mean([getattr(one, name)[:, head].tolist() for one in found])

    def top(kind: int) -> tuple[Line, ...]:
        shares, places = found[0].tops[kind][:, head].tolist()
        return tuple(Line(int(at), share) for share, at in zip(shares, places, strict=True))

    return HeadWeights(
        layer,
        head,
        mean("mass"),
        mean("line_sums"),
        mean("random_mass"),
        mean("cells"),
        mean("vertical"),
        top(0),
        top(1),
    )


def _mean(series: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(sum(values) / len(values) for values in zip(*series, strict=True))


def _both_kinds(heads: Sequence[HeadWeights]) -> tuple[int, int]:
    """The head in which the lighter kind of line weighs most; the first position, where sinks are, is no line here."""

    def weight(h: HeadWeights) -> float:
        kinds = [[line.share for line in h.top_vertical if line.at > 0][:4], [line.share for line in h.top_slash[:4]]]
        return min(map(sum, kinds))

    best = max(heads, key=weight)
    return best.layer, best.head
