"""`sinkscope attack`."""

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


@app.command("attack")
def attack_command(
    detect: Annotated[bool, typer.Option("--detect", help="How well sink neurons give the attack away.")] = False,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of a sequence (may be given again).", show_default="8, 32, 128")
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of each kind and length.")] = 1000,
    searched: Annotated[
        int | None, typer.Option(min=0, help="Sequences of each search; 0: no search.", show_default="16")
    ] = None,
    prefix: Annotated[
        str | None, typer.Option(help="Text of the chat before the attack.", show_default="the chat template's")
    ] = None,
    model: Model = None,
    revision: Revision = None,
    backend: BackendOption = None,
    device: Device = None,
    dtype: DType = None,
    bos: Bos = None,
    text: Text = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in a pass.")] = 64,
    workers: Annotated[int, typer.Option(min=1, help="Processes; more than one run over Ray.")] = 1,
    resume: Annotated[str | None, typer.Option(help="Folder for finished work; go on from there.")] = None,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Sequences without a repeated token that are sinks all over: how often they succeed, or how to detect them."""
    if detect:
        for name, value in (("--searched", searched), ("--resume", resume), ("--workers", workers > 1 or None)):
            if value is not None:
                raise SinkscopeError(f"{name} belongs to the attack, --detect has no use for it: leave one of them out")
    check_outputs(json, html, png)

    from sinkscope.sinks.attack.attack import LENGTHS, cluster_attack
    from sinkscope.sinks.attack.detect import detect_attack

    with Progress() as progress:
        opened = open_model(model, backend, revision=revision, device=device, dtype=dtype)
        common: dict[str, Any] = {
            "lengths": length or LENGTHS,
            "sequences": sequences,
            "prefix": prefix,
            "bos": bos,
            "text": text,
            "batch": batch_size,
            "seed": seed,
            "revision": revision,
            "device": device,
            "dtype": dtype,
            "progress": progress,
        }
        if detect:
            result = detect_attack(opened, **common)
        else:
            more = {} if searched is None else {"searched": searched}
            result = cluster_attack(opened, workers=workers, resume=resume, **more, **common)
    deliver(result, json, html, png)
