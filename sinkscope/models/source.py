"""What a user's name for a model means, and the files behind it."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sinkscope.errors import SinkscopeError
from sinkscope.models.checkpoint import check_folder, hub_file, read_json
from sinkscope.models.checks import check_kind
from sinkscope.models.names import BUNDLED, RECALL, resolve

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")  # in the name of a tensor
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first that is there, sharded before single


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    Attributes:
        kind: "folder", "gguf" (one file) or "hub".
        where: path of the folder or file, or hub id.
        name: for reports: short name, hub id, or base name.
        revision: branch, tag or commit of a hub id.
    """

    kind: Literal["folder", "gguf", "hub"]
    where: Path | str
    name: str
    revision: str | None = None


def locate(x: str | os.PathLike[str] | None, revision: str | None = None) -> Source:
    """What `x` means: None is the bundled model, else a short name, hub id, folder or `.gguf` file. Reads no weights.

    A folder or file that exists comes before a hub id or short name of the same spelling.

    Raises:
        SinkscopeError: it means nothing; `revision` given for something that has none.
    """
    try:
        source = _locate(x, revision)
    except PermissionError as error:
        raise no_permission(error.filename) from None
    if revision is not None and source.kind != "hub":
        raise SinkscopeError(
            f"revision {revision!r} means nothing for the {source.kind} {source.name}; revisions belong to hub ids"
        )
    return source


def no_permission(path: object) -> SinkscopeError:
    """The file is there, and not for us."""
    return SinkscopeError(f"cannot read {path}: permission denied; ask for it, or give a copy", page="no-such-path")


def _locate(x: str | os.PathLike[str] | None, revision: str | None) -> Source:
    if x is None or x == BUNDLED:
        return Source("folder", Path(__file__).with_name("bundled"), BUNDLED)
    if x == RECALL:
        return Source("folder", Path(__file__).with_name("recall"), RECALL)
    text = os.fspath(x)
    path = Path(text).expanduser()
    if not text.strip():
        raise SinkscopeError("the model name is empty; expected a short name, hub id org/name, folder or .gguf file")
    if path.is_file():
        return Source("gguf", _checked_gguf(path), path.name)
    looks_like_path = not isinstance(x, str) or text.startswith((".", "~", os.sep)) or path.suffix == ".gguf"
    # A folder that merely shares a model's name (`gpt2/` with notes in it) does not hide the model.
    if path.is_dir() and (looks_like_path or (path / "config.json").is_file() or _is_unknown(text)):
        return Source("folder", path, path.resolve().name)
    if looks_like_path:
        raise SinkscopeError(
            f"there is no file or folder {text!r}; give an existing one, a hub id org/name or a short name",
            page="no-such-path",
        )
    if _HUB_ID.fullmatch(text):
        return Source("hub", text, text, revision)
    return Source("hub", resolve(text), text, revision)


def _is_unknown(text: str) -> bool:
    """Neither a short name nor spelled like a hub id."""
    if _HUB_ID.fullmatch(text):
        return False
    try:
        resolve(text)
    except SinkscopeError:
        return True
    return False


def _checked_gguf(file: Path) -> Path:
    with file.open("rb") as f:
        magic = f.read(4)
    if magic == b"GGUF":
        return file
    if file.suffix == ".gguf":
        raise SinkscopeError(
            f"{file.name} is not a GGUF file: it begins with {magic!r}, expected b'GGUF'; download it again",
            page="bad-gguf",
        )
    raise SinkscopeError(
        f"{file.name} is not a model: expected a folder or a .gguf file; give its folder {str(file.parent)!r}",
        page="no-such-path",
    )


@dataclass(frozen=True)
class Local:
    """Files on this machine: a checkpoint folder, the GGUF file in it (if it is one), the commit of a hub repo."""

    folder: Path
    gguf: str | None = None
    commit: str | None = None

    @property
    def pickled(self) -> bool:
        """The weights are pickles (`pytorch_model.bin`), not safetensors."""
        return self.gguf is None and not any(self.folder.glob("*.safetensors*"))


@contextmanager
def local_files(source: Source, layers: int | None = None, *, code: bool = False) -> Generator[Local]:
    """A whole checkpoint on this machine, for the length of a `with`.

    Of a hub repo only the needed files are downloaded: safetensors before pickles, with `layers` only the shards that
    hold tensors of the first `layers` decoder layers, with `code` also the Python files that its config.json names.

    Raises:
        SinkscopeError: the folder is no whole checkpoint, or the repo cannot be had.
    """
    if source.kind == "gguf":
        yield Local(Path(source.where).parent, gguf=Path(source.where).name)
    elif source.kind == "folder":
        check_folder(Path(source.where))
        yield Local(Path(source.where))
    else:
        repo = str(source.where)
        try:
            folder = hub_file(repo, "config.json", source.revision).parent
        except FileNotFoundError:
            raise SinkscopeError(
                f"{repo} has no config.json, so it is no transformers model; give one that has", page="no-config"
            ) from None
        check_kind(repo, read_json(folder / "config.json"))  # before gigabytes of what cannot be measured are fetched
        commit = folder.name  # the cache names a snapshot after its commit: all files are of one revision
        for name in (*TOKENIZER_FILES, *(_code_files(folder) if code else ())):
            optional_file(repo, name, commit)
        index, left_out = _download_weights(repo, commit, layers)
        if not left_out:
            check_folder(folder)
            yield Local(folder, commit=commit)
            return
        with tempfile.TemporaryDirectory(prefix="sinkscope-") as view:
            yield Local(_without(folder, Path(view), index, left_out), commit=commit)


def optional_file(repo: str, name: str, commit: str) -> Path | None:
    """A file of a hub repo, None if it has none of that name.

    Raises:
        SinkscopeError: it cannot be had.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    known = try_to_load_from_cache(repo, name, revision=commit)
    if known is not None:  # a path, or the mark that this commit has no such file: both hold for ever
        return Path(known) if isinstance(known, str) else None
    try:
        return hub_file(repo, name, commit)
    except FileNotFoundError:
        return None
    except SinkscopeError:
        # Offline, whether the repo has the file cannot be asked; what the cache lacks is then taken as not there.
        if constants.HF_HUB_OFFLINE:
            return None
        raise


def _code_files(folder: Path) -> list[str]:
    auto_map: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auto_map", {})
    names = [v for value in auto_map.values() for v in (value if isinstance(value, list) else [value]) if v]
    return sorted({name.split("--")[-1].split(".")[0] + ".py" for name in names})


def _download_weights(repo: str, commit: str, layers: int | None) -> tuple[str, set[str]]:
    """The name of the index (empty for a single file), and its shards that no wanted layer needs."""
    for single in _WEIGHTS:
        if (index := optional_file(repo, f"{single}.index.json", commit)) is not None:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            needed = {shard for tensor, shard in weight_map.items() if _wanted(tensor, layers)}
            for shard in sorted(needed):
                try:
                    hub_file(repo, shard, commit)
                except FileNotFoundError:
                    raise SinkscopeError(
                        f"{repo} lacks {shard}, named in its {index.name}; try another revision", page="missing-shard"
                    ) from None
            return index.name, set(weight_map.values()) - needed
        if optional_file(repo, single, commit) is not None:
            return "", set()
    raise SinkscopeError(
        f"{repo} has no weights for transformers (expected safetensors or pytorch_model.bin); give another repo, or "
        "download a .gguf file and give that",
        page="no-weights",
    )


def _wanted(tensor: str, layers: int | None) -> bool:
    match = _LAYER.search(tensor)
    return layers is None or match is None or int(match[1]) < layers


def _without(folder: Path, view: Path, index: str, left_out: set[str]) -> Path:
    """`view`, filled with links to the files of `folder`, and an index that leaves out some shards."""
    content = json.loads((folder / index).read_text(encoding="utf-8"))
    content["weight_map"] = {t: s for t, s in content["weight_map"].items() if s not in left_out}
    (view / index).write_text(json.dumps(content), encoding="utf-8")
    for file in folder.iterdir():
        if file.name not in left_out and file.name != index and file.is_file():
            try:
                os.symlink(file.resolve(), view / file.name)
            except OSError:  # Windows allows links only to some users
                shutil.copyfile(file, view / file.name)
    check_folder(view)
    return view
