"""Files of commands: written beside and renamed, never in place of a foreign file, and read with one-line errors."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import parse_json

MARKS = (  # what the files of sinkscope say about their kind: JSON, HTML, PNG
    re.compile(rb'\s*\{\s*"schema":\s*\d+,\s*"kind":\s*"([^"\\]{1,80})"'),
    re.compile(rb'[^\0]{0,400}<meta name="generator" content="sinkscope ([\w-]{1,80})">'),
    re.compile(rb"\x89PNG\r\n\x1a\n.{29}tEXtSoftware\0sinkscope ([\w-]{1,80})\.", re.DOTALL),
)
REMEDIES = {
    errno.ENOSPC: "the disk is full; make room or choose another place",
    errno.EDQUOT: "your quota is used up; make room or choose another place",
    errno.EFBIG: "the file is larger than allowed here; choose another place",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.EACCES: "no permission; choose another place",
    errno.ENOTDIR: "a part of the path is a file, not a folder; choose another place",
    errno.EROFS: "the disk is read-only; choose another place",
}


def write_output(path: str | os.PathLike[str], data: bytes | str, *, force: bool = False) -> Path:
    """Write an output that a user requested, as `write_atomic` does. It replaces only an earlier output of its kind.

    Args:
        path: The file.
        data: Content that says its kind.
        force: Replace any other file, too.

    Raises:
        SinkscopeError: As for `write_atomic` and `check_output`.
    """
    if isinstance(data, str):
        data = data.encode()
    check_output(path, kind_of(data), force=force)
    return write_atomic(path, data)


def check_output(path: str | os.PathLike[str], kind: str | None, *, force: bool = False) -> Path:
    """Return the path that `write_output` will write, after checking that it can and that no foreign file is lost.

    Args:
        path: A file that is new, empty, or an earlier output.
        kind: Kind of the output, such as "find-sinks".
        force: Allow any file.

    Raises:
        SinkscopeError: As for `check_writable`; also if the file holds anything else.
    """
    target = check_writable(path)
    if force or not target.is_file() or target.stat().st_size == 0:
        return target
    present = _kind_of_file(target)
    content = f"an output of kind {present}"
    if present is None:
        content = "something that sinkscope did not write"
    if present is None or present != kind:
        raise SinkscopeError(
            f"{path} is there already and holds {content}: give another name, or --force to replace it"
        )
    return target


def check_outputs(paths: Mapping[str, str], kinds: Mapping[str, str | None], *, force: bool = False) -> None:
    """Refuse outputs of a command, before its work begins, that cannot be written or would replace one another.

    Args:
        paths: Files and folders that will be written, by option.
        kinds: Kind of each file that `write_output` will write, by option.
        force: Allow them to replace any file.

    Raises:
        SinkscopeError: One of them is refused.
    """
    options: dict[Path, str] = {}
    for flag, path in paths.items():
        if flag in kinds:
            target = check_output(path, kinds[flag], force=force)
        else:
            target = check_writable(path, folder=True)
        if target in options and not _is_device(target):
            raise SinkscopeError(f"{target.name} is given for {options[target]} and {flag}: give each its own file")
        options[target] = flag


def kind_of(content: bytes) -> str | None:
    """The kind that a file of sinkscope says it is of; None for any other content."""
    for mark in MARKS:
        match = mark.match(content)
        if match is not None:
            return match[1].decode(errors="replace")
    return None


def _kind_of_file(file: Path) -> str | None:
    """The same, from the beginning of a file."""
    with suppress(OSError), file.open("rb") as opened:
        return kind_of(opened.read(1 << 12))
    return None


def check_writable(path: str | os.PathLike[str], *, folder: bool = False) -> Path:
    """Return the path that `write_atomic` will write, after checking that it can. The check leaves no file behind.

    Args:
        path: Path of a file.
        folder: Whether it may also be a folder.

    Raises:
        SinkscopeError: The path is empty, not UTF-8 or a folder, it or its folder is not writable, or a part of it is
            not a folder.
    """
    name = os.fspath(path)
    if not _is_file_name(name):
        raise SinkscopeError(f"{name!r} is not a file name: give the name of a file to write")
    try:
        target = Path(os.path.realpath(name))  # a link stays a link: its target is replaced
        if not folder and (target.is_dir() or name.endswith(("/", os.sep))):
            raise SinkscopeError(f"{name} is a folder: give the name of a file to write")
        with suppress(FileNotFoundError):
            target.lstat()  # asks the file system about the name itself: too long, below a file, no permission
        home = target
        while not home.is_dir():
            home = home.parent
        if target.exists() and not os.access(target, os.W_OK):
            raise SinkscopeError(f"cannot write {name}: no permission; choose another file")
        if target.is_dir() or not _is_device(target):
            tempfile.TemporaryFile(dir=home).close()  # the only sure way to know
    except OSError as error:
        raise _cannot_write(name, error) from None
    return target


def _is_file_name(name: str) -> bool:
    try:
        return bool(name.encode()) and "\0" not in name
    except UnicodeEncodeError:  # bytes of the command line that are not UTF-8
        return False


def _is_device(target: Path) -> bool:
    """Whether it is a device or pipe such as /dev/null, which is written in place and never replaced."""
    return target.exists() and not target.is_file()


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> Path:
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
    try:
        if _is_device(target):
            target.write_bytes(data)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            _write_and_rename(target, data)
    except OSError as error:
        raise _cannot_write(os.fspath(path), error) from None
    return target


def _write_and_rename(target: Path, content: bytes) -> None:
    temporary = target.with_name(f".sinkscope-{secrets.token_hex(6)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # a full disk may only be noticed here
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        temporary.replace(target)
    finally:  # also after Ctrl-C; nothing is left of it when it was moved
        temporary.unlink(missing_ok=True)


def _cannot_write(name: str, error: OSError) -> SinkscopeError:
    """One line on what the file system reported and what to do about it."""
    remedy = REMEDIES.get(error.errno or 0, f"{reason_of(error)}; choose another place")
    shown = name
    if len(name) > 120:
        shown = f"{name[:60]}..."
    return SinkscopeError(f"cannot write {shown}: {remedy}")


def reason_of(error: OSError) -> str:
    """What the file system reported, in lower case."""
    return (error.strerror or str(error)).lower()


def read_text(name: str) -> str:
    """Text of a file, or of standard input for "-"; a failure raises a one-line error."""
    path = Path(name)
    try:
        if name != "-":
            return path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
        if sys.stdin is None:  # closed
            return ""
        raw = getattr(sys.stdin, "buffer", None)  # the terminal's encoding may be another
        if raw is None:
            return sys.stdin.read()
        return raw.read().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        if name == "-":
            raise SinkscopeError("standard input is not UTF-8 text: convert it, or give a file") from None
        raise SinkscopeError(f"{path.name} is not UTF-8 text: convert it, or give another file") from None
    except OSError as error:
        raise SinkscopeError(f"cannot read {path}: {reason_of(error)}; give the path of a text file") from None


def read_json(
    path: str | os.PathLike[str], remedy: str = "expected what --json or .save() wrote", *, page: str | None = None
) -> Any:
    """The content of a JSON file.

    Args:
        path: The file.
        remedy: What to do about a file that cannot be read.
        page: Documentation page to name in errors.

    Raises:
        SinkscopeError: The file cannot be read, or is not JSON.
    """
    name = Path(path).name or os.fspath(path)
    try:
        return parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SinkscopeError(f"cannot read {name}: {reason_of(error)}; {remedy}", page=page) from None
    except ValueError as error:
        raise SinkscopeError(f"{name} is not a JSON file ({error}); {remedy}", page=page) from None
