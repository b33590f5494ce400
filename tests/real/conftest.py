"""Two real language models, as fixtures: GGUF files in the folder that the variable SINKSCOPE_REAL names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class RealModel:
    """A model as transformers loads it, in float32."""

    model: Any
    tokenizer: Any


def real(name: str) -> RealModel:
    folder = os.environ.get("SINKSCOPE_REAL")
    if not folder or not Path(folder, name).is_file():
        pytest.skip(f"SINKSCOPE_REAL names no folder with {name}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype="float32").eval()
    return RealModel(model, AutoTokenizer.from_pretrained(folder, gguf_file=name))


@pytest.fixture(scope="session")
def smollm2() -> RealModel:
    return real("smollm2-135m.gguf")


@pytest.fixture(scope="session")
def gemma3() -> RealModel:
    return real("gemma3-270m.gguf")
