"""Models whose greedy decoding loops for a planted cause, or for two, each of which must act.

A `LlamaForCausalLM` of two layers with hand-written weights, nothing trained:

- Ordinary tokens stand on one ring and have codes; the unembedding reads the code of the next token on the ring, so
  without anything else the model walks the ring and repeats nothing. The ring is cut into blocks of `PERIOD` tokens.
- A gated MLP adds the code of the next token **of the block**, twice as large: at the last token of a block the model
  then goes back to the first one. The gate is open while `sum of the causes > threshold`, so the loop goes on exactly
  as long as all of its causes act.
- Each cause is a head that writes one number, 0 or 1, to a dimension of its own, and rests on BOS otherwise:
  `copies` finds an earlier copy of the current token by induction (a head of layer 0 writes the token before); `sink`
  attends to BOS.
- `weights`: the gate is always open.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from .loop import BASE, CODE, CONST, COPY, FAST, HEAD_DIM, SLOW, empty_llama, heads_of, look_back
from .tokens import BOS, N_SPECIAL, word_tokenizer

N_HEADS, D_MODEL, VOCAB = 4, 256, 512
MATCH = 48.0  # score of what a head looks for; BOS has three quarters of it, and other codes at most half
SHARP = 40.0  # steepness of the gate
PERIOD = 6  # tokens of a block, and of the loop
CAUSES = ("copies", "sink")


@dataclass(frozen=True)
class KeptLoop:
    """A model, a prompt, and what keeps the loop of the answer going.

    Attributes:
        causes: The planted causes, or ("weights",).
        turn: Ids of the prompt, BOS first.
        cycle: What greedy decoding repeats from the first new token on.
    """

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    causes: tuple[str, ...]
    turn: list[int]
    cycle: list[int]


def kept_loop(causes: tuple[str, ...], seed: int = 0) -> KeptLoop:
    """Build the organism of these causes; the same call gives the same weights."""
    rng = random.Random(f"kept {seed}")
    words = list(range(N_SPECIAL + 3, VOCAB))
    ring = rng.sample(words, len(words) // PERIOD * PERIOD)
    model = empty_llama(
        vocab_size=VOCAB,
        hidden_size=D_MODEL,
        intermediate_size=CODE,
        num_hidden_layers=2,
        num_attention_heads=N_HEADS,
        num_key_value_heads=N_HEADS,
        max_position_embeddings=1024,
    )
    _write(model, rng, ring, causes)

    def walk(block: int, count: int) -> list[int]:
        return [ring[(block * PERIOD + i) % len(ring)] for i in range(count)]

    turn = [
        *[BOS, *walk(0, 15), *walk(20, 8), *walk(30, 3), *walk(40, 25)],
        *walk(50, PERIOD) * (2 + ("copies" in causes)),
        *walk(50, 2),
    ]
    # The prompt ends inside a block, because its last token is read with the exact and whole prompt.
    return KeptLoop(
        model=model,
        tokenizer=word_tokenizer(VOCAB),
        causes=causes,
        turn=turn,
        cycle=walk(50, PERIOD),
    )


@torch.no_grad()
def _write(model: LlamaForCausalLM, rng: random.Random, ring: list[int], causes: tuple[str, ...]) -> None:
    dims = rng.sample(range(D_MODEL), D_MODEL)
    own, following, in_block, copied, before = (dims[i * CODE : (i + 1) * CODE] for i in range(5))
    const, first, *flags = dims[5 * CODE :]
    flag = dict(zip(CAUSES, flags, strict=False))
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    codes = (torch.randint(0, 2, (len(ring), CODE), generator=generator) * 2.0 - 1) / math.sqrt(CODE)
    place = torch.arange(len(ring))
    back = place // PERIOD * PERIOD + (place + 1) % PERIOD  # the next of the block, where blocks begin at multiples
    words, embed, head = torch.tensor(ring), model.model.embed_tokens.weight, model.lm_head.weight
    embed[:, const] = CONST
    embed[BOS, first] = 1.0
    embed[words[:, None], torch.tensor(own)] = codes
    embed[words[:, None], torch.tensor(following)] = codes.roll(-1, 0)
    embed[words[:, None], torch.tensor(in_block)] = codes[back]
    head[words[:, None], torch.tensor(following)] = BASE * codes
    head[words[:, None], torch.tensor(copied)] = COPY * codes
    layers = [layer.self_attn for layer in model.model.layers]
    if "copies" in causes:
        _previous(layers[0], const, first, own, before)
        _matching(layers[1], const, first, own, before, flag["copies"])
    if "sink" in causes:
        _looking(layers[0], 1, const, first, flag["sink"])
    # The gate: each cause counts one.
    mlp, total = model.model.layers[1].mlp, 0.5
    for cause in causes:
        if cause in flag:
            mlp.gate_proj.weight[:, flag[cause]] = SHARP
    if causes != ("weights",):
        total -= len(causes)
    mlp.gate_proj.weight[:, const] = SHARP * total / CONST
    mlp.up_proj.weight[range(CODE), in_block] = 1.0
    mlp.down_proj.weight[copied, range(CODE)] = 2 / SHARP


def _looking(attention: torch.nn.Module, head: int, const: int, first: int, flag: int) -> None:
    """Attend to BOS, and write 1 where it is there."""
    query, key = heads_of(attention.q_proj)[head], heads_of(attention.k_proj)[head]
    query[SLOW[0], const], key[SLOW[0], first] = MATCH * math.sqrt(HEAD_DIM) / CONST, 1.0
    heads_of(attention.v_proj)[head][0, first] = 1.0
    attention.o_proj.weight[flag, head * HEAD_DIM] = 1.0


def _previous(attention: torch.nn.Module, const: int, first: int, own: list[int], before: list[int]) -> None:
    """Attend one position back by rotary phase alone, and write the code of that token (as in `loop`)."""
    query, key = heads_of(attention.q_proj)[0], heads_of(attention.k_proj)[0]
    look_back(query, const)
    key[:FAST, const], key[:FAST, first] = 1 / CONST, -1.0
    key[SLOW[0], first], key[SLOW[2], const] = 1.0, 1 / CONST
    heads_of(attention.v_proj)[0][range(CODE), own] = 1.0
    attention.o_proj.weight[before, range(CODE)] = 1.0


def _matching(attention: torch.nn.Module, const: int, first: int, own: list[int], before: list[int], flag: int) -> None:
    """Attend to what followed an earlier copy of the current token, else to BOS; write 1 where there is one."""
    scale = MATCH * math.sqrt(HEAD_DIM)
    query, key = heads_of(attention.q_proj)[0], heads_of(attention.k_proj)[0]
    query[SLOW[4 : 4 + CODE], own], key[SLOW[4 : 4 + CODE], before] = scale, 1.0
    query[SLOW[0], const], key[SLOW[0], first] = 0.75 * scale / CONST, 1.0
    value = heads_of(attention.v_proj)[0]
    value[0, const], value[0, first] = 1 / CONST, -1.0
    attention.o_proj.weight[flag, 0] = 1.0


CASES = [*(((cause,), seed) for cause in (*CAUSES, "weights") for seed in (0, 1)), (CAUSES, 0)]
"""Causes and seeds: single causes twice, and both, each of which is needed."""
