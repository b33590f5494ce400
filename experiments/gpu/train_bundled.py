"""Train the bundled model and its control on a GPU: the recipe of `experiments.train_bundled` with larger steps.

    python -m experiments.gpu.train_bundled --out DIR --stories FILE [--size base] [--device cuda]

One command, unattended: trains with the planted circuit and without it on stories that `experiments.bundled.stories`
sampled, and measures both for the card. An interrupted run goes on where it stopped. Afterwards `python -m
experiments.bundled.card --planted DIR/planted --unplanted DIR/unplanted` ships the model. Needs torch, transformers,
tokenizers, jaxtyping; no TransformerLens, no nnsight, no network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from experiments import train_bundled
from experiments.bundled import card
from experiments.bundled.training import SIZES
from experiments.script import run


def main(
    *,
    out: Path,
    stories: Path,
    steps: int = 8000,
    tokens_per_step: int = 32_768,
    size: Literal[*SIZES] = "base",
    seed: int = 0,
    device: str = "cuda",
    no_loops: bool = False,
) -> None:
    """Make what the module describes.

    Args:
        out: Folder for checkpoints and results.
        no_loops: Leave out the long generations of the card.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in ("planted", "unplanted"):
        train_bundled.main(
            out=out / name,
            stories=stories,
            size=size,
            steps=steps,
            seed=seed,
            unplanted=name == "unplanted",
            resume=True,
            tokens_per_step=tokens_per_step,
            device=device,
        )
        card.main(measure=out / name, no_loops=no_loops)


if __name__ == "__main__":
    run(main)
