"""The proof finds nothing wrong in sound models and everything that is planted wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import checkpoint
from covering import each_other
from intervention_kit import count_hooks
from organisms.decoders import decoder
from organisms.tiny import MODEL_TYPES, tiny_model

import sinkscope.engine.attention as attention
from sinkscope.errors import UnsupportedError
from sinkscope.models import adapters
from sinkscope.models.adapters import Adapter, NotInferredError
from sinkscope.models.weights import Experts
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load
from sinkscope.opening.proof import prove


def model_of(model_type: str, **settings: Any) -> Any:
    return tiny_model(model_type, **settings)[0] if model_type in MODEL_TYPES else decoder(model_type)


# -- sound models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    each_other(["llama", "gpt2", "gemma2", "gpt_oss", "falcon"], [torch.bfloat16, torch.float16]),
)
def test_half_precision_is_no_false_alarm(model_type, dtype):
    prove(target_of(model_of(model_type).to(dtype)))


def test_an_mlp_without_a_norm_before_it_does_not_overflow():
    """The last token is a thousand times as large, and the gate times up a million times."""
    model = model_of("olmo2")
    for name, weight in model.named_parameters():
        if "mlp.gate" in name or "mlp.up" in name:
            weight.data.normal_(std=0.3)
    prove(target_of(model.half()))


@pytest.mark.parametrize("paths", [["down_proj"], ["gate_proj"], ["down_proj", "gate_proj"]])
def test_zero_weights_and_huge_columns_are_no_false_alarm(paths):
    """Models with a planted circuit often leave whole MLPs empty, and the column of a sink neuron is far larger."""
    model = model_of("llama").half()
    for path in paths:
        torch.nn.init.zeros_(model.model.layers[1].mlp.get_submodule(path).weight)
    torch.nn.init.constant_(model.model.layers[0].mlp.down_proj.weight[:, 0], 3e4)
    prove(target_of(model))


def test_a_model_may_be_opened_under_autocast_and_inference_mode():
    """What is proved is the model in its own precision."""
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        target_of(model_of("llama", vocab_size=37))  # of a configuration that nobody has opened


# -- planted wrong -----------------------------------------------------------------------------------------------------


def test_exchanged_halves_of_a_fused_projection_are_found(monkeypatch):
    """The second half is the linear factor; of a model that has it first, the edit would hit the gate."""
    from transformers.models.phi3.modeling_phi3 import Phi3MLP

    def exchanged(self, hidden):
        up, gate = self.gate_up_proj(hidden).chunk(2, -1)
        return self.down_proj(up * self.activation_fn(gate))

    target_of(model_of("phi3"))
    monkeypatch.setattr(Phi3MLP, "forward", exchanged)
    with pytest.raises(UnsupportedError, match="a moved neuron does not change the layer"):
        target_of(model_of("phi3"))


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("gpt2", lambda real, a, k: real(*a, **{**k, "scaling": 0.9 * k["scaling"]})),
        ("gpt_oss", lambda real, a, k: real(*a, **{**k, "sinks": None})),
        ("llama", lambda real, a, k: real(a[0], a[1].flip(1), *a[2:], **k)),  # keys of the wrong group
        ("llama", lambda real, a, k: real(*a, **k).flip(2)),  # rows out of order
    ],
)
def test_wrong_attention_is_found(model_type, change, monkeypatch):
    real, target = attention.attention_probs, target_of(model_of(model_type))
    monkeypatch.setattr(attention, "attention_probs", lambda *args, **kwargs: change(real, args, kwargs))
    with pytest.raises((NotInferredError, UnsupportedError), match=r"differs from the model's own|later tokens"):
        prove(target)


def test_experts_that_give_something_else_are_found(monkeypatch):
    target, post = target_of(model_of("mixtral")), Experts.post
    monkeypatch.setattr(Experts, "post", lambda self, expert, hidden: 1.1 * post(self, expert, hidden))
    with pytest.raises(NotInferredError, match="the experts do not give what their weights say"):
        prove(target)


def test_a_model_that_cannot_run_is_a_problem_not_a_crash():
    model = model_of("llama")
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 // 0)
    with pytest.raises(NotInferredError, match="a forward pass raised ZeroDivisionError"):
        prove(target_of(model))
    handle.remove()
    assert count_hooks(model) == 0


def test_load_refuses_what_the_proof_finds(monkeypatch):
    monkeypatch.setitem(adapters.ADAPTERS, "llama", Adapter("llama", down="self_attn.o_proj"))
    with pytest.raises(UnsupportedError, match=r"model type 'llama' has a row, .* is refused: .*down='self_attn"):
        load(checkpoint("llama"))
