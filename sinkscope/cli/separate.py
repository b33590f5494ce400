"""`sinkscope separate`."""

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


@app.command("separate")
def separate_command(
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
    count: Annotated[int, typer.Option(min=4, help="Tokens of the text to put first.")] = 1024,
    texts: Annotated[int, typer.Option(min=2, help="Pieces of text, 64 tokens each.")] = 128,
    layer: Annotated[int, typer.Option(min=0, help="Whose attention.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of a pass.")] = 64,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Whether a plane, or one neuron, tells first from later tokens after an attention layer."""
    check_outputs(json, html, png)

    from sinkscope.sinks.first_token.separate import separability

    with Progress() as progress:
        result = separability(
            open_model(model, backend, revision=revision, device=device, dtype=dtype),
            bos=bos,
            text=text,
            tokens=token,
            count=count,
            texts=texts,
            layer=layer,
            batch_size=batch_size,
            seed=seed,
            device=device,
            dtype=dtype,
            revision=revision,
            progress=progress,
        )
    deliver(result, json, html, png)
