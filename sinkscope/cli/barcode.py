"""`sinkscope barcode`."""

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
    read_prompt,
)


@app.command("barcode")
def barcode_command(
    model: Model = None,
    revision: Revision = None,
    backend: BackendOption = None,
    device: Device = None,
    dtype: DType = None,
    bos: Bos = None,
    text: Text = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE|-", help="What is continued.", show_default="ordinary text")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Generation steps.")] = 512,
    layer: Annotated[
        list[int] | None, typer.Option(min=0, help="All heads of this layer (may be given again).", show_default="all")
    ] = None,
    head: Annotated[
        list[str] | None, typer.Option(metavar="LAYER.HEAD", help="This head only (may be given again).")
    ] = None,
    bins: Annotated[int, typer.Option(min=1, help="Columns that positions are summed into.")] = 512,
    raw: Annotated[bool, typer.Option("--raw", help="A column per position; for up to four heads.")] = False,
    patch: Annotated[Path | None, typer.Option(help="patch.json to run under.")] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME[:BUDGET]", help="What the KV cache keeps, such as streaming:512.")
    ] = None,
    guard: Annotated[bool, typer.Option("--guard", help="Break repetition loops (LoopGuard).")] = False,
    control: Annotated[bool, typer.Option(help="Also along ordinary text.")] = True,
    live: Annotated[bool, typer.Option("--live", help="Show it while it grows, on a terminal.")] = False,
    npz: Annotated[str | None, typer.Option(metavar="FILE", help="Write every step of every head.")] = None,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Attention of heads over generation steps, step x position; a loop beside ordinary text."""
    check_outputs(json, html, png, npz=npz)
    prompt = None if prompt_file is None else read_prompt(prompt_file)
    heads = None if not head else [layer_head(name) for name in head]
    if patch is not None:
        from sinkscope.interventions.sink_patch import read_patch

        read_patch(patch)

    from sinkscope.attention._decode import acting
    from sinkscope.attention.barcode import barcode

    edit = acting(policy, guard)
    opened = open_model(model, backend, revision=revision, device=device, dtype=dtype)
    with Progress() as progress:
        result = barcode(
            opened,
            prompt,
            layers=layer,
            heads=heads,
            max_new_tokens=max_new_tokens,
            bins=bins,
            raw=raw,
            patch=patch,
            interventions=edit,
            control=control,
            live=live,
            bos=bos,
            text=text,
            seed=seed,
            device=device,
            dtype=dtype,
            revision=revision,
            progress=None if live else progress,  # one of them draws
        )
    deliver(result, json, html, png)
    if npz is not None:
        result.save_arrays(npz)
