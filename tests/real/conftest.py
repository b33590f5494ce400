"""Two real language models, as fixtures: GGUF files in the folder that the environment variable SINKSCOPE_REAL names.

`python -m experiments.real.models FOLDER` fetches both.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

from experiments.real.models import MODELS, check, opened, saved
from sinkscope.errors import SinkscopeError

GET = "python -m experiments.real.models FOLDER fetches it; then set SINKSCOPE_REAL=FOLDER"


def real(name: str) -> SimpleNamespace:
    """A model as it was measured, or a skipped test with one line that says what is missing.

    It has the GGUF file, the same as a folder of safetensors, which loads in a second, and the Hugging Face model of
    this folder, in float32, with its tokenizer.
    """
    folder = os.environ.get("SINKSCOPE_REAL")
    path = Path(folder or "", MODELS[name].file).absolute()
    if not folder or not path.is_file():
        pytest.skip(f"SINKSCOPE_REAL names no folder with {MODELS[name].file}: {GET}")
    try:
        check(MODELS[name], path)
    except SinkscopeError as error:
        pytest.skip(str(error))
    pytest.importorskip("gguf")
    with FileLock(path.with_suffix(".lock")):  # one process reads the file, and others what it wrote
        model = opened(name, path.parent)
    return SimpleNamespace(path=path, folder=saved(name, path.parent), model=model, tokenizer=model.tokenizer)


@pytest.fixture(scope="session")
def smollm2() -> SimpleNamespace:
    """SmolLM2-135M-Instruct: Llama, 30 layers, 9 heads, 3 kv heads; its tokenizer adds no BOS."""
    return real("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> SimpleNamespace:
    """Gemma-3-270M: 18 layers, 4 heads, 1 kv head, windows of 512, a norm behind each MLP; its tokenizer adds BOS."""
    return real("gemma3")
