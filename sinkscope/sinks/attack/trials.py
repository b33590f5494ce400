"""Where attacks are tried: a model up to its sink layer, what may stand before a sequence, and the tokens to use."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.sinks.attack.clusters import clusters_of
from sinkscope.sinks.attack.vocabulary import Columns, hold_layers, in_chunks, make_pools, vocabulary
from sinkscope.sinks.first_token.ablation import Neuron, view_layer
from sinkscope.sinks.repetition.sequences import norms_after
from sinkscope.text import resolve_bos
from sinkscope.text.chat import chat_text

CHAT = "A chat between a user and an assistant.\nUser: "  # before the attack where there is no chat template


@dataclass(frozen=True)
class Context:
    """What stands before an attack: nothing, BOS, or BOS and the text of a chat."""

    name: str
    lead: tuple[int, ...]


@dataclass(frozen=True)
class Trials:
    """Everything that an attack needs to be tried.

    Attributes:
        setup: model and text.
        layer: the sink layer.
        reference: norm of the first token there, on typical text: BOS's where there is one.
        contexts: what may stand before the sequence.
        pools: head -> the ordinary tokens of its cluster.
        everyone: all ordinary tokens, as if they were the cluster of a head -1.
        batch: rows of a pass.
        workers: processes.
        resume: folder for what is finished.
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
        """Norm over the reference at the attacked positions.

        Attacked are all positions of a sequence but the model's position 0, where any token is a first token.
        """
        parts = rows.split(self.batch)
        return torch.cat([_norms(self.setup.target, self.layer, self.reference, context.lead, p) for p in parts])

    def norms_of_all(self, tasks: Sequence[tuple[Context, Tensor]]) -> list[Float[Tensor, "row attacked"]]:
        """`norms` of many sets of sequences at once: over several workers and resumed, if that was asked for."""
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
    """Contexts, tokens and the norm to reach; the arguments are those of `cluster_attack`. The pools may be empty.

    Raises:
        SinkscopeError: sequences that do not fit the context or the clusters, an empty prefix, bad clusters.
    """
    target, folder = setup.target, None if resume is None else Path(resume)
    contexts = _contexts(setup, bos, prefix)
    longest, before = max(lengths), max(len(c.lead) for c in contexts)
    if target.max_positions is not None and longest + before > target.max_positions:
        raise SinkscopeError(
            f"--length {longest} does not fit the context of {target.max_positions} tokens with {before} before it; "
            f"the largest is {target.max_positions - before}"
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
    resolve_bos(setup.tokenizer, setup.target.config, bos)  # refuses --bos where there is none
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
class NormWork:
    """Norms of many batches, in whichever process: an item is the number of a batch.

    Attributes:
        layer: the sink layer.
        reference: what norms are divided by.
        batches: what stands before the sequences, and the sequences.
    """

    layer: int
    reference: float
    batches: tuple[tuple[tuple[int, ...], Tensor], ...]

    def __call__(self, target: Target, items: list[int]) -> Columns:
        """A list of rows of norms per batch."""
        return {"norms": [_norms(target, self.layer, self.reference, *self.batches[i]).tolist() for i in items]}

    def digest(self) -> str:
        """Changes with what is measured."""
        seen = hashlib.sha256()
        for lead, rows in self.batches:
            seen.update(f"{lead} {tuple(rows.shape)}".encode() + rows.numpy().tobytes())
        return seen.hexdigest()[:16]
