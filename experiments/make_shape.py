"""A checkpoint of full published shape with a planted attention sink; it takes as much memory and disk as the real one.

    python -m experiments.make_shape --shape llama-2-7b --out DIR [--sink-layer 1] [--seed 0] [--dtype float16]

It shows what a measurement reads, how long it takes and whether it finds the sink, not what a trained model does.
DIR/truth.json holds the answer (its contributions are nominal: the noise of the dense layers moves them by some
percent).

The circuit (Yona et al. 2025, section 4.2): each token carries a constant and the one-hot of its group. In layer 0 one
head per group looks away from its own group with force `BETA` and writes the share of attention that stayed there to
the residual dimension *mark*: 1 at the first token, or where a token was repeated often, near 0 elsewhere. In the sink
layer two neurons whose gate reads *mark* write two residual dimensions. The heads of the next layer attend to them.
All other weights of the layers up to there are small noise that neither reads nor writes these dimensions; the layers
above are zero, so they change nothing.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from experiments.record import Row
from experiments.script import run
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import write_atomic

SHAPES = {  # hidden size, MLP width, layers, query heads, kv heads, vocabulary, context
    "llama-2-7b": (4096, 11008, 32, 32, 32, 32000, 4096),
    "tiny": (256, 512, 6, 8, 8, 320, 1024),
}
GROUPS = 8  # group 0 is BOS alone, the other tokens share the rest
BETA = 1.5  # a token that stands n times among m of other groups keeps n / (n + m exp(2 BETA)) of the attention
NOISE = 1.28  # norm of the rest of an embedding; the constant and the group are 1 each
SINK = (800.0, 600.0)  # what the two neurons add to the first token; ablating either takes >= 0.2 of the norm
READ = 8.0  # score of the first token in the layer after the sink layer; others have none
GATE = 8.0  # their gate at a fully marked token, and minus it at an unmarked one


def empty_model(shape: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """A Llama of this shape whose weights are zero, but for norms that are one."""
    width, d_mlp, n_layers, heads, kv_heads, vocabulary, context = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=d_mlp,
        num_hidden_layers=n_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        dtype=dtype,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    model = model.to_empty(device="cpu")
    for name, weight in model.named_parameters():
        nn.init.constant_(weight, float("norm" in name))
    return model


@torch.no_grad()
def plant(model: LlamaForCausalLM, sink_layer: int, seed: int) -> tuple[int, ...]:
    """Write the circuit and the noise around it, and return the two neurons."""
    config, rng = model.config, random.Random(seed)
    width, generator = config.hidden_size, torch.Generator().manual_seed(seed)
    dims = rng.sample(range(width), GROUPS + 4)
    const, mark, sinks, groups = dims[0], dims[1], dims[2:4], dims[4:]
    ids = torch.arange(config.vocab_size)
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0, NOISE / math.sqrt(width), generator=generator)
    embedding[:, dims] = 0
    embedding[:, const] = 1
    embedding[ids, torch.tensor(groups)[torch.where(ids == 1, 0, 1 + ids % (GROUPS - 1))]] = 1  # BOS is id 1
    layers = model.model.layers
    for layer in layers[: sink_layer + 2]:
        for name, weight in layer.named_parameters():
            if "norm" not in name:
                weight.normal_(0, 0.1 / math.sqrt(width), generator=generator)  # adds less than half of an embedding
                is_writer = "o_proj" in name or "down_proj" in name
                weight.index_fill_(0 if is_writer else 1, torch.tensor(dims), 0)
    scale = math.sqrt(width / (2 + NOISE**2))  # of an unmarked token in a norm: 1 / rms of (1, 1, noise)
    marking = rng.sample(range(config.num_key_value_heads), GROUPS)
    for group, kv_head in zip(groups, marking, strict=True):
        _mark(layers[0].self_attn, kv_head, group, const, mark, scale)
    neurons = tuple(rng.sample(range(config.intermediate_size), 2))
    # At a marked token the norm divides by a little more, as the mark itself adds to it.
    marked = math.sqrt(width / (3 + NOISE**2))
    mlp = layers[sink_layer].mlp
    for neuron, dim, size in zip(neurons, sinks, SINK, strict=True):
        mlp.gate_proj.weight[neuron] = mlp.up_proj.weight[neuron] = mlp.down_proj.weight[:, neuron] = 0
        mlp.gate_proj.weight[neuron, mark] = 2 * GATE / marked
        mlp.gate_proj.weight[neuron, const] = -GATE / marked
        mlp.up_proj.weight[neuron, const] = 1 / marked
        mlp.down_proj.weight[dim, neuron] = size / GATE
    _read(layers[sink_layer + 1].self_attn, const, scale, sinks[0])
    return neurons


def _mark(attention: nn.Module, kv_head: int, group: int, const: int, mark: int, scale: float) -> None:
    """Let a head look away from its group on the slowest rotary pair, and report what stayed there."""
    width = attention.head_dim
    slow = width // 2 - 1  # first of the pair (slow, slow + width / 2), whose angle grows slowest with distance
    strength = math.sqrt(BETA * math.sqrt(width)) / scale
    key = kv_head * width
    query = key * attention.num_key_value_groups
    queries = slice(query, query + width * attention.num_key_value_groups)  # the first is used, the others are silent
    attention.q_proj.weight[queries] = 0
    attention.o_proj.weight[:, queries] = 0
    for linear in (attention.k_proj, attention.v_proj):
        linear.weight[key : key + width] = 0
    attention.q_proj.weight[query + slow, const] = strength
    attention.k_proj.weight[key + slow, const] = strength
    attention.k_proj.weight[key + slow, group] = -2 * strength
    attention.v_proj.weight[key, group] = 1 / scale
    attention.o_proj.weight[mark, query] = 1


def _read(attention: nn.Module, const: int, scale: float, sink: int) -> None:
    """Let every head attend to the larger of the two sink dimensions."""
    width = attention.head_dim
    size = SINK[0] / math.hypot(*SINK) * math.sqrt(attention.config.hidden_size)  # there, after the norm
    for linear, dim, value in (
        (attention.q_proj, const, READ * math.sqrt(width) / scale),
        (attention.k_proj, sink, 1 / size),
    ):
        linear.weight.zero_()
        linear.weight[width // 2 - 1 :: width, dim] = value


def byte_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Bytes as tokens, filled up with unused words to the size of the vocabulary; BOS in front."""
    vocabulary = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary += [f"\u0120word{number}" for number in range(size - len(vocabulary))]
    ids = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True
    )


def truth_of(shape: str, seed: int, layer: int, neurons: Sequence[int]) -> Row:
    """What was planted."""
    sites: list[Row] = []
    for neuron, size in zip(neurons, SINK, strict=True):
        sites.append({"layer": layer, "neuron": neuron, "contribution_norm": size})
    return {"shape": shape, "seed": seed, "sink_layer": layer, "neurons": sites}


def main(
    *,
    shape: Literal[*SHAPES] = "llama-2-7b",
    out: Path,
    sink_layer: int = 1,
    seed: int = 0,
    dtype: Literal["float16", "bfloat16", "float32"] = "float16",
) -> None:
    """Make what the module describes."""
    if not 1 <= sink_layer < SHAPES[shape][2] - 1:
        raise SinkscopeError(f"--sink-layer {sink_layer}: expected a layer from 1 with one above it")
    model = empty_model(shape, getattr(torch, dtype))
    neurons = plant(model, sink_layer, seed)
    model.save_pretrained(out, max_shard_size="4GB")
    byte_tokenizer(model.config.vocab_size).save_pretrained(out)
    truth = json.dumps(truth_of(shape, seed, sink_layer, neurons), indent=1) + "\n"
    write_atomic(out / "truth.json", truth)


if __name__ == "__main__":
    run(main)
