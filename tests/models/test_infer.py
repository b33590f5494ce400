"""What is inferred from a model: the rows of the table, factors, and refusals."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from organisms.tiny import MODEL_TYPES, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from sinkscope.models.adapters import ADAPTERS
from sinkscope.models.infer import adapter_of, infer
from sinkscope.models.probe import probe
from sinkscope.models.target import Target

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def random_model(model_type: str, **config: Any) -> Any:
    """A random model of an architecture that has no row."""
    made = AutoConfig.for_model(model_type, **{**SIZES, "bos_token_id": 1, "eos_token_id": 2, **config})
    made.pad_token_id = None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def differing(model_type: str, model: Any) -> dict[str, Any]:
    """Fields of the inferred row that are not those of the written one."""
    inferred, written = infer(model), ADAPTERS[model_type]
    return {
        field.name: getattr(inferred, field.name)
        for field in fields(written)
        if getattr(inferred, field.name) != getattr(written, field.name)
    }


@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name != "falcon"])
def test_the_rows_of_the_table_come_out_of_the_rule(model_type: str) -> None:
    model, _ = tiny_model(model_type)
    assert differing(model_type, model) == {}
    assert differing(model_type, model.to(torch.bfloat16)) == {}


def test_inferring_leaves_the_model_as_it_was() -> None:
    model, _ = tiny_model("gemma2")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    infer(model)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert model.config._attn_implementation == "eager"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_row_is_inferred_for_an_architecture_that_has_none_and_proved() -> None:
    target = Target.of(random_model("starcoder2", tie_word_embeddings=False))
    row = target.adapter
    assert (row.down, row.up, row.gate, row.o) == ("mlp.c_proj", "mlp.c_fc", None, "self_attn.o_proj")
    assert probe(target).problem is None
    assert adapter_of(target.hf) is row  # once per configuration
    assert probe(replace(target, adapter=replace(row, down="mlp.c_fc", up="mlp.c_proj"))).problem is not None
