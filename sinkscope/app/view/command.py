"""The command `sinkscope view`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sinkscope.app.view.explorer import Explorer
from sinkscope.app.view.result import ModelView
from sinkscope.app.view.server import check_server, serve
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.output import read_text
from sinkscope.measure import Setup
from sinkscope.results.console import end_bar


@partial(checks_arguments, others=Setup.open)
def view_model(
    model: Any = None,
    *,
    text: str | Path | None = None,
    port: Annotated[int, Field(ge=0, le=65535)] = 0,
    to_files: Any = True,
    **settings: Any,
) -> ModelView | None:
    """Explore a model on a text: norms, attention, heads, the circuit, and what edits change.

    Without a file to write, the page is served on this machine only, at an address that it prints, until Ctrl-C. Other
    texts can then be typed, and any neuron or head switched off. With --html the page is a file that stands alone.

    Args:
        model: A short name, hub id, folder or .gguf file; from Python also a live model. By default the bundled model.
        text: The text; - is standard input. By default a story.
        port: Port of the live page. By default a free one.
        to_files: What is wanted of the result; if nothing is, the live page is served.
        settings: As for `sinkscope.measure.Setup.open`.
    """
    if not to_files:
        check_server()
    given: str | None = None
    if text is not None:
        given = read_text(str(text))
    explorer = Explorer.open(model, **settings)
    if to_files:
        return explorer.view(given)
    explorer.text = given

    def ready(address: str) -> None:
        print(f"{explorer.setup.target.name} is at {address} until Ctrl-C.", flush=True)

    end_bar(settings.get("progress"))
    serve(explorer, port, ready)
    return None
