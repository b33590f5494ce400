"""`sinkscope dialogues fidelity`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sinkscope._console import Progress, print_result
from sinkscope.cli.common import Backend, BackendOption, Device, DType, Revision, Seed, open_model
from sinkscope.cli.dialogues import group
from sinkscope.cli.dialogues_run import (
    BudgetOption,
    ChatOption,
    MethodsOption,
    SettingsOption,
    dialogues_of,
    methods_of,
    words,
)
from sinkscope.errors import SinkscopeError

TEXT = "text"


class Along(StrEnum):
    """Whose answers."""

    full = "full"
    gold = "gold"


@group.command("fidelity")
def fidelity_command(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where numbers are kept; given again, it goes on.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Short name, hub id, folder; recall is the recall model of the package.",
            show_default="recall; for text the model in the package",
        ),
    ] = None,
    revision: Revision = None,
    backend: BackendOption = Backend.hf,
    device: Device = None,
    dtype: DType = None,
    dialogues: Annotated[
        str,
        typer.Option(
            metavar="FILE|recall|text",
            help="What `dialogues build` wrote; recall; text: pieces of that in the package.",
        ),
    ] = "recall",
    count: Annotated[
        int | None, typer.Option(min=1, help="Dialogues.", show_default="10 of recall; 8 of text; all of a file")
    ] = None,
    along: Annotated[
        Along | None,
        typer.Option(help="Answers of the full cache, or right ones.", show_default="full; for text gold"),
    ] = None,
    methods: MethodsOption = None,
    settings: SettingsOption = None,
    positions: Annotated[
        str | None, typer.Option(help="Places of the question, with commas between.", show_default="end")
    ] = None,
    budget: BudgetOption = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of text: tokens of a prompt.", show_default="512")
    ] = None,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Longer answers are cut there.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Turns that run together.")] = 1,
    chat: ChatOption = False,
    seed: Seed = 0,
) -> None:
    """KL and top-1 agreement with full attention, and the attention mass kept, along the same text."""
    names, share = methods_of(methods, settings, budget)

    from sinkscope.bench.dialogues.asking import check_positions
    from sinkscope.bench.dialogues.fidelity import run_fidelity, text_dialogues
    from sinkscope.bench.dialogues.fidelity_table import tabulate_fidelity
    from sinkscope.bench.dialogues.recall import TASK

    places = check_positions(words(positions if positions is not None else "end"))
    texts = dialogues == TEXT
    if texts and positions is not None:
        raise SinkscopeError(f"--positions {positions}: pieces of a text have no question; leave it out")
    if not texts and prompt_tokens is not None:
        raise SinkscopeError(f"--prompt-tokens {prompt_tokens} is of --dialogues text: leave it out for {dialogues}")
    some = () if texts else dialogues_of(dialogues, count, seed)
    opened = open_model(model or (None if texts else TASK), backend, revision=revision, device=device, dtype=dtype)
    if texts:
        from sinkscope.models.target import Target

        tokenizer = Target.of(opened).tokenizer
        if tokenizer is None:
            raise SinkscopeError("--dialogues text needs a model with a tokenizer: give one that carries it")
        some = text_dialogues(tokenizer, count or 8, prompt_tokens=prompt_tokens or 512, answer_tokens=answer_tokens)
    with Progress() as progress:
        folder = run_fidelity(
            opened,
            some,
            names,
            out=out,
            along=(along or (Along.gold if texts else Along.full)).value,
            positions=places,
            budget=share,
            max_new_tokens=answer_tokens,
            batch_size=batch_size,
            chat=chat,
            progress=progress,
        )
    print_result(tabulate_fidelity([folder]))
