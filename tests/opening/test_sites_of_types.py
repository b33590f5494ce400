"""Sites are where the model really adds, and what cannot be proved is not offered.

The truth is read by function modes of torch that see the additions and products of each layer
(`organisms.site_check`), never by paths of sinkscope.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import each_other, every_nth
from organisms.decoders import decoder
from organisms.site_check import check_sites
from organisms.tiny import MODEL_TYPES, tiny_model
from versions import OLD_TRANSFORMERS

import sinkscope as ss
from experiments.model_types import COVERING, DATA
from sinkscope.errors import UnsupportedError
from sinkscope.models.adapters import PATHS, NotInferredError
from sinkscope.opening.live import target_of
from sinkscope.opening.proof import prove

RECORDED = json.loads(DATA.read_text())["result"]
SERVED = [name for name, found in RECORDED["types"].items() if found["status"] in ("in full", "in part")]
OTHER_THERE = {"moshi"} if OLD_TRANSFORMERS else set[str]()
IDS = torch.tensor([[1, 10, 11, 12, 13]])


def model_of(model_type: str, **settings: Any) -> Any:
    return tiny_model(model_type, **settings)[0] if model_type in MODEL_TYPES else decoder(model_type)


# Those of the covering set are examined with all the rest.
@pytest.mark.parametrize("model_type", every_nth(sorted(set(SERVED) - set(COVERING[::9]) - OTHER_THERE), 9))
def test_every_site_that_is_served_is_where_the_model_adds(model_type):
    report = check_sites(decoder(model_type), edits=False)
    assert not report.wrong
    assert len(report.right) == RECORDED["types"][model_type]["sites"]["right"]


UNSEEN = {"attn.hook_q", "attn.hook_k", "attn.hook_v"}
"""What attention outside transformers' interface reads is not offered."""
RESIDUAL = {"hook_attn_out", "hook_resid_mid"}
ALL = {"all"}
WRONG = [  # what a row says of a type, and what is then not offered
    ("llama", {"mid": "self_attn", "attn_out": "input_layernorm"}, ALL),
    ("llama", {"attn_factor": 0.5}, RESIDUAL),
    ("llama", {"k": "self_attn.v_proj", "v": "self_attn.k_proj"}, {"attn.hook_k", "attn.hook_v"}),
    ("gpt_neox", {"qkv_layout": "beside"}, UNSEEN),
    ("llama", {"o": "mlp.gate_proj"}, {"attn.hook_z"}),
    ("falcon", {"o": "mlp.dense_h_to_4h"}, {*UNSEEN, "attn.hook_z"}),
    ("bloom", {"fused_qkv": "mlp.dense_h_to_4h"}, {*UNSEEN, "attn.hook_z"}),
    ("gptj", {"v": "attn.k_proj"}, {*UNSEEN, "attn.hook_z"}),
    ("llama", {"down": "mlp.up_proj", "up": "mlp.down_proj"}, ALL),
    ("llama", {"up": "mlp.gate_proj", "gate": "mlp.up_proj"}, ALL),  # exchanged factors: same shapes, same neuron
    ("llama", {"mlp": "self_attn", "down": "self_attn.o_proj", "up": "self_attn.v_proj", "gate": None}, ALL),
    ("llama", {"post_mlp_norm": "post_attention_layernorm"}, ALL),
    ("llama", {"down": "mlp.nope"}, ALL),
    ("llama", {"attn": ""}, ALL),
    ("phi3", {"fused_gate_up": False}, ALL),
    ("mixtral", {"experts": "mlp.gate"}, ALL),
    ("qwen2_moe", {"down": "mlp.shared_expert.up_proj"}, ALL),
    ("falcon", {"attn": "mlp"}, ALL),
    ("granite", {"write_factor": 1.0}, ALL),
    ("falcon_h1", {"down_factor": 1.0}, ALL),
    ("axk1", {"post_mlp_norm": None}, ALL),
    ("llama4_text", {"mlp": "feed_forward.shared_expert"}, ALL),
    ("gemma4_text", {"adds": True}, ALL),
]
SQUARE = {"intermediate_size": 32, "num_key_value_heads": 4}  # every matrix of Llama is 32 x 32


@pytest.mark.parametrize(("case", "dtype"), each_other(WRONG, [torch.float32, torch.bfloat16, torch.float16], 3))
def test_a_wrong_place_is_not_offered(case, dtype):
    """Without the change the model is sound."""
    model_type, fields, refused = case
    model = model_of(model_type, **SQUARE if model_type == "llama" else {}).to(dtype)
    target = target_of(model)
    prove(target)
    paths = {name: path for name, path in fields.items() if name in PATHS}
    rows = tuple(replace(row, **paths) for row in target.adapter.rows)
    wrong = replace(target, adapter=replace(target.adapter, rows=rows, **fields))
    if refused == ALL:
        with pytest.raises((NotInferredError, UnsupportedError)):
            prove(wrong)
    else:
        assert {site.removeprefix("blocks.0.") for site in prove(wrong) if site.startswith("blocks.0.")} == refused


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
    assert [f"blocks.{layer}.{part}" in dict(target_of(model).adapter.unproved) for layer in range(4)] == [
        layer in layers for layer in range(4)
    ]
    for use in (
        lambda: ss.trace(model, IDS, [site]),
        lambda: ss.Add(torch.ones(64), site).on(model).__enter__(),
    ):
        with pytest.raises(UnsupportedError, match=r"not offered|no module gives it|more than add") as caught:
            use()
        assert "\n" not in str(caught.value)


def test_dropout_of_a_model_in_training_hides_nothing():
    model = model_of("gpt2", resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5).train()
    adapter = target_of(model).adapter
    assert adapter.unproved == () and adapter.mid == "ln_2"
    assert all(module.training for module in model.modules())
