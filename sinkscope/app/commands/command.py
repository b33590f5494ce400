"""A command: its options are checked, its function runs, and its result is shown and written."""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sinkscope.app.commands.options import EDITS, MODEL, MODEL_WORD, OUTPUTS, SETUP, SHARED, OutputFile, Several
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import descriptions_of, docstring_at, introduction
from sinkscope.files.envelope import OWN, documented_at
from sinkscope.files.output import check_output, is_device, write_output
from sinkscope.files.plain import visible
from sinkscope.files.progress import is_first, world_size
from sinkscope.results.console import ProgressBar, note, show, terminal_width

if TYPE_CHECKING:
    from sinkscope.results.result import Result

FILE_LABELS = {"json": "JSON", "html": "Page", "csv": "Table"}
"""What stands before the path of a file that was written."""
READING = {"revision", "device", "dtype", "field"}
"""Options that say how a model and a text are read, which stand last in the help."""


class Command(click.Command):
    """A command of sinkscope: a function of Python, and how what it takes is typed.

    The function is imported when the command runs. What the help says is read from docstrings when it is asked for:
    of the command from that of the function, of each option from where that describes the parameter.
    """

    def __init__(
        self,
        words: str,
        function: str | Callable[..., Any],
        section: str,
        *examples: str,
        params: Sequence[click.Parameter] = (),
        shared: Sequence[click.Parameter] = (),
        described: Sequence[str] = (),
        kinds: Sequence[str] = (),
        processes: bool = False,
    ) -> None:
        """Make a command.

        Args:
            words: What is typed, such as "find-sinks".
            function: Where the function is, as `docstring_at` takes it; or the function, of another package.
            section: Heading under which the help lists it.
            examples: Lines for the end of the help.
            params: Its own options and arguments.
            shared: Options that other commands have as well; an own option takes the place of one of its name.
            described: Where the parameters are described that the docstring of the function leaves out.
            kinds: Kinds of the results that it gives; empty: it gives none.
            processes: Whether torchrun may start it in several processes.
        """
        lines = ["\b", *(["Examples:"] if examples else []), *(f"  {line}" for line in examples)]
        if isinstance(function, str):
            lines.append(f"Documentation: {documented_at('cli.md#sinkscope-' + words)}")
        names = {parameter.name for parameter in params}
        unnamed = [parameter for parameter in shared if parameter.name not in names]
        # several commands may share a parameter, and each describes its own copy
        every = [*map(copy, (*params, *unnamed)), *(OUTPUTS if kinds else [])]
        super().__init__(words, params=every, epilog="\n".join(lines), context_settings={"show_default": True})
        self.words = words
        self.function = function
        self.section = section
        self.described = (*described, *SHARED)
        self.kinds = kinds
        self.processes = processes

    def describe(self) -> None:
        """Read what the help says."""
        if self.help is not None:
            return
        doc = docstring_at(self.function) if isinstance(self.function, str) else inspect.getdoc(self.function) or ""
        self.help = self.with_flags(typed(introduction(doc)))
        descriptions: dict[str, str] = {}
        for text in (doc, *map(docstring_at, self.described)):
            descriptions = descriptions_of(text, "Args") | descriptions
        for parameter in self.params:
            if isinstance(parameter, click.Option | click.Argument) and not parameter.help:
                parameter.help = self.with_flags(typed(descriptions[str(parameter.name)]))
                if isinstance(parameter, Several):
                    parameter.help += " It may be given several times."

    def with_flags(self, text: str) -> str:
        """Return a text that calls the options of the command as one types them, and not as Python does."""
        for parameter in self.params:
            if isinstance(parameter, click.Option):
                text = text.replace(f"`{parameter.name}`", max(parameter.opts, key=len))
        return text

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first sentence of the help."""
        self.describe()
        return super().get_short_help_str(limit)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the options; those that say how a model and a text are read stand in a group of their own."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": [], "Reading": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                groups["Reading" if parameter.name in READING else "Options"].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help."""
        self.describe()
        super().format_help(ctx, formatter)

    def invoke(self, ctx: click.Context) -> None:
        """Check the options, call the function with them, and deliver its result.

        Raises:
            SinkscopeError: The options do not fit together.
        """
        if world_size() > 1 and not self.processes:
            raise SinkscopeError(f"sinkscope {self.words} is for one process: run it without torchrun")
        options = {name: value for name, value in ctx.params.items() if value not in (None, ())}
        files = {name: options.pop(name) for name in FILE_LABELS if name in options}
        word = options.pop(MODEL_WORD, None)
        if word is not None and "model" in options:
            raise SinkscopeError(f"two models, {word} and {options['model']}: give one, as a word or with --model")
        if word is not None:
            options["model"] = word
        with ProgressBar() as progress:
            if "model" in ctx.params:
                progress(f"Loading {options.get('model', 'bundled')} ...", 0, 0)
            self.check_outputs(files, options)
            with refused_exit(self.words):
                result = self.run(options, files, progress)
        if self.kinds and result is not None:
            deliver(result, files if is_first() else {})
            ctx.exit(result.exit_code)

    def check_outputs(self, files: Mapping[str, str], options: Mapping[str, Any]) -> None:
        """Refuse, before any work begins, outputs that cannot be written or would replace other files.

        Args:
            files: The files of the result.
            options: What is given for options, of which some name other files and folders for writing.
        """
        targets = [Path(path) if path == "-" else check_output(path, self.kinds) for path in files.values()]
        for parameter in self.params:
            if parameter.name in options and isinstance(parameter.type, OutputFile):
                targets.append(parameter.type.target(options[parameter.name]))
        for target in targets:
            if targets.count(target) > 1 and not is_device(target):
                raise SinkscopeError(f"{target.name} is given for two outputs: give each its own file")

    def run(self, options: dict[str, Any], files: Mapping[str, str], progress: ProgressBar) -> Any:
        """Call the function with the options and, where it takes them, the progress and the files that are wanted."""
        function = self.load()
        takes = inspect.signature(function).parameters
        listed: list[Any] = []
        for name, parameter in takes.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                listed += options.pop(name, ())
            elif name == "progress" or parameter.kind is parameter.VAR_KEYWORD:
                options["progress"] = progress
            elif name == "to_files":
                options["to_files"] = files
        return function(*listed, **options)

    def load(self) -> Callable[..., Any]:
        """Import the function and return it; the garbage collector, which importing needs not, is on from then on."""
        function = self.function
        if isinstance(function, str):
            module, _, name = function.partition(":")
            function = getattr(import_module(f"sinkscope.{module}"), name)
        gc.enable()
        return function


@contextmanager
def refused_exit(words: str) -> Iterator[None]:
    """Context manager that refuses an exit of Python by what a command runs: nothing was done, and no status says so.

    Args:
        words: The command.

    Raises:
        SinkscopeError: `sys.exit` was called.
    """
    try:
        yield
    except SystemExit as error:
        raise SinkscopeError(
            f"code that sinkscope {words} runs has called sys.exit({error.code!r:.80}) before there was a result: take "
            "that call out"
        ) from None


def measures(
    words: str,
    section: str,
    *examples: str,
    function: Callable[..., Any] | None = None,
    edits: Sequence[str] = (),
    params: Sequence[click.Parameter] = (),
) -> Command:
    """Return the command of a measurement, with the options that all measurements have.

    Args:
        words: What is typed, as for `Command`.
        section: Heading under which the help lists it.
        examples: Lines for the end of the help.
        function: The measurement. None: that of sinkscope.
        edits: The interventions under which it can run, of "patch", "policy" and "guard"; other names have no option.
        params: Its own options.
    """
    shared = [*MODEL, *SETUP, *(option for option in EDITS if option.name in edits)]
    place = function or OWN[words]
    return Command(words, place, section, *examples, params=params, shared=shared, kinds=[words], processes=True)


def typed(description: str) -> str:
    """Return what a docstring says to those who type a command: what only Python takes is left out."""
    return re.sub(r"; from Python also [^.]*(?=\.)", "", description)


def deliver(result: Result, files: Mapping[str, str]) -> None:
    """Print and write a result; standard output comes first: it is seen even if a file cannot be written."""
    try:
        if "-" not in files.values():
            show(result.text(terminal_width()))
    finally:  # the files are wanted also if the reader of the output, `head` say, has gone
        for name, path in files.items():
            text = getattr(result, f"to_{name}")()
            if path == "-":
                sys.stdout.write(visible(text))
            else:
                write_output(path, text)
                note(f"{FILE_LABELS[name]}: {path}")
