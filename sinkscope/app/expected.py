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


@dataclass(frozen=True)
class ExpectedCost:
    """What a command would take on a model.

    Attributes:
        command: Words of the command.
        size: Sizes of the model.
        streams: Whether the command reads a checkpoint layer by layer.
        device: Device on which it would run.
        free_bytes: Memory that is free on a GPU; None on a CPU.
        tokens: Tokens that pass through all layers, counted with default options on the bundled model; None if the
            command was not counted.
        seconds: Time for these tokens, from the measured speed of the device; None likewise.
    """

    command: str
    size: ModelSize
    streams: bool
    device: torch.device
    free_bytes: int | None
    tokens: int | None
    seconds: float | None

    def text(self) -> str:
        """The cost in a few lines."""
        size, dtype = self.size, str(self.size.dtype).removeprefix("torch.")
        lines = [
            f"Model: {size.name}, {size.layers} layers, {size.parameters / 1e6:,.1f} million parameters.",
            f"Weights in {dtype}: {gigabytes(size.whole_bytes)} as a whole, {gigabytes(size.streamed_bytes)} read "
            "layer by layer.",
        ]
        needed = size.whole_bytes
        way = "with the whole model in memory"
        if self.streams:
            needed = size.streamed_bytes
            way = "layer by layer"
        memory = f"Memory: sinkscope {self.command} works {way}, so it takes {gigabytes(needed)} and what it computes."
        if self.free_bytes is not None:
            fits = "fits" if needed < self.free_bytes else "does not fit"
            memory += f" This {fits} into the {gigabytes(self.free_bytes)} that are free on {self.device}."
        lines.append(memory)
        if self.tokens is None or self.seconds is None:
            lines.append("Time: not known for this command.")
        else:
            lines.append(
                f"Time: {self.tokens:,} tokens through {size.layers} layers take about {_duration(self.seconds)} on "
                f"{self.device}, without download and reading. The tokens were counted on the bundled model."
            )
        return "\n".join(lines)


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
) -> ExpectedCost:
    """Say what a command would take on a model, without reading its weights.

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
    free_bytes = None
    if place.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(place)[0]
    record = json.loads(files("sinkscope.app").joinpath("passes.json").read_text())
    tokens: int | None = record["result"]["tokens"].get(command)
    seconds = None
    if tokens is not None:
        seconds = 2 * size.computing * tokens / speed(place, loaded_as, size.width)
    streams = not whole and not source.planted
    return ExpectedCost(command, size, streams, place, free_bytes, tokens, seconds)


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
