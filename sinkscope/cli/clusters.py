"""`sinkscope clusters`."""

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
    Resume,
    Revision,
    Seed,
    Text,
    Workers,
    check_outputs,
    deliver,
    open_model,
)


@app.command("clusters")
def clusters_command(
    model: Model = None,
    revision: Revision = None,
    backend: BackendOption = None,
    device: Device = None,
    dtype: DType = None,
    bos: Bos = None,
    text: Text = None,
    token: Annotated[
        list[str] | None, typer.Option(help="Only this token (may be given again).", show_default="the vocabulary")
    ] = None,
    threshold: Annotated[float, typer.Option(help="The sink neuron fires from this share of its usual value.")] = 0.5,
    sample: Annotated[int, typer.Option(min=0, help="Tokens whose pairs are measured.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in a pass; a token takes heads + 2.")] = 2048,
    workers: Workers = 1,
    resume: Resume = None,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Which single head of layer 0 marks which token as first: the clusters of the cluster attack."""
    check_outputs(json, html, png)

    from sinkscope.sinks.attack.clusters import token_clusters

    with Progress() as progress:
        result = token_clusters(
            open_model(model, backend, revision=revision, device=device, dtype=dtype),
            bos=bos,
            text=text,
            tokens=token,
            threshold=threshold,
            sample=sample,
            batch_size=batch_size,
            workers=workers,
            resume=resume,
            seed=seed,
            device=device,
            dtype=dtype,
            revision=revision,
            progress=progress,
        )
    deliver(result, json, html, png)
