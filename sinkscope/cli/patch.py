"""`sinkscope patch make` and `sinkscope patch eval`."""

from pathlib import Path
from typing import Annotated

import typer

from sinkscope._console import Progress, note
from sinkscope.cli.app import app
from sinkscope.cli.common import (
    BackendOption,
    Bos,
    Device,
    DType,
    Html,
    Json,
    MaxRepeats,
    Model,
    Png,
    Revision,
    Seed,
    Text,
    check_outputs,
    deliver,
    open_model,
)
from sinkscope.errors import SinkscopeError

group = typer.Typer(name="patch", help="Make a patch that repairs repetition, and measure what it costs.")
app.add_typer(group)

Pieces = Annotated[int, typer.Option(min=2, help="Pieces of held-out text.")]
Length = Annotated[int, typer.Option(min=8, help="Tokens of a piece.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows that run together.")]


@group.command("make")
def make_command(
    out: Annotated[str, typer.Option(metavar="FILE", help="Where the patch is written.")],
    model: Model = None,
    revision: Revision = None,
    backend: BackendOption = None,
    device: Device = None,
    dtype: DType = None,
    bos: Bos = None,
    text: Text = None,
    token: Annotated[
        list[str] | None, typer.Option(help="Repeat this word (may be given again).", show_default="16 of the text")
    ] = None,
    max_repeats: MaxRepeats = None,
    limit: Annotated[float, typer.Option(min=0, help="Largest relative rise of the perplexity.")] = 0.01,
    pieces: Pieces = 32,
    length: Length = 256,
    batch_size: BatchSize = 8,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """The smallest patch that keeps repeated tokens from becoming sinks; refuses one that harms."""
    check_outputs(json, html, png)
    check_outputs(out)
    if out in ("-", json, html, png):
        raise SinkscopeError(f"--out {out}: give the patch a file of its own, such as patch.json")

    from sinkscope.sinks.patch.make import make_patch

    with Progress() as progress:
        result = make_patch(
            open_model(model, backend, revision=revision, device=device, dtype=dtype),
            bos=bos,
            text=text,
            tokens=token,
            max_repeats=max_repeats,
            limit=limit,
            pieces=pieces,
            length=length,
            batch_size=batch_size,
            seed=seed,
            device=device,
            dtype=dtype,
            revision=revision,
            progress=progress,
        )
    if result.verdict == "made":
        result.patch.save(out)
    deliver(result, json, html, png)
    if result.verdict == "refused":  # a script that goes on to use the patch must not
        raise SinkscopeError(f"no patch was written: {result.reason}", page="no-sink")
    if result.verdict != "made":
        note(f"{Path(out).name} was not written: there is nothing to patch")


@group.command("eval")
def eval_command(
    patch: Annotated[Path, typer.Option(metavar="FILE", help="patch.json.")],
    model: Model = None,
    revision: Revision = None,
    backend: BackendOption = None,
    device: Device = None,
    dtype: DType = None,
    bos: Bos = None,
    text: Text = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(metavar="A,B,...", help="Tasks of lm-evaluation-harness, or .yaml files (may be given again)."),
    ] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question.", show_default="the task's")
    ] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="Of each task.", show_default="all")] = None,
    pieces: Pieces = 32,
    length: Length = 256,
    batch_size: BatchSize = 8,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Perplexity and benchmarks: no patch, the patch, and one of as many random neurons."""
    check_outputs(json, html, png)

    from sinkscope.interventions.sink_patch import read_patch
    from sinkscope.sinks.patch.evaluate import evaluate_patch

    made_for = (read_patch(patch)["model"] or {}).get("name")  # before a model is opened
    with Progress() as progress:
        result = evaluate_patch(
            open_model(model, backend, revision=revision, device=device, dtype=dtype),
            patch,
            tasks=[name.strip() for some in tasks or [] for name in some.split(",") if name.strip()],
            shots=shots,
            questions=questions,
            text=text,
            pieces=pieces,
            length=length,
            batch_size=batch_size,
            bos=bos,
            seed=seed,
            device=device,
            dtype=dtype,
            revision=revision,
            progress=progress,
        )
    deliver(result, json, html, png)
    if made_for not in (None, result.model.name):
        note(f"{patch.name} was made for {made_for}, not for {result.model.name}")
