"""What works on a plain model, called on split models: `torchrun ... shard_kit.py OUT FOLDER:USE,USE...`.

Before that, what a command prints and writes to `sinks.json` beside OUT, with the first folder.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from same_kit import differences, plain
from transformers import AutoModelForCausalLM, AutoTokenizer

import sinkscope as ss
from sinkscope.app import cli
from sinkscope.bench import run_bench
from sinkscope.errors import SinkscopeError
from sinkscope.models.shards import split_weight
from sinkscope.sinks.find import attention_received

IDS = torch.tensor([[1] + [4 + (7 * i * i + 3 * i) % 60 for i in range(27)]])
USES: dict[str, Callable[[Any, Any], Any]] = {}


def use(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    USES[fn.__name__] = fn
    return fn


@use
def find_sinks(model, tokenizer):
    return ss.find_sinks(model, tokenizer=tokenizer)


@use
def ablate(model, tokenizer):
    last = model.config.intermediate_size - 1
    out = []
    sites = [(1, 0), (1, 31), (1, 32), (2, last)]
    if model.config.model_type == "mixtral":
        sites = [(1, 2, 0), (1, 0, 31), (1, 2, 32), (2, 1, last)]
    for edit in (
        ss.Ablate(sites=sites),
        ss.Ablate(sites=sites, site="up", value="mean"),
        ss.Ablate(heads=[(1, 0), (1, 3), (2, 1)], value=0.5),
        ss.Add(torch.linspace(-1, 1, model.config.hidden_size), "blocks.1.hook_resid_post"),
    ):
        with edit.on(model) as run, torch.no_grad():
            out.append(model(IDS).logits)
            out.append(generated(model))
        out.append(run.to_frame().to_dict("list"))
    return out


def generated(model, **more):
    ids = torch.cat([IDS, IDS.flip(1)])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        **more,
    )
    return torch.stack(made.logits)


@use
def trace(model, tokenizer):
    wanted = lambda name: ("hook" in name and "mlp.hook" not in name) or name == "logits"  # noqa: E731
    if model.config.model_type != "mixtral":
        wanted = lambda name: True  # noqa: E731
    return dict(ss.trace(model, IDS, wanted))


@use
def heads(model, tokenizer):
    return ss.heads(model, tokenizer=tokenizer, count=2)


@use
def circuit(model, tokenizer):
    return ss.circuit(model, tokenizer=tokenizer)


@use
def repeat(model, tokenizer):
    return ss.repeat(model, tokenizer=tokenizer, max_repeats=12, ablate=True)


@use
def attack(model, tokenizer):
    return ss.attack(model, tokenizer=tokenizer)


@use
def barcode(model, tokenizer):
    bars = ss.barcode(model, ids=IDS[0].tolist() * 3, tokenizer=tokenizer)
    pictures = [
        bars.attention / 200,
        bars.control_attention / 200,
    ]  # in thousandths: the last one may be rounded otherwise
    return [bars.score, bars.mass, bars.control_score, bars.shown, *pictures]


@use
def lines(model, tokenizer):
    return ss.lines(model, tokenizer=tokenizer, count=2, length=64)


@use
def patch(model, tokenizer):
    sites = [(1, 0), (1, 31), (1, 32)]
    if model.config.model_type == "mixtral":
        sites = [(1, 2, 0), (1, 0, 31), (1, 2, 32)]
    made = ss.SinkPatch(sites=sites)
    with made.on(model) as run, torch.no_grad():
        return [model(IDS.repeat(1, 2)).logits, generated(model), run.to_frame().to_dict("list")]


@use
def quantize(model, tokenizer):
    with ss.Quantize(kv=4).on(model), torch.no_grad():
        return [model(IDS).logits, generated(model)]


@use
def policies(model, tokenizer):
    out = {}
    for name in ("streaming:12", "h2o:12", "tova:12"):
        with ss.kv.policy_named(name).on(model) as run, torch.no_grad():
            out[name] = [generated(model), run.summary()]
    return out


@use
def adakv(model, tokenizer):
    with ss.kv.policy_named("adakv:12").on(model), torch.no_grad():
        return [generated(model)]


@use
def guard(model, tokenizer):
    made = ss.generate(model, ids_list(), tokenizer=tokenizer, guard=True, max_new_tokens=60)
    return [[one.tokens, [event.kind for event in one.events]] for one in made]


def ids_list():
    return [IDS[0].tolist()]


@use
def patch_make(model, tokenizer):
    return ss.patch_make(model, tokenizer=tokenizer)


@use
def why(model, tokenizer):
    return ss.why(model, IDS[0].tolist(), max_new_tokens=60, tokenizer=tokenizer)


@use
def probability(model, tokenizer):
    return ss.repeat(model, tokenizer=tokenizer, max_repeats=24, read="probability")


@use
def unequal_seeds(model, tokenizer):
    ss.generate(model, ids_list(), tokenizer=tokenizer, seed=dist.get_rank(), temperature=1.0, max_new_tokens=2)


@use
def unequal_settings(model, tokenizer):
    ss.heads(model, tokenizer=tokenizer, count=4 + dist.get_rank())


@use
def alone(model, tokenizer):
    """What is for one process."""
    if split_weight(model) is None:
        return
    said = []
    for call in (
        lambda: run_bench(model, "text", ["full"], tokenizer=tokenizer),
        lambda: ss.scan(model, tokenizer=tokenizer),
        lambda: ss.view(model, tokenizer=tokenizer),
        lambda: ss.reproduce(model, tokenizer=tokenizer),
    ):
        try:
            call()
        except SinkscopeError as error:
            said.append(str(error))
    raise SinkscopeError(" | ".join(said))


@use
def serve(model, tokenizer):
    with ss.LoopServe(budget=16).on(model) as run, torch.no_grad():
        return [generated(model), run.summary()]


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
            try:
                results[split] = plain(USES[name](opened(folder, split), tokenizer))
            except SinkscopeError as error:
                said.append(f"{'split' if split else 'whole'}: {error}")
        if not split:
            dist.broadcast_object_list(results)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, said or differences(*results)[:4])
    return [f"{rank}: {line}" for rank, lines in enumerate(everyone) for line in lines]


def main(out: str, *folders: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    attention_received.RATE_TEXTS = 8
    words = ["--model", folders[0].partition(":")[0], "--json", str(Path(out).with_name("sinks.json"))]
    assert cli.main(["find-sinks", *words]) == 0
    report: dict[str, dict[str, list[str]]] = {}
    for words in folders:
        folder, _, names = words.partition(":")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        wanted = names.split(",") if names else USES
        report[Path(folder).name] = {name: compared(folder, name, tokenizer) for name in wanted}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(report))
    dist.barrier()  # a process that leaves first may end the other's threads with an abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
