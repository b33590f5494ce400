"""GGUF files: rope that is scaled in each way against transformers' own configuration, and files that are no model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf_file import write_gguf
from organisms import tiny_model

from sinkscope.errors import SinkscopeError
from sinkscope.opening.load import load

pytest.importorskip("gguf")
IDS = torch.arange(3, 43)[None]
FACTORS = np.linspace(1.0, 8.0, 4, dtype=np.float32)
ARCH = "llama.rope.scaling."


def linear(writer: Any) -> None:
    writer.add_rope_scaling_type(kind("linear"))
    writer.add_rope_scaling_factor(4.0)


def old_linear(writer: Any) -> None:
    writer.add_float32("llama.rope.scale_linear", 4.0)


def yarn(writer: Any) -> None:
    writer.add_rope_scaling_type(kind("yarn"))
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)
    writer.add_rope_scaling_yarn_beta_fast(8.0)
    writer.add_rope_scaling_yarn_beta_slow(2.0)


def frequencies(writer: Any) -> None:
    writer.add_tensor("rope_freqs.weight", FACTORS[: writer.half])


def linear_frequencies(writer: Any) -> None:
    linear(writer)
    frequencies(writer)


def longrope(writer: Any) -> None:
    writer.add_rope_scaling_type(kind("longrope"))
    writer.add_rope_scaling_orig_ctx_len(16)
    writer.add_rope_scaling_attn_factors(1.25)
    writer.add_tensor("rope_factors_long.weight", FACTORS[: writer.half])
    writer.add_tensor("rope_factors_short.weight", np.ones(writer.half, np.float32))


def none(writer: Any) -> None:
    writer.add_rope_scaling_type(kind("none"))


def kind(name: str) -> Any:
    import gguf

    return gguf.RopeScalingType(name)


SCALED = {
    none: {},
    linear: {"rope_type": "linear", "factor": 4.0},
    old_linear: {"rope_type": "linear", "factor": 4.0},
    yarn: {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0,
           "beta_slow": 2.0},
    linear_frequencies: 4 * FACTORS,
    longrope: FACTORS,
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("scaled", SCALED, ids=lambda one: one.__name__)
def test_rope_is_scaled_as_the_file_says(scaled, tmp_path):
    """Against transformers' configuration; where a tensor has factors, frequencies are divided by hand."""
    import gguf

    model, tokenizer = tiny_model("llama")
    half = model.config.head_dim // 2
    gguf.GGUFWriter.half = half
    try:
        write_gguf(tmp_path / "a.gguf", model, tokenizer, scaled)
    finally:
        del gguf.GGUFWriter.half
    plain = model(IDS).logits
    truth, expected = SCALED[scaled], model
    if isinstance(truth, dict):
        config = type(model.config).from_dict(model.config.to_dict())
        config.rope_parameters = {**config.rope_parameters, **truth}
        expected = type(model)(config).eval()
        expected.load_state_dict(model.state_dict())
    else:
        rotary = expected.model.rotary_emb
        rotary.inv_freq = rotary.inv_freq / torch.from_numpy(truth[:half])
        rotary.attention_scaling = 1.25 if scaled is longrope else 1.0
    want, got = expected(IDS).logits, load(tmp_path / "a.gguf")(IDS).logits
    assert torch.allclose(got, want, atol=1e-5)
    assert torch.allclose(got, plain, atol=1e-3) == (scaled is none), "the scaling changes this model"


def lora(writer: Any) -> None:
    writer.add_type("adapter")
    writer.add_string("general.base_model.0.name", "Big Base")


def part(writer: Any) -> None:
    writer.add_uint16("split.no", 0)
    writer.add_uint16("split.count", 3)


def tower(writer: Any) -> None:
    writer.add_type("mmproj")


def imatrix(writer: Any) -> None:
    writer.add_type("imatrix")


def strange(writer: Any) -> None:
    writer.add_string(f"{ARCH}type", "su")


def yarn_factor(writer: Any) -> None:
    yarn(writer)
    writer.add_float32(f"{ARCH}yarn_log_multiplier", 0.1)


def yarn_frequencies(writer: Any) -> None:
    yarn(writer)
    writer.add_tensor("rope_freqs.weight", FACTORS)


REFUSED = {
    lora: "a.gguf holds no whole model, but what GGUF calls 'adapter'",
    part: "a.gguf holds no whole model, but what GGUF calls 'part of a model'",
    tower: "a.gguf holds no whole model, but what GGUF calls 'mmproj'",
    imatrix: "a.gguf holds no whole model, but what GGUF calls 'imatrix'",
    strange: "a.gguf scales rope by 'su', of which transformers has no equal",
    yarn_factor: "a.gguf scales rope by yarn with yarn_log_multiplier = 0.1",
    yarn_frequencies: "a.gguf scales rope by 'yarn' and factors of a tensor",
}


@pytest.mark.parametrize("more", REFUSED, ids=lambda one: one.__name__)
def test_what_is_no_model_or_not_read_is_named(more, tmp_path):
    write_gguf(tmp_path / "a.gguf", *tiny_model("llama"), more)
    with pytest.raises(SinkscopeError) as refused:
        load(tmp_path / "a.gguf")
    assert str(refused.value).startswith(REFUSED[more])


def test_a_vocabulary_alone_is_named(tmp_path):
    write_gguf(tmp_path / "a.gguf", *tiny_model("llama"), weights=False)
    with pytest.raises(SinkscopeError, match=r"GGUF calls 'vocabulary without weights'"):
        load(tmp_path / "a.gguf")
