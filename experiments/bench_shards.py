"""Each call on two processes and wherever accelerate keeps weights, beside the whole model: equal? seconds, bytes.

    torchrun --standalone --nproc-per-node 2 -m experiments.bench_shards figures [--rounds 2] [--only CALL ...]

The model in the package is held whole, split over the processes by transformers, partly on disk, and by `cpu_offload`.
A cell is the largest difference of any number of the result from the whole model's, as a part of it; of a tensor, as a
part of its largest value. Bytes are those that a process puts into collectives: those of this package, and those of the
model's own passes. Both processes time the whole model and the split one in turn, each with one thread.
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
from experiments.record import Row, record
from experiments.script import run
from experiments.timing import interleaved, seconds_of
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import write_atomic
from sinkscope.models.shards import Shards

BUNDLED = Path(ss.__file__).parent / "models/bundled"
IDS = torch.tensor([[0, *range(40, 103)]])
NEW = 32  # tokens that are generated
TWO, DISK, OFFLOAD = "two processes", "device_map, parts on disk", "cpu_offload"


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
    for name in ("gather", "sum", "columns", "all"):
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
        made = model.generate(
            IDS,
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return torch.stack(made.logits)


def under(edit: Any, model: Any) -> Any:
    with edit.on(model):
        return generated(model)


def calls() -> dict[str, Callable[[Any], Any]]:
    """Each call of the table, as a function of the model."""
    found: dict[str, Callable[[Any], Any]] = {
        "find_sinks": ss.find_sinks,
        "heads": partial(ss.heads, count=6),
        "circuit": ss.circuit,
        "repeat": partial(ss.repeat, max_repeats=64, read="attention"),
        "lines": partial(ss.lines, count=4, length=128),
        "trace, all sites": partial(ss.trace, tokens=IDS, sites="*"),
        "generate, plain": generated,
    }
    edits = {
        "Ablate, a neuron": ss.Ablate(neurons="L1.N338"),
        "Ablate, a head": ss.Ablate(heads="L1.H2"),
        "Quantize": ss.Quantize(kv=8),
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


def numbers(value: Any) -> Iterator[Tensor]:
    """Every tensor and number of a result."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()["result"]
    if isinstance(value, Tensor):
        yield value.detach().double()
    elif isinstance(value, dict):
        for one in value.values():
            yield from numbers(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from numbers(one)
    elif isinstance(value, int | float):
        yield torch.tensor(value, dtype=torch.float64)


def difference(call: Callable[[Any], Any], model: Any, wanted: list[Tensor]) -> float | None:
    """The largest difference; infinite if there are other numbers; None if the call is refused."""
    try:
        found = list(numbers(call(model)))
    except SinkscopeError:
        return None
    if [one.shape for one in found] != [one.shape for one in wanted]:
        return float("inf")
    apart = 0.0
    for one, other in zip(found, wanted, strict=True):
        assert bool((one.isnan() == other.isnan()).all())
        size = max(1.0, float(other.nan_to_num().abs().max()))
        apart = max(apart, float((one - other).nan_to_num().abs().max()) / size)
    return apart


def placed(folder: Path) -> dict[str, Any]:
    """The model wherever its weights may be; all processes make the same."""
    from accelerate import cpu_offload
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shutil.copytree(BUNDLED, folder / "m")
    whole = ss.load(folder / "m", device="cpu")
    depth = whole.config.num_hidden_layers
    places: dict[str, Any] = {f"model.layers.{layer}": "disk" if layer else "cpu" for layer in range(depth)}
    places |= {"model.embed_tokens": "disk", "lm_head": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    disk: Any = AutoModelForCausalLM.from_pretrained(
        folder / "m", device_map=places, offload_folder=folder / "off", dtype=torch.float32
    )
    disk.tokenizer = AutoTokenizer.from_pretrained(folder / "m")
    offloaded = cpu_offload(ss.load(folder / "m", device="cpu"), execution_device=torch.device("cpu"))
    return {"whole": whole, TWO: ss.load(folder / "m"), DISK: disk, OFFLOAD: offloaded}


def measured(call: Callable[[Any], Any], models: dict[str, Any], wire: Wire, rounds: int) -> Row:
    """Differences, seconds and bytes of a call."""
    wanted = list(numbers(call(models["whole"])))
    apart = {place: difference(call, models[place], wanted) for place in (TWO, DISK, OFFLOAD)}
    row: Row = {"apart": apart}
    if apart[TWO] is None:
        return row
    wire.ours = wire.model = 0
    with wire:
        call(models[TWO])
    row |= {"ours": wire.ours, "model": wire.model}

    def timed(place: str) -> float:
        dist.barrier()
        return seconds_of(partial(call, models[place]), time.perf_counter)[0]

    seconds = interleaved({"one": partial(timed, "whole"), "two": partial(timed, TWO)}, rounds)
    return row | {name: statistics.median(times) for name, times in seconds.items()}


def main(out: Path, *, rounds: int = 2, only: Sequence[str] = ()) -> None:
    """Make what the module describes.

    Args:
        out: folder of what is written.
        rounds: how often each call is timed.
        only: the calls to make. By default all.
    """
    started = time.perf_counter()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wire = Wire()
    marked(wire)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        models = placed(Path(folder))
        for name, call in calls().items():
            if only and name not in only:
                continue
            rows.append({"call": name, **measured(call, models, wire, rounds)})
            if dist.get_rank() == 0:
                print(rows[-1], file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        settings = {"rounds": rounds, "prompt": IDS.shape[1], "new": NEW, "processes": dist.get_world_size()}
        write_atomic(out / "bench_shards.json", record("bench-shards", {"rows": rows}, settings, started=started))
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
