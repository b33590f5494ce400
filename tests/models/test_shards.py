"""Models that transformers splits over processes: each call gives what one process gives, or is refused in a line."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls_kit import IDS, calls
from organisms import organism, tiny_model
from refusals import refused
from same_kit import differences, plain
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import sinkscope as ss
from sinkscope.app import cli
from sinkscope.bench import run as run_bench
from sinkscope.errors import SinkscopeError
from sinkscope.models.shards import ALONE, split_weight
from sinkscope.models.target import check_divides

FIND_SINKS = ["find-sinks"]


# -- in one of two processes -------------------------------------------------------------------------------------------


def unequal_seeds(model, tokenizer):
    ss.generate(model, [IDS[0].tolist()], tokenizer=tokenizer, seed=dist.get_rank(), temperature=1.0, max_new_tokens=2)


def unequal_settings(model, tokenizer):
    ss.attack(model, tokenizer=tokenizer, n_tokens=12 + dist.get_rank())


def benched(model, tokenizer):
    if split_weight(model) is not None:
        run_bench(model, "text", ["full"], tokenizer=tokenizer)


def scanned(model, tokenizer):
    if split_weight(model) is not None:
        ss.scan(model, tokenizer=tokenizer)


def viewed(model, tokenizer):
    if split_weight(model) is not None:
        ss.view(model, tokenizer=tokenizer)


MORE = {each.__name__: each for each in (unequal_seeds, unequal_settings, benched, scanned, viewed)}
REFUSED = {
    "adakv": "AdaKV compares all heads of a layer, which are split over processes here",
    "unequal_seeds": "processes 0 and 1 of 2 have a different prompt, temperature or seed",
    "unequal_settings": "processes 0 and 1 of 2 have a different setting",
    "benched": "is for a model in one process",
    "scanned": "is for a model in one process",
    "viewed": "is for a model in one process",
}


def compared(folder: str, name: str) -> list[str]:
    """What is refused, or differs from one process, on each process."""
    tokenizer, said, results = AutoTokenizer.from_pretrained(folder), list[str](), [None, None]
    split = {"distributed_config": DistributedConfig(tp_size=2)}
    for number, more in enumerate(({}, split)):
        if more or dist.get_rank() == 0:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()
            try:
                results[number] = plain((calls(model.config) | MORE)[name](model, tokenizer))
            except SinkscopeError as error:
                said.append(str(error))
        if not more:
            dist.broadcast_object_list(results)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, said or differences(*results)[:4])
    return [f"{rank}: {line}" for rank, lines in enumerate(everyone) for line in lines]


def one_of_two(rank: int, folder: Path, wanted: dict[str, list[str]]) -> None:
    """Write `report.json` of these calls of the models in these folders, and `sinks.json` of the first."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    sys.stdout, sys.stderr = ((folder / f"{name}{rank}").open("w") for name in ("out", "err"))
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    assert cli.main([*FIND_SINKS, "--model", next(iter(wanted)), "--json", str(folder / "sinks.json")]) == 0
    report = {Path(model).name: {name: compared(model, name) for name in names} for model, names in wanted.items()}
    if rank == 0:
        (folder / "report.json").write_text(json.dumps(report))
    dist.barrier()  # a process that leaves first may end the other's threads with an abort
    dist.destroy_process_group()


# -- in the test -------------------------------------------------------------------------------------------------------


def saved(folder: Path, family: str, *parts: Any) -> str:
    """A folder with a model and its tokenizer."""
    for part in parts:
        part.save_pretrained(folder / family)
    return str(folder / family)


@pytest.mark.few_texts
def test_each_call_on_two_processes_gives_what_one_gives_or_is_refused(tmp_path, typed):
    """The two processes are forks of this one: what torchrun starts would import all of torch again."""
    planted = {family: organism(family) for family in ("llama", "mixtral")}
    llama, mixtral = (saved(tmp_path, name, one.model, one.tokenizer) for name, one in planted.items())
    qwen3 = saved(tmp_path, "qwen3", *tiny_model("qwen3"))  # norms of queries and keys
    phi3 = saved(tmp_path, "phi3", *tiny_model("phi3"))  # gates and ups in one projection
    calls = {
        llama: ["repeat", "barcode", "lines", "SinkPatch", "LoopGuard", "h2o", "snapkv", *REFUSED],
        phi3: ["Ablate", "Ablate, up factor", "Ablate, heads", "Add", "trace", "LoopServe"],
        mixtral: ["SinkPatch", "trace"],
        qwen3: ["trace"],
    }
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=one_of_two, args=(rank, tmp_path, calls)) for rank in (0, 1)]
    for process in both:
        process.start()
    for process in both:
        process.join(600)
    printed, said = ("".join((tmp_path / f"{name}{rank}").read_text() for rank in (0, 1)) for name in ("out", "err"))
    assert [process.exitcode for process in both] == [0, 0], said[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    for name, words in REFUSED.items():
        lines = report["llama"].pop(name)
        assert [line.split(": ", 1)[0] for line in lines] == ["0", "1"]
        assert all(words in line for line in lines), lines
    assert [line for uses in report.values() for found in uses.values() for line in found] == []
    whole = typed([*FIND_SINKS, "--model", llama, "--json", str(tmp_path / "whole.json")])
    assert said.count("JSON: ") == printed.count("Conclusion: ") == 1
    assert printed.splitlines()[-1] == whole.out.splitlines()[-1]
    one, split = (json.loads((tmp_path / name).read_text())["result"] for name in ("whole.json", "sinks.json"))
    assert split["first_token_norm"] == pytest.approx(one["first_token_norm"], rel=1e-5)
    assert one["spikes"][0]["needed"] == split["spikes"][0]["needed"] and len(one["spikes"][0]["needed"]) == len(
        planted["llama"].truth.neurons
    )


def test_one_process_holds_whole_tensors_and_heads_must_divide():
    tensor, config = torch.randn(2, 6), tiny_model("llama")[0].config
    assert ALONE.gather(tensor, 6) is tensor and ALONE.all(3) == [3]
    with refused("a process of 1 holds 6 of 8 columns"):
        ALONE.gather(tensor, 8)
    check_divides(config, "m", 2)
    with refused(r"3 processes cannot share the 4 heads \(num_attention_heads\) of m"):
        check_divides(config, "m", 3)
