"""A small model, prompts, and records made by hand for the tests of the benchmark."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from organisms.tiny import tiny_model

from sinkscope.bench.methods import read_method
from sinkscope.bench.record import COMMAND, VERSION, BenchRecord, Prompt, Turn

WORDS = "the cat is in a box and it is so that no one can see what we do now or then if you may be my own new".split()
MODEL = {"name": "tiny", "family": "llama", "n_layers": 3, "d_model": 32, "d_mlp": 64, "fingerprint": "f00"}
SETTINGS = {"command": COMMAND, "version": VERSION, "model": MODEL, "task": "file", "chat": False}
SETTINGS |= {"device": "cpu", "dtype": "float32", "attention": "sdpa"}


@cache
def tiny() -> tuple[Any, Any]:
    """A random Llama whose attention tells tokens apart, and its tokenizer."""
    torch.manual_seed(0)
    model, tokenizer = tiny_model("llama", num_hidden_layers=2)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 8
        layer.self_attn.k_proj.weight.data *= 8
    model.lm_head.weight.data *= 4
    return model, tokenizer


def words(count: int, shift: int = 0) -> str:
    """Some words of the tokenizer."""
    return " ".join(WORDS[(7 * i + shift) % len(WORDS)] for i in range(count))


def dialogues(count: int = 2) -> tuple[Prompt, ...]:
    """Prompts of two turns of different lengths."""
    prompts = []
    for number in range(count):
        asked = [Turn(words(20 + 6 * number + turn, turn), (words(3, number),)) for turn in range(2)]
        prompts.append(Prompt(f"d{number}", tuple(asked), "file"))
    return tuple(prompts)


def made_record(method: str = "full", prompt: str = "p0", **changes) -> BenchRecord:
    """A record made by hand."""
    metrics = {"score": 1.0, "read": 9.0, "cells": None, "cached_peak": 10.0, "seconds": 1.0}
    about: dict[str, Any] = {"method": read_method(method), "prompt": prompt, "turn": 0, "seed": 0, "set": "s"}
    record = BenchRecord(**about, metrics=metrics, tokens=(1, 2), text="text", ended="cap")
    return replace(record, **changes | {"metrics": metrics | changes.get("metrics", {})})
