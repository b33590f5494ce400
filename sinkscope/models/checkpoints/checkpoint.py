"""Checkpoints: find and check their files, and read their tensors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.plain import parse_json
from sinkscope.models.checkpoints.beside import TOKENIZER_FILES
from sinkscope.models.checkpoints.hub import hub_folder, hub_shard, optional_file
from sinkscope.models.checkpoints.stored import check_quantised
from sinkscope.models.loading.config import check_kind, read_checkpoint_json

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_LFS = b"version "  # a Git LFS pointer begins with it


def check_folder(folder: Path, repo: str | None = None) -> None:
    """Check that `folder` is a complete checkpoint. Reads JSON files and headers of weight files, but no weights.

    Args:
        folder: The folder.
        repo: The hub repo of which it is a snapshot; weight files that it lacks are downloaded.

    Raises:
        SinkscopeError: Something is missing or damaged; the message says what, and what to do.
    """
    config = read_checkpoint_json(folder / "config.json")
    for shard in weight_files(folder, repo):
        if shard.suffix == ".safetensors":
            check_quantised(folder.resolve().name, config, _dtypes(read_header(shard)))


def read_header(file: Path) -> dict[str, Any]:
    """Read the header of a safetensors file: tensor name -> {"dtype", "shape", "data_offsets"}.

    Raises:
        SinkscopeError: The header is not JSON, or the file is shorter or longer than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as content:
        start = content.read(8)
        length = int.from_bytes(start, "little")
        raw = content.read(min(length, size))
    if start == _LFS:
        raise SinkscopeError(
            f"{file.name} is a Git LFS pointer, not weights; run `git lfs pull` in {file.parent}",
            page="truncated-safetensors",
        )
    # A real header begins with "{". Without it, the first bytes are not a length and do not tell what is missing.
    if size < 8 or (len(raw) < length and raw[:1] in (b"", b"{")):
        raise _damaged(file, size, max(8, 8 + length), "at least ")
    try:
        header = parse_json(raw)
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, AttributeError, TypeError, KeyError, IndexError):
        raise SinkscopeError(
            f"{file.name} is not a safetensors file: its header is not JSON; download it again",
            page="bad-safetensors-header",
        ) from None
    if size != 8 + length + end:
        raise _damaged(file, size, 8 + length + end)
    return header


def _dtypes(header: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """Type and number of dimensions of each tensor in a header."""
    return {tensor: (entry["dtype"], len(entry["shape"])) for tensor, entry in header.items()}


def _damaged(file: Path, size: int, expected: int, at_least: str = "") -> SinkscopeError:
    return SinkscopeError(
        f"{file.name} is damaged: it has {size:,} bytes, expected {at_least}{expected:,}; download it again",
        page="truncated-safetensors",
    )


def _index_map(index: Path) -> dict[str, str]:
    """An index as a map from tensor name to shard.

    Raises:
        SinkscopeError: It is no index.
    """
    content = read_checkpoint_json(index)
    weight_map: Any = None
    if isinstance(content, dict):
        weight_map = content.get("weight_map")
    is_map = isinstance(weight_map, dict) and bool(weight_map)
    if not is_map or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise SinkscopeError(
            f"{index.name} has no weight_map of tensors and files; download it again", page="missing-shard"
        )
    return weight_map


def _first_of(folder: Path, repo: str | None, names: Iterable[str]) -> str | None:
    """The first of some files that a checkpoint has; it is then in the folder."""
    # A file that is here comes first, because offline nobody can tell whether the repo has the other one.
    for name in names:
        if (folder / name).is_file():
            return name
    for name in names:
        if repo is not None and optional_file(repo, name, folder.name) is not None:
            return name
    return None


def weight_files(folder: Path, repo: str | None = None) -> list[Path]:
    """The weight files of a checkpoint that transformers would load: safetensors, or else pickles.

    Args:
        folder: Its folder; that of a hub repo is named after the commit.
        repo: The hub repo from which they are downloaded.

    Raises:
        SinkscopeError: There are none, or a shard is missing.
    """
    name = _first_of(folder, repo, (_SINGLE, _INDEX)) or _first_of(folder, repo, _PICKLES)
    if name is None and repo is not None:
        raise SinkscopeError(
            f"{repo} has no weights for transformers (expected safetensors or pytorch_model.bin); give another repo, "
            "or download a .gguf file and give that",
            page="no-weights",
        )
    if name is None:
        remedy = "download the weights, not only the configuration"
        gguf = sorted(folder.glob("*.gguf"))
        if gguf:
            remedy = f"give the file itself: {gguf[0]}"
        raise SinkscopeError(
            f"{folder} has no weights (expected {_SINGLE}, {_INDEX} or pytorch_model.bin); {remedy}", page="no-weights"
        )
    if not name.endswith("index.json"):
        return [folder / name]
    shards = sorted(set(_index_map(folder / name).values()))
    if repo is not None:
        return [hub_shard(repo, shard, folder.name, name) for shard in shards]
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise SinkscopeError(
            f"{folder} lacks {absent[0]}, named in {name} ({len(absent)} of {len(shards)} shards are missing); "
            "download what is missing into the folder",
            page="missing-shard",
        )
    return [folder / shard for shard in shards]


class Files:
    """The files of a model: a GGUF file, a folder (both a Path), or a repo on the hub (a str, org/name).

    Of a hub repo, config.json is downloaded at once.

    Attributes:
        name: Hub id, or base name of the file or folder.
        folder: The folder with config.json or the GGUF file; for a hub repo, its snapshot in the cache.
        repo: The hub repo; None for a file or folder.
        gguf: Name of the GGUF file, if it is one.

    Raises:
        SinkscopeError: The folder is not a whole checkpoint, or the repo cannot be downloaded.
        UnsupportedError: The repo holds another kind of model.
    """

    def __init__(self, where: str | Path, *, revision: str | None = None) -> None:
        self.repo: str | None = None
        self.gguf: str | None = None
        if not isinstance(where, Path):
            self.folder, self.name, self.repo = hub_folder(where, revision), where, where
            check_kind(where, read_checkpoint_json(self.folder / "config.json"))  # before its weights are downloaded
        elif where.is_file():
            self.folder, self.name, self.gguf = where.parent, where.name, where.name
        else:
            self.folder, self.name = where, where.resolve().name
            check_folder(where)

    @property
    def commit(self) -> str | None:
        """The hub's commit; None for a file or folder."""
        return None if self.repo is None else self.folder.name

    def fetch_tokenizer(self) -> None:
        """Download the files of the tokenizer, and of generation, that a hub repo has."""
        if self.repo is not None:
            for name in TOKENIZER_FILES:
                optional_file(self.repo, name, self.folder.name)

    def fetch_all(self) -> None:
        """Download what a whole model needs.

        Raises:
            SinkscopeError: The repo has no weights, or they cannot be downloaded.
        """
        if self.repo is not None:
            self.fetch_tokenizer()
            check_folder(self.folder, self.repo)


class SafetensorsSource(Files):
    """The tensors of a checkpoint, read one by one. Each shard of a hub repo is downloaded when it is first needed.

    Attributes:
        weight_map: The name of the file that holds each tensor.
        read: Names of the tensors that have been read so far.

    Raises:
        UnsupportedError: The weights are not safetensors.
    """

    def __init__(self, where: str | Path, *, revision: str | None = None) -> None:
        super().__init__(where, revision=revision)
        self.read: set[str] = set()
        name = _first_of(self.folder, self.repo, (_SINGLE, _INDEX))
        if name is None or self.gguf is not None:
            raise UnsupportedError(
                f"{self.name} has no safetensors weights, so its layers cannot be read one by one; load it whole with "
                "sinkscope.load(...), or convert it with save_pretrained",
                page="not-streamable",
            )
        if name == _INDEX:
            self.weight_map = _index_map(self.folder / name)
        else:
            self.weight_map = dict.fromkeys(read_header(self.folder / name), name)

    def _shard(self, name: str) -> Path:
        """Path of a weight file. For a hub repo it is downloaded and checked; a folder was checked when opened."""
        if self.repo is None:
            return self.folder / name
        file = hub_shard(self.repo, name, self.commit, _INDEX)
        check_quantised(self.name, read_checkpoint_json(self.folder / "config.json"), _dtypes(read_header(file)))
        return file

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors by name, in the dtype in which they are stored.

        The files are closed afterwards, so that their pages leave memory together with the last tensor.
        """
        from safetensors import safe_open

        by_shard: dict[str, list[str]] = {}
        for name in names:
            by_shard.setdefault(self.weight_map[name], []).append(name)
        tensors: dict[str, Tensor] = {}
        for shard in sorted(by_shard):
            with safe_open(self._shard(shard), "pt") as file:
                for name in by_shard[shard]:
                    tensors[name] = file.get_tensor(name)
        self.read |= tensors.keys()
        return tensors
