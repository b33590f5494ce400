"""Makes the golden files, with which an engine in any language can test its KV cache.

    python -m experiments.golden.make [--out experiments/golden]

`golden.npz` has the weights of two Llama models (as float16; every number is exact) and, for each case, token ids,
which positions of the prompt the cache keeps, and the logits that follow. `golden.json` has their configurations and
says what each case shows. `reader.py` reads both with numpy alone.

The first model is the tiny one of `sinkscope check-cache` with a planted sink, also with a window of 16 tokens. The
other is the recall model without noise, so that it compresses well. The logits come from PyTorch, from one pass in
which a mask hides what the cache no longer has.
"""

from __future__ import annotations

import io
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import MistralConfig, MistralForCausalLM

from experiments.make_recall import build
from experiments.record import Row
from experiments.script import run
from sinkscope.conformance.masked import plain_logits
from sinkscope.conformance.models import WINDOW, kit_ids, kit_model
from sinkscope.files.output import write_atomic

STEPS = 4


def tiny() -> Any:
    """The model with a planted sink, each weight a float16 number."""
    model = deepcopy(kit_model("grouped"))
    for weight in model.parameters():
        weight.copy_(weight.half().float())
    return model


def windowed(model: Any) -> Any:
    """The same weights after windows."""
    settings = {name: getattr(model.config, name) for name in CONFIG}
    config = MistralConfig(**settings, vocab_size=model.config.vocab_size, sliding_window=WINDOW)
    config.rope_parameters = model.config.rope_parameters
    other = MistralForCausalLM(config).eval()
    other.load_state_dict(model.state_dict())
    return other


CONFIG = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
)


def case(model: Any, ids: torch.Tensor, prompt: int, kept: list[int]) -> dict[str, np.ndarray]:
    """What follows a prompt of which only some positions are kept."""
    total = ids.shape[1]
    sees = torch.ones(1, model.config.num_key_value_heads, total, total, dtype=torch.bool)
    gone = [position for position in range(prompt) if position not in kept]
    sees[:, :, prompt:, gone] = False
    logits = plain_logits(model, ids, torch.ones_like(ids), dict.fromkeys(range(model.config.num_hidden_layers), sees))
    keep = np.zeros(prompt, bool)
    keep[kept] = True
    return {"ids": ids[0].numpy(), "keep": keep, "logits": logits[0, prompt:].numpy()}


def main(*, out: Path = Path("experiments/golden")) -> None:
    small = tiny()
    recall = build(noise=0.0, ordinary=0.0)
    ids = kit_ids("grouped", (40,), STEPS)
    plan: list[tuple[str, str, Any, torch.Tensor, int, list[int], str]] = [
        ("everything", "tiny", small, ids, 40, list(range(40)), "Nothing is evicted."),
        ("hole", "tiny", small, ids, 40, [*range(4), *range(32, 40)], "The middle is evicted; positions stay."),
        ("no-sink", "tiny", small, ids, 40, list(range(28, 40)), "The first tokens are lost: what not to do."),
        ("window", "tiny", windowed(small), ids, 40, list(range(40)), f"Each layer sees the latest {WINDOW} tokens."),
    ]
    for seed in (0, 4):
        question = kit_ids("recall", (65,), 3, seed)
        name, place = ("answer-before", "before") if seed == 0 else ("answer-behind", "behind")
        kept = [*range(12), *range(40, 65)]
        plan.append((name, "recall", recall, question, 65, kept, f"The fact stands {place} the hole."))
    arrays: dict[str, np.ndarray] = {}
    cases: list[Row] = []
    for name, model_name, model, tokens, prompt, kept, shows in plan:
        for part, array in case(model, tokens, prompt, kept).items():
            arrays[f"{name}/{part}"] = array
        window = getattr(model.config, "sliding_window", None)
        row: Row = {"name": name, "model": model_name, "prompt": prompt, "window": window, "shows": shows}
        if model_name == "recall":
            row["answer"] = tokens[0, prompt + 1 :].tolist()
        cases.append(row)
    models: Row = {}
    for name, model in (("tiny", small), ("recall", recall)):
        models[name] = {one: getattr(model.config, one) for one in CONFIG}
        models[name]["rope_theta"] = model.config.rope_parameters["rope_theta"]
        for path, weight in model.state_dict().items():
            arrays[f"{name}/{path}"] = weight.half().numpy()
    whole, lost = arrays["everything/logits"], arrays["no-sink/logits"]
    data = {"models": models, "cases": cases, "no_sink_error": float(np.abs(whole - lost).max())}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_atomic(out / "golden.npz", buffer.getvalue())
    write_atomic(out / "golden.json", json.dumps(data, indent=1) + "\n")
    print(f"{len(buffer.getvalue()):,} bytes, {len(cases)} cases")


if __name__ == "__main__":
    run(main)
