"""Models that transformers splits over processes: each call gives what one process gives, or is refused in a line."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import shard_kit
import torch
from organisms import organism, tiny_model
from refusals import refused

from sinkscope.models.shards import ALONE, Shards
from sinkscope.models.target import check_divides

REFUSED = {
    "adakv": "AdaKV compares all heads of a layer, which are split over processes here",
    "unequal_seeds": "processes 0 and 1 of 2 have a different prompt, temperature or seed",
    "unequal_settings": "processes 0 and 1 of 2 have a different setting",
    "alone": "is for a model in one process",
}


def one_of_two(rank: int, folder: Path, calls: dict[str, list[str]]) -> None:
    """The work of a process, whose output goes to a file."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    sys.stdout, sys.stderr = ((folder / f"{name}{rank}").open("w") for name in ("out", "err"))
    place = f"file://{folder / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    shard_kit.run(folder, calls)


def saved(folder: Path, family: str, *parts: Any) -> str:
    """A folder with a model and its tokenizer."""
    for part in parts:
        part.save_pretrained(folder / family)
    return str(folder / family)


@pytest.mark.few_texts
def test_each_call_on_two_processes_gives_what_one_gives_or_is_refused(tmp_path, typed):
    """The two processes are forks of this one: what torchrun starts would import all of torch again."""
    planted = {family: organism(family) for family in ("qwen3", "mixtral")}
    qwen3, mixtral = (saved(tmp_path, name, one.model, one.tokenizer) for name, one in planted.items())
    phi3 = saved(tmp_path, "phi3", *tiny_model("phi3", intermediate_size=63))  # two parts of unequal width
    calls = {
        qwen3: ["repeat", "barcode", "lines", "SinkPatch", "LoopGuard", "h2o", "snapkv", *REFUSED],
        phi3: ["Ablate", "Ablate, up factor", "Ablate, heads", "Add", "trace", "LoopServe"],
        mixtral: ["SinkPatch", "trace"],
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
        lines = report["qwen3"].pop(name)
        assert [line.split(": ", 1)[0] for line in lines] == ["0", "1"]
        assert all(words in part for line in lines for part in line.split(" | ")), lines
        assert name != "alone" or all(line.count(" | ") == 2 for line in lines)  # of each call
    assert [line for uses in report.values() for found in uses.values() for line in found] == []
    whole = typed([*shard_kit.FIND_SINKS, "--model", qwen3, "--json", str(tmp_path / "whole.json")])
    assert said.count("JSON: ") == printed.count("Conclusion: ") == 1
    assert printed.splitlines()[-1] == whole.out.splitlines()[-1]
    one, split = (json.loads((tmp_path / name).read_text())["result"] for name in ("whole.json", "sinks.json"))
    assert split["first_token_norm"] == pytest.approx(one["first_token_norm"], rel=1e-5)
    assert one["spikes"][0]["needed"] == split["spikes"][0]["needed"] and len(one["spikes"][0]["needed"]) == 2


@pytest.mark.parametrize(("size", "count"), [(7, 2), (8, 2), (3, 4), (50, 8), (1, 1)])
def test_the_part_of_a_process_is_what_chunk_gives_it(size, count):
    for rank, chunk in enumerate(torch.arange(size).chunk(count)):
        shards = Shards()
        shards.size, shards.rank = count, rank
        assert list(shards._axis(size)) == chunk.tolist()


def test_one_process_holds_whole_tensors_and_heads_must_divide():
    tensor, config = torch.randn(2, 6), tiny_model("llama")[0].config
    assert ALONE.gather(tensor, 6) is tensor and ALONE.all(3) == [3]
    with refused("a process of 1 holds 6 of 8 columns"):
        ALONE.gather(tensor, 8)
    check_divides(config, "m", 2)
    with refused(r"3 processes cannot share the 4 heads \(num_attention_heads\) of m"):
        check_divides(config, "m", 3)
