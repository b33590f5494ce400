"""Where each architecture keeps its parts: one row of data per `model_type`, and `register` for rows of your own.

All paths are those of the plain Hugging Face model. They also resolve below `bridge.original_model` and below an
nnsight model, because both wrap modules in place and keep the names, so one table serves all three kinds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sinkscope.errors import SinkscopeError


@dataclass(frozen=True)
class Adapter:
    """Module paths of one architecture; those marked (layer) are relative to a decoder layer ("": the layer).

    Where layers are of several kinds, a path may be several, separated by "|": a layer has the first that is there. One
    that follows a condition, as in "self_attn?norm", counts as there only in layers that also have the part before "?".
    """

    model_type: str
    base: str = "model"  # the module that maps ids to the last hidden state
    layers: str = "model.layers"
    embed: str = "model.embed_tokens"
    attn: str = "self_attn"  # (layer)
    mlp: str = "mlp"  # (layer)
    down: str = (
        "mlp.down_proj"  # (layer) the down projection: its input is `hook_post`; of a mixture, its shared expert's
    )
    up: str | None = "mlp.up_proj"  # (layer) the linear factor, or the only input projection of an ungated MLP
    gate: str | None = "mlp.gate_proj"  # (layer) None: ungated, or fused into `up`
    fused_gate_up: bool = False  # `up` returns gate and up side by side, gate first
    q: str | None = "self_attn.q_proj"  # (layer)
    k: str | None = "self_attn.k_proj"  # (layer)
    v: str | None = "self_attn.v_proj"  # (layer)
    o: str | None = "self_attn.o_proj"  # (layer) its input is `hook_z`, heads side by side
    fused_qkv: str | None = None  # (layer)
    mid: str | None = "post_attention_layernorm"  # (layer) the module whose *input* is `hook_resid_mid`
    post_attn_norm: str | None = None  # (layer) norm between the attention and the residual stream
    post_mlp_norm: str | None = None  # (layer) norm between the MLP and the residual stream
    experts: str | None = None  # (layer) fused experts, where the layer is a mixture
    shared_gate: str | None = None  # (layer) the sigmoid of its output multiplies what the shared expert gives
    transposed_down: bool = False  # weight of the down projection is stored input x output (Conv1D)
    attention_interface: bool = True  # attention goes through transformers' AttentionInterface
    absolute_positions: bool = False
    learned_sinks: bool = False  # a learned logit per head joins the softmax and its column is dropped
    down_factor: float = 1.0  # between the down projection of a dense MLP and what `mlp` gives
    expert_factor: float = 1.0  # between a fused expert and what `mlp` gives
    shared_factor: float = 1.0  # between the down projection of the shared expert and what `mlp` gives
    write_factor: float = 1.0  # between what `mlp`, or the norm behind it, gives and what the layer adds
    adds: bool = True  # False: what `mlp` gives is not simply added, so the layer is called again to see its effect

    @property
    def behind_mlp(self) -> str:
        """(layer) The norm behind the MLP where there is one, or else the MLP."""
        return "|".join(filter(None, (self.post_mlp_norm, self.mlp)))

    @property
    def behind_attn(self) -> str:
        """(layer) The norm behind the attention where there is one, or else the attention."""
        return "|".join(filter(None, (self.post_attn_norm, self.attn)))


_LLAMA = Adapter("llama")
_SANDWICH = replace(
    _LLAMA,
    mid="pre_feedforward_layernorm",
    post_attn_norm="post_attention_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)

ADAPTERS: dict[str, Adapter] = {
    a.model_type: a
    for a in (
        _LLAMA,
        *(replace(_LLAMA, model_type=t) for t in ("mistral", "qwen2", "qwen3", "gemma", "olmo")),
        *(replace(_SANDWICH, model_type=t) for t in ("gemma2", "gemma3_text")),
        replace(
            _SANDWICH,
            model_type="gemma3",
            base="model.language_model",
            layers="model.language_model.layers",
            embed="model.language_model.embed_tokens",
        ),
        replace(_SANDWICH, model_type="olmo2", mid="mlp"),
        *(replace(_LLAMA, model_type=t, experts="mlp.experts") for t in ("mixtral", "qwen3_moe")),
        replace(
            _LLAMA,
            model_type="qwen2_moe",
            down="mlp.down_proj|mlp.shared_expert.down_proj",
            up="mlp.up_proj|mlp.shared_expert.up_proj",
            gate="mlp.gate_proj|mlp.shared_expert.gate_proj",
            experts="mlp.experts",
            shared_gate="mlp.shared_expert_gate",
        ),
        replace(
            _LLAMA,
            model_type="glm4_moe",
            down="mlp.down_proj|mlp.shared_experts.down_proj",
            up="mlp.up_proj|mlp.shared_experts.up_proj",
            gate="mlp.gate_proj|mlp.shared_experts.gate_proj",
            experts="mlp.experts",
        ),
        replace(_LLAMA, model_type="gpt_oss", experts="mlp.experts", learned_sinks=True),
        replace(
            _LLAMA,
            model_type="phi3",
            up="mlp.gate_up_proj",
            gate=None,
            fused_gate_up=True,
            q=None,
            k=None,
            v=None,
            fused_qkv="self_attn.qkv_proj",
        ),
        replace(
            _LLAMA,
            model_type="phi",
            down="mlp.fc2",
            up="mlp.fc1",
            gate=None,
            o="self_attn.dense",
            mid=None,
        ),
        Adapter(
            "gpt2",
            base="transformer",
            layers="transformer.h",
            embed="transformer.wte",
            attn="attn",
            down="mlp.c_proj",
            up="mlp.c_fc",
            gate=None,
            q=None,
            k=None,
            v=None,
            fused_qkv="attn.c_attn",
            o="attn.c_proj",
            mid="ln_2",
            transposed_down=True,
            absolute_positions=True,
        ),
        Adapter(
            "gpt_neox",
            base="gpt_neox",
            layers="gpt_neox.layers",
            embed="gpt_neox.embed_in",
            attn="attention",
            down="mlp.dense_4h_to_h",
            up="mlp.dense_h_to_4h",
            gate=None,
            q=None,
            k=None,
            v=None,
            fused_qkv="attention.query_key_value",
            o="attention.dense",
            mid=None,
        ),
        Adapter(
            "opt",
            base="model.decoder",
            layers="model.decoder.layers",
            embed="model.decoder.embed_tokens",
            mlp="fc2",
            down="fc2",
            up="fc1",
            gate=None,
            o="self_attn.out_proj",
            mid="final_layer_norm",
            absolute_positions=True,
        ),
        Adapter(
            "falcon",
            base="transformer",
            layers="transformer.h",
            embed="transformer.word_embeddings",
            attn="self_attention",
            down="mlp.dense_4h_to_h",
            up="mlp.dense_h_to_4h",
            gate=None,
            q=None,
            k=None,
            v=None,
            fused_qkv="self_attention.query_key_value",
            o="self_attention.dense",
            mid=None,
            attention_interface=False,
        ),
    )
}


def register(adapter: Adapter) -> Adapter:
    """Register the adapter of another architecture; everything that accepts a model then accepts this one.

    `sinkscope.load` checks a row on a few tokens before it returns the model; `models.probe.probe` runs the same check.

    Raises:
        SinkscopeError: This `model_type` already has an adapter, or the row names no projections.
    """
    if adapter.model_type in ADAPTERS:
        raise SinkscopeError(
            f"model type {adapter.model_type!r} has an adapter already: change a copy with "
            "dataclasses.replace, and give it to a Target, if it is wrong for your model"
        )
    if adapter.fused_qkv is None and not (adapter.q and adapter.k and adapter.v):
        raise SinkscopeError(
            f"the adapter of {adapter.model_type!r} names neither q, k and v nor fused_qkv: give one or the other",
            page="unsupported-model",
        )
    return ADAPTERS.setdefault(adapter.model_type, adapter)


def row_of(model_type: str) -> Adapter | None:
    """The row of an architecture, by `config.model_type`; None if its adapter is to be inferred."""
    return ADAPTERS.get(model_type)
