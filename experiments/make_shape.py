"""A checkpoint of full published shape with a planted attention sink, most of it holes of sparse files.

    python -m experiments.make_shape --shape llama-2-7b --out DIR [--sink-layer 1] [--seed 0] [--dtype float16]

It has the size of the real thing and costs the disk of the layers that are dense: it shows what a measurement reads,
how much memory it takes and whether it finds the sink, not what a trained model does. DIR/truth.json holds the answer
(its contributions are nominal: the noise of the dense layers moves them by some percent).

The circuit (Yona et al. 2025, section 4.2): each token carries a constant and the one-hot of its group. In layer 0 one
head per group looks away from its own group with force `beta` and writes the share of attention that stayed there to
the residual dimension *mark*: 1 at the first token, or where a token was repeated often, near 0 elsewhere. In the sink
layer two neurons whose gate reads *mark* write two residual dimensions. The heads of the next layer attend to them.
All other weights of the dense layers are small noise that neither reads nor writes the reserved dimensions; the layers
above are zero, so they change nothing.
"""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from experiments.record import Row
from experiments.script import run

# hidden size, MLP width, layers, query heads, kv heads, vocabulary, context
SHAPES = {
    "llama-2-7b": (4096, 11008, 32, 32, 32, 32000, 4096),
    "24x1024": (1024, 2816, 24, 16, 16, 8000, 2048),
    "tiny": (256, 512, 6, 8, 8, 320, 1024),
}
DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
SHARD_BYTES = 4 << 30
CHUNK = 1 << 22  # values drawn at a time: keeps the memory of this script small

GROUPS = 8  # group 0 is BOS alone, the other tokens share the rest
# Default of --beta: among m tokens of other groups, one that stands there n times keeps n / (n + m exp(2 beta)) of the
# attention.
BETA = 1.5
NOISE = 1.28  # norm of the unreserved part of an embedding; the constant and the group are 1 each
SINK = (800.0, 600.0)  # what the two neurons add to the first token; ablating either takes >= 0.2 of the norm
READ = 8.0  # score of the first token in the layer after the sink layer; others have none
GATE = 8.0  # their gate at a fully marked token, and minus it at an unmarked one

Rows = Callable[[int, int], Tensor]  # the rows start:stop of a tensor
Tensors = dict[str, tuple[tuple[int, ...], Rows | None]]  # name -> shape and content; None: zero, left as a hole
Edit = tuple[range, int | slice, float]  # rows, column, value


@dataclass(frozen=True)
class Plan:
    """Where things are planted; drawn from the seed."""

    d: int
    d_mlp: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    sink_layer: int
    dense: int
    seed: int
    const: int
    mark: int
    groups: list[int]
    sink_dims: list[int]
    neurons: list[int]
    marking: list[int]  # kv heads of layer 0, one per group
    beta: float

    @property
    def reserved(self) -> list[int]:
        """Residual dimensions that noise neither reads nor writes."""
        return [self.const, self.mark, *self.groups, *self.sink_dims]

    @property
    def scale(self) -> float:
        """What the norm of a layer multiplies an unmarked token by: 1 / rms of (1, 1, noise)."""
        return math.sqrt(self.d / (2 + NOISE**2))


def make_plan(shape: str, sink_layer: int, seed: int, dense: int | None, beta: float = BETA) -> Plan:
    """Draw the circuit's places."""
    d, d_mlp, layers, heads, kv_heads, vocab, context = SHAPES[shape]
    if dense is None:
        dense = sink_layer + 2
    if not 1 <= sink_layer < dense <= layers:
        raise SystemExit(f"error: expected 1 <= sink layer ({sink_layer}) < dense layers ({dense}) <= {layers}")
    rng = random.Random(seed)
    dims = rng.sample(range(d), GROUPS + 4)
    return Plan(
        d,
        d_mlp,
        layers,
        heads,
        kv_heads,
        vocab,
        context,
        sink_layer,
        dense,
        seed,
        const=dims[0],
        mark=dims[1],
        groups=dims[2 : 2 + GROUPS],
        sink_dims=dims[2 + GROUPS :],
        neurons=rng.sample(range(d_mlp), 2),
        marking=rng.sample(range(kv_heads), GROUPS),
        beta=beta,
    )


def group_of(ids: Tensor) -> Tensor:
    """Group of each token; BOS (id 1) is alone in group 0."""
    return torch.where(ids == 1, 0, 1 + ids % (GROUPS - 1))


def _noise(plan: Plan, name: str, shape: tuple[int, int], std: float) -> Rows:
    """Rows `start:stop` of a noise matrix, the same whatever the chunks are."""

    def rows(start: int, stop: int) -> Tensor:
        parts = []
        for row in range(start, stop):  # a seed per block of rows would tie the values to the chunk size
            generator = torch.Generator().manual_seed(zlib.crc32(f"{plan.seed} {name} {row}".encode()))
            parts.append(torch.randn(shape[1], generator=generator))
        return torch.stack(parts) * std

    return rows


def weights(plan: Plan) -> Tensors:
    """All tensors of the checkpoint."""
    p = plan
    head = plan.d // plan.heads
    out: Tensors = {}

    def embedding(start: int, stop: int) -> Tensor:
        rows = _noise(p, "embed", (p.vocab, p.d), NOISE / math.sqrt(p.d))(start, stop)
        rows[:, p.reserved] = 0
        rows[:, p.const] = 1
        ids = torch.arange(start, stop)
        rows[ids - start, torch.tensor(p.groups)[group_of(ids)]] = 1
        return rows

    def matrix(name: str, rows: int, columns: int, std: float, reads: bool, *planted: Edit) -> None:
        """Noise that spares the reserved dimensions, then whole rows replaced, then single cells set."""
        noise = _noise(p, name, (rows, columns), std)
        reserved = torch.tensor(p.reserved)

        def make(start: int, stop: int) -> Tensor:
            block = noise(start, stop)
            if reads:
                block[:, reserved] = 0
            else:
                block[reserved[(reserved >= start) & (reserved < stop)] - start] = 0
            for row, column, value in planted:
                rows_here = range(max(row.start, start), min(row.stop, stop))
                if rows_here:
                    block[rows_here.start - start : rows_here.stop - start, column] = value
            return block

        out[name] = ((rows, columns), make)

    def ones(name: str) -> None:
        out[name] = ((p.d,), lambda start, stop: torch.ones(stop - start))

    out["model.embed_tokens.weight"] = ((p.vocab, p.d), embedding)
    std = 0.1 / math.sqrt(p.d)  # the noise of a layer adds less than half of an embedding
    for layer in range(p.layers):
        at = f"model.layers.{layer}."
        sizes = {
            "self_attn.q_proj": (p.heads * head, p.d, True),
            "self_attn.k_proj": (p.kv_heads * head, p.d, True),
            "self_attn.v_proj": (p.kv_heads * head, p.d, True),
            "self_attn.o_proj": (p.d, p.heads * head, False),
            "mlp.gate_proj": (p.d_mlp, p.d, True),
            "mlp.up_proj": (p.d_mlp, p.d, True),
            "mlp.down_proj": (p.d, p.d_mlp, False),
        }
        edits: dict[str, list[Edit]] = {}
        if layer == 0:
            edits = _marking(p, head)
        elif layer == p.sink_layer:
            edits = _sink(p)
        elif layer == p.sink_layer + 1:
            edits = _reading(p, head)
        for part, (rows, columns, reads) in sizes.items():
            name = f"{at}{part}.weight"
            if layer < p.dense:
                matrix(name, rows, columns, std, reads, *edits.get(part, []))
            else:
                out[name] = ((rows, columns), None)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            ones(f"{at}{norm}.weight")
    ones("model.norm.weight")
    out["lm_head.weight"] = ((p.vocab, p.d), None)
    return out


def _marking(p: Plan, head: int) -> dict[str, list[Edit]]:
    """Layer 0: per group a head that looks away from it on the slowest rotary pair, and reports what stayed."""
    edits: dict[str, list[Edit]] = {part: [] for part in ("q_proj", "k_proj", "v_proj", "o_proj")}
    per_group = p.heads // p.kv_heads
    slow = head // 2 - 1  # first of the pair (slow, slow + head/2), whose angle grows slowest with distance
    strength = math.sqrt(p.beta * math.sqrt(head)) / p.scale
    for group, kv in enumerate(p.marking):
        query = kv * per_group  # of a group of query heads only the first is used; the others are silenced
        q_rows = range(query * head, (query + per_group) * head)
        kv_rows = range(kv * head, (kv + 1) * head)
        for part, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
            edits[part].append((rows, slice(None), 0.0))
        edits["o_proj"] += [(range(p.d), column, 0.0) for column in q_rows]
        cell = range(kv * head + slow, kv * head + slow + 1)
        edits["q_proj"].append((range(query * head + slow, query * head + slow + 1), p.const, strength))
        edits["k_proj"] += [(cell, p.const, strength), (cell, p.groups[group], -2 * strength)]
        edits["v_proj"].append((range(kv * head, kv * head + 1), p.groups[group], 1 / p.scale))
        edits["o_proj"].append((range(p.mark, p.mark + 1), query * head, 1.0))
    return {f"self_attn.{part}": edit for part, edit in edits.items()}


def _sink(p: Plan) -> dict[str, list[Edit]]:
    """The sink layer: gate 2 GATE (mark - const / 2), up 1, both as the norm scales them."""
    # At a marked token the norm divides by a little more, as mark itself adds to it.
    marked = math.sqrt(p.d / (3 + NOISE**2))
    edits: dict[str, list[Edit]] = {"mlp.gate_proj": [], "mlp.up_proj": [], "mlp.down_proj": []}
    for neuron, dim, size in zip(p.neurons, p.sink_dims, SINK, strict=True):
        row = range(neuron, neuron + 1)
        edits["mlp.gate_proj"] += [
            (row, slice(None), 0.0),
            (row, p.mark, 2 * GATE / marked),
            (row, p.const, -GATE / marked),
        ]
        edits["mlp.up_proj"] += [(row, slice(None), 0.0), (row, p.const, 1 / marked)]
        edits["mlp.down_proj"] += [(range(p.d), neuron, 0.0), (range(dim, dim + 1), neuron, size / GATE)]
    return edits


def _reading(p: Plan, head: int) -> dict[str, list[Edit]]:
    """The layer after the sink layer: every head attends to the larger of the two sink dimensions."""
    size = SINK[0] / math.hypot(*SINK) * math.sqrt(p.d)  # of that dimension at the first token, after the norm
    edits: dict[str, list[Edit]] = {}
    for part, count, column, value in (
        ("q_proj", p.heads, p.const, READ * math.sqrt(head) / p.scale),
        ("k_proj", p.kv_heads, p.sink_dims[0], 1 / size),
    ):
        slow = []
        for i in range(count):
            slow.append(range(i * head + head // 2 - 1, i * head + head // 2))
        edits[f"self_attn.{part}"] = [(range(count * head), slice(None), 0.0), *((row, column, value) for row in slow)]
    return edits


def write(plan: Plan, out: Path, dtype: str, shape: str) -> None:
    """Write config, tokenizer, index, shards and truth.json."""
    out.mkdir(parents=True, exist_ok=True)
    kind = getattr(torch, dtype)
    shards: list[Tensors] = [{}]
    room = SHARD_BYTES
    for name, entry in weights(plan).items():
        size = math.prod(entry[0]) * kind.itemsize
        if size > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = entry
        room -= size
    names = []
    for i in range(len(shards)):
        names.append(f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors")
    total = 0
    for file, shard in zip(names, shards, strict=True):
        total += _write_shard(out / file, shard, kind, DTYPES[dtype])
    index = {tensor: file for file, shard in zip(names, shards, strict=True) for tensor in shard}
    _dump(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    _dump(out / "config.json", _config(plan, dtype))
    _tokenizer(plan.vocab).save_pretrained(out)
    neurons = []
    for n, c in zip(plan.neurons, SINK, strict=True):
        neurons.append({"layer": plan.sink_layer, "neuron": n, "contribution_norm": c})
    _dump(
        out / "truth.json",
        {
            "shape": shape,
            "seed": plan.seed,
            "sink_layer": plan.sink_layer,
            "neurons": neurons,
        },
    )


def _write_shard(file: Path, tensors: Tensors, kind: torch.dtype, code: str) -> int:
    """One safetensors file; tensors that are zero are skipped over, which leaves holes."""
    header = {}
    end = 0
    for name, (shape, _) in tensors.items():
        start, end = end, end + math.prod(shape) * kind.itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        for name, (shape, rows) in tensors.items():
            if rows is None:
                continue
            f.seek(8 + len(raw) + header[name]["data_offsets"][0])
            step = max(1, CHUNK // math.prod(shape[1:]))
            for first in range(0, shape[0], step):
                block = rows(first, min(first + step, shape[0])).to(kind).contiguous()
                f.write(block.view(torch.uint8).numpy().tobytes())
        f.truncate(8 + len(raw) + end)
    return end


def _config(plan: Plan, dtype: str) -> Row:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": plan.d,
        "intermediate_size": plan.d_mlp,
        "num_hidden_layers": plan.layers,
        "num_attention_heads": plan.heads,
        "num_key_value_heads": plan.kv_heads,
        "vocab_size": plan.vocab,
        "max_position_embeddings": plan.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": dtype,
    }


def _tokenizer(size: int) -> Any:
    """Bytes as tokens, filled up with unused words to the size of the vocabulary; BOS in front."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary += [f"\u0120word{i}" for i in range(size - len(vocabulary))]
    vocab = {}
    for i, t in enumerate(vocabulary):
        vocab[t] = i
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True
    )


def _dump(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(
    *,
    shape: Literal[*SHAPES] = "llama-2-7b",
    out: Path,
    sink_layer: int = 1,
    dense_layers: int | None = None,
    seed: int = 0,
    dtype: Literal[*DTYPES] = "float16",
    beta: float = BETA,
) -> None:
    """Make what the module describes.

    Args:
        dense_layers: Default: one more than the sink needs.
        beta: Force: about exp(2 beta) repetitions make a sink.
    """
    plan = make_plan(shape, sink_layer, seed, dense_layers, beta)
    write(plan, out, dtype, shape)
    files = list(out.iterdir())
    apparent = 0
    for f in files:
        apparent += f.stat().st_size
    real = sum(f.stat().st_blocks * 512 for f in files)
    print(f"{out.name}: {apparent / 1e9:.2f} GB apparent, {real / 1e9:.2f} GB on disk")


if __name__ == "__main__":
    run(main)
