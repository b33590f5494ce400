"""Checkpoints: find their files, refuse what could harm, read tensors, make a plain model, and identify them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError, first_line, is_out_of_memory, warn
from sinkscope.files.output import inside, open_regular, read_json
from sinkscope.files.plain import in_one_line
from sinkscope.models.checkpoints.config import TOKENIZER_FILES, causal_class
from sinkscope.models.checkpoints.locate import ADAPTER_CONFIG, refuse_adapter
from sinkscope.models.shards import local, shards_of
from sinkscope.models.target import Target
from sinkscope.models.weights import brought

_AGAIN = "download it again"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_NAMING = {
    "tokenizer_config.json": re.compile(".*_files?"),
    "config.json": re.compile("transformers_weights"),
}
"""Files of a checkpoint, and their fields that name others."""


def _settings(file: Path, remedy: str = _AGAIN) -> dict[str, Any]:
    """The content of a file of settings.

    Raises:
        SinkscopeError: It cannot be read, or is damaged.
    """
    content = read_json(file, remedy)
    if not isinstance(content, dict):
        raise SinkscopeError(f"{file.name} is no JSON object; {_AGAIN}")
    return content


def _check_folder(folder: Path) -> None:
    """Check the files of a checkpoint's folder: none may wait, and none may lead elsewhere.

    Raises:
        SinkscopeError: One is a pipe or a device; or settings name a file outside.
    """
    for entry in os.scandir(folder):
        if not (entry.is_file() or entry.is_dir() or entry.is_symlink()):
            open_regular(Path(entry.path), entry.name, _AGAIN).close()
    for name, fields in _NAMING.items():
        settings = _settings(folder / name) if (folder / name).is_file() else {}
        for field in filter(fields.fullmatch, settings):
            named = settings[field]
            for path in named if isinstance(named, list) else [named]:
                # A name of the machine on which it was written, of which nothing is here, is not followed.
                if isinstance(path, str) and os.path.lexists(folder / path.replace("\0", "")):
                    _inside(folder, path, f"{field} in {name}")


def _inside(folder: Path, name: str, said_by: str) -> Path:
    """The path of a file of a checkpoint that another names; links may end in the cache of the hub, which makes them.

    Raises:
        SinkscopeError: It is outside.
    """
    from huggingface_hub import constants

    # A snapshot of a cache elsewhere has its blobs beside the folder of snapshots.
    blobs = [folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else []
    return inside(folder, name, said_by, (Path(constants.HF_HUB_CACHE), *blobs))


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
        read: Names of the tensors that have been read one by one so far.

    What a repo has beside its weights is downloaded at once: the configuration, and the files of the tokenizer.

    Raises:
        SinkscopeError: The folder is no checkpoint or could harm.
        OSError: The repo cannot be downloaded.
        UnsupportedError: It holds another kind of model.
    """

    def __init__(self, where: str | Path, *, revision: str | None = None) -> None:
        self.repo: str | None = None
        self.commit: str | None = None
        self.gguf: str | None = None
        self.config: Any = {}
        self.read: set[str] = set()
        if isinstance(where, Path) and where.is_file():
            self.folder, self.name, self.gguf = where.parent, in_one_line(where.name), where.name
            return
        if isinstance(where, Path):
            self.folder, self.name = where, in_one_line(where.resolve().name)
            _check_folder(where)
        else:
            self.name = self.repo = where
            if _hub_file(where, ADAPTER_CONFIG, revision) is not None:
                raise refuse_adapter(where)
            self.folder = Path(_hub_file(where, "config.json", revision, needed=True)).parent
            self.commit = self.folder.name
        self.config = _settings(self.folder / "config.json", "give the folder of a Hugging Face checkpoint, whole")
        classes = self.config.get("architectures")
        if classes and not any(str(name).endswith(_CAUSAL) for name in classes):  # before weights are downloaded
            raise UnsupportedError(
                f"{self.name} is another kind of model ({', '.join(map(str, classes))}): give a decoder-only causal "
                "language model, such as llama-2-7b or gpt2"
            )
        for name in TOKENIZER_FILES:
            file = self.file(name)
            if name.endswith(".json") and os.path.lexists(file):
                _settings(file)  # transformers passes over a damaged one of generation
            elif os.path.lexists(file):
                open_regular(file, name, _AGAIN).close()

    def file(self, name: str) -> Path:
        """Return the path of a file, which a hub repo downloads; there may be none."""
        path = self.folder / name
        if self.repo is None or path.is_file():
            return path
        return Path(_hub_file(self.repo, name, self.commit) or path)

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """The file of each tensor of safetensors; empty if there are none.

        Raises:
            SinkscopeError: The index names a file that is not in its folder.
        """
        if self.gguf is None and self.file(_SINGLE).is_file():
            return dict.fromkeys(safe_open(self.folder / _SINGLE, "pt").keys(), _SINGLE)
        if self.gguf is not None or not self.file(_INDEX).is_file():
            return {}
        names = _settings(self.folder / _INDEX)["weight_map"]
        for shard in {*names.values()}:
            _inside(self.folder, shard, _INDEX)
        return names

    def weights(self) -> list[Path]:
        """Return the files of the weights; those of a repo are downloaded.

        Raises:
            SinkscopeError: There are none, or a shard is missing.
        """
        files = [self.file(name) for name in sorted({*self.weight_map.values()} or {self.gguf or _SINGLE})]
        for file in files:
            if not file.is_file():
                raise SinkscopeError(
                    f"{self.repo or self.folder} lacks its weights, such as {file.name}: download them, not only the "
                    "configuration; convert pickles (.bin) with save_pretrained of transformers, because they could "
                    "run code; or give a .gguf file itself"
                )
        return files

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors by name, in the dtype in which they are stored; shards of a hub repo are downloaded for it.

        The files are closed afterwards, so that their pages leave memory together with the last tensor.
        """
        tensors: dict[str, Tensor] = {}
        wanted = {*names}
        with loading_errors(self.name):
            for shard in sorted({self.weight_map[name] for name in wanted}):
                with safe_open(self.file(shard), "pt") as file:
                    for name in sorted(wanted):
                        if self.weight_map[name] == shard:
                            tensors[name] = file.get_tensor(name)
        self.read |= wanted
        return tensors


def _hub_file(repo: str, name: str, revision: str | None, *, needed: bool = False) -> Any:
    """The path of a file of a repo, in the cache; None if the repo has none."""
    from transformers.utils.hub import cached_file

    return cached_file(repo, name, revision=revision, _raise_exceptions_for_missing_entries=needed)


# -- loading -----------------------------------------------------------------------------------------------------------


def is_quantised(config: Any) -> bool:
    """Return whether a configuration says how its weights are quantised."""
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) or getattr(part, "compression_config", None):
            return True
    return False


def check_loaded(model: nn.Module, info: dict[str, Any], name: str, part: str = "", *, is_whole: bool = True) -> None:
    """Check that a model got all its tensors, and that none that was left out belongs to a part that it has.

    Whole parts that a model does not have are harmless: towers for images, heads of training, layers that predict
    further tokens. So are the buffers that transformers ignores, which are not among its unexpected tensors. A bias, a
    scale or an adapter of a weight that the model has changes what it computes.

    Args:
        model: The model, or a part of it, that was loaded.
        info: What transformers reports.
        name: Name of the model, for errors.
        part: Below which every tensor must be there.
        is_whole: Whether no further tensors, such as factors of quantised ones, belong to its parts.

    Raises:
        UnsupportedError: A tensor is missing, or of another shape, or has no place.
    """
    wrong = [key for key in sorted(info["missing_keys"]) if key.startswith(part)]
    wrong += [key for key, *_ in sorted(info["mismatched_keys"])]
    if wrong:
        raise UnsupportedError(
            f"{name} lacks {len(wrong)} tensors of the shape that its configuration says, such as {wrong[0]}; "
            "the weights belong to another config.json: download both from one revision"
        )
    modules = dict(model.named_modules())
    prefix = str(getattr(model, "base_model_prefix", ""))
    for tensor in sorted(info["unexpected_keys"]) if is_whole else ():
        path = tensor if prefix in modules else tensor.removeprefix(f"{prefix}.")
        while path not in modules:  # the innermost module on the path
            path = path.rpartition(".")[0]
        if next(modules[path].parameters(recurse=False), None) is not None:
            raise UnsupportedError(
                f"{name} has the tensor {tensor}, for which its configuration has no place, so "
                "the model would run without it: config and weights are of different models, or the weights hold an "
                "adapter or a quantisation; download both from one revision, or merge the adapter"
            )


def model_with_weights(name: str, files: Files, config: Any, options: dict[str, Any]) -> Any:
    """Return a model in eval mode, with the weights of the files.

    Args:
        name: Its name, for errors.
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
        **options,
    )
    model, info = loaded
    check_loaded(model, info, name, is_whole=not is_quantised(config))
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
def loading_errors(name: str) -> Generator[None]:
    """Context manager that turns any error inside into a SinkscopeError, with what to do; `name` is the model's."""
    try:
        yield
    except SinkscopeError:
        raise
    except Exception as error:
        what = f"{name} could not be loaded: {type(error).__name__}: {first_line(error)}"
        remedy = (
            "check name, revision, access (`hf auth login`) and connection, that what it asks for is installed, and "
            "that the files are whole (`git lfs pull` fetches what Git LFS left) and belong together"
        )
        if "trust_remote_code" in str(error):
            what = f"{name} holds Python code of its own, which is never run here"
            remedy = "if you trust it, load the model or tokenizer with transformers and give that"
        if is_out_of_memory(error):
            what = f"out of memory while loading {name}"
            remedy = 'try --dtype bfloat16 (in Python dtype=), a quantization_config or device_map="auto"'
        raise SinkscopeError(f"{what}; {remedy}") from error


# -- which checkpoint it is: the hub's commit, or the configuration and a sample of each tensor ------------------------
#
# Of each tensor count the dtype, the shape, and some numbers at equal distances; of a file that is not of safetensors
# its size and some bytes. A change of single other numbers is not seen; a fine-tune, another precision or another
# model is.

_NOT_OF_THE_MODEL = ("transformers_version", "_name_or_path", "distributed_config")  # fields of a configuration
_NUMBERS = 4096  # of each tensor, or bytes of a file of another kind
_BRIDGE = "._original_component"  # in names of tensors below the modules of a bridge, which is the same model


def fingerprint(source: Files | nn.Module) -> str:
    """Identify a checkpoint or a live model; that of a live model differs from that of its files.

    The fingerprint of a repo on the hub is its commit.
    """
    if isinstance(source, Files) and source.commit is not None:
        return source.commit
    model: Any = source
    config = source.config if isinstance(source, Files) else model.config.to_dict()
    parts = {}
    for name, tensor in _of_files(source) if isinstance(source, Files) else _of_model(model):
        parts[name] = [str(tensor.dtype), list(tensor.shape), _sample(tensor)]
    config = {name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL}
    text = json.dumps([config, parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _of_files(files: Files) -> Iterator[tuple[str, Tensor]]:
    for file in files.weights():
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():
                    yield name, tensors.get_tensor(name)
        else:
            yield file.name, torch.from_numpy(np.memmap(file, mode="c"))


def _of_model(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a checkpoint of the model would hold; a bridge adds biases of zeros to it."""
    stored = model.state_dict().keys()
    for path, module in model.named_modules():
        with brought(module, recurse=False):
            own = (*module.named_parameters(path, recurse=False), *module.named_buffers(path, recurse=False))
            for name, tensor in own:
                is_added = name.endswith(f"{_BRIDGE}.bias") and (tensor.is_meta or not tensor.any())
                if name in stored and not is_added:
                    yield name.replace(_BRIDGE, ""), tensor


@torch.no_grad()
def _sample(tensor: Tensor) -> str:
    """Digest of some numbers of a tensor, at equal distances; empty if they are elsewhere."""
    if tensor.is_meta:
        return ""
    if hasattr(tensor, "device_mesh"):
        return " ".join(shards_of(tensor).all(_sample(local(tensor))))
    if hasattr(tensor, "__tensor_flatten__"):  # quantised: it is made of tensors
        quantised: Any = tensor
        return " ".join(_sample(getattr(quantised, name)) for name in quantised.__tensor_flatten__()[0])
    flat = tensor.detach().reshape(-1)
    numbers = flat[:: len(flat) // _NUMBERS | 1].cpu().contiguous()  # an odd distance, so that columns take turns
    return hashlib.sha256(numbers.view(torch.uint8).numpy().data).hexdigest()


def fingerprint_of(target: Target) -> str:
    """Return the fingerprint of the checkpoint that a model is read or was loaded from, or of the live model.

    A model whose weights have changed since it was loaded gets a fingerprint of its own.
    """
    if target.store is not None:
        return fingerprint(target.store.source)
    here = fingerprint(target.hf)
    files, loaded = getattr(target.hf, "sinkscope_origin", ("", ""))
    if here == loaded:
        return files
    return here


def check_made_for(target: Target, model: Mapping[str, Any]) -> None:
    """Compare a model with the description of the model for which a patch was made.

    A fine-tuned version is accepted, and a `SinkscopeWarning` says so.

    Args:
        target: The model.
        model: Name, family, sizes and fingerprint of the other.

    Raises:
        SinkscopeError: The model has another shape.
    """
    here = {"family": target.config.model_type, "n_layers": target.n_layers, "d_model": target.d_model}
    for name, size in {**here, "d_mlp": target.d_mlp}.items():
        if model.get(name, size) != size:
            raise SinkscopeError(
                f"the patch was made for {model.get('name')}, whose {name} is {model[name]}, and that of "
                f"{target.name} is {size}: give that model, or make a patch for this one"
            )
    wanted = model.get("fingerprint")
    if wanted not in (None, "", getattr(target.hf.config, "_commit_hash", None), fingerprint_of(target)):
        warn(
            f"the patch was made for {model.get('name')} (fingerprint {wanted}), and {target.name} has the same shape "
            "and other weights, or was not loaded by sinkscope: if they are others, make a patch for this model"
        )
