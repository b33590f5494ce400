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
    task: Annotated[str, typer.Option(help="A task of LongBench, such as qasper, or recall (no source needed).")],
    out: Annotated[str, typer.Option(metavar="FILE", help="Where the dialogues are written, as JSON lines.")],
    source: Annotated[
        str | None, typer.Option(metavar="PATH|hub", help="LongBench's .jsonl file, its folder or data.zip, or hub.")
    ] = None,
    form: Annotated[FormName, typer.Option(help="The algorithms as printed, or repaired.")] = FormName.repaired,
    turns: Annotated[int | None, typer.Option(min=1, show_default="the paper's: 2 or 3; recall 3")] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Dialogues.", show_default="the paper's: 500 or 199; recall 100")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Count tokens with the tokenizer of this model.")] = None,
    revision: Revision = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Count tokens with this tokenizer, instead of --model.")
    ] = None,
    total_tokens: Annotated[int, typer.Option(min=1, help="recall: tokens of all turns, of unequal lengths.")] = 768,
    hops: Annotated[int, typer.Option(min=1, help="recall: facts that an answer runs through.")] = 2,
    force: Annotated[bool, typer.Option("--force", help="Replace --out if it is there.")] = False,
    seed: Seed = 0,
) -> None:
    """Make dialogues from LongBench's files, beside the paper's numbers, or for the recall model."""
    if out == "-":
        raise SinkscopeError("--out -: give the dialogues a file of their own, such as qasper.jsonl")

    import json

    from sinkscope.bench.dialogues.form import write_dialogues
    from sinkscope.bench.dialogues.recall import TASK, recall_dialogues
    from sinkscope.bench.loopbench.build import check_out

    check_out(out, force=force)
    if task == TASK:
        if source is not None or model is not None or tokenizer is not None:
            raise SinkscopeError("--source, --model and --tokenizer mean nothing for recall, which is made up")
        wanted, n = turns or 3, count or 100
        made = recall_dialogues(n, turns=wanted, total=total_tokens, hops=hops, seed=seed)
        print(f"recall        {n} dialogues of {wanted} turns, {total_tokens} tokens, {hops} hops")
        note(f"wrote {write_dialogues(made, out).name}")
        return

    from sinkscope.bench.dialogues.build import build
    from sinkscope.bench.dialogues.tasks import task_of
    from sinkscope.bench.loopbench.longbench import read_longbench
    from sinkscope.bench.loopbench.prompts import manifest_path
    from sinkscope.bench.loopbench.tokens import open_tokenizer
    from sinkscope.output import write_atomic

    task_of(task)
    if source is None:
        raise SinkscopeError(f"--task {task} is made from LongBench's {task}.jsonl: give --source PATH or hub")
    counting = open_tokenizer(model, tokenizer, revision)[0] if model is not None or tokenizer is not None else None
    records = read_longbench(task, source)
    built = build(task, records, form=form.value, turns=turns, count=count, seed=seed, tokenizer=counting)
    file = write_dialogues(built.dialogues, out)
    manifest = write_atomic(manifest_path(out), json.dumps(built.manifest, indent=1, ensure_ascii=False) + "\n")
    print(built.text())
    note(f"wrote {file.name} and {manifest.name}")
