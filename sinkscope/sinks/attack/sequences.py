"""Sequences of an attack: tokens of one cluster, random tokens, or one token repeated; and what may stand before."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.models.text.chat import chat_text
from sinkscope.sinks.tokens import TokenRows

CHAT = "A chat between a user and an assistant.\nUser: "  # used before the attack if there is no chat template
MARK = "\u2021"  # stands for what the user says


def attack_contexts(setup: Setup, prefix: str | None) -> dict[str, tuple[int, ...]]:
    """What stands before an attack, by name: BOS if there is one, no BOS, and a chat unless its prefix is empty.

    Args:
        setup: The model and its tokenizer.
        prefix: Text before what a user says. None: what the chat template writes, or `CHAT`.
    """
    tokenizer, start = setup.tokenizer, ()
    contexts: dict[str, tuple[int, ...]] = {}
    if setup.bos is not None:
        start = contexts["BOS"] = (setup.bos,)
    contexts["no BOS"] = ()
    if prefix is None:
        prefix = CHAT
        if getattr(tokenizer, "chat_template", None):
            turn = chat_text(tokenizer, [{"role": "user", "content": MARK}], answer=False)
            prefix = turn.partition(MARK)[0].removeprefix(tokenizer.bos_token or "")
    if prefix:
        contexts["chat"] = (*start, *tokenizer(prefix, add_special_tokens=False)["input_ids"])
    return contexts


def make_pools(clusters: Mapping[int, Sequence[int]], vocabulary: int, left_out: set[int]) -> list[Tensor]:
    """The clusters as tensors, without the tokens of `left_out`. Clusters of fewer than two tokens are dropped.

    Raises:
        SinkscopeError: A token does not exist in the model.
    """
    pools = []
    for head, tokens in clusters.items():
        ids = sorted({int(token) for token in tokens} - left_out)
        for token in ids:
            if not 0 <= token < vocabulary:
                raise SinkscopeError(
                    f"clusters: token {token} of head {head} is not in the vocabulary of {vocabulary} tokens; give ids "
                    f"from 0 to {vocabulary - 1}"
                )
        if len(ids) > 1:
            pools.append(torch.tensor(ids))
    return pools


def drawn_sequences(pools: Sequence[Tensor], length: int, count: int, seed: int) -> TokenRows:
    """`count` sequences of distinct tokens, each from one cluster, the clusters taken in turn.

    No rows if no cluster has `length` tokens.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"draw {seed} {length}".encode()))
    large = [pool for pool in pools if len(pool) >= length]
    if not large:
        return torch.zeros(0, length, dtype=torch.long)
    rows = []
    for number in range(count):
        pool = large[number % len(large)]
        rows.append(pool[torch.randperm(len(pool), generator=generator)[:length]])
    return torch.stack(rows)
