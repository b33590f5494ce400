"""What the header of a GGUF file says that transformers does not read, and a context in which a file is parsed once.

The header says what kind of file it is, and how rope is scaled. llama.cpp divides rotary frequencies by the factors of
a tensor, one for each pair, if there is one; then by the factor of a linear or yarn scaling. transformers has each of
these under another name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from sinkscope.errors import SinkscopeError, UnsupportedError

_FREQUENCIES = "rope_freqs.weight"  # one factor for each rotary pair, at every length; Llama 3.1 has them
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
"""Fields of transformers, and the keys behind "rope.scaling." whose values they are."""
_NEUTRAL = {"yarn_log_multiplier": 0.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "attn_factor": 1.0}
"""Keys of yarn that transformers lacks; with these values they change nothing."""


class GgufHeader:
    """The fields of a GGUF file.

    Args:
        file: The file.

    Raises:
        SinkscopeError: The file is cut off, or no GGUF file.
    """

    def __init__(self, file: Path) -> None:
        import gguf

        self.name = file.name
        try:
            self._reader: Any = gguf.GGUFReader(str(file))  # as transformers gives it, so that it is parsed once
        except (ValueError, IndexError) as error:
            raise SinkscopeError(f"{self.name} is cut off, or is no GGUF file: download it again") from error
        self.architecture = str(self.value("general.architecture") or "")

    def value(self, key: str) -> Any:
        """Return the value of a field; None if there is none."""
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    def scaling(self, key: str) -> Any:
        """Return the value of a field about the scaling of rope; None if there is none."""
        return self.value(f"{self.architecture}.rope.scaling.{key}")

    def factors(self, tensor: str) -> list[float] | None:
        """Return the values of a tensor of rotary factors; None if there is none."""
        for item in self._reader.tensors:
            if item.name == tensor:
                return item.data.astype("float32").ravel().tolist()
        return None

    def check_kind(self) -> None:
        """Check that the file is a whole language model.

        Raises:
            UnsupportedError: It is a part of one, an adapter, an image tower, a vocabulary, or something else.
        """
        kind = str(self.value("general.type") or "model")
        parts = int(self.value("split.count") or 1)
        if kind == "adapter":
            base = self.value("general.base_model.0.name") or "its base model"
            raise UnsupportedError(
                f"{self.name} is a LoRA adapter, whose weights are changes to those of {base}: give a file into which "
                "it was merged (llama-export-lora makes one)"
            )
        if kind == "mmproj" or self.architecture == "clip":
            raise UnsupportedError(f"{self.name} is the image tower of a model (mmproj): give the file of its text")
        if parts > 1:
            number = int(self.value("split.no") or 0) + 1
            raise UnsupportedError(
                f"{self.name} is part {number} of {parts} of a split file: give one whole file "
                "(llama-gguf-split --merge makes it of the first part)"
            )
        if not self._reader.tensors:
            raise UnsupportedError(f"{self.name} holds a vocabulary and no weights: give the file of a model")
        if kind != "model":
            raise UnsupportedError(f"{self.name} is a file of the type {kind!r}: give the file of a model")

    def apply_rope(self, config: Any) -> None:
        """Set in a configuration how rope is scaled.

        Args:
            config: Text configuration that transformers made of the file.

        Raises:
            UnsupportedError: transformers cannot scale rope in this way.
        """
        rope = getattr(config, "rope_parameters", None)
        if isinstance(rope, dict):
            rope = rope.get("full_attention", rope)  # layers with a window are not scaled
            if rope.get("rope_type", "default") == "default":  # else transformers has read it
                rope.update(self._rope(config))
        elif self._rope(config):
            raise UnsupportedError(f"{self.name} scales rope, and {config.model_type} has no way to: give another")

    def _rope(self, config: Any) -> dict[str, Any]:
        """What the file says, in transformers' words; nothing if rope is not scaled."""
        kind, factor = str(self.scaling("type") or "none"), self.scaling("factor")
        linear = self.value(f"{self.architecture}.rope.scale_linear")  # of older files
        if linear and kind == "none":
            kind, factor = "linear", linear
        factor = float(factor or 1.0)
        trained = int(self.scaling("original_context_length") or getattr(config, "max_position_embeddings", 0))
        has_tensor = any(self.factors(name) for name in (_FREQUENCIES, _LONG))
        if has_tensor and kind in ("none", "linear", "longrope"):
            return self._by_tensors(factor if kind == "linear" else 1.0, trained)
        if has_tensor or kind not in ("none", "linear", "yarn"):
            raise self._refusal(f"{kind!r}" + " and factors of a tensor" * has_tensor)
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        return self._yarn(factor, trained) if kind == "yarn" else {}

    def _by_tensors(self, divisor: float, trained: int) -> dict[str, Any]:
        """A number for each frequency, by which it is divided: longrope has them for two ranges of lengths."""
        frequencies, long = self.factors(_FREQUENCIES), self.factors(_LONG)
        attention = 1.0
        if long is not None:
            attention = float(self.scaling("attn_factor") or 1.0)
        return {
            "rope_type": "longrope",
            "long_factor": [divisor * factor for factor in long or frequencies or ()],
            "short_factor": [divisor * factor for factor in self.factors(_SHORT) or long or frequencies or ()],
            "factor": 1.0,
            "attention_factor": attention,
            "original_max_position_embeddings": trained,
        }

    def _yarn(self, factor: float, trained: int) -> dict[str, Any]:
        """What yarn needs."""
        for key, neutral in _NEUTRAL.items():
            if self.scaling(key) not in (None, neutral):
                raise self._refusal(f"yarn with {key} = {self.scaling(key)}")
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
        for field, key in _YARN.items():
            if self.scaling(key) is not None:
                yarn[field] = self.scaling(key)
        return yarn

    def _refusal(self, what: str) -> SinkscopeError:
        return UnsupportedError(
            f"{self.name} scales rope by {what}, of which transformers has no equal: give the model as a checkpoint "
            "of transformers"
        )


_LOCK = threading.RLock()
_ROWS = 1024  # of a tensor whose numbers are computed at a time


@contextmanager
def parsed_once() -> Iterator[None]:
    """Context manager in which each GGUF file is parsed once, and the names of its tensors are listed once.

    Both take seconds, for a large vocabulary or many layers. Weights are read some rows at a time. Other threads wait
    for it to end, or the last of them would leave another one's parser in the library.
    """
    try:
        import gguf
    except ImportError:  # what needs it says so
        yield
        return
    with _LOCK:
        reader, names, dequantize = gguf.GGUFReader, gguf.get_tensor_name_map, gguf.dequantize
        gguf.GGUFReader = cache(_plain_reader(reader))
        gguf.get_tensor_name_map = cache(names)  # transformers asks for it once for each module
        gguf.dequantize = partial(_in_parts, dequantize)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map, gguf.dequantize = reader, names, dequantize


def forget_vocabulary(file: Path) -> None:
    """Let the parser of a file forget its tokens, within `parsed_once`, once config and tokenizer are read.

    transformers would go through all of them once more while it loads the weights, and they take half a gigabyte.
    """
    import gguf

    fields = gguf.GGUFReader(str(file)).fields
    for name in [name for name in fields if name.startswith("tokenizer.")]:
        del fields[name]


def _in_parts(dequantize: Callable[[np.ndarray, Any], np.ndarray], blocks: np.ndarray, kind: Any) -> np.ndarray:
    """The numbers in blocks, some rows at a time: the library makes arrays of all rows, and then one of all arrays."""
    if blocks.dtype != np.uint8 or len(blocks) <= _ROWS:
        return dequantize(blocks, kind)
    first = dequantize(blocks[:_ROWS], kind)
    numbers = np.empty((len(blocks), *first.shape[1:]), first.dtype)
    numbers[:_ROWS] = first
    for start in range(_ROWS, len(blocks), _ROWS):
        numbers[start : start + _ROWS] = dequantize(blocks[start : start + _ROWS], kind)
    return numbers


def _plain_reader(reader: Any) -> Any:
    """A class of readers that slice a plain array: a slice of a memory map takes four times as long."""

    class PlainReader(reader):
        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._data = mapped.view(np.ndarray)

    return PlainReader
