"""Two real language models, as fixtures: GGUF files in the folder that the environment variable SINKSCOPE_REAL names.

`python -m experiments.real.models FOLDER` fetches both.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from experiments.real.models import MODELS, check, opened, saved
from sinkscope.errors import SinkscopeError

GET = "python -m experiments.real.models FOLDER fetches it; then set SINKSCOPE_REAL=FOLDER"


@dataclass(frozen=True)
class RealModel:
    """A model as transformers loads it, in float32; `model.tokenizer` is its tokenizer, so that commands find it.

    Attributes:
        path: The GGUF file.
        model: The Hugging Face model, in eval mode.
        folder: The same model as a folder of safetensors, which loads in a second.
        n_layers, n_heads: Its sizes.
    """

    path: Path
    model: Any
    folder: Path

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    @property
    def n_layers(self) -> int:
        return self.model.config.num_hidden_layers

    @property
    def n_heads(self) -> int:
        return self.model.config.num_attention_heads


def real(name: str) -> RealModel:
    """A model as it was measured, or a skipped test with one line that says what is missing."""
    folder = os.environ.get("SINKSCOPE_REAL")
    if not folder:
        pytest.skip(f"SINKSCOPE_REAL names no folder with {MODELS[name].file}: {GET}")
    path = Path(folder, MODELS[name].file).absolute()
    if not path.is_file():
        pytest.skip(f"{path} is not there: {GET}")
    try:
        check(MODELS[name], path)
    except SinkscopeError as error:
        pytest.skip(str(error))
    pytest.importorskip("gguf")
    with FileLock(path.with_suffix(".lock")):  # one process reads the file, and others what it wrote
        model = opened(name, path.parent)
    return RealModel(path, model, saved(name, path.parent))


@pytest.fixture(scope="session")
def smollm2() -> RealModel:
    """SmolLM2-135M-Instruct: Llama, 30 layers, 9 heads, 3 kv heads; its tokenizer adds no BOS."""
    return real("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> RealModel:
    """Gemma-3-270M: 18 layers, 4 heads, 1 kv head, windows of 512, a norm behind each MLP; its tokenizer adds BOS."""
    return real("gemma3")
