"""A model whose attention maps are lines that are known: columns of chosen tokens, and offsets.

`MistralForCausalLM`, nothing trained, values and MLPs zero, so every layer sees the
embeddings. A token's embedding is a constant, a flag for *loud* tokens, and noise.

- Keys hold the constant on the fast rotary pairs and the flag on the slowest ones.
- A **slash** head's query is the constant on the fast pairs, turned back by `offset` positions: the score is
  `FORCE * mean(cos(theta * (back - offset)))`, which is largest where a key lies `offset` back.
- A **vertical** head's query is the constant on the slowest pairs: loud tokens score `LOUD`, wherever they stand.
- A **mixed** head does both; a **plain** head has a query of noise alone and no lines.

Which heads of which layers do what is drawn by the seed, and so are the offsets.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .loop import empty_model
from .tokens import BOS, N_SPECIAL, word_tokenizer

D_MODEL, HEAD_DIM, N_HEADS, N_KV, LAYERS = 48, 64, 4, 2, 2
HALF, FAST = HEAD_DIM // 2, 12  # rotary pairs; those of them that tell positions apart
THETA = 1e8
CONST, FLAG = 0, 1  # residual dimensions
BIG = 16.0  # of the constant: it makes RMSNorm nearly the identity
FORCE, LOUD = 40.0, 12.0  # scores of a slash line and of a loud token
BOTH = 14.0  # of a loud token in a mixed head, where it must stand against the slash line
VOCAB = 200
LOUD_TOKENS = (N_SPECIAL, N_SPECIAL + 1)


@dataclass(frozen=True)
class LineTruth:
    """The offset of each (layer, head) with a slash line, and the heads whose vertical lines are the loud tokens."""

    offsets: dict[tuple[int, int], int]
    vertical: frozenset[tuple[int, int]]
    plain: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class LineOrganism:
    model: PreTrainedModel
    tokenizer: object
    truth: LineTruth

    def text(self, n: int, columns: tuple[int, ...], seed: int = 0) -> list[int]:
        """BOS and n - 1 ordinary tokens, loud ones at `columns`."""
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(LOUD_TOKENS[-1] + 1, VOCAB, (n,), generator=g).tolist()
        ids[0] = BOS
        for i, column in enumerate(columns):
            ids[column] = LOUD_TOKENS[i % 2]
        return ids


def line_organism(seed: int = 0, window: int | None = None) -> LineOrganism:
    """Build the organism of `seed`: in each layer a slash, a vertical, a mixed and a plain head, in random order."""
    rng = random.Random(f"lines {seed}")
    model = empty_model(
        "mistral",
        BIG,
        THETA,
        vocab_size=VOCAB,
        hidden_size=D_MODEL,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=N_HEADS,
        num_key_value_heads=N_KV,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        sliding_window=window,
    )
    offsets = {}
    vertical = set()
    plain = set()
    g = torch.Generator().manual_seed(rng.getrandbits(40))
    with torch.no_grad():
        embed = model.model.embed_tokens.weight
        embed[:, 2:] = 0.05 * torch.randn(VOCAB, D_MODEL - 2, generator=g)
        embed[:, CONST] = BIG
        embed[list(LOUD_TOKENS), FLAG] = 1.0
        for index, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            key = attention.k_proj.weight.view(N_KV, HEAD_DIM, D_MODEL)
            key[:, :FAST, CONST] = 1 / BIG
            key[:, HALF - 1, FLAG] = 1.0
            key[:, FAST : HALF - 1, 2:] = torch.randn(N_KV, HALF - 1 - FAST, D_MODEL - 2, generator=g)
            query = attention.q_proj.weight.view(N_HEADS, HEAD_DIM, D_MODEL)
            query[:, FAST : HALF - 1, 2:] = torch.randn(N_HEADS, HALF - 1 - FAST, D_MODEL - 2, generator=g)
            for role, head in zip(("slash", "vertical", "mixed", "plain"), rng.sample(range(N_HEADS), 4), strict=True):
                place = (index, head)
                if role in ("slash", "mixed"):
                    offsets[place] = rng.randrange(2, 40 if window is None else window - 2)
                    _slash(query[head], offsets[place])
                if role in ("vertical", "mixed"):
                    vertical.add(place)
                    query[head, HALF - 1, CONST] = (BOTH if role == "mixed" else LOUD) * math.sqrt(HEAD_DIM) / BIG
                if role == "plain":
                    plain.add(place)
    return LineOrganism(model, word_tokenizer(VOCAB), LineTruth(offsets, frozenset(vertical), frozenset(plain)))


def _slash(query: Tensor, offset: int):
    angles, force = THETA ** (-torch.arange(FAST) / HALF), FORCE * math.sqrt(HEAD_DIM) / (FAST * BIG)
    query[:FAST, CONST] = force * torch.cos(angles * offset)
    query[HALF : HALF + FAST, CONST] = -force * torch.sin(angles * offset)
