"""`sinkscope locking`."""

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
    read_prompt,
)


@app.command("locking")
def locking_command(
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
    period: Annotated[int | None, typer.Option(min=1, help="Of the loop.", show_default="found at its end")] = None,
    suffix: Annotated[int, typer.Option(min=1, help="Positions that count as the suffix.")] = 256,
    window: Annotated[int, typer.Option(min=1, help="Tokens of the type-token ratio.")] = 256,
    patch: Annotated[Path | None, typer.Option(help="patch.json to run under.")] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME[:BUDGET]", help="What the KV cache keeps, such as streaming:512.")
    ] = None,
    guard: Annotated[bool, typer.Option("--guard", help="Break repetition loops (LoopGuard).")] = False,
    control: Annotated[bool, typer.Option(help="Hold against ordinary text.")] = True,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Which heads a loop locks onto its own repetition, and when."""
    check_outputs(json, html, png)
    prompt = None if prompt_file is None else read_prompt(prompt_file)
    if patch is not None:
        from sinkscope.interventions.sink_patch import read_patch

        read_patch(patch)

    from sinkscope.attention._decode import acting
    from sinkscope.attention.locking import locking

    edit = acting(policy, guard)
    with Progress() as progress:
        result = locking(
            open_model(model, backend, revision=revision, device=device, dtype=dtype),
            prompt,
            max_new_tokens=max_new_tokens,
            layers=layer,
            period=period,
            suffix=suffix,
            window=window,
            patch=patch,
            interventions=edit,
            control=control,
            bos=bos,
            text=text,
            seed=seed,
            device=device,
            dtype=dtype,
            revision=revision,
            progress=progress,
        )
    deliver(result, json, html, png)
