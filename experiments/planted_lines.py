"""A model with random weights whose attention lies on few lines, as in trained models, and text for it.

In each layer half of the heads attend to one offset, the other half to marked tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sinkscope.models.target import Target
from sinkscope.opening.load import target_of

SHAPES = {  # hidden size, MLP, layers, query heads, kv heads
    "lines-512": (512, 1408, 2, 8, 4),
    "lines-128": (128, 256, 2, 4, 2),
    "lines-7b": (4096, 11008, 32, 32, 32),
}
SMALL = 3e-4  # of what layers write: at 1 the first layer's writes drown the lines of the second
SHARE = 0.1  # of the tokens of a text are marked
VOCAB, MARKED, THETA, FAST = 512, 8, 1e8, 12


def made(shape: str) -> Target:
    """The model of a shape; residual dimension 0 is a constant, 1 marks tokens below `MARKED`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    d, mlp, layers, heads, kv = SHAPES[shape]
    width = d // heads
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=d,
            intermediate_size=mlp,
            num_hidden_layers=layers,
            head_dim=width,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            max_position_embeddings=1 << 18,
            rope_parameters={"rope_type": "default", "rope_theta": THETA},
        )
    ).eval()
    half = width // 2
    body = model.model
    quiet = min(1.0, (512 / d) ** 0.5)  # noise of wider models, which would drown the lines, as large as at width 512
    angles = THETA ** (-torch.arange(FAST) / half)
    with torch.no_grad():
        body.embed_tokens.weight.mul_(quiet)
        body.embed_tokens.weight[:, :2] = 0.0
        body.embed_tokens.weight[:, 0] = 1.0  # RMSNorm makes it about sqrt(d), the rest is noise
        body.embed_tokens.weight[:MARKED, 1] = 0.5
        for layer in body.layers:
            layer.self_attn.q_proj.weight.mul_(quiet * min(1.0, 64 / width) ** 0.25)
            layer.self_attn.k_proj.weight.mul_(quiet * min(1.0, 64 / width) ** 0.25)
            for proj in (layer.self_attn.o_proj, layer.mlp.down_proj):
                proj.weight[:2] = 0.0  # what is planted stays as it is
                proj.weight *= SMALL
            key = layer.self_attn.k_proj.weight.view(kv, width, d)
            query = layer.self_attn.q_proj.weight.view(heads, width, d)
            key[:, :FAST, 0] = 1.0
            key[:, half - 1, 1] = 4.0
            force = 40.0 * math.sqrt(width) / (FAST * d)
            for head in range(heads):
                if head % 2:
                    query[head, half - 1, 0] = 6.0 * math.sqrt(width) / d
                else:
                    query[head, :FAST, 0] = force * torch.cos(angles * (head + 1))
                    query[head, half : half + FAST, 0] = -force * torch.sin(angles * (head + 1))
    return replace(target_of(model), name=shape)


def text(length: int) -> Tensor:
    """Random tokens, a share of them marked: `[1 pos]`."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(MARKED, VOCAB, (1, length), generator=generator)
    ids[:, torch.rand(length, generator=generator) < SHARE] = MARKED - 1
    return ids
