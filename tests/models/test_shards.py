"""Models that transformers splits over processes: each call gives what one process gives, or is refused in a line."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls_kit import IDS, calls
from covering import slow
from organisms import organism, tiny_model
from refusals import refused
from same_kit import differences, plain
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import sinkscope as ss
from sinkscope.app import cli
from sinkscope.bench import run as run_bench
from sinkscope.errors import SinkscopeError
from sinkscope.models.shards import Shards
from sinkscope.models.target import check_divides

REFUSED = {  # calls that are refused on both processes, of one model or of arguments that differ
    "adakv": (None, "AdaKV compares all heads of a layer, which are split over processes here"),
    "seeds": (
        lambda model, **known: ss.generate(model, IDS.tolist(), seed=dist.get_rank(), temperature=1.0, **known),
        "the 2 processes have a different prompt, temperature or seed",
    ),
    "settings": (
        lambda model, **known: ss.attack(model, n_tokens=12 + dist.get_rank(), **known),
        "the 2 processes have a different model, text, seed or setting",
    ),
    "experts": (
        lambda model, **known: ss.Ablate(sites=[(1, 0, 3)]).on(model).__enter__(),
        "experts of .* hold no plain weights",
    ),
    "bench": (lambda model, **known: run_bench(model, "text", ["full"], **known), "is for a model in one process"),
    "view": (ss.view, "is for a model in one process"),
}


def called(name: str, model: Any, tokenizer: Any) -> Any:
    """What a call gives, or how it is refused; one process alone is not asked for what only two refuse."""
    call = REFUSED.get(name, (None,))[0]
    if call is not None:
        return [] if model.tp_size in (None, 1) else call(model, tokenizer=tokenizer)
    return plain(calls(model.config)[name](model, tokenizer))


def compared(folder: str, name: str) -> list[str]:
    """What is refused, or differs from one process, on each process."""
    tokenizer, said, results = AutoTokenizer.from_pretrained(folder), list[str](), [None, None]
    split = {"distributed_config": DistributedConfig(tp_size=2)}
    for number, more in enumerate(({}, split)):
        if more or dist.get_rank() == 0:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()
            try:
                results[number] = called(name, model, tokenizer)
            except SinkscopeError as error:
                said.append(str(error))
        if not more:
            dist.broadcast_object_list(results)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, said or differences(*results)[:4])
    return [f"{rank}: {line}" for rank, lines in enumerate(everyone) for line in lines]


def one_of_two(rank: int, folder: Path, wanted: dict[str, list[str]]) -> None:
    """Write `report.json` of these calls of the models in these folders, after find-sinks of the first as a command."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    sys.stdout, sys.stderr = ((folder / f"{name}{rank}").open("w") for name in ("out", "err"))
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    assert cli.main(["find-sinks", "--model", next(iter(wanted))]) == 0
    report = {Path(model).name: {name: compared(model, name) for name in names} for model, names in wanted.items()}
    if rank == 0:
        (folder / "report.json").write_text(json.dumps(report))
    dist.barrier()  # a process that leaves first may end the other's threads with an abort
    dist.destroy_process_group()


QUICK = {"llama": ["h2o", *REFUSED.keys() - {"experts"}], "phi3": ["Ablate, heads"], "mixtral": ["experts"]}
OTHERS = {
    "llama": ["repeat", "barcode", "lines", "SinkPatch", "LoopGuard", "snapkv"],
    "phi3": ["Ablate", "Ablate, up factor", "Add", "trace", "LoopServe"],
    "qwen3": ["trace"],  # norms of queries and keys
}


@pytest.mark.few_texts
@pytest.mark.parametrize("uses", [QUICK, slow(OTHERS)], ids=["quick", "others"])
def test_each_call_on_two_processes_gives_what_one_gives_or_is_refused(uses, tmp_path, typed):
    """The two processes are forks of this one: what torchrun starts would import all of torch again."""
    wanted: dict[str, list[str]] = {}
    for family, names in uses.items():
        planted = organism(family) if family in ("llama", "mixtral") else None
        for part in tiny_model(family) if planted is None else (planted.model, planted.tokenizer):
            part.save_pretrained(tmp_path / family)
        wanted[str(tmp_path / family)] = names
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=one_of_two, args=(rank, tmp_path, wanted)) for rank in (0, 1)]
    for process in both:
        process.start()
    for process in both:
        process.join(600)
    printed, said = ("".join((tmp_path / f"{name}{rank}").read_text() for rank in (0, 1)) for name in ("out", "err"))
    assert [process.exitcode for process in both] == [0, 0], said[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    for name, lines in [each for uses in report.values() for each in uses.items()]:
        words = REFUSED.get(name, (None, ""))[1]
        assert [line.split(": ", 1)[0] for line in lines] == (["0", "1"] if words else [])
        assert all(re.search(words, line) for line in lines), lines
    whole = typed(["find-sinks", "--model", str(tmp_path / "llama")]).out
    assert printed.count("Conclusion: ") == 1 and printed.splitlines()[-1] == whole.splitlines()[-1]


def test_one_process_holds_whole_tensors_and_heads_must_divide():
    tensor, config = torch.randn(2, 6), tiny_model("llama")[0].config
    assert Shards(None).gather(tensor, 6) is tensor
    with refused("a process of 1 holds 6 of 8 columns"):
        Shards(None).gather(tensor, 8)
    with refused(r"3 processes cannot share the 4 heads of m"):
        check_divides(config, "m", 3)
