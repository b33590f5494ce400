"""Files of commands: written beside and renamed, never in place of a foreign file, and read with one-line errors.

What a user or another file names is opened by one opener: regular files within a bound. A named pipe waits for a
writer, and a device need not end, so neither is opened.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import parse_json, pathless

PathName = str | os.PathLike[str]
"""How a file or folder is named."""
MOST = 1 << 30
"""Bytes that are read of a file which is read whole."""
_KIND = re.compile(
    rb'\s*\{\s*"schema":\s*\d+,\s*"kind":\s*"([^"\\]{1,80})"'
    rb'|[^\0]{0,400}<meta name="generator" content="sinkscope ([\w-]{1,80})">'
)
"""What the files of sinkscope say about their kind: JSON, or HTML."""


# --- written ---


def write_output(path: PathName, data: bytes | str) -> Path:
    """Write an output that a user requested, as `write_atomic` does. It replaces only an earlier output of its kind.

    Args:
        path: The file.
        data: Content that says its kind.

    Raises:
        SinkscopeError: As for `write_atomic` and `check_output`.
    """
    if isinstance(data, str):
        data = data.encode(errors="backslashreplace")  # a token may be half of a surrogate pair, which UTF-8 lacks
    check_output(path, [kind_in_file(data)])
    return write_atomic(path, data)


def check_output(path: PathName, kinds: Sequence[str | None]) -> Path:
    """Return the path that `write_output` will write, after checking that it can and that no foreign file is lost.

    Args:
        path: A file that is new, empty, or an earlier output.
        kinds: Kinds that the output may have, such as "find-sinks".

    Raises:
        SinkscopeError: As for `check_writable`; also if the file holds anything else.
    """
    target = check_writable(path)
    if target.is_file() and target.stat().st_size:
        with open_regular(target, os.fspath(path), "give another name") as file:
            present = kind_in_file(file.read(1 << 12))
        if present is None or present not in kinds:
            content = f"an output of kind {present}" if present else "something that sinkscope did not write"
            raise SinkscopeError(f"{path} is there already and holds {content}: give another name, or remove it first")
    return target


def kind_in_file(content: bytes) -> str | None:
    """Return the kind that a file of sinkscope says it is of; None for any other content."""
    match = _KIND.match(content)
    return None if match is None else (match[1] or match[2]).decode(errors="replace")


def check_writable(path: PathName, *, folder: bool = False) -> Path:
    """Return the path that `write_atomic` will write, after checking that it can. The check leaves no file behind.

    Args:
        path: Path of a file.
        folder: Whether it is that of a folder.

    Raises:
        SinkscopeError: The path is empty, a folder where a file is written or the other way round, it or its folder is
            not writable, or a part of it is not a folder.
    """
    name = os.fspath(path)
    target = Path(os.path.realpath(name))  # a link stays a link: its target is replaced
    if not name or (not folder and (os.path.isdir(target) or name.endswith(("/", os.sep)))):
        raise SinkscopeError(f"{name or 'a file without a name'} is a folder: give the name of a file to write")
    if folder and os.path.isfile(target):
        raise SinkscopeError(f"{name} is a file: give the name of a folder to write")
    try:
        if is_device(Path(name)):
            return Path(name)
        with suppress(FileNotFoundError):
            target.lstat()  # asks the file system about the name itself: too long, below a file, no permission
        home = next(place for place in (target, *target.parents) if place.is_dir())
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError("permission denied")
        tempfile.TemporaryFile(dir=home).close()  # the only sure way to know
    except OSError as error:
        raise cannot_write(name, error) from None
    return target


def is_device(target: Path) -> bool:
    """Return whether it is a device or pipe such as /dev/null, which is written in place and never replaced."""
    return target.exists() and not target.is_file() and not target.is_dir()


def write_atomic(path: PathName, data: bytes | str) -> Path:
    """Write `data` to a temporary file and move it to `path`, so that readers see the old file or the whole new one.

    Missing folders are made. Text is written as UTF-8. Devices and pipes are written in place.

    Returns:
        The path written, with links resolved.

    Raises:
        SinkscopeError: As for `check_writable`; also if the disk is full. The old file is then unchanged.
    """
    target = check_writable(path)
    if isinstance(data, str):
        data = data.encode()
    temporary = target.with_name(f".sinkscope-{secrets.token_hex(6)}.tmp")
    try:
        if is_device(target):
            target.write_bytes(data)
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        write_through(temporary, "xb", data)
        temporary.replace(target)
    except OSError as error:
        raise cannot_write(path, error) from None
    finally:  # also after Ctrl-C; nothing is left of it when it was moved
        temporary.unlink(missing_ok=True)
    return target


def write_through(file: Path, mode: str, data: bytes) -> None:
    """Write to a file that is opened in a mode; it is on the disk when this returns.

    Raises:
        OSError: It cannot be written.
    """
    with open(file, mode) as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())  # a full disk may only be noticed here


def cannot_write(path: PathName, error: OSError, remedy: str = "choose another place") -> SinkscopeError:
    """Return one line on what the file system reported and what to do about it."""
    return SinkscopeError(f"cannot write {os.fspath(path):.120}: {reason_of(error)}; {remedy}")


def reason_of(error: Exception) -> str:
    """Return what the file system reported, in lower case."""
    return (getattr(error, "strerror", None) or str(error)).lower().rstrip(".")


# --- read ---


def path_of(name: PathName, remedy: str = "give the path of a file or folder") -> Path:
    """Return the path of a file or folder to read, with ~ as the home folder.

    Raises:
        SinkscopeError: No file or folder can have this name.
    """
    try:
        path = Path(name).expanduser()
        with suppress(FileNotFoundError):
            path.stat()
    except (OSError, RuntimeError, ValueError) as error:  # too long; no such home folder; a zero byte
        raise _unread(repr(os.fspath(name)), reason_of(error), remedy) from None
    return path


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
        if stat.S_ISREG(os.stat(file).st_mode):  # before it is opened, which some devices take as an act
            return open(file, "rb")
    except OSError as error:
        raise _unread(shown, reason_of(error), remedy) from None
    raise _unread(shown, "it is a folder, a pipe or a device, not a regular file", remedy)


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
    if "\0" not in name and ".." not in re.split(r"[\\/]", name):
        path = folder / name
        end = Path(os.path.realpath(path))
        if any(end.is_relative_to(os.path.realpath(root)) for root in (folder, *roots)):
            return path
    raise SinkscopeError(
        f"{said_by} names {name!r:.120}, which leads out of {folder.name or folder}: only files of that folder are "
        "read, so put it there, as a file and not as a link"
    )


def read_bytes(path: PathName, remedy: str) -> bytes:
    """Return the content of a file, or of standard input for "-".

    Args:
        path: The file.
        remedy: What to do about a file that cannot be read.

    Raises:
        SinkscopeError: The file cannot be read, is no regular file, or is too long.
    """
    name, shown = os.fspath(path), _shown(path)
    opened: Any = nullcontext(getattr(sys.stdin, "buffer", BytesIO()))  # there is none if it is closed
    if name != "-":
        opened = open_regular(path_of(name, remedy), shown, remedy)
    with opened as source:
        try:
            content = source.read(MOST + 1)
        except OSError as error:
            raise _unread(shown, reason_of(error), remedy) from None
    if len(content) > MOST:
        raise _unread(shown, f"it is longer than {MOST:,} bytes", remedy)
    return content


def read_text(path: PathName, remedy: str = "give the path of a text file") -> str:
    """Return the text of a file, or of standard input for "-", in UTF-8; the arguments are those of `read_bytes`.

    Raises:
        SinkscopeError: As for `read_bytes`, or it is not UTF-8.
    """
    content = read_bytes(path, remedy)
    try:
        text = content.decode("utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError:
        raise SinkscopeError(f"{_shown(path)} is not UTF-8 text: {remedy}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: PathName, remedy: str = "expected a file that sinkscope wrote") -> Any:
    """Return the content of a JSON file; the arguments are those of `read_bytes`.

    Raises:
        SinkscopeError: As for `read_text`, or it is not JSON.
    """
    text = read_text(path, remedy)
    try:
        return parse_json(text)
    except ValueError as error:
        raise SinkscopeError(f"{_shown(path)} is not a JSON file ({error}); {remedy}") from None


def _unread(shown: str, reason: str, remedy: str) -> SinkscopeError:
    return SinkscopeError(f"cannot read {shown}: {reason}; {remedy}")


def _shown(path: PathName) -> str:
    """The name of what is read, for errors."""
    name = os.fspath(path)
    return "standard input" if name == "-" else pathless(name) or "a file without a name"
