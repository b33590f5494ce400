"""The load-time probe finds nothing wrong in sound models and everything that is planted wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoints import checkpoint
from covering import each_other, slow
from organisms.tiny import MODEL_TYPES, tiny_model

import sinkscope.trace.attention as attention
from sinkscope.errors import UnsupportedError
from sinkscope.models import adapters
from sinkscope.models.adapters import Adapter
from sinkscope.models.load import load
from sinkscope.models.probe import ProbeReport, probe
from sinkscope.models.wrapped import target_of

IDS = torch.tensor([[1, 10, 11, 12, 13]])
# Shapes that do not give a wrong path away: every matrix is 32 x 32.
SQUARE = {"intermediate_size": 32, "num_key_value_heads": 4}


def wrong(model_type: str, *, config: dict[str, Any] | None = None, **fields) -> ProbeReport:
    """The report on a tiny model whose adapter was changed; without the change the model is sound."""
    model, _ = tiny_model(model_type, **(config or {}))
    target = target_of(model)
    assert probe(target).problem is None
    return probe(replace(target, adapter=replace(target.adapter, **fields)))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_sound_models_pass_and_numbers_are_small(model_type):
    report = probe(target_of(tiny_model(model_type)[0]))
    assert report.problem is None
    assert report.edit_error < 1e-5
    assert report.attention_error < 1e-5
    assert report.row_sum_error < 1e-5
    assert report.logits_change > 0.1


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    each_other(["llama", "gpt2", "gemma2", "gpt_oss", "falcon"], [torch.bfloat16, torch.float16]),
)
def test_half_precision_is_no_false_alarm(model_type, dtype):
    assert probe(target_of(tiny_model(model_type)[0].to(dtype))).problem is None


@pytest.mark.parametrize("seed", [1, 2, *(slow(s) for s in (0, 3, 4))])
def test_other_weights_are_no_false_alarm(seed):
    for model_type in ("llama", "qwen3", "gpt_neox", "mixtral"):
        report = probe(target_of(tiny_model(model_type, seed=seed, num_hidden_layers=1)[0]))
        assert report.problem is None, (model_type, report)


GAINS = [
    ("gemma2", "post_feedforward_layernorm", -1.0),  # gains are 1 + weight there
    ("gemma3_text", "post_feedforward_layernorm", -1.0),
    ("olmo2", "post_feedforward_layernorm", 0.0),
    ("mixtral", "post_attention_layernorm", 0.0),  # the experts' input, so each of them writes nothing
    ("gpt_oss", "post_attention_layernorm", 0.0),
    ("llama", "post_attention_layernorm", 0.0),
    ("qwen3", "q_norm", 0.0),
]


def _silence(model, norm: str, zero: float, layers: list[int]):
    for layer in layers:
        for name, module in model.model.layers[layer].named_modules():
            if name.endswith(norm):
                torch.nn.init.constant_(module.weight, zero)
    for module in model.modules():  # gpt-oss' experts have biases, which would speak where the input is zero
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            if hasattr(module, name):
                torch.nn.init.zeros_(getattr(module, name))


@pytest.mark.parametrize(
    ("model_type", "norm", "zero", "layers"),
    [
        pytest.param(*gain, layers, marks=[] if (i + j) % 2 == 0 else [pytest.mark.slow])
        for i, gain in enumerate(GAINS)
        for j, layers in enumerate([[0], [0, 1, 2]])
    ],
)
def test_gains_of_zero_are_no_false_alarm(model_type, norm, zero, layers):
    """A layer that is switched off by its gain proves nothing: the next one is edited, and none where all are."""
    model = tiny_model(model_type)[0]
    assert len(model.model.layers) == 3
    _silence(model, norm, zero, layers)
    report = probe(target_of(model))
    assert report.problem is None
    if zero == -1.0 or model_type in ("olmo2", "mixtral", "gpt_oss"):
        assert report.layers == ((1,) if layers == [0] else ())


def test_what_is_wrong_behind_a_layer_that_is_switched_off_is_found():
    model = tiny_model("gemma2")[0]
    _silence(model, "post_feedforward_layernorm", -1.0, [0])
    target = target_of(model)
    wrong_norm = replace(target.adapter, post_mlp_norm="post_attention_layernorm")
    assert probe(replace(target, adapter=wrong_norm)).problem is not None
    assert probe(replace(target, adapter=replace(target.adapter, post_mlp_norm=None))).problem is not None
    assert probe(replace(target, adapter=replace(target.adapter, down="self_attn.o_proj"))).problem is not None


# -- planted wrong: the MLP ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"down": "self_attn.o_proj"},
        {"down": "mlp.gate_proj"},
        {"down": "mlp.up_proj", "up": "mlp.down_proj"},
        {"up": "mlp.gate_proj", "gate": "mlp.up_proj"},  # exchanged factors: same shapes, same neuron
        {"up": "self_attn.v_proj"},
        {"mlp": "self_attn"},
        {"mlp": "self_attn", "down": "self_attn.o_proj", "up": "self_attn.v_proj", "gate": None},
        {"post_mlp_norm": "post_attention_layernorm"},
        {"transposed_down": True},
    ],
    ids=str,
)
def test_wrong_paths_of_a_gated_mlp_are_found(fields):
    report = wrong("llama", config=SQUARE, **fields)
    assert report.problem is not None
    assert report.edit_error > 0.05 or "did not run" in report.problem


def test_wrong_norm_after_the_mlp_is_found():
    assert wrong("gemma2", post_mlp_norm=None).edit_error > 0.05


def test_exchanged_halves_of_a_fused_projection_are_found(monkeypatch):
    """The second half is the linear factor; of a model that has it first, the edit would hit the gate."""
    from transformers.models.phi3.modeling_phi3 import Phi3MLP

    def exchanged(self, hidden):
        up, gate = self.gate_up_proj(hidden).chunk(2, -1)
        return self.down_proj(up * self.activation_fn(gate))

    model = tiny_model("phi3")[0]
    assert probe(target_of(model)).problem is None
    monkeypatch.setattr(Phi3MLP, "forward", exchanged)
    assert probe(target_of(model)).problem is not None


def test_columns_read_the_wrong_way_are_found():
    report = wrong("gpt2", config={"n_inner": 32, "intermediate_size": 32}, transposed_down=False)
    assert report.problem is not None
    assert report.edit_error > 0.05


@pytest.mark.parametrize(
    ("model_type", "fields", "pattern"),
    [
        ("llama", {"down": "mlp.nope"}, r"a module that is not there"),
        ("phi3", {"fused_gate_up": False}, r"the output of 'mlp\.gate_up_proj' has width 128, expected 64"),
        ("mixtral", {"experts": "mlp.gate"}, r"."),
        ("mixtral", {"mlp": "self_attn"}, r"does not change the layer as the adapter says"),
    ],
)
def test_what_is_wrong_is_said(model_type, fields, pattern):
    assert re.search(pattern, wrong(model_type, **fields).problem or "")


def test_an_edit_that_reaches_no_logit_is_found():
    model = tiny_model("llama")[0]
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert "does not change the logits" in (probe(target_of(model)).problem or "")


# -- planted wrong: attention --------------------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch, change):
    real = attention.attention_probs
    monkeypatch.setattr(attention, "attention_probs", lambda *args, **kwargs: change(real, args, kwargs))


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3", "gemma3_text", "olmo2"])
def test_wrong_scaling_is_found(model_type, monkeypatch):
    spoil(monkeypatch, lambda real, a, k: real(*a, **{**k, "scaling": 0.9 * k["scaling"]}))
    report = probe(target_of(tiny_model(model_type)[0]))
    assert report.attention_error > report.tolerance
    assert "differs from the model's own" in (report.problem or "")


def test_rows_that_do_not_sum_to_one_are_found(monkeypatch):
    spoil(monkeypatch, lambda real, a, k: 0.99 * real(*a, **k))
    assert "do not sum to one" in (probe(target_of(tiny_model("llama")[0])).problem or "")


def test_forgotten_sink_logits_are_found(monkeypatch):
    spoil(monkeypatch, lambda real, a, k: real(*a, **{**k, "sinks": None}))
    assert "differs from the model's own" in (probe(target_of(tiny_model("gpt_oss")[0])).problem or "")


def test_keys_of_the_wrong_group_are_found(monkeypatch):
    spoil(monkeypatch, lambda real, a, k: real(a[0], a[1].flip(1), *a[2:], **k))
    assert probe(target_of(tiny_model("llama")[0])).problem is not None


def test_rows_out_of_order_are_found(monkeypatch):
    spoil(monkeypatch, lambda real, a, k: real(*a, **k).flip(2))
    assert probe(target_of(tiny_model("llama")[0])).problem is not None


# -- what it leaves behind -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sound", [True, False])
def test_nothing_is_left_on_the_model(sound):
    model = tiny_model("llama")[0]
    before = model(IDS).logits
    target = target_of(model)
    probe(target if sound else replace(target, adapter=replace(target.adapter, down="mlp.nope")))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(IDS).logits, before)


def test_a_model_that_cannot_run_is_a_problem_not_a_crash():
    model = tiny_model("llama")[0]

    def fail(*_args):
        raise RuntimeError("no kernel\nfor this")

    handle = model.model.norm.register_forward_hook(fail)
    assert "a forward pass raised RuntimeError: no kernel" in (probe(target_of(model)).problem or "")
    handle.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_load_refuses_what_the_probe_finds(monkeypatch):
    monkeypatch.setitem(adapters.ADAPTERS, "llama", Adapter("llama", down="self_attn.o_proj"))
    with pytest.raises(
        UnsupportedError, match=r"the load-time probe of this llama model failed \(bridge\): .*backend=\"hf\""
    ):
        load(checkpoint("llama"))
    load(checkpoint("llama"), probe=False)


def test_half_precision_olmo_on_a_bridge_is_refused_with_the_way_out():
    """TransformerLens multiplies float32 attention with half-precision values there when nothing is cached."""
    with pytest.raises(UnsupportedError, match=r"olmo model failed \(bridge\).*try backend=\"hf\""):
        load(checkpoint("olmo"), dtype="bf16")
    load(checkpoint("olmo"), dtype="bf16", backend="hf")


def test_zero_weights_are_no_false_alarm():
    """Models with a planted circuit often leave whole MLPs empty."""
    model = tiny_model("llama")[0]
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()
    report = probe(target_of(model))
    assert (report.problem, report.layers) == (None, (1,))
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight.zero_()
    assert probe(target_of(model)).problem is None
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()
    assert (probe(target_of(model)).problem, probe(target_of(model)).layers) == (None, ())


def test_a_huge_column_is_no_false_alarm():
    """The column of a sink neuron is far larger than the others; moving that neuron would overflow half precision."""
    model = tiny_model("llama")[0].half()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[:, 0] = 3e4
        model.model.layers[0].mlp.up_proj.weight[0] = 0
    assert probe(target_of(model)).problem is None
