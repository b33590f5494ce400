"""What works on a plain model, called on split models in one of several processes."""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from calls_kit import IDS, calls
from same_kit import differences, plain
from transformers import AutoModelForCausalLM, AutoTokenizer

import sinkscope as ss
from sinkscope.app import cli
from sinkscope.bench import run as run_bench
from sinkscope.errors import SinkscopeError
from sinkscope.models.shards import split_weight
from sinkscope.sinks.spikes import survey

FIND_SINKS = ["find-sinks"]


def unequal_seeds(model, tokenizer):
    ss.generate(model, [IDS[0].tolist()], tokenizer=tokenizer, seed=dist.get_rank(), temperature=1.0, max_new_tokens=2)


def unequal_settings(model, tokenizer):
    ss.attack(model, tokenizer=tokenizer, n_tokens=12 + dist.get_rank())


def alone(model, tokenizer):
    """What is for one process."""
    if split_weight(model) is None:
        return
    said = []
    for call in (
        lambda: run_bench(model, "text", ["full"], tokenizer=tokenizer),
        lambda: ss.scan(model, tokenizer=tokenizer),
        lambda: ss.view(model, tokenizer=tokenizer),
    ):
        try:
            call()
        except SinkscopeError as error:
            said.append(str(error))
    raise SinkscopeError(" | ".join(said))


REFUSED = {"unequal_seeds": unequal_seeds, "unequal_settings": unequal_settings, "alone": alone}


@cache
def opened(folder: str, split: bool) -> Any:
    more: dict[str, Any] = {}
    if split:
        from transformers.distributed import DistributedConfig

        more["distributed_config"] = DistributedConfig(tp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()


def compared(folder: str, name: str, tokenizer: Any) -> list[str]:
    """What is refused, or differs from one process, on each process."""
    said: list[str] = []
    results: list[Any] = [None, None]
    for split in (False, True):
        if split or dist.get_rank() == 0:
            model = opened(folder, split)
            try:
                results[split] = plain((calls(model.config) | REFUSED)[name](model, tokenizer))
            except SinkscopeError as error:
                said.append(f"{'split' if split else 'whole'}: {error}")
        if not split:
            dist.broadcast_object_list(results)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, said or differences(*results)[:4])
    return [f"{rank}: {line}" for rank, lines in enumerate(everyone) for line in lines]


def run(folder: Path, wanted: dict[str, list[str]]) -> None:
    """Write `report.json` of these calls of the models in these folders, and `sinks.json` of the first model."""
    warnings.filterwarnings("ignore")
    survey.SURVEYED = 4
    assert cli.main([*FIND_SINKS, "--model", next(iter(wanted)), "--json", str(folder / "sinks.json")]) == 0
    report: dict[str, dict[str, list[str]]] = {}
    for model, names in wanted.items():
        tokenizer = AutoTokenizer.from_pretrained(model)
        report[Path(model).name] = {name: compared(model, name, tokenizer) for name in names}
    if dist.get_rank() == 0:
        (folder / "report.json").write_text(json.dumps(report))
    dist.barrier()  # a process that leaves first may end the other's threads with an abort
    dist.destroy_process_group()
