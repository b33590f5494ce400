"""A command: its options are checked, its function runs, and its result is shown and written."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sinkscope.app.commands.options import EDITS, MODEL, MODEL_WORD, OUTPUTS, SETUP
from sinkscope.errors import SinkscopeError, is_out_of_memory
from sinkscope.files.output import WRITTEN, check_output, check_writable, is_device, write_output
from sinkscope.files.plain import pathless, visible
from sinkscope.files.progress import is_first, world_size
from sinkscope.files.provenance import documented_at
from sinkscope.results.console import ProgressBar, note, show, terminal_width
from sinkscope.results.notation import word_list

if TYPE_CHECKING:
    from sinkscope.results.result import Result

OTHER_MEMORY = {"dtype": "--dtype bfloat16", "device": "--device cpu"}
SMALLER = ("max_repeats", "max_new_tokens", "batch_size", "n_tokens", "sequences", "count", "pieces", "length")
"""Options on which the memory of a command depends, if it has them."""
SAID = {"json": "JSON", "html": "Page", "csv": "Table"}
"""What stands before the path of a file that was written."""
RENAMED = {"token": "tokens", "scheme": "schemes", "head": "heads", "eta": "etas", "layer": "layers"}
"""Options by their names before 0.3, which are still read."""


class Command(click.Command):
    """A command of sinkscope. Its callback imports the function and returns it; what is typed is given to that."""

    def __init__(
        self,
        *args: Any,
        words: str,
        section: str,
        examples: Sequence[str],
        shared: Sequence[click.Parameter] = (),
        kinds: Sequence[str] = (),
        processes: bool = False,
        documented: bool = True,
        **settings: Any,
    ) -> None:
        """Make a command.

        Args:
            args: As for `click.Command`.
            words: What is typed, such as "find-sinks" or "patch make".
            section: Heading under which the help lists it.
            examples: Lines for the end of the help.
            shared: Options that other commands have as well; an own option takes the place of one of its name.
            kinds: Kinds of the results that it gives, if it gives one.
            processes: Whether torchrun may start it in several processes.
            documented: Whether a page of sinkscope describes it.
            settings: As for `click.Command`.
        """
        lines = ["\b"]
        if examples:
            lines += ["Examples:", *(f"  {line}" for line in examples)]
        if documented:
            lines.append(f"Documentation: {documented_at('cli', 'sinkscope-' + words.replace(' ', '-'))}")
        context = {"show_default": True, "token_normalize_func": renamed}
        super().__init__(*args, epilog="\n".join(lines), context_settings=context, **settings)
        own = {one.name for one in self.params}
        self.params += [one for one in shared if one.name not in own]
        if kinds:
            self.params += OUTPUTS
        self.words, self.section, self.examples, self.kinds = words, section, examples, kinds
        self.processes = processes

    def invoke(self, ctx: click.Context) -> None:
        """Check the options, call the function with them, and deliver its result.

        Raises:
            SinkscopeError: The options do not fit together, or the memory does not suffice.
        """
        if world_size() > 1 and not self.processes:
            raise SinkscopeError(f"sinkscope {self.words} is for one process: run it without torchrun")
        given = {name: value for name, value in ctx.params.items() if value not in (None, ())}
        files = {name: given.pop(name) for name in SAID if name in given}
        word, explain = given.pop(MODEL_WORD, None), given.pop("explain", False)
        if word is not None and "model" in given:
            raise SinkscopeError(f"two models, {word} and {given['model']}: give one, as a word or with --model")
        if word is not None:
            given["model"] = word
        with ProgressBar() as progress:
            if any(one.name == "model" for one in self.params):
                progress(f"Loading {given.get('model', 'bundled')} ...", 0, 0)
            check_files(files, self.kinds, [one for one in self.params if one.name in WRITTEN], given)
            result = self.run(given, files, progress)
        if self.kinds and result is not None:
            deliver(result, files if is_first() else {}, explain)
            ctx.exit(result.exit_code)

    def run(self, given: dict[str, Any], files: Mapping[str, str], progress: ProgressBar) -> Any:
        """Call the function with the options and, where it takes them, the progress and the files that are wanted."""
        function = self.load()
        takes = inspect.signature(function).parameters.values()
        if any(one.name == "progress" or one.kind is one.VAR_KEYWORD for one in takes):
            given["progress"] = progress
        if any(one.name == "to_files" for one in takes):
            given["to_files"] = files
        try:
            return function(**given)
        except Exception as error:
            if is_out_of_memory(error):
                raise SinkscopeError(out_of_memory(self)) from error
            raise

    def load(self) -> Callable[..., Any]:
        """Import the function and return it; the garbage collector, which importing needs not, is on from then on."""
        assert self.callback is not None
        function = self.callback()
        freeze_imports()
        gc.enable()
        return function


@cache
def freeze_imports() -> None:
    """Tell the garbage collector, once in a process, that what was imported stays and need not be looked through."""
    gc.freeze()


def command(words: str, section: str, *examples: str, **settings: Any) -> Callable[[Callable[[], Any]], Command]:
    """Make a command of a function that imports another and returns it; its docstring is the help.

    Args:
        words: As for `Command`, and so are the others.
        section: Its heading.
        examples: Lines to type.
        settings: The others.
    """
    about = {"words": words, "section": section, "examples": examples, **settings}
    return click.command(words.split()[-1], cls=Command, **about)


def measures(
    words: str, section: str, *examples: str, edits: bool = False, **settings: Any
) -> Callable[[Callable[[], Any]], Command]:
    """Make the command of a measurement, as `command` does, with the options that all have.

    Args:
        words: As for `Command`, and so are those not named here.
        section: Its heading.
        examples: Lines to type.
        edits: Whether it can run under a patch, a policy or a guard.
        settings: The others.
    """
    shared = [*MODEL, *SETUP, *(EDITS if edits else [])]
    about = {"shared": shared, "kinds": [words.replace(" ", "-")], "processes": True, **settings}
    return command(words, section, *examples, **about)


def renamed(name: str) -> str:
    """Return the name of an option, which may be given by an earlier name."""
    return RENAMED.get(name, name)


def out_of_memory(command: click.Command) -> str:
    """Return what to try where a command ran out of memory: what it has of options on which memory depends."""
    names = [one.name for one in command.params]
    flags = ["--" + name.replace("_", "-") for name in SMALLER if name in names]
    remedies = [remedy for name, remedy in OTHER_MEMORY.items() if name in names]
    if flags:
        remedies.append(f"a smaller {word_list(flags)}")
    return f"out of memory: try {', '.join(remedies) or 'a smaller file'}"


def check_files(
    files: Mapping[str, str], kinds: Sequence[str], others: Sequence[click.Parameter], given: Mapping[str, Any]
) -> None:
    """Refuse, before any work begins, outputs that cannot be written or would replace other files.

    Args:
        files: The files of a result.
        kinds: Kinds of the results that may be there already.
        others: Options that name other files and folders for writing.
        given: What is given for options.
    """
    targets: list[Path] = []
    for path in files.values():
        targets.append(Path(path) if path == "-" else check_output(path, kinds))
    for one in others:
        if one.name in given:
            path = given[one.name]
            targets.append(check_writable(path, folder=one.metavar != "FILE"))
            if one.name == "out" and one.metavar != "FILE":
                from sinkscope.files.store import refuse_other_files  # loads pydantic, for which no help need wait

                refuse_other_files(Path(path), f"--out {pathless(path)}")
    for target in targets:
        if targets.count(target) > 1 and not is_device(target):
            raise SinkscopeError(f"{target.name} is given for two outputs: give each its own file")


def deliver(result: Result, files: Mapping[str, str], explain: bool) -> None:
    """Print and write a result; standard output comes first: it is seen even if a file cannot be written."""
    try:
        if "-" not in files.values():
            show(result.text(terminal_width(), brief=not explain))
    finally:  # the files are wanted also if the reader of the output, `head` say, has gone
        for name, path in files.items():
            text = getattr(result, f"to_{name}")()
            if path == "-":
                sys.stdout.write(visible(text))
            else:
                write_output(path, text)
                note(f"{SAID[name]}: {path}")
