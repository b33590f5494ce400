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
SCALING = "llama.rope.scaling."


def fields(**values: Any) -> Any:
    """What adds fields to a file, by the kind of their values; an array is a tensor."""

    def write(writer: Any) -> None:
        for name, value in values.items():
            key = name.replace("__", ".").replace("scaling.", SCALING)
            if isinstance(value, np.ndarray):
                writer.add_tensor(f"rope_{key}.weight", value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            else:
                writer.add_float32(key, value)

    return write


LINEAR = {"scaling__type": "linear", "scaling__factor": 4.0}
YARN = {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 16}
YARN |= {"scaling__yarn_beta_fast": 8.0, "scaling__yarn_beta_slow": 2.0}
LONG = {"scaling__type": "longrope", "scaling__original_context_length": 16, "scaling__attn_factor": 1.25}
LONG |= {"factors_long": FACTORS, "factors_short": np.ones(4, np.float32)}
SCALED = [  # what a file says, transformers' configuration or what frequencies are divided by, and a factor
    ({"scaling__type": "none"}, {}, 1.0),
    (LINEAR, {"rope_type": "linear", "factor": 4.0}, 1.0),
    ({"llama__rope__scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}, 1.0),
    (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0,
            "beta_slow": 2.0}, 1.0),
    (LINEAR | {"freqs": FACTORS}, 4 * FACTORS, 1.0),
    (LONG, FACTORS, 1.25),
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(("said", "truth", "factor"), SCALED)
def test_rope_is_scaled_as_the_file_says(said, truth, factor, tmp_path):
    """Against transformers' configuration; where a tensor has factors, frequencies are divided by hand."""
    model, tokenizer = tiny_model("llama")
    write_gguf(tmp_path / "a.gguf", model, tokenizer, fields(**said))
    plain, expected = model(IDS).logits, model
    if isinstance(truth, dict):
        config = type(model.config).from_dict(model.config.to_dict())
        config.rope_parameters = {**config.rope_parameters, **truth}
        expected = type(model)(config).eval()
        expected.load_state_dict(model.state_dict())
    else:
        rotary = expected.model.rotary_emb
        rotary.inv_freq, rotary.attention_scaling = rotary.inv_freq / torch.from_numpy(truth), factor
    got = load(tmp_path / "a.gguf")(IDS).logits
    assert torch.allclose(got, expected(IDS).logits, atol=1e-5)
    assert torch.allclose(got, plain, atol=1e-3) == (not isinstance(truth, np.ndarray) and not truth)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"general__type": "adapter"}, "a.gguf holds no whole model, but what GGUF calls 'adapter'"),
        ({"split__count": 3}, "a.gguf holds no whole model, but what GGUF calls 'part of a model'"),
        ({"general__type": "mmproj"}, "a.gguf holds no whole model, but what GGUF calls 'mmproj'"),
        ({"scaling__type": "su"}, "a.gguf scales rope by 'su', of which transformers has no equal"),
        (YARN | {"scaling__yarn_log_multiplier": 0.1}, "a.gguf scales rope by yarn with yarn_log_multiplier = 0.1"),
        (YARN | {"freqs": FACTORS}, "a.gguf scales rope by 'yarn' and factors of a tensor"),
    ],
)
def test_what_is_no_model_or_not_read_is_named(said, says, tmp_path):
    write_gguf(tmp_path / "a.gguf", *tiny_model("llama"), fields(**said))
    with pytest.raises(SinkscopeError) as refused:
        load(tmp_path / "a.gguf")
    assert str(refused.value).startswith(says)


def test_a_vocabulary_alone_is_named(tmp_path):
    write_gguf(tmp_path / "a.gguf", *tiny_model("llama"), weights=False)
    with pytest.raises(SinkscopeError, match=r"GGUF calls 'vocabulary without weights'"):
        load(tmp_path / "a.gguf")
