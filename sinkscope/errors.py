"""The one exception that users see: a single line that says what was wrong and what to do."""

from __future__ import annotations

import inspect
import site
import sysconfig
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

LONGEST = 600
"""Characters of an error message."""


class SinkscopeError(ValueError):
    """Bad input or an impossible request.

    The message is one line: the value, what was expected, what to do. The command line prints it as
    ``error: ...`` and exits with status 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(message: str) -> str:
    """Return a message in one line; of a long value that it repeats, the middle is left out."""
    line = " ".join(message.split())
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 3 :]}"
    return line


class UnsupportedError(SinkscopeError):
    """The model, or the kind of model object, cannot do what was asked; the message names what can."""


class NoSuchNameError(SinkscopeError, AttributeError):
    """The package has no such name; the message names what has its work."""


def no_such_name(module: str, name: str, names: Sequence[str]) -> NoSuchNameError:
    """Return the error for a name that a module does not have, with the nearest one that it has.

    Args:
        module: Name of the module.
        name: The name that was asked for.
        names: The public names of the module.
    """
    by_lowercase = {known.lower(): known for known in names}
    nearest = get_close_matches(name.lower(), by_lowercase, 1)
    remedy = f"it has: {', '.join(names)}"
    if nearest:
        remedy = f"did you mean {by_lowercase[nearest[0]]}?"
    return NoSuchNameError(f"module {module!r} has no attribute {name!r}; {remedy}")


class SinkscopeWarning(UserWarning):
    """Something that the user should know although the work goes on; the command line prints it as one line."""


_LIBRARIES = (
    str(Path(__file__).parent),
    site.getusersitepackages(),
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
)


def warn(message: str) -> None:
    """Warn at the line of the user's own code that led here, and not at one of this package or another library."""
    level, frame = 1, inspect.currentframe()  # from Python 3.12 on, `warnings.warn` can skip files itself
    while frame is not None and (
        frame.f_code.co_filename.startswith(_LIBRARIES)
        or frame.f_globals.get("__name__", "").startswith("sinkscope.")  # code that was made, such as `__init__`
    ):
        level += 1
        frame = frame.f_back
    warnings.warn(message, SinkscopeWarning, stacklevel=level)


_NO_MEMORY = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "failed to map segment",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, torch, CUDA or the dynamic linker ran out of memory; each says so in its own way."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, with the next one after a colon, or else the error's name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].endswith(":"):
        return " ".join(lines[:2])
    return lines[0]
