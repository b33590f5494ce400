"""Count how many tokens each command passes through a model, for `--dry-run`.

    python -m experiments.passes [--out sinkscope/app/passes.json]

Every measurement runs with its default options. Each call of a decoder layer counts its positions. On the bundled
model, their sum divided by the number of layers is how many tokens pass through all layers; `patch eval` gets the patch
that `patch make` makes. Some commands stop when they have seen enough layers, or repeat passes for each layer. Their
sums are counted on planted models of several depths, whose sink is in layer 1 and needs about 150 repeated tokens.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import sinkscope as ss
from experiments.make_shape import SHAPES, make_plan, write
from experiments.record import record
from experiments.script import run
from sinkscope.app.commands import commands
from sinkscope.files.output import write_atomic
from sinkscope.models.wrapped import target_of

DEPTHS = (6, 12, 24, 32)
STREAMED = ("find-sinks", "circuit", "heads", "repeat")
WIDTHS = (256, 512)  # of the residual stream, of the MLP
BETA = 2.5


def counted(run: Any) -> int:
    """Positions that pass through the layers of Llama models while `run` runs, summed over layers."""
    kind, positions = LlamaDecoderLayer, 0

    def count(module: nn.Module, args: Any) -> None:
        nonlocal positions
        if isinstance(module, kind):
            positions += args[0].shape[0] * args[0].shape[1]

    handle = nn.modules.module.register_module_forward_pre_hook(count)
    try:
        run()
    finally:
        handle.remove()
    return positions


def by_depth(function: Any) -> dict[str, int]:
    """Positions summed over layers, on a planted model of each depth."""
    sums: dict[str, int] = {}
    for depth in DEPTHS:
        SHAPES["planted"] = (*WIDTHS, depth, 8, 8, 320, 4096)
        with tempfile.TemporaryDirectory() as folder:
            write(make_plan("planted", 1, 0, None, BETA), Path(folder), "float32", "planted")
            sums[str(depth)] = counted(partial(function, folder))
    return sums


def main(*, out: Path = Path("sinkscope/app/passes.json")) -> None:
    """Make what the module describes."""
    started = time.perf_counter()
    tokens: dict[str, int] = {}
    layer_tokens: dict[str, dict[str, int]] = {}
    depth = target_of(ss.load(None, backend="hf")).n_layers
    for words, command in commands().items():
        function = command.load()
        if not hasattr(function, "loading"):
            continue  # it is no measurement of a model
        if words in STREAMED:
            layer_tokens[words] = by_depth(function)
            print(f"{words}: {layer_tokens[words]} tokens by depth, summed over layers", flush=True)
            continue
        if words == "patch eval":
            function = partial(function, patch=ss.make_patch().patch)
        tokens[words] = round(counted(function) / depth)
        print(f"{words}: {tokens[words]:,} tokens", flush=True)
    write_atomic(out, record("passes", {"tokens": tokens, "layer_tokens": layer_tokens}, {}, started=started))


if __name__ == "__main__":
    run(main)
