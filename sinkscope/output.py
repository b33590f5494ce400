"""Files of commands: written whole or not at all, refused before the work begins, and read with one-line errors."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
from contextlib import suppress
from pathlib import Path

from sinkscope.errors import SinkscopeError


def check_writable(path: str | os.PathLike[str]) -> Path:
    """The path that `write_atomic` will write, if it can; nothing is created.

    Raises:
        SinkscopeError: it is empty or a folder, it or its folder may not be written, or a part of it is no folder.
    """
    name = os.fspath(path)
    if not name or "\0" in name:
        raise SinkscopeError(f"{name!r} is not a file name: give the name of a file to write")
    try:
        target = Path(os.path.realpath(name))  # a link stays a link: its target is replaced
        if target.is_dir() or name.endswith(("/", os.sep)):
            raise SinkscopeError(f"{name} is a folder: give the name of a file to write")
        with suppress(FileNotFoundError):
            target.lstat()  # asks the file system about the name itself: too long, below a file, no permission
        folder = next(parent for parent in target.parents if parent.exists())
    except OSError as error:
        raise _cannot(name, error) from None
    if target.exists() and not os.access(target, os.W_OK):
        raise SinkscopeError(f"cannot write {name}: no permission; choose another file")
    if not _is_device(target) and not os.access(folder, os.W_OK | os.X_OK):
        raise SinkscopeError(f"cannot write {name}: no permission in its folder; choose another place")
    return target


def _is_device(target: Path) -> bool:
    """/dev/null, a pipe: written in place, never replaced."""
    return target.exists() and not target.is_file()


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> Path:
    """Write `data` beside `path` and move it there: whoever looks sees the old file or the whole new one.

    Missing folders are made. Text is written as UTF-8. Devices and pipes are written in place.

    Returns:
        The path written, links resolved.

    Raises:
        SinkscopeError: as `check_writable`, and when the disk is full; the old file is then untouched.
    """
    target = check_writable(path)
    content = data.encode() if isinstance(data, str) else data
    temporary = target.with_name(f".sinkscope-{secrets.token_hex(6)}.tmp")
    try:
        if _is_device(target):
            with open(target, "wb") as device:
                device.write(content)
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
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
    except OSError as error:
        raise _cannot(os.fspath(path), error) from None
    return target


def _cannot(name: str, error: OSError) -> SinkscopeError:
    """One line for what the file system said, with what to do about it."""
    remedy = {
        errno.ENOSPC: "the disk is full; make room or choose another place",
        errno.EDQUOT: "your quota is used up; make room or choose another place",
        errno.EFBIG: "the file is larger than allowed here; choose another place",
        errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
        errno.EACCES: "no permission; choose another place",
        errno.ENOTDIR: "a part of the path is a file, not a folder; choose another place",
        errno.EROFS: "the disk is read-only; choose another place",
    }.get(error.errno or 0, f"{(error.strerror or str(error)).lower()}; choose another place")
    shown = name if len(name) <= 120 else f"{name[:60]}..."
    return SinkscopeError(f"cannot write {shown}: {remedy}")


def read_text(name: str) -> str:
    """Text of a file, or of standard input for "-"; or one line that says why not."""
    path = Path(name)
    try:
        if name != "-":
            return path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
        if sys.stdin is None:  # closed
            return ""
        raw = getattr(sys.stdin, "buffer", None)  # the terminal's encoding may be another
        return sys.stdin.read() if raw is None else raw.read().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        if name == "-":
            raise SinkscopeError("standard input is not UTF-8 text: convert it, or give a file") from None
        raise SinkscopeError(f"{path.name} is not UTF-8 text: convert it, or give another file") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SinkscopeError(f"cannot read {path}: {reason}; give the path of a text file") from None
