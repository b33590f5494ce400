"""Is the time that `--dry-run` expects within a factor of two? Six shapes, each measured for real.

    python -m experiments.dry_run [--out figures/dry_run.json]

Some are planted checkpoints that are read layer by layer, with another width, depth or sink layer than the models on
which `experiments.passes` counted; others hold random weights and are loaded whole. The speed of the device is measured
before and after each run. All times are CPU time of one thread, so that other work on the machine does not count. The
control is the estimate that multiplies every parameter by every token of the bundled model, as if all experts and all
layers computed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, Qwen3MoeConfig
from transformers.utils import logging

import sinkscope as ss
from experiments.make_shape import SHAPES, make_plan, write
from experiments.record import record
from sinkscope.app.expected import layer_positions, size_of, speed
from sinkscope.files.output import write_atomic
from tests.organisms.decoders import byte_tokenizer

PLANTED: dict[str, tuple[tuple[int, ...], int, float]] = {  # sizes, layer of the sink, beta
    "Llama, 12 layers x 1024": ((1024, 2816, 12, 16, 16, 8000, 2048), 2, 2.0),
    "Llama, 24 layers x 768": ((768, 2048, 24, 12, 12, 8000, 4096), 3, 3.0),
    "Llama, 32 layers x 512": ((512, 1408, 32, 8, 8, 8000, 2048), 1, 2.5),
}
RANDOM: dict[str, Any] = {
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


def cpu_speed(width: int, rows: int) -> float:
    """As `speed`, by CPU time."""
    started, busy = time.perf_counter(), time.process_time()
    rate = speed(torch.device("cpu"), torch.float32, width, rows)
    return rate * (time.perf_counter() - started) / (time.process_time() - busy)


def measured(command: str, function: Any, model: str | None, config: Any, *, whole: bool) -> dict[str, Any]:
    """Expected and real seconds of one run."""
    size = size_of(config, torch.float32)
    before = cpu_speed(size.width, size.rows)
    started = time.process_time()
    function(model)
    real = time.process_time() - started
    rate = statistics.mean((before, cpu_speed(size.width, size.rows)))
    computing = size.computing if whole else size.layers_computing
    positions = layer_positions(command, size.layers) or 0
    expected = 2 * computing * positions / size.layers / rate
    control = 2 * size.parameters * BEFORE[command] / rate
    ratios = {"ratio": round(expected / real, 2), "control": round(control / real, 2)}
    return {"command": command, "expected": round(expected, 2), "seconds": round(real, 2), **ratios}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures/dry_run.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    started = time.perf_counter()
    bundled = AutoConfig.from_pretrained(Path(ss.__file__).parent / "models/bundled")
    runs = {"bundled": measured("find-sinks", ss.find_sinks, None, bundled, whole=False)}
    print(runs, flush=True)
    commands = {"find-sinks": ss.find_sinks, "repeat": ss.repeat, "heads": ss.marking_heads}
    for (name, (sizes, layer, beta)), command in zip(PLANTED.items(), commands, strict=True):
        SHAPES["planted"] = sizes
        with tempfile.TemporaryDirectory() as folder:
            write(make_plan("planted", layer, 0, None, beta), Path(folder), "float32", "planted")
            config = AutoConfig.from_pretrained(folder)
            runs[name] = measured(command, commands[command], folder, config, whole=False)
        print(name, runs[name], flush=True)
    for name, config in RANDOM.items():
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            byte_tokenizer().save_pretrained(folder)
            runs[name] = measured("lines", ss.line_weights, folder, config, whole=True)
        print(name, runs[name], flush=True)
    write_atomic(args.out, record("dry-run", {"runs": runs}, {}, started=started))


if __name__ == "__main__":
    main()
