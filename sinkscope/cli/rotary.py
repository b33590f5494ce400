"""`sinkscope rotary`."""

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
    read_prompt,
)


@app.command("rotary")
def rotary_command(
    model: Model = None,
    revision: Revision = None,
    backend: BackendOption = None,
    device: Device = None,
    dtype: DType = None,
    bos: Bos = None,
    text: Text = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="Text that is continued until it loops.", show_default="ordinary text"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 512,
    layer: Annotated[
        list[int] | None, typer.Option(min=0, help="Measure this layer (may be given again).", show_default="all")
    ] = None,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Why a loop goes on: how far queries, keys and scores repeat under rotary positions."""
    check_outputs(json, html, png)
    prompt = None if prompt_file is None else read_prompt(prompt_file)

    from sinkscope.attention.rotary import rotary_invariance

    with Progress() as progress:
        result = rotary_invariance(
            open_model(model, backend, revision=revision, device=device, dtype=dtype),
            prompt,
            max_new_tokens=max_new_tokens,
            layers=layer,
            bos=bos,
            text=text,
            seed=seed,
            device=device,
            dtype=dtype,
            revision=revision,
            progress=progress,
        )
    deliver(result, json, html, png)
