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

    def __init__(self, kind: click.ParamType) -> None:
        self.kind = kind

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        """Split at the commas."""
        words = [value]
        if "," in value or not value.strip():
            words = [word.strip() for word in value.split(",") if word.strip()]
        if not words:
            flag = "" if param is None else param.opts[0]
            raise SinkscopeError(f"{flag} {value!r}: no name stands between the commas; give at least one")
        return [self.kind.convert(word, param, ctx) for word in words]


class Several(click.Option):
    """An option of several values: with commas, or given again for each."""

    def __init__(self, *args: Any, type: click.ParamType = click.STRING, help: str = "", **settings: Any) -> None:
        text = help + " It may be given several times."
        super().__init__(*args, type=Commas(type), help=text, multiple=True, callback=joined, **settings)


def joined(_: click.Context, __: click.Parameter, lists: tuple[list[Any], ...]) -> list[Any] | None:
    """Return the values of all times that an option was given."""
    return [value for values in lists for value in values] or None


MODEL = [
    click.Argument([MODEL_WORD], required=False, metavar="[MODEL]", help="The model, also given as --model."),
    click.Option(["--model"], help="A short name, hub id, folder or .gguf file. By default the model in the package."),
]
LOAD = [
    click.Option(["--revision"], help="Branch, tag or commit on the hub."),
    click.Option(
        ["--device"],
        help="cpu, cuda, cuda:1 or mps, for a model given by name. By default the first CUDA device, else the CPU.",
    ),
    click.Option(
        ["--dtype"],
        help="float32, bfloat16 or float16, for a model given by name. By default the checkpoint's; a model that is "
        "read layer by layer on a CPU is float32.",
    ),
]
"""How a model that is given by name is loaded."""
SETUP = [
    *LOAD,
    click.Option(
        ["--bos/--no-bos"],
        default=None,
        help="Whether sequences begin with BOS. By default they do where the tokenizer has a BOS token.",
    ),
    click.Option(["--text"], help="File of typical text. By default the neutral text in the package."),
    click.Option(
        ["--seed"], type=int, default=0, help="Seed of every random choice; without effect where nothing is drawn."
    ),
]
EDITS = [
    click.Option(["--patch"], metavar="FILE", help="The patch.json to run under."),
    click.Option(
        ["--policy"],
        metavar="NAME[:BUDGET]",
        help="Which entries the KV cache keeps, such as streaming:512, snapkv:0.25:window=64 or "
        "package.module:Class:512.",
    ),
    click.Option(["--guard"], is_flag=True, help="Break repetition loops with LoopGuard."),
]
"""Options of a command that can run under interventions."""
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
    click.Option(["--explain"], is_flag=True, help="Print all rows and details, and the meaning of the columns."),
]
"""Options of a command with a result."""
