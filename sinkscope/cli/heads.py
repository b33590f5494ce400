"""`sinkscope heads`."""

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
    Model,
    Png,
    Revision,
    Seed,
    Text,
    check_outputs,
    deliver,
    open_model,
)


@app.command("heads")
def heads_command(
    model: Model = None,
    revision: Revision = None,
    backend: BackendOption = None,
    device: Device = None,
    dtype: DType = None,
    bos: Bos = None,
    text: Text = None,
    token: Annotated[
        list[str] | None, typer.Option(help="Put this word first (may be given again).", show_default="of the text")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Tokens of the text to put first.")] = 32,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows of a pass.", show_default="by memory")] = None,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Which attention heads mark the first token, by what replacing their output does to the sink neurons."""
    check_outputs(json, html, png)

    from sinkscope.sinks.mark import marking_heads

    with Progress() as progress:
        result = marking_heads(
            open_model(model, backend, revision=revision, device=device, dtype=dtype),
            bos=bos,
            text=text,
            tokens=token,
            count=count,
            batch_size=batch_size,
            seed=seed,
            device=device,
            dtype=dtype,
            revision=revision,
            progress=progress,
        )
    deliver(result, json, html, png)
