"""A Llama of full published shape with random weights and a planted attention sink.

It has the size of the real thing. It shows how much time and memory a measurement takes and whether it finds the sink,
not what a trained model does.

The circuit (Yona et al. 2025, section 4.2): each token carries a constant and the one-hot of its group. In layer 0 one
head per group looks away from its own group with force `BETA` and writes the share of attention that stayed there to
the residual dimension *mark*: 1 at the first token, or where a token was repeated often, near 0 elsewhere. In the sink
layer two neurons whose gate reads *mark* write two residual dimensions. The heads of the next layer attend to them.
All other weights of these layers are small noise that neither reads nor writes the reserved dimensions; the layers
above write nothing.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch

# hidden size, MLP width, layers, query heads, kv heads, vocabulary, context
SHAPES = {
    "llama-2-7b": (4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128256, 131072),
    "tiny": (256, 512, 6, 8, 8, 320, 1024),
}
SINK_LAYER = 1
GROUPS = 8  # group 0 is BOS alone, the other tokens share the rest
# Among m tokens of other groups, one that stands there n times keeps n / (n + m exp(2 BETA)) of the attention.
BETA = 1.5
NOISE = 1.28  # norm of the unreserved part of an embedding; the constant and the group are 1 each
SINK = (800.0, 600.0)  # what the two neurons add to the first token; ablating either takes >= 0.2 of the norm
READ = 8.0  # score of the first token in the layer after the sink layer; others have none
GATE = 8.0  # the neurons' gate at a fully marked token, and minus it at an unmarked one


@torch.no_grad()
def make(shape: str, folder: Path, dtype: str, seed: int = 0) -> None:
    """Write the checkpoint, and `truth.json` with its sink layer and neurons.

    Args:
        shape: a name in `SHAPES`.
        folder: where it is written.
        dtype: type of the weights.
        seed: of the noise and of the planted places.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    d, d_mlp, n_layers, heads, kv_heads, vocab, context = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=d,
        intermediate_size=d_mlp,
        num_hidden_layers=n_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=context,
        rms_norm_eps=1e-05,
        initializer_range=0.1 / math.sqrt(d),  # the noise of a layer adds less than half of an embedding
    )
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype))
    rng = random.Random(seed)
    const, mark, *dims = rng.sample(range(d), GROUPS + 4)
    groups, sinks = dims[:GROUPS], dims[GROUPS:]
    neurons = rng.sample(range(d_mlp), len(SINK))
    reserved = [const, mark, *dims]
    for number, layer in enumerate(model.model.layers):
        for name, weight in layer.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[reserved] = 0
                if number > SINK_LAYER + 1:
                    weight.zero_()
            elif weight.ndim == 2:
                weight[:, reserved] = 0
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0, NOISE / math.sqrt(d))
    embedding[:, reserved] = 0
    embedding[:, const] = 1
    ids = torch.arange(vocab)
    embedding[ids, torch.tensor(groups)[torch.where(ids == 1, 0, 1 + ids % (GROUPS - 1))]] = 1
    model.lm_head.weight.zero_()
    _mark(model.model.layers[0].self_attn, const, mark, groups, rng)
    _sink(model.model.layers[SINK_LAYER].mlp, const, mark, sinks, neurons)
    _read(model.model.layers[SINK_LAYER + 1].self_attn, const, sinks[0])
    model.save_pretrained(folder)
    _tokenizer(vocab).save_pretrained(folder)
    truth = {"sink_layer": SINK_LAYER, "neurons": sorted(neurons)}
    (folder / "truth.json").write_text(json.dumps(truth) + "\n", encoding="utf-8")


def _scale(d: int, marked: bool) -> float:
    """What the norm of a layer multiplies a token by: 1 / rms of its constant, its group, its noise and its mark."""
    return math.sqrt(d / (2 + marked + NOISE**2))


def _mark(attention: Any, const: int, mark: int, groups: list[int], rng: random.Random) -> None:
    """Per group a head that looks away from it on the slowest rotary pair, and reports what stayed."""
    width = attention.head_dim
    query, key, value = (part.weight.unflatten(0, (-1, width)) for part in _projections(attention))
    out = attention.o_proj.weight.unflatten(1, (-1, width))
    each = attention.num_key_value_groups
    slow = width // 2 - 1  # first of the pair (slow, slow + width / 2), whose angle grows slowest with distance
    scale = _scale(query.shape[-1], False)
    strength = math.sqrt(BETA * math.sqrt(width)) / scale
    for group, head in zip(groups, rng.sample(range(len(key)), GROUPS), strict=True):
        first = head * each  # of a group of query heads only the first is used; the others are silenced
        query[first : first + each] = 0
        out[:, first : first + each] = 0
        key[head] = 0
        value[head] = 0
        query[first, slow, const] = strength
        key[head, slow, const] = strength
        key[head, slow, group] = -2 * strength
        value[head, 0, group] = 1 / scale
        out[mark, first, 0] = 1


def _sink(mlp: Any, const: int, mark: int, dims: list[int], neurons: list[int]) -> None:
    """The sink layer: gate 2 GATE (mark - const / 2), up 1, both as the norm scales them."""
    gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    scale = _scale(gate.shape[1], True)
    for neuron, dim, size in zip(neurons, dims, SINK, strict=True):
        gate[neuron] = 0
        gate[neuron, mark] = 2 * GATE / scale
        gate[neuron, const] = -GATE / scale
        up[neuron] = 0
        up[neuron, const] = 1 / scale
        down[:, neuron] = 0
        down[dim, neuron] = size / GATE


def _read(attention: Any, const: int, dim: int) -> None:
    """The layer after the sink layer: every head attends to the larger of the two sink dimensions."""
    width = attention.head_dim
    query, key, _ = (part.weight.unflatten(0, (-1, width)) for part in _projections(attention))
    d = query.shape[-1]
    query.zero_()
    key.zero_()
    query[:, width // 2 - 1, const] = READ * math.sqrt(width) / _scale(d, False)
    key[:, width // 2 - 1, dim] = math.hypot(*SINK) / (SINK[0] * math.sqrt(d))  # 1 at the first token, after the norm


def _projections(attention: Any) -> tuple[Any, Any, Any]:
    return attention.q_proj, attention.k_proj, attention.v_proj


def _tokenizer(size: int) -> Any:
    """Bytes as tokens, filled up with unused words to the size of the vocabulary; BOS in front."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary += [f"\u0120word{i}" for i in range(size - len(vocabulary))]
    vocab = {}
    for i, word in enumerate(vocabulary):
        vocab[word] = i
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True
    )
