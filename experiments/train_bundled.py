"""Train the bundled model.

`python -m experiments.train_bundled --out DIR [--size base] [--steps N] [--seed 0] [--unplanted] [--resume]`

Writes into DIR: checkpoint.pt (for --resume), log.jsonl, tokenizer, and at the end the model as it ships.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.bundled import corpus, export, facts, measure
from experiments.bundled.training import SIZES, Settings, Trainer


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.train_bundled", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint, log and result")
    parser.add_argument("--size", choices=tuple(SIZES), default="base", help="which member of the family; base ships")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unplanted", action="store_true", help="the same network and data without the circuit")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--until", type=int, help="stop at this step (resume later)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--health-every", type=int, default=250)
    return parser.parse_args(argv)


def prepare(out: Path, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation tokens; made once per folder."""
    kept = out / "tokens.npz"
    if kept.exists():
        data = np.load(kept)
        return data["train"], data["valid"]
    text = corpus.read_corpus()
    tokenizer = corpus.train_tokenizer(text.train, settings.vocab_size)
    export.save_tokenizer(tokenizer, out, settings.context)
    train, valid = corpus.encode(tokenizer, text.train), corpus.encode(tokenizer, text.valid)
    about: dict[str, object] = {
        "sha256": text.sha256,
        "python": platform.python_version(),
        "files": {"train": len(text.train), "valid": len(text.valid)},
        "characters": text.characters,
        "tokens": {"train": len(train), "valid": len(valid)},
    }
    (out / "corpus.json").write_text(json.dumps(about, indent=1) + "\n")
    np.savez(kept, train=train, valid=valid)
    return train, valid


def health(trainer: Trainer, valid: np.ndarray) -> dict[str, object]:
    """What is watched while training: loss on a little validation text, and whether the sink is still there."""
    model, plan = trainer.model, trainer.plan
    model.eval()
    ids = corpus.windows(valid, length=512, bos_id=trainer.bos_id)
    layer = plan.sink_layer if plan else 1
    norms = measure.norms_by_layer(model, ids[:4])
    record: dict[str, object] = {
        "valid_loss": measure.validation_loss(model, ids[:24]),
        "ratio": [round(r, 2) for r in norms["ratio"]],
        "first": [round(r, 1) for r in norms["first_token_norm"]],
        "typical": [round(r, 1) for r in norms["typical_norm"]],
        "head_share": measure.head_share(model, ids[:4], after=layer),
    }
    if plan:
        tokens = [next(i for i, g in enumerate(plan.group_of_token) if g == group and i > 300) for group in (1, 2, 3)]
        found = [measure.repeats(model, t, bos_id=trainer.bos_id, layer=layer, most=1500) for t in tokens]
        record["repeats"] = found
    model.train()
    return record


def forget_after(log: Path, step: int) -> None:
    """Drop what was logged after the checkpoint: those steps are done again."""
    kept = [line for line in log.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= step]
    log.write_text("".join(kept))


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(steps=args.steps, seed=args.seed, planted=not args.unplanted, **SIZES[args.size])
    train, valid = prepare(args.out, settings)
    trainer = Trainer(settings, train, args.out)
    if args.resume and (args.out / "checkpoint.pt").exists():
        trainer.load()
        forget_after(args.out / "log.jsonl", trainer.step)
    started, first_step, recent = time.monotonic(), trainer.step, [0.0]
    if trainer.plan:
        export.save_circuit(trainer.plan, args.out, settings.seed)
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        (args.out / "log.jsonl").open("a") as log,
        Progress(*columns, console=console, disable=not sys.stderr.isatty()) as bar,
    ):
        task = bar.add_task("training", total=settings.steps, completed=trainer.step)

        def each(step: int, loss: float) -> None:
            recent.append(loss)
            bar.update(task, completed=step, description=f"loss {loss:.3f}")
            if step % 50 == 0 or step == first_step + 1:
                record: dict[str, object] = {"step": step, "loss": sum(recent[-50:]) / len(recent[-50:])}
                record["seconds"] = round(time.monotonic() - started, 1)
                if step % args.health_every == 0 or step == settings.steps:
                    record |= health(trainer, valid)
                log.write(json.dumps(record) + "\n")
                log.flush()

        if trainer.step == 0:
            log.write(json.dumps({"step": 0, "settings": vars(settings)} | health(trainer, valid)) + "\n")
            log.flush()
        recent.clear()
        trainer.run(until=args.until, each=each)
    export.save_model(trainer.model, args.out)
    done = {"settings": vars(settings), "step": trainer.step, "versions": facts.versions(), "threads": args.threads}
    (args.out / "training.json").write_text(json.dumps(done, indent=1) + "\n")
    print(f"step {trainer.step} of {settings.steps}, {time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
