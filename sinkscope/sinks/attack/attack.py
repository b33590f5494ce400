"""Sequences without any repeated token that are sinks all over, and how often (Yona et al. 2025, section 5.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Count, Hidden, Option, Positive, Result, Setup, measurement
from sinkscope.notation import head_name
from sinkscope.rate import Rate, wilson
from sinkscope.sinks.attack.trials import Context, Trials, make_trials
from sinkscope.sinks.attack.vocabulary import coordinate, drawn_sequences, greedy, refuse_workers, repeat, round_trip
from sinkscope.sinks.first_token.sets import causal_neurons

SUCCESS = 0.5  # of BOS's norm, at a position (definition of success)
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_WHERE = {"BOS": "after BOS", "no BOS": "without BOS", "chat": "behind a chat prefix"}


@dataclass(frozen=True)
class AttackRow:
    """One way to make sequences, in one context, of one length.

    Attributes:
        context: "BOS", "no BOS" or "chat" (behind a prefix).
        source: "cluster" (drawn from one cluster each), "random" (drawn from all tokens), "repeated" (one token over
            and over), "greedy" or "coordinate" (searched among the tokens of one cluster).
        length: tokens of a sequence.
        sequences: how many.
        positions: mean share of the attacked positions that succeed, with a norm of at least half of BOS's.
        any: share of the sequences that succeed at some position.
        most: share of the sequences that succeed at half of their positions or more.
        first: median number of tokens until the first success; None: half of the sequences never succeed.
        norm: mean norm over that of BOS, median over sequences.
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

    table_without: ClassVar[tuple[str, ...]] = ("any_swept", "most_swept", "by_position", "example")
    columns: ClassVar[tuple[str, ...]] = (
        "context",
        "length",
        "source",
        "positions",
        "any",
        "most",
        "first",
        "norm",
        "round_trip",
    )

    sink_layer: int | None
    reference: float | None = None
    success: float
    thresholds: tuple[float, ...]
    attacks: tuple[AttackRow, ...] = ()
    clusters: tuple[ClusterRate, ...] = ()
    unfilled: tuple[int, ...] = ()

    def conclusion(self) -> str:
        """What share of positions succeeds at most, beside random tokens and one token repeated."""
        if self.sink_layer is None:
            return "The model has no sink, so there is nothing to attack."
        if not self.attacks:
            return "No head of layer 0 serves two tokens by itself, so there is no cluster to attack with."
        best = max((a for a in self.attacks if a.source == "cluster"), key=lambda a: (a.positions, a.length))
        same = {a.source: a for a in self.attacks if (a.context, a.length) == (best.context, best.length)}
        chance = same["random"]
        verdict = "works" if best.any.low > chance.any.high else f"seems to work in {best.sequences} sequences"
        if best.positions <= chance.positions:
            verdict = "does no better than random tokens"
        return (
            f"The cluster attack {verdict}: {best.length} different tokens of one cluster make sinks at "
            f"{best.positions:.0%} of their positions, random tokens at {chance.positions:.0%}, and one token repeated "
            f"at {same['repeated'].positions:.0%} ({_WHERE.get(best.context, best.context)})."
        )

    def details(self) -> list[str]:
        """What counts as success, every way at the longest length, and the clusters that succeed."""
        if not self.attacks:
            return []
        lines = [
            f"A position succeeds if its norm after layer {self.sink_layer} is at least {self.success:.0%} of the "
            f"first token's, {self.reference:.4g}."
        ]
        for name in dict.fromkeys(a.context for a in self.attacks):
            ours = [a for a in self.attacks if a.context == name]
            longest = max(a.length for a in ours)
            parts = [f"{a.source} {a.positions:.0%}" for a in ours if a.length == longest]
            lines.append(f"{name}, {longest} tokens: the share of positions that succeed is {', '.join(parts)}.")
            for length in dict.fromkeys(a.length for a in ours):
                parts_of = [c for c in self.clusters if (c.context, c.length) == (name, length)]
                won = [f"{head_name(0, c.head)} ({c.tokens} tokens)" for c in parts_of if c.most.share >= 0.5]
                if won and len(won) < len(parts_of):
                    lines.append(
                        f"{name}, {length} tokens: most positions succeed only for the tokens of {', '.join(won)}."
                    )
        if self.unfilled:
            lines.append(f"No cluster has enough tokens for length {', '.join(map(str, self.unfilled))}.")
        return lines


def _check(*, lengths: Sequence[int], workers: int, thresholds: Sequence[float] = (), **_: Any) -> None:
    refuse_workers(workers=workers)
    refuse_no_lengths(lengths=lengths)
    if not all(0 < t < math.inf for t in thresholds):
        raise SinkscopeError(f"thresholds {list(thresholds)}: give shares of BOS's norm above 0, such as 0.5")


def refuse_no_lengths(*, lengths: Sequence[int], **_: Any) -> None:
    """Refuse an empty list of lengths."""
    if not lengths:
        raise SinkscopeError("--length: none is given; give a number of tokens of at least 2")


@measurement(
    group="Repetition",
    figure="sinkscope.figures.vocabulary:attack",
    command="attack",
    quick={"lengths": [4], "sequences": 4, "searched": 1, "prefix": ""},
    check=_check,
)
def cluster_attack(
    setup: Setup,
    *,
    clusters: Hidden = None,
    lengths: Sequence[Annotated[int, Option(min=2)]] = (8, 32, 128),
    sequences: Positive = 1000,
    searched: Count = 16,
    candidates: Annotated[int, Option(min=2, hidden=True)] = 8,
    bos: Annotated[bool | None, Option(own=True)] = None,
    prefix: str | None = None,
    thresholds: Hidden = THRESHOLDS,
    batch: Annotated[int, Option(name="--batch-size", min=1)] = 64,
    workers: Positive = 1,
    resume: Annotated[str | Path | None, Option(metavar="DIR", writes=True)] = None,
) -> ClusterAttack:
    """Try to make sinks with sequences in which no token occurs twice, from the tokens that one head serves.

    Yona et al. 2025 (section 5.2) show two such sequences and leave the success rate open. The same sequences are
    tried after BOS, without it, and behind a chat prefix; random and repeated tokens are tried beside them, and two
    searches. A model without a sink is an answer: `sink_layer` is None.

    Args:
        clusters: Head -> token ids; None: `token_clusters` finds them.
        lengths: Tokens of a sequence.
        sequences: Sequences of each kind and length, from the clusters in turn; the success rate is over these.
        searched: Sequences of each search and length; 0 searches for none.
        candidates: Blocks of tokens that a search tries at each of its (up to eight) steps.
        bos: Try the attack only with BOS, or only without. By default it is tried both ways.
        prefix: Text of the chat before the attack; "" leaves the chat out. By default that of the tokenizer's chat
            template, or of a plain chat.
        thresholds: Shares of BOS's norm to sweep.
        batch: Sequences in a pass.
        workers: Processes; more than one run over Ray (the searches run in one).
        resume: Keep finished parts in this folder, and go on from those that are there.

    Example:
        sinkscope attack --model llama-2-7b --length 8 --sequences 100
    """
    layer, neurons = causal_neurons(setup)
    lengths = sorted(set(lengths))
    setup.record(lengths=lengths, candidates=candidates, clusters="given" if clusters is not None else "token_clusters")
    if layer is None:
        return ClusterAttack(sink_layer=None, success=SUCCESS, thresholds=tuple(thresholds))
    trials = make_trials(
        setup,
        layer,
        neurons,
        bos=bos,
        prefix=prefix,
        clusters=clusters,
        lengths=lengths,
        batch=batch,
        workers=workers,
        resume=resume,
    )
    attacks, parts = list[AttackRow](), list[ClusterRate]()
    tasks = list(_drawn(trials, lengths, sequences, setup.seed))
    measured = trials.norms_of_all([(t.context, t.rows) for t in tasks])
    for i, (task, ratios) in enumerate(zip(tasks, measured, strict=True)):
        attacks.append(_row(trials, task, ratios, thresholds))
        if task.source == "cluster":
            parts += _by_cluster(trials, task, ratios)
        if task.source == "repeated" and searched:  # the last of what is drawn in a context
            for found in _searched(trials, tasks[i - 2], searched, candidates, setup.seed):
                attacks.append(_row(trials, found, trials.norms(found.context, found.rows), thresholds))
            setup.progress("searches", i + 1, len(tasks))
    return ClusterAttack(
        sink_layer=layer,
        reference=trials.reference,
        success=SUCCESS,
        thresholds=tuple(thresholds),
        attacks=tuple(attacks),
        clusters=tuple(parts),
        unfilled=tuple(n for n in lengths if n not in {a.length for a in attacks}),
    )


@dataclass(frozen=True)
class _Task:
    """Sequences of one source in one context, and the head whose cluster each is of."""

    context: Context
    source: str
    rows: Int[Tensor, "row pos"]
    heads: Int[Tensor, " row"]


def _drawn(trials: Trials, lengths: Sequence[int], sequences: int, seed: int) -> Iterator[_Task]:
    """What is not searched for: the same sequences in every context."""
    for length in lengths:
        rows, heads = drawn_sequences(trials.pools, length, sequences, seed)
        if not len(rows):
            continue
        random = drawn_sequences(trials.everyone, length, sequences, seed)
        for context in trials.contexts:
            yield _Task(context, "cluster", rows, heads)
            yield _Task(context, "random", *random)
            yield _Task(context, "repeated", repeat(rows), heads)


def _searched(trials: Trials, drawn: _Task, count: int, candidates: int, seed: int) -> Iterator[_Task]:
    """Two searches in the context of `drawn`; the second begins with its sequences."""
    context, rows, heads = drawn.context, drawn.rows[:count], drawn.heads[:count]

    def score(ids: Tensor) -> Tensor:
        return trials.norms(context, ids).clamp(max=1.0)  # beyond BOS's norm nothing is gained

    yield _Task(context, "greedy", *greedy(score, trials.pools, rows.shape[1], count, candidates, seed))
    yield _Task(context, "coordinate", coordinate(score, rows, heads, trials.pools, candidates, seed), heads)


def _row(trials: Trials, task: _Task, ratios: Float[Tensor, "row attacked"], thresholds: Sequence[float]) -> AttackRow:
    tokenizer, rows = trials.setup.tokenizer, task.rows
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


def _by_cluster(trials: Trials, task: _Task, ratios: Float[Tensor, "row attacked"]) -> list[ClusterRate]:
    found = []
    for head in task.heads.unique().tolist():
        hit = ratios[task.heads == head] >= SUCCESS
        tokens, length = len(trials.pools[head]), task.rows.shape[1]
        most = wilson(int(_most(hit).sum()), len(hit))
        found.append(ClusterRate(head, tokens, task.context.name, length, len(hit), hit.float().mean().item(), most))
    return found
