"""`load`: a model from a name, folder or file."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.progress import world_size
from sinkscope.models.adapters import DRAFT
from sinkscope.models.checkpoints.checkpoint import Files, check_depth, model_with_weights
from sinkscope.models.checkpoints.config import (
    check_finite,
    check_vocabulary,
    parse_device,
    parse_dtype,
    read_config,
    read_tokenizer,
)
from sinkscope.models.checkpoints.fingerprint import fingerprint
from sinkscope.models.checkpoints.gguf_file import parsed_once
from sinkscope.models.checkpoints.locate import ModelSource, locate
from sinkscope.models.checkpoints.quiet import loading_errors, quiet
from sinkscope.models.target import Target, check_divides
from sinkscope.opening.inference.find import adapter_of
from sinkscope.opening.live import avoid_misreading


@checks_arguments
def load(
    x: Any = None,
    *,
    revision: str | None = None,
    layers: int | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    device_map: Any = None,
    quantization_config: Any = None,
    tokenizer: Any = None,
    probe: bool = True,
) -> Any:
    """Load a model.

    Args:
        x: Short name (`sinkscope.list_models()` lists them), hub id `org/name`, folder or `.gguf` file. None loads the
            model inside this package.
        revision: Branch, tag or commit of a hub id.
        layers: Load only the first `layers` decoder layers; tensors of the others are not read.
        dtype: torch dtype or its name ("float32", "bfloat16", ...). None uses the checkpoint's.
        device: "cpu", "cuda", "cuda:1" or "mps". None uses the first cuda device if there is one, else the CPU; under
            torchrun, transformers splits the model over the processes by tensor parallelism.
        device_map: Passed on to transformers instead of `device`.
        quantization_config: Passed on to transformers.
        tokenizer: Tokenizer to use instead of the one stored with the weights.
        probe: Check on a few tokens that edits do what they should and that attention is recomputed correctly
            (`sinkscope.opening.inference.find`). Live models are not probed.

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
    is_split = world_size() > 1 and device_map is None and device is None
    options = {"dtype": parse_dtype(dtype) or "auto", "quantization_config": quantization_config}
    if device_map is None and not is_split:
        place = parse_device(device)
        device_map = None if place.type == "cpu" else {"": place}
    options["device_map"] = device_map
    source = locate(x, revision)
    with quiet(), loading_errors(source):
        with parsed_once() if source.kind == "gguf" else nullcontext():
            hf, origin = _plain(source, options, layers, tokenizer, is_split)
        check_vocabulary(hf.tokenizer, hf)
        check_finite(hf)
        target = Target(hf, hf, "hf", DRAFT, name=source.name)
        target = replace(target, adapter=adapter_of(target, proves=probe, every_layer=probe))
        avoid_misreading(target)
        if quantization_config is None:
            hf.sinkscope_origin = origin, fingerprint(hf)
    return hf


def _plain(
    source: ModelSource, options: dict[str, Any], layers: int | None, tokenizer: Any, is_split: bool
) -> tuple[Any, str]:
    """The plain model with its tokenizer, and the fingerprint of what it was made from."""
    files = Files(source.where, revision=source.revision)
    files.fetch_all()
    name, folder, gguf = source.name, files.folder, files.gguf
    config = read_config(name, folder, gguf=gguf, layers=layers)
    if is_split:
        from transformers.distributed import DistributedConfig  # from 5.19 on

        check_divides(config, name, world_size())
        options = {**options, "distributed_config": DistributedConfig(tp_size=world_size())}
    if tokenizer is None:
        tokenizer = read_tokenizer(name, folder, gguf=gguf)
    hf = model_with_weights(source, files, config, options)
    if layers is None:
        check_depth(files, hf)
    hf.sinkscope_name, hf.tokenizer = name, tokenizer
    origin = fingerprint(files)
    if source.kind == "hub":
        hf.config._name_or_path = str(source.where)
        hf.config._commit_hash = files.commit
    if source.planted:
        _plant(hf, folder / source.planted)
        hf.config.circuit = name
        origin = fingerprint(hf)  # not that of the model it was made from
    return hf, origin


@torch.no_grad()
def _plant(hf: Any, file: Path) -> None:
    """Overwrite weights of a freshly loaded model with the numbers in a file, except where these are NaN."""
    weights = hf.state_dict()  # of a model that was cut to its first layers only their tensors
    with np.load(file) as planted:
        for name in weights.keys() & planted.keys():
            new = torch.from_numpy(planted[name]).to(weights[name])
            weights[name].copy_(new.where(~new.isnan(), weights[name]))
