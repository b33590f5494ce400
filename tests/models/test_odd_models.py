"""Odd but plausible models and arguments: measured, or refused in one line that says what was expected."""

from __future__ import annotations

import pytest
import torch
from checkpoints import spoiled
from organisms import organism, tiny_model
from refusals import refused
from transformers import T5Config, T5ForConditionalGeneration

import sinkscope as ss
from sinkscope.engine.attention import attention_name
from sinkscope.opening.load import target_of

IDS = torch.arange(3, 15)[None]


def test_attention_that_a_checkpoint_names_is_not_followed(tmp_path):
    names = dict.fromkeys(
        ("attn_implementation", "_attn_implementation", "experts_implementation"), "kernels-community/x"
    )
    model = ss.load(spoiled(tmp_path / "m", **names))
    assert attention_name(model.config) == "sdpa" and model.config._experts_implementation != "kernels-community/x"


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda model, tok: ss.find_sinks(model.model, tokenizer=tok), "is a LlamaModel without a language head"),
        (lambda model, tok: ss.find_sinks(model, tokenizer=3), "tokenizer=3: expected a tokenizer"),
        (lambda model, tok: ss.generate(model, "a \ud800", tokenizer=tok), "prompt 1 holds half of a surrogate pair"),
        (lambda model, tok: ss.load("x" * 5000), r"xx \.\.\. .*too long"),
        (lambda model, tok: ss.generate(model, "a", tokenizer=tok, interventions=5), "int is no intervention"),
    ],
)
def test_arguments_from_python(use, says):
    planted = organism("llama", 3)
    with refused(says) as caught:
        use(planted.model, planted.tokenizer)
    assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)


def encoder_decoder():
    sizes = {"vocab_size": 64, "num_layers": 2, "num_heads": 2, "d_model": 32, "d_kv": 16, "d_ff": 64}
    return T5ForConditionalGeneration(T5Config(**sizes))


def bidirectional():
    """The model was known when it was causal."""
    model = tiny_model("llama")[0]
    target_of(model)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (encoder_decoder, "encoder-decoder model, .*decoder-only"),
        (bidirectional, "over the keys up to each query"),
    ],
)
def test_models_that_are_no_decoders_are_refused_with_what_is_true(make, said):
    with refused(said):
        ss.trace(make(), IDS, "hook_embed")


@pytest.mark.parametrize("positions", [8, 16, 19])
def test_a_context_that_is_shorter_than_the_text_of_the_proof_is_read_as_far_as_it_goes(positions):
    assert target_of(tiny_model("gpt2", n_positions=positions)[0]).adapter.unproved == ()
