"""Options that commands share, and what every command does before and after its work."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sinkscope._console import emit, print_result
from sinkscope.errors import SinkscopeError
from sinkscope.output import check_writable, read_text


class Backend(StrEnum):
    """Kinds of model object."""

    bridge = "bridge"
    hf = "hf"
    nnsight = "nnsight"


def _fits(seed: int) -> int:
    """Torch takes no larger seed; a range in the help would only be noise."""
    if seed >= 1 << 63:
        raise typer.BadParameter(f"{seed} is too large; give a number below 2**63")
    return seed


Model = Annotated[
    str | None,
    typer.Option(help="Short name, hub id, folder or .gguf file.", show_default="the model in the package"),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
BackendOption = Annotated[Backend | None, typer.Option(help="Load the model as this kind of object.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.")]
DType = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16, float16.", show_default="the checkpoint's; read layer by layer on a CPU: float32"
    ),
]
Bos = Annotated[bool | None, typer.Option("--bos/--no-bos", help="A BOS token first.", show_default="the tokenizer's")]
Text = Annotated[Path | None, typer.Option(help="Typical text.", show_default="the text in the package")]
MaxRepeats = Annotated[int | None, typer.Option(min=1, help="Largest number of repetitions.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes; more than one run over Ray.")]
Resume = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep finished parts here, and go on from those that are there.")
]
Seed = Annotated[int, typer.Option(min=0, callback=_fits, help="Of every random choice.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Write the result as JSON.")]
Html = Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write tables and figures into one file.")]
Png = Annotated[
    str | None, typer.Option("--png", metavar="FILE", help="Write the figure; needs kaleido and a browser.")
]


def open_model(model: str | None, backend: Backend | None, **options: Any) -> Any:
    """The model as the kind of object that was asked for; a name stays a name if none was."""
    if backend is None:
        return model
    from sinkscope.models.load import load

    return load(model, backend=backend.value, **{k: v for k, v in options.items() if v is not None})


def check_outputs(json: str | None = None, html: str | None = None, png: str | None = None, **more: str | None) -> None:
    """Refuse before the work what could not be written after it; `more` are files that only this command writes."""
    paths = (json, html, png, *more.values())
    files = [path for path in paths if path not in (None, "-")]
    written = [str(check_writable(path)) for path in files if path is not None]
    for path in written:
        if written.count(path) > 1 and not path.startswith("/dev/"):
            raise SinkscopeError(f"{Path(path).name} is given for two outputs: give each its own file")
    if "-" in paths[1:]:
        raise SinkscopeError("only --json writes to standard output with -: give the name of a file")
    if png is not None:
        from sinkscope.html import check_png

        check_png()


def deliver(
    result: Any, json: str | None, html: str | None, png: str | None, also: Mapping[str, Any] | None = None
) -> None:
    """Standard output first: what cannot be written to a file is at least seen.

    Args:
        result: what the command found.
        json: file for it.
        html: file for it.
        png: file for its figure.
        also: further results, printed below; in the JSON each is a key beside the envelope's own.
    """
    more = also or {}
    if json != "-":
        print_result(result)
        for other in more.values():
            print()
            print_result(other)
    if json is not None:
        emit(json, result.to_json(**more))
    if html is not None:
        from sinkscope.html import save_html

        save_html(result, html, *more.values())
    if png is not None:
        from sinkscope.html import save_png

        save_png(result, png)


def layer_head(name: str) -> tuple[int, int]:
    """What `--head LAYER.HEAD` names."""
    layer, dot, head = name.partition(".")
    if not (dot and layer.isdigit() and head.isdigit()):
        raise SinkscopeError(f"--head {name!r}: expected layer and head with a dot between, such as 5.3")
    return int(layer), int(head)


def read_prompt(name: str) -> str:
    """Text of a file, or of standard input for "-"; it may not be empty."""
    text = read_text(name)
    if not text.strip():
        raise SinkscopeError("the prompt is empty: write at least one word into the file")
    return text
