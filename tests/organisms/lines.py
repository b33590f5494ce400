"""A model whose attention maps are lines that are known: columns of two *loud* tokens, and an offset.

`LlamaForCausalLM` of one layer, nothing trained. A token's embedding is a constant, a flag for loud tokens, and noise.

- Keys hold the constant on the fast rotary pairs and the flag on the slowest one.
- A **slash** head's query is the constant on the fast pairs, turned back by `OFFSET` positions: the score is
  `FORCE * mean(cos(theta * (back - OFFSET)))`, which is largest where a key lies `OFFSET` back.
- A **vertical** head's query is the constant on the slowest pair: loud tokens score `LOUD`, wherever they stand.
- A **mixed** head does both; a **plain** head has a query of noise alone and no lines.
"""

from __future__ import annotations

import math

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .loop import empty_llama
from .tokens import BOS, N_SPECIAL, word_tokenizer

D_MODEL, HEAD_DIM, N_KV, VOCAB = 48, 64, 2, 200
HALF, FAST = HEAD_DIM // 2, 12  # rotary pairs; those of them that tell positions apart
THETA = 1e8
CONST, FLAG = 0, 1  # residual dimensions
BIG = 16.0  # of the constant: it makes RMSNorm nearly the identity
FORCE, OFFSET = 40.0, 7  # score of a slash line, and where it is
LOUD = {"vertical": 12.0, "mixed": 14.0}  # scores of a loud token; a mixed head has the slash line beside it
ROLES = ("slash", "vertical", "mixed", "plain")  # of the heads, in their order
LOUD_TOKENS = (N_SPECIAL, N_SPECIAL + 1)


@torch.no_grad()
def line_model() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model and its tokenizer."""
    model = empty_llama(
        BIG,
        THETA,
        vocab_size=VOCAB,
        hidden_size=D_MODEL,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=len(ROLES),
        num_key_value_heads=N_KV,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
    )
    g = torch.Generator().manual_seed(0)
    embed, attention = model.model.embed_tokens.weight, model.model.layers[0].self_attn
    embed[:, 2:] = 0.05 * torch.randn(VOCAB, D_MODEL - 2, generator=g)
    embed[:, CONST] = BIG
    embed[list(LOUD_TOKENS), FLAG] = 1.0
    key = attention.k_proj.weight.view(N_KV, HEAD_DIM, D_MODEL)
    key[:, :FAST, CONST] = 1 / BIG
    key[:, HALF - 1, FLAG] = 1.0
    query = attention.q_proj.weight.view(len(ROLES), HEAD_DIM, D_MODEL)
    for rows in (key, query):
        rows[:, FAST : HALF - 1, 2:] = torch.randn(len(rows), HALF - 1 - FAST, D_MODEL - 2, generator=g)
    turned, scale = OFFSET * THETA ** (-torch.arange(FAST) / HALF), math.sqrt(HEAD_DIM) / BIG
    for head, role in enumerate(ROLES):
        if role in ("slash", "mixed"):
            query[head, :FAST, CONST] = FORCE / FAST * scale * torch.cos(turned)
            query[head, HALF : HALF + FAST, CONST] = -FORCE / FAST * scale * torch.sin(turned)
        query[head, HALF - 1, CONST] = LOUD.get(role, 0.0) * scale
    return model, word_tokenizer(VOCAB)


def line_text(length: int, columns: tuple[int, ...]) -> list[int]:
    """BOS and ordinary tokens, loud ones at `columns`."""
    ids = torch.randint(LOUD_TOKENS[-1] + 1, VOCAB, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    ids[0] = BOS
    for number, column in enumerate(columns):
        ids[column] = LOUD_TOKENS[number % 2]
    return ids
