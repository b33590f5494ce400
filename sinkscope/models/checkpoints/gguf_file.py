"""What the header of a GGUF file says that transformers does not read, and a context in which a file is parsed once.

The header says what kind of file it is, and how rope is scaled. llama.cpp divides rotary frequencies by the factors of
a tensor, one for each pair, if there is one; then by the factor of a linear or yarn scaling. transformers has each of
these under another name.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
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
    """The fields of a GGUF file of a whole language model.

    Args:
        file: The file.

    Raises:
        SinkscopeError: The file is cut off, or no GGUF file.
        UnsupportedError: It is a part of a model, an adapter, an image tower, a vocabulary, or something else.
    """

    def __init__(self, file: Path) -> None:
        import gguf

        self.name = file.name
        try:
            self._reader: Any = gguf.GGUFReader(str(file))  # as transformers gives it, so that it is parsed once
        except (ValueError, IndexError) as error:
            raise SinkscopeError(f"{self.name} is cut off, or is no GGUF file: download it again") from error
        self.architecture = str(self.value("general.architecture") or "")
        kind = str(self.value("general.type") or "model")
        if self.architecture == "clip":
            kind = "mmproj"
        elif (self.value("split.count") or 1) > 1:
            kind = "part of a model"
        elif not self._reader.tensors:
            kind = "vocabulary without weights"
        if kind != "model":
            raise UnsupportedError(
                f"{self.name} holds no whole model, but what GGUF calls {kind!r}: give the file of a language model "
                "(llama-gguf-split --merge joins parts, llama-export-lora merges an adapter)"
            )

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
        long = self.factors(_LONG) or self.factors(_FREQUENCIES)
        if long is not None and kind in ("none", "linear", "longrope"):
            # A number for each frequency, by which it is divided: longrope has them for two ranges of lengths.
            divisor, has_own = factor if kind == "linear" else 1.0, self.factors(_LONG) is not None
            return {
                "rope_type": "longrope",
                "long_factor": [divisor * number for number in long],
                "short_factor": [divisor * number for number in self.factors(_SHORT) or long],
                "factor": 1.0,
                "attention_factor": float(self.scaling("attn_factor") or 1.0) if has_own else 1.0,
                "original_max_position_embeddings": trained,
            }
        if long is not None or kind not in ("none", "linear", "yarn"):
            raise self._refusal(f"{kind!r}" + " and factors of a tensor" * (long is not None))
        plain = {"none": {}, "linear": {"rope_type": "linear", "factor": factor}}
        return self._yarn(factor, trained) if kind == "yarn" else plain[kind]

    def _yarn(self, factor: float, trained: int) -> dict[str, Any]:
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
        for key, neutral in _NEUTRAL.items():
            if self.scaling(key) not in (None, neutral):
                raise self._refusal(f"yarn with {key} = {self.scaling(key)}")
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


@contextmanager
def parsed_once() -> Iterator[None]:
    """Context manager in which each GGUF file is parsed once, and the names of its tensors are listed once.

    Both take seconds, for a large vocabulary or many layers. Other threads wait for it to end, or the last of them
    would leave another one's parser in the library.
    """
    import gguf

    with _LOCK:
        reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader = cache(_plain_reader(reader))
        gguf.get_tensor_name_map = cache(names)  # transformers asks for it once for each module
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = reader, names


def _plain_reader(reader: Any) -> Any:
    """A class of readers that slice a plain array: a slice of a memory map takes four times as long."""

    class PlainReader(reader):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    return PlainReader
