"""Options that several commands have, and how their words are read."""

from __future__ import annotations

from typing import Any

import click

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import read_text

MODEL_WORD = "model_word"
"""Name of the model where it is typed without an option, as in `sinkscope find-sinks llama-2-7b`."""


class TextFile(click.ParamType):
    """The text of a file, or of standard input for "-"."""

    name = "file|-"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Read the file."""
        if ctx is not None and ctx.resilient_parsing:  # the shell completes a word
            return value
        text = read_text(value)
        if not text.strip():
            name = "prompt" if param is None else param.opts[0].removeprefix("--").removesuffix("-file")
            raise SinkscopeError(f"the {name} is empty: write at least one word into the file")
        return text


class Commas(click.ParamType):
    """Values of a type with commas between them; one that stands alone keeps the spaces around it."""

    name = "list"

    def __init__(self, kind: click.ParamType, spaces: bool) -> None:
        self.kind, self.spaces = kind, spaces  # whether others keep theirs, too

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        """Split at the commas."""
        words = [value]
        if "," in value or not value.strip():
            words = [word for word in value.split(",") if word.strip()]
            if not self.spaces:
                words = [word.strip() for word in words]
        if not words:
            flag = "" if param is None else param.opts[0]
            raise SinkscopeError(f"{flag} {value!r}: no name stands between the commas; give at least one")
        return [self.kind.convert(word, param, ctx) for word in words]


class Several(click.Option):
    """An option of several values: with commas, or given again for each. Of tokens, spaces are a part."""

    def __init__(self, *args: Any, type: click.ParamType = click.STRING, spaces: bool = False, **settings: Any) -> None:
        super().__init__(*args, type=Commas(type, spaces), multiple=True, callback=joined, **settings)


def joined(_: click.Context, __: click.Parameter, lists: tuple[list[Any], ...]) -> list[Any] | None:
    """Return the values of all times that an option was given."""
    return [value for values in lists for value in values] or None


MODEL = [
    click.Argument([MODEL_WORD], required=False, metavar="[MODEL]", help="The model, also given as --model."),
    click.Option(["--model"]),
]
LOAD = [click.Option(["--revision"]), click.Option(["--device"]), click.Option(["--dtype"])]
"""How a model that is given by name is loaded."""
SETUP = [
    *LOAD,
    click.Option(["--bos/--no-bos"], default=None),
    click.Option(["--text"]),
    click.Option(["--field"]),
    click.Option(["--seed"], default=0),
]
EDITS = [
    click.Option(["--patch"], metavar="FILE"),
    click.Option(["--policy"], metavar="NAME[:BUDGET]"),
    click.Option(["--guard"], is_flag=True),
]
"""Options of a command that can run under interventions."""
SHARED = ("measure.setup:Setup.open", "generation.edit_options:edit_from_options")
"""Where the docstrings are that describe these options."""
OUTPUTS = [
    click.Option(["--json"], metavar="FILE|-", help="Write the result as JSON; - is standard output."),
    click.Option(
        ["--html"],
        metavar="FILE|-",
        help="Write conclusion, tables and figures as one HTML page; - is standard output.",
    ),
    click.Option(
        ["--csv"], metavar="FILE|-", help="Write all rows and columns of the table as CSV; - is standard output."
    ),
]
"""Options of a command with a result."""
