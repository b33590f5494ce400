"""Checkpoints: resolve a model's name, find and check its files, and read their tensors."""

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

import torch
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.plain import parse_json
from sinkscope.models.config import check_kind, read_json
from sinkscope.models.names import BUNDLED, ORGANISM, RECALL, TWO_HOPS, find, resolve

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_LFS = b"version "  # a Git LFS pointer begins with it
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
_SAMPLE = 1 << 20  # bytes of weights that a fingerprint reads, as far as every tensor gives some
_LIVE = 1 << 24  # bytes of a live model, whose weights are in memory: a small one is read whole
_PLACES = 256  # places of a file without a list of tensors that are read for it
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in order of preference; of each, shards before a single file


def check_folder(folder: Path, *, whole: bool = True) -> None:
    """Check that `folder` is a complete checkpoint. Reads JSON files and headers of weight files, but no weights.

    Args:
        folder: Folder of the checkpoint.
        whole: Whether all tensors must be present. If False, tensors of the last layers may be missing.

    Raises:
        SinkscopeError: Something is missing or damaged; the message says what, and what to do.
    """
    if not folder.is_dir():
        raise SinkscopeError(f"{folder} is not a folder; give a folder that holds config.json and weights")
    config, there = read_json(folder / "config.json"), list[str]()
    for shard in _weight_files(folder):
        if shard.suffix == ".bin":
            _check_pickled(shard)
        if shard.suffix == ".safetensors":
            header = read_header(shard)
            there += header
            named = {} if shard.name == _SINGLE else _index_map(folder)
            if absent := [n for n, s in named.items() if s == shard.name and n not in header]:
                raise SinkscopeError(
                    f"{shard.name} lacks tensor {absent[0]!r}, which {_INDEX} places there; download {shard.name} and "
                    f"{_INDEX} again, from one revision",
                    page="missing-shard",
                )
    if whole:
        check_depth(folder.resolve().name, config, there)


def check_depth(name: str, config: Any, tensors: Iterable[str]) -> None:
    """Check that tensors exist for as many layers as the configuration states, before modules are made for them.

    Args:
        name: Name of the model, for errors.
        config: Content of config.json.
        tensors: Names of the tensors.

    Raises:
        SinkscopeError: There are fewer layers.
    """
    inner = config.get("text_config") if isinstance(config, dict) else {}
    text: dict[str, Any] = inner if isinstance(inner, dict) else config if isinstance(config, dict) else {}
    depth = next((text[key] for key in ("num_hidden_layers", "n_layer") if isinstance(text.get(key), int)), 0)
    there = max((int(found[1]) + 1 for tensor in tensors if (found := _LAYER.search(tensor))), default=0)
    if 0 < there < depth:
        raise SinkscopeError(
            f"{name} has tensors of {there} layers, but its config.json says {depth} layers; get the whole checkpoint",
            page="missing-tensors",
        )


def _check_pickled(file: Path) -> None:
    """Check that a file begins like one that torch.save wrote: as a zip archive, or (before torch 1.6) as a pickle."""
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
    """Read the header of a safetensors file: tensor name -> {"dtype", "shape", "data_offsets"}.

    Raises:
        SinkscopeError: The header is not JSON, or the file is shorter or longer than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as f:
        start = f.read(8)
        length = int.from_bytes(start, "little")
        raw = f.read(min(length, size))
    if start == _LFS:
        raise _pointer(file)
    # A real header begins with "{". Without it, the first bytes are not a length and do not tell what is missing.
    if size < 8 or (len(raw) < length and raw[:1] in (b"", b"{")):
        raise _damaged(file, size, max(8, 8 + length), "at least ")
    try:
        entries = {name: entry for name, entry in parse_json(raw).items() if name != "__metadata__"}
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
    """The index as a map from tensor name to shard; empty if there is no index."""
    if not (folder / name).is_file():
        return {}
    content = read_json(folder / name)
    if not isinstance(content, dict) or not isinstance(content.get("weight_map"), dict):
        raise SinkscopeError(f"{folder / name} has no weight_map; download it again", page="missing-shard")
    return _checked_names(content["weight_map"], name)


def _checked_names(weight_map: dict[str, str], index: str) -> dict[str, str]:
    """The same map, after checking that every file lies in the checkpoint's folder.

    Raises:
        SinkscopeError: The index points outside the folder.
    """
    for shard in set(map(str, weight_map.values())):
        if Path(shard).is_absolute() or not {"..", ""}.isdisjoint(re.split(r"[\\/]", shard)):
            raise SinkscopeError(
                f"{index} names the shard {shard!r}, which is no file of the checkpoint's folder; download it again",
                page="missing-shard",
            )
    return weight_map


def _weight_files(folder: Path) -> list[Path]:
    """The existing weight files that transformers would load, in its order of preference."""
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


def hub_file(
    repo: str,
    name: str,
    revision: str | None = None,
    kind: Literal["model", "dataset"] = "model",
    absent: Exception | None = None,
) -> Path:
    """Download one file of a hub repo (of a model or a dataset), or find it in the cache.

    Args:
        repo: Hub id, org/name.
        name: Name of the file.
        revision: Branch, tag or commit.
        kind: What kind of repo it is.
        absent: Error to raise if the repo has no such file. None raises a FileNotFoundError.

    Raises:
        FileNotFoundError: The repo has no such file.
        SinkscopeError: The repo or revision does not exist, access or connection is missing, or the transfer failed.
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
            raise absent or FileNotFoundError(f"{repo} has no {name}") from None
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
                f"{repo} has no revision {revision!r}; give a branch, tag or commit of this repository",
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
            # The class that a broken transfer raises depends on the version of the hub's client.
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


def hub_folder(repo: str, revision: str | None, optional: Iterable[str] = ()) -> Path:
    """Download the config.json of a hub repo, plus other files if they exist.

    Args:
        repo: Hub id, org/name.
        revision: Branch, tag or commit.
        optional: Names of the other files.

    Returns:
        Their folder in the cache. It is named after the commit, so all its files belong to one revision.
    """
    said = f"{repo} has no config.json, so it is no transformers model; give one that has"
    folder = hub_file(repo, "config.json", revision, absent=SinkscopeError(said, page="no-config")).parent
    for name in optional:
        optional_file(repo, name, folder.name)
    return folder


def _hub_shard(repo: str, shard: str, commit: str | None, index: str) -> Path:
    said = f"{repo} lacks {shard}, named in its {index}; try another revision"
    return hub_file(repo, shard, commit, absent=SinkscopeError(said, page="missing-shard"))


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        kind: "folder", "gguf" (one file) or "hub".
        where: Path of the folder or file, or hub id.
        name: Name used in reports: a short name, hub id, or base name.
        revision: Branch, tag or commit of a hub id.
        planted: File in the folder whose numbers replace weights after loading; "" for none.
    """

    kind: Literal["folder", "gguf", "hub"]
    where: Path | str
    name: str
    revision: str | None = None
    planted: str = ""


def locate(x: str | os.PathLike[str] | None, revision: str | None = None) -> ModelSource:
    """Resolve `x`: None is the bundled model; otherwise it is a short name, hub id, folder or `.gguf` file.

    No weights are read. An existing folder or file takes precedence over a hub id or short name of the same spelling.

    Raises:
        SinkscopeError: `x` cannot be resolved, or `revision` is given for something that has no revisions.
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
    """The error for a file that exists but may not be read."""
    return SinkscopeError(f"cannot read {path}: permission denied; ask for it, or give a copy", page="no-such-path")


def _locate(x: str | os.PathLike[str] | None, revision: str | None) -> ModelSource:
    if x is None or x == BUNDLED:
        return ModelSource("folder", Path(__file__).with_name("bundled"), BUNDLED)
    if x in (RECALL, ORGANISM):
        return ModelSource("folder", Path(__file__).with_name(str(x)), str(x))
    if x == TWO_HOPS:
        return ModelSource("folder", Path(__file__).with_name(RECALL), TWO_HOPS, planted="two_hops.npz")
    text = os.fspath(x)
    path = Path(text).expanduser()
    if not text.strip():
        raise SinkscopeError("the model name is empty; expected a short name, hub id org/name, folder or .gguf file")
    if path.is_file():
        return ModelSource("gguf", _checked_gguf(path), path.name)
    looks_like_path = not isinstance(x, str) or text.startswith((".", "~", os.sep)) or path.suffix == ".gguf"
    known = _HUB_ID.fullmatch(text) or ("/" not in text and find(text) is not None)
    # A folder that only shares its name with a model (`gpt2/` with notes in it) does not hide the model.
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
    """Files on this machine: a checkpoint folder, the name of a GGUF file in it, and the commit of a hub repo."""

    folder: Path
    gguf: str | None = None
    commit: str | None = None

    @property
    def pickled(self) -> bool:
        """The weights are pickles (`pytorch_model.bin`), not safetensors."""
        return self.gguf is None and not any(self.folder.glob("*.safetensors*"))


@contextmanager
def local_files(source: ModelSource, layers: int | None = None, *, code: bool = False) -> Generator[Local]:
    """Context manager that provides a whole checkpoint on this machine.

    Only the needed files are downloaded from a hub repo. Safetensors are preferred to pickles. With `layers`,
    only shards with tensors of the first `layers` decoder layers are downloaded. With `code`, the Python files that
    config.json names are downloaded too.

    Raises:
        SinkscopeError: The folder is not a complete checkpoint, or the repo cannot be downloaded.
    """
    if source.kind == "gguf":
        yield Local(Path(source.where).parent, gguf=Path(source.where).name)
    elif source.kind == "folder":
        check_folder(Path(source.where))
        yield Local(Path(source.where))
    else:
        repo = str(source.where)
        folder = hub_folder(repo, source.revision)
        check_kind(repo, read_json(folder / "config.json"))  # before weights that cannot be measured are downloaded
        commit = folder.name
        hub_folder(repo, commit, [*TOKENIZER_FILES, *(_code_files(folder) if code else ())])
        index, left_out = _download_weights(repo, commit, layers)
        if not left_out:
            check_folder(folder)
            yield Local(folder, commit=commit)
            return
        with tempfile.TemporaryDirectory(prefix="sinkscope-") as view:
            yield Local(_without(folder, Path(view), index, left_out), commit=commit)


def optional_file(repo: str, name: str, commit: str) -> Path | None:
    """Download a file of a hub repo; None if the repo has no file of that name.

    Raises:
        SinkscopeError: The file cannot be downloaded.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    known = try_to_load_from_cache(repo, name, revision=commit)
    if known is not None:  # a path, or a mark that this commit has no such file: neither will change
        return Path(known) if isinstance(known, str) else None
    try:
        return hub_file(repo, name, commit)
    except FileNotFoundError:
        return None
    except SinkscopeError:
        # Offline, nobody can tell whether the repo has the file; a file that the cache lacks then counts as absent.
        if constants.HF_HUB_OFFLINE:
            return None
        raise


def _code_files(folder: Path) -> list[str]:
    auto_map: dict[str, Any] = read_json(folder / "config.json").get("auto_map", {})
    names = [v for value in auto_map.values() for v in (value if isinstance(value, list) else [value]) if v]
    return sorted({name.split("--")[-1].split(".")[0] + ".py" for name in names})


def _download_weights(repo: str, commit: str, layers: int | None) -> tuple[str, set[str]]:
    """Download weights; return the name of the index (empty for a single file) and the shards that were left out."""
    for single in _WEIGHTS:
        if (index := optional_file(repo, f"{single}.index.json", commit)) is not None:
            weight_map = _checked_names(read_json(index)["weight_map"], index.name)
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
    """Fill the folder `view` with links to the files of `folder`, and with an index that leaves out some shards."""
    content = read_json(folder / index)
    content["weight_map"] = {t: s for t, s in content["weight_map"].items() if s not in left_out}
    (view / index).write_text(json.dumps(content), encoding="utf-8")
    for file in folder.iterdir():
        if file.name not in left_out and file.name != index and file.is_file():
            try:
                os.symlink(file.resolve(), view / file.name)
            except OSError:  # Windows lets only some users make links
                shutil.copyfile(file, view / file.name)
    check_folder(view, whole=False)
    return view


class SafetensorsSource:
    """The tensors of a checkpoint in a folder (a Path) or on the hub (a str, org/name), read one by one.

    From a hub repo, config.json and the index are downloaded at once. Each shard is downloaded when one of its tensors
    is first needed.

    Attributes:
        name: Hub id, or base name of the folder.
        folder: The folder with config.json; for a hub repo, its snapshot in the cache.
        commit: The hub's commit; None for a folder.
        read: Names of the tensors that have been read so far.

    Raises:
        SinkscopeError: The folder is not a whole checkpoint, or the repo cannot be downloaded.
        UnsupportedError: The weights are not safetensors, or the repo holds another kind of model.
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
        self.folder = hub_folder(where, revision)
        check_kind(where, read_json(self.folder / "config.json"))  # before its weights are downloaded
        self.commit = self.folder.name

    def _not_safetensors(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self.name} has no safetensors weights, so its layers cannot be read one by one; load it whole with "
            "sinkscope.load(...), or convert it with save_pretrained",
            page="not-streamable",
        )

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """The name of the file that holds each tensor."""
        # A file that is here comes first, because offline nobody can tell whether the repo has the other one.
        for name in sorted((_SINGLE, _INDEX), key=lambda n: not (self.folder / n).is_file()):
            file = self.folder / name
            if self._repo is not None and not file.is_file():
                file = optional_file(self._repo, name, str(self.commit)) or file
            if file.is_file():
                return _index_map(self.folder) if name == _INDEX else dict.fromkeys(read_header(file), name)
        raise self._not_safetensors()

    def _shard(self, name: str) -> Path:
        """Path of a weight file. For a hub repo it is downloaded and checked; a folder was checked when opened."""
        if self._repo is None:
            return self.folder / name
        file = _hub_shard(self._repo, name, self.commit, _INDEX)
        read_header(file)
        return file

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors by name, in the dtype in which they are stored.

        The files are closed afterwards, so that their pages leave memory together with the last tensor.
        """
        from safetensors import safe_open

        found: dict[str, Tensor] = {}
        for shard, group in groupby(sorted(names, key=self.weight_map.__getitem__), self.weight_map.__getitem__):
            with safe_open(self._shard(shard), "pt") as opened:
                found |= {name: opened.get_tensor(name) for name in group}
        self.read |= found.keys()
        return found


def fingerprint(source: SafetensorsSource | Path | nn.Module) -> str:
    """Identify a checkpoint by its configuration, its tensors and a sample of their bytes.

    The fingerprint is the hub's commit, if there is one. Otherwise it is a hash of the configuration, of the names,
    dtypes and shapes of the tensors, and of a few bytes from the middle of each tensor (or, if the files are not
    safetensors, from places all over each file). About one megabyte is read, whatever the model's size. For a live
    model, 16 megabytes are read in the same way, so its fingerprint changes with its weights; it differs from that of
    its files.
    """
    if isinstance(source, SafetensorsSource):
        if source.commit:
            return source.commit
        source = source.folder
    if isinstance(source, nn.Module):
        config = source.config.to_dict()  # type: ignore[union-attr, operator]
        live = dict(source.named_parameters())
        share = _share(len(live), _LIVE)
        parts: Any = {name: (str(p.dtype), list(p.shape), _sampled(p, share)) for name, p in live.items()}
    else:
        config = {} if source.is_file() else read_json(source / "config.json")
        files = [source] if source.is_file() else _weight_files(source)
        headers = {f: read_header(f) if f.suffix == ".safetensors" else {} for f in files}
        share = _share(sum(len(header) or _PLACES for header in headers.values()))
        parts = {f.name: (header or f.stat().st_size, _sampled_file(f, header, share)) for f, header in headers.items()}
    # The library that wrote the file, and the place it came from, say nothing about the model.
    config = {k: v for k, v in config.items() if k not in ("transformers_version", "_name_or_path")}
    text = json.dumps([config, parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _share(places: int, whole: int = _SAMPLE) -> int:
    """Bytes to read at each of this many places, for a fingerprint that reads `whole` bytes."""
    return max(64, whole // max(1, places))


@torch.no_grad()
def _sampled(parameter: Tensor, share: int) -> str:
    """Digest of the middle of a parameter; empty if its weights are elsewhere."""
    if parameter.is_meta:
        return ""
    flat = parameter.detach()
    while flat.ndim > 1 and not flat.is_contiguous():  # it is not worth a copy
        flat = flat[len(flat) // 2]
    flat = flat.reshape(-1)
    count = share // flat.itemsize
    start = max(0, (len(flat) - count) // 2)
    return hashlib.sha256(
        flat[start : start + count].cpu().contiguous().view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def _sampled_file(file: Path, header: dict[str, Any], share: int) -> str:
    """Digest of the middle of each tensor in a file, or of places all over the file."""
    digest, size = hashlib.sha256(), file.stat().st_size
    with file.open("rb") as opened:
        begin = 8 + int.from_bytes(opened.read(8), "little")
        spans = [[begin + at for at in entry["data_offsets"]] for entry in header.values()]
        spans = spans or [[size * i // _PLACES, size * (i + 1) // _PLACES] for i in range(_PLACES)]
        for start, end in spans:
            opened.seek(max(start, (start + end - share) // 2))
            digest.update(opened.read(min(share, end - start)))
    return digest.hexdigest()
