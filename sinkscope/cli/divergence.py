"""`sinkscope divergence`."""

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


@app.command("divergence")
def divergence_command(
    model: Model = None,
    revision: Revision = None,
    backend: BackendOption = None,
    device: Device = None,
    dtype: DType = None,
    bos: Bos = None,
    text: Text = None,
    token: Annotated[
        list[str] | None, typer.Option(help="Repeat this word (may be given again).", show_default="five of the text")
    ] = None,
    prefix: Annotated[str, typer.Option(help="Text before the words in half of the runs.")] = "Repeat:",
    patch: Annotated[
        str | None, typer.Option(metavar="FILE", help="patch.json.", show_default="the causal neurons, searched")
    ] = None,
    max_repeats: MaxRepeats = None,
    repeats: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Continue after so many (may be given again).", show_default="50 and 400"),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 100,
    corpus: Annotated[
        str | None, typer.Option(metavar="DIR|stdlib", help="Search the answers for verbatim pieces of this text.")
    ] = None,
    index: Annotated[
        str | None, typer.Option(metavar="FILE", help="Where its index is kept.", show_default="beside the corpus")
    ] = None,
    controls: Annotated[int, typer.Option(min=0, help="Ordinary prompts to compare with.")] = 20,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows that run together.")] = 8,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Repeat a word: does the model go on, where does it leave off, and is what follows training text?"""
    check_outputs(json, html, png)

    from sinkscope.sinks.repetition.divergence import divergence

    with Progress() as progress:
        result = divergence(
            open_model(model, backend, revision=revision, device=device, dtype=dtype),
            tokens=token,
            prefix=prefix,
            patch=patch,
            max_repeats=max_repeats,
            repeats=repeats,
            new_tokens=new_tokens,
            corpus=corpus,
            index=index,
            controls=controls,
            batch_size=batch_size,
            bos=bos,
            text=text,
            seed=seed,
            device=device,
            dtype=dtype,
            revision=revision,
            progress=progress,
        )
    deliver(result, json, html, png)
