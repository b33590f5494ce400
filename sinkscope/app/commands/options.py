"""Options that several commands have, and how their words are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import check_writable, read_text

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


class OutputFile(click.ParamType):
    """The name of a file for writing, which is checked before any work begins."""

    name = "file"

    def target(self, value: str) -> Path:
        """Return the path that will be written.

        Raises:
            SinkscopeError: It cannot be written.
        """
        return check_writable(value)

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the name."""
        if ctx is None or not ctx.resilient_parsing:  # else the shell completes a word
            self.target(value)
        return value


class OutputFolder(OutputFile):
    """The name of a folder for writing: new, empty, or of an earlier run."""

    name = "folder"

    def target(self, value: str) -> Path:
        """Return the folder that will be written.

        Raises:
            SinkscopeError: It cannot be written, or holds other files.
        """
        from sinkscope.files.store import check_folder  # loads pydantic, for which no help need wait

        return check_folder(value)


class Several(click.Option):
    """An option of several values: with commas, or given again for each; one that stands alone keeps its spaces."""

    def __init__(self, *args: Any, type: click.ParamType = click.STRING, spaces: bool = False, **settings: Any) -> None:
        """Make an option.

        Args:
            args: The flags, as for `click.Option`.
            type: Type of one value.
            spaces: Whether values between commas keep their spaces, too, as tokens do.
            settings: Further settings of `click.Option`.
        """
        super().__init__(*args, type=click.STRING, multiple=True, callback=self.split, **settings)
        self.kind = type
        self.spaces = spaces

    def split(self, ctx: click.Context, _: click.Parameter, texts: tuple[str, ...]) -> list[Any] | None:
        """Return the values between the commas of all texts."""
        values: list[Any] = []
        for text in texts:
            words = [text] if text.strip() and "," not in text else [word for word in text.split(",") if word.strip()]
            if not words:
                raise SinkscopeError(f"{self.opts[0]} {text!r}: no name stands between the commas; give at least one")
            for word in words:
                alone = self.spaces or len(words) == 1
                values.append(self.kind.convert(word if alone else word.strip(), self, ctx))
        return values or None


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
