"""Count how many tokens each command passes through the bundled model, for `--dry-run`.

    python -m experiments.passes [--out sinkscope/app/passes.json]

Every measurement runs with its default options. Each call of a decoder layer counts its positions; their sum, divided
by the number of layers, is what `sinkscope COMMAND --dry-run` multiplies by the size of a model and the speed of a
device. `patch eval` gets the patch that `patch make` makes.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

import sinkscope as ss
from experiments.record import record
from sinkscope.app.commands import commands
from sinkscope.files.output import write_atomic
from sinkscope.models.wrapped import target_of


def counted(run: Any) -> int:
    """Tokens that pass through all layers of the bundled model while `run` runs."""
    example = target_of(ss.load(None, backend="hf"))
    kind, positions = type(example.layers[0]), 0

    def count(module: nn.Module, args: Any) -> None:
        nonlocal positions
        if isinstance(module, kind):
            positions += args[0].shape[0] * args[0].shape[1]

    handle = nn.modules.module.register_module_forward_pre_hook(count)
    try:
        run()
    finally:
        handle.remove()
    return round(positions / example.n_layers)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("sinkscope/app/passes.json"))
    args = parser.parse_args()
    started = time.perf_counter()
    tokens: dict[str, int] = {}
    for words, command in commands().items():
        function = command.load()
        if not hasattr(function, "loading"):
            continue  # it is no measurement of a model
        if words == "patch eval":
            function = partial(function, patch=ss.make_patch().patch)
        tokens[words] = counted(function)
        print(f"{words}: {tokens[words]:,} tokens", flush=True)
    write_atomic(args.out, record("passes", {"tokens": tokens}, {}, started=started))


if __name__ == "__main__":
    main()
