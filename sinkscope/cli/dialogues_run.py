"""`sinkscope dialogues run`."""

from pathlib import Path
from typing import Annotated

import typer

from sinkscope._console import Progress, print_result
from sinkscope.cli.common import Backend, BackendOption, Device, DType, Revision, Seed, open_model
from sinkscope.cli.dialogues import group
from sinkscope.errors import SinkscopeError

POLICIES = "full,streaming,h2o,snapkv,tova"
PLACES = "begin,middle,end"


@group.command("run")
def run_command(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where answers are kept; given again, it goes on.")],
    model: Annotated[
        str, typer.Option(help="Short name, hub id, folder; recall is the recall model of the package.")
    ] = "recall",
    revision: Revision = None,
    backend: BackendOption = Backend.hf,
    device: Device = None,
    dtype: DType = None,
    dialogues: Annotated[
        str, typer.Option(metavar="FILE|recall", help="What `dialogues build` wrote, or recall: made on the spot.")
    ] = "recall",
    count: Annotated[
        int | None, typer.Option(min=1, help="Dialogues.", show_default="10 of recall; all of a file")
    ] = None,
    methods: Annotated[str, typer.Option(help="Names with commas between; an unknown one lists them.")] = POLICIES,
    positions: Annotated[str, typer.Option(help="Places of the question, with commas between.")] = PLACES,
    budget: Annotated[str, typer.Option(help="Cached tokens, or a share of the conversation such as 0.125.")] = "256",
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer.", show_default="LongBench's for each task; recall 64")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Turns that run together.")] = 1,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap turns in the tokenizer's chat template.")] = False,
    seed: Seed = 0,
) -> None:
    """Answer every turn by every method; after a kill the same command goes on where it was."""
    from sinkscope.bench.dialogues.form import read_dialogues
    from sinkscope.bench.dialogues.methods import check_methods
    from sinkscope.bench.dialogues.recall import TASK, recall_dialogues
    from sinkscope.bench.loopbench.methods import parse_budget

    names = check_methods(_names(methods))
    share = parse_budget(budget)
    if dialogues == TASK:
        chosen = recall_dialogues(count or 10, seed=seed)
    else:
        chosen = read_dialogues(dialogues)
        if count is not None and count > len(chosen):
            raise SinkscopeError(f"--count {count}: {Path(dialogues).name} has {len(chosen)} dialogues")
        chosen = chosen[:count]

    from sinkscope.bench.dialogues.run import check_positions, run_dialogues
    from sinkscope.bench.dialogues.tables import tabulate_dialogues

    places = check_positions(_names(positions))
    opened = open_model(model, backend, revision=revision, device=device, dtype=dtype)
    with Progress() as progress:
        folder = run_dialogues(
            opened, chosen, names, out=out, positions=places, budget=share, max_new_tokens=max_new_tokens,
            batch_size=batch_size, chat=chat, progress=progress,
        )  # fmt: skip
    print_result(tabulate_dialogues([folder]))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
