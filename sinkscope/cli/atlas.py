"""`sinkscope atlas`."""

from typing import Annotated

import typer

from sinkscope._console import Progress
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
    Resume,
    Revision,
    Seed,
    Text,
    Workers,
    check_outputs,
    deliver,
    open_model,
)


@app.command("atlas")
def atlas_command(
    model: Model = None,
    revision: Revision = None,
    backend: BackendOption = None,
    device: Device = None,
    dtype: DType = None,
    bos: Bos = None,
    text: Text = None,
    token: Annotated[
        list[str] | None, typer.Option(help="Only this token (may be given again).", show_default="the vocabulary")
    ] = None,
    max_repeats: MaxRepeats = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Positions in a pass.")] = 4096,
    workers: Workers = 1,
    resume: Resume = None,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """For every token of the vocabulary: does repeating it make a sink, and after how many repetitions."""
    check_outputs(json, html, png)

    from sinkscope.sinks.repetition.atlas import sink_atlas

    with Progress() as progress:
        result = sink_atlas(
            open_model(model, backend, revision=revision, device=device, dtype=dtype),
            bos=bos,
            text=text,
            tokens=token,
            max_repeats=max_repeats,
            batch_size=batch_size,
            workers=workers,
            resume=resume,
            seed=seed,
            device=device,
            dtype=dtype,
            revision=revision,
            progress=progress,
        )
    deliver(result, json, html, png)
