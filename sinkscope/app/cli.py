"""The command line, built from the registry; importing it loads no torch.

Each command comes from the signature and the docstring of one function. What happens before and after its work
(checking outputs, opening a kind of model object, printing, writing files, exit codes) is here.
"""

from __future__ import annotations

import errno
import gc
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperGroup

from sinkscope import __version__
from sinkscope.errors import SinkscopeError, SinkscopeWarning, is_out_of_memory
from sinkscope.files.console import ProgressBar, emit, note, print_result
from sinkscope.files.notation import read_head
from sinkscope.files.output import FIGURE, PAGE, check_losses, check_output, read_text
from sinkscope.files.registry import Entry, Parameter, entries, shared_parameters

Backend = Literal["bridge", "hf", "nnsight"]
"""Kinds of model object."""


def check_outputs(outputs: Mapping[str, str | None], values: Mapping[Parameter, Any]) -> None:
    """Refuse, before anything is imported, outputs that cannot be written or would replace an input.

    Args:
        outputs: Files that are written from the result, by option.
        values: Values of the parameters; some also name files or folders that are written.

    Raises:
        SinkscopeError: One of them is refused.
    """
    streams = [flag for flag, path in outputs.items() if path == "-"]
    if streams not in ([], ["--json"], ["--csv"]):
        raise SinkscopeError("only --json writes to standard output with -, or --csv: give the name of a file")
    inputs: dict[str, Any] = {}
    places: dict[bool, dict[str, Any]] = {False: dict(outputs), True: {}}
    for one, value in values.items():
        if one.option.writes:
            places[one.option.metavar in ("DIR", "FOLDER")][one.flag] = value
        else:
            name = "this command" if one.option.argument else one.flag
            inputs[name] = value if one.many and value else [value]
    files, folders = ({f: p for f, p in some.items() if p is not None and str(p) != "-"} for some in places.values())
    check_losses(files, inputs, folders)
    if outputs.get("--png") is not None:
        from sinkscope.app.pages import check_png

        check_png()


def deliver(
    result: Any,
    json: str | None,
    html: str | None,
    png: str | None,
    csv: str | None = None,
    also: Mapping[str, Any] | None = None,
    *,
    wide: bool = False,
    assets: bool = False,
) -> None:
    """Print and write a result; standard output comes first, so that it is seen even if a file cannot be written.

    Args:
        result: The command's result.
        json: File for it.
        html: File for it.
        png: File for its figure.
        csv: File for all rows and columns of its table.
        also: Further results, printed below; in the JSON each is a key beside the envelope's own.
        wide: Whether tables show every column, however wide.
        assets: Whether plotly.js lies beside the HTML file instead of inside of it.
    """
    more = also or {}
    try:
        if "-" not in (json, csv):
            print_result(result, wide=wide)
            for other in more.values():
                print()
                print_result(other, wide=wide)
    finally:  # the files are wanted also if the reader of the output, `head` say, has gone
        if json is not None:
            emit(json, result.to_json(**more))
        if csv is not None:
            emit(csv, result.to_csv())
        if html is not None:
            from sinkscope.app.pages import save_html

            save_html(result, html, *more.values(), assets=assets)
        if png is not None:
            from sinkscope.app.pages import save_png

            save_png(result, png)


def read_prompt(name: str) -> str:
    """Text of a file, or of standard input for "-"; it may not be empty."""
    text = read_text(name)
    if not text.strip():
        raise SinkscopeError("the prompt is empty: write at least one word into the file")
    return text


_READS: dict[str | None, Callable[[Any], Any]] = {
    "text": read_prompt,
    "head": read_head,
    "commas": lambda text: [word.strip() for word in text.split(",") if word.strip()],
}
_MARKS = {"html": [PAGE], "png": [FIGURE], "csv": ["output with a mark"]}  # CSV carries none
_FILES = {
    "json": ("FILE|-", "Write the result as JSON; - is standard output."),
    "html": ("FILE", "Write conclusion, tables and figures into one HTML file."),
    "png": ("FILE", "Write the figure; this needs kaleido and a browser."),
    "csv": ("FILE|-", "Write all rows and columns of the table as CSV; - is standard output."),
}
_ASSETS = "With --html: plotly.js lies beside the page, once for all pages of its folder, instead of inside of each."

_ABOUT = {
    "patch": "Make a patch that repairs repetition, and measure what it costs.",
}


_SECTIONS = ("Sinks", "Repetition", "Loops", "Dialogues", "Look")


class Groups(TyperGroup):
    """Commands in the help, one section for each group."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the sections: those of sinkscope in their order, then those of other packages."""
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in _SECTIONS}
        for name in self.list_commands(ctx):
            found = self.get_command(ctx, name)
            if found is not None and not found.hidden:
                panel = getattr(found, "rich_help_panel", None) or "Other"
                sections.setdefault(str(panel), []).append((name, found.get_short_help_str(formatter.width - 24)))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def command_line(words: Sequence[str] | None = None) -> typer.Typer:
    """The whole command line: a command for every entry of the registry; "patch make" stands in a group of its own.

    Args:
        words: What the user typed: a command that is not among them is listed in the help, without its options, which
            take time to make. None: every command is whole.
    """
    app = typer.Typer(
        name="sinkscope",
        cls=Groups,
        help=(
            "Find the attention sink of a language model, verify it by ablation, and repair what it breaks.\n\n"
            + _examples(("sinkscope demo", "sinkscope scan MODEL"), "docs/cli.md")
        ),
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    together: dict[str, list[Entry]] = {}
    for entry in entries().values():
        together.setdefault(entry.command, []).append(entry)
    groups: dict[str, typer.Typer] = {"": app}
    for command, parts in together.items():
        home, _, name = command.rpartition(" ")
        if home not in groups:
            groups[home] = typer.Typer(name=home, cls=Groups, rich_markup_mode=None)
            app.add_typer(groups[home], rich_help_panel=parts[0].group, help=_ABOUT.get(home, f"Commands of {home}."))
        parts.sort(key=lambda entry: not entry.marks.keys().isdisjoint(("flag", "several")))
        run = Command(parts) if words is None or {*command.split()} <= {*words} else _listed
        shown = [line for part in parts for line in part.examples]
        ours = parts[0].module.startswith("sinkscope.")  # our pages do not describe the commands of other packages
        place = f"docs/cli.md#sinkscope-{command.replace(' ', '-')}" if ours else ""
        help = f"{parts[0].help}\n\n{_examples(shown, place)}"
        groups[home].command(name, help=help, rich_help_panel=parts[0].group)(run)
    return app


def _examples(lines: Sequence[str], place: str) -> str:
    """The end of a help: examples, which are not wrapped, and where to read on; no place: no line about it."""
    some = [f"Example{'s' * (len(lines) > 1)}:", *(f"  {line}" for line in lines)] if lines else []
    return "\b\n" + "\n".join([*some, *([f"Documentation: {place}"] if place else [])])


def _listed() -> None:
    """Stands for a command that was not typed."""


class Command:
    """What typer calls for a command: it reads the options, runs the function, and delivers the result.

    Args:
        parts: The functions that share the command; the first runs unless the flag of another one is given.
    """

    def __init__(self, parts: list[Entry]) -> None:
        self.parts, first = parts, parts[0]
        self.measures = first.decorator == "measurement"
        self.flags = {part.marks["flag"]: part for part in parts if "flag" in part.marks}
        self.series = next((part for part in parts if part.marks.get("several")), None)
        self.outputs = [output for part in parts for output in part.marks.get("outputs", [])]
        self.files = {} if _returns_none(first) and not self.measures else _FILES
        self.parameters = self._parameters()
        asked = [p for p in self.parameters.values() if not p.option.hidden and p.name not in self.narrow.values()]
        shown = [*map(_typed, asked), *self._added()]
        self.__name__ = first.name
        self.__signature__ = inspect.Signature(shown)
        self.__annotations__ = {p.name: p.annotation for p in shown}

    def _parameters(self) -> dict[str, Parameter]:
        """Every parameter: the functions' own, then those that all measurements share."""
        shared = {p.name: p for p in shared_parameters("open")} if self.measures else {}
        if any(part.marks.get("edits") for part in self.parts):
            shared |= {p.name: p for p in shared_parameters("edit_of")}
        found = {p.name: p for p in self.parts[0].parameters}
        for part in self.parts[1:]:  # what all share is described as for all, unless the first function differs
            found = {**{p.name: shared.get(p.name, p) for p in part.parameters}, **found}
        order = [p.name for part in self.parts for p in part.parameters]
        known = {name: {**shared, **found}[name] for name in dict.fromkeys([*order, *shared])}
        lone = {p.flag: name for name, p in known.items() if not p.many}
        wide = self.series.parameters if self.series else ()
        self.narrow = {p.name: lone[p.flag] for p in wide if p.many and p.flag in lone}
        return known

    def _added(self) -> list[inspect.Parameter]:
        """Options that are no parameters: flags of other functions, the kind of model object, and files."""
        added: list[inspect.Parameter] = []
        if self.measures:
            text = "Load the model as this kind of object. By default a model is read as the command needs it."
            added.append(_option("backend", Backend, None, help=text))
        added += [_option(flag, bool, False, help=part.summary) for flag, part in self.flags.items()]
        for name, text, required in self.outputs:
            default = inspect.Parameter.empty if required else None
            added.append(_option(name, str, default, metavar="FILE", help=text))
        added += [_option(name, str, None, metavar=m, help=h) for name, (m, h) in self.files.items()]
        wide = "Show every column of the tables, however wide they become."
        switches = {"wide": wide, "assets": _ASSETS} if self.files else {}
        return added + [_option(name, bool, False, help=text) for name, text in switches.items()]

    def __call__(self, **values: Any) -> None:
        """Run the command with the values of its options."""
        files = {name: values.pop(name) for name in self.files}
        wide, assets = (bool(self.files and values.pop(name)) for name in ("wide", "assets"))
        if assets and files["html"] is None:
            raise SinkscopeError("--assets puts plotly.js beside the page of --html: give --html, too, or leave it out")
        written = {name: values.pop(name) for name, _, _ in self.outputs}
        given = {one: values[one.name] for one in self.parameters.values() if one.name in values}
        check_outputs({f"--{name.replace('_', '-')}": path for name, path in (files | written).items()}, given)
        main, also, given, backend = self._settled(values)
        if any(files.values()) and _returns_none(main):
            raise SinkscopeError(f"--{main.marks.get('flag', main.name)} has no result to write: leave out the files")
        makes = self._replaced(files | written, main)
        for name, words in given.items():
            given[name] = _read(self.parameters[name], words)
        result, more = self._run(main, also, given, backend)
        try:
            if self.files and result is not None:
                deliver(result, **files, also=more, wide=wide, assets=assets)
        finally:
            for name, path in written.items():
                if path is not None and isinstance(said := makes[name].save(result, path), str):
                    note(said)

    def _settled(self, values: dict[str, Any]) -> tuple[Entry, list[Entry], dict[str, Any], Any]:
        """The function that runs, those that run after it, the values that were given, and the kind of model object."""
        chosen = [part for flag, part in self.flags.items() if values.pop(flag)]
        main, also = self._main(chosen)
        backend = values.pop("backend", None) if self.measures else None
        given = self._given(values)
        for name, value in given.items():
            self.parameters[name].check(value)
        lone = [f"--{part.marks['flag']}" for part in chosen] + ["--backend"] * (backend is not None)
        main = self._series(given, lone) or main
        own = {p.name for p in main.parameters}
        for part in chosen:
            given |= {name: value for name, value in part.marks.get("sets", {}).items() if name in own}
        self._refuse_unused([main, *also], given)
        return main, also, given, backend

    def _replaced(self, files: Mapping[str, str | None], main: Entry) -> dict[str, Any]:
        """Refuse files that are there and are no earlier outputs of this command; the outputs of its own, by name."""
        makes = {o.name: o for part in self.parts if self.outputs for o in getattr(part.load(), "outputs", ())}
        for name, path in files.items():
            if path not in (None, "-"):
                own_kind = [makes[name].kind] if name in makes else _MARKS.get(name)
                check_output(path, *filter(None, own_kind or [f"json {kind}" for kind in main.kinds()]))
        return makes

    def _main(self, chosen: list[Entry]) -> tuple[Entry, list[Entry]]:
        """The function that runs, and those that run after it."""
        instead = [part for part in chosen if "adds" not in part.marks]
        if len(instead) > 1:
            names = " and ".join(f"--{part.marks['flag']}" for part in instead)
            raise SinkscopeError(f"{names} are two measurements: give one of them at a time")
        return (instead or self.parts)[0], [part for part in chosen if part not in instead]

    def _given(self, values: dict[str, Any]) -> dict[str, Any]:
        """What differs from the defaults, by the names that the function knows."""
        found: dict[str, Any] = {}
        for name, value in values.items():
            default = self.parameters[name].default
            empty = value in (None, [], ()) and default is not inspect.Parameter.empty
            if not empty and value != default:
                found[name] = value
        return found

    def _series(self, given: dict[str, Any], others: list[str]) -> Entry | None:
        """The function that takes several values of an option, if several were given; else the lists become values.

        Raises:
            SinkscopeError: `others`, options that only one model can have, were given with several values.
        """
        if all(len(given.get(many, ())) < 2 for many in self.narrow):
            for many in self.narrow.keys() & given.keys():
                given[self.narrow[many]] = given.pop(many)[0]
            return None
        if others:
            raise SinkscopeError(f"{others[0]} is for one model: give --model and --revision once, or leave it out")
        return self.series

    def _refuse_unused(self, running: list[Entry], given: dict[str, Any]) -> None:
        """Refuse an option of a function that does not run, because it would have no effect.

        Raises:
            SinkscopeError: One was given.
        """
        used = {p.name for part in running for p in part.parameters} | {p.name for p in shared_parameters("open")}
        for other in self.parts:
            for parameter in other.parameters:
                if parameter.name in given and parameter.name not in used:
                    flag = other.marks.get("flag")
                    remedy = f"give --{flag}, too, or leave it out" if flag else "leave it out"
                    value = given[parameter.name]
                    shown = value if parameter.many else [] if value is True else [value]
                    words = " ".join([parameter.flag, *map(str, shown)])
                    raise SinkscopeError(f"{words}: this run has no use for it; {remedy}")

    def _run(self, main: Entry, also: list[Entry], given: dict[str, Any], backend: Any) -> tuple[Any, dict[str, Any]]:
        """The result of a function, and those of the measurements that go with it, by their keys in the JSON."""
        function = main.load()
        if callable(refuse := getattr(function, "refuse", None)):
            refuse(given)  # before a model is opened
        names = [p.name for p in shared_parameters("edit_of") if p.name in given]
        if names and getattr(function, "edits", False):
            from sinkscope.kv.edit_of import edit_of  # a patch or policy is refused before a model is opened

            given["interventions"] = edit_of(**{name: given.pop(name) for name in names})
        if backend is not None:
            from sinkscope.models.load import load

            options = {name: given[name] for name in ("revision", "device", "dtype") if name in given}
            given["model"] = load(given.get("model"), backend=backend, **options)
        with ProgressBar() as progress:
            takes = self.measures or any(p.name == "progress" for p in main.parameters)
            more: dict[str, Any] = {"progress": progress} if takes else {}
            result = function(**given, **more)
            common = {p.name: given[p.name] for p in shared_parameters("open") if p.name in given}
            return result, {part.marks["adds"]: part.load()(**common, **more) for part in also}


def _returns_none(part: Entry) -> bool:
    return part.node.returns is None or getattr(part.node.returns, "value", "") is None


def _read(parameter: Parameter, words: Any) -> Any:
    """What the words mean; lists with commas that are given several times become one list."""
    read = _READS.get(parameter.option.reads)
    if read is None or not parameter.many:
        return words if read is None else read(words)
    values = [read(word) for word in words]
    if parameter.option.reads != "commas":
        return values
    if not any(values):
        raise SinkscopeError(f"{parameter.flag} {' '.join(words)}: no name is given; give names with commas between")
    found = [one for part in values for one in part]
    if parameter.type not in (int, float):
        return found
    try:
        return [parameter.type(one) for one in found]
    except ValueError:
        what = "whole numbers" if parameter.type is int else "numbers"
        raise SinkscopeError(f"{parameter.flag} {','.join(found)}: expected {what} with commas between") from None


def _kind(parameter: Parameter) -> Any:
    """The type that typer converts to; what it does not know is read as text."""
    kind: Any = bool if isinstance(parameter.default, bool) else parameter.type
    known = kind in (int, float, str, bool, Path) or get_origin(kind) is Literal
    if known and parameter.option.reads not in ("head", "commas"):
        return kind
    return Path if parameter.option.argument and Path in get_args(kind) else str


def _typed(parameter: Parameter) -> inspect.Parameter:
    """A parameter as typer reads it."""
    option, many, default, kind = parameter.option, parameter.many, parameter.default, _kind(parameter)
    text = parameter.help + (" It may be given several times." if many and not option.argument else "")
    more: dict[str, Any] = {"help": text, "metavar": option.metavar}
    if kind in (int, float):
        largest = None if (option.max or 0) > 1 << 32 else option.max  # a larger one would only be noise in the help
        more |= {"min": option.min, "max": largest}
    if many and not parameter.required and default:
        more["show_default"] = ", ".join(str(value) for value in parameter.default)
    flag = f"{parameter.flag}/--no-{parameter.flag[2:]}" if kind is bool and default is not False else parameter.flag
    info = typer.Argument(**more) if option.argument else typer.Option(flag, **more)
    hint = list[kind] if many else kind  # pyright: ignore[reportInvalidTypeForm]
    if parameter.required:
        return _keyword(parameter.name, hint, inspect.Parameter.empty, info)
    return _keyword(parameter.name, hint, None if many else default, info)


def _option(name: str, hint: Any, default: Any, **more: Any) -> inspect.Parameter:
    return _keyword(name, hint, default, typer.Option(f"--{name.replace('_', '-')}", **more))


def _keyword(name: str, hint: Any, default: Any, info: Any) -> inspect.Parameter:
    whole = Annotated[hint | None if default is None else hint, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=whole)


def _print_version(wanted: bool) -> bool:
    if wanted:
        print(f"sinkscope {__version__}")
        raise typer.Exit
    return wanted


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the command itself."""


__all__ = ["command_line", "main"]

_COMPLETE = "_SINKSCOPE_COMPLETE"  # in the environment of a shell that asks how a command goes on
_NO_MEMORY = "out of memory: try --dtype bfloat16, --device cpu, a smaller --max-repeats, or leave out --all-layers"
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "your quota is used up", errno.EFBIG: "its file is too large"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after `sinkscope`. By default those of this process.

    Returns:
        0 done, 1 a patch that was not made because it does not repair or would harm, 2 bad input (each with one line on
        stderr), 3 a stream with a loop, 130 interrupted.
    """
    closed = _quiet()
    gc.disable()  # importing torch and transformers makes no garbage; `Progress` turns it on when work begins
    try:
        if closed:
            raise SinkscopeError("standard output is closed: give it a file, a pipe or /dev/null")
        words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
        for word in words:
            try:
                word.encode()
            except UnicodeEncodeError:
                raise SinkscopeError(f"the word {word!r} is not UTF-8: type it in another way") from None
        code = command_line(None if _COMPLETE in os.environ else words)(
            args=words, prog_name="sinkscope", standalone_mode=False
        )
        sys.stdout.flush()
        if code == 130:  # Ctrl-C, as typer hands it on
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except SinkscopeError as error:
        return _refuse(str(error), error.exit_code)
    except typer.TyperException as error:
        return _refuse(_usage(error))
    except (KeyboardInterrupt, typer.Abort):
        note("interrupted")
        return 130
    except (BrokenPipeError, SystemExit):  # the reader, `head` say, has seen enough; typer turns it into an exit
        _drop_output()
        return 0
    except Exception as error:
        if is_out_of_memory(error):
            return _refuse(_NO_MEMORY)
        if not isinstance(error, OSError) or error.errno not in _FULL:
            raise
        _drop_output()
        return _refuse(f"cannot write to standard output: {_FULL[error.errno]}; make room and run the command again")
    finally:
        gc.enable()


def _drop_output() -> None:
    """What is still in the buffer has nowhere to go; Python would say so again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(message: str, code: int = 2) -> int:
    note(f"error: {' '.join(message.split())}")
    return code


def _usage(error: typer.TyperException) -> str:
    """What was wrong with the command, and where to read on."""
    message = getattr(error, "format_message", lambda: str(error))().replace("Value error, ", "").rstrip(".")
    told = getattr(error.__cause__, "errors", list[dict[str, object]])()  # which value it was, typer leaves out
    if told and repr(given := told[0].get("input")) not in message:
        message += f"; it is {given!r}"
    context = getattr(error, "ctx", None)
    return f"{message} (see {context.command_path if context else 'sinkscope'} --help)"


def _quiet() -> bool:
    """Other libraries' notes and bars stay off: what matters is said by sinkscope itself.

    Returns:
        Whether standard output is closed; what is closed is replaced, so that no file takes its number.
    """
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
    for stream in (sys.stdout, sys.stderr):
        if callable(reconfigure := getattr(stream, "reconfigure", None)):
            reconfigure(errors="backslashreplace")  # tokens need not fit the terminal's encoding
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    warnings.simplefilter("once", SinkscopeWarning)
    warnings.showwarning = lambda message, *_: note(f"note: {message}")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return "stdout" in closed
