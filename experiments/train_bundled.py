"""Train the bundled model.

`python -m experiments.train_bundled --stories FILE --out DIR [--size base] [--steps N] [--seed 0] [--unplanted]
[--resume]`

FILE holds stories as `python -m experiments.bundled.stories` writes them. The first steps read only random cycles, and
the others a mixture of stories, Python, generated passages and random cycles. The command writes checkpoint.pt (for
--resume), log.jsonl and the tokenizer into DIR, and at the end the model as in the package.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
import torch

from experiments.bundled import corpus, export
from experiments.bundled.passages import passages
from experiments.bundled.stories import read_stories
from experiments.bundled.training import SIZES, Settings, Trainer
from experiments.record import read_rows, write_rows
from experiments.script import run as run_script
from sinkscope.results.console import ProgressBar

PASSAGES = 12000


def prepare(out: Path, settings: Settings, stories: Path | None) -> dict[str, np.ndarray]:
    """Tokens of each kind of text, and of their validation part ("valid_python"); made once per folder."""
    kept = out / "tokens.npz"
    if kept.exists():
        return dict(np.load(kept))
    told = read_stories(stories) if stories else []
    if len(told) < 100:
        raise SystemExit("error: give --stories FILE with 100 stories or more: python -m experiments.bundled.stories")
    python, valid_python, sha256 = corpus.read_corpus()
    held = max(20, len(told) // 50)
    texts = {
        "python": python,
        "stories": told[held:],
        "passages": passages(settings.seed, PASSAGES, told[held:]),
        "valid_python": valid_python,
        "valid_stories": told[:held],
    }
    learned = [text for kind, part in texts.items() if not kind.startswith("valid") for text in part]
    tokenizer = corpus.train_tokenizer(learned, settings.vocab_size)
    export.save_tokenizer(tokenizer, out, settings.context)
    tokens = {kind: corpus.encode(tokenizer, part) for kind, part in texts.items()}
    about: dict[str, object] = {
        "sha256": sha256,
        "stories_sha256": hashlib.sha256("\0".join(told).encode()).hexdigest(),
        "python": platform.python_version(),
        "files": {kind: len(part) for kind, part in texts.items()},
        "tokens": {kind: len(ids) for kind, ids in tokens.items()},
    }
    (out / "corpus.json").write_text(json.dumps(about, indent=1) + "\n")
    np.savez(kept, **tokens)
    return tokens


def forget_after(log: Path, step: int) -> None:
    """Drop what was logged after the checkpoint: those steps are done again."""
    write_rows(log, [row for row in read_rows(log) if row["step"] <= step])


def main(
    *,
    out: Path,
    stories: Path | None = None,
    size: Literal[*SIZES] = "base",
    steps: int = Settings.steps,
    seed: int = 0,
    unplanted: bool = False,
    resume: bool = False,
    tokens_per_step: int = Settings.tokens_per_step,
    device: str = "cpu",
) -> None:
    """Make what the module describes.

    Args:
        out: Folder for checkpoint, log and result.
        stories: Stories, each followed by a line <|end|>.
        size: Which member of the family; base ships.
        unplanted: The same network and data without the circuit.
        resume: Go on from the checkpoint in --out.
        device: Training on a GPU is not the same from run to run.
    """
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        steps=steps,
        seed=seed,
        planted=not unplanted,
        tokens_per_step=tokens_per_step,
        **SIZES[size],
    )
    tokens = prepare(out, settings, stories)
    texts = {kind: ids for kind, ids in tokens.items() if not kind.startswith("valid")}
    trainer = Trainer(settings, texts, out, device)
    if resume and (out / "checkpoint.pt").exists():
        trainer.load()
        forget_after(out / "log.jsonl", trainer.step)
    started = time.monotonic()
    first_step = trainer.step
    recent: list[float] = []
    if trainer.plan:
        export.save_circuit(trainer.plan, out, settings.seed)
    with (out / "log.jsonl").open("a") as log, ProgressBar() as progress:

        def each(step: int, loss: float) -> None:
            recent.append(loss)
            progress(f"loss {loss:.3f}", step, steps)
            if step % 50 == 0 or step == first_step + 1:
                spent = round(time.monotonic() - started, 1)
                record = {"step": step, "loss": fmean(recent[-50:]), "seconds": spent}
                log.write(json.dumps(record) + "\n")
                log.flush()

        trainer.run(each)
    export.save_model(trainer.model.cpu(), out)
    done = {"settings": vars(settings), "step": trainer.step}
    (out / "training.json").write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main)
