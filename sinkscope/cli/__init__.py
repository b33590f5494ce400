"""The command line: each command is a file here and a thin call of one public function. Importing loads no torch."""

from __future__ import annotations

import errno
import gc
import os
import pkgutil
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

import typer

from sinkscope._console import note
from sinkscope.cli.app import app
from sinkscope.cli.build import add_commands
from sinkscope.errors import SinkscopeError, is_out_of_memory

__all__ = ["app", "main"]

_NO_MEMORY = "out of memory: try --dtype bfloat16, --device cpu, a smaller --max-repeats, or leave out --all-layers"
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "your quota is used up", errno.EFBIG: "its file is too large"}


add_commands(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after `sinkscope`; by default those of this process.

    Returns:
        0 done, 2 bad input (one line on stderr), 130 interrupted.
    """
    _quiet()
    gc.disable()  # importing torch and transformers makes no garbage; `Progress` turns it on when work begins
    try:
        code = app(
            args=list(sys.argv[1:] if argv is None else argv) or ["--help"],
            prog_name="sinkscope",
            standalone_mode=False,
        )
        sys.stdout.flush()
        if code == 130:  # Ctrl-C, as typer hands it on
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except SinkscopeError as error:
        return _refuse(str(error))
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


def _refuse(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _usage(error: typer.TyperException) -> str:
    """What was wrong with the command, and where to read on."""
    message = getattr(error, "format_message", lambda: str(error))().replace("Value error, ", "").rstrip(".")
    told = getattr(error.__cause__, "errors", list[dict[str, object]])()  # which value it was, typer leaves out
    if told and repr(given := told[0].get("input")) not in message:
        message += f"; it is {given!r}"
    context = getattr(error, "ctx", None)
    return f"{message} (see {context.command_path if context else 'sinkscope'} --help)"


def _quiet() -> None:
    """Other libraries' notes and bars stay off: what matters is said by sinkscope itself."""
    for stream in (sys.stdout, sys.stderr):
        if callable(reconfigure := getattr(stream, "reconfigure", None)):
            reconfigure(errors="backslashreplace")  # tokens need not fit the terminal's encoding
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
