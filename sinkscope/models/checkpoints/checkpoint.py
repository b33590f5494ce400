"""Checkpoints: find and check their files, read their tensors, and make a plain model of them, quietly."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError, first_line, is_out_of_memory
from sinkscope.files.opener import inside, open_regular
from sinkscope.files.output import read_json
from sinkscope.files.plain import in_one_line
from sinkscope.files.records import checked_value
from sinkscope.models.checkpoints.config import (
    TOKENIZER_FILES,
    causal_class,
    check_kind,
    read_checkpoint_json,
)
from sinkscope.models.checkpoints.hub import hub_file, hub_folder, optional_file
from sinkscope.models.checkpoints.locate import ModelSource

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
        SinkscopeError: It is no index, or names a file that is not in its folder.
    """
    content = read_checkpoint_json(index)
    weight_map = content
    if isinstance(content, dict):
        weight_map = content.get("weight_map")
    where = f"weight_map of {index.name}"
    weight_map = checked_value(WeightMap, weight_map, where, then="; download it again")
    for shard in set(weight_map.values()):
        inside(index.parent, shard, index.name, link_roots(index.parent))
    return weight_map


def link_roots(folder: Path) -> tuple[Path, ...]:
    """Return where links of a checkpoint may end beside its own folder: in the cache of the hub, which makes links."""
    from huggingface_hub import constants

    roots = [Path(constants.HF_HUB_CACHE)]
    if folder.parent.name == "snapshots":  # of a cache elsewhere
        roots.append(folder.parents[1] / "blobs")
    return tuple(roots)


def check_folder(folder: Path) -> None:
    """Check the files of a checkpoint's folder that transformers opens: none may wait, and none may lead elsewhere.

    Raises:
        SinkscopeError: One is a pipe or a device, or one that is read is a folder or a broken link; or a tokenizer's
            settings name a file outside.
    """
    remedy = "remove it, or download it again"
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        is_read = entry.name in TOKENIZER_FILES
        if is_read or not (entry.is_file() or entry.is_dir() or entry.is_symlink()):
            open_regular(Path(entry.path), entry.name, remedy).close()
    for name, fields in NAMING.items():
        settings = read_json(folder / name, remedy) if (folder / name).is_file() else None
        for field, value in settings.items() if isinstance(settings, dict) else ():
            named: Any = value if isinstance(value, list) else [value]
            for path in named if fields.fullmatch(field) else ():
                # A name of the machine on which it was written, of which nothing is here, is not followed.
                if isinstance(path, str) and path and os.path.lexists(folder / path.replace("\0", "")):
                    inside(folder, path, f"{field} in {name}", link_roots(folder))


NAMING = {
    "tokenizer_config.json": re.compile(".*_files?"),
    "config.json": re.compile("transformers_weights"),
}
"""Files of a checkpoint, and their fields that name others."""


class Files:
    """The files of a model: a GGUF file, a folder (both a Path), or a repo on the hub (a str, org/name).

    Of a hub repo, config.json is downloaded at once.

    Attributes:
        name: Hub id, or base name of the file or folder.
        folder: The folder with config.json or the GGUF file; for a hub repo, its snapshot in the cache, which is named
            after the commit.
        repo: The hub repo; None for a file or folder.
        commit: The hub's commit; None for a file or folder.
        gguf: Name of the GGUF file, if it is one.
        config: The content of config.json; empty if it is one GGUF file.

    Raises:
        SinkscopeError: The folder is not a whole checkpoint, or the repo cannot be downloaded.
        UnsupportedError: It holds another kind of model.
    """

    def __init__(self, where: str | Path, *, revision: str | None = None) -> None:
        self.repo: str | None = None
        self.commit: str | None = None
        self.gguf: str | None = None
        self.config: Any = {}
        if isinstance(where, Path) and where.is_file():
            self.folder, self.name, self.gguf = where.parent, in_one_line(where.name), where.name
            return
        if isinstance(where, Path):
            self.folder, self.name = where, in_one_line(where.resolve().name)
        else:
            self.folder, self.name, self.repo = hub_folder(where, revision), where, where
            self.commit = self.folder.name
        self.config = read_checkpoint_json(self.folder / "config.json")
        if self.repo is None:
            self._check()
        check_kind(self.name, self.config)  # before weights are downloaded

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
        if not isinstance(read_checkpoint_json(self.folder / name).get("metadata"), dict):  # transformers reads it
            raise SinkscopeError(f'{name} has no metadata; download it again, or write "metadata": {{}} into it')
        return shards

    def _check(self) -> None:
        """Check that weights are whole. Reads indexes and headers of weight files, but no weights."""
        for shard in self.weights():
            if shard.suffix == ".safetensors":
                open_weights(shard)

    def fetch_beside(self, *, weights: bool = False) -> None:
        """Download what a hub repo has beside its weights: the files of the tokenizer, and of generation.

        Args:
            weights: Whether the weights are downloaded as well.

        Raises:
            SinkscopeError: A file is damaged or cannot be read, the repo has no weights, or a download fails.
        """
        if self.gguf is None and self.repo is None:
            check_folder(self.folder)
        for name in TOKENIZER_FILES if self.gguf is None else ():
            if self.repo is not None:
                optional_file(self.repo, name, self.folder.name)
            file, remedy = self.folder / name, "download it again"
            if name.endswith(".json") and file.exists() and not isinstance(read_json(file, remedy), dict):
                raise SinkscopeError(f"{name} is no JSON object; {remedy}")
        if weights and self.repo is not None:
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


def is_quantised(config: Any) -> bool:
    """Return whether a configuration says how its weights are quantised."""
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) or getattr(part, "compression_config", None):
            return True
    return False


def check_unexpected(model: nn.Module, unexpected: Iterable[str], name: str, origins: Mapping[str, str]) -> None:
    """Check that no tensor that was left out belongs to a part that the model has.

    Whole parts that a model does not have are harmless: towers for images, heads of training, layers that predict
    further tokens. So are the buffers that transformers ignores, which are not among its unexpected tensors. A bias, a
    scale or an adapter of a weight that the model has changes what it computes.

    Args:
        model: The model, or a part of it, that was loaded.
        unexpected: Tensors that transformers reports as unexpected.
        name: Name of the model, for errors.
        origins: The checkpoint's names of tensors that were loaded under other names.

    Raises:
        UnsupportedError: One does.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for tensor in sorted(unexpected):
        path = tensor
        if not hasattr(model, prefix[:-1]):
            path = tensor.removeprefix(prefix)
        part = model  # the innermost module on the path
        for step in path.split("."):
            children = dict(part.named_children())
            if step not in children:
                break
            part = children[step]
        if next(part.parameters(recurse=False), None) is not None:
            raise UnsupportedError(
                f"{name} has the tensor {origins.get(tensor, tensor)}, for which its configuration has no place, so "
                "the model would run without it: config and weights are of different models, or the weights hold an "
                "adapter or a quantisation; download both from one revision, or merge the adapter"
            )


def model_with_weights(source: ModelSource, files: Files, config: Any, options: dict[str, Any]) -> Any:
    """Return a model in eval mode, with the weights of the files.

    Args:
        source: Where it comes from, for errors.
        files: Its files on this machine.
        config: Its configuration.
        options: What transformers takes beside it.

    Raises:
        SinkscopeError: The weights do not belong to the configuration.
    """
    if files.gguf is not None:
        options = {**options, "gguf_file": files.gguf}
    loaded: Any = causal_class(config).from_pretrained(
        files.folder,
        config=config,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below, with names
        trust_remote_code=False,
        weights_only=True,  # no code in pickles runs
        **options,
    )
    model, info = loaded
    wrong = sorted(info["missing_keys"]) + [name for name, *_ in sorted(info["mismatched_keys"])]
    if wrong:
        raise SinkscopeError(
            f"{source.name} lacks {len(wrong)} tensors of the shape that its configuration says, such as {wrong[0]}; "
            "the weights belong to another config.json: download both from one revision; or with layers=, "
            f"{config.model_type} cannot be cut to its first layers: leave it out"
        )
    if not is_quantised(config):  # else factors belong there
        check_unexpected(model, info["unexpected_keys"], source.name, {})
    quantizer = getattr(model, "hf_quantizer", None)
    if files.gguf is not None and quantizer is not None and not getattr(quantizer, "packed_modules", None):
        quantizer.remove_quantization_config(model)  # the weights are numbers now: they can be trained and saved
    return model.eval()


@contextmanager
def quiet() -> Generator[None]:
    """Context manager that silences stdout and other libraries' reports; downloads have progress bars on a terminal."""
    from huggingface_hub import utils as hub
    from transformers.utils import logging

    with ExitStack() as undo:
        for library in (logging, hub.logging):
            undo.callback(library.set_verbosity, library.get_verbosity())
            library.set_verbosity_error()
        if logging.is_progress_bar_enabled():
            undo.callback(logging.enable_progress_bar)
            logging.disable_progress_bar()
        undo.enter_context(redirect_stdout(sys.stderr))
        yield


@contextmanager
def loading_errors(source: ModelSource) -> Generator[None]:
    """Context manager that turns any error inside into a SinkscopeError."""
    try:
        yield
    except SinkscopeError:
        raise
    except Exception as error:
        raise _loading_error(error, source) from error


def _loading_error(error: Exception, source: ModelSource) -> SinkscopeError:
    """What went wrong, and what to do."""
    name, first = source.name, first_line(error)
    if is_out_of_memory(error):
        return SinkscopeError(
            f"out of memory while loading {name}; try --dtype bfloat16 (in Python dtype=), layers=N, a "
            'quantization_config or device_map="auto"'
        )
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
        return SinkscopeError(
            f"the pickled weights of {name} hold more than tensors, or are damaged, and are refused: loading them "
            "could run code; convert them to safetensors where you trust them"
        )
    remedy = "if the files are whole, check that config.json, weights and tokenizer belong together"
    if isinstance(error, ImportError):
        remedy = "install what it asks for"
    return SinkscopeError(f"{name} could not be loaded: {type(error).__name__}: {first}; {remedy}")
