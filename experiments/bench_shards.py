"""Each call on two processes beside the whole model: seconds and bytes.

    torchrun --standalone --nproc-per-node 2 -m experiments.bench_shards figures [--rounds 2] [--only CALL ...]

The model in the package is held whole, and split over the processes by transformers. Bytes are those that a process
puts into collectives: those of this package, and those of the model's own passes. Both processes time the whole model
and the split one in turn, each with one thread. A call that is refused has neither. That the numbers are equal is
tested (tests/models/test_shards.py).
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sinkscope as ss
from experiments.record import Row, write_record
from experiments.script import run
from experiments.timing import interleaved, seconds_of
from sinkscope.errors import SinkscopeError
from sinkscope.models.shards import Shards

BUNDLED = Path(ss.__file__).parent / "models/bundled"
IDS = torch.tensor([[0, *range(40, 103)]])
NEW = 32  # tokens that are generated


class Wire(TorchDispatchMode):
    """Counts the bytes that this process puts into collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.model = self.ours = self.inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            given = args[1] if func.__name__.startswith("allgather_") else args[0]
            sent = sum(one.nbytes for one in _tensors(given))
            if self.inside:
                self.ours += sent
            else:
                self.model += sent
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def marked(wire: Wire) -> None:
    """Tell the counter which collectives are those of this package."""
    for name in ("gather", "columns", "all"):
        plain = getattr(Shards, name)

        def counted(self: Shards, *args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            wire.inside += 1
            try:
                return plain(self, *args, **kwargs)
            finally:
                wire.inside -= 1

        setattr(Shards, name, counted)


def generated(model: Any) -> Any:
    with torch.no_grad():
        return model.generate(IDS, max_new_tokens=NEW, do_sample=False, eos_token_id=None)


def under(edit: Any, model: Any) -> Any:
    with edit.on(model):
        return generated(model)


def calls() -> dict[str, Callable[[Any], Any]]:
    """Each call of the table, as a function of the model."""
    found: dict[str, Callable[[Any], Any]] = {
        "find_sinks": ss.find_sinks,
        "why_sink": ss.why_sink,
        "repeat": partial(ss.repeat, max_repeats=64, quantity="attention"),
        "lines": partial(ss.lines, count=4, length=128),
        "trace, all sites": partial(ss.trace, tokens=IDS, sites="*"),
        "generate, plain": generated,
    }
    edits = {
        "Ablate, a neuron": ss.Ablate(sites="L1.N338"),
        "Ablate, a head": ss.Ablate(heads="L1.H2"),
        "H2O": ss.kv.H2O(24),
        "SnapKV": ss.kv.SnapKV(24),
        "TOVA": ss.kv.TOVA(24),
        "AdaKV": ss.kv.AdaKV(24),
        "LoopGuard": ss.LoopGuard(budget=24),
        "LoopServe": ss.LoopServe(24),
    }
    for name, edit in edits.items():
        found[f"generate, {name}"] = partial(under, edit)
    return found


def measured(call: Callable[[Any], Any], models: dict[str, Any], wire: Wire, rounds: int) -> Row:
    """Seconds and bytes of a call."""
    wire.ours = wire.model = 0
    try:
        with wire:
            call(models["two"])
    except SinkscopeError:
        return {}
    row: Row = {"ours": wire.ours, "model": wire.model}

    def timed(place: str) -> float:
        dist.barrier()
        return seconds_of(partial(call, models[place]), time.perf_counter)[0]

    seconds = interleaved({name: partial(timed, name) for name in models}, rounds)
    return row | {name: statistics.median(times) for name, times in seconds.items()}


def main(out: Path, *, rounds: int = 2, only: Sequence[str] = ()) -> None:
    """Make what the module describes.

    Args:
        out: folder of what is written.
        rounds: how often each call is timed.
        only: the calls to make. By default all.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wire = Wire()
    marked(wire)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(BUNDLED, Path(folder) / "m")  # by name it would be whole
        models = {"one": ss.load(Path(folder) / "m", device="cpu"), "two": ss.load(Path(folder) / "m")}
        for name, call in calls().items():
            if only and name not in only:
                continue
            rows.append({"call": name, **measured(call, models, wire, rounds)})
            if dist.get_rank() == 0:
                print(rows[-1], file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        settings = {"rounds": rounds, "prompt": IDS.shape[1], "new": NEW, "processes": dist.get_world_size()}
        write_record(out / "bench_shards.json", "bench-shards", {"rows": rows}, settings)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
