"""Checkpoints: find their files, refuse what could harm, read tensors, make a plain model, and identify them."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tomllib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor

from sinkscope.errors import SinkscopeError, UnsupportedError, warn
from sinkscope.files.output import inside, open_regular, path_of, read_json
from sinkscope.files.plain import in_one_line
from sinkscope.models.checkpoints.config import loading_errors
from sinkscope.models.checkpoints.gguf_file import scale_rope
from sinkscope.models.shards import local
from sinkscope.models.target import Target
from sinkscope.models.weights import is_plain

BUNDLED = "bundled"
"""Name of the model inside the package."""
RECALL = "recall"
"""Name of the model inside the package that answers questions about facts of earlier turns."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ADAPTER = "adapter_config.json"
_GGUF = ".gguf"
_WHOLE = "give the folder of a Hugging Face checkpoint, whole"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_WRAPPERS = {
    "_orig_mod.": "torch.compile adds: save the model inside (model._orig_mod",
    "module.": "a wrapper for several devices adds: save the model inside (model.module",
}
"""Prefixes of tensors that were saved from a wrapped model, and what to do."""
_BESIDE = ["*.json", "*.jinja", "*.model", "*.txt"]
"""What a repo has beside its weights."""
_SETTINGS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", _INDEX)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_NAMING = re.compile(".*_files?|transformers_weights|weight_map")
"""Fields of settings that name other files."""


def list_models() -> dict[str, str]:
    """Return the id on the Hugging Face hub of every model with a short name, family by family."""
    content = tomllib.loads(Path(__file__).with_name("names.toml").read_text("utf-8"))
    names: dict[str, str] = {}
    for hub_ids in content["models"].values():
        names |= hub_ids
    return names


def hub_id_of(name: str) -> str:
    """Return the hub id of a short name (`llama-2-7b`), or of the last part of a hub id (`Llama-2-7b-hf`).

    Raises:
        SinkscopeError: The name is unknown.
    """
    for short, hub_id in list_models().items():
        if name.lower() in (short, hub_id.lower().rpartition("/")[2]):
            return hub_id
    raise SinkscopeError(
        f"unknown model {name!r}: give a short name (`sinkscope.list_models()` has all), a hub id such as org/name, a "
        "folder that is here and has a config.json, or a .gguf file"
    )


def locate(model: str | os.PathLike[str] | None) -> tuple[str, Path | str]:
    """Return the name of a model in reports, and its folder, GGUF file or hub id.

    No weights are read. An existing model takes precedence over a hub id or short name of the same spelling.

    Args:
        model: Short name, hub id, folder or `.gguf` file. None: the bundled model.

    Raises:
        SinkscopeError: It is none of these.
    """
    source = BUNDLED if model is None else os.fspath(model)
    path = path_of(source)
    if path.suffix != _GGUF and path.resolve().suffix == _GGUF and os.path.isfile(path):
        path = path.resolve()  # a link of another name
    is_path = isinstance(model, os.PathLike) or source.startswith((".", "~", os.sep)) or path.suffix == _GGUF
    if source in (BUNDLED, RECALL) and not is_path:
        return source, Path(__file__).parents[1] / source
    # A folder that only shares its name with a model (`gpt2/` with notes in it) does not hide the model.
    holds = any(os.path.isfile(path / name) for name in ("config.json", _ADAPTER))
    is_file = os.path.isfile(path)
    if source and (holds or (is_file and path.suffix == _GGUF)):
        return in_one_line(path.resolve().name), path
    is_hub_id = _HUB_ID.fullmatch(source) and not is_path and not is_file
    return source, source if is_hub_id else hub_id_of(source)


def _settings(file: Path) -> dict[str, Any]:
    """The content of a file of settings.

    Raises:
        SinkscopeError: It cannot be read, is damaged, or names a file outside its folder.
    """
    content, folder = read_json(file, _WHOLE), file.parent
    if not isinstance(content, dict):
        raise SinkscopeError(f"{file.name} is no JSON object; download it again")
    # Links of a snapshot end among the blobs of its repo, also where the folder is a link to the snapshot.
    snapshot = folder.resolve()
    blobs = (snapshot.parents[1] / "blobs",) if snapshot.parent.name == "snapshots" else ()
    for field in filter(_NAMING.fullmatch, content):
        named = content[field]
        if isinstance(named, dict):
            named = [*{*named.values()}]
        for name in named if isinstance(named, list) else [named]:
            # A name of the machine on which it was written, of which nothing is here, is not followed.
            if isinstance(name, str) and os.path.lexists(folder / name.replace("\0", "")):
                inside(folder, name, file.name, blobs)
    return content


class Files:
    """The files of a model: a GGUF file, a folder, or a repo on the hub.

    Args:
        model: As for `locate`.
        revision: Branch, tag or commit of a hub id.

    Attributes:
        name: Name of the model, for errors and reports.
        folder: The folder with config.json or the GGUF file; for a hub repo, its snapshot in the cache, which is named
            after the commit.
        commit: The hub's commit; None for a file or folder.
        gguf: Name of the GGUF file, if it is one.
        is_beside_adapter: Whether the folder holds an adapter beside a whole model, into which it may be merged.

    What a repo has beside its weights is downloaded at once.

    Raises:
        SinkscopeError: There is no such model, it is no checkpoint or could harm, or something other than a repo is to
            have a revision.
        OSError: The repo cannot be downloaded.
        UnsupportedError: It holds another kind of model.
    """

    def __init__(self, model: str | os.PathLike[str] | None, revision: str | None = None) -> None:
        self.name, where = locate(model)
        self.commit: str | None = None
        self.gguf: str | None = None
        self.is_beside_adapter = False
        self.repo = str(where)
        if isinstance(where, str):
            known = snapshot_download(where, revision=revision, allow_patterns=_BESIDE, ignore_patterns="*/*")
            self.folder = Path(known)
            self.commit = self.folder.name
        elif revision is not None:
            raise SinkscopeError(f"revision {revision!r} means nothing for {self.name}: revisions belong to hub ids")
        elif where.is_file():
            self.folder, self.gguf = where.parent, where.name
            return
        else:
            self.folder = where
        for file in self.folder.iterdir():
            if not file.is_dir():  # a pipe would wait, and a device need not end
                open_regular(file, file.name, _WHOLE).close()
            if file.name in _SETTINGS:
                _settings(file)
        self.is_beside_adapter = (self.folder / _ADAPTER).is_file()
        has_config = (self.folder / "config.json").is_file()
        if self.is_beside_adapter and not (has_config and self.weight_map):
            raise SinkscopeError(
                f"{self.name} holds an adapter ({_ADAPTER}), and no weights of a model: load its base with "
                "sinkscope.load, put the adapter on it with peft.PeftModel.from_pretrained, and measure that"
            )
        classes = _settings(self.folder / "config.json").get("architectures")
        if classes and not any(str(name).endswith(_CAUSAL) for name in classes):  # before weights are downloaded
            raise UnsupportedError(
                f"{self.name} is another kind of model ({', '.join(map(str, classes))}): give a decoder-only causal "
                "language model, such as llama-2-7b or gpt2"
            )

    def fetch(self, names: Iterable[str]) -> None:
        """Download files of a hub repo that are not here, if it has them."""
        missing = [name for name in names if not (self.folder / name).is_file()]
        if self.commit is not None and missing:
            snapshot_download(self.repo, revision=self.commit, allow_patterns=missing)

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """The file of each tensor of safetensors; empty if there are none."""
        index, single = self.folder / _INDEX, self.folder / _SINGLE
        if index.is_file() and not single.is_file():
            return read_json(index)["weight_map"]
        self.fetch([_SINGLE])
        return dict.fromkeys(safe_open(single, "pt").keys(), _SINGLE) if single.is_file() else {}

    def tensor(self, name: str) -> Tensor:
        """Read a tensor, in the dtype in which it is stored; its shard of a hub repo is downloaded for it.

        The file is closed afterwards, so that its pages leave memory together with the tensor.
        """
        with loading_errors(self.name):
            shard = self.weight_map[name]
            self.fetch([shard])
            return safe_open(self.folder / shard, "pt").get_tensor(name)

    def read_config(self) -> Any:
        """Read the configuration of a causal language model.

        Raises:
            SinkscopeError: It is not a configuration, or has no layers.
            UnsupportedError: It is another kind of model, or has no adapter.
        """
        from transformers import AutoConfig

        config: Any = AutoConfig.from_pretrained(self.folder, gguf_file=self.gguf, trust_remote_code=False)
        text = config.get_text_config()
        if self.gguf is not None:
            scale_rope(text, self.folder / self.gguf)
        config._attn_implementation = config._experts_implementation = None  # it may name code on the hub
        if getattr(text, "attn_logit_softcapping", None) is not None:
            config._attn_implementation = "eager"  # some versions of transformers choose SDPA, which drops the soft cap
        return config

    def read_tokenizer(self) -> Any:
        """Return the tokenizer beside the weights, or in the GGUF file; None if there is none."""
        from transformers import AutoTokenizer

        if self.gguf is None and not any((self.folder / file).is_file() for file in _VOCABULARIES):
            return None
        return AutoTokenizer.from_pretrained(self.folder, gguf_file=self.gguf, trust_remote_code=False)


# -- loading -----------------------------------------------------------------------------------------------------------


def causal_class(config: Any) -> Any:
    """Return what loads a causal model; a text model behind an image tower is loaded with it."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto as auto

    is_behind = config.model_type in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if is_behind and config.model_type not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def without_place(model: Any, names: Iterable[str]) -> list[str]:
    """Return those of some tensors, which a model has not, that would change what its weights compute.

    Whole parts that it has not are harmless: towers for images, heads of training, layers that predict further tokens.
    A bias, a scale or an adapter of a weight is not.
    """
    weighty = tuple(f"{path}." for path, module in model.named_modules() if path and module._parameters)
    prefix = f"{model.base_model_prefix}."
    return [name for name in sorted(names) if f"{prefix}{name}".startswith(weighty) or name.startswith(weighty)]


def model_with_weights(files: Files, config: Any, options: dict[str, Any]) -> Any:
    """Return a model in eval mode, with the weights of the files: all its tensors, and none left out that it needs.

    Args:
        files: Its files; weights of a repo are downloaded.
        config: Its configuration. Of a quantised model, further tensors may belong to its parts.
        options: What transformers takes beside it.

    Raises:
        UnsupportedError: A tensor is missing, or of another shape, or has no place.
    """
    files.fetch({*files.weight_map.values()} if files.gguf is None else ())
    with _without_adapters() if files.is_beside_adapter else nullcontext():
        model, info = causal_class(config).from_pretrained(
            files.folder,
            config=config,
            gguf_file=files.gguf,
            use_safetensors=True,  # pickles could run code
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    prefix = _prefix_of_wrapper(info["unexpected_keys"])
    if prefix and info["missing_keys"]:
        raise UnsupportedError(
            f"the tensors of {files.name} have the prefix {prefix!r}, which {_WRAPPERS[prefix]}.save_pretrained), or "
            "rename the tensors without it"
        )
    wrong = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if wrong:
        raise UnsupportedError(
            f"{files.name} lacks {len(wrong)} tensors of the shape that its configuration says, such as {wrong[0]}; "
            "it is a part of a model, or the weights belong to another config.json: download both from one revision"
        )
    extra = without_place(model, info["unexpected_keys"])
    if extra and not getattr(config, "quantization_config", None):
        raise UnsupportedError(
            f"{files.name} has the tensor {extra[0]}, for which its configuration has no place, so "
            "the model would run without it: config and weights are of different models, or the weights hold an "
            "adapter or a quantisation; download both from one revision, or merge the adapter"
        )
    quantizer = getattr(model, "hf_quantizer", None)
    if files.gguf is not None and quantizer is not None and not getattr(quantizer, "packed_modules", None):
        quantizer.remove_quantization_config(model)  # the weights are numbers now: they can be trained and saved
    return model.eval()


def _prefix_of_wrapper(names: Iterable[str]) -> str | None:
    """The prefix that a wrapper of modules adds to the names of tensors, if it stands in one of these."""
    for name in names:
        for prefix in _WRAPPERS:
            if f".{prefix}" in f".{name}":
                return prefix
    return None


@contextmanager
def _without_adapters() -> Generator[None]:
    """Context manager in which transformers puts no adapter of the folder on the model that it reads from it."""
    from transformers import modeling_utils
    from transformers.models.auto import auto_factory

    def load_none(path: Any, *_: Any, **adapter: Any) -> tuple[None, Any, dict[str, Any]]:
        return None, path, adapter

    finds_none = patch.object(auto_factory, "find_adapter_config_file", lambda *_, **__: None, create=True)
    with finds_none, patch.object(modeling_utils, "maybe_load_adapters", load_none, create=True):
        yield


@contextmanager
def quiet() -> Generator[None]:
    """Context manager that silences stdout and the reports and progress bars of transformers."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


# -- which checkpoint it is: the hub's commit, or the configuration and a sample of the weights ------------------------

_NOT_OF_THE_MODEL = ("transformers_version", "_name_or_path", "distributed_config", "dtype")  # fields of configurations
_SOME = 1 << 8  # numbers of a parameter


def fingerprint_of(target: Target) -> str:
    """Identify the weights of a model: by the hub's commit, if it was read or loaded from there and is as it was there.

    Otherwise by its configuration and some numbers of each parameter at equal distances. Names do not count, nor what
    bfloat16 rounds, nor the head. A fine-tune is seen, and a change of single numbers is not.
    """
    store = target.store
    if store is not None and store.source.commit is not None:
        return store.source.commit
    numbers: list[str] = []
    base = getattr(target.hf, "base_model", target.base)
    for name, parameter in base.named_parameters():
        weight = local(parameter.detach()) if store is None else store.stored(name)
        if is_plain(weight) and not weight.is_meta:  # else it is quantised, or elsewhere
            # An odd distance, so that columns take turns.
            sample = weight.flatten()[:: weight.numel() // _SOME | 1]
            numbers.append(str(sample.to(torch.bfloat16).tolist()))
    for name, value in target.hf.config.to_diff_dict().items():
        if name not in _NOT_OF_THE_MODEL:
            numbers.append(f"{name} {value}")
    digest = hashlib.sha256(repr(sorted(numbers)).encode()).hexdigest()[:16]
    commit, loaded = getattr(target.hf, "sinkscope_origin", ("", ""))
    return commit if digest == loaded else digest


def check_made_for(target: Target, model: Mapping[str, Any]) -> None:
    """Compare a model with the description of the model for which a patch was made.

    A fine-tuned version is accepted, and a `SinkscopeWarning` says so.

    Args:
        target: The model.
        model: Name, sizes and fingerprint of the other.

    Raises:
        SinkscopeError: The model has another shape.
    """
    for name in ("n_layers", "d_model", "d_mlp"):
        size = getattr(target, name)
        if model.get(name) not in (None, size):
            raise SinkscopeError(
                f"the patch was made for {model.get('name')}, whose {name} is {model[name]}, and that of {target.name} "
                f"is {size}: give that model, or make a patch for this one"
            )
    commit = getattr(target.hf.config, "_commit_hash", None)
    if model.get("fingerprint") not in (None, "", commit, fingerprint_of(target)):
        warn(
            f"the patch was made for {model.get('name')} (fingerprint {model['fingerprint']}), and {target.name} has "
            "the same shape and other weights, or was not loaded by sinkscope: if they are others, make a patch for "
            "this model"
        )
