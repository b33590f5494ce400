"""Sequences without any repeated token that are sinks all over, and how often (Yona et al. 2025, section 5.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.parallel import check_workers
from sinkscope.rate import Rate, wilson
from sinkscope.results import Result
from sinkscope.sinks.attack.attempts import Arena, Context, make_arena
from sinkscope.sinks.attack.chunks import Opened
from sinkscope.sinks.attack.clusters import sink_of
from sinkscope.sinks.attack.sequences import coordinate, draw, greedy, repeat, round_trip
from sinkscope.sinks.first_token.locate import Progress, setup

SUCCESS = 0.5  # of BOS's norm, at a position (definition of success)
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LENGTHS = (8, 32, 128)


@dataclass(frozen=True)
class AttackRow:
    """One way to make sequences, in one context, of one length.

    Attributes:
        context: "BOS", "no BOS" or "chat" (behind a prefix).
        source: "cluster" (drawn from one cluster each), "random" (drawn from all tokens), "repeated" (one token over
            and over), "greedy" or "coordinate" (searched among the tokens of one cluster).
        length: tokens of a sequence.
        sequences: how many.
        positions: mean share of the attacked positions that succeed: norm >= half of BOS's.
        any: sequences that succeed at some position.
        most: sequences that succeed at half of their positions or more.
        first: median number of tokens of the sequence until the first success; None: half of them never succeed.
        norm: median over sequences of the mean norm, over BOS's.
        round_trip: share of sequences that survive being written as text and read again.
        any_swept: share of sequences that succeed somewhere, for each of `thresholds`.
        most_swept: ... at half of their positions or more.
        by_position: share of sequences that succeed at each attacked position.
        example: the sequence with the largest mean norm, as text.
    """

    context: str
    source: str
    length: int
    sequences: int
    positions: float
    any: Rate
    most: Rate
    first: float | None
    norm: float
    round_trip: float
    any_swept: tuple[float, ...]
    most_swept: tuple[float, ...]
    by_position: tuple[float, ...]
    example: str


@dataclass(frozen=True)
class ClusterRate:
    """Success of the drawn sequences of one cluster; `tokens` are those an attack can use."""

    head: int
    tokens: int
    context: str
    length: int
    sequences: int
    positions: float
    most: Rate


@dataclass(frozen=True, kw_only=True)
class ClusterAttack(Result):
    """How often sequences without a repeated token make sinks.

    Attributes:
        sink_layer: where norms are read; None: the model has no sink, and nothing was tried.
        reference: norm of the first token there: of BOS, where the model has one.
        success: share of it that counts as success.
        thresholds: shares that were swept.
        attacks: a row for each context, source and length.
        clusters: the rows of source "cluster" for each head.
        unfilled: lengths for which no cluster has enough tokens.
    """

    kind: ClassVar[str] = "attack"
    percent: ClassVar[tuple[str, ...]] = (
        "positions",
        "any",
        "any_low",
        "any_high",
        "most",
        "most_low",
        "most_high",
        "round_trip",
    )

    sink_layer: int | None
    reference: float | None
    success: float
    thresholds: tuple[float, ...]
    attacks: tuple[AttackRow, ...]
    clusters: tuple[ClusterRate, ...]
    unfilled: tuple[int, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row per context, length and source."""
        return [
            {
                "context": a.context,
                "length": a.length,
                "source": a.source,
                "sequences": a.sequences,
                "positions": a.positions,
                "any": a.any.share,
                "any_low": a.any.low,
                "any_high": a.any.high,
                "most": a.most.share,
                "most_low": a.most.low,
                "most_high": a.most.high,
                "first": a.first,
                "norm": a.norm,
                "round_trip": a.round_trip,
            }
            for a in self.attacks
        ]

    def summary(self) -> str:
        """What the attack reaches, in a few lines."""
        if self.sink_layer is None:
            return f"{self.model.name} has no sink, so there is nothing to attack"
        lines = [
            f"{self.model.name}: success is a norm of at least {self.success:.0%} of {self.reference:.4g} after layer "
            f"{self.sink_layer}"
        ]
        for name in dict.fromkeys(a.context for a in self.attacks):
            ours = [a for a in self.attacks if a.context == name]
            longest = max(a.length for a in ours)
            parts = [f"{a.source} {a.positions:.0%}" for a in ours if a.length == longest]
            lines.append(f"{name}, {longest} tokens, positions that succeed: {', '.join(parts)}")
            for length in dict.fromkeys(a.length for a in ours):
                parts_of = [c for c in self.clusters if (c.context, c.length) == (name, length)]
                won = [c for c in parts_of if c.most.share >= 0.5]
                if won and len(won) < len(parts_of):
                    heads = ", ".join(f"{c.head} ({c.tokens} tokens)" for c in won)
                    lines.append(
                        f"{name}, {length} tokens: only the clusters of head {heads} succeed at most positions"
                    )
        if not self.attacks:
            return f"{self.model.name}: no head of layer 0 serves two tokens by itself, so no cluster to attack with"
        if self.unfilled:
            lines.append(f"no cluster has enough tokens for length {', '.join(map(str, self.unfilled))}")
        return "\n".join(lines)


def cluster_attack(
    model: object = None,
    *,
    tokenizer: Any = None,
    clusters: Mapping[int, Sequence[int]] | None = None,
    lengths: Sequence[int] = LENGTHS,
    sequences: int = 1000,
    searched: int = 16,
    candidates: int = 8,
    bos: bool | None = None,
    prefix: str | None = None,
    thresholds: Sequence[float] = THRESHOLDS,
    text: str | Path | None = None,
    seed: int = 0,
    batch: int = 64,
    workers: int = 1,
    resume: str | Path | None = None,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> ClusterAttack:
    """Try to make sinks of sequences in which no token occurs twice, from the tokens that one head serves.

    Yona et al. 2025 (section 5.2) show two such sequences and leave the success rate open. The same sequences are
    tried after BOS, without it, and behind a chat prefix; beside them random and repeated tokens, and two searches.

    Args:
        model: as in `find_sinks`.
        tokenizer: for live models that carry none.
        clusters: head -> token ids; None: `token_clusters` finds them.
        lengths: tokens of a sequence.
        sequences: drawn for each length, from the clusters in turn; the success rate is over these.
        searched: sequences of each search and length; 0: no search.
        candidates: blocks of tokens that a search tries at each of its (up to eight) steps.
        bos: True: only with BOS, False: only without, None: both.
        prefix: text before the attack; None: that of the tokenizer's chat template, or of a plain chat; "": none.
        thresholds: shares of BOS's norm to sweep.
        text: file of typical text; None: the neutral text that ships.
        seed: of the draws.
        batch: sequences of one pass.
        workers: processes; more than one run over Ray (the searches run in one).
        resume: folder for finished batches; a run that was ended goes on from there with the same table.
        revision: of a hub id.
        dtype: as in `find_sinks`.
        device: as in `find_sinks`.
        trust_remote_code: run code that comes with the checkpoint.
        progress: called as `progress(what, done, total)`.

    A model without a sink is an answer: `sink_layer` is None.

    Raises:
        SinkscopeError: bad input; the message is one line and says what to do.
    """
    check_attack(lengths, sequences, batch, seed)
    if searched < 0 or candidates < 2:
        raise SinkscopeError(
            f"searched {searched}, candidates {candidates}: give 0 or more sequences, and 2 candidates or more"
        )
    if not all(0 < t < math.inf for t in thresholds):
        raise SinkscopeError(f"thresholds {list(thresholds)}: give shares of BOS's norm above 0, such as 0.5")
    check_workers(workers)
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "revision": revision,
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
    }
    made, layer, neurons = sink_of(setup(model, bos=bos or None, text=text, seed=seed, **options))
    lengths = sorted(set(lengths))
    attacks, parts, arena = list[AttackRow](), list[ClusterRate](), None
    if layer is not None:
        folder = None if resume is None else Path(resume)
        arena = make_arena(
            made,
            Opened(model, made.target, options),
            (layer, neurons),
            bos=bos,
            prefix=prefix,
            clusters=clusters,
            lengths=lengths,
            batch=batch,
            workers=workers,
            resume=folder,
            progress=progress,
        )
        tasks = list(_drawn(arena, lengths, sequences, seed))
        measured = arena.norms_of_all([(t.context, t.rows) for t in tasks], progress)
        for i, (task, ratios) in enumerate(zip(tasks, measured, strict=True)):
            attacks.append(_row(arena, task, ratios, thresholds))
            if task.source == "cluster":
                parts += _by_cluster(arena, task, ratios)
            if task.source == "repeated" and searched:  # the last of what is drawn in a context
                start = tasks[i - 2]
                for found in _searched(arena, start, searched, candidates, seed):
                    attacks.append(_row(arena, found, arena.norms(found.context, found.rows), thresholds))
                if progress is not None:
                    progress("searches", i + 1, len(tasks))
    return ClusterAttack(
        model=made.info(),
        settings={
            "lengths": list(lengths),
            "sequences": sequences,
            "searched": searched,
            "candidates": candidates,
            "bos": bos,
            "prefix": prefix,
            "text": None if text is None else Path(text).name,
            "seed": seed,
            "batch": batch,
            "clusters": "given" if clusters is not None else "token_clusters",
            "workers": workers,
            "revision": revision,
        },
        provenance=made.provenance(),
        sink_layer=layer,
        reference=None if arena is None else arena.reference,
        success=SUCCESS,
        thresholds=tuple(thresholds),
        attacks=tuple(attacks),
        clusters=tuple(parts),
        unfilled=tuple(n for n in lengths if arena is not None and n not in {a.length for a in attacks}),
    )


def check_attack(lengths: Sequence[int], sequences: int, batch: int, seed: int) -> None:
    """Refuse numbers that make no attack."""
    if not lengths or min(lengths) < 2:
        raise SinkscopeError(f"--length {min(lengths, default=0)}: a cluster attack needs two tokens; give 2 or more")
    for name, value, least in (("--sequences", sequences, 1), ("--batch", batch, 1), ("--seed", seed, 0)):
        if value < least:
            raise SinkscopeError(f"{name} {value}: give {least} or more")


@dataclass(frozen=True)
class _Task:
    """Sequences of one source in one context, and the head whose cluster each is of."""

    context: Context
    source: str
    rows: Int[Tensor, "row pos"]
    heads: Int[Tensor, " row"]


def _drawn(arena: Arena, lengths: Sequence[int], sequences: int, seed: int) -> Iterator[_Task]:
    """What is not searched for: the same sequences in every context."""
    for length in lengths:
        rows, heads = draw(arena.pools, length, sequences, seed)
        if not len(rows):
            continue
        random = draw(arena.everyone, length, sequences, seed)
        for context in arena.contexts:
            yield _Task(context, "cluster", rows, heads)
            yield _Task(context, "random", *random)
            yield _Task(context, "repeated", repeat(rows), heads)


def _searched(arena: Arena, drawn: _Task, count: int, candidates: int, seed: int) -> Iterator[_Task]:
    """Two searches in the context of `drawn`; the second begins with its sequences."""
    context, rows, heads = drawn.context, drawn.rows[:count], drawn.heads[:count]

    def score(ids: Tensor) -> Tensor:
        return arena.norms(context, ids).clamp(max=1.0)  # beyond BOS's norm nothing is gained

    yield _Task(context, "greedy", *greedy(score, arena.pools, rows.shape[1], count, candidates, seed))
    yield _Task(context, "coordinate", coordinate(score, rows, heads, arena.pools, candidates, seed), heads)


def _row(arena: Arena, task: _Task, ratios: Float[Tensor, "row attacked"], thresholds: Sequence[float]) -> AttackRow:
    tokenizer, rows = arena.made.target.tokenizer, task.rows
    hit = ratios >= SUCCESS
    reached = hit.any(1)
    before = rows.shape[1] - ratios.shape[1]  # tokens of the sequence before the first attacked one
    first = torch.where(reached, hit.int().argmax(1) + 1.0 + before, math.inf).median()
    swept = [ratios >= t for t in thresholds]
    return AttackRow(
        context=task.context.name,
        source=task.source,
        length=rows.shape[1],
        sequences=len(rows),
        positions=hit.float().mean().item(),
        any=wilson(int(reached.sum()), len(rows)),
        most=wilson(int(_most(hit).sum()), len(rows)),
        first=None if math.isinf(first) else float(first),
        norm=ratios.mean(1).median().item(),
        round_trip=round_trip(tokenizer, rows),
        any_swept=tuple(h.any(1).float().mean().item() for h in swept),
        most_swept=tuple(_most(h).float().mean().item() for h in swept),
        by_position=tuple(hit.float().mean(0).tolist()),
        example=tokenizer.decode(rows[ratios.mean(1).argmax()]),
    )


def _most(hit: Tensor) -> Tensor:
    return hit.float().mean(1) >= 0.5


def _by_cluster(arena: Arena, task: _Task, ratios: Float[Tensor, "row attacked"]) -> list[ClusterRate]:
    found = []
    for head in task.heads.unique().tolist():
        hit = ratios[task.heads == head] >= SUCCESS
        tokens, length = len(arena.pools[head]), task.rows.shape[1]
        most = wilson(int(_most(hit).sum()), len(hit))
        found.append(ClusterRate(head, tokens, task.context.name, length, len(hit), hit.float().mean().item(), most))
    return found
