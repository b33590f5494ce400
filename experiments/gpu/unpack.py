"""Write a GGUF file as a folder of full weights, which loads faster.

python -m experiments.gpu.unpack FILE FOLDER
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.script import run
from sinkscope.opening.load import load


def main(file: Path, folder: Path) -> None:
    """Make what the module describes.

    Args:
        file: The GGUF file.
        folder: A new folder.
    """
    model: Any = load(str(file), probe=False)
    model.hf_quantizer = None  # the weights are no longer quantised
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    run(main)
