"""`sinkscope loopbench run`."""

from pathlib import Path
from typing import Annotated

import typer

from sinkscope._console import Progress, print_result
from sinkscope.cli.common import Backend, BackendOption, Device, DType, Model, Revision, Seed, open_model
from sinkscope.cli.loopbench import group
from sinkscope.errors import SinkscopeError

PAPER = "full,streaming,h2o,loopguard"


@group.command("run")
def run_command(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the runs are kept; given again, it goes on.")],
    model: Model = None,
    revision: Revision = None,
    backend: BackendOption = Backend.hf,
    device: Device = None,
    dtype: DType = None,
    bench: Annotated[
        list[str] | None,
        typer.Option(help="small, honest, or a file of prompts (may be given again).", show_default="small"),
    ] = None,
    methods: Annotated[str, typer.Option(help="Names with commas between; an unknown one lists them.")] = PAPER,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer.", show_default="2500; of 2wiki 32")
    ] = None,
    budget: Annotated[str, typer.Option(help="Cached tokens, or a share of the prompt such as 0.5.")] = "1024",
    window: Annotated[int, typer.Option(min=1, help="Tokens W over which signals are taken.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that run together.")] = 1,
    seed: Seed = 0,
) -> None:
    """Continue every prompt by every method; after a kill the same command goes on where it was."""
    from sinkscope.bench.methods import check_methods, parse_budget

    names = [name.strip() for name in methods.split(",") if name.strip()]
    check_methods(names)
    share = parse_budget(budget)

    from sinkscope.bench.loopbench.prompts import honest_texts, load_prompts

    prompts = [p for name in bench or ["small"] for p in (honest_texts() if name == "honest" else load_prompts(name))]
    if max_new_tokens is not None and window > max_new_tokens and any(p.bench != "2wiki" for p in prompts):
        raise SinkscopeError(
            f"--window {window} is more than --max-new-tokens {max_new_tokens}, so no window would ever be full: give "
            f"at least {window} new tokens"
        )

    from sinkscope.bench.loopbench.run import run_loopbench
    from sinkscope.bench.loopbench.tables import tabulate

    opened = open_model(model, backend, revision=revision, device=device, dtype=dtype)
    with Progress() as progress:
        folder = run_loopbench(
            opened,
            prompts,
            names,
            out=out,
            max_new_tokens=max_new_tokens,
            budget=share,
            window=window,
            batch_size=batch_size,
            seed=seed,
            progress=progress,
        )
    print_result(tabulate([folder]))
