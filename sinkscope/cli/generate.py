"""`sinkscope generate`."""

from pathlib import Path
from typing import Annotated

import typer

from sinkscope._console import note
from sinkscope.cli.app import app
from sinkscope.cli.common import (
    Backend,
    BackendOption,
    Bos,
    Device,
    DType,
    Model,
    Revision,
    Seed,
    open_model,
    read_prompt,
)


@app.command("generate")
def generate_command(
    prompt_file: Annotated[str, typer.Option(metavar="FILE|-", help="The prompt; - is standard input.")],
    model: Model = None,
    revision: Revision = None,
    backend: BackendOption = Backend.hf,
    device: Device = None,
    dtype: DType = None,
    bos: Bos = None,
    patch: Annotated[Path | None, typer.Option(help="patch.json to run under.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    seed: Seed = 0,
) -> None:
    """Continue a prompt, with a patch if one is given: text on stdout, events on stderr."""
    prompt = read_prompt(prompt_file)
    if patch is not None:
        from sinkscope.interventions.patch_file import read_patch

        read_patch(patch)

    from sinkscope.generate import generate

    made = generate(
        open_model(model, backend, revision=revision, device=device, dtype=dtype),
        prompt,
        patch=patch,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        bos=bos,
        on_text=lambda _, piece: print(piece, end="", flush=True),  # what is there stays, also after Ctrl-C
    )[0]
    print()
    for event in made.events:
        where = f"step {event.step}, position {event.position}, layer {event.layer}"
        note(f"{event.kind}: {where}" + "".join(f", {name} {value}" for name, value in event.data.items()))
