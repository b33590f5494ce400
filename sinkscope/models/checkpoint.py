"""Checkpoints: is a folder whole, what is in it, and its tensors one by one, from a folder or from a hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_LFS = b"version "  # how a Git LFS pointer begins


def check_folder(folder: Path) -> None:
    """Is `folder` a whole checkpoint? Reads its JSON files and the headers of its weights, no weights.

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


def read_json(file: Path) -> Any:
    """The content of a JSON file of a checkpoint."""
    if not file.is_file():
        raise SinkscopeError(
            f"{file.parent} has no {file.name}; give the folder of a Hugging Face checkpoint, as save_pretrained "
            "writes it",
            page="no-config",
        )
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SinkscopeError(f"{file} is not JSON ({error}); download it again", page="no-config") from None


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
    logging.set_verbosity_error()  # it tells of every retry; what comes of them is told below
    try:
        return Path(hf_hub_download(repo, name, revision=revision, repo_type=kind))
    except hub.GatedRepoError:
        message = (
            f"{repo} is gated: accept its terms at {constants.ENDPOINT}/{repo}, then log in with `hf auth login` or "
            "set HF_TOKEN"
        )
        page = "gated-repo"
    except hub.RepositoryNotFoundError:
        message = (
            f"there is no {kind} {repo!r} at {constants.ENDPOINT}, or it is private: check the spelling, or log in "
            "with `hf auth login`"
        )
        page = "unknown-repo"
    except hub.RevisionNotFoundError:
        message, page = f"{repo} has no revision {revision!r}; give a branch, tag or commit of it", "unknown-revision"
    except hub.LocalEntryNotFoundError:
        why = (
            "HF_HUB_OFFLINE is set: unset it"
            if constants.HF_HUB_OFFLINE
            else f"{constants.ENDPOINT} cannot be reached: check the connection"
        )
        local = "a folder that holds the checkpoint" if kind == "model" else "the path of a copy"
        message = f"{name} of {repo} is not in the cache and {why}, or give {local}"
        page = "hub-unreachable"
    except hub.EntryNotFoundError:
        raise FileNotFoundError(f"{repo} has no {name}") from None
    except hub.HFValidationError:
        message, page = f"{repo!r} is no hub id; expected org/name, or the path of a folder", "unknown-repo"
    except Exception as error:
        # Which class a broken transfer raises depends on the version of the hub's client.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        message = f"downloading {name} of {repo} failed: {first}; run it again, whole files are kept"
        page = "hub-unreachable"
    finally:
        logging.set_verbosity(verbosity)
    raise SinkscopeError(message, page=page)


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
        try:
            self.folder = hub_file(where, "config.json", revision).parent
        except FileNotFoundError:
            raise SinkscopeError(
                f"{where} has no config.json, so it is no transformers model; give one that has", page="no-config"
            ) from None
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
            try:
                file = self._file(name)
            except FileNotFoundError:
                continue
            return _index_map(self.folder) if name == _INDEX else dict.fromkeys(read_header(file), name)
        raise self._not_safetensors()

    def _file(self, name: str) -> Path:
        """A file of the checkpoint, downloaded if it is not here."""
        local = self.folder / name
        return local if self._repo is None or local.is_file() else hub_file(self._repo, name, self.commit)

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors by name, in the dtype they are stored in.

        The files are closed again: their pages leave memory when the last tensor does.
        """
        from safetensors import safe_open

        found: dict[str, Tensor] = {}
        for shard, group in groupby(sorted(names, key=self.weight_map.__getitem__), self.weight_map.__getitem__):
            try:
                file = self._file(shard)
            except FileNotFoundError:
                raise SinkscopeError(
                    f"{self.name} lacks {shard}, named in its {_INDEX}; try another revision", page="missing-shard"
                ) from None
            if self._repo is not None:
                read_header(file)  # a folder was checked when it was opened
            with safe_open(file, "pt") as opened:
                for name in group:
                    found[name] = opened.get_tensor(name)
                    self.read.add(name)
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
