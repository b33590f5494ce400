"""The one opener of files that a user or another file names: regular files within a bound, inside their folder.

A named pipe waits for a writer, and a device need not end, so neither is opened.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PureWindowsPath
from typing import BinaryIO

from sinkscope.errors import SinkscopeError

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def reason_of(error: Exception) -> str:
    """Return what the file system reported, in lower case."""
    return (getattr(error, "strerror", None) or str(error)).lower().rstrip(".")


def open_regular(file: Path, shown: str, remedy: str) -> BinaryIO:
    """Open a regular file to read bytes, also through links. The call never waits.

    Args:
        file: The file.
        shown: Its name in the message.
        remedy: What to do about a file that cannot be read.

    Raises:
        SinkscopeError: It is a folder, a pipe, a socket or a device, or cannot be read.
    """
    try:
        kind = _KINDS.get(stat.S_IFMT(os.stat(file).st_mode))  # before it is opened, which some devices take as an act
        if kind is None:
            descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
            kind = _KINDS.get(stat.S_IFMT(os.fstat(descriptor).st_mode))  # it may have been replaced in between
            if kind is None:
                return open(descriptor, "rb")
            os.close(descriptor)
    except OSError as error:
        raise SinkscopeError(f"cannot read {shown}: {reason_of(error)}; {remedy}") from None
    raise SinkscopeError(f"cannot read {shown}: it is {kind}, not a regular file; {remedy}")


def inside(folder: Path, name: str, said_by: str, roots: tuple[Path, ...] = ()) -> Path:
    """Return the path of a file that another file names, which has to be inside the folder of that file.

    Args:
        folder: The folder.
        name: The name, relative to it.
        said_by: The file that names it, for the message.
        roots: Further folders in which links may end.

    Raises:
        SinkscopeError: The name is absolute or leads out, by itself or through a link.
    """
    steps = PureWindowsPath(name)  # knows both separators
    if not (steps.drive or steps.root or ".." in steps.parts or "\0" in name):
        path = folder / name
        end = Path(os.path.realpath(path))
        if any(end.is_relative_to(os.path.realpath(root)) for root in (folder, *roots)):
            return path
    raise SinkscopeError(
        f"{said_by} names {name!r:.120}, which leads out of {folder.name or folder}: only files of that folder are "
        "read, so put it there, as a file and not as a link"
    )
