"""Checkpoints: find their files, refuse what could harm, read tensors, and make a plain model of them, quietly."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError, first_line, is_out_of_memory
from sinkscope.files.opener import inside, open_regular
from sinkscope.files.output import read_json
from sinkscope.files.plain import in_one_line
from sinkscope.models.checkpoints.config import TOKENIZER_FILES, causal_class
from sinkscope.models.checkpoints.locate import ADAPTER_CONFIG, ModelSource, refuse_adapter

_AGAIN = "download it again"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_NAMING = {
    "tokenizer_config.json": re.compile(".*_files?"),
    "config.json": re.compile("transformers_weights"),
}
"""Files of a checkpoint, and their fields that name others."""


def _link_roots(folder: Path) -> tuple[Path, ...]:
    """Where links of a checkpoint may end beside its own folder: in the cache of the hub, which makes links."""
    from huggingface_hub import constants

    roots = [Path(constants.HF_HUB_CACHE)]
    if folder.parent.name == "snapshots":  # of a cache elsewhere
        roots.append(folder.parents[1] / "blobs")
    return tuple(roots)


def _check_folder(folder: Path) -> None:
    """Check the files of a checkpoint's folder that transformers opens: none may wait, and none may lead elsewhere.

    Raises:
        SinkscopeError: One is a pipe or a device, or one that is read is a folder or a broken link; or a tokenizer's
            settings name a file outside.
    """
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        is_read = entry.name in TOKENIZER_FILES
        if is_read or not (entry.is_file() or entry.is_dir() or entry.is_symlink()):
            open_regular(Path(entry.path), entry.name, _AGAIN).close()
    for name, fields in _NAMING.items():
        settings = read_json(folder / name, _AGAIN) if (folder / name).is_file() else None
        for field, value in settings.items() if isinstance(settings, dict) else ():
            named: Any = value if isinstance(value, list) else [value]
            for path in named if fields.fullmatch(field) else ():
                # A name of the machine on which it was written, of which nothing is here, is not followed.
                if isinstance(path, str) and path and os.path.lexists(folder / path.replace("\0", "")):
                    inside(folder, path, f"{field} in {name}", _link_roots(folder))


class Files:
    """The files of a model: a GGUF file, a folder (both a Path), or a repo on the hub (a str, org/name).

    Attributes:
        name: Hub id, or base name of the file or folder.
        folder: The folder with config.json or the GGUF file; for a hub repo, its snapshot in the cache, which is named
            after the commit.
        repo: The hub repo; None for a file or folder.
        commit: The hub's commit; None for a file or folder.
        gguf: Name of the GGUF file, if it is one.
        config: The content of config.json; empty if it is one GGUF file.

    Raises:
        SinkscopeError: The folder is no checkpoint or could harm, or the repo cannot be downloaded.
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
            _check_folder(where)
        else:
            self.name = self.repo = where
            config = _hub_file(where, "config.json", revision, needed=True)
            if config is None:
                raise SinkscopeError(
                    f"{where} has no config.json: give a whole model of transformers; of an adapter, the model that it "
                    "was made for"
                )
            self.folder, self.commit = config.parent, config.parent.name
            if self.file(ADAPTER_CONFIG).is_file():
                raise refuse_adapter(where)
        self.config = read_json(self.folder / "config.json", "give the folder of a Hugging Face checkpoint, whole")
        if not isinstance(self.config, dict):
            raise SinkscopeError(f"the config.json of {self.name} holds no configuration; {_AGAIN}")
        classes = self.config.get("architectures")
        if classes and not any(str(name).endswith(_CAUSAL) for name in classes):  # before weights are downloaded
            raise UnsupportedError(
                f"{self.name} is another kind of model ({', '.join(map(str, classes))}): give a decoder-only causal "
                "language model, such as llama-2-7b or gpt2"
            )

    def file(self, name: str) -> Path:
        """Return the path of a file, which a hub repo downloads; there may be none."""
        if self.repo is None or self.commit is None or (self.folder / name).is_file():
            return self.folder / name
        return _hub_file(self.repo, name, self.commit) or self.folder / name

    def index(self) -> dict[str, str] | None:
        """Return the file of each tensor, of safetensors; None if there are none.

        Raises:
            SinkscopeError: An index names a file that is not in its folder.
        """
        if self.file(_SINGLE).is_file():
            return dict.fromkeys(safe_open(self.folder / _SINGLE, "pt").keys(), _SINGLE)
        return self._indexed(_INDEX) if self.file(_INDEX).is_file() else None

    def _indexed(self, index: str) -> dict[str, str]:
        content = read_json(self.folder / index, _AGAIN)
        names = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(names, dict) or not names or not isinstance(content.get("metadata"), dict):
            raise SinkscopeError(f"{index} has no map of its tensors (weight_map) or no metadata; {_AGAIN}")
        for shard in {*map(str, names.values())}:
            inside(self.folder, shard, index, _link_roots(self.folder))
        return names

    def weights(self) -> list[Path]:
        """Return the files that transformers would load: safetensors, or else pickles; those of a repo are downloaded.

        Raises:
            SinkscopeError: There are none, or a shard is missing.
        """
        if self.gguf is not None:
            return [self.folder / self.gguf]
        index = self.index() or {}
        names = sorted({*index.values()})
        for pickled in _PICKLES:
            if not names and self.file(pickled).is_file():
                names = sorted({*self._indexed(pickled).values()}) if pickled.endswith("json") else [pickled]
        files = [self.file(name) for name in names]
        absent = [file.name for file in files if not file.is_file()] or [_SINGLE] * (not files)
        if absent:
            raise SinkscopeError(
                f"{self.repo or self.folder} lacks its weights, such as {absent[0]}: download them, not only the "
                "configuration, or give a .gguf file itself"
            )
        return files

    def fetch_beside(self) -> None:
        """Download what a hub repo has beside its weights: the files of the tokenizer, and of generation.

        Raises:
            SinkscopeError: A file is damaged or cannot be read, or a download fails.
        """
        for name in TOKENIZER_FILES if self.gguf is None else ():
            file = self.file(name)
            if name.endswith(".json") and file.exists() and not isinstance(read_json(file, _AGAIN), dict):
                raise SinkscopeError(f"{name} is no JSON object; {_AGAIN}")


def _hub_file(repo: str, name: str, revision: str | None, *, needed: bool = False) -> Path | None:
    """A file of a repo, in the cache; None if the repo has none.

    Raises:
        SinkscopeError: It cannot be downloaded.
    """
    from huggingface_hub import constants
    from transformers.utils.hub import cached_file

    try:
        file = cached_file(
            repo,
            name,
            revision=revision,
            _raise_exceptions_for_missing_entries=needed,
            # Offline, nobody can tell whether the repo has a file that the cache lacks.
            _raise_exceptions_for_connection_errors=needed or not constants.HF_HUB_OFFLINE,
        )
    except Exception as error:  # of the hub's client, or of the network
        raise SinkscopeError(
            f"{name} of {repo} was not downloaded ({first_line(error)}); check name, revision, access "
            "(`hf auth login`) and connection, and run it again: whole files are kept"
        ) from None
    return None if file is None else Path(file)


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
        weight_map = None if self.gguf is not None else self.index()
        if weight_map is None:
            raise UnsupportedError(
                f"{self.name} has no safetensors weights, so its layers cannot be read one by one; load it whole with "
                "sinkscope.load(...), or convert it with save_pretrained"
            )
        self.weight_map = weight_map

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors by name, in the dtype in which they are stored.

        The files are closed afterwards, so that their pages leave memory together with the last tensor.
        """
        tensors: dict[str, Tensor] = {}
        wanted = {*names}
        for shard in sorted({self.weight_map[name] for name in wanted}):
            with safe_open(self.file(shard), "pt") as file:
                for name in sorted(wanted):
                    if self.weight_map[name] == shard:
                        tensors[name] = file.get_tensor(name)
        self.read |= wanted
        return tensors


# -- loading -----------------------------------------------------------------------------------------------------------


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
    modules = dict(model.named_modules())
    prefix = str(getattr(model, "base_model_prefix", ""))
    for tensor in sorted(unexpected):
        path = tensor if prefix in modules else tensor.removeprefix(f"{prefix}.")
        while path not in modules:  # the innermost module on the path
            path = path.rpartition(".")[0]
        if next(modules[path].parameters(recurse=False), None) is not None:
            raise UnsupportedError(
                f"{name} has the tensor {origins.get(tensor, tensor)}, for which its configuration has no place, so "
                "the model would run without it: config and weights are of different models, or the weights hold an "
                "adapter or a quantisation; download both from one revision, or merge the adapter"
            )


def model_with_weights(source: ModelSource, files: Files, config: Any, options: dict[str, Any]) -> Any:
    """Return a model in eval mode, with the weights of the files.

    Args:
        source: Where it comes from, for errors.
        files: Its files; weights of a repo are downloaded.
        config: Its configuration.
        options: What transformers takes beside it.

    Raises:
        SinkscopeError: The weights are missing, or do not belong to the configuration.
    """
    files.weights()
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
    """Context manager that turns any error inside into a SinkscopeError, with what to do."""
    try:
        yield
    except SinkscopeError:
        raise
    except Exception as error:
        what = f"{source.name} could not be loaded: {type(error).__name__}: {first_line(error)}"
        remedy = "check that the files are whole (`git lfs pull` fetches what Git LFS left) and belong together"
        if isinstance(error, ImportError):
            remedy = "install what it asks for"
        if "model type" in str(error):
            remedy = "install a transformers that knows it, or load it with its own code and give the model"
        if "trust_remote_code" in str(error):
            what = f"{source.name} holds Python code for its model, which is never run here"
            remedy = "if you trust it, load the model with transformers and give the model"
        if is_out_of_memory(error):
            what = f"out of memory while loading {source.name}"
            remedy = 'try --dtype bfloat16 (in Python dtype=), layers=N, a quantization_config or device_map="auto"'
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
            what = f"the pickled weights of {source.name} hold more than tensors, or are damaged, and are refused"
            remedy = "loading them could run code; convert them to safetensors where you trust them"
        raise SinkscopeError(f"{what}; {remedy}") from error
