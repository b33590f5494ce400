"""`ss.view`: a model on a text in a notebook."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sinkscope.app.pages import save_html
from sinkscope.app.view.explorer import Explorer
from sinkscope.app.view.page import module, source
from sinkscope.app.view.result import ModelView
from sinkscope.errors import SinkscopeError
from sinkscope.results.options import checks_arguments


@dataclass(eq=False)
class View:
    """A model on a text. As the last line of a notebook's cell, it shows itself.

    Attributes:
        explorer: The open model.
        result: What is shown at first.
    """

    explorer: Explorer = field(repr=False)
    result: ModelView

    @cached_property
    def widget(self) -> Any:
        """The widget. In it, another text can be typed, and neurons and heads can be switched off.

        Raises:
            SinkscopeError: anywidget is missing.
        """
        if find_spec("anywidget") is None:
            raise SinkscopeError('a widget needs anywidget: pip install -e ".[view]" in the clone, or call save_html')
        import anywidget
        import traitlets

        class ViewWidget(anywidget.AnyWidget):
            _esm = module()
            _css = source("view.css")
            view = traitlets.Dict().tag(sync=True)

        widget = ViewWidget(view=self.result.to_dict())

        def receive(_: Any, message: dict[str, Any], _buffers: Any) -> None:
            widget.send({"number": message["number"], "answer": self.explorer.answer(message["request"])})

        widget.on_msg(receive)
        return widget

    def save_html(self, path: str | Path) -> Path:
        """Write the page that stands alone.

        Raises:
            SinkscopeError: The file cannot be written, or holds something else.
        """
        return save_html(self.result, path)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)


@checks_arguments
def view(model: object = None, text: str | None = None, **options: Any) -> View:
    """Explore a model on a text in a notebook: tokens, heads, the circuit, and what edits change.

    Args:
        model: As for `sinkscope.measure.Setup.open`: a name or a live model. By default the model in the package.
        text: The text. By default a story, and a repeated word if repeating makes a sink.
        options: Options of `sinkscope.measure.Setup.open`, such as `tokenizer`, `device`, `bos` and `seed`.

    Raises:
        SinkscopeError: The model cannot be opened, or the text is empty or too long.
    """
    explorer = Explorer.open(model, **options)
    explorer.text = text
    return View(explorer, explorer.view(text))
