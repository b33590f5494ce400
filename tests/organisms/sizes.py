"""Every decoder type at further sizes, with the initialisation of its class and embeddings and norms of other sizes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from .decoders import decoder_config

_HIDDEN = """hidden_size n_embd d_model embedding_dim embedding_size emb_dim word_embed_proj_dim input_embedding_size
    output_embedding_size embed_dim llm_hidden lru_width""".split()
_MLP = """intermediate_size ffn_dim decoder_ffn_dim d_inner dim_ff dff ffn_hidden_size intermediate_size_mlp
    dense_intermediate_size n_inner""".split()
_EXPERT = """moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size
    shared_experts_intermediate_size moe_shared_expert_intermediate_size""".split()
_HEADS = "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads".split()
_KV_HEADS = "num_key_value_heads num_kv_heads num_query_groups".split()
_HEAD_WIDTH = "head_dim kv_channels dim_head attention_head_dim".split()
_BIASES = "attention_bias mlp_bias use_bias bias add_bias_linear qkv_bias use_qkv_bias add_bias_kv".split()


@dataclass(frozen=True)
class Size:
    """Sizes of a model, and of the numbers in it.

    Attributes:
        d_model: Width of the residual stream.
        d_mlp: Neurons of an MLP; of an expert, if `d_expert` is not given.
        heads: Query heads.
        kv_heads: Key/value heads.
        d_head: Width of a head.
        embedding: Standard deviation of the embedding; None leaves the initialisation of the class.
        gains: Smallest and largest gain of norms; None leaves ones.
        d_expert: Neurons of an expert.
        tied: Whether the unembedding is the embedding.
        biases: Whether projections have biases, where a configuration offers it.
    """

    d_model: int
    d_mlp: int
    heads: int
    kv_heads: int
    d_head: int
    embedding: float | None = None
    gains: tuple[float, float] | None = None
    d_expert: int = 0
    tied: bool = False
    biases: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of a configuration, by all names that they have."""
        settings: dict[str, Any] = {"initializer_range": 0.02, "tie_word_embeddings": self.tied}
        for value, names in (
            (self.d_model, _HIDDEN),
            (self.d_mlp, _MLP),
            (self.d_expert or self.d_mlp, _EXPERT),
            (self.heads, _HEADS),
            (self.kv_heads, _KV_HEADS),
            (self.d_head, _HEAD_WIDTH),
        ):
            settings |= dict.fromkeys(names, value)
        if self.biases:
            settings |= dict.fromkeys(_BIASES, True)
        return settings


SIZES = {
    "default initialisation, d_model 256": Size(256, 512, 8, 4, 32),
    "embedding 0.005, gains 0.1 to 3, 3 heads per kv head, d_head apart, biases": Size(
        96, 200, 6, 2, 24, 0.005, (0.1, 3.0), d_expert=56, biases=True
    ),
    "embedding 1, all widths equal, one head per kv head, tied": Size(64, 64, 4, 4, 16, 1.0, tied=True),
    "embedding 0.1, gains 0.1 to 3, odd widths, one kv head for 6": Size(
        84, 101, 6, 1, 16, 0.1, (0.1, 3.0), d_expert=37
    ),
}
"""By what is special about each."""


@dataclass
class Built:
    """A model of a type at a size.

    Attributes:
        model: The model.
        has_size: Whether it has the widths and heads of the size, or only its numbers, because the class refuses them.
    """

    model: Any
    has_size: bool = field(default=True)


@torch.no_grad()
def sized_decoder(model_type: str, size: Size, seed: int = 0) -> Built:
    """A model of a type at a size, with the initialisation of its class.

    Where the class cannot be built with these widths or cannot run, it keeps the widths of `decoders`.
    """
    small = {"initializer_range": 0.02, "tie_word_embeddings": size.tied}
    even = replace(size, d_mlp=size.d_mlp // 4 * 4, d_expert=size.d_expert // 4 * 4)  # as fused experts need it
    state = torch.get_rng_state()
    error: Exception | None = None
    for settings in (size.settings, even.settings, small):
        torch.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(decoder_config(model_type, settings)).float().eval()
            model.requires_grad_(False)
            _set_numbers(model, size, torch.Generator().manual_seed(seed))
            model(input_ids=torch.arange(20, 30)[None], use_cache=False)
        except Exception as failure:
            error = error or failure
            continue
        torch.set_rng_state(state)
        return Built(model, settings is not small)
    torch.set_rng_state(state)
    assert error is not None
    raise error


def _set_numbers(model: Any, size: Size, generator: torch.Generator) -> None:
    """Give the embedding and the norms their sizes."""
    for tensor in model.parameters():
        if not tensor.isfinite().all():
            tensor.copy_(0.02 * torch.randn(tensor.shape, generator=generator))
    if size.embedding is not None:
        weight = model.get_input_embeddings().weight
        weight.copy_(size.embedding * torch.randn(weight.shape, generator=generator))
    if size.gains is None:
        return
    low, high = size.gains
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if "Norm" in type(module).__name__ and isinstance(weight, torch.Tensor) and weight.ndim == 1:
            gain = low * (high / low) ** torch.rand(weight.shape, generator=generator)
            weight.copy_(gain - (1 - weight.mean().round()))  # some classes add one
