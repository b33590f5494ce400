"""`ss.view`: a model on a text in a notebook."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sinkscope.app.view.explorer import Explorer
from sinkscope.app.view.page import SCRIPTS, source, view_page
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.output import write_output
from sinkscope.files.provenance import install_command


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
        raise SinkscopeError(f"a widget needs anywidget: {install_command('view')}, or run sinkscope view")
    import anywidget
    import traitlets

    explorer = Explorer.open(model, **options)
    explorer.text = text
    shown = explorer.view(text)

    class ViewWidget(anywidget.AnyWidget):
        _esm = source(*SCRIPTS)
        _css = source("view.css")
        view = traitlets.Dict().tag(sync=True)
        result = shown

        def save_html(self, path: str | Path) -> Path:
            return write_output(path, view_page(shown, shown.model.name))

    widget = ViewWidget(view=shown.to_dict())

    def receive(_: Any, message: dict[str, Any], _buffers: Any) -> None:
        widget.send({"number": message["number"], "answer": explorer.answer(message["request"])})

    widget.on_msg(receive)
    return widget
