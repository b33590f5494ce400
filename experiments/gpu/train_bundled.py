"""Train the bundled model and its control on a GPU: the recipe of `experiments.train_bundled` with larger steps.

    python -m experiments.gpu.train_bundled --out DIR (--teacher FOLDER|NAME | --stories FILE) [--device cuda]

One command, unattended: samples the stories, trains with the planted circuit and without it, and measures both for
the card. An interrupted run goes on where it stopped. Afterwards `python -m experiments.bundled.card --planted
DIR/planted --unplanted DIR/unplanted` ships the model. Needs torch, transformers, tokenizers, jaxtyping; no
TransformerLens, no nnsight; the network only if the teacher is given by name.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiments import train_bundled
from experiments.bundled import card, stories
from experiments.bundled.training import SIZES
from experiments.script import run


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu.train_bundled", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for stories, checkpoints and results")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--teacher", help="folder or hub id of a model that writes stories")
    source.add_argument("--stories", type=Path, help="stories that were sampled already")
    parser.add_argument(
        "--story-tokens", type=int, default=40_000_000, help="stories to sample, in the teacher's tokens"
    )
    parser.add_argument("--story-rows", type=int, default=2048, help="stories that are sampled together")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--tokens-per-step", type=int, default=32_768)
    parser.add_argument("--size", choices=tuple(SIZES), default="base")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-loops", action="store_true", help="leave out the long generations of the card")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    told = args.stories
    if told is None:
        told = args.out / "stories.txt"
        sampling = ["--teacher", args.teacher, "--out", told, "--tokens", args.story_tokens, "--rows", args.story_rows]
        run(stories.main, [str(part) for part in [*sampling, "--seed", args.seed, "--device", args.device]])
    common = ["--stories", told, "--steps", args.steps, "--tokens-per-step", args.tokens_per_step, "--size", args.size]
    common += ["--seed", args.seed, "--device", args.device, "--resume"]
    for name, more in (("planted", ()), ("unplanted", ("--unplanted",))):
        train_bundled.main([str(part) for part in ["--out", args.out / name, *common, *more]])
        card.main(["--measure", str(args.out / name), *(["--no-loops"] if args.no_loops else [])])


if __name__ == "__main__":
    main()
