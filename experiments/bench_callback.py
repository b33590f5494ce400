"""What `SinkCallback` costs: the time of training with and without it, side by side in one run.

    python -m experiments.bench_callback --out figures/bench_callback.json [--rounds 2] [--steps 6] [--every 3]

Each row trains the network of the bundled model with so many tokens a step, in turn with and without the callback; the
first round only warms up. So that the cost shows above the noise, the callback measures far more often than a user
would: what one measurement takes is the difference over the number of measurements, and the share of the time of
training at an interval follows from it. Times are processor times, and the shortest of all rounds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import sinkscope as ss
from experiments.record import Row, write_record
from experiments.script import run
from experiments.timing import interleaved, seconds_of
from sinkscope.measure import typical_text
from sinkscope.models.text import text_rows

INTERVAL = 500  # of the callback by default
SIZES = ("8x64", "8x128", "8x512")  # rows and tokens of a step


def collated(rows: Sequence[tuple[torch.Tensor]]) -> Row:
    """A batch of texts, which are their own labels."""
    ids = torch.stack([row[0] for row in rows])
    return {"input_ids": ids, "labels": ids}


def trainer_of(batch: int, length: int, steps: int, every: int | None, folder: str) -> Trainer:
    """A Trainer of a new model, with the callback if there is an interval."""
    bundled: Any = ss.load()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(bundled.config)
    ids = text_rows(bundled.tokenizer, typical_text(), batch, length, bundled.config.bos_token_id)
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=len(ids),
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    options: Row = {"data_collator": collated, "processing_class": bundled.tokenizer}
    trainer = Trainer(model, arguments, train_dataset=TensorDataset(ids), **options)
    if every is not None:
        trainer.add_callback(ss.SinkCallback(trainer, every))
    return trainer


def compared(size: str, steps: int, every: int, rounds: int) -> Row:
    """Processor seconds of training without and with the callback, and what follows for the default interval."""
    batch, length = map(int, size.split("x"))
    with tempfile.TemporaryDirectory() as folder:

        def trained(interval: int | None) -> float:
            trainer = trainer_of(batch, length, steps, interval, folder)
            return seconds_of(trainer.train, time.process_time)[0]

        seconds = interleaved({"without": partial(trained, None), "with": partial(trained, every)}, rounds)
    shortest = {name: min(times) for name, times in seconds.items()}
    measurements = 1 + steps // every
    measurement = (shortest["with"] - shortest["without"]) / measurements
    step = shortest["without"] / steps
    return {
        "size": size,
        **shortest,
        "measurement": measurement,
        "step": step,
        "steps_per_measurement": measurement / step,
        "share": measurement / step / INTERVAL,
    }


def main(
    *,
    rounds: int = 2,
    steps: int = 6,
    every: int = 3,
    sizes: Sequence[str] = SIZES,
    out: Path = Path("figures/bench_callback.json"),
) -> None:
    """Make what the module describes."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    for size in sizes:
        rows.append(compared(size, steps, every, rounds))
    settings = {"rounds": rounds, "steps": steps, "every": every, "interval": INTERVAL}
    write_record(out, "bench-callback", {"rows": rows}, settings)


if __name__ == "__main__":
    run(main)
