"""What happens before and after the work of a command: options are read, outputs checked, results shown and written."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import click

from sinkscope.errors import SinkscopeError, is_out_of_memory
from sinkscope.files.catalog import Command
from sinkscope.files.output import check_output, check_writable, is_device, read_text, write_output
from sinkscope.files.plain import visible
from sinkscope.files.processes import is_first, world_size
from sinkscope.files.provenance import documented_at
from sinkscope.results.console import ProgressBar, note, show, terminal_width
from sinkscope.results.notation import word_list
from sinkscope.results.options import example_lines, introduction

if TYPE_CHECKING:
    from sinkscope.results.result import Result

EXPLAIN_HELP = "Print all rows and details, and the meaning of the columns."
TYPES = {
    "text": click.STRING,
    "bool": click.BOOL,
    "int": click.INT,
    "float": click.FLOAT,
    "path": click.Path(path_type=Path),
}
"""What click makes of the words of an option."""
OTHER_MEMORY = {"dtype": "--dtype bfloat16", "device": "--device cpu"}
SMALLER = ("max_repeats", "max_new_tokens", "batch_size", "n_tokens", "sequences", "count", "pieces", "length")
"""Options on which the memory of a command depends, if it has them."""
MODEL_WORD = "model_word"
"""Name of the model where it is typed without an option, as in `sinkscope find-sinks llama-2-7b`."""


@dataclass(frozen=True)
class ResultFile:
    """A file that is written from every result.

    Attributes:
        name: Name of the option, without dashes.
        help: One sentence for the help.
        text: Its content, of a result.
        word: What stands before its path once it is written.
    """

    name: str
    help: str
    text: Callable[[Result], str]
    word: str


def _page(result: Result) -> str:
    from sinkscope.app.pages import page  # loads what the help need not wait for

    return page(result)


OUTPUTS = (
    ResultFile("json", "Write the result as JSON; - is standard output.", lambda result: result.to_json(), "JSON"),
    ResultFile("html", "Write conclusion, tables and figures as one HTML page; - is standard output.", _page, "Page"),
    ResultFile(
        "csv",
        "Write all rows and columns of the table as CSV; - is standard output.",
        lambda result: result.to_csv(),
        "Table",
    ),
)


def outline_of(function: Any) -> dict[str, Any]:
    """Return what the command line knows of a function before it is imported, as JSON without what is empty."""
    inner = getattr(function, "function", function)
    doc = inspect.getdoc(inner) or ""
    returned: Any = get_type_hints(inner).get("return")
    kinds = [one.kind for one in get_args(returned) or [returned] if hasattr(one, "kind")]
    options: list[dict[str, Any]] = []
    for one in function.all_parameters:
        kind: Any = "text"
        if isinstance(one.default, bool) or one.type is bool:
            kind = "bool"
        elif get_origin(one.type) is Literal and one.option.reads is None:
            kind = list(get_args(one.type))
        elif one.type in (int, float, Path):
            kind = one.type.__name__.lower()
        row = {**vars(one.option), "name": one.name, "flag": one.flag, "help": one.help, "type": kind, "many": one.many}
        row |= {"required": one.required, "negated": kind == "bool" and one.default is not False}
        options.append({name: value for name, value in row.items() if value})
    return {"text": introduction(doc), "examples": example_lines(doc), "options": options, "kinds": kinds}


def click_command(command: Command) -> click.Command:
    """Return the click command of a line of the table. Only the function of another package is imported for it."""
    outline = command.outline or outline_of(command.load())
    end, text = ["\b"], outline["text"]
    if outline["examples"]:
        end.append("Examples:")
    end += [f"  {line}" for line in outline["examples"]]
    if command.outline is not None:  # our pages do not describe the commands of other packages
        place = f"sinkscope-{command.words.replace(' ', '-')}"
        end.append(f"Documentation: {documented_at('cli', place)}")
    params: list[click.Parameter] = []
    for one in outline["options"]:
        if "argument" in one:
            text += f"\n\n{one['metavar']}: {one['help']}"
        if "hidden" not in one:
            params.append(click_parameter(one))
    if command.measures:
        params.append(click.Argument([MODEL_WORD], required=False, metavar="[MODEL]"))
    if outline["kinds"]:
        for one in OUTPUTS:
            params.append(click.Option([f"--{one.name}"], metavar="FILE|-", help=one.help))
        params.append(click.Option(["--explain"], is_flag=True, help=EXPLAIN_HELP))
    run = partial(run_command, command, outline)
    return click.Command(command.words.split()[-1], params=params, callback=run, help=text, epilog="\n".join(end))


def run_command(command: Command, outline: Mapping[str, Any], **values: Any) -> None:
    """Check and read the options of a command, run its function, and deliver the result.

    Args:
        command: The line of the table.
        outline: What `outline_of` says of its function.
        values: What click read, by name.
    """
    options = {one["name"]: one for one in outline["options"]}
    word, explain = values.pop(MODEL_WORD, None), bool(values.pop("explain", False))
    if word is not None and values["model"] is not None:
        raise SinkscopeError(f"two models, {word} and {values['model']}: give one, as a word or with --model")
    if word is not None:
        values["model"] = word
    arguments = {name: value for name, value in values.items() if value not in (None, ())}
    files = {one.name: arguments.pop(one.name) for one in OUTPUTS if one.name in arguments}
    if world_size() > 1 and not command.measures and command.words != "generate":
        raise SinkscopeError(f"sinkscope {command.words} is for one process: run it without torchrun")
    with ProgressBar() as progress:
        if "model" in options:
            progress(f"Loading {arguments.get('model', 'bundled')} ...", 0, 0)
        written = [arguments[name] for name, one in options.items() if "writes" in one and name in arguments]
        check_files(files, outline["kinds"], written)
        for name, words in arguments.items():
            arguments[name] = read_words(options[name], words)
        own = {"to_files": files, "progress": progress}
        arguments |= {name: value for name, value in own.items() if name in options}
        function = command.load()
        if not gc.get_freeze_count():
            gc.freeze()  # what was imported stays, and need not be looked through
        gc.enable()
        try:
            result = function(**arguments)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise SinkscopeError(out_of_memory(options)) from error
    if result is not None and outline["kinds"]:
        deliver(result, files if is_first() else {}, explain)
        if result.exit_code:
            raise click.exceptions.Exit(result.exit_code)


def out_of_memory(options: Mapping[str, Any]) -> str:
    """Return what to try where a command ran out of memory: what it has of options on which memory depends."""
    flags = [options[name]["flag"] for name in SMALLER if name in options]
    remedies = [remedy for name, remedy in OTHER_MEMORY.items() if name in options]
    if flags:
        remedies.append(f"a smaller {word_list(flags)}")
    return f"out of memory: try {', '.join(remedies) or 'a smaller file'}"


def check_files(files: Mapping[str, str], kinds: Sequence[str], written: Sequence[str]) -> None:
    """Refuse, before any work begins, outputs that cannot be written or would replace other files.

    Args:
        files: The files of a result.
        kinds: Kinds of the results that may be there already.
        written: Other files and folders that a command writes.
    """
    targets: list[Path] = []
    for path in files.values():
        targets.append(Path(path) if path == "-" else check_output(path, kinds))
    for path in written:
        targets.append(check_writable(str(path), folder=True))
    for target in targets:
        if targets.count(target) > 1 and not is_device(target):
            raise SinkscopeError(f"{target.name} is given for two outputs: give each its own file")


def deliver(result: Result, files: Mapping[str, str], explain: bool) -> None:
    """Print and write a result; standard output comes first: it is seen even if a file cannot be written."""
    try:
        if "-" not in files.values():
            show(result.text(terminal_width(), brief=not explain))
    finally:  # the files are wanted also if the reader of the output, `head` say, has gone
        for one in OUTPUTS:
            path = files.get(one.name)
            if path == "-":
                sys.stdout.write(visible(one.text(result)))
            elif path is not None:
                write_output(path, one.text(result))
                note(f"{one.word}: {path}")


def click_parameter(one: Mapping[str, Any]) -> click.Parameter:
    """Return the option or argument of a parameter. None stands for its default, which the function knows."""
    words, many, metavar = one["type"], "many" in one, one.get("metavar")
    kind: Any = click.Choice(words) if isinstance(words, list) else TYPES[words]
    settings: dict[str, Any] = (
        {"type": kind, "required": True} if "required" in one else {"type": kind, "default": None}
    )
    if "argument" in one:
        if metavar is not None and "required" not in one:
            metavar = f"[{metavar}]"
        return click.Argument([one["name"]], nargs=-1 if many else 1, metavar=metavar, **settings)
    text, flags = one.get("help", ""), one["flag"]
    if many:
        text += " It may be given several times."
    if "negated" in one:
        flags = f"{flags}/--no-{flags[2:]}"
    metavar = metavar or {click.INT: "INT", click.FLOAT: "NUMBER"}.get(kind)  # None: that of click
    flag = kind is click.BOOL
    return click.Option([one["name"], flags], is_flag=flag, multiple=many, metavar=metavar, help=text, **settings)


def read_words(one: Mapping[str, Any], words: Any) -> Any:
    """Return what the words of an option mean: the text of a file, or a list with commas."""
    reads = one.get("reads")
    if reads == "text":
        text = read_text(words)
        if not text.strip():
            raise SinkscopeError("the prompt is empty: write at least one word into the file")
        return text
    if reads == "commas":
        names = [name.strip() for name in ",".join(words).split(",") if name.strip()]
        if not names:
            raise SinkscopeError(
                f"{one['flag']} {','.join(words)!r}: no name stands between the commas; give at least one"
            )
        return names
    if "many" in one:
        return list(words)
    return words
