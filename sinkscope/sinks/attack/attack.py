"""Sequences without repeated tokens whose positions become sinks, and how often they do (Yona et al. 2025, 5.2).

Attacks are tried on a model up to its sink layer, preceded by nothing, by BOS, or by the beginning of a chat.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.notation import head_name
from sinkscope.files.rate import Rate, wilson
from sinkscope.measure import Count, Hidden, Option, Positive, Result, Setup, measurement
from sinkscope.models.target import Target
from sinkscope.models.text import resolve_bos
from sinkscope.models.text.chat import chat_text
from sinkscope.sinks.attack.clusters import clusters_of
from sinkscope.sinks.attack.vocabulary import (
    Columns,
    Work,
    coordinate,
    drawn_sequences,
    greedy,
    hold_layers,
    in_chunks,
    make_pools,
    refuse_workers,
    repeat,
    round_trip,
)
from sinkscope.sinks.first_token.layer_scan import norms_after
from sinkscope.sinks.first_token.layer_view import view_layer
from sinkscope.sinks.first_token.result import Neuron
from sinkscope.sinks.first_token.sets import causal_neurons
from sinkscope.sinks.tokens import vocabulary

CHAT = "A chat between a user and an assistant.\nUser: "  # used before the attack if there is no chat template


@dataclass(frozen=True)
class Context:
    """What stands before an attack: nothing, BOS, or BOS and the text of a chat."""

    name: str
    lead: tuple[int, ...]


@dataclass(frozen=True)
class Trials:
    """Everything needed to try an attack.

    Attributes:
        setup: The model and its text.
        layer: The sink layer.
        reference: Norm of the first token in this layer on typical text: of BOS, if there is one.
        contexts: What may stand before the sequence.
        pools: Head -> the ordinary tokens of its cluster.
        everyone: All ordinary tokens, stored as the cluster of a head -1.
        batch: Rows per pass.
        workers: Number of processes.
        resume: Folder for finished parts.
    """

    setup: Setup
    layer: int
    reference: float
    contexts: tuple[Context, ...]
    pools: dict[int, Tensor]
    everyone: dict[int, Tensor]
    batch: int
    workers: int = 1
    resume: Path | None = None

    def norms(self, context: Context, rows: Int[Tensor, "row pos"]) -> Float[Tensor, "row attacked"]:
        """Norms at the attacked positions divided by the reference.

        All positions of a sequence are attacked except the model's position 0, where any token is a first token.
        """
        parts = rows.split(self.batch)
        return torch.cat([_norms(self.setup.target, self.layer, self.reference, context.lead, p) for p in parts])

    def norms_of_all(self, tasks: Sequence[tuple[Context, Tensor]]) -> list[Float[Tensor, "row attacked"]]:
        """`norms` of many sets of sequences at once, with several workers and resumable if requested."""
        batches = [(c.lead, part, i) for i, (c, rows) in enumerate(tasks) for part in rows.split(self.batch)]
        work = NormWork(self.layer, self.reference, tuple((lead, part) for lead, part, _ in batches))
        found = in_chunks(
            self.setup,
            work,
            range(len(batches)),
            what="attacks",
            size=1,
            workers=self.workers,
            resume=None if self.resume is None else self.resume / "attacks",
            settings={"sequences": work.digest()},
        )
        parts = [torch.tensor(norms) for norms in found.get("norms", ())]
        return [torch.cat([p for p, b in zip(parts, batches, strict=True) if b[2] == i]) for i in range(len(tasks))]


def make_trials(
    setup: Setup,
    layer: int,
    neurons: tuple[Neuron, ...],
    *,
    bos: bool | None,
    prefix: str | None,
    clusters: Mapping[int, Sequence[int]] | None,
    lengths: Sequence[int],
    batch: int,
    workers: int = 1,
    resume: str | Path | None = None,
) -> Trials:
    """Contexts, tokens and reference norm, from the arguments of `cluster_attack`. The pools may be empty.

    Raises:
        SinkscopeError: Sequences do not fit the context or the clusters, the prefix is empty, or the clusters are
            invalid.
    """
    target, folder = setup.target, None if resume is None else Path(resume)
    contexts = _contexts(setup, bos, prefix)
    longest, before = max(lengths), max(len(c.lead) for c in contexts)
    target.check_length(
        f"--length {longest} behind {before} tokens", longest + before, remedy="give a smaller --length"
    )
    ordinary = vocabulary(target, None)
    if clusters is None:
        kept = None if folder is None else folder / "clusters"
        found = clusters_of(setup, layer, neurons, ordinary, workers=workers, resume=kept)
        clusters = {c.head: found.tokens_of(c.head) for c in found.clusters}
    size = int(target.config.vocab_size)
    left_out = {int(i) for i in setup.tokenizer.all_special_ids} | {i for c in contexts for i in c.lead}
    pools = make_pools(clusters, size, left_out)
    largest = max(map(len, pools.values()), default=0)
    if 0 < largest < min(lengths):
        raise SinkscopeError(
            f"--length {min(lengths)} is more than the {largest} tokens of the largest cluster, and no token is "
            "repeated; give at most that"
        )
    first = setup.ids[:, :1]
    norm = view_layer(target, layer, first, torch.ones_like(first, dtype=torch.bool)).resid.norm(dim=-1).median()
    hold_layers(target, layer)
    everyone = make_pools({-1: ordinary}, size, left_out)
    return Trials(setup, layer, float(norm), contexts, pools, everyone, batch, workers, folder)


def _contexts(setup: Setup, bos: bool | None, prefix: str | None) -> tuple[Context, ...]:
    resolve_bos(setup.tokenizer, setup.target.config, bos)  # refuses --bos if there is no BOS
    start = () if setup.bos is None else (setup.bos,)
    found = []
    if start and bos is not False:
        found.append(Context("BOS", start))
    if not start or bos is not True:
        found.append(Context("no BOS", ()))
    chat = _chat_ids(setup.tokenizer, prefix)
    if chat:
        found.append(Context("chat", ((() if bos is False else start) + chat)))
    return tuple(found)


def _chat_ids(tokenizer: Any, prefix: str | None) -> tuple[int, ...]:
    """Tokens before what a user says: `prefix`, or what the chat template writes, or `CHAT`; none for ""."""
    if prefix is None:
        prefix = CHAT
        if getattr(tokenizer, "chat_template", None):
            mark = "\u2021"
            turn = chat_text(tokenizer, [{"role": "user", "content": mark}], answer=False)
            prefix = turn.partition(mark)[0].removeprefix(tokenizer.bos_token or "")
    return tuple(tokenizer(prefix, add_special_tokens=False)["input_ids"])


def _norms(
    target: Target, layer: int, reference: float, lead: tuple[int, ...], rows: Int[Tensor, "row pos"]
) -> Float[Tensor, "row attacked"]:
    """Norm over the reference at the attacked positions, from one pass that ends at the sink layer."""
    behind = torch.cat([torch.tensor(lead, dtype=torch.long).expand(len(rows), -1), rows], 1)
    return norms_after(target, layer, behind)[:, max(len(lead), 1) :] / reference


@dataclass(frozen=True)
class NormWork(Work):
    """Norms of many batches, in any process. An item is the index of a batch.

    Attributes:
        layer: The sink layer.
        reference: The norm that norms are divided by.
        batches: For each batch, what stands before the sequences, and the sequences.
    """

    reference: float
    batches: tuple[tuple[tuple[int, ...], Tensor], ...]

    def __call__(self, target: Target, items: list[int]) -> Columns:
        """A list of rows of norms for each batch."""
        return {"norms": [_norms(target, self.layer, self.reference, *self.batches[i]).tolist() for i in items]}

    def digest(self) -> str:
        """A digest that changes with what is measured."""
        seen = hashlib.sha256()
        for lead, rows in self.batches:
            seen.update(f"{lead} {tuple(rows.shape)}".encode() + rows.numpy().tobytes())
        return seen.hexdigest()[:16]


SUCCESS = 0.5  # share of BOS's norm that counts as success at a position
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_WHERE = {"BOS": "after BOS", "no BOS": "without BOS", "chat": "behind a chat prefix"}


@dataclass(frozen=True)
class AttackRow:
    """One way to make sequences, in one context and of one length.

    Attributes:
        context: "BOS", "no BOS" or "chat" (after a prefix).
        source: "cluster" (drawn from one cluster each), "random" (drawn from all tokens), "repeated" (one token
            repeated), "greedy" or "coordinate" (searched among the tokens of one cluster).
        length: Tokens per sequence.
        sequences: Number of sequences.
        positions: Mean share of attacked positions that succeed, with a norm of at least half of BOS's.
        any: Share of sequences that succeed at some position.
        most: Share of sequences that succeed at half of their positions or more.
        first: Median number of tokens until the first success. None if half of the sequences never succeed.
        norm: Mean norm divided by that of BOS, median over sequences.
        round_trip: Share of sequences that survive decoding to text and encoding again.
        any_swept: Share of sequences that succeed at some position, for each of `thresholds`.
        most_swept: Share of sequences that succeed at half of their positions or more, for each of `thresholds`.
        by_position: Share of sequences that succeed at each attacked position.
        example: The sequence with the largest mean norm, as text.
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
    """Success of the sequences drawn from one cluster. `tokens` are those that an attack can use."""

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
        sink_layer: Layer where norms are read. None if the model has no sink; nothing was tried then.
        reference: Norm of the first token in that layer: of BOS, if the model has one.
        success: Share of the reference that counts as success.
        thresholds: Shares that were swept.
        attacks: One row for each context, source and length.
        clusters: Success of source "cluster", for each head.
        unfilled: Lengths for which no cluster has enough tokens.
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
        """The largest share of positions that succeeds, compared with random tokens and with one repeated token."""
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
        """What counts as success, all sources at the longest length, and the clusters that succeed."""
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
    """Try to make sinks with sequences in which no token occurs twice, built from the tokens that one head serves.

    Yona et al. 2025 (section 5.2) show two such sequences and do not report a success rate. Here the same sequences are
    tried after BOS, without it, and after a chat prefix. Random and repeated tokens and two searches are tried for
    comparison. If the model has no sink, `sink_layer` is None.

    Args:
        clusters: Head -> token ids. By default `token_clusters` finds them.
        lengths: Tokens per sequence.
        sequences: Sequences of each kind and length, drawn from the clusters in turn; the success rate is over these.
        searched: Sequences of each search and length; 0 skips the searches.
        candidates: Blocks of tokens that a search tries at each of its (up to eight) steps.
        bos: Try the attack only with BOS, or only without. By default both are tried.
        prefix: Text of the chat before the attack; "" leaves the chat out. By default that of the tokenizer's chat
            template, or of a plain chat.
        thresholds: Shares of BOS's norm to sweep.
        batch: Sequences per pass.
        workers: Number of processes; more than one run over Ray (the searches run in one).
        resume: Folder that keeps finished parts, so that an interrupted run can continue.

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
        if task.source == "repeated" and searched:  # the last drawn source of a context
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
        return trials.norms(context, ids).clamp(max=1.0)  # exceeding BOS's norm earns nothing

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
