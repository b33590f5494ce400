"""`sinkscope generate`."""

from pathlib import Path
from typing import Annotated, Any

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
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME[:BUDGET]", help="What the KV cache keeps, such as streaming:512 or h2o:0.25."),
    ] = None,
    guard: Annotated[bool, typer.Option("--guard", help="Break repetition loops (LoopGuard).")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    seed: Seed = 0,
) -> None:
    """Continue a prompt, under a patch, a cache policy or a guard if asked: text on stdout, events on stderr."""
    prompt = read_prompt(prompt_file)
    if patch is not None:
        from sinkscope.interventions.sink_patch import read_patch

        read_patch(patch)

    from sinkscope.generate import generate
    from sinkscope.kv.registry import policy_named

    chosen = None if policy is None else policy_named(policy)
    made = generate(
        open_model(model, backend, revision=revision, device=device, dtype=dtype),
        prompt,
        patch=patch,
        policy=chosen,
        guard=guard,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        bos=bos,
        on_text=lambda _, piece: print(piece, end="", flush=True),  # what is there stays, also after Ctrl-C
    )[0]
    print()
    for event in made.events:
        note(_line(event))


def _line(event: Any) -> str:
    """One line; ranges of positions are counted rather than listed."""
    where = f"step {event.step}, position {event.position}"
    data: dict[str, Any] = {} if event.layer is None else {"layer": event.layer}
    for name, value in event.data.items():
        if name == "signals":
            data |= value
        elif name != "kept":
            data[name] = value
    return f"{event.kind}: {where}" + "".join(
        f", {name} {f'{value:.3g}' if isinstance(value, float) else value}" for name, value in data.items()
    )
