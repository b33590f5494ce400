"""Load a model whole, or open it as a `Target` and read as little of a checkpoint as possible."""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import psutil
import torch

from sinkscope.engine.stock import set_attention
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.plain import pathless
from sinkscope.files.progress import world_size
from sinkscope.models.checkpoints.checkpoint import (
    BUNDLED,
    Files,
    fingerprint_of,
    model_with_weights,
    quiet,
)
from sinkscope.models.checkpoints.config import (
    check_finite,
    check_vocabulary,
    loading_errors,
    parse_device,
    parse_dtype,
)
from sinkscope.models.checkpoints.gguf_file import parsed_once
from sinkscope.models.checkpoints.stream import LayerStore
from sinkscope.models.inputs import tokenizer_of
from sinkscope.models.target import Target, check_divides
from sinkscope.opening.live import is_misread, target_of, with_adapter
from sinkscope.opening.parts import kinds_of


@checks_arguments
@torch.inference_mode(False)
def load(
    x: Any = None,
    *,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    device_map: Any = None,
    quantization_config: Any = None,
    tokenizer: Any = None,
) -> Any:
    """Load a model.

    Args:
        x: Short name (`sinkscope.list_models()` lists them), hub id `org/name`, folder or `.gguf` file. None loads the
            model inside this package.
        revision: Branch, tag or commit of a hub id.
        dtype: torch dtype or its name ("float32", "bfloat16", ...). None uses the checkpoint's.
        device: "cpu", "cuda", "cuda:1" or "mps". None uses the first cuda device if there is one, else the CPU; under
            torchrun, transformers splits the model over the processes by tensor parallelism.
        device_map: Passed on to transformers instead of `device`.
        quantization_config: Passed on to transformers.
        tokenizer: Tokenizer to use instead of the one stored with the weights.

    Returns:
        Hugging Face model, in eval mode. Its tokenizer is kept on it as `tokenizer`, its name as `sinkscope_name`.
        TransformerLens and nnsight wrap it (`docs/other_libraries.md`).

    Raises:
        SinkscopeError: The model cannot be loaded; one line says what is wrong and what to do.
        UnsupportedError: The architecture has no adapter.
    """
    if not (x is None or isinstance(x, str | os.PathLike)):
        raise SinkscopeError(
            f"{type(x).__name__} is no name, folder or file: a model that is loaded already is used as it is"
        )
    if device_map is not None and device is not None:
        raise SinkscopeError(f"device {str(device)!r} and device_map exclude each other; give one of them")
    options = {"dtype": parse_dtype(dtype) or "auto", "quantization_config": quantization_config}
    is_split = world_size() > 1 and device_map is None and device is None
    name = os.fspath(x or BUNDLED)
    with quiet(), loading_errors(pathless(name)), parsed_once() if name.endswith(".gguf") else nullcontext():
        place = parse_device(device)
        if device_map is None and not is_split and place.type != "cpu":
            device_map = {"": place}
        files = Files(x, revision)
        config = files.read_config()
        if is_split:
            from transformers.distributed import DistributedConfig  # from 5.19 on

            check_divides(config, files.name, world_size())
            options["distributed_config"] = DistributedConfig(tp_size=world_size())
        hf = model_with_weights(files, config, {**options, "device_map": device_map})
        hf.sinkscope_name, hf.tokenizer = files.name, tokenizer or files.read_tokenizer()
        check_finite(hf)
        target = _checked(hf, hf.tokenizer, files.name)
        if files.commit is not None:
            hf.config._name_or_path, hf.config._commit_hash = files.repo, files.commit
            if quantization_config is None:  # else it is not the model that it was made from
                hf.sinkscope_origin = files.commit, fingerprint_of(target)
    return hf


def _checked(hf: Any, tokenizer: Any, name: str, store: Any = None) -> Target:
    """A model that was just opened; it attends eagerly if its attention is wrong on its device."""
    check_vocabulary(tokenizer, hf)
    target = with_adapter(hf, hf, "hf", tokenizer, name, store)
    if is_misread(target):
        for config in target.configs:
            set_attention(config, "eager")
    return target


SHARE = 0.5  # of the free memory that weights may take: the rest is for what is computed


def fits(target: Target, dtype: torch.dtype | str | None = None) -> bool:
    """Return whether the weights of a model leave enough memory free; they pass through the host to a device.

    Args:
        target: The model.
        dtype: In which type the weights would be loaded. None: that of the checkpoint.
    """
    kind = parse_dtype(dtype) or target.config.dtype or target.dtype
    free = psutil.virtual_memory().available
    if target.device.type == "cuda":
        free = min(free, torch.cuda.mem_get_info(target.device)[0])
    return kind.itemsize * sum(parameter.numel() for parameter in target.hf.parameters()) <= SHARE * free


def open_target(
    model: object,
    tokenizer: Any = None,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    *,
    needed: bool = True,
    whole: bool = False,
) -> Target:
    """Open a live model, the bundled model (in memory), or a named model (streamed from disk if possible).

    With `whole`, a named model is loaded into memory, too.

    Raises:
        SinkscopeError: `model` is not a model, cannot be read, or has no tokenizer although it is `needed`.
    """
    if model is None or isinstance(model, str | os.PathLike):
        name = os.fspath(model or BUNDLED)
        options: dict[str, Any] = {"dtype": dtype, "device": device, "tokenizer": tokenizer}
        if not (whole or world_size() > 1 or name == BUNDLED or name.endswith(".gguf")):
            with quiet(), loading_errors(pathless(name)), suppress(UnsupportedError):
                model = _stream(Files(name, revision), **options)
        if not isinstance(model, Target):
            model = load(model, revision=revision, **options)
    target = target_of(model, tokenizer)
    if needed:
        tokenizer_of(target)
    return replace(target, tokenizer=target.available_tokenizer)


LAYER_BYTES = 1 << 30
"""Layers of a streamed model stay in memory up to this size, so small models are read once."""


def _stream(files: Files, dtype: Any, device: Any, tokenizer: Any) -> Target:
    """Open a checkpoint as a model whose layers are read when they are called and freed afterwards.

    Raises:
        SinkscopeError: The checkpoint is damaged.
        UnsupportedError: It has to be loaded whole.
    """
    place, config = parse_device(device), files.read_config()
    if not files.weight_map or getattr(config, "quantization_config", None) or config is not config.get_text_config():
        raise UnsupportedError(f"{files.name} is quantised, no safetensors, or has more than a text model")
    own = torch.float32 if place.type == "cpu" else config.dtype  # half is slow there
    kind = parse_dtype(dtype) or own or torch.float32
    store = LayerStore(files, config, device=place, dtype=kind, resident=2)  # while the adapter is found
    target = _checked(store.causal, tokenizer or files.read_tokenizer(), files.name, store)
    ids = torch.zeros(1, 4, dtype=torch.long)
    target.forward(ids, last_layer=max(kinds_of(target.layers)))  # a proof may be known from another object
    layer_bytes = kind.itemsize * sum(parameter.numel() for parameter in target.layers[-1].parameters())
    store.resident = max(1, LAYER_BYTES // max(layer_bytes, 1))
    return target
