"""GGUF files: rope that is scaled in each way against transformers' own configuration, and files that are no model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf_file import write_gguf
from organisms import tiny_model
from refusals import refused

from sinkscope.models.checkpoints.gguf_file import forget_vocabulary, parsed_once
from sinkscope.opening.load import load

gguf = pytest.importorskip("gguf")
IDS = torch.arange(3, 43)[None]
FACTORS = np.linspace(1.0, 8.0, 4, dtype=np.float32)
SCALING = "llama.rope.scaling."


def fields(values: dict[str, Any]) -> Any:
    """What adds fields to a file; an array is a tensor."""

    def write(writer: Any) -> None:
        for key, value in values.items():
            if isinstance(value, np.ndarray):
                writer.add_tensor(key, value)
            else:
                writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    return write


TRAINED = {f"{SCALING}original_context_length": 16}
LINEAR = {f"{SCALING}type": "linear", f"{SCALING}factor": 4.0}
YARN = {**TRAINED, f"{SCALING}type": "yarn", f"{SCALING}factor": 4.0}
YARN |= {f"{SCALING}yarn_beta_fast": 8.0, f"{SCALING}yarn_beta_slow": 2.0}
LONG = {**TRAINED, f"{SCALING}type": "longrope", f"{SCALING}attn_factor": 1.25}
LONG |= {"rope_factors_long.weight": FACTORS, "rope_factors_short.weight": np.ones(4, np.float32)}
BY_PAIR = {"rope_freqs.weight": FACTORS}
IN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
IN_YARN |= {"beta_fast": 8.0, "beta_slow": 2.0}
SCALED = [  # what a file says, transformers' configuration or what frequencies are divided by, and a factor
    ({f"{SCALING}type": "none"}, {}, 1.0),
    (LINEAR, {"rope_type": "linear", "factor": 4.0}, 1.0),
    ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}, 1.0),
    (YARN, IN_YARN, 1.0),
    (LINEAR | BY_PAIR, 4 * FACTORS, 1.0),
    (LONG, FACTORS, 1.25),
]


@torch.no_grad()
@pytest.mark.parametrize(("said", "truth", "factor"), SCALED)
def test_rope_is_scaled_as_the_file_says(said, truth, factor, tmp_path):
    """Against transformers' configuration; where a tensor has factors, frequencies are divided by hand."""
    model, tokenizer = tiny_model("llama")
    write_gguf(tmp_path / "a.gguf", model, tokenizer, fields(said))
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
        (None, "lacks 30 tensors .*it is a part of a model"),
        ({f"{SCALING}type": "su"}, "scales rope by su, of which transformers has no equal"),
        (YARN | BY_PAIR, "scales rope by yarn, rope_freqs.weight"),
        (LINEAR | {f"{SCALING}alpha": 2.0}, "scales rope by linear, alpha"),
    ],
)
def test_what_is_no_model_or_not_read_is_named(said, says, tmp_path):
    write_gguf(tmp_path / "a.gguf", *tiny_model("llama"), fields(said or {}), weights=said is not None)
    with refused(f"^a.gguf {says}"):
        load(tmp_path / "a.gguf")


def test_a_large_tensor_is_dequantized_in_parts_and_the_vocabulary_is_forgotten(tmp_path, monkeypatch):
    """What a file of a large vocabulary takes at its peak is no more than its weights twice."""
    kind = gguf.GGMLQuantizationType.Q8_0
    numbers = np.random.default_rng(0).normal(size=(11, 64)).astype(np.float32)
    blocks = gguf.quantize(numbers, kind)
    want, lengths, library = gguf.dequantize(blocks, kind), [], gguf.dequantize
    monkeypatch.setattr(gguf, "dequantize", lambda part, kind: lengths.append(len(part)) or library(part, kind))
    monkeypatch.setattr("sinkscope.models.checkpoints.gguf_file._ROWS", 4)
    write_gguf(tmp_path / "a.gguf", *tiny_model("llama"), fields({}))
    with parsed_once():
        assert np.array_equal(gguf.dequantize(blocks, kind), want) and lengths == [4, 4, 3]
        reader = gguf.GGUFReader(str(tmp_path / "a.gguf"))
        assert any(name.startswith("tokenizer.") for name in reader.fields)
        forget_vocabulary(tmp_path / "a.gguf")
        assert not any(name.startswith("tokenizer.") for name in reader.fields)
    forgotten = []
    monkeypatch.setattr("sinkscope.opening.load.forget_vocabulary", forgotten.append)
    load(tmp_path / "a.gguf")
    assert forgotten == [tmp_path / "a.gguf"]


def test_no_bar_is_drawn_while_a_file_is_read(tmp_path, capfd):
    write_gguf(tmp_path / "a.gguf", *tiny_model("llama"), fields({}))
    load(tmp_path / "a.gguf")
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
