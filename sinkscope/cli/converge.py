"""`sinkscope converge`."""

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
    Revision,
    Seed,
    check_outputs,
    deliver,
    open_model,
)


@app.command("converge")
def converge_command(
    model: Model = None,
    revision: Revision = None,
    backend: BackendOption = None,
    device: Device = None,
    dtype: DType = None,
    bos: Bos = None,
    token: Annotated[
        list[str] | None, typer.Option(help="Repeat this word (may be given again).", show_default="the paper's four")
    ] = None,
    prefix: Annotated[
        list[str] | None,
        typer.Option(help="Text before the repetitions (may be given again).", show_default="some prefix:"),
    ] = None,
    max_repeats: MaxRepeats = None,
    all_layers: Annotated[bool, typer.Option("--all-layers", help="Read every layer, not only the first.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Tokens of one pass.")] = 4,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """How close repetition brings a token to being the first one: distance over n, and theorem 4.1's bound."""
    check_outputs(json, html, png)

    from sinkscope.sinks.repetition.converge import PREFIX, convergence

    with Progress() as progress:
        result = convergence(
            open_model(model, backend, revision=revision, device=device, dtype=dtype),
            bos=bos,
            tokens=token,
            prefix=prefix or PREFIX,
            max_repeats=max_repeats,
            all_layers=all_layers,
            batch_size=batch_size,
            seed=seed,
            device=device,
            dtype=dtype,
            revision=revision,
            progress=progress,
        )
    deliver(result, json, html, png)
