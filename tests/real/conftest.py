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
    if not folder or not Path(folder).is_dir():
        pytest.skip(f"SINKSCOPE_REAL names no folder with {name}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if Path(folder, Path(name).stem).is_dir():  # the same model as a folder, which is read faster
        folder, where = str(Path(folder, Path(name).stem)), {}
    else:
        where = {"gguf_file": name}
    model = AutoModelForCausalLM.from_pretrained(folder, **where, dtype="float32").eval()
    return RealModel(model, AutoTokenizer.from_pretrained(folder, **where))


@pytest.fixture(scope="session")
def smollm2() -> RealModel:
    return real("smollm2-135m.gguf")


@pytest.fixture(scope="session")
def gemma3() -> RealModel:
    return real("gemma3-270m.gguf")
