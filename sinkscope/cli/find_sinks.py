"""`sinkscope find-sinks`."""

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
    Text,
    check_outputs,
    deliver,
    open_model,
)


@app.command("find-sinks")
def find_sinks_command(
    model: Model = None,
    revision: Revision = None,
    backend: BackendOption = None,
    device: Device = None,
    dtype: DType = None,
    bos: Bos = None,
    text: Text = None,
    all_layers: Annotated[bool, typer.Option("--all-layers", help="Read every layer; adds the sink rate.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Every layer, and massive activations, value drain, secondary sinks.")
    ] = False,
    top_k: Annotated[int, typer.Option(min=1, help="Neurons to ablate.")] = 8,
    token: Annotated[
        list[str] | None, typer.Option(help="Repeat this word (may be given again).", show_default="five of the text")
    ] = None,
    max_repeats: MaxRepeats = None,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Which layer and which neurons make the attention sink, proven by ablation against a control."""
    check_outputs(json, html, png)

    from sinkscope.sinks.first_token.find import find_sinks

    opened, also = open_model(model, backend, revision=revision, device=device, dtype=dtype), {}
    with Progress() as progress:
        result = find_sinks(
            opened,
            bos=bos,
            text=text,
            all_layers=all_layers or everything,
            top_k=top_k,
            tokens=token,
            max_repeats=max_repeats,
            seed=seed,
            device=device,
            dtype=dtype,
            revision=revision,
            progress=progress,
        )
        if everything:
            from sinkscope.sinks.first_token.massive import massive_activations

            also["massive"] = massive_activations(
                opened, bos=bos, text=text, seed=seed, device=device, dtype=dtype, revision=revision, progress=progress
            )
    deliver(result, json, html, png, also)
