"""Decoder layers that are read from a checkpoint when they are called, so that memory does not grow with depth.

transformers makes each layer, in a model of that layer alone, from its part of the checkpoint: its renames, fusions and
dtypes apply. What is around the layers is such a model of none.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from sinkscope.models.adapters import layers_at, stack_of
from sinkscope.models.checkpoints.checkpoint import Files, made, quiet
from sinkscope.models.checkpoints.config import check_finite, cut_depth, new_model

_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.")  # unembeddings are not read; `Target.forward` ends before them
_LANGUAGE = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?")  # the text part of a vision-language checkpoint


class LayerStore:
    """A model without logits: the weights of a layer are read when it is called, and leave when others need the room.

    Attributes:
        source: The checkpoint.
        causal: The model. Its layers are on the meta device until they are called.
        resident: The number of layers that it holds in memory.
    """

    def __init__(self, source: Files, config: Any, *, device: torch.device, dtype: torch.dtype, resident: int) -> None:
        self.source, self._config, self._device, self._dtype = source, config, device, dtype
        self.resident = resident
        self._in_memory: set[int] = set()
        with torch.device("meta"):
            self.causal: Any = new_model(config, dtype)
        self.causal.eval().requires_grad_(False)
        prefix, stack = self.causal.base_model_prefix, stack_of(self.causal)
        self._base_class = type(self.causal.base_model)
        self._path = stack.removeprefix(f"{prefix}.")  # of the layers, below an object of that class
        self._layers = layers_at(self.causal, stack)
        self._names = _by_layer(source.weight_map, self._path.rpartition(".")[2])
        base = self._made(None)
        for module in base.modules():
            if hasattr(module, "config"):
                module.config = config  # forward passes read the depth and the layer types from it
        parent, _, leaf = self._path.rpartition(".")
        setattr(base.get_submodule(parent), leaf, self.causal.get_submodule(stack))
        setattr(self.causal, prefix, base)
        for index, layer in enumerate(self._layers):
            layer.forward = self._reading(index, layer.forward)

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
        for other in sorted(self._in_memory, key=lambda held: (held >= index, -held)):
            if len(self._in_memory) >= self.resident:
                self._layers[other].to_empty(device="meta")
                self._in_memory.remove(other)
        alone = self._made(index).get_submodule(f"{self._path}.0")
        self._layers[index].load_state_dict(alone.state_dict(), assign=True)
        self._in_memory.add(index)

    def _made(self, layer: int | None) -> nn.Module:
        """An object of the base class with one layer, or with none and what is around the layers."""
        config, part, what = copy.deepcopy(self._config), "", f"the part around the layers of {self.source.name}"
        cut_depth(config, [] if layer is None else [layer])
        if layer is not None:
            config.vocab_size, config.pad_token_id = 1, 0
            part, what = f"{self._path}.0", f"layer {layer} of {self.source.name}"
        names = self._names.get(layer, {})
        state = {names[stored]: tensor for stored, tensor in self.source.tensors(names).items()}
        with quiet(), torch.random.fork_rng(devices=[]):
            module = made(self._base_class, None, what, config, part=part, state_dict=state, dtype=self._dtype)
        check_finite(module.get_submodule(part), f" of {what}")  # what is outside holds random numbers
        return module.requires_grad_(False).to(self._device)


def _by_layer(stored: Iterable[str], stack: str) -> dict[int | None, dict[str, str]]:
    """The tensors of each layer, and of what is around them, by which name to load; without the unembedding."""
    names: dict[int | None, dict[str, str]] = {}
    is_nested = any(map(_LANGUAGE.match, stored))
    for name in stored:
        if _HEAD.search(name) or (is_nested and not _LANGUAGE.match(name)):
            continue
        key = _LANGUAGE.sub("model.", name) if is_nested else name
        match = re.match(rf"((?:.*?\.)?{stack}\.)(\d+)(\..*)", key)
        if match is not None:  # it is loaded into a model of one layer
            key = f"{match[1]}0{match[3]}"
        names.setdefault(match and int(match[2]), {})[name] = key
    return names
