"""GGUF files: how rope is scaled, which transformers does not read, and a context in which a file is parsed once.

llama.cpp divides rotary frequencies by the factors of a tensor, one for each pair, if there is one; then by the factor
of a scaling. transformers has each of these under another name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from sinkscope.errors import UnsupportedError

_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"  # for two ranges of lengths
_ALL = "rope_freqs.weight"  # at every length; Llama 3.1 has it
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
"""Keys, and the fields of transformers that have their values."""
_READ = {"type", "factor", "scale_linear", "original_context_length", "finetuned", *_YARN}


def scale_rope(config: Any, file: Path) -> None:
    """Set in a text configuration, which transformers made of a GGUF file, how the file says that rope is scaled.

    Raises:
        UnsupportedError: transformers cannot scale rope in this way.
    """
    import gguf

    reader: Any = gguf.GGUFReader(str(file))  # as transformers gives it, so that it is parsed once
    settings = {key.rpartition(".")[2]: field.contents() for key, field in reader.fields.items() if ".rope.scal" in key}
    kind = settings.get("type", "linear")
    factor = 1.0 if kind == "none" else float(settings.get("factor") or settings.get("scale_linear") or 1.0)
    tables: dict[str, list[float]] = {}
    for tensor in reader.tensors:
        if tensor.name in (_LONG, _SHORT, _ALL):
            tables[tensor.name] = (factor * tensor.data.astype(float).ravel()).tolist()
    rope: Any = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict):
        rope = rope.get("full_attention", rope)  # layers with a window are not scaled
        if rope.get("rope_type", "default") != "default":  # transformers has read it
            return
    trained = int(settings.get("original_context_length") or getattr(config, "max_position_embeddings", 0))
    scaled = _rope_parameters(settings, kind, factor, tables, trained)
    known = _READ | ({"attn_factor"} if tables else set[str]())
    unknown = sorted(settings.keys() - known)
    is_served = not unknown and kind in ("none", "linear", "longrope" if tables else "yarn")
    if not is_served or (scaled and not isinstance(rope, dict)):
        raise UnsupportedError(
            f"{file.name} scales rope by {', '.join([kind, *tables, *unknown])}, of which transformers has no equal: "
            "give the model as a checkpoint of transformers"
        )
    if scaled:
        rope.update(scaled)


def _rope_parameters(
    settings: Mapping[str, Any], kind: str, factor: float, tables: Mapping[str, list[float]], trained: int
) -> dict[str, Any]:
    """The rope parameters of transformers; none where nothing is scaled.

    Args:
        settings: What the file says, by the last part of each key.
        kind: How rope is scaled.
        factor: By how much.
        tables: Factors of single frequencies, by the name of their tensor.
        trained: The length of contexts before that.
    """
    if tables:
        long = tables.get(_LONG, tables.get(_ALL))
        return {
            "rope_type": "longrope",
            "factor": 1.0,
            "long_factor": long,
            "short_factor": tables.get(_SHORT, long),
            "attention_factor": settings.get("attn_factor", 1.0),
            "original_max_position_embeddings": trained,
        }
    if kind == "yarn":
        scaled: dict[str, Any] = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": trained}
        return scaled | {field: settings[key] for key, field in _YARN.items() if key in settings}
    return {} if factor == 1.0 else {"rope_type": kind, "factor": factor}


_LOCK = threading.RLock()
_ROWS = 4096
"""Rows of a tensor that are dequantized at a time."""


@contextmanager
def parsed_once() -> Iterator[None]:
    """Context manager in which each GGUF file is parsed once, and the names of its tensors are listed once.

    Both take seconds, for a large vocabulary or many layers. Tensors are dequantized in parts, and no bar is drawn.
    Other threads wait for it to end, or the last of them would leave another one's parser in the library.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as reading

    with _LOCK:
        reader: Any = gguf.GGUFReader

        class PlainReader(reader):
            """A reader that slices a plain array: a slice of a memory map takes four times as long."""

            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

        # transformers asks for the names once for each module.
        names = cache(gguf.get_tensor_name_map)
        in_parts = partial(_dequantized_in_parts, gguf.dequantize)
        parts = patch.multiple(gguf, GGUFReader=cache(PlainReader), get_tensor_name_map=names, dequantize=in_parts)
        with parts, patch.object(reading, "tqdm", _without_bar):
            yield


def _without_bar(tensors: Any, **_: Any) -> Any:
    """Stands for `tqdm`, whose bar transformers cannot switch off here."""
    return tensors


def _dequantized_in_parts(dequantize: Callable[[np.ndarray, Any], np.ndarray], blocks: np.ndarray, kind: Any) -> Any:
    """Return the numbers in blocks. The library makes arrays of all rows, and then one of all arrays."""
    if blocks.dtype != np.uint8 or len(blocks) <= _ROWS:
        return dequantize(blocks, kind)
    first = dequantize(blocks[:_ROWS], kind)
    numbers = np.empty((len(blocks), *first.shape[1:]), first.dtype)
    numbers[:_ROWS] = first
    for start in range(_ROWS, len(blocks), _ROWS):
        numbers[start : start + _ROWS] = dequantize(blocks[start : start + _ROWS], kind)
    return numbers


def forget_vocabulary(file: Path) -> None:
    """Let the parser of a file forget its tokens, within `parsed_once`, once config and tokenizer are read.

    transformers would go through all of them once more while it loads the weights, and those of a large vocabulary take
    half a gigabyte.
    """
    import gguf

    reader: Any = gguf.GGUFReader(str(file))
    for name in list(reader.fields):
        if name.startswith("tokenizer."):
            del reader.fields[name]
