"""Decoder layers that are read from a checkpoint when they are called, so that memory does not grow with depth.

The tensors of the checkpoint must be named as the parameters of the model. What transformers renames, fuses or converts
while it loads (most mixtures of experts, text models behind an image tower, quantised weights) is loaded whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from sinkscope.errors import UnsupportedError
from sinkscope.models.adapters import stack_of
from sinkscope.models.checkpoints.checkpoint import Files, causal_class, without_place
from sinkscope.models.checkpoints.config import check_finite, loading_errors

LAYER_BYTES = 1 << 30
"""Layers stay in memory up to this size, so small models are read once."""
MAKING = threading.Lock()  # while a model is made without weights, for the whole process


class LayerStore:
    """A model without logits: the weights of a layer are read when it is called, and leave when others need the room.

    Attributes:
        source: The checkpoint.
        causal: The model. The weights of its layers are on the meta device until they are called.
        resident: The number of layers that it holds in memory.

    Raises:
        UnsupportedError: The tensors of the checkpoint are not those of the model.
    """

    def __init__(self, source: Files, config: Any, *, device: torch.device, dtype: torch.dtype) -> None:
        self.source, self._device = source, device
        self._in_memory: set[int] = set()
        with MAKING, init_empty_weights():  # but buffers are made, such as rotary frequencies
            self.causal: Any = causal_class(config).from_config(config, dtype=dtype)
        base = self.causal.eval().requires_grad_(False).base_model
        for module in base.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        prefix, stack = f"{self.causal.base_model_prefix}.", stack_of(self.causal)
        self._path = f"{stack.removeprefix(prefix)}."  # of the layers, below the base
        self._stored = {name.removeprefix(prefix): name for name in source.weight_map}
        tensors = base.state_dict()
        self._check_stored(base, tensors, dtype)
        self._read(base, "", {name: tensors[name] for name in tensors if not name.startswith(self._path)})
        self._layers = [*self.causal.get_submodule(stack)]
        self._empty = [layer.state_dict() for layer in self._layers]
        layer_bytes = sum(weight.nbytes for weight in self._layers[-1].parameters())
        self.resident = max(1, LAYER_BYTES // max(layer_bytes, 1))
        for index, layer in enumerate(self._layers):
            layer.forward = self._reading(index, layer.forward)

    def _check_stored(self, base: Any, tensors: Mapping[str, Any], dtype: torch.dtype) -> None:
        """Refuse a checkpoint whose tensors cannot be read one by one into those of the model.

        Raises:
            UnsupportedError: Its tensors are others, or some of them stay in float32.
        """
        missing = tensors.keys() - self._stored
        further = self._stored.keys() - tensors
        stays_float32 = base._keep_in_fp32_modules or base._keep_in_fp32_modules_strict
        if missing or without_place(base, further) or (stays_float32 and dtype != torch.float32):
            raise UnsupportedError(f"{self.source.name} does not store its tensors as its model has them")

    def _reading(self, index: int, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.load(index)
            return run(*args, **kwargs)

        return forward

    def load(self, index: int) -> None:
        """Read the weights of a layer, unless they are in memory; they stay there until another one is called.

        A walk goes upward and the next one begins below, so the layer just below is needed last: it leaves first.
        """
        if index in self._in_memory:
            return
        while len(self._in_memory) >= self.resident:
            below = [number for number in self._in_memory if number < index]
            other = max(below or self._in_memory)
            self._layers[other].load_state_dict(self._empty[other], assign=True)
            self._in_memory.remove(other)
        self._read(self._layers[index], f"{self._path}{index}.", self._empty[index])
        self._in_memory.add(index)

    def stored(self, name: str) -> Tensor:
        """Read a parameter as it is stored, by its name below the base."""
        return self.source.tensor(self._stored[name])

    def _read(self, module: nn.Module, path: str, tensors: Mapping[str, Tensor]) -> None:
        """Read tensors of a module, of which `tensors` has the dtypes; `path` is before their names below the base."""
        with loading_errors(self.source.name):
            state = {name: self.stored(path + name).to(self._device, tensors[name].dtype) for name in tensors}
            module.load_state_dict(state, strict=False, assign=True)
            check_finite(module, path)
