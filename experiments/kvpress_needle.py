r"""Runs presses of kvpress, in their own environment, and adds their answers to a needle map.

    sinkscope bench --task needle --model recall-2hop --methods full --out MAP
    python -c "import sinkscope as ss; m = ss.load('recall-2hop', backend='hf'); \
        m.save_pretrained('MODEL'); m.tokenizer.save_pretrained('MODEL')"
    python -m venv KVPRESS && KVPRESS/bin/pip install kvpress==0.5.5 torch==2.13.0
    KVPRESS/bin/python experiments/kvpress_needle.py --map MAP --model MODEL --presses SnapKV,TOVA
    sinkscope bench table MAP

kvpress needs a different release of transformers, so the two never share a process: this script imports
nothing of sinkscope. It answers the prompts of a map's folder under each press and adds the answers to it, so the last
command shows them beside the other methods. Existing answers are not computed again. Use the same options of model and
prompts for the map and for this script.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any


def answers(folder: Path, model: Path, presses: list[str], budget: float) -> None:
    """Add the answers under some presses to the folder of a map.

    Args:
        folder: what `sinkscope bench --task needle` was given as --out.
        model: folder with the weights and the tokenizer of its model.
        presses: classes of kvpress that take a `compression_ratio`, without "Press" at the end.
        budget: share of the prompt that stays in the cache.
    """
    import kvpress
    import torch
    from filelock import FileLock
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    settings = json.loads((folder / "settings.json").read_text())
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    runs = folder / "runs.jsonl"
    with FileLock(folder / "lock", blocking=False), runs.open("a") as out:
        done = {(r["method"], r["prompt"]) for r in map(json.loads, runs.read_text().splitlines())}
        for name in presses:
            method = f"kvpress:{name}:budget={budget}"
            for prompt in prompts:
                if (method, prompt["id"]) in done:
                    continue
                said = _answer(
                    hf, tokenizer, getattr(kvpress, f"{name}Press")(compression_ratio=1 - budget), prompt, settings
                )
                about = {"set": prompt["set"], "part": prompt["part"], "temperature": 0.0, **prompt["about"]}
                key = {
                    "model": settings["model"]["fingerprint"],
                    "task": "needle",
                    "method": method,
                    "turn": 0,
                    "seed": 0,
                }
                out.write(json.dumps({**key, "settings": about, **said}) + "\n")
                out.flush()
                os.fsync(out.fileno())


def _answer(hf: Any, tokenizer: Any, press: Any, prompt: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """A record of `sinkscope.bench.record.BenchRecord` but for its key and settings."""
    started = time.perf_counter()
    inputs = tokenizer(prompt["turns"][0]["text"], return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    options = {"max_new_tokens": settings["max_new_tokens"], "do_sample": False, "return_dict_in_generate": True}
    with press(hf):
        made = hf.generate(**inputs, **options)
    tokens = made.sequences[0, length:].tolist()
    held = [layer.keys.shape[2] for layer in made.past_key_values.layers]  # at the last step
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    answers = prompt["turns"][0]["answers"]
    metrics = {
        "score": sum(answer.lower() in text.lower() for answer in answers) / len(answers),
        "chance": None,
        "prompt_tokens": length,
        "length": len(tokens),
        "read": sum(held) / len(held) - len(tokens) / 2 + 1,
        "cells": None,
        "cached_peak": None,
        "seconds": round(time.perf_counter() - started, 3),
    }
    return {
        "prompt": prompt["id"],
        "metrics": metrics,
        "tokens": tokens,
        "text": text,
        "ended": "eos" if tokens[-1] == hf.config.eos_token_id else "cap",
        "events": [],
        "steps": {},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--map", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--presses", default="SnapKV,TOVA")
    parser.add_argument("--budget", type=float, default=0.125)
    given = parser.parse_args()
    answers(given.map, given.model, given.presses.split(","), given.budget)


if __name__ == "__main__":
    main()
