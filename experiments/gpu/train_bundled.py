"""Train the bundled model and its control on a GPU: the recipe of `experiments.train_bundled` with larger steps.

    python -m experiments.gpu.train_bundled --out DIR (--teacher FOLDER|NAME | --stories FILE) [--device cuda]

One command, unattended: samples the stories, trains with the planted circuit and without it, and measures both for
the card. An interrupted run goes on where it stopped. Afterwards `python -m experiments.bundled.card --planted
DIR/planted --unplanted DIR/unplanted` ships the model. Needs torch, transformers, tokenizers, jaxtyping; no
TransformerLens, no nnsight; the network only if the teacher is given by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from experiments import train_bundled
from experiments.bundled import card
from experiments.bundled import stories as sampling
from experiments.bundled.training import SIZES
from experiments.script import run
from sinkscope.errors import SinkscopeError


def main(
    *,
    out: Path,
    teacher: str | None = None,
    stories: Path | None = None,
    story_tokens: int = 40_000_000,
    story_rows: int = 2048,
    steps: int = 8000,
    tokens_per_step: int = 32_768,
    size: Literal[*SIZES] = "base",
    seed: int = 0,
    device: str = "cuda",
    no_loops: bool = False,
) -> None:
    """Make what the module describes.

    Args:
        out: Folder for stories, checkpoints and results.
        teacher: Folder or hub id of a model that writes stories.
        stories: Stories that were sampled already.
        story_tokens: Stories to sample, in the teacher's tokens.
        story_rows: Stories that are sampled together.
        no_loops: Leave out the long generations of the card.
    """
    if (teacher is None) == (stories is None):
        raise SinkscopeError("give either --teacher or --stories")
    out.mkdir(parents=True, exist_ok=True)
    if teacher is not None:
        stories = out / "stories.txt"
        sampling.main(teacher=teacher, out=stories, tokens=story_tokens, rows=story_rows, seed=seed, device=device)
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
