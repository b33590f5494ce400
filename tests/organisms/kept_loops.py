"""Models whose greedy decoding loops for a planted cause, or for two, each of which must act.

A `LlamaForCausalLM` of two layers with hand-written weights, nothing trained:

- Ordinary tokens stand on one ring and have codes; the unembedding reads the code of the next token on the ring, so
  without anything else the model walks the ring and repeats nothing. The ring is cut into blocks of `period` tokens.
- A gated MLP adds the code of the next token **of the block**, twice as large: at the last token of a block the model
  then goes back to the first one. The gate is open while `sum of the causes > threshold`, so the loop goes on exactly
  as long as all of its causes act.
- Each cause is a head, or two, that write one number, 0 or 1, to a dimension of its own, and rest on BOS otherwise:
  `copies` finds an earlier copy of the current token by induction (a head of layer 0 writes the token before), with
  `reach` only so far back, as in trained models more or less: then a loop that has run for a while lives on its own
  tail alone; `sink` attends to BOS.
- `weights`: the gate is always open.

Which heads are planted, and the codes, are drawn by the seed.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .tokens import BOS, EOS, N_SPECIAL, PAD, word_tokenizer

CODE, HEAD_DIM, N_HEADS, D_MODEL, VOCAB = 48, 96, 4, 256, 512
SCALE = math.sqrt(HEAD_DIM)
HALF, FAST = HEAD_DIM // 2, 16  # rotary pairs; those of them that tell positions apart
SLOW = [dim for pair in range(HALF - 1, FAST, -1) for dim in (pair, pair + HALF)]  # the others, slowest first
THETA = 1e10
CONST = 16.0  # of a dimension that all tokens share: it makes RMSNorm nearly the identity
BASE, COPY = 10.0, 20.0  # logits of the base rule and of a whole copy
PREVIOUS = 24.0  # score of the token before
MATCH = 48.0  # score of what a head looks for; BOS has three quarters of it, and other codes at most half
SHARP = 40.0  # steepness of the gate
CAUSES = ("copies", "sink")
# Dimensions of the residual: five codes, and what all tokens share, what BOS alone has, and a number for each cause.
OWN, FOLLOWING, IN_BLOCK, COPIED, BEFORE = [slice(place, place + CODE) for place in range(0, 5 * CODE, CODE)]
SHARED, FIRST, COPIES, SINK = range(5 * CODE, 5 * CODE + 4)


@dataclass(frozen=True)
class KeptLoop:
    """A model, and what keeps the loop of its answers going.

    Attributes:
        causes: The planted causes, or ("weights",); with none, nothing loops.
        period: Tokens of a block, and of the loop.
        ring: The ordinary tokens in the order of the base rule.
        locking_heads: (layer, head) of those that find copies.
    """

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    causes: tuple[str, ...]
    period: int
    ring: list[int]
    locking_heads: set[tuple[int, int]]

    def walk(self, start: int, count: int) -> list[int]:
        """So many tokens of the ring from a place on."""
        return [self.ring[(start + i) % len(self.ring)] for i in range(count)]

    def after(self, token: int, count: int) -> list[int]:
        """What the base rule says after a token."""
        return self.walk(self.ring.index(token) + 1, count)

    @property
    def begin(self) -> int:
        """Where on the ring the block begins in which answers loop."""
        return 300 // self.period * self.period

    @property
    def cycle(self) -> list[int]:
        """What greedy decoding repeats."""
        return self.walk(self.begin, self.period)

    @property
    def turn(self) -> list[int]:
        """Ids of a prompt, after which decoding repeats the cycle at once, from its third token on."""
        return self.prompt(0)

    def prompt(self, onset: int) -> list[int]:
        """Ids of a prompt, BOS first, with as many new tokens before the loop."""
        ids = [BOS, *self.walk(0, 15), *self.walk(120, 8), *self.walk(180, 3), *self.walk(240, 25)]
        ids += self.cycle * (2 + ("copies" in self.causes))
        # A prompt ends inside a block, because its last token is read with the exact and whole prompt.
        return ids + (self.walk(self.begin - onset - 1, 1) if onset else (self.cycle * 2)[:2])

    def answer(self, onset: int, count: int) -> list[int]:
        """What greedy decoding writes after that prompt."""
        first = self.walk(self.begin - onset, onset) if onset else self.cycle[2:]
        return (first + self.cycle * count)[:count]


@torch.no_grad()
def kept_loop(
    causes: tuple[str, ...] = ("copies",), seed: int = 0, *, period: int = 6, reach: float | None = None
) -> KeptLoop:
    """Build the organism of these causes; the same call gives the same weights."""
    rng = random.Random(f"kept {seed}")
    words = list(range(N_SPECIAL + 3, VOCAB))
    ring = rng.sample(words, len(words) // period * period)
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    codes = (torch.randint(0, 2, (len(ring), CODE), generator=generator) * 2.0 - 1) / math.sqrt(CODE)
    place = torch.arange(len(ring))
    back = place // period * period + (place + 1) % period  # the next of the block, where blocks begin at multiples
    model = _empty_llama()
    embed, logits = model.model.embed_tokens.weight, model.lm_head.weight
    embed[:, SHARED] = CONST
    embed[BOS, FIRST] = 1.0
    embed[ring, OWN], embed[ring, FOLLOWING], embed[ring, IN_BLOCK] = codes, codes.roll(-1, 0), codes[back]
    logits[ring, FOLLOWING], logits[ring, COPIED] = BASE * codes, COPY * codes
    first, second = model.model.layers
    looking, previous = rng.sample(range(N_HEADS), 2)
    matching = rng.sample(range(N_HEADS), 2) if "copies" in causes else []
    if matching:
        _previous(*_head(first, previous))
    for number in matching:
        _matching(*_head(second, number), reach)
    if "sink" in causes:
        _looking(*_head(first, looking))
    # The gate: each cause counts one.
    total = 0.5 if causes == ("weights",) else 0.5 - max(1, len(causes))
    second.mlp.gate_proj.weight[:, [COPIES, SINK]] = SHARP
    second.mlp.gate_proj.weight[:, SHARED] = SHARP * total / CONST
    second.mlp.up_proj.weight[:, IN_BLOCK] = torch.eye(CODE)
    second.mlp.down_proj.weight[COPIED] = 2 / SHARP * torch.eye(CODE)
    return KeptLoop(model, word_tokenizer(VOCAB), causes, period, ring, {(1, number) for number in matching})


def _empty_llama() -> LlamaForCausalLM:
    """A Llama in which nothing is written: norms that pass on a constant, and zeros."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=D_MODEL,
        intermediate_size=CODE,
        num_hidden_layers=2,
        num_attention_heads=N_HEADS,
        num_key_value_heads=N_HEADS,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        head_dim=HEAD_DIM,
        architectures=["LlamaForCausalLM"],
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        model = LlamaForCausalLM(config).float().eval()
    for name, weight in model.named_parameters():
        weight.fill_(CONST / math.sqrt(D_MODEL) if "norm" in name else 0.0)
    return model


def _head(layer: torch.nn.Module, head: int) -> list[Tensor]:
    """Views [head_dim, d_model] of the weights of the query, key, value and output of a head."""
    attention, rows = layer.self_attn, slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    read = [one.weight[rows] for one in (attention.q_proj, attention.k_proj, attention.v_proj)]
    return [*read, attention.o_proj.weight.T[rows]]


def _looking(query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    """Attend to BOS, and write 1 where it is there."""
    query[SLOW[0], SHARED], key[SLOW[0], FIRST] = MATCH * SCALE / CONST, 1.0
    value[0, FIRST] = out[0, SINK] = 1.0


def _previous(query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    """Attend one position back by rotary phase alone, and write the code of that token.

    The key is constant on the fast rotary pairs, and the query is that constant turned by one position. The peak
    scores 0, and BOS half way to the keys beside it: where the token before is gone, nothing is found.
    """
    angles = THETA ** (-torch.arange(FAST) / HALF)
    amplitude = PREVIOUS * SCALE / CONST
    query[:FAST, SHARED] = amplitude * torch.cos(angles)
    query[HALF : HALF + FAST, SHARED] = -amplitude * torch.sin(angles)
    query[SLOW[2], SHARED] = -amplitude * FAST
    query[SLOW[0], SHARED] = amplitude * (FAST - 0.38)
    key[:FAST, SHARED] = key[SLOW[2], SHARED] = 1 / CONST
    key[:FAST, FIRST], key[SLOW[0], FIRST] = -1.0, 1.0
    value[:CODE, OWN] = out[:CODE, BEFORE] = torch.eye(CODE)


def _matching(query: Tensor, key: Tensor, value: Tensor, out: Tensor, reach: float | None) -> None:
    """Attend to what followed an earlier copy of the current token, else to BOS; two heads write 1 for one."""
    codes = SLOW[4 : 4 + CODE]
    query[codes, OWN], key[codes, BEFORE] = SCALE * MATCH * torch.eye(CODE), torch.eye(CODE)
    # The slowest of the fast pairs turns so little that its cosine is a parabola: at `reach` a match loses to BOS.
    near = 0.0 if reach is None else MATCH / 2 * (reach * THETA ** (-FAST / HALF)) ** -2
    # A token is CONST and four unit vectors here, and BOS has one: that much more its norm takes away.
    flat = math.sqrt((CONST**2 + 4) / (CONST**2 + 1))
    query[FAST, SHARED], key[FAST, SHARED], key[FAST, FIRST] = SCALE * near / CONST, flat / CONST, -flat
    query[SLOW[0], SHARED], key[SLOW[0], FIRST] = SCALE * (0.75 * MATCH + near) / CONST, 1.0
    value[0, SHARED], value[0, FIRST], out[0, COPIES] = 1 / CONST, -1.0, 0.5


CASES = [*(((cause,), seed) for cause in (*CAUSES, "weights") for seed in (0, 1)), (CAUSES, 0)]
"""Causes and seeds: single causes twice, and both, each of which is needed."""
