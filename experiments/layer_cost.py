"""What `find-sinks` computes of a model, and what it would take in the shape of Llama-2-7B.

    python -m experiments.layer_cost real/smollm2-135m.gguf real/gemma3-270m.gguf [--out FILE]

A call of a layer multiplies each of its weights with each token, and so does the output projection, which the loss
needs. The products of a larger model are those of the tokens per layer that were counted here, at its number of weights
per layer, and its time is theirs at the seconds a product that were measured here: of one text length, on one core.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from experiments.drawn import markdown
from experiments.record import Row, write_record
from experiments.script import run
from sinkscope.measure import Setup
from sinkscope.sinks.spikes.find import find_sinks

LAYERS = 32
"""Layers of Llama-2-7B."""
LAYER_WEIGHTS = 4 * 4096 * 4096 + 3 * 4096 * 11008
"""Weights of a layer of it: four projections of the attention, three of the MLP."""
HEAD_WEIGHTS = 32000 * 4096
"""Weights of its output projection."""


def cost_of(model: str, loading: Any, dtype: str | None) -> Row:
    """Count tokens and measure processor seconds of one model."""
    setup = Setup.open(model, loading=loading, dtype=dtype)
    target = setup.target
    seen = {"layers": 0, "head": 0}

    def counting(key: str) -> Any:
        def count(module: Any, inputs: Any, named: Any) -> None:
            states = inputs[0] if inputs else named["hidden_states"]
            seen[key] += states.numel() // states.shape[-1]

        return count

    for layer in target.layers:
        layer.register_forward_pre_hook(counting("layers"), with_kwargs=True)
    head = target.hf.get_output_embeddings()
    head.register_forward_pre_hook(counting("head"), with_kwargs=True)
    weights = sum(parameter.numel() for layer in target.layers for parameter in layer.parameters())
    weights_of_head = target.d_model * target.config.vocab_size
    begun = time.process_time()
    found = find_sinks.on(setup)
    seconds = time.process_time() - begun
    products = seen["layers"] * weights / target.n_layers + seen["head"] * weights_of_head
    larger = LAYERS * LAYER_WEIGHTS * seen["layers"] / target.n_layers + seen["head"] * HEAD_WEIGHTS
    return {
        "model": found.model.name,
        "tokens_per_layer": seen["layers"] / target.n_layers,
        "tokens_of_head": seen["head"],
        "seconds": seconds,
        "products": products,
        "seconds_of_7b": larger * seconds / products,
    }


def main(models: list[str], *, loading: str = "whole", dtype: str | None = None, out: Path | None = None) -> None:
    """Make what the module describes, and print it.

    Args:
        models: Names, folders or files of models.
        loading: "whole", or "stream" for layer by layer, which measures no loss.
        dtype: Type of the weights. By default the checkpoint's; layer by layer float32.
        out: File for the numbers.
    """
    rows = [cost_of(model, loading, dtype) for model in models]
    cells: list[list[str]] = []
    for row in rows:
        numbers = (row["tokens_per_layer"], row["tokens_of_head"], row["seconds"], row["seconds_of_7b"])
        cells.append([row["model"], *(f"{number:,.0f}" for number in numbers)])
    print(markdown(["model", "tokens a layer", "tokens of the head", "CPU seconds", "of 7B"], cells))
    if out is not None:
        write_record(out, "layer-cost", {"rows": rows}, {"models": models, "loading": loading, "dtype": dtype})


if __name__ == "__main__":
    run(main)
