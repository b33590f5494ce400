"""The proof finds nothing wrong in sound models, and everything that is planted wrong; what is not proved is refused.

By function modes of torch, which see the additions and products of each layer, sites are examined in `test_types`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import each_other
from intervention_kit import count_hooks
from organisms.decoders import decoder
from organisms.tiny import MODEL_TYPES, tiny_model
from refusals import refused
from torch.nn.init import constant_, zeros_

import sinkscope as ss
import sinkscope.engine.attention as attention
from sinkscope.errors import UnsupportedError
from sinkscope.models.adapters import Adapter, NotInferredError
from sinkscope.models.weights import Experts
from sinkscope.opening.load import target_of
from sinkscope.opening.proof import prove

REFUSED = (NotInferredError, UnsupportedError)
IDS = torch.tensor([[1, 10, 11, 12, 13]])


def model_of(model_type: str, **settings: Any) -> Any:
    return tiny_model(model_type, **settings)[0] if model_type in MODEL_TYPES else decoder(model_type)


def proved(target):
    return prove(target, range(target.n_layers))


# -- sound models ------------------------------------------------------------------------------------------------------


def test_huge_and_empty_parts_are_no_false_alarm():
    """Planted models leave MLPs empty, and columns of sink neurons are large; the last token may overflow a norm."""
    model = model_of("llama").half()
    for path in ("down_proj", "gate_proj"):
        zeros_(model.model.layers[1].mlp.get_submodule(path).weight)
    constant_(model.model.layers[0].mlp.down_proj.weight[:, 0], 3e4)
    proved(target_of(model))


def test_a_model_in_training_is_opened_under_autocast_and_inference_mode():
    """What is proved is the model in its own precision, without dropout."""
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        target_of(model_of("llama", vocab_size=37))  # of a configuration that nobody has opened
        model = model_of("gpt2", vocab_size=37, resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5).train()
        adapter = target_of(model).adapter
    assert (
        adapter.unproved == ()
        and adapter.parts[0]["mid"] == "ln_2"
        and all(module.training for module in model.modules())
    )


# -- planted wrong -----------------------------------------------------------------------------------------------------

UNSEEN = {"attn.hook_q", "attn.hook_k", "attn.hook_v"}
"""What attention outside transformers' interface reads is not offered."""
RESIDUAL = {"hook_attn_out", "hook_resid_mid"}
ALL = {"all"}
WRONG = [  # what a row says of a type, and what is then not offered
    ("llama", {"mid": "self_attn", "attn_out": "input_layernorm"}, ALL),
    ("llama", {"k": "self_attn.v_proj", "v": "self_attn.k_proj"}, {"attn.hook_k", "attn.hook_v"}),
    ("gpt_neox", {"qkv_layout": "beside"}, UNSEEN),
    ("llama", {"o": "mlp.gate_proj"}, {"attn.hook_z"}),
    ("falcon", {"o": "mlp.dense_h_to_4h"}, {*UNSEEN, "attn.hook_z"}),
    ("llama", {"down": "mlp.up_proj", "up": "mlp.down_proj"}, ALL),
    ("llama", {"up": "mlp.gate_proj", "gate": "mlp.up_proj"}, ALL),  # exchanged factors: same shapes, same neuron
    ("phi3", {"fused_gate_up": False}, ALL),
    ("mixtral", {"experts": "mlp.gate"}, ALL),
    ("qwen2_moe", {"down": "mlp.shared_expert.up_proj"}, ALL),
    ("granite", {"write_factor": 1.0}, ALL),
    ("falcon_h1", {"down_factor": 1.0}, ALL),
    ("axk1", {"post_mlp_norm": "input_layernorm"}, ALL),
    ("llama4_text", {"mlp": "feed_forward.shared_expert"}, ALL),
    ("gemma4_text", {"adds": True}, ALL),
]
SQUARE = {"intermediate_size": 32, "num_key_value_heads": 4}  # every matrix of Llama is 32 x 32


@pytest.mark.parametrize(("case", "dtype"), each_other(WRONG, [torch.float32, torch.bfloat16, torch.float16], 3))
def test_a_wrong_place_is_not_offered(case, dtype):
    model_type, fields, refused = case
    target = target_of(model_of(model_type, **SQUARE if model_type == "llama" else {}).to(dtype))
    paths, settings = dict(fields), {}
    for name in paths.keys() & vars(Adapter):
        settings[name] = paths.pop(name)
    parts = tuple(named | paths for named in target.adapter.parts)
    wrong = replace(target, adapter=replace(target.adapter, parts=parts, **settings))
    if refused == ALL:
        with pytest.raises(REFUSED):
            proved(wrong)
    else:
        assert {site.removeprefix("blocks.0.") for site in proved(wrong) if site.startswith("blocks.0.")} == refused


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("gpt_oss", lambda real, a, k: real(*a, **{**k, "sinks": None})),
        ("llama", lambda real, a, k: real(*a, **k).flip(2)),  # rows out of order
    ],
)
def test_wrong_attention_is_found(model_type, change, monkeypatch):
    real, target = attention.attention_probs, target_of(model_of(model_type))
    monkeypatch.setattr(attention, "attention_probs", lambda *args, **kwargs: change(real, args, kwargs))
    with pytest.raises(REFUSED, match="does not attend as it is computed again"):
        proved(target)


def test_experts_that_give_something_else_are_found(monkeypatch):
    target, post = target_of(model_of("mixtral")), Experts.post
    monkeypatch.setattr(Experts, "post", lambda self, expert, hidden: 1.1 * post(self, expert, hidden))
    with pytest.raises(NotInferredError, match="experts' weights"):
        proved(target)


def test_a_model_that_cannot_run_is_a_problem_not_a_crash():
    """It is opened without the hook of its user, for the first time."""
    model = model_of("llama", vocab_size=41)
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        proved(target_of(model))
    handle.remove()
    assert count_hooks(model) == 0


# -- what is not proved ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "part", "layers"),
    [
        ("falcon_h1", "hook_attn_out", [0, 1, 2, 3]),  # its layers add a state-space part to the attention's
        ("minimax", "hook_mlp_out", []),  # its layers add to a norm of the residual stream
        ("diffllama", "attn.hook_v", [0, 1, 2, 3]),  # its attention gets values of two heads beside each other
        ("gpt_neox_japanese", "hook_resid_mid", [3]),  # its last layer adds a bias after the attention
    ],
)
def test_what_is_not_proved_is_refused_in_one_line_in_all_layers_of_a_kind(model_type, part, layers):
    model, site = decoder(model_type), f"blocks.3.{part}"
    unproved = dict(target_of(model).adapter.unproved)
    assert [layer for layer in range(4) if f"blocks.{layer}.{part}" in unproved] == layers
    for use in (ss.trace, lambda model, *_: ss.Add(torch.ones(64), site).on(model).__enter__()):
        with refused(r"not offered|no module gives it|more than add") as caught:
            use(model, IDS, [site])
        assert "\n" not in str(caught.value)
