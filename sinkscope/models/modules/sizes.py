"""The sizes of a model: how many layers, heads and neurons it has, how wide they are, and of which type."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property

import torch

from sinkscope.errors import UnsupportedError
from sinkscope.models.modules.linear import input_width
from sinkscope.models.modules.parts import Parts


class Sizes(Parts):
    """A model whose sizes are known."""

    @property
    def n_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return int(self.config.hidden_size)

    @property
    def n_heads(self) -> int:
        """Query heads of a layer.

        Raises:
            UnsupportedError: Layers have different numbers of them.
        """
        with suppress(RuntimeError):  # of transformers, for configurations with a number for each layer
            return int(self.config.num_attention_heads)
        raise UnsupportedError(f"the layers of {self.name} have different numbers of heads: use another model")

    @property
    def n_kv_heads(self) -> int:
        """Key/value heads of a layer."""
        is_grouped = getattr(self.config, "new_decoder_architecture", False)  # of Falcon
        if getattr(self.config, "multi_query", False) and not is_grouped:
            return 1
        if self.config.model_type == "falcon":
            return int(self.config.num_kv_heads)
        return int(getattr(self.config, "num_key_value_heads", None) or self.n_heads)

    @property
    def head_width(self) -> int:
        """Width of one head at the input of the output projection."""
        return int(getattr(self.config, "head_dim", None) or self.d_model // self.n_heads)

    def head_columns(self, layer: int, head: int) -> list[int]:
        """The inputs of the output projection that hold a head; layers may have heads of different widths."""
        width = input_width(self.output_projection(layer)) // self.n_heads
        return list(range(head * width, (head + 1) * width))

    def n_experts(self, layer: int) -> int:
        """Number of routed experts in a layer; 0 if it is not a mixture."""
        if self.is_mixture(layer):
            return self.experts(layer).count
        return 0

    def width(self, layer: int, expert: int | None = None) -> int:
        """Number of neurons of an expert; for None, of the layer's dense MLP or shared expert."""
        if expert is not None:
            return self.experts(layer).width
        return input_width(self.mlp_part(layer, "down"))

    @cached_property
    def d_mlp(self) -> int:
        """Neurons of one MLP (of one expert in a mixture)."""
        layers = [layer for layer in range(len(self.layers)) if self.has_neurons(layer)]
        mixtures = [layer for layer in layers if self.is_mixture(layer)]
        if mixtures:
            return self.width(mixtures[0], 0)
        return self.width(layers[0])

    @property
    def max_positions(self) -> int | None:
        """Longest context according to the configuration."""
        value = getattr(self.config, "max_position_embeddings", None) or getattr(self.config, "n_positions", None)
        if value:
            return int(value)
        return None

    @property
    def device(self) -> torch.device:
        """Device on which token ids are expected."""
        device = next(self.embedding.parameters()).device
        if device.type == "meta":  # accelerate keeps the weights elsewhere, and brings them for each call
            device = torch.device(getattr(getattr(self.embedding, "_hf_hook", None), "execution_device", None) or "cpu")
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the embedding, which is that of the residual stream."""
        return next(self.embedding.parameters()).dtype
