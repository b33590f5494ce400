"""A larger member of the bundled model's family: trained for a given time, then its sink, its loops and the guard.

    python -m experiments.gpu.family --size 120m --out FILE [--teacher MODEL] [--seconds 240] [--device cuda]

1. `corpus`: stories are sampled from a teacher (`experiments.bundled.stories`) unless they are given, beside what the
   recipe makes by itself. Sizes that are trained at the same time share it; it lies in the folder `corpus` beside FILE.
2. `train`: the recipe of `experiments.train_bundled` with steps of 16,384 tokens, as many as fit into the time.
3. `sink`: the neurons that `find-sinks` names; `right` says that they are the planted one.
4. `loops`: greedy answers of 1,000 tokens that loop, with and without the guard.

`experiments/gpu/measured/h100/family.json` has the same of 3.4 and 13 million parameters.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig

import sinkscope as ss
from experiments import train_bundled
from experiments.bundled.stories import main as sample_stories
from experiments.bundled.training import SIZES, Settings
from experiments.gpu.real import answers
from experiments.gpu.steps import Steps
from experiments.record import Row, read_rows
from experiments.script import run

TRAINED = 0.65  # share of the time that is left behind the corpus; the rest measures
AT_ONCE = 1 << 21  # tokens of the stories that are sampled at once, as long as they can be
SHARED = ("tokens.npz", "tokenizer.json", "tokenizer_config.json", "corpus.json")


def corpus(folder: Path, told: Path | None, teacher: str, tokens: int, device: str) -> Row:
    """Make the texts that all sizes learn, once."""
    folder.mkdir(parents=True, exist_ok=True)
    made_from = Path(told or teacher).name
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "tokens.npz").exists():
            if told is None:
                told = folder / "stories.txt"
                rows = AT_ONCE // int(AutoConfig.from_pretrained(teacher).max_position_embeddings)
                sample_stories(teacher=teacher, out=told, tokens=tokens, rows=rows, device=device)
            train_bundled.prepare(folder, Settings(), told)
    made = json.loads((folder / "corpus.json").read_text())
    return {"tokens": made["tokens"], "stories": made_from}


def train(texts: Path, out: Path, size: str, steps: int, tokens_per_step: int, seconds: float, device: str) -> Row:
    """Train a model on these texts for so long; its losses."""
    out.mkdir(parents=True, exist_ok=True)
    for name in SHARED:
        shutil.copy(texts / name, out)
    words = {"steps": steps, "tokens_per_step": tokens_per_step, "seconds": seconds, "device": device, "size": size}
    train_bundled.main(out=out, resume=True, **words)
    done = json.loads((out / "training.json").read_text())
    return {"steps": done["step"], "planned": steps, "log": read_rows(out / "log.jsonl")}


def sink(model: Path, device: str) -> Row:
    """The neurons that each spike needs; those of one spike have to be the planted ones."""
    found = json.loads(ss.find_sinks(str(model), device=device, dtype="float32").to_json())["result"]
    needed: list[list[list[int]]] = []
    for spike in found["spikes"]:
        neurons = (spike["needed"] or {"neurons": []})["neurons"]
        needed.append([[one["layer"], one["neuron"]] for one in neurons])
    planted = [[one["layer"], one["neuron"]] for one in json.loads((model / "circuit.json").read_text())["neurons"]]
    return {"needed": needed, "planted": planted, "right": planted in needed}


def loops(model: Path, out: Path, new: int, device: str) -> Row:
    """What answers are, by method."""
    words = f"bench --task loops:source=text --methods full,loopguard --batch-size 16 --max-new-tokens {new}".split()
    words += ["--model", str(model), "--device", device, "--dtype", "float32", "--out", str(out)]
    subprocess.run([sys.executable, "-m", "sinkscope", *words], check=True, stdout=sys.stderr)
    return dict(answers(out))


def main(
    *,
    out: Path,
    size: Literal[*SIZES],
    teacher: str = str(Path(ss.__file__).parent / "models/bundled"),
    stories: Path | None = None,
    story_tokens: int = 5_000_000,
    steps: int = 1250,
    tokens_per_step: int = 16_384,
    new: int = 1000,
    seconds: float = 600.0,
    device: str = "cuda",
) -> None:
    """Make what the module describes.

    Args:
        teacher: Model that writes the stories.
        stories: A file of stories instead, as `experiments.bundled.stories` writes it.
        story_tokens: Of all stories.
        steps: Most steps of the training.
        new: Tokens of an answer.
        seconds: Of everything.
    """
    begun = time.monotonic()
    settings: Row = {"size": size, "tokens_per_step": tokens_per_step, "new": new}
    measured = Steps("gpu-family", out, settings, device, "float32")
    texts, model = out.parent / "corpus", out.with_suffix("")
    measured.do("corpus", partial(corpus, texts, stories, teacher, story_tokens, device))
    left = TRAINED * max(0.0, begun + seconds - time.monotonic())
    measured.do("train", partial(train, texts, model, size, steps, tokens_per_step, left, device))
    torch.cuda.empty_cache()
    measured.do("sink", partial(sink, model, device))
    measured.do("loops", partial(loops, model, model / "answers", new, device))
    measured.end()


if __name__ == "__main__":
    run(main)
