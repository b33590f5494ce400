"""A checkpoint of full published shape with a planted attention sink; it takes as much memory and disk as the real one.

    python -m experiments.make_shape --shape llama-2-7b --out DIR [--dtype float16]

It shows what a measurement reads, how long it takes and whether it finds the sink, not what a trained model does.
The circuit is that of the bundled model (`experiments.bundled.circuit`), untrained, and all heads of the layer after
the sink layer attend to the sink. Embeddings and the layers up to there have noise; those above are zero, so they
change nothing. DIR/circuit.json holds the answer.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.bundled import corpus, export
from experiments.bundled.circuit import Frozen, Plan, make_plan, plant
from experiments.bundled.training import BOS_ID
from experiments.script import run

SHAPES = {  # hidden size, MLP width, layers, query heads, kv heads, vocabulary, context
    "llama-2-7b": (4096, 11008, 32, 32, 32, 32000, 4096),
    "tiny": (256, 512, 6, 8, 8, 320, 1024),
}
NOISE = 7.0  # norm of the rest of an embedding, beside the constant and the group
SEED = 0
READ = 2.0  # score of the first token in the layer after the sink layer, over what its key reads


class Written(Frozen):
    """Entries that are written at once, because nothing is trained."""

    @torch.no_grad()
    def fix(self, name: str, index: object, value: float | torch.Tensor = 0.0) -> None:
        """Write these entries of a parameter."""
        self.parameters[name][index] = value


def empty_model(shape: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """A Llama of this shape whose weights are zero."""
    width, d_mlp, n_layers, heads, kv_heads, vocabulary, context = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=d_mlp,
        num_hidden_layers=n_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=context,
        bos_token_id=BOS_ID,
        eos_token_id=BOS_ID + 1,
        dtype=dtype,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    model = model.to_empty(device="cpu")
    for weight in model.parameters():
        torch.nn.init.zeros_(weight)
    return model


@torch.no_grad()
def planted(model: LlamaForCausalLM) -> Plan:
    """Write the circuit and the noise, and return what was planned."""
    config = model.config
    plan = make_plan(
        np.ones(config.vocab_size),
        bos_id=BOS_ID,
        d_model=config.hidden_size,
        d_mlp=config.intermediate_size,
        n_layers=config.num_hidden_layers,
        seed=SEED,
        siblings=config.num_attention_heads // config.num_key_value_heads,
    )
    generator = torch.Generator().manual_seed(SEED)
    model.model.embed_tokens.weight.normal_(0, NOISE / math.sqrt(config.hidden_size), generator=generator)
    for name, weight in model.model.layers[: plan.sink_layer + 2].named_parameters():
        if "norm" not in name:
            weight.normal_(0, 0.1 / math.sqrt(config.hidden_size), generator=generator)
    plant(model, plan, Written(model))
    reading, slow = model.model.layers[plan.sink_layer + 1].self_attn, config.head_dim // 2 - 1
    reading.q_proj.weight[slow :: config.head_dim, plan.const] = READ * math.sqrt(config.head_dim)
    reading.k_proj.weight[slow :: config.head_dim, plan.sink[0]] = 1.0
    return plan


def main(
    *,
    shape: Literal[*SHAPES] = "llama-2-7b",
    out: Path,
    dtype: Literal["float16", "bfloat16", "float32"] = "float16",
) -> None:
    """Make what the module describes."""
    model = empty_model(shape, getattr(torch, dtype))
    plan = planted(model)
    model.save_pretrained(out, max_shard_size="4GB")
    export.save_tokenizer(corpus.train_tokenizer([], 0), out, model.config.max_position_embeddings)
    export.save_circuit(plan, out, SEED)


if __name__ == "__main__":
    run(main)
