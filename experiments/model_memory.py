"""What the weights of well-known models take, by their published shapes: the table on the page "Install".

    python -m experiments.model_memory

It writes figures/model_memory.json and replaces the table in docs/install.md. No weights are read. The last row is a
control: the same count on the model in the package, whose weights are counted one by one beside it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig

import sinkscope as ss
from experiments.record import record
from sinkscope.app.expected import gigabytes, size_of
from sinkscope.files.output import write_atomic

CARD = 0.9 * 24e9
"""Bytes of memory of a common graphics card, with a tenth left for what is computed."""
PAGE = Path("docs/install.md")
BEGIN, END = "<!-- model memory -->", "<!-- end of model memory -->"


def llama(width: int, mlp: int, layers: int, heads: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=32000,
    )


def pythia(width: int, layers: int, heads: int, vocabulary: int) -> GPTNeoXConfig:
    return GPTNeoXConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=vocabulary,
    )


def gpt2(width: int, layers: int, heads: int) -> GPT2Config:
    return GPT2Config(n_embd=width, n_layer=layers, n_head=heads)


MODELS = {
    "Llama 2 7B": llama(4096, 11008, 32, 32),
    "Llama 2 13B": llama(5120, 13824, 40, 40),
    "Pythia 160M": pythia(768, 12, 12, 50304),
    "Pythia 1.4B": pythia(2048, 24, 16, 50304),
    "Pythia 6.9B": pythia(4096, 32, 32, 50432),
    "Pythia 12B": pythia(5120, 36, 40, 50688),
    "GPT-2": gpt2(768, 12, 12),
    "GPT-2 XL": gpt2(1600, 48, 25),
}


def main() -> None:
    """Measure, write the figure's JSON, and put the table into the page."""
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    lines = [
        "| model | parameters | whole, float32 | whole, 16 bits | layer by layer, 16 bits | whole on a card of 24 GB |",
        "|---|---|---|---|---|---|",
    ]
    for name, config in MODELS.items():
        size = size_of(config, torch.float16)
        fits = "in 16 bits"
        if 2 * size.whole_bytes < CARD:
            fits = "in float32"
        elif size.whole_bytes >= CARD:
            fits = "no: layer by layer"
        rows.append(
            {"model": name, "layers": size.layers, "parameters": size.parameters, "streamed": size.streamed_bytes}
        )
        lines.append(
            f"| {name} | {size.parameters / 1e6:,.0f} million | {gigabytes(2 * size.whole_bytes)} | "
            f"{gigabytes(size.whole_bytes)} | {gigabytes(size.streamed_bytes)} | {fits} |"
        )
    bundled = ss.load(None, backend="hf")
    control = {
        "model": "bundled",
        "parameters": size_of(bundled.config, torch.float32).parameters,
        "counted one by one": sum(tensor.numel() for tensor in bundled.parameters()),
    }
    write_atomic(
        Path("figures/model_memory.json"),
        record("model-memory", {"rows": rows, "control": control}, {}, started=started),
    )
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    write_atomic(PAGE, f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")


if __name__ == "__main__":
    main()
