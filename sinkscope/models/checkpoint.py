"""Checkpoints: what a user's name for a model means, the files behind it, whether they are whole, and their tensors."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.config import check_kind, read_json
from sinkscope.models.names import BUNDLED, RECALL, find, resolve

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_LFS = b"version "  # how a Git LFS pointer begins
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


def check_folder(folder: Path) -> None:
    """Check that `folder` is a whole checkpoint. JSON files and headers of weights are read, no weights.

    Raises:
        SinkscopeError: what is missing or broken, and what to do.
    """
    if not folder.is_dir():
        raise SinkscopeError(f"{folder} is not a folder; give a folder that holds config.json and weights")
    read_json(folder / "config.json")
    for shard in _weight_files(folder):
        if shard.suffix == ".bin":
            _check_pickled(shard)
        if shard.suffix == ".safetensors":
            header = read_header(shard)
            named = {} if shard.name == _SINGLE else _index_map(folder)
            if absent := [n for n, s in named.items() if s == shard.name and n not in header]:
                raise SinkscopeError(
                    f"{shard.name} lacks tensor {absent[0]!r}, which {_INDEX} places there; download {shard.name} and "
                    f"{_INDEX} again, from one revision",
                    page="missing-shard",
                )


def _check_pickled(file: Path) -> None:
    """Does it begin as what torch.save writes: a zip archive, or (before torch 1.6) a pickle?"""
    with file.open("rb") as f:
        start = f.read(len(_LFS))
    if start == _LFS:
        raise _pointer(file)
    if not start.startswith((b"PK", b"\x80")):
        raise SinkscopeError(
            f"{file.name} is no checkpoint of torch: it begins with {start[:4]!r}; download it again",
            page="pickled-weights",
        )


def _pointer(file: Path) -> SinkscopeError:
    return SinkscopeError(
        f"{file.name} is a Git LFS pointer, not weights; run `git lfs pull` in {file.parent}",
        page="truncated-safetensors",
    )


def read_header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: tensor name -> {"dtype", "shape", "data_offsets"}.

    Raises:
        SinkscopeError: the header is not JSON, or the file is shorter or longer than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as f:
        start = f.read(8)
        length = int.from_bytes(start, "little")
        raw = f.read(min(length, size))
    if start == _LFS:
        raise _pointer(file)
    # A real header begins with "{"; without that the first bytes are no length and say nothing of what is missing.
    if size < 8 or (len(raw) < length and raw[:1] in (b"", b"{")):
        raise _damaged(file, size, max(8, 8 + length), "at least ")
    try:
        entries = {name: entry for name, entry in json.loads(raw).items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, AttributeError, TypeError, KeyError, IndexError):
        raise SinkscopeError(
            f"{file.name} is not a safetensors file: its header is not JSON; download it again",
            page="bad-safetensors-header",
        ) from None
    if size != 8 + length + end:
        raise _damaged(file, size, 8 + length + end)
    return entries


def _damaged(file: Path, size: int, expected: int, at_least: str = "") -> SinkscopeError:
    off = f"{expected - size:,} bytes are missing" if size < expected else f"{size - expected:,} bytes are too many"
    return SinkscopeError(
        f"{file.name} is damaged: {at_least}{off} ({size:,} on disk, expected {at_least}{expected:,}); "
        "download it again",
        page="truncated-safetensors",
    )


def _index_map(folder: Path, name: str = _INDEX) -> dict[str, str]:
    """Tensor name -> shard as the index says; empty without an index."""
    if not (folder / name).is_file():
        return {}
    content = read_json(folder / name)
    if not isinstance(content, dict) or not isinstance(content.get("weight_map"), dict):
        raise SinkscopeError(f"{folder / name} has no weight_map; download it again", page="missing-shard")
    return content["weight_map"]


def _weight_files(folder: Path) -> list[Path]:
    """The files transformers would load, in its order of preference; all of them exist."""
    for name in (_SINGLE, _INDEX, *_PICKLED):
        if not (folder / name).is_file():
            continue
        if not name.endswith("index.json"):
            return [folder / name]
        shards = sorted(set(_index_map(folder, name).values()))
        if absent := [s for s in shards if not (folder / s).is_file()]:
            raise SinkscopeError(
                f"{folder} lacks {absent[0]}, named in {name} ({len(absent)} of {len(shards)} shards are missing); "
                f"download {'it' if len(absent) == 1 else 'them'} into the folder",
                page="missing-shard",
            )
        return [folder / s for s in shards]
    gguf = sorted(f.name for f in folder.glob("*.gguf"))
    loose = sorted(f.name for f in folder.glob("*.safetensors"))
    remedy = (
        f"give the file itself: {folder / gguf[0]}"
        if gguf
        else f"there is {loose[0]} but no {_INDEX}; download the index too"
        if loose
        else "download the weights, not only the configuration"
    )
    raise SinkscopeError(
        f"{folder} has no weights (expected {_SINGLE}, {_INDEX} or pytorch_model.bin); {remedy}", page="no-weights"
    )


def hub_file(repo: str, name: str, revision: str | None = None, kind: Literal["model", "dataset"] = "model") -> Path:
    """Download one file of a hub repo (of models or of data), or find it in the cache.

    Raises:
        FileNotFoundError: the repo has no such file.
        SinkscopeError: no such repo or revision, no access, no connection, or a transfer that broke off.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub import errors as hub
    from huggingface_hub.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the hub's client reports every retry; the outcome is reported below
    try:
        return Path(hf_hub_download(repo, name, revision=revision, repo_type=kind))
    except Exception as error:
        if isinstance(error, hub.EntryNotFoundError) and not isinstance(error, hub.LocalEntryNotFoundError):
            raise FileNotFoundError(f"{repo} has no {name}") from None
        at, login = constants.ENDPOINT, "log in with `hf auth login`"
        offline = "HF_HUB_OFFLINE is set: unset it"
        why = offline if constants.HF_HUB_OFFLINE else f"{at} cannot be reached: check the connection"
        local = "a folder that holds the checkpoint" if kind == "model" else "the path of a copy"
        first = (str(error).splitlines() or [type(error).__name__])[0]
        refusals: list[tuple[type[Exception], str, str]] = [
            (
                hub.GatedRepoError,
                "gated-repo",
                f"{repo} is gated: accept its terms at {at}/{repo}, then {login} or set HF_TOKEN",
            ),
            (
                hub.RepositoryNotFoundError,
                "unknown-repo",
                f"there is no {kind} {repo!r} at {at}, or it is private: check the spelling, or {login}",
            ),
            (
                hub.RevisionNotFoundError,
                "unknown-revision",
                f"{repo} has no revision {revision!r}; give a branch, tag or commit of it",
            ),
            (
                hub.LocalEntryNotFoundError,
                "hub-unreachable",
                f"{name} of {repo} is not in the cache and {why}, or give {local}",
            ),
            (
                hub.HFValidationError,
                "unknown-repo",
                f"{repo!r} is no hub id; expected org/name, or the path of a folder",
            ),
            # Which class a broken transfer raises depends on the version of the hub's client.
            (
                Exception,
                "hub-unreachable",
                f"downloading {name} of {repo} failed: {first}; run it again, whole files are kept",
            ),
        ]
        page, message = next((page, message) for refused, page, message in refusals if isinstance(error, refused))
        raise SinkscopeError(message, page=page) from None
    finally:
        logging.set_verbosity(verbosity)


def _hub_folder(repo: str, revision: str | None) -> Path:
    """The folder of a hub repo in the cache, with its config.json; it is named after the commit."""
    try:
        return hub_file(repo, "config.json", revision).parent
    except FileNotFoundError:
        raise SinkscopeError(
            f"{repo} has no config.json, so it is no transformers model; give one that has", page="no-config"
        ) from None


def _hub_shard(repo: str, shard: str, commit: str | None, index: str) -> Path:
    try:
        return hub_file(repo, shard, commit)
    except FileNotFoundError:
        raise SinkscopeError(
            f"{repo} lacks {shard}, named in its {index}; try another revision", page="missing-shard"
        ) from None


@dataclass(frozen=True)
class ModelSource:
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


def locate(x: str | os.PathLike[str] | None, revision: str | None = None) -> ModelSource:
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


def _locate(x: str | os.PathLike[str] | None, revision: str | None) -> ModelSource:
    if x is None or x == BUNDLED:
        return ModelSource("folder", Path(__file__).with_name("bundled"), BUNDLED)
    if x == RECALL:
        return ModelSource("folder", Path(__file__).with_name("recall"), RECALL)
    text = os.fspath(x)
    path = Path(text).expanduser()
    if not text.strip():
        raise SinkscopeError("the model name is empty; expected a short name, hub id org/name, folder or .gguf file")
    if path.is_file():
        return ModelSource("gguf", _checked_gguf(path), path.name)
    looks_like_path = not isinstance(x, str) or text.startswith((".", "~", os.sep)) or path.suffix == ".gguf"
    known = _HUB_ID.fullmatch(text) or ("/" not in text and find(text) is not None)
    # A folder that merely shares a model's name (`gpt2/` with notes in it) does not hide the model.
    if path.is_dir() and (looks_like_path or not known or (path / "config.json").is_file()):
        return ModelSource("folder", path, path.resolve().name)
    if looks_like_path:
        raise SinkscopeError(
            f"there is no file or folder {text!r}; give an existing one, a hub id org/name or a short name",
            page="no-such-path",
        )
    if _HUB_ID.fullmatch(text):
        return ModelSource("hub", text, text, revision)
    return ModelSource("hub", resolve(text), text, revision)


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
def local_files(source: ModelSource, layers: int | None = None, *, code: bool = False) -> Generator[Local]:
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
        folder = _hub_folder(repo, source.revision)
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
    auto_map: dict[str, Any] = read_json(folder / "config.json").get("auto_map", {})
    names = [v for value in auto_map.values() for v in (value if isinstance(value, list) else [value]) if v]
    return sorted({name.split("--")[-1].split(".")[0] + ".py" for name in names})


def _download_weights(repo: str, commit: str, layers: int | None) -> tuple[str, set[str]]:
    """The name of the index (empty for a single file), and its shards that no wanted layer needs."""
    for single in _WEIGHTS:
        if (index := optional_file(repo, f"{single}.index.json", commit)) is not None:
            weight_map: dict[str, str] = read_json(index)["weight_map"]
            beyond = {t for t in weight_map if layers and (found := _LAYER.search(t)) and int(found[1]) >= layers}
            needed = {shard for tensor, shard in weight_map.items() if tensor not in beyond}
            for shard in sorted(needed):
                _hub_shard(repo, shard, commit, index.name)
            return index.name, set(weight_map.values()) - needed
        if optional_file(repo, single, commit) is not None:
            return "", set()
    raise SinkscopeError(
        f"{repo} has no weights for transformers (expected safetensors or pytorch_model.bin); give another repo, or "
        "download a .gguf file and give that",
        page="no-weights",
    )


def _without(folder: Path, view: Path, index: str, left_out: set[str]) -> Path:
    """`view`, filled with links to the files of `folder`, and an index that leaves out some shards."""
    content = read_json(folder / index)
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


class SafetensorsSource:
    """The tensors of a checkpoint in a folder (a Path) or on a hub (a str, org/name), read one by one.

    Of a hub repo, config.json and the index are downloaded at once, each shard when a tensor of it is first needed.

    Attributes:
        name: hub id, or base name of the folder.
        folder: where config.json is (of a hub repo: its snapshot in the cache).
        commit: the hub's commit, None for a folder.
        read: names of the tensors that were read so far.

    Raises:
        SinkscopeError: the folder is no whole checkpoint, or the repo cannot be had.
        UnsupportedError: the weights are not in safetensors.
    """

    def __init__(self, where: str | Path, *, revision: str | None = None) -> None:
        self.read: set[str] = set()
        self._repo: str | None = None
        self.commit: str | None = None
        if isinstance(where, Path):
            self.folder = where
            self.name = self.folder.resolve().name
            check_folder(self.folder)
            if not any((self.folder / name).is_file() for name in (_INDEX, _SINGLE)):
                raise self._not_safetensors()
            return
        self._repo = self.name = where
        self.folder = _hub_folder(where, revision)
        self.commit = self.folder.name  # the cache names a snapshot after its commit

    def _not_safetensors(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self.name} has no safetensors weights, so its layers cannot be read one by one; load it whole with "
            "sinkscope.load(...), or convert it with save_pretrained",
            page="not-streamable",
        )

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> name of the file it is in."""
        # What is here comes first: offline, whether a repo has the other cannot be asked.
        for name in sorted((_SINGLE, _INDEX), key=lambda n: not (self.folder / n).is_file()):
            file = self.folder / name
            if self._repo is not None and not file.is_file():
                file = optional_file(self._repo, name, str(self.commit)) or file
            if file.is_file():
                return _index_map(self.folder) if name == _INDEX else dict.fromkeys(read_header(file), name)
        raise self._not_safetensors()

    def _shard(self, name: str) -> Path:
        """A file of weights, downloaded and checked if it is not here yet; a folder was checked when it was opened."""
        if self._repo is None:
            return self.folder / name
        file = _hub_shard(self._repo, name, self.commit, _INDEX)
        read_header(file)
        return file

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors by name, in the dtype they are stored in.

        The files are closed again: their pages leave memory when the last tensor does.
        """
        from safetensors import safe_open

        found: dict[str, Tensor] = {}
        for shard, group in groupby(sorted(names, key=self.weight_map.__getitem__), self.weight_map.__getitem__):
            with safe_open(self._shard(shard), "pt") as opened:
                found |= {name: opened.get_tensor(name) for name in group}
        self.read |= found.keys()
        return found


def fingerprint(source: SafetensorsSource | Path | nn.Module) -> str:
    """What tells one checkpoint from another, without reading weights.

    The hub's commit; else a hash of the configuration and of the safetensors headers (names, dtypes, shapes, places).
    A live model has the names, dtypes and shapes of its parameters instead, other files their names and sizes.
    """
    if isinstance(source, SafetensorsSource):
        if source.commit:
            return source.commit
        source = source.folder
    if isinstance(source, nn.Module):
        config = source.config.to_dict()  # type: ignore[union-attr, operator]
        parts: Any = {name: (str(p.dtype), list(p.shape)) for name, p in source.named_parameters()}
    elif source.is_file():
        config, parts = {}, {source.name: source.stat().st_size}
    else:
        config = read_json(source / "config.json")
        parts = {
            f.name: read_header(f) if f.suffix == ".safetensors" else f.stat().st_size for f in _weight_files(source)
        }
    # Which library wrote the file and from where says nothing about the model.
    config = {k: v for k, v in config.items() if k not in ("transformers_version", "_name_or_path")}
    text = json.dumps([config, parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
