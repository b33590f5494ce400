"""`sinkscope dialogues run`."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinkscope._console import Progress, print_result
from sinkscope.cli.common import Backend, BackendOption, Device, DType, Revision, Seed, open_model
from sinkscope.cli.dialogues import group
from sinkscope.errors import SinkscopeError

if TYPE_CHECKING:
    from sinkscope.bench.dialogues.form import Dialogue

POLICIES = "full,streaming,h2o,snapkv,tova"
PLACES = "begin,middle,end"


class Settings(StrEnum):
    """Of a comparison."""

    paper = "paper"
    equal = "equal"


class History(StrEnum):
    """What a turn comes after."""

    gold = "gold"
    model = "model"


MethodsOption = Annotated[
    str | None,
    typer.Option(
        help="Names with commas between, each with settings if wanted: snapkv:window=32:kernel=7. An unknown one lists "
        "them.",
        show_default=f"{POLICIES}; with --settings those of the paper",
    ),
]
SettingsOption = Annotated[
    Settings | None,
    typer.Option(
        help="paper: LoopServe's table 7. equal: every method at the same share of the context, --budget.",
        show_default="each method's own",
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        help="Cached tokens, or a share of the conversation such as 0.125.",
        show_default="256; with --settings equal 0.125",
    ),
]
ChatOption = Annotated[bool, typer.Option("--chat", help="Wrap turns in the tokenizer's chat template.")]


class Caches(StrEnum):
    """Of a dialogue."""

    fresh = "fresh"
    grow = "grow"


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
    methods: MethodsOption = None,
    settings: SettingsOption = None,
    positions: Annotated[str, typer.Option(help="Places of the question, with commas between.")] = PLACES,
    budget: BudgetOption = None,
    history: Annotated[
        History, typer.Option(help="Turns come after right answers, or after the method's own.")
    ] = History.gold,
    cache: Annotated[
        Caches, typer.Option(help="Every turn reads everything anew, or one cache grows over the turns.")
    ] = Caches.fresh,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer.", show_default="LongBench's for each task; recall 64")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Turns that run together.")] = 1,
    chat: ChatOption = False,
    seed: Seed = 0,
) -> None:
    """Answer every turn by every method; after a kill the same command goes on where it was."""
    names, share = methods_of(methods, settings, budget)
    some = dialogues_of(dialogues, count, seed)

    from sinkscope.bench.dialogues.asking import check_positions
    from sinkscope.bench.dialogues.run import run_dialogues
    from sinkscope.bench.dialogues.tables import tabulate_dialogues

    places = check_positions(words(positions))
    opened = open_model(model, backend, revision=revision, device=device, dtype=dtype)
    with Progress() as progress:
        folder = run_dialogues(
            opened,
            some,
            names,
            out=out,
            positions=places,
            budget=share,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            chat=chat,
            history=history.value,
            cache=cache.value,
            progress=progress,
        )
    print_result(tabulate_dialogues([folder]))


def methods_of(methods: str | None, settings: Settings | None, budget: str | None) -> tuple[list[str], int | float]:
    """Methods as they are written, and the budget of those that have none of their own."""
    from sinkscope.bench.methods import SHARE, at_settings, check_methods, parse_budget

    if settings is Settings.paper and budget is not None:
        raise SinkscopeError(f"--budget {budget}: --settings paper has budgets of its own; give one of them")
    usual = {None: "256", Settings.paper: "1024", Settings.equal: str(SHARE)}[settings]
    share = parse_budget(budget or usual)
    names = words(methods if methods is not None else POLICIES)
    check_methods(names)
    if settings is not None:
        known = [] if methods is None else names
        names = at_settings(known, settings.value, share if settings is Settings.equal else SHARE)
    return names, share


def dialogues_of(source: str, count: int | None, seed: int) -> "tuple[Dialogue, ...]":
    """The dialogues of a file, or those of the recall model."""
    from sinkscope.bench.dialogues.form import read_dialogues
    from sinkscope.bench.dialogues.recall import TASK, recall_dialogues

    if source == TASK:
        return recall_dialogues(count or 10, seed=seed)
    found = read_dialogues(source)
    if count is not None and count > len(found):
        raise SinkscopeError(f"--count {count}: {Path(source).name} has {len(found)} dialogues")
    return found[:count]


def words(text: str) -> list[str]:
    """What stands between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]
