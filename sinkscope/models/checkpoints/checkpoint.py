"""Checkpoints: find and check their files, and read their tensors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import checked_value
from sinkscope.models.checkpoints.config import TOKENIZER_FILES, check_kind, read_checkpoint_json
from sinkscope.models.checkpoints.hub import hub_file, hub_folder, optional_file

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
WeightMap = Annotated[dict[str, str], Field(min_length=1)]
"""The file that holds each tensor."""


def open_weights(file: Path) -> Any:
    """Return an open safetensors file; the library checks its header, and that the file is as long as the header says.

    Raises:
        SinkscopeError: It is not whole.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise SinkscopeError(
            f"{file.name} is not a whole safetensors file ({error}); download it again, or run `git lfs pull` where it "
            "is a pointer of Git LFS"
        ) from None


def _index_map(index: Path) -> dict[str, str]:
    """An index as a map from tensor name to shard.

    Raises:
        SinkscopeError: It is no index.
    """
    content = read_checkpoint_json(index)
    weight_map = content
    if isinstance(content, dict):
        weight_map = content.get("weight_map")
    where = f"weight_map of {index.name}"
    return checked_value(WeightMap, weight_map, where, then="; download it again")


class Files:
    """The files of a model: a GGUF file, a folder (both a Path), or a repo on the hub (a str, org/name).

    Of a hub repo, config.json is downloaded at once.

    Attributes:
        name: Hub id, or base name of the file or folder.
        folder: The folder with config.json or the GGUF file; for a hub repo, its snapshot in the cache, which is named
            after the commit.
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
            check_kind(where, self.config())  # before its weights are downloaded
        elif where.is_file():
            self.folder, self.name, self.gguf = where.parent, where.name, where.name
        else:
            self.folder, self.name = where, where.resolve().name
            self._check()

    @property
    def commit(self) -> str | None:
        """The hub's commit; None for a file or folder."""
        return None if self.repo is None else self.folder.name

    def config(self) -> Any:
        """Return the content of its config.json."""
        return read_checkpoint_json(self.folder / "config.json")

    def _first_of(self, names: Iterable[str]) -> str | None:
        """The first of some files that the model has; it is then in the folder."""
        # A file that is here comes first, because offline nobody can tell whether the repo has the other one.
        for name in names:
            if (self.folder / name).is_file():
                return name
        for name in names:
            if self.repo is not None and optional_file(self.repo, name, self.folder.name) is not None:
                return name
        return None

    def _shard(self, name: str) -> Path:
        """A weight file that an index names; that of a hub repo is downloaded."""
        if self.repo is None:
            return self.folder / name
        return hub_file(self.repo, name, self.commit)

    def weights(self) -> list[Path]:
        """Return the files that transformers would load: safetensors, or else pickles; those of a repo are downloaded.

        Raises:
            SinkscopeError: There are none, or a shard is missing.
        """
        if self.gguf is not None:
            return [self.folder / self.gguf]
        name = self._first_of((_SINGLE, _INDEX)) or self._first_of(_PICKLES)
        if name is None:
            where = self.repo or self.folder
            remedy = "download them, not only the configuration, or give a .gguf file itself"
            raise SinkscopeError(
                f"{where} has no weights (expected {_SINGLE}, {_INDEX} or pytorch_model.bin): {remedy}"
            )
        if not name.endswith("index.json"):
            return [self.folder / name]
        names = sorted(set(_index_map(self.folder / name).values()))
        shards = [self._shard(shard) for shard in names]
        absent = [shard.name for shard in shards if not shard.is_file()]
        if absent:
            raise SinkscopeError(
                f"{self.folder} lacks {absent[0]}, named in {name} ({len(absent)} of {len(shards)} shards are "
                "missing); download what is missing into the folder"
            )
        return shards

    def _check(self) -> None:
        """Check that it is a whole checkpoint. Reads JSON files and headers of weight files, but no weights."""
        self.config()
        for shard in self.weights():
            if shard.suffix == ".safetensors":
                open_weights(shard)

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
            self._check()


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
        name = self._first_of((_SINGLE, _INDEX))
        if name is None or self.gguf is not None:
            raise UnsupportedError(
                f"{self.name} has no safetensors weights, so its layers cannot be read one by one; load it whole with "
                "sinkscope.load(...), or convert it with save_pretrained"
            )
        if name == _INDEX:
            self.weight_map = _index_map(self.folder / name)
        else:
            self.weight_map = dict.fromkeys(open_weights(self.folder / name).keys(), name)

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors by name, in the dtype in which they are stored.

        The files are closed afterwards, so that their pages leave memory together with the last tensor.
        """
        by_shard: dict[str, list[str]] = {}
        for name in names:
            by_shard.setdefault(self.weight_map[name], []).append(name)
        tensors: dict[str, Tensor] = {}
        for shard in sorted(by_shard):
            with open_weights(self._shard(shard)) as file:
                for name in by_shard[shard]:
                    tensors[name] = file.get_tensor(name)
        self.read |= tensors.keys()
        return tensors
