"""`sinkscope overlap`."""

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
    open_model,
)


@app.command("overlap")
def overlap_command(
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
    count: Annotated[int, typer.Option(min=2, help="Pieces of text, or prompts of the file.")] = 6,
    length: Annotated[
        int | None, typer.Option(help="Most tokens of each.", show_default="the context; ordinary text 512")
    ] = None,
    eta: Annotated[
        list[float] | None,
        typer.Option(help="Share of all lines to choose (may be given again).", show_default="0.1, 0.2, 0.3"),
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option(min=0, help="Measure this layer (may be given again).", show_default="all")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Of the answers; 0: no questions.")] = 48,
    budget: Annotated[
        list[float] | None,
        typer.Option(
            help="Share of a prompt's tokens that are important (may be given again).", show_default="0.05, 0.1, 0.15"
        ),
    ] = None,
    window: Annotated[int, typer.Option(min=1, help="Queries of a window and of a block.")] = 16,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Whether the heaviest lines agree between texts and halves, and the important tokens between windows."""
    check_outputs(json, html, png)

    from sinkscope.attention._line_tokens import BUDGETS
    from sinkscope.attention.overlap import ETAS, line_overlap

    with Progress() as progress:
        result = line_overlap(
            open_model(model, backend, revision=revision, device=device, dtype=dtype),
            data=data,
            count=count,
            length=length,
            etas=eta or ETAS,
            layers=layer,
            max_new_tokens=max_new_tokens,
            budgets=budget or BUDGETS,
            window=window,
            bos=bos,
            text=text,
            seed=seed,
            device=device,
            dtype=dtype,
            revision=revision,
            progress=progress,
        )
    deliver(result, json, html, png)
