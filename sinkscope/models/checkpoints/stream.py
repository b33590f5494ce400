"""Decoder layers that are read from a checkpoint when they are called, so that memory does not grow with depth."""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.errors import UnsupportedError
from sinkscope.models.adapters import layer_kinds, stack_of
from sinkscope.models.checkpoints.checkpoint import SafetensorsSource, check_unexpected, note_further_layers, quiet
from sinkscope.models.checkpoints.config import check_finite, check_numbers, new_model

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
        reads: How often each layer was read.
    """

    def __init__(
        self,
        source: SafetensorsSource,
        config: Any,
        *,
        device: str | torch.device,
        dtype: torch.dtype,
        resident: int,
    ) -> None:
        self.source, self._config, self._device, self._dtype = source, config, device, dtype
        self.resident = resident
        self.skipped = 0
        self.reads: Counter[int] = Counter()
        self._in_memory: set[int] = set()
        self._pins: Counter[int] = Counter()
        with torch.device("meta"):
            self.causal = new_model(config, dtype).eval().requires_grad_(False)
        prefix, stack = self.causal.base_model_prefix, stack_of(self.causal)
        self._base_class = type(getattr(self.causal, prefix))
        self._path = stack.removeprefix(f"{prefix}.")  # of the layers, below an object of that class
        layers = self.causal.get_submodule(stack)
        self._layers = list(layers.children())
        self._empty = [layer.state_dict() for layer in self._layers]  # on meta: costs nothing
        self._split()
        setattr(self.causal, prefix, self._base(layers))
        for index, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(partial(self._before, index))

    def _before(self, index: int, _module: nn.Module, _args: Any) -> None:
        if index >= self.skipped:
            self.load(index)

    def load(self, index: int) -> None:
        """Read the weights of layer `index`, unless they are in memory; other layers may have to leave it.

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
        self.reads[index] += 1

    def check_unembedding(self) -> None:
        """Check that the unembedding, which is not read, holds no NaN and no infinity; of a hub repo, it is not there.

        Raises:
            SinkscopeError: It does.
        """
        if self.source.repo is not None:  # a shard is not downloaded for it
            return
        read = set(self.source.read)
        tensors = self.source.tensors(filter(_HEAD.search, self.source.weight_map))
        self.source.read = read
        check_numbers(tensors.items(), self.source.name)

    @contextlib.contextmanager
    def pinned(self, index: int) -> Iterator[None]:
        """Context manager in which a layer stays in memory."""
        self.load(index)
        self._pins[index] += 1
        try:
            yield
        finally:
            self._pins[index] -= 1

    def _split(self) -> None:
        """Sort the tensors of the checkpoint by layer, and leave out the unembedding."""
        stack = self._path.rsplit(".", 1)[-1]
        pattern = re.compile(rf"^((?:.*?\.)?{stack}\.)(\d+)(\..*)$")
        nested = any(_LANGUAGE.match(name) for name in self.source.weight_map)
        self._outside: dict[str, str] = {}  # name in the checkpoint -> name to load it by
        self._inside: dict[int, dict[str, str]] = {}
        for name in self.source.weight_map:
            if _HEAD.search(name) or (nested and not _LANGUAGE.match(name)):
                continue
            key = name
            if nested:
                key = _LANGUAGE.sub("model.", name)
            match = pattern.match(key)
            if match is None:
                self._outside[name] = key
            else:
                head, layer, tail = match.groups()
                self._inside.setdefault(int(layer), {})[name] = f"{head}0{tail}"
        tensors = {layer: names.values() for layer, names in self._inside.items()}
        note_further_layers(tensors, len(self._layers), self.source.name)

    def _base(self, layers: nn.Module) -> nn.Module:
        """The base of the model, with these layers. Around them it is whole."""
        shallow = copy.deepcopy(self._config)
        shallow.num_hidden_layers = 0
        base = self._make(shallow, self._outside, "the part around the layers")
        for module in base.modules():
            if hasattr(module, "config"):
                module.config = self._config  # forward passes read the depth and the layer types from it
        parent, _, leaf = self._path.rpartition(".")
        setattr(base.get_submodule(parent), leaf, layers)
        return base

    def _layer(self, index: int) -> dict[str, Tensor]:
        """The weights of one decoder layer, by the names of its module."""
        names = self._inside.get(index, {})
        single = copy.deepcopy(self._config)
        single.num_hidden_layers, single.vocab_size, single.pad_token_id = 1, 1, 0
        if getattr(single, "layer_types", None):
            single.layer_types = [self._config.layer_types[index]]
        if hasattr(single, "first_k_dense_replace"):
            single.first_k_dense_replace = int(index < single.first_k_dense_replace)
        alone = f"{self._path}.0"
        with torch.device("meta"):
            made = self._base_class(single).get_submodule(alone)
        if layer_kinds([made, self._layers[index]]) != [0, 0]:
            raise UnsupportedError(
                f"layer {index} of {self.source.name} alone is of another kind than in the whole model; load it whole "
                "with sinkscope.load(...)"
            )
        module = self._make(single, names, f"layer {index}", alone, f"{self._path}.{index}")
        return module.get_submodule(alone).state_dict()

    def _make(self, config: Any, names: dict[str, str], what: str, part: str = "", truly: str = "") -> nn.Module:
        """Make an object of the base class from these tensors, which must include every tensor below `part`.

        In the whole model, `part` is called `truly`.
        """
        state = {names[name]: tensor for name, tensor in self.source.tensors(names).items()}
        with quiet(), torch.random.fork_rng(devices=[]):
            module, info = self._base_class.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=self._dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below
            )
        if info["mismatched_keys"]:
            raise UnsupportedError(
                f"the shapes of {what} in {self.source.name} are not those of its config.json; download both from one "
                "revision"
            )
        absent = [name for name in sorted(info["missing_keys"]) if name.startswith(part)]
        if absent:
            first = absent[0].removeprefix(f"{part}.")
            raise UnsupportedError(
                f"{self.source.name} lacks tensors of {what}, the first is {first}; get the whole checkpoint"
            )
        origins = {new: stored for stored, new in names.items()}
        check_unexpected(module, info["unexpected_keys"], self.source.name, origins)
        path = f"{self.causal.base_model_prefix}.{truly}".rstrip(".")
        check_finite(module.get_submodule(part), self.source.name, f"{path}.")  # what is outside holds random numbers
        return module.eval().requires_grad_(False).to(self._device)
