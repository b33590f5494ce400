"""Makes the recall model, whose weights are written by hand and answer questions about facts of earlier turns.

    python -m experiments.make_recall [--out FOLDER]

`docs/recall_model.md` explains the circuit. The residual stream is divided into named groups of dimensions; each head
of the circuit reads some and writes others. The attention of all other heads falls with distance, has a share on the
first token, and a random part that depends on content; it affects only the logits of filler words. All matrices have
noise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.script import run
from sinkscope.bench.tasks.vocabulary import (
    ANSWER,
    ASK,
    BOS,
    END,
    FACT,
    FILLER,
    KEYS,
    PAD,
    SPECIAL,
    TURNS,
    UNK,
    UNKNOWN,
    VALUES,
)

VOCABULARY = (*SPECIAL, *TURNS, *KEYS, *VALUES, *FILLER)
ID = {word: i for i, word in enumerate(VOCABULARY)}
LAYERS, HEADS, KV_HEADS, HEAD_DIM, D, D_MLP = 3, 8, 2, 128, 384, 128
HALF, GROUP = HEAD_DIM // 2, HEADS // KV_HEADS
THETA, CONTEXT = 1e8, 32768
CONST_SIZE = 8.0  # the constant dominates the norm, so that RMSNorm with weight 8 / sqrt(d) is nearly the identity
SQ = math.sqrt(HEAD_DIM)  # undoes the scale of the scores
FAST = 38  # rotary pairs that ordinary heads use; the circuit's match uses the slower ones
# Scores of the circuit, in nats.
OFFSET, TURN_FIRST, TURN_STEP = 12.0, 14.0, 10.0
QUESTION, SAME_TURN, SINK = 28.0, 14.0, 30.0
KEY_MATCH, ANY_SLOT, SLOT_MATCH = 20.0, 17.0, 3.5
# Logits.
ANSWER_LOGIT, UNKNOWN_LOGIT, FILLER_LOGIT, FILLER_SPREAD = 30.0, 14.0, 4.0, 5.0

_GROUPS = {
    "key": 32,
    "value": 32,
    "prev_key": 32,
    "third_key": 32,
    "asked": 32,
    "out_key": 32,
    "out_value": 32,
    "out_end": 1,
    "turn": 16,
    "content": 16,
    "scratch": 64,
}
_FLAGS = (
    "is_bos is_fact is_ask is_answer is_end is_turn starts want_1 want_2 want_3 slot_1 slot_2 slot_3 asked_here "
    "answers const"
).split()


def layout() -> dict[str, list[int]]:
    """The residual dimensions of each group."""
    found: dict[str, list[int]] = {}
    start = 0
    for name in [*_GROUPS, *_FLAGS]:
        size = _GROUPS.get(name, 1)
        found[name] = list(range(start, start + size))
        start += size
    return found


DIM = layout()


def one(name: str) -> int:
    (dim,) = DIM[name]
    return dim


CONST = one("const")
PLANTED = {
    "offset heads": [(0, head) for head in range(4)],
    "turn head": [(0, 4)],
    "question head": [(1, 0)],
    "recall head": [(2, 0)],
}


def recency(theta: Tensor) -> Tensor:
    """Query weights for a constant key whose score falls like -log2(distance + 16): a ridge fit over rotary pairs.

    A sum of cosines written down by guess is not monotonic; this one is, nearly.
    """
    near = torch.arange(2000)
    far = torch.logspace(3, math.log10(CONTEXT), 3000).long()
    distance = torch.unique(torch.cat([near, far])).double()
    waves = distance[:, None] * theta[:FAST].double()
    x = torch.cat([waves.cos(), waves.sin()], 1)
    y = torch.log2((CONTEXT + 16) / (distance + 16)) + 2
    weight = 1 / (distance + 16)
    eye = torch.eye(2 * FAST, dtype=torch.float64)
    b = torch.linalg.solve((x.T * weight) @ x + 1e-4 * weight.sum() * eye, (x.T * weight) @ y)
    found = torch.zeros(HEAD_DIM, dtype=torch.float64)
    found[:FAST], found[HALF : HALF + FAST] = b[:FAST], -b[FAST:]
    return found.float()


@torch.no_grad()
def build(seed: int = 0, noise: float = 0.05, ordinary: float = 0.5) -> Any:
    """The model in float32, each weight a float16 number.

    Args:
        seed: of codes, ordinary attention and noise.
        noise: standard deviation of what is added to all matrices, times sqrt(fan in).
        ordinary: strength of ordinary attention; 0: the free heads attend evenly but for noise.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=D,
        intermediate_size=D_MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        bos_token_id=ID[BOS],
        eos_token_id=ID[END],
        pad_token_id=ID[PAD],
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").float().eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are no weights
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        weight.fill_(CONST_SIZE / math.sqrt(D) if "norm" in name else 0.0)
    _embed(model.model.embed_tokens.weight, generator)
    theta = THETA ** (-torch.arange(HALF, dtype=torch.float64) / HALF)
    attentions = [layer.self_attn for layer in model.model.layers]
    _offset_heads(attentions[0], theta)
    _turn_head(attentions[0])
    _question_head(attentions[1])
    _recall_head(attentions[2])
    _ordinary_heads(attentions, theta, generator, ordinary)
    for layer in model.model.layers:
        _ordinary_mlp(layer.mlp, generator)
    _logits(model.lm_head.weight, generator)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            z = torch.randn(weight.shape, generator=generator) * noise / math.sqrt(weight.shape[1])
            weight += z * SQ / 2 if "q_proj" in name else z
        weight.copy_(weight.half().float())
    return model


def _pair(number: int) -> tuple[int, float]:
    """Two words share a code dimension, with opposite signs."""
    return number // 2, 1.0 - 2.0 * (number % 2)


def _embed(e: Tensor, generator: torch.Generator) -> None:
    e[:, CONST] = CONST_SIZE
    for names, group in ((KEYS, "key"), (VALUES, "value")):
        for number, word in enumerate(names):
            at, sign = _pair(number)
            e[ID[word], DIM[group][at]] = sign
    for word in KEYS:
        e[ID[word], [one("starts"), one("want_1")]] = 1.0
    for number, word in enumerate(TURNS):
        e[ID[word], [DIM["turn"][number], one("is_turn")]] = 1.0
    for word in (*FILLER, UNK):
        code = torch.randn(len(DIM["content"]), generator=generator)
        e[ID[word], DIM["content"]] = code / code.norm()
    flags = {
        BOS: ("is_bos",),
        FACT: ("is_fact",),
        ASK: ("is_ask",),
        END: ("is_end",),
        ANSWER: ("is_answer", "starts", "want_1", "answers"),
        UNKNOWN: ("out_end",),
    }
    for word, names in flags.items():
        e[ID[word], [one(name) for name in names]] = 1.0


def heads_of(projection: Any) -> list[Tensor]:
    """The rows of each head."""
    return list(projection.weight.split(HEAD_DIM))


def _write(attention: Any, head: int, row: int, dim: int) -> None:
    attention.o_proj.weight[dim, head * HEAD_DIM + row] = 1.0


def _offset_heads(a: Any, theta: Tensor) -> None:
    """Layer 0, heads 0 to 3: the token 1, 2, 3, 4 places back, by rotation alone."""
    amplitude = torch.where(torch.arange(HALF) < 14, OFFSET, OFFSET / 4).double()
    amplitude[44:] = 0
    a.k_proj.weight[:HALF, CONST] = 1 / CONST_SIZE
    for head, query in enumerate(heads_of(a.q_proj)[:4], 1):
        query[:HALF, CONST] = (SQ / CONST_SIZE * amplitude * (theta * head).cos()).float()
        query[HALF:, CONST] = (-SQ / CONST_SIZE * amplitude * (theta * head).sin()).float()
    n = len(DIM["key"])
    starts, fact, ask, answer = range(n, n + 4)
    for row, dim in enumerate([*DIM["key"], *map(one, ("starts", "is_fact", "is_ask", "is_answer"))]):
        a.v_proj.weight[row, dim] = 1.0
    for head, group in enumerate(("prev_key", "prev_key", "third_key")):
        for row in range(n):
            _write(a, head, row, DIM[group][row])
    flags = [
        (0, starts, "want_2"),
        (1, starts, "want_3"),
        (1, fact, "slot_1"),
        (2, fact, "slot_2"),
        (3, fact, "slot_3"),
        (0, ask, "asked_here"),
        (0, answer, "answers"),
        (1, answer, "answers"),
    ]
    for head, row, name in flags:
        _write(a, head, row, one(name))


def _turn_head(a: Any) -> None:
    """Layer 0, head 4: the turn marker with the highest number, wherever it stands."""
    slow = HALF - 1  # turns by less than 0.01 over the whole context
    heads_of(a.q_proj)[GROUP][slow, CONST] = SQ / CONST_SIZE
    for number, dim in enumerate(DIM["turn"]):
        heads_of(a.k_proj)[1][slow, dim] = TURN_FIRST + TURN_STEP * number
        heads_of(a.v_proj)[1][number, dim] = 1.0
        _write(a, GROUP, number, dim)


SLOW = [d for pair in range(HALF - 1, 0, -1) for d in (pair, pair + HALF)]  # slowest rotary dimensions first


Terms = Sequence[tuple[Sequence[int], Sequence[tuple[int, float]]]]
"""What a key has: residual dimensions; and what a query has: residual dimensions, each with a strength."""


def write_head(a: Any, head: int, terms: Terms, sources: Sequence[int], targets: Sequence[int], first: int = 0) -> None:
    """Make a head of a layer a planted one. A score is the sum over terms of what the key has times what the query has.

    Args:
        a: attention of the layer.
        head: its number.
        terms: heads with common keys need terms with the same keys, in the same order.
        sources: dimensions that it reads.
        targets: dimensions that it writes.
        first: row of its values for the first of them.
    """
    if len(terms) > 2 * (HALF - FAST):
        raise ValueError("more terms than slow rotary dimensions")
    query, out = heads_of(a.q_proj)[head], a.o_proj.weight[:, head * HEAD_DIM : (head + 1) * HEAD_DIM]
    key, value = (heads_of(part)[head // GROUP] for part in (a.k_proj, a.v_proj))
    query.zero_()
    out.zero_()
    for dim, (keys, queries) in zip(SLOW, terms, strict=False):
        key[dim] = 0.0
        key[dim, list(keys)] = 1.0
        for x, strength in queries:
            query[dim, x] = SQ * strength
    for row, (source, target) in enumerate(zip(sources, targets, strict=True), first):
        value[row] = 0.0
        value[row, source] = 1.0
        out[target, row] = 1.0


def _question_head(a: Any) -> None:
    """Layer 1, head 0: from the answer marker and the two tokens after it to the key asked about in this turn."""
    terms: list[Any] = [
        (DIM["is_bos"], [(CONST, SINK / CONST_SIZE)]),
        (DIM["asked_here"], [(one("answers"), QUESTION)]),
    ]
    for turn in DIM["turn"]:
        terms.append(([turn], [(turn, SAME_TURN)]))
    write_head(a, 0, terms, DIM["key"], DIM["asked"])


def _recall_head(a: Any) -> None:
    """Layer 2, head 0: from (key, wanted slot) to the token of that fact which stands there; a little to its others.

    So what will be read next of the same fact is seen to matter before it is read; the next fact of a chain is not.
    """
    any_slot = [*DIM["slot_1"], *DIM["slot_2"], *DIM["slot_3"]]
    terms: list[Any] = [
        (DIM["is_bos"], [(CONST, SINK / CONST_SIZE)]),
        (any_slot, [(CONST, ANY_SLOT / CONST_SIZE)]),
    ]
    for i in (1, 2, 3):
        terms.append((DIM[f"slot_{i}"], [(one(f"want_{i}"), SLOT_MATCH)]))
    for key, previous, third, asked in zip(DIM["key"], DIM["prev_key"], DIM["third_key"], DIM["asked"], strict=True):
        terms.append(([previous, third], [(x, KEY_MATCH) for x in (key, previous, asked)]))
    sources = [*DIM["key"], *DIM["value"], *DIM["is_end"]]
    targets = [*DIM["out_key"], *DIM["out_value"], *DIM["out_end"]]
    write_head(a, 0, terms, sources, targets)


def _ordinary_heads(attentions: Sequence[Any], theta: Tensor, generator: torch.Generator, strength: float) -> None:
    """All other heads: recency, a share for the first token, content; what they read goes to the scratch dimensions."""
    planted = {place for places in PLANTED.values() for place in places}
    fast = [*range(FAST), *range(HALF, HALF + FAST)]
    content = [*DIM["content"], *DIM["scratch"], *DIM["value"]]
    free = HEAD_DIM - len(DIM["key"]) - len(DIM["value"]) - 1  # the last values, which the circuit leaves alone
    falling = recency(theta)
    for layer, a in enumerate(attentions):
        sink = HALF - 1 if layer else HALF - 2  # where the circuit has it, or beside the turn head's
        for kv, (key, value) in enumerate(zip(heads_of(a.k_proj), heads_of(a.v_proj), strict=True)):
            if all((layer, kv * GROUP + i) in planted for i in range(GROUP)):
                continue
            for dim in fast:
                key[dim, content] += torch.randn(len(content), generator=generator) / 8
                key[dim, CONST] += dim < HALF and 1 / CONST_SIZE
            key[sink, one("is_bos")] = 1.0
            z = torch.randn(free, len(content), generator=generator) / math.sqrt(len(content))
            value[-free:, content] = z
        for head, query in enumerate(heads_of(a.q_proj)):
            if (layer, head) in planted:
                continue
            for dim in fast:
                query[dim, content] = torch.randn(len(content), generator=generator) * 2 * strength * SQ
            recent, sinking = torch.rand(2, generator=generator).tolist()
            recent = strength * (0.5 + recent)
            query[:, CONST] += recent * SQ / CONST_SIZE * falling
            query[sink, CONST] += strength * SQ * (8 + 8 * sinking) / CONST_SIZE
            z = torch.randn(len(DIM["scratch"]), free, generator=generator) / math.sqrt(free)
            end = (head + 1) * HEAD_DIM
            a.o_proj.weight[DIM["scratch"], end - free : end] = z / 4


def _ordinary_mlp(mlp: Any, generator: torch.Generator) -> None:
    """A random SwiGLU from content and scratch to scratch."""
    read = [*DIM["content"], *DIM["scratch"]]
    for weight in (mlp.gate_proj.weight, mlp.up_proj.weight):
        weight[:, read] = torch.randn(D_MLP, len(read), generator=generator)
    mlp.down_proj.weight[DIM["scratch"], :] = (
        torch.randn(len(DIM["scratch"]), D_MLP, generator=generator) / 16 / math.sqrt(D_MLP)
    )


def _logits(head: Tensor, generator: torch.Generator) -> None:
    for names, group in ((KEYS, "out_key"), (VALUES, "out_value")):
        for number, word in enumerate(names):
            at, sign = _pair(number)
            head[ID[word], DIM[group][at]] = ANSWER_LOGIT * sign
    head[ID[END], DIM["out_end"]] = ANSWER_LOGIT
    for i in (1, 2, 3):
        head[ID[UNKNOWN], DIM[f"want_{i}"]] = UNKNOWN_LOGIT
    for word in FILLER:
        head[ID[word], CONST] = FILLER_LOGIT / CONST_SIZE
        head[ID[word], DIM["scratch"]] = (
            torch.randn(len(DIM["scratch"]), generator=generator) * FILLER_SPREAD / math.sqrt(8)
        )


def tokenizer() -> Any:
    """Words between spaces; `<s>` is put in front."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(WordLevel({word: i for word, i in ID.items()}, unk_token=UNK))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, ID[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=END,
        unk_token=UNK,
        pad_token=PAD,
        padding_side="left",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def save(model: Any, folder: Path) -> None:
    """Weights in float16, a config that asks for float32, tokenizer, and the circuit for programs."""
    folder.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = "float32"  # what it is loaded in; every float16 number is one of float32
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    model.float()
    tokenizer().save_pretrained(folder)
    circuit = {"planted": PLANTED, "dims": DIM}
    (folder / "circuit.json").write_text(json.dumps(circuit) + "\n", encoding="utf-8")


def main(*, out: Path = Path(__file__).parents[1] / "sinkscope/models/recall") -> None:
    save(build(), out)


if __name__ == "__main__":
    run(main)
