"""Is the time that `--dry-run` expects within a factor of two? Six shapes, each measured for real.

    python -m experiments.dry_run [--out figures/dry_run.json]

Some are planted checkpoints that are read layer by layer, with another width, depth or sink layer than the models on
which `experiments.passes` counted; others hold random weights and are loaded whole. Commands run as users run them, in
a process of their own. What is expected is the start that their `--dry-run` prints and the seconds it computes, both in
CPU time of one thread like the real seconds, so that other work on the machine does not count. The start is alike in
all commands, so what is beside it is compared, too. The control is the estimate of that time that multiplies every
parameter by every token of the bundled model, as if all experts and all layers computed, and nothing else took time.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, Qwen3MoeConfig
from transformers.utils import logging

import sinkscope as ss
from experiments.make_shape import SHAPES, make_plan, write
from experiments.record import Row, record
from experiments.script import run as run_script
from sinkscope.app.expected import computing_seconds, size_of, speed
from sinkscope.files.output import write_atomic
from tests.organisms.decoders import byte_tokenizer

CLOCK = re.compile(r"of which 0:(\d\d):(\d\d) are the start")
PLANTED: dict[str, tuple[tuple[int, ...], int, float]] = {  # sizes, layer of the sink, beta
    "Llama, 12 layers x 1024": ((1024, 2816, 12, 16, 16, 8000, 2048), 2, 2.0),
    "Llama, 24 layers x 768": ((768, 2048, 24, 12, 12, 8000, 4096), 3, 3.0),
    "Llama, 32 layers x 512": ((512, 1408, 32, 8, 8, 8000, 2048), 1, 2.5),
}
RANDOM: Row = {
    "GPT-2": GPT2Config(),
    "Qwen3 mixture, 8 of 64 experts": Qwen3MoeConfig(
        hidden_size=768,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        moe_intermediate_size=256,
        num_experts=64,
        num_experts_per_tok=8,
        vocab_size=8000,
        eos_token_id=1,
    ),
}
BEFORE = {
    "find-sinks": 8405,
    "repeat": 1964,
    "heads": 2133,
    "lines": 2189,
}  # tokens of the bundled model, for the control


def command_line(*words: str) -> tuple[str, float]:
    """What a command prints, and the CPU seconds that it takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = [sys.executable, "-m", "sinkscope", *words]
    printed = subprocess.run(
        run, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return printed.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(command: str, model: str, config: Any, *, whole: bool) -> Row:
    """Expected and real seconds of one run."""
    size = size_of(config, torch.float32)
    cpu = torch.device("cpu")
    printed, _ = command_line(command, "--model", model, "--dry-run", "--device", "cpu")
    minutes, seconds = CLOCK.search(printed).groups()
    start = 60 * int(minutes) + int(seconds)
    computing = computing_seconds(command, size, cpu, torch.float32, whole=whole, clock=time.process_time) or 0
    rate = speed(cpu, torch.float32, size.width, size.rows, time.process_time)
    _, real = command_line(command, "--model", model, "--device", "cpu")
    return {
        "command": command,
        "start": start,
        "expected": round(start + computing, 2),
        "seconds": round(real, 2),
        "ratio": round((start + computing) / real, 2),
        "ratio_beside_start": round(computing / (real - start), 2),
        "control": round(2 * size.parameters * BEFORE[command] / rate / (real - start), 2),
    }


def main(*, out: Path = Path("figures/dry_run.json")) -> None:
    """Make what the module describes."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    started = time.perf_counter()
    bundled = Path(ss.__file__).parent / "models/bundled"
    runs = {"bundled": measured("find-sinks", str(bundled), AutoConfig.from_pretrained(bundled), whole=False)}
    print(runs, flush=True)
    for (name, (sizes, layer, beta)), command in zip(PLANTED.items(), BEFORE, strict=False):
        SHAPES["planted"] = sizes
        with tempfile.TemporaryDirectory() as folder:
            write(make_plan("planted", layer, 0, None, beta), Path(folder), "float32", "planted")
            runs[name] = measured(command, folder, AutoConfig.from_pretrained(folder), whole=False)
        print(name, runs[name], flush=True)
    for name, config in RANDOM.items():
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            byte_tokenizer().save_pretrained(folder)
            runs[name] = measured("lines", folder, config, whole=True)
        print(name, runs[name], flush=True)
    write_atomic(out, record("dry-run", {"runs": runs}, {}, started=started))


if __name__ == "__main__":
    run_script(main)
