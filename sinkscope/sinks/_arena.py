"""Where attacks are tried: a model up to its sink layer, what may stand before a sequence, and the tokens to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.models.target import first_tensor
from sinkscope.sinks._ablation import Neuron
from sinkscope.sinks._measure import view_layer
from sinkscope.sinks._sequences import make_pools
from sinkscope.sinks._setup import Progress, Setup

CHAT = "A chat between a user and an assistant.\nUser: "  # before the attack where there is no chat template


@dataclass(frozen=True)
class Context:
    """What stands before an attack: nothing, BOS, or BOS and the text of a chat."""

    name: str
    lead: tuple[int, ...]

    def before(self, rows: Int[Tensor, "row pos"]) -> Int[Tensor, "row all"]:
        """The sequences behind it."""
        return torch.cat([torch.tensor(self.lead, dtype=torch.long).expand(len(rows), -1), rows], 1)


@dataclass(frozen=True)
class Arena:
    """Everything that an attack needs to be tried.

    Attributes:
        made: model and text.
        layer: the sink layer.
        neurons: the sink neurons.
        reference: norm of the first token there, on typical text: BOS's where there is one.
        contexts: what may stand before the sequence.
        pools: head -> the ordinary tokens of its cluster.
        everyone: all ordinary tokens, as if they were the cluster of a head -1.
        batch: rows of a pass.
    """

    made: Setup
    layer: int
    neurons: tuple[Neuron, ...]
    reference: float
    contexts: tuple[Context, ...]
    pools: dict[int, Tensor]
    everyone: dict[int, Tensor]
    batch: int

    @torch.no_grad()
    def norms(self, context: Context, rows: Int[Tensor, "row pos"]) -> Float[Tensor, "row attacked"]:
        """Norm over the reference at the attacked positions, from passes that end at the sink layer.

        Attacked are all positions of a sequence but the model's position 0, where any token is a first token.
        """
        target, got = self.made.target, list[Tensor]()
        start = max(len(context.lead), 1)

        def keep(_module: object, _args: object, _kwargs: object, out: Any) -> None:
            norms = torch.linalg.vector_norm(first_tensor(out)[:, start:], dim=-1, dtype=torch.float32)
            got.append(norms.cpu() / self.reference)
            target.stop()

        with target.hooks((target.layers[self.layer], "post", keep)):
            for part in rows.split(self.batch):
                target.forward(context.before(part))
        return torch.cat(got)


def make_arena(
    made: Setup,
    layer: int,
    neurons: tuple[Neuron, ...],
    *,
    bos: bool | None,
    prefix: str | None,
    clusters: Mapping[int, Sequence[int]] | None,
    lengths: Sequence[int],
    batch: int,
    progress: Progress | None,
) -> Arena:
    """Contexts, tokens and the norm to reach; the arguments are those of `cluster_attack`.

    Raises:
        SinkscopeError: sequences that do not fit the context or the clusters, an empty prefix, bad clusters.
    """
    target, tokenizer = made.target, made.target.tokenizer
    contexts = _contexts(made, bos, prefix)
    longest, room = max(lengths), max(len(c.lead) for c in contexts)
    if target.max_positions is not None and longest + room > target.max_positions:
        raise SinkscopeError(
            f"--length {longest} does not fit the context of {target.max_positions} tokens with {room} before it; the "
            f"largest is {target.max_positions - room}"
        )
    if clusters is None:
        clusters = _clusters(made, layer, progress)
    vocabulary = int(target.config.vocab_size)
    left_out = {int(i) for i in tokenizer.all_special_ids} | {i for c in contexts for i in c.lead}
    everyone = make_pools({-1: range(min(vocabulary, len(tokenizer)))}, vocabulary, left_out)
    pools = make_pools(clusters, vocabulary, left_out)
    largest = max(map(len, pools.values()))
    if min(lengths) > largest:
        raise SinkscopeError(
            f"--length {min(lengths)} is more than the {largest} tokens of the largest cluster, and no token is "
            "repeated; give at most that"
        )
    first = made.ids[:, :1]
    reference = view_layer(target, layer, first, torch.ones_like(first, dtype=torch.bool)).resid.norm(dim=-1).median()
    return Arena(made, layer, neurons, float(reference), contexts, pools, everyone, batch)


def _contexts(made: Setup, bos: bool | None, prefix: str | None) -> tuple[Context, ...]:
    start = () if made.bos is None else (made.bos,)
    found = []
    if start and bos is not False:
        found.append(Context("BOS", start))
    if not start or bos is not True:
        found.append(Context("no BOS", ()))
    chat = _chat_ids(made.target.tokenizer, prefix)
    if chat:
        found.append(Context("chat", ((() if bos is False else start) + chat)))
    return tuple(found)


def _chat_ids(tokenizer: Any, prefix: str | None) -> tuple[int, ...]:
    """Tokens before what a user says: `prefix`, or what the chat template writes, or `CHAT`; none for ""."""
    if prefix is None:
        prefix = CHAT
        if getattr(tokenizer, "chat_template", None):
            mark = "\u2021"
            turn = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
            prefix = turn.partition(mark)[0].removeprefix(tokenizer.bos_token or "")
    return tuple(tokenizer(prefix, add_special_tokens=False)["input_ids"])


def _clusters(made: Setup, layer: int, progress: Progress | None) -> Mapping[int, Sequence[int]]:
    """Head -> tokens, from `token_clusters`."""
    from sinkscope.sinks.cluster import token_clusters

    found = token_clusters(made.target, bos=made.bos is not None, seed=made.seed, progress=progress)
    return found.clusters()

