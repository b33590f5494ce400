"""The command `sinkscope view`, and `ss.view` in a notebook."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sinkscope.app.view.explorer import Explorer
from sinkscope.app.view.page import SCRIPTS, STYLE, check_server, serve, view_page
from sinkscope.app.view.result import ModelView
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.output import read_text, write_output
from sinkscope.measure import Setup
from sinkscope.results.console import end_bar
from sinkscope.results.pages import source


@partial(checks_arguments, settings_of=Setup.open)
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
    elif port:
        raise SinkscopeError("--port has no effect on a page that is written: leave it out")
    shown_text = None if text is None else read_text(str(text))
    explorer = Explorer.showing(shown_text, model, **settings)
    if to_files:
        return explorer.view()
    name = explorer.setup.target.name
    end_bar(settings.get("progress"))
    serve(explorer.answer, name, port, lambda address: print(f"{name} is at {address} until Ctrl-C.", flush=True))
    return None


@checks_arguments
def view(model: object = None, text: str | None = None, **options: Any) -> Any:
    """Explore a model on a text in a notebook: tokens, heads, the circuit, and what edits change.

    As the last line of a cell, the widget shows itself. In it, another text can be typed, and neurons and heads can be
    switched off. Its `result` is what it shows at first, and `save_html(path)` writes a page that stands alone.

    Args:
        model: As for `sinkscope.measure.Setup.open`: a name or a live model. By default the model in the package.
        text: The text. By default a story.
        options: Options of `sinkscope.measure.Setup.open`, such as `tokenizer`, `device`, `bos` and `seed`.

    Raises:
        SinkscopeError: anywidget is missing, the model cannot be opened, or the text is empty or too long.
    """
    if find_spec("anywidget") is None:
        raise SinkscopeError("a widget needs anywidget: pip install anywidget, or run sinkscope view")
    import anywidget
    import traitlets

    explorer = Explorer.showing(text, model, **options)
    shown = explorer.view()

    class ViewWidget(anywidget.AnyWidget):
        _esm = source(*SCRIPTS)
        _css = source(STYLE)
        view = traitlets.Dict().tag(sync=True)
        result = shown

        def save_html(self, path: str | Path) -> Path:
            return write_output(path, view_page(shown, shown.model.name))

    widget = ViewWidget(view=shown.to_dict())

    def receive(_: Any, message: dict[str, Any], _buffers: Any) -> None:
        widget.send({"number": message["number"], "answer": explorer.answer(message["request"])})

    widget.on_msg(receive)
    return widget
