"""The command line: the group of all commands, errors and exit codes.

`commands/` has a click command for each, with its options written out; `commands/command.py` what happens before and
after the work of each.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
import time
import warnings
from collections.abc import Sequence

import click

from sinkscope import __version__
from sinkscope.app.commands import COMMANDS
from sinkscope.app.commands.command import refused_exit
from sinkscope.app.commands.others import ELSEWHERE, other_command, other_commands
from sinkscope.errors import SinkscopeError, SinkscopeWarning, is_out_of_memory, one_line
from sinkscope.files.envelope import documented_at
from sinkscope.files.progress import is_first, world_size
from sinkscope.results.console import drop, note

__all__ = ["main"]

ABOUT = """Find the attention sink of a language model, verify it by ablation, and repair what it breaks.

\b
Examples:
  sinkscope scan
  sinkscope find-sinks MODEL
Documentation: {page}"""
WIDEST_HELP = 120
"""Characters of a line of help where the terminal has room for them."""
DEBUG = "SINKSCOPE_DEBUG"
"""Variable of the environment that makes unforeseen errors end in their traceback."""


class CommandLine(click.Group):
    """All commands; what a command does is imported when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the words of every command, those of sinkscope first."""
        return [*COMMANDS, *other_commands()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of such words; for that of another package, the package is imported."""
        command = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in other_commands():
            with refused_exit(cmd_name):
                command = other_command(cmd_name, other_commands()[cmd_name])
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in sections, without importing those of other packages."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for words, command in COMMANDS.items():
            sections.setdefault(command.section, []).append((words, command.get_short_help_str(WIDEST_HELP)))
        for words in other_commands():
            sections.setdefault(ELSEWHERE, []).append((words, f"See sinkscope {words} --help."))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


SAME_ERROR = 2  # seconds in which torchrun ends a process that fails as the first one does


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the name of the program. By default those of this process.

    Returns:
        0 done, 1 a patch that was not made, a model of several without a card or an answer without text, 2 bad input
        (each with one line on stderr), 3 a text, session or stream with a loop, 130 interrupted.
    """
    version = click.version_option(__version__, message="sinkscope %(version)s", help="Print the version.")
    program = version(
        CommandLine(
            "sinkscope",
            commands=[*COMMANDS.values()],
            help=ABOUT.format(page=documented_at("cli.md")),
            no_args_is_help=True,
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST_HELP},
        )
    )
    return run(program, sys.argv[1:] if argv is None else argv)


def run(program: click.Command, argv: Sequence[str]) -> int:
    """Run a program of click; every error is one line on standard error.

    Args:
        program: The program.
        argv: Arguments after its name.

    Returns:
        The exit code, as of `main`.
    """
    code = 0
    _prepare_streams()
    gc.disable()  # importing torch and transformers makes no garbage; a command turns it on when its work begins
    try:
        words = [*argv] or ["--help"]
        status = program.main(args=words, prog_name=program.name, standalone_mode=False)
        if isinstance(status, int):
            code = status
        sys.stdout.flush()
        return code
    except SinkscopeError as error:
        return _print_error(str(error))
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else program.name
        return _print_error(f"{error.format_message().rstrip('.')} (see {path} --help)")
    except (KeyboardInterrupt, click.Abort):
        note("interrupted")
        return 130
    except (BrokenPipeError, SystemExit):  # the reader, `head` say, has seen enough; click turns it into an exit
        drop(sys.stdout)
        return code
    except BaseException as error:  # libraries in Rust raise errors that are no Exception
        if DEBUG in os.environ:
            raise
        return _print_error(_unforeseen(error), code or 2)
    finally:
        gc.enable()


def _unforeseen(error: BaseException) -> str:
    """What is said about an error that is no SinkscopeError."""
    if is_out_of_memory(error):
        return "out of memory: give a smaller model or file, fewer tokens, or --dtype bfloat16"
    if isinstance(error, OSError):
        drop(sys.stdout)  # it may be full, and what is still in its buffer would fail again at exit
        if error.errno == errno.ENOSPC:
            return "cannot write all of the output: no space left on device; make room and run the command again"
    first = str(error).partition("\n")[0]
    if world_size() > 1 and ("gloo" in first or "NCCL" in first):
        return f"another process of this run has ended: see what it said, and start all of them again ({first})"
    return f"{type(error).__name__}: {first} (an unexpected error: {DEBUG}=1 shows its traceback)"


def _print_error(message: str, code: int = 2) -> int:
    if not is_first():
        time.sleep(SAME_ERROR)
        sys.stderr = sys.__stderr__ or sys.stderr
    note(f"error: {one_line(message)}")
    return code


def _prepare_streams() -> None:
    """Silence other libraries' notes and bars: what matters is said by sinkscope itself."""
    if sys.stdout is None or sys.stderr is None:  # whoever started the program has closed it
        unheard = open(os.devnull, "w")
        sys.stdout, sys.stderr = sys.stdout or unheard, sys.stderr or unheard
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if callable(reconfigure):
            reconfigure(errors="backslashreplace")  # tokens need not fit the terminal's encoding
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    warnings.simplefilter("once", SinkscopeWarning)
    warnings.showwarning = lambda message, *_: note(f"note: {message}")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars that say nothing of themselves; those of downloads do
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait in a loop take half of the processor's time
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not is_first():  # what is said is the same in all processes
        sys.stdout = sys.stderr = open(os.devnull, "w")
