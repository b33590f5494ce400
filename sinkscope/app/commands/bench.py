"""Commands that compare methods and check caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sinkscope.app.commands.command import command
from sinkscope.app.commands.options import LOAD, Several

BENCHMARK = "Benchmark"


@command(
    "bench", BENCHMARK, "sinkscope bench --task recall --methods full,h2o:0.25 --out runs", shared=LOAD, kinds=["bench"]
)
@click.option(
    "--model",
    help="A short name, hub id, folder or .gguf file. By default the bundled model; the recall model for recall.",
)
@click.option(
    "--task",
    metavar="TASK|FILE",
    required=True,
    help='loops, recall, text, or a file of JSON lines with "prompt" and "answers"; settings follow after '
    "colons, such as recall:lengths=640,1024:samples=2. An unknown setting lists all.",
)
@click.option(
    "--methods",
    cls=Several,
    metavar="LIST",
    required=True,
    help="Names separated by commas, each with a budget or settings (h2o:0.25, loopguard:paper, snapkv:window=32), or "
    "package.module:name of a policy class or of a function that makes a cache, as check-cache takes it. A budget of "
    "0.25 keeps a quarter of the prompt, which kvpress calls compression_ratio 0.75. An unknown name lists all.",
)
@click.option("--out", metavar="DIR", help="Folder for the records. If it holds part of this run, the run continues.")
@click.option("--max-new-tokens", type=int, help="Maximum length of an answer. By default the task's.")
@click.option("--batch-size", type=int, default=1, help="Number of prompts that run together.")
@click.option("--temperature", type=float, default=0.0, help="Sampling temperature; 0 is greedy.")
@click.option(
    "--seed",
    type=int,
    default=0,
    help="Seed of the sampling. A folder may hold answers of several seeds, one command after another.",
)
def bench() -> Any:
    """Compare methods on prompts: scores beside costs.

    The same command resumes.
    """
    from sinkscope.bench.run import bench

    return bench


@command(
    "bench table",
    BENCHMARK,
    "sinkscope bench table runs --by turn",
    "sinkscope bench table runs --beside snapkv:0.25",
    kinds=["bench"],
)
@click.argument("folders", metavar="DIR...", help="Folders of `sinkscope bench`.", nargs=-1, type=Path, required=True)
@click.option(
    "--by",
    metavar="NAME",
    default="part",
    help="What the columns after the score stand for: part (such as the position of a question), turn, or a field "
    "of the prompts such as depth, length or period.",
)
@click.option(
    "--beside",
    metavar="METHOD",
    help="The method with which all others are compared, prompt by prompt. By default the best one of each set.",
)
def bench_table() -> Any:
    """Show the tables of finished runs."""
    from sinkscope.bench.table import bench_table

    return bench_table


@command(
    "check-cache",
    BENCHMARK,
    "sinkscope check-cache transformers:DynamicCache",
    "sinkscope check-cache snapkv",
    kinds=["check-cache"],
)
@click.argument(
    "factory",
    metavar="POLICY|MODULE:FACTORY",
    help="The name of a policy, or a function, as module:function. It gives a transformers Cache, a context manager or "
    "a cache policy, and is given what its parameters name: model, config, max_cache_len, budget (tokens to keep) or "
    "share (of the prompt).",
)
@click.option(
    "--only", cls=Several, metavar="CHECK,...", help="Run these checks alone, by their names with underscores."
)
@click.option(
    "--tolerance",
    type=float,
    default=0.001,
    help="Largest error of logits, in standard deviations of the right ones. A cache that rounds keys and values "
    "needs more than the default.",
)
@click.option(
    "--budget",
    metavar="BUDGET",
    help="What to keep in all checks, in tokens or as a fraction of the prompt. By default, each check asks for a part "
    "of its text, or for the smallest budget that the cache takes; texts are made long enough.",
)
@click.option(
    "--thorough",
    is_flag=True,
    help="Try all lengths, and 500 drawn orders of calls; 10 to 30 seconds.",
)
@click.option("--seed", type=int, default=0, help="Seed of the lengths and orders that are drawn.")
def check_cache() -> Any:
    """Check any KV cache, press or policy on models that show what it loses.

    What the factory raises, and NotImplementedError at any time, is a refusal: the check does not apply. Any other
    exception is a failure. The verdict is incomplete if rows of a batch were not tried or, of a cache that evicts,
    positions, the budget or eviction. The exit status is 1 unless the cache passes.
    """
    from sinkscope.conformance.check_cache import check_cache

    return check_cache
