"""`sinkscope lines`."""

from pathlib import Path
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
    layer_head,
    open_model,
)


@app.command("lines")
def lines_command(
    model: Model = None,
    revision: Revision = None,
    backend: BackendOption = None,
    device: Device = None,
    dtype: DType = None,
    bos: Bos = None,
    text: Text = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts: samsum.jsonl of LongBench, LongEval's topics, or JSON lines."),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Pieces of text, or prompts of the file.")] = 4,
    length: Annotated[
        int | None, typer.Option(help="Most tokens of each.", show_default="the context; ordinary text 512")
    ] = None,
    eta: Annotated[
        list[float] | None,
        typer.Option(help="Share of all lines to choose (may be given again).", show_default="0.05 to 0.3"),
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option(min=0, help="Measure this layer (may be given again).", show_default="all")
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(metavar="LAYER.HEAD", help="Show this attention map.", show_default="one with both kinds"),
    ] = None,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """How much of the attention of every head the heaviest vertical and slash lines carry."""
    check_outputs(json, html, png)
    shown = None if head is None else layer_head(head)

    from sinkscope.attention.lines import ETAS, line_weights

    with Progress() as progress:
        result = line_weights(
            open_model(model, backend, revision=revision, device=device, dtype=dtype),
            data=data,
            count=count,
            length=length,
            etas=eta or ETAS,
            layers=layer,
            head=shown,
            bos=bos,
            text=text,
            seed=seed,
            device=device,
            dtype=dtype,
            revision=revision,
            progress=progress,
        )
    deliver(result, json, html, png)
