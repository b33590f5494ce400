"""`sinkscope repeat`."""

from typing import Annotated, Any

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
    Text,
    check_outputs,
    deliver,
    open_model,
)
from sinkscope.errors import SinkscopeError


@app.command("repeat")
def repeat_command(
    attention: Annotated[bool, typer.Option("--attention", help="Where attention goes, instead of norms.")] = False,
    ablate: Annotated[bool, typer.Option("--ablate", help="The norms again with sink neurons zeroed.")] = False,
    token: Annotated[
        list[str] | None,
        typer.Option(help="Repeat this word (may be given again).", show_default="words of the text or of the paper"),
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="Text before the repetitions.")] = None,
    max_repeats: MaxRepeats = None,
    layer: Annotated[
        list[int] | None, typer.Option(min=0, help="With --attention: draw this layer (may be given again).")
    ] = None,
    model: Model = None,
    revision: Revision = None,
    backend: BackendOption = None,
    device: Device = None,
    dtype: DType = None,
    bos: Bos = None,
    text: Text = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in a pass.")] = 4,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """How repetition turns a token into a sink: its norm, the attention it gets, and what ablation does to it."""
    if attention and ablate:
        raise SinkscopeError("--attention and --ablate are two measurements: give one of them at a time")
    if layer and not attention:
        raise SinkscopeError(f"--layer {layer[0]} says which layers --attention draws: give --attention, too")
    check_outputs(json, html, png)

    from sinkscope.sinks.repetition.repeat import repeat_norms
    from sinkscope.sinks.repetition.repeat_attention import repeat_attention

    with Progress() as progress:
        opened = open_model(model, backend, revision=revision, device=device, dtype=dtype)
        common: dict[str, Any] = {
            "bos": bos,
            "text": text,
            "tokens": token,
            "prefix": prefix,
            "max_repeats": max_repeats,
            "batch_size": batch_size,
            "seed": seed,
            "device": device,
            "dtype": dtype,
            "revision": revision,
            "progress": progress,
        }
        if attention:
            result = repeat_attention(opened, layers=layer, **common)
        else:
            result = repeat_norms(opened, ablate=ablate, **common)
    deliver(result, json, html, png)
