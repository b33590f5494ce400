"""What `--dry-run` says: multiplications counted apart from it, memory of the machine, and depth."""

from __future__ import annotations

import json
from importlib.resources import files
from types import SimpleNamespace

import psutil
import pytest
import torch
from organisms.decoders import decoder
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, Qwen3MoeConfig

from sinkscope.app import expected
from sinkscope.app.expected import computing_seconds, expected_cost, layer_positions, size_of

TOKENS = 40


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_moe",
        "gpt_oss",
        "dbrx",
        "jetmoe",
        "llama4_text",
        "deepseek_v3",
        "ernie4_5_moe",
        "opt",
        "gemma4_text",
        "llama",
    ],
)
@torch.no_grad()
def test_as_many_multiplications_as_a_pass_makes(model_type):
    """Counted by torch on a real pass. Attention itself is left out of the estimate, and is little on a short text."""
    model = decoder(model_type)
    for config in (model.config, model.config.get_text_config()):
        config._experts_implementation = config._attn_implementation = "eager"
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(20, 20 + TOKENS)[None])
    ratio = 2 * TOKENS * size_of(model.config, torch.float32).computing / counter.get_total_flops()
    assert 0.7 < ratio < 1.05


def test_a_mixture_counts_the_experts_that_compute():
    """Qwen3-30B-A3B: 30.5 billion parameters, of which 3.3 billion are active (its model card)."""
    config = Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
    )
    size = size_of(config, torch.bfloat16)
    embedding = 2048 * 151936
    assert size.parameters == pytest.approx(30.5e9, rel=0.01)
    assert size.computing + embedding == pytest.approx(3.3e9, rel=0.02)
    assert size.layers_computing == pytest.approx(3.3e9 - 2 * embedding, rel=0.03)


@pytest.mark.parametrize(
    ("total", "available", "says"),
    [
        (8e9, 6e9, "Warning: cpu has 8.0 GB, so this does not fit"),
        (64e9, 6e9, "Warning: only 6.0 GB of the 64.0 GB of cpu are free now"),
        (64e9, 60e9, "This fits into the 60.0 GB that are free on cpu"),
    ],
)
def test_memory_above_the_machine_is_warned_of(tmp_path, monkeypatch, total, available, says):
    config = LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16")  # 7 B: 13.5 GB
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(expected, "speed", lambda *_: 1e12)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total, available=available))
    text = expected_cost("lines", tmp_path, device="cpu")
    assert "13.5 GB as a whole" in text and says in text


def test_layers_are_read_in_float32_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(expected, "speed", lambda *_: 1e12)
    LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16", num_hidden_layers=2).save_pretrained(tmp_path)
    assert "Weights in float32" in expected_cost("find-sinks", tmp_path, whole=False, device="cpu")
    assert "Weights in bfloat16" in expected_cost("lines", tmp_path, device="cpu")


def test_positions_by_depth():
    """Commands that stop when they have seen enough grow slower than the depth, circuit faster, others with it."""
    sums = {
        command: [layer_positions(command, depth) for depth in (6, 12, 32)] for command in ("find-sinks", "circuit")
    }
    shallow, _, deep = sums["find-sinks"]
    assert shallow < deep < 32 / 6 * shallow
    _, middle, deep = sums["circuit"]
    assert deep > 32 / 12 * middle
    assert layer_positions("lines", 32) == 32 / 6 * layer_positions("lines", 6)
    assert layer_positions("view", 6) is None


@pytest.mark.parametrize(("command", "whole"), [("lines", True), ("find-sinks", False)])
def test_time_is_that_of_multiplications_and_of_rows(monkeypatch, command, whole):
    """By a second way: a device on which one of them takes no time leaves the other."""
    counted = json.loads(files("sinkscope.app").joinpath("passes.json").read_text())["result"]
    size = size_of(LlamaConfig(num_hidden_layers=6, hidden_size=256, num_attention_heads=4), torch.float32)
    positions = layer_positions(command, 6)

    def seconds(rate, row):
        monkeypatch.setattr(expected, "speed", lambda *_: rate)
        monkeypatch.setattr(expected, "row_seconds", lambda *_: row)
        return computing_seconds(command, size, torch.device("cpu"), torch.float32, whole=whole)

    multiplied = size.computing if whole else size.layers_computing
    assert seconds(1e9, 0.0) == pytest.approx(positions / 6 * multiplied * 2 / 1e9)
    assert seconds(1e30, 1e-3) == pytest.approx(counted["rows"][command] * positions * 4 / 1000)
    assert seconds(1e9, 1e-3) == pytest.approx(seconds(1e9, 0.0) + seconds(1e30, 1e-3))


def test_the_start_is_a_part_of_the_time(monkeypatch):
    monkeypatch.setattr(expected, "computing_seconds", lambda *_, **__: 20.0)
    monkeypatch.setattr(expected.time, "process_time", lambda: 100.0)
    text = expected_cost("find-sinks", whole=False, device="cpu", alone=True)
    assert "take about 0:02:00 (hours, minutes, seconds) on cpu, of which 0:01:40 are the start" in text
    assert "take about 0:00:20" in expected_cost("find-sinks", whole=False, device="cpu")
