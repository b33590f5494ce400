"""`sinkscope dialogues`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sinkscope._console import note
from sinkscope.cli.app import app
from sinkscope.cli.common import Revision, Seed
from sinkscope.errors import SinkscopeError

group = typer.Typer(name="dialogues", help="Dialogues of several turns, with the question at begin, middle and end.")
app.add_typer(group)


@group.callback()
def _group() -> None:  # pyright: ignore[reportUnusedFunction]
    """Dialogues of several turns, with the question at begin, middle and end."""


class FormName(StrEnum):
    """How the paper's algorithms are read."""

    faithful = "faithful"
    repaired = "repaired"


@group.command("build")
def build_command(
    task: Annotated[str, typer.Option(help="A task of LongBench (qasper), of SCBench (scbench_kv), or recall.")],
    out: Annotated[str, typer.Option(metavar="FILE", help="Where the dialogues are written, as JSON lines.")],
    source: Annotated[
        str | None, typer.Option(metavar="PATH|hub", help="The task's file, its folder, LongBench's data.zip, or hub.")
    ] = None,
    form: Annotated[FormName, typer.Option(help="The algorithms as printed, or repaired.")] = FormName.repaired,
    turns: Annotated[int | None, typer.Option(min=1, show_default="the paper's: 2 or 3; recall 3; scbench all")] = None,
    count: Annotated[
        int | None,
        typer.Option(min=1, help="Dialogues.", show_default="the paper's: 500, 199; recall 100; scbench all"),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Count tokens with the tokenizer of this model.")] = None,
    revision: Revision = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Count tokens with this tokenizer, instead of --model.")
    ] = None,
    total_tokens: Annotated[
        int | None, typer.Option(min=1, help="recall: tokens of all turns, of unequal lengths.", show_default="768")
    ] = None,
    hops: Annotated[
        int | None, typer.Option(min=1, help="recall: facts that an answer runs through.", show_default="2")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace --out if it is there.")] = False,
    seed: Seed = 0,
) -> None:
    """Make dialogues from files of LongBench, beside the paper's numbers, or SCBench, or for the recall model."""
    from sinkscope.bench.dialogues.form import dialogue_line, write_dialogues
    from sinkscope.bench.dialogues.recall import TASK, recall_dialogues
    from sinkscope.bench.sets import check_out, write_set

    check_out(out, force=force)
    if task == TASK:
        if source is not None or model is not None or tokenizer is not None:
            raise SinkscopeError("--source, --model and --tokenizer mean nothing for recall, which is made up")
        wanted, n = turns or 3, count or 100
        total, facts = total_tokens or 768, hops or 2
        made = recall_dialogues(n, turns=wanted, total=total, hops=facts, seed=seed)
        print(f"recall        {n} dialogues of {wanted} turns, {total} tokens, {facts} hops")
        note(f"wrote {write_dialogues(made, out).name}")
        return

    from sinkscope.bench.dialogues.build import build
    from sinkscope.bench.dialogues.scbench import build_shared
    from sinkscope.bench.dialogues.tasks import task_of
    from sinkscope.bench.loopbench.longbench import read_longbench
    from sinkscope.bench.loopbench.tokens import open_tokenizer

    shared = task.startswith("scbench")
    if not shared:
        task_of(task)
    if total_tokens is not None or hops is not None:
        raise SinkscopeError(f"--total-tokens and --hops are of recall: leave them out for {task}")
    if shared and form is not FormName.repaired:
        raise SinkscopeError(f"--form means nothing for {task}, whose dialogues are there already")
    if source is None:
        whose = "SCBench" if shared else "LongBench"
        raise SinkscopeError(f"--task {task} is made from {whose}'s {task}.jsonl: give --source PATH or hub")
    counting = open_tokenizer(model, tokenizer, revision)[0] if model is not None or tokenizer is not None else None
    if shared:
        built = build_shared(task, source, turns=turns, count=count, tokenizer=counting)
    else:
        records = read_longbench(task, source)
        built = build(task, records, form=form.value, turns=turns, count=count, seed=seed, tokenizer=counting)
    file, manifest = write_set([dialogue_line(dialogue) for dialogue in built.made], built.manifest, out, force=force)
    print(built.text())
    note(f"wrote {file.name} and {manifest.name}")
