"""Decoder layers that are read from a checkpoint when they are called, so that memory does not grow with depth."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.models.adapters import layers_at, stack_of
from sinkscope.models.checkpoints.checkpoint import Files, check_loaded, quiet
from sinkscope.models.checkpoints.config import check_finite, new_model

_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.")  # unembeddings are not read; `Target.forward` ends before them
_LANGUAGE = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?")  # the text part of a vision-language checkpoint


class LayerStore:
    """Reads the weights of a layer when the layer is called, and frees them when other layers need the room.

    It has no logits: a pass ends at the last hidden state. transformers makes the modules from parts of the checkpoint,
    so its renames, fusions and dtypes apply.

    Attributes:
        source: The checkpoint; `source.read` lists the tensors read so far.
        causal: The model. Its layers are on the meta device until they are called.
        resident: The number of layers that it holds in memory.
        skipped: The number of first layers that are called without being computed.
    """

    def __init__(self, source: Files, config: Any, *, device: torch.device, dtype: torch.dtype, resident: int) -> None:
        self.source, self._config, self._device, self._dtype = source, config, device, dtype
        self.resident, self.skipped = resident, 0
        self._in_memory: set[int] = set()
        self._pins: Counter[int] = Counter()
        with torch.device("meta"):
            self.causal = new_model(config, dtype).eval().requires_grad_(False)
        prefix, stack = self.causal.base_model_prefix, stack_of(self.causal)
        self._base_class = type(getattr(self.causal, prefix))
        self._path = stack.removeprefix(f"{prefix}.")  # of the layers, below an object of that class
        self._layers = layers_at(self.causal, stack)
        self._empty = [layer.state_dict() for layer in self._layers]  # on meta: costs nothing
        self._names = _by_layer(source.weight_map, self._path.rpartition(".")[2])
        setattr(self.causal, prefix, self._base(self.causal.get_submodule(stack)))
        for index, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(partial(self._before, index))

    def _before(self, index: int, _module: nn.Module, _args: Any) -> None:
        if index >= self.skipped:
            self.load(index)

    def load(self, index: int) -> None:
        """Read the weights of a layer, unless they are in memory; other layers may have to leave it.

        A walk goes upward and the next one begins below, so the layer just below is needed last: it leaves first.
        """
        if index in self._in_memory:
            return
        for other in sorted(self._in_memory, key=lambda held: (held >= index, -held)):
            if len(self._in_memory) >= self.resident and not self._pins[other]:
                self._layers[other].load_state_dict(self._empty[other], assign=True)
                self._in_memory.remove(other)
        self._layers[index].load_state_dict(self._layer(index), assign=True)
        self._in_memory.add(index)

    @contextmanager
    def pinned(self, index: int) -> Iterator[None]:
        """Context manager in which a layer stays in memory."""
        self.load(index)
        self._pins[index] += 1
        try:
            yield
        finally:
            self._pins[index] -= 1

    def _base(self, layers: nn.Module) -> nn.Module:
        """The base of the model, with these layers. Around them it is whole."""
        shallow = copy.deepcopy(self._config)
        shallow.num_hidden_layers = 0
        base = self._made(shallow, None, "the part around the layers")
        for module in base.modules():
            if hasattr(module, "config"):
                module.config = self._config  # forward passes read the depth and the layer types from it
        parent, _, leaf = self._path.rpartition(".")
        setattr(base.get_submodule(parent), leaf, layers)
        return base

    def _layer(self, index: int) -> dict[str, Tensor]:
        """The weights of one decoder layer, by the names of its module."""
        single = copy.deepcopy(self._config)
        single.num_hidden_layers, single.vocab_size, single.pad_token_id = 1, 1, 0
        if getattr(single, "layer_types", None):
            single.layer_types = [self._config.layer_types[index]]
        if hasattr(single, "first_k_dense_replace"):
            single.first_k_dense_replace = int(index < single.first_k_dense_replace)
        alone = f"{self._path}.0"
        return self._made(single, index, f"layer {index}", alone).get_submodule(alone).state_dict()

    def _made(self, config: Any, layer: int | None, what: str, part: str = "") -> nn.Module:
        """An object of the base class with the tensors of a layer, or of what is around the layers.

        Every tensor below `part` must be among them.
        """
        name, names = self.source.name, self._names.get(layer, {})
        state = {names[stored]: tensor for stored, tensor in self.source.tensors(names).items()}
        with quiet(), torch.random.fork_rng(devices=[]):
            module, info = self._base_class.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=self._dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below
            )
        check_loaded(module, info, f"{what} of {name}", part)
        check_finite(module.get_submodule(part), f" of {what} of {name}")  # what is outside holds random numbers
        return module.eval().requires_grad_(False).to(self._device)


def _by_layer(stored: Iterable[str], stack: str) -> dict[int | None, dict[str, str]]:
    """The tensors of each layer, and of what is around them, by which name to load; without the unembedding."""
    names: dict[int | None, dict[str, str]] = {}
    pattern = re.compile(rf"^((?:.*?\.)?{stack}\.)(\d+)(\..*)$")
    is_nested = any(_LANGUAGE.match(name) for name in stored)
    for name in stored:
        if _HEAD.search(name) or (is_nested and not _LANGUAGE.match(name)):
            continue
        key = _LANGUAGE.sub("model.", name) if is_nested else name
        match = pattern.match(key)
        if match is None:
            names.setdefault(None, {})[name] = key
        else:  # it is loaded into a model of one layer
            names.setdefault(int(match[2]), {})[name] = f"{match[1]}0{match[3]}"
    return names
