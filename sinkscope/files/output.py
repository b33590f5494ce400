"""Files of commands: written atomically, refused before any work begins, and read with one-line errors."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import struct
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import parse_json

PAGE, FIGURE, ARRAYS = "page", "figure", "arrays"  # marks of files; that of a result is "json" and its kind
_RESULT = re.compile(rb'\s*\{\s*"schema":\s*\d+,\s*"kind":\s*"([^"\\]{1,80})"')
_PAGE = b'<meta name="generator" content="sinkscope">'
_PNG, _CHUNK, _COMMENT = b"\x89PNG\r\n\x1a\n", b"tEXtSoftware\0sinkscope", b"sinkscope"
_RUN = ("settings.json", "runs.jsonl", "lock", "prompts.jsonl")
_HEAD = 33  # bytes of a PNG before its second chunk


def _mark(data: bytes) -> str | None:
    """Which kind of sinkscope output a file is, judged by its content or by its beginning and end; None if none."""
    if found := _RESULT.match(data):
        return f"json {found[1].decode(errors='replace')}"
    if data.startswith(_PNG):
        return FIGURE if data[_HEAD + 4 :].startswith(_CHUNK) else None
    if data.startswith(b"PK"):
        return ARRAYS if data.endswith(_COMMENT) else None
    return PAGE if _PAGE in data[: 1 << 12] else None


def _marked(data: bytes) -> bytes:
    """Whether this is a zip archive with sinkscope's mark; other formats identify themselves."""
    if data.startswith(b"PK"):  # it ends with the length of a comment
        return data[:-2] + struct.pack("<H", len(_COMMENT)) + _COMMENT
    return data


def _mark_of(file: Path) -> str | None:
    with suppress(OSError), file.open("rb") as opened:  # what cannot be read is nobody knows what
        start = opened.read(1 << 12)
        opened.seek(max(0, file.stat().st_size - 64))
        return _mark(start + opened.read())
    return None


def check_output(path: str | os.PathLike[str], *kinds: str) -> Path:
    """Return the path that `write_output` will write, after checking that it can and that no foreign file is lost.

    Args:
        path: A file that is new, empty, or an earlier output.
        kinds: Marks that an earlier output may have: "json find-sinks", "json" for any result, `PAGE`, `FIGURE`,
            `ARRAYS`. Without any, all are allowed.

    Raises:
        SinkscopeError: As for `check_writable`; also if the file holds anything else.
    """
    target = check_writable(path)
    if not target.exists() or _is_device(target) or not target.stat().st_size:
        return target
    there = _mark_of(target)
    if there is None or (kinds and not any(f"{there} ".startswith(f"{kind} ") for kind in kinds)):
        found = "something that sinkscope did not write" if there is None else there.replace("json ", "a result of ")
        wanted = " or ".join(kind.replace("json ", "result of ") for kind in kinds) or "output"
        raise SinkscopeError(
            f"{path} is there already and holds {found}; only an earlier {wanted} is replaced: give another name, or "
            "remove that file first"
        )
    return target


def write_output(path: str | os.PathLike[str], data: bytes | str) -> Path:
    """Like `write_atomic`, for outputs that a user requested: only an earlier output in the same format is replaced.

    Raises:
        SinkscopeError: As for `write_atomic` and `check_output`.
    """
    content = _marked(data.encode() if isinstance(data, str) else data)
    check_output(path, (_mark(content) or "unmarked output").split()[0])
    return write_atomic(path, content)


def check_losses(
    outputs: Mapping[str, str | os.PathLike[str]],
    inputs: Mapping[str, Iterable[object]],
    folders: Mapping[str, str | os.PathLike[str]],
) -> None:
    """Refuse outputs that would replace one another or an input, or lie in a folder whose files belong together.

    Args:
        outputs: Files that will be written, by option.
        inputs: Arguments that may name files to read, by option.
        folders: Folders that will be filled, by option.

    Raises:
        SinkscopeError: One of them would.
    """
    written: dict[str, str] = {}
    for flag, path in {**outputs, **folders}.items():
        target = check_writable(path, folder=flag in folders)
        if flag in folders and target.exists() and not target.is_dir():
            raise SinkscopeError(f"{flag} {path} is a file: give the name of a new folder")
        if target.is_dir() and any(map(_foreign, target.iterdir())) and "run" not in _belongs(target):
            raise SinkscopeError(f"{flag} {path} holds other files: give a new or empty folder")
        if _is_device(target) and not target.is_dir():
            continue
        if (other := written.setdefault(str(target), flag)) != flag:
            raise SinkscopeError(f"{target.name} is given for two outputs, {other} and {flag}: give each its own file")
        for name, words in inputs.items():
            if any(_same(target, file) for word in words for file in (str(word), str(word).partition(":")[2])):
                raise SinkscopeError(f"{flag} {path} would replace what {name} reads: give another name")
        for home in target.parents:
            if what := _belongs(home):
                raise SinkscopeError(f"{flag} {path} lies in {home.name}, {what}: give a place outside")


def _same(target: Path, file: str) -> bool:
    with suppress(OSError, ValueError):
        return bool(file) and target.is_file() and os.path.samefile(target, file)
    return False


def _foreign(file: Path) -> bool:
    """Whether a file in a run's folder does not belong to the run; parts of a long job are runs inside it."""
    if file.is_dir():
        return "run" not in _belongs(file)
    return not (file.name in _RUN or file.name.startswith(".sinkscope-") or _mark_of(file))


def _belongs(folder: Path) -> str:
    """What a folder is, if its files belong together and no other may be added; "" for any other folder."""
    with suppress(OSError):
        if (folder / _RUN[0]).is_file() and any((folder / name).is_file() for name in _RUN[1:]):
            return "the folder of a run"
        if (folder / "config.json").is_file():
            weights = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.gguf")
            return "the folder of a model" if any(any(folder.glob(kind)) for kind in weights) else ""
    return ""


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
    if not name or "\0" in name or not _is_text(name):
        raise SinkscopeError(f"{name!r} is not a file name: give the name of a file to write")
    try:
        target = Path(os.path.realpath(name))  # a link stays a link: its target is replaced
        if not folder and (target.is_dir() or name.endswith(("/", os.sep))):
            raise SinkscopeError(f"{name} is a folder: give the name of a file to write")
        with suppress(FileNotFoundError):
            target.lstat()  # asks the file system about the name itself: too long, below a file, no permission
        home = target if target.is_dir() else next(parent for parent in target.parents if parent.exists())
    except OSError as error:
        raise _cannot(name, error) from None
    if target.exists() and not os.access(target, os.W_OK):
        raise SinkscopeError(f"cannot write {name}: no permission; choose another file")
    if _is_device(target) and not target.is_dir():
        return target
    if not os.access(home, os.W_OK | os.X_OK):
        raise SinkscopeError(f"cannot write {name}: no permission in its folder; choose another place")
    try:
        tempfile.TemporaryFile(dir=home).close()  # the only sure way to know
    except OSError as error:
        raise _cannot(name, error) from None
    return target


def _is_text(name: str) -> bool:
    try:
        return bool(name.encode())
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
    """One line on what the file system reported and what to do about it."""
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
    """Text of a file, or of standard input for "-"; a failure raises a one-line error."""
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
        raise SinkscopeError(
            f"cannot read {path}: {(error.strerror or str(error)).lower()}; give the path of a text file"
        ) from None


def read_json(
    path: str | os.PathLike[str], remedy: str, *, page: str | None = None, kind: str | None = None, schema: int = 1
) -> Any:
    """The content of a JSON file.

    Args:
        path: The file.
        remedy: What to do about a file that cannot be read, or is another one.
        page: Documentation page to name in errors.
        kind: The kind that the file must say it is of. None: the file says none.
        schema: The schema of that kind that this version reads.

    Raises:
        SinkscopeError: The file cannot be read, is not JSON, or is of another kind or schema.
    """
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SinkscopeError(
            f"cannot read {path}: {(error.strerror or str(error)).lower()}; {remedy}", page=page
        ) from None
    except ValueError as error:
        raise SinkscopeError(f"{Path(path).name} is not JSON ({error}); {remedy}", page=page) from None
    found = (content.get("kind"), content.get("schema")) if isinstance(content, dict) else (None, None)
    if kind is not None and found != (kind, schema):
        raise SinkscopeError(f"{path} has kind and schema {found!r}, not {(kind, schema)!r}; {remedy}", page=page)
    return content
