"""`--dry-run`: what a command would take on a model, by its configuration, before any weight is read."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkscope.errors import SinkscopeError
from sinkscope.files.notation import counted
from sinkscope.models.config import float32_by_default, new_model, parse_device, parse_dtype, read_config
from sinkscope.models.hub import hub_folder
from sinkscope.models.infer import stack_of
from sinkscope.models.locate import locate

ROWS = 64
"""Positions that pass through a layer together in the measured product of matrices."""
SECONDS = 0.3
"""Time for which the speed of the device is measured."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model, in parameters.

    Attributes:
        name: Name of the model.
        layers: Number of decoder layers.
        parameters: All parameters.
        embedding: Those of the input embedding.
        per_layer: Those of its largest layer.
        computing: Those by which every token is multiplied: all but the rows of the input embedding.
        width: Size of its residual stream.
        dtype: In which its weights are loaded.
    """

    name: str
    layers: int
    parameters: int
    embedding: int
    per_layer: int
    computing: int
    width: int
    dtype: torch.dtype

    @property
    def whole_bytes(self) -> int:
        """Memory of all weights."""
        return self.parameters * self.dtype.itemsize

    @property
    def streamed_bytes(self) -> int:
        """Memory of the weights when layers are read one after the other: the input embedding and two layers."""
        return (self.embedding + 2 * self.per_layer) * self.dtype.itemsize


def gigabytes(number: int) -> str:
    """Bytes in GB, or in MB below one GB."""
    if number < 1e9:
        return f"{number / 1e6:.0f} MB"
    return f"{number / 1e9:.1f} GB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return counted(max(1, round(seconds)), "second")
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def expected_cost(
    command: str,
    model: Any = None,
    *,
    whole: bool = True,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> str:
    """Say what a command would take on a model, without reading its weights.

    The tokens that pass through all layers were counted with default options on the bundled model; the time for them
    follows from the measured speed of the device.

    Args:
        command: Words of the command.
        model: As in `sinkscope.load`; None is the bundled model.
        whole: Whether the command loads the whole model.
        revision: Branch, tag or commit of a hub id.
        dtype: Type of the weights; None is that of the checkpoint.
        device: Device to run on; None is the first GPU, if there is one.

    Raises:
        SinkscopeError: The model cannot be found, or is a GGUF file.
    """
    source = locate(model, revision)
    if source.kind == "gguf":
        raise SinkscopeError("--dry-run reads config.json, which a GGUF file has not; give the original checkpoint")
    folder = Path(source.where)
    if source.kind == "hub":
        folder = hub_folder(str(source.where), revision)
    config = read_config(source.name, folder)
    loaded_as = parse_dtype(dtype) or getattr(config, "dtype", None) or torch.float32
    size = size_of(source.name, config, loaded_as)
    place = parse_device(device)
    needed, way = size.whole_bytes, "with the whole model in memory"
    if not whole and not source.planted:
        needed, way = size.streamed_bytes, "layer by layer"
    memory = f"Memory: sinkscope {command} works {way}, so it takes {gigabytes(needed)} and what it computes."
    if place.type == "cuda":
        free = torch.cuda.mem_get_info(place)[0]
        fits = "fits" if needed < free else "does not fit"
        memory += f" This {fits} into the {gigabytes(free)} that are free on {place}."
    duration = "Time: not known for this command."
    record = json.loads(files("sinkscope.app").joinpath("passes.json").read_text())
    tokens: int | None = record["result"]["tokens"].get(command)
    if tokens is not None:
        seconds = 2 * size.computing * tokens / speed(place, loaded_as, size.width)
        duration = (
            f"Time: {tokens:,} tokens through {size.layers} layers take about {_duration(seconds)} on {place}, without "
            "download and reading. The tokens were counted on the bundled model."
        )
    return (
        f"Model: {size.name}, {size.layers} layers, {size.parameters / 1e6:,.1f} million parameters.\n"
        f"Weights in {str(loaded_as).removeprefix('torch.')}: {gigabytes(size.whole_bytes)} as a whole, "
        f"{gigabytes(size.streamed_bytes)} read layer by layer.\n{memory}\n{duration}"
    )


@float32_by_default()
def size_of(name: str, config: Any, dtype: torch.dtype) -> ModelSize:
    """Sizes of the model that a configuration describes. Nothing is allocated."""
    text = config.get_text_config()
    with torch.device("meta"):
        hf = new_model(text)
    layers: nn.ModuleList = hf.get_submodule(stack_of(hf))
    embedding, unembedding = hf.get_input_embeddings(), hf.get_output_embeddings()
    computing = _parameters(hf)
    if unembedding is None or unembedding.weight is not embedding.weight:
        computing -= _parameters(embedding)  # a row is looked up, not multiplied
    return ModelSize(
        name=name,
        layers=len(layers),
        parameters=_parameters(hf),
        embedding=_parameters(embedding),
        per_layer=max(_parameters(layer) for layer in layers),
        computing=computing,
        width=text.hidden_size,
        dtype=dtype,
    )


def _parameters(module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in module.parameters())


def speed(device: torch.device, dtype: torch.dtype, width: int) -> float:
    """Measured multiplications and additions a second, in products of the shape that MLPs have."""
    rows = torch.ones(ROWS, width, device=device, dtype=dtype)
    matrix = torch.ones(width, 4 * width, device=device, dtype=dtype)
    _product(rows, matrix)  # the first one also allocates
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        _product(rows, matrix)
        count += 1
    return count * 8 * ROWS * width * width / (time.perf_counter() - start)


def _product(rows: torch.Tensor, matrix: torch.Tensor) -> None:
    product = rows @ matrix
    if product.is_cuda:
        torch.cuda.synchronize(product.device)
