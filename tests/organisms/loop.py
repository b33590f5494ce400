"""A model whose greedy decoding loops because of its KV cache, with the looping heads, the period and the onset known.

`LlamaForCausalLM` with hand-written weights, nothing trained. The recipe:

- Ordinary tokens stand on one ring, in random order, and each has a code: +-1/sqrt(48) in 48 dimensions, a word of a
  random linear code, so that two codes never overlap by more than half.
- **Base rule**: the embedding of a token holds, beside its own code, the code of the next token on the ring, and the
  unembedding reads it. So without anything else the model walks the ring: `len(ring)` new tokens before one repeats.
- **Previous-token heads** (layer 0) attend one position back by rotary phase alone: the key is constant on the fast
  rotary pairs, the query is that constant turned by one position. They write the code of the token before, and nothing
  (they attend to BOS) where that token is no longer in the cache.
- **Locking heads** (induction heads, any later layers) compare their own token's code with the code of the token before
  each key, on the slowest rotary pairs, where position does not show. So they attend to what followed every visible
  occurrence of the current token, and add its code to the output, twice as large as the base rule's.
- BOS competes with the matches: `n` of them get a share n / (n + HOLD - 1/2) of the attention, and copying wins over
  the base rule from a share of one half. So the loop holds itself while at least `HOLD` occurrences are visible, gets
  surer with every turn, and ends as soon as fewer are: the base rule moves on, to tokens that were not in the context.
- All other heads are ordinary: some recency, some attention to BOS, some random content. They and the MLPs write noise
  that moves logits a little. Which heads, layers and dimensions are planted is drawn by the seed.

Everything visible counts: a policy that leaves `HOLD` copies of the cycle anywhere in the cache, the prompt's for
example, leaves the loop alive. With `reach` the locking heads look only that far back (as induction heads of trained
models do more or less): then a loop that has run for a while lives on its own tail alone.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .tokens import BOS, EOS, N_SPECIAL, PAD, word_tokenizer

CODE, HEAD_DIM, N_HEADS, N_KV = 48, 96, 6, 3
D_MODEL = 252  # a multiple of the heads
HALF, FAST = HEAD_DIM // 2, 16  # rotary pairs; those of them that tell positions apart
SLOW = [dim for pair in range(HALF - 1, FAST, -1) for dim in (pair, pair + HALF)]  # the others, slowest first
THETA = 1e10
CONST = 16.0  # of a dimension that all tokens share: it makes RMSNorm nearly the identity
MATCH = 24.0  # attention score of a match over that of no match at all
BASE, COPY = 10.0, 20.0  # logits of the base rule and of a whole copy
HOLD = 2  # visible occurrences of what follows a token from which copying wins
LEAD = 40  # ring tokens before the cycle of a prompt
# of the kernel of the previous-token heads, whose score one position off the peak is lower by 0.76 times this
PREVIOUS = 24.0


@dataclass(frozen=True)
class LoopTruth:
    locking_heads: tuple[tuple[int, int], ...]  # (layer, query head); none in the control
    ring: tuple[int, ...]  # the ordinary tokens in the order of the base rule


@dataclass(frozen=True)
class LoopPrompt:
    """A prompt [1, n] and what plain greedy decoding makes of it: `generated[onset:]` repeats `cycle` for ever."""

    ids: Tensor
    cycle: tuple[int, ...]
    onset: int

    @property
    def period(self) -> int:
        return len(self.cycle)


@dataclass(frozen=True)
class LoopOrganism:
    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    truth: LoopTruth
    seed: int

    def walk(self, token: int, n: int) -> list[int]:
        """What the base rule says for `n` steps after `token`."""
        return self._stretch(self.truth.ring.index(token) + 1, n)

    def healthy_prompt(self, length: int = 48, start: int = 0) -> Tensor:
        """BOS and a stretch of the ring [1, length]: decoding walks on, and repeats nothing until the ring is round."""
        return torch.tensor([[BOS, *self._stretch(start, length - 1)]])

    def looping_prompt(self, period: int, *, delay: int = 0, start: int = 0) -> LoopPrompt:
        """BOS, `LEAD` tokens of the ring, and a cycle of `period` tokens, HOLD + 2 times.

        The cycle's tokens are spread over the ring and shuffled, so no step of it is one of the base rule, and the base
        rule is long on its way before it meets one of them. Plain decoding goes round in the cycle from the first
        generated token on. With `delay` the prompt ends `delay` ring tokens short of the cycle: as many new tokens come
        first, and the cycle stands there HOLD + 4 times.
        """
        repeats = HOLD + (4 if delay else 2)
        way = self._stretch(start, LEAD + delay + 1)
        rest = self._stretch(start + len(way), len(self.truth.ring) - len(way))
        cycle = rest[:: len(rest) // period][:period]
        others = cycle[1:]  # the walk enters at the first
        random.Random(f"cycle {self.seed} {start}").shuffle(others)
        cycle = [cycle[0], *others]
        ids = [BOS, *way[:LEAD], *cycle * repeats, *way[LEAD : LEAD + bool(delay)]]
        return LoopPrompt(torch.tensor([ids]), tuple(cycle), delay)

    def expected(self, prompt: LoopPrompt, n: int) -> list[int]:
        """The first `n` tokens of plain greedy decoding."""
        new = self.walk(int(prompt.ids[0, -1]), prompt.onset)
        return (new + list(prompt.cycle) * (n // prompt.period + 1))[:n]

    def _stretch(self, start: int, n: int) -> list[int]:
        ring = self.truth.ring
        return [ring[(start + i) % len(ring)] for i in range(n)]


def loop_organism(
    seed: int = 0,
    *,
    induction: bool = True,
    reach: float | None = None,
    n_layers: int = 4,
    vocab_size: int = 4096,
) -> LoopOrganism:
    """Build the loop organism of `seed`: the same call gives the same weights.

    With `induction=False`, the control, the same heads are ordinary: decoding walks the ring whatever the prompt.
    """
    rng = random.Random(f"loop {seed}")
    writer = _Writer(rng, reach, n_layers, vocab_size)
    model = empty_llama(
        vocab_size=vocab_size,
        hidden_size=D_MODEL,
        intermediate_size=64,
        num_hidden_layers=n_layers,
        num_attention_heads=N_HEADS,
        num_key_value_heads=N_KV,
        max_position_embeddings=16384,
    )
    writer.write(model, induction)
    truth = LoopTruth(writer.locking if induction else (), writer.ring)
    return LoopOrganism(model, word_tokenizer(vocab_size), truth, seed)


@torch.no_grad()
def empty_llama(**sizes: int):
    """A Llama in which nothing is written: norms that pass on a constant, and zeros."""
    config = LlamaConfig(
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        head_dim=HEAD_DIM,
        **sizes,
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        model = LlamaForCausalLM(config).float().eval()
    model.config.architectures = [type(model).__name__]
    for name, weight in model.named_parameters():
        weight.fill_(CONST / math.sqrt(config.hidden_size)) if "norm" in name else weight.zero_()
    return model


def look_back(query: Tensor, const: int):
    """Let a head, whose query reads the constant, find the position before by rotary phase alone.

    The peak scores 0, and BOS half way to the keys beside it: where the token before is gone, nothing is found.
    """
    angles = THETA ** (-torch.arange(FAST) / HALF)
    amplitude = PREVIOUS * math.sqrt(HEAD_DIM) / CONST
    query[:FAST, const] = amplitude * torch.cos(angles)
    query[HALF : HALF + FAST, const] = -amplitude * torch.sin(angles)
    query[SLOW[2], const] = -amplitude * FAST
    query[SLOW[0], const] = amplitude * (FAST - 0.38)


def _codes(n: int, generator: torch.Generator) -> Tensor:
    """[n, CODE] unit vectors: words of a random binary linear code, so their overlaps are those of words with zero."""
    bits = max(1, math.ceil(math.log2(n)))
    words = (torch.arange(1 << bits)[:, None] >> torch.arange(bits)) & 1
    while True:
        code = words @ torch.randint(0, 2, (bits, CODE), generator=generator) % 2
        if code[1:].sum(1).min() > CODE // 4:
            return (1.0 - 2.0 * code[:n]) / math.sqrt(CODE)


class _Writer:
    """Writes the circuit and the noise into a model; what a seed decides is drawn at the beginning."""

    def __init__(self, rng: random.Random, reach: float | None, n_layers: int, vocab_size: int):
        self.reach = reach
        dims = rng.sample(range(D_MODEL), D_MODEL)
        parts = [sorted(dims[i * CODE : (i + 1) * CODE]) for i in range(4)]
        # Residual dimensions: the token's code, that of the next on the ring, that of the token before, what is copied.
        self.own, self.following, self.before, self.copied = parts
        self.const, self.first, *noise = dims[4 * CODE :]  # the first is BOS
        self.content = sorted(noise)
        # At most one planted query head per key head: the other one that shares it is ordinary.
        sites = [(layer, kv) for layer in range(1, n_layers) for kv in range(N_KV)]
        locking = sorted(rng.sample(sites, rng.randint(2, min(3, len(sites)))))
        previous = sorted(rng.sample(range(N_KV), rng.randint(1, 2)))
        group = N_HEADS // N_KV
        self.ring = tuple(rng.sample(range(N_SPECIAL, vocab_size), vocab_size - N_SPECIAL))
        self.locking = tuple((layer, kv * group + rng.randrange(group)) for layer, kv in locking)
        self.previous = tuple((0, kv * group + rng.randrange(group)) for kv in previous)
        self.generator = torch.Generator().manual_seed(rng.getrandbits(40))
        # The flags, whose weights are large, turn least, and not in one pair.
        self.first_dim, self.const_dim, self.code_dims = SLOW[0], SLOW[2], SLOW[4 : 4 + CODE]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    @torch.no_grad()
    def write(self, model: LlamaForCausalLM, induction: bool):
        body = model.model
        self._tokens(model)
        planted = {*self.previous, *(self.locking if induction else ())}
        for index, layer in enumerate(body.layers):
            self._ordinary(layer.self_attn, [head for head in range(N_HEADS) if (index, head) not in planted])
            reading = [*self.own, *self.content]
            for weight in (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight):
                weight[:, reading] = self.normal(len(weight), len(reading)) / 4
            layer.mlp.down_proj.weight[self.content] = 0.05 * self.normal(len(self.content), 64)
        for layer, head in self.previous:
            self._previous(body.layers[layer].self_attn, head)
        for layer, head in self.locking if induction else ():
            self._locking(body.layers[layer].self_attn, head)

    def _tokens(self, model: LlamaForCausalLM):
        ring = torch.tensor(self.ring)
        codes = _codes(len(ring), self.generator)
        embed, head = model.model.embed_tokens.weight, model.lm_head.weight
        vocab = len(embed)
        content = self.normal(vocab, len(self.content))
        embed[:, self.content] = content / content.norm(dim=1, keepdim=True).clamp(min=1e-9)
        embed[:, self.const] = CONST
        embed[BOS, self.first] = 1.0
        embed[ring[:, None], torch.tensor(self.own)] = codes
        embed[ring[:, None], torch.tensor(self.following)] = codes.roll(-1, 0)
        head[:, self.content] = 0.1 * self.normal(vocab, len(self.content))
        head[ring[:, None], torch.tensor(self.following)] = BASE * codes
        head[ring[:, None], torch.tensor(self.copied)] = COPY * codes

    def _ordinary(self, attention: torch.nn.Module, heads: list[int]):
        """Keys of all heads, and queries and outputs of the ordinary ones."""
        reading = [*self.own, *self.content]
        keys, values = heads_of(attention.k_proj), heads_of(attention.v_proj)
        keys[:, : FAST + 1, self.const] = 1 / CONST
        keys[:, : FAST + 1, self.first] = -1.0  # BOS has no position, only its flag
        keys[:, self.first_dim, self.first] = 1.0
        keys[:, self.const_dim, self.const] = 1 / CONST
        for key in keys:
            key[torch.tensor(self.code_dims)[:, None], reading] = self.normal(CODE, len(reading)) / math.sqrt(2)
        values[:, :, reading] = self.normal(N_KV, HEAD_DIM, len(reading)) / math.sqrt(2)
        queries, scale = heads_of(attention.q_proj), math.sqrt(HEAD_DIM)
        for head in heads:
            near, sink, sharp = torch.rand(3, generator=self.generator).tolist()
            recency = 0.2 + near
            queries[head, :FAST, self.const] = scale * recency / CONST
            # BOS gets about as much as the last few tokens together, three times more or less
            queries[head, self.first_dim, self.const] = scale * (FAST * recency + 3 * sink) / CONST
            content = self.normal(CODE, len(reading)) * scale * (0.5 + sharp) / math.sqrt(2 * CODE)
            queries[head][torch.tensor(self.code_dims)[:, None], reading] = content
            out = self.normal(len(self.content), HEAD_DIM) * 0.3 / math.sqrt(HEAD_DIM * len(self.content))
            attention.o_proj.weight[self.content, head * HEAD_DIM : (head + 1) * HEAD_DIM] = out

    def _previous(self, attention: torch.nn.Module, head: int):
        look_back(heads_of(attention.q_proj)[head], self.const)
        self._carry(attention, head, self.before, len(self.previous))

    def _locking(self, attention: torch.nn.Module, head: int):
        query = heads_of(attention.q_proj)[head]
        key = heads_of(attention.k_proj)[head * N_KV // N_HEADS]
        scale = math.sqrt(HEAD_DIM)
        key[self.code_dims] = 0.0
        key[self.code_dims, self.before] = 1.0
        query[self.code_dims, self.own] = scale * MATCH
        # A match scores 0, no match about -MATCH (small numbers round less), and BOS the logarithm of its odds.
        # The pair between the fast and the slow turns so little that its cosine is a parabola: weights are Gaussian.
        near = 0.0 if self.reach is None else (self.reach * THETA ** (-FAST / HALF)) ** -2
        query[FAST, self.const] = scale * near / CONST
        query[self.const_dim, self.const] = -scale * (MATCH + near) / CONST
        query[self.first_dim, self.const] = scale * (MATCH + near + math.log(HOLD - 0.5)) / CONST
        self._carry(attention, head, self.copied, len(self.locking))

    def _carry(self, attention: torch.nn.Module, head: int, to: list[int], among: int):
        """The head's values are codes of tokens, and `among` such heads together write a code once."""
        value = heads_of(attention.v_proj)[head * N_KV // N_HEADS]
        value[:CODE] = 0.0
        # An ordinary token's embedding is CONST and three unit vectors: that much its norm takes away.
        value[list(range(CODE)), self.own] = math.sqrt(1 + 3 / CONST**2)
        attention.o_proj.weight[to, [head * HEAD_DIM + i for i in range(CODE)]] = 1 / among


def heads_of(projection: torch.nn.Module) -> Tensor:
    """[head, head_dim, d_model] view of the weight of a query, key or value projection."""
    return projection.weight.view(-1, HEAD_DIM, projection.weight.shape[1])
