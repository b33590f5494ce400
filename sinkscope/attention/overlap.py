"""How far important lines and tokens agree: between inputs, segments and question positions (LoopServe, section 3)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.attention._line_data import Input, Text, checked_etas, inputs, questions
from sinkscope.attention._line_tap import scores_of
from sinkscope.attention._line_tokens import BUDGETS, TokenOverlap, token_overlap
from sinkscope.attention.generation import chosen_layers
from sinkscope.errors import SinkscopeError
from sinkscope.lines.choice import HeadLines, top_lines
from sinkscope.lines.sums import Scores, line_sums
from sinkscope.measure import Setup
from sinkscope.results import Result
from sinkscope.sinks.first_token.locate import Progress

ETAS = (0.1, 0.2, 0.3)
LOW = 0.5  # the paper: "for most heads, the overlap remains below 0.5"
_NAMES = ("inputs", "inputs_paper", "inputs_random", "segments", "segments_relative", "segments_random")


@dataclass(frozen=True)
class HeadOverlap:
    """One query head: means over pairs of texts or over texts, one number per eta.

    Attributes:
        layer: its layer.
        head: which head.
        inputs: lines chosen in both of two texts over lines chosen in either (observation 2); pairs of different texts.
        inputs_paper: the same with each text paired with itself as well, as the paper averages.
        inputs_random: `inputs` of random lines, of each kind as many.
        segments: lines chosen in the first half of a text and in the second over those of the second (observation 3);
            vertical lines are key positions of the text.
        segments_relative: the same within each half: keys of the first half are left out of the second's sums, and
            vertical lines counted from its beginning.
        segments_random: `segments` of random lines, of each kind as many.
    """

    layer: int
    head: int
    inputs: tuple[float, ...]
    inputs_paper: tuple[float, ...]
    inputs_random: tuple[float, ...]
    segments: tuple[float, ...]
    segments_relative: tuple[float, ...]
    segments_random: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class LineOverlap(Result):
    """How far the heaviest lines agree.

    Attributes:
        etas: shares of all lines that were chosen.
        texts: the texts.
        inputs: mean over the heads, per eta; so the next five (see `HeadOverlap`).
        inputs_paper: see `HeadOverlap`.
        inputs_random: see `HeadOverlap`.
        segments: see `HeadOverlap`.
        segments_relative: see `HeadOverlap`.
        segments_random: see `HeadOverlap`.
        heads: every head that was measured, by layer.
        tokens: observation 4; None: it was not asked for, or the texts have no questions.
    """

    kind: ClassVar[str] = "line-overlap"
    percent: ClassVar[tuple[str, ...]] = _NAMES

    etas: tuple[float, ...]
    texts: tuple[Input, ...]
    inputs: tuple[float, ...]
    inputs_paper: tuple[float, ...]
    inputs_random: tuple[float, ...]
    segments: tuple[float, ...]
    segments_relative: tuple[float, ...]
    segments_random: tuple[float, ...]
    heads: tuple[HeadOverlap, ...]
    tokens: TokenOverlap | None

    def rows(self) -> list[dict[str, Any]]:
        """Up to 16 heads at the first eta, those that agree most between inputs first."""
        heads = sorted(self.heads, key=lambda h: -h.inputs[0])[:16]
        return [
            {"layer": h.layer, "head": h.head, "eta": self.etas[0], **{name: getattr(h, name)[0] for name in _NAMES}}
            for h in heads
        ]

    def summary(self) -> str:
        """What was found, in a few lines."""
        m = self.model
        lines = [f"{m.name} ({m.family}, {m.n_layers} layers), {len(self.texts)} texts, {len(self.heads)} heads"]
        for i, eta in enumerate(self.etas):
            low = sum(h.inputs[i] < LOW for h in self.heads)
            lines.append(
                f"eta {eta:g}: between inputs {self.inputs[i]:.1%} (i = j included, as in the paper, "
                f"{self.inputs_paper[i]:.1%}; random lines {self.inputs_random[i]:.1%}), below {LOW:.0%} in {low} of "
                f"{len(self.heads)} heads; from first to second half {self.segments[i]:.1%}, within each half "
                f"{self.segments_relative[i]:.1%} (random {self.segments_random[i]:.1%})."
            )
        return "\n".join([*lines, *([] if self.tokens is None else self.tokens.lines())])


def line_overlap(
    model: object = None,
    texts: Sequence[Text] | None = None,
    *,
    data: str | os.PathLike[str] | None = None,
    count: int = 6,
    length: int | None = None,
    etas: Sequence[float] = ETAS,
    layers: Sequence[int] | None = None,
    max_new_tokens: int = 48,
    budgets: Sequence[float] = BUDGETS,
    window: int = 16,
    tokenizer: Any = None,
    bos: bool | None = None,
    text: str | Path | None = None,
    seed: int = 0,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> LineOverlap:
    """Whether the heaviest lines of one text, or of its first half, are those of another, or of the second.

    And whether the tokens that the end of a prompt attends to are those that the answer attends to, with the question
    at the beginning, in the middle and at the end.

    Args:
        model: None (the bundled model), short name, hub id, folder, `.gguf` file, or a live plain or nnsight model.
        texts: at least two texts or lists of ids; None: pieces of ordinary text.
        data: file of prompts instead: LongBench's `samsum.jsonl`, LongEval's topic retrieval, or JSON lines with a
            "prompt".
        count: pieces of ordinary text, or prompts of the file; at least two.
        length: most tokens of each text, at least 16; longer ones lose their middle. None: what the context holds, for
            ordinary text 512.
        etas: shares of all `2 n` lines to choose.
        layers: which to measure; None: all.
        max_new_tokens: of the answers; 0: leave the questions' part out. It is left out for `texts`, which have none.
        budgets: shares of the prompt's tokens that count as important.
        window: queries of an observation window, and of a block.
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
    shares, parts = checked_etas(etas), checked_etas(budgets, "--budget")
    if max_new_tokens < 0 or window < 1:
        name, value = ("max-new-tokens", max_new_tokens) if max_new_tokens < 0 else ("window", window)
        raise SinkscopeError(f"--{name} {value}: expected {0 if name != 'window' else 1} or more")
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
    rows = inputs(made, texts, data, count, length)
    if len(rows) < 2:
        raise SinkscopeError("one text cannot be compared with another: expected two or more")
    asked = [] if texts is not None or not max_new_tokens else questions(made, data, count, length, max_new_tokens)
    shortest = min((len(question.placed("end")) for question in asked), default=window)
    if window > shortest:
        raise SinkscopeError(f"--window {window}: expected at most {shortest}, the tokens of the shortest prompt")
    generator = torch.Generator().manual_seed(seed)
    chosen: dict[int, list[_Chosen]] = {layer: [] for layer in wanted}
    done = 0

    def choose(layer: int, scores: Scores) -> None:
        nonlocal done
        chosen[layer].append(_chosen(scores, shares, generator))
        done += 1
        if progress is not None:
            progress("layers", done, len(wanted) * len(rows))

    with scores_of(target, choose, wanted):
        for _, ids in rows:
            target.forward(ids[None])
    heads = tuple(head for layer in wanted for head in _heads(layer, chosen[layer]))
    return LineOverlap(
        model=made.info(),
        settings={
            "texts": None if texts is None else [t if isinstance(t, str) else list(t) for t in texts],
            "data": None if data is None else Path(data).name,
            "count": count,
            "length": length,
            "etas": list(shares),
            "layers": None if layers is None else list(layers),
            "max_new_tokens": max_new_tokens,
            "budgets": list(parts),
            "window": window,
            "bos": made.bos is not None,
            "text": None if text is None else Path(text).name,
            "seed": seed,
            "revision": revision,
        },
        etas=shares,
        texts=tuple(one for one, _ in rows),
        heads=heads,
        tokens=token_overlap(target, asked, wanted, max_new_tokens, parts, window, progress) if asked else None,
        provenance=made.provenance(),
        **{name: tuple(torch.tensor([getattr(h, name) for h in heads]).double().mean(0).tolist()) for name in _NAMES},
    )


@dataclass(frozen=True, eq=False)
class _Chosen:
    """One layer and text: what was chosen, and what the segments share."""

    own: HeadLines
    random: HeadLines
    segments: dict[str, Float[Tensor, "choice head"]]


def _chosen(scores: Scores, etas: Sequence[float], generator: torch.Generator) -> _Chosen:
    keys = scores.key.shape[1]
    half = keys // 2
    own = top_lines(*line_sums(scores), etas)
    first = top_lines(*line_sums(scores.part(0, half)), etas)
    second = top_lines(*line_sums(scores.part(half, keys)), etas, keys - half)
    vertical, slash = line_sums(scores.part(half, keys), since=half)
    inside = top_lines(vertical[:, half:], slash[:, : keys - half], etas)
    shared = {
        "segments": covered(first, second),
        "segments_relative": covered(first, inside),
        "segments_random": covered(first.random(generator, cells=False), second.random(generator, cells=False)),
    }
    drawn = own.random(generator, cells=False)
    return _Chosen(_cpu(own), _cpu(drawn), {name: value.cpu() for name, value in shared.items()})


def _cpu(lines: HeadLines) -> HeadLines:
    return HeadLines(lines.vertical.cpu(), lines.slash.cpu(), lines.queries)


def jaccard(a: HeadLines, b: HeadLines) -> Float[Tensor, "choice head"]:
    """Number of lines in both over number of lines in either."""
    both = _shared(a, b)
    return both / (a.counts() + b.counts() - both).clamp(min=1)


def covered(a: HeadLines, b: HeadLines) -> Float[Tensor, "choice head"]:
    """Number of lines in both over number of lines of `b`."""
    return _shared(a, b) / b.counts().clamp(min=1)


def _shared(a: HeadLines, b: HeadLines) -> Tensor:
    keys = min(a.vertical.shape[2], b.vertical.shape[2])  # lines that only one of them can have are not shared
    vertical, slash = a.vertical[..., :keys] & b.vertical[..., :keys], a.slash[..., :keys] & b.slash[..., :keys]
    return vertical.sum(2) + slash.sum(2)


def _heads(layer: int, chosen: list[_Chosen]) -> list[HeadOverlap]:
    pairs = [(a, b) for i, a in enumerate(chosen) for b in chosen[:i]]
    apart = torch.stack([jaccard(a.own, b.own) for a, b in pairs]).double().mean(0)
    drawn = torch.stack([jaccard(a.random, b.random) for a, b in pairs]).double().mean(0)
    count = len(chosen)
    found = {"inputs": apart, "inputs_paper": (apart * (count - 1) + 1) / count, "inputs_random": drawn}
    for name in _NAMES[3:]:
        found[name] = torch.stack([one.segments[name] for one in chosen]).double().mean(0)
    return [
        HeadOverlap(layer, head, **{name: tuple(found[name][:, head].tolist()) for name in _NAMES})
        for head in range(apart.shape[1])
    ]
