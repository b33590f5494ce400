"""When an alarm comes: on loops that real models wrote, and on answers that repeat because they should.

    python -m experiments.loopguard.alarms WORK [WORK ...] --model FOLDER [--out figures/loopguard_alarms.json]

The loops are the outputs "full" of `experiments.loopguard.real`; the honest answers are in `honest_answers`. For each
half and setting of the monitor: alarms on honest answers, and on outputs whose end is an exact loop that had gone on
for 64 tokens behind its third copy; and the tokens between the end of the third copy and the alarm. At last, the mean
of the largest probability of the next token behind the third copy (the paper's p1), in loops and in honest answers.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.loopguard.honest_answers import honest_answers
from experiments.loopguard.real import FULL
from experiments.loopguard.real_openings import HALVES
from experiments.loopguard.real_table import interval
from experiments.record import Row, read_rows, record
from experiments.script import run
from sinkscope.files.output import write_atomic
from sinkscope.loops import MonitorSettings, Tail, tail_period
from sinkscope.loops.guard.detect import largest_probability, monitors
from sinkscope.loops.text.counters import asked_copies
from sinkscope.loops.text.repetition import TailRepetition

BEHIND = 64  # tokens behind the third copy within which an alarm should come
COPIES = MonitorSettings(tail_beyond=0, counter_tokens=1 << 20)
SETTINGS = {
    "48 tokens, three copies": COPIES,
    **{
        f"{beyond} tokens beyond two copies": MonitorSettings(tail_beyond=beyond, counter_tokens=1 << 20)
        for beyond in (32, 64, 128)
    },
    **{f"64 beyond, counters of {least}": MonitorSettings(counter_tokens=least) for least in (128, 256, 384)},
}


def first_alarm(settings: MonitorSettings, tokenizer: Any, ids: Sequence[int], prompt: str) -> tuple[int, Tail] | None:
    """Return the number of the token at which the monitor fires, and the repetition; None if it does not."""
    monitor = monitors(settings, tokenizer)()
    monitor.asked = asked_copies(prompt)
    for number, token in enumerate(ids, 1):
        step = monitor.update(token)
        if step.trigger and step.tail is not None:
            return number, step.tail
    return None


def measured(settings: MonitorSettings, tokenizer: Any, half: str, outputs: Sequence[Row]) -> Row:
    """What a setting finds in the honest answers and the outputs of a half."""
    fired: list[str] = []
    answers = honest_answers(half)
    for answer in answers:
        if first_alarm(settings, tokenizer, tokenizer(answer.answer)["input_ids"], answer.prompt) is not None:
            fired.append(answer.form)
    leads: list[int] = []
    missed = found = counters = 0
    for output in outputs:
        alarm = first_alarm(settings, tokenizer, output["tokens"], "")
        tail = tail_period(output["tokens"], repeats=3, shortest=24)
        exact = tail is not None and len(output["tokens"]) - tail.start >= 3 * tail.period + BEHIND
        missed += exact and alarm is None
        found += exact and alarm is not None
        if alarm is None:
            continue
        if alarm[1].exact:
            leads.append(alarm[0] - alarm[1].start - 3 * alarm[1].period)
        else:
            counters += 1
    return {
        "honest": len(answers),
        "honest_fired": fired,
        "honest_interval": interval(len(fired), len(answers)),
        "loops": found + missed,
        "found": found,
        "found_interval": interval(found, found + missed),
        "counters": counters,
        "lead_median": statistics.median(leads) if leads else None,
        "lead_most": max(leads, default=None),
    }


def behind(ids: Sequence[int], probabilities: Sequence[float]) -> float | None:
    """The mean of the probabilities over up to 64 tokens behind the third copy of a repetition of 12 tokens or more.

    Returns:
        None if there is no repetition, or fewer than 16 tokens behind it.
    """
    repetition = TailRepetition(2048, 3, 12)
    for number, token in enumerate(ids, 1):
        if repetition.add(token) is not None:
            there = probabilities[number : number + BEHIND]
            return statistics.fmean(there) if len(there) >= 16 else None
    return None


@torch.no_grad()
def of_honest(model: Any, tokenizer: Any, half: str) -> list[float]:
    """What the model makes of honest answers behind their third copy."""
    means: list[float] = []
    for answer in honest_answers(half):
        prompt, ids = tokenizer(answer.prompt)["input_ids"], tokenizer(answer.answer)["input_ids"]
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        mean = behind(ids, largest_probability(logits).tolist())
        if mean is not None:
            means.append(mean)
    return means


def main(works: Sequence[Path], *, model: Path, out: Path = Path("figures/loopguard_alarms.json")) -> None:
    """Make what the module describes.

    Args:
        works: Folders with a runs.jsonl, of one model.
        model: Its folder.
        out: The JSON.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    outputs: list[Row] = []
    for work in works:
        for one in read_rows(work / "runs.jsonl"):
            if one["arm"] == FULL and one["model"] == model.name:
                outputs.append(one)
    result: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        for half in HALVES:
            of_half = [one for one in outputs if one["half"] == half]
            result[f"{name}, {half}"] = measured(settings, tokenizer, half, of_half)
            print(name, half, json.dumps(result[f"{name}, {half}"]))
    sure: dict[str, list[float]] = {"honest": [], "loops": []}
    for half in HALVES:
        sure["honest"] += of_honest(loaded, tokenizer, half)
    for one in outputs:
        if tail_period(one["tokens"], repeats=3, shortest=24) is None:
            continue
        mean = behind(one["tokens"], one["largest"])
        if mean is not None:
            sure["loops"].append(mean)
    result["largest probability"] = {}
    for kind, means in sure.items():
        tenth, half, ninth = np.quantile(means, [0.1, 0.5, 0.9]).round(4).tolist()
        result["largest probability"][kind] = {"texts": len(means), "low": tenth, "median": half, "high": ninth}
    print(json.dumps(result["largest probability"]))
    write_atomic(out, record("loopguard-alarms", result, {"model": model.name}))


if __name__ == "__main__":
    run(main)
