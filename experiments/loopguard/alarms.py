"""When an alarm comes: on loops that real models wrote, and on answers that repeat because they should.

    python -m experiments.loopguard.alarms WORK [WORK ...] --models FILE ... [--out figures/loopguard_alarms.json]

The loops are the outputs "full" of `experiments.loopguard.real`; the honest answers are in `honest_answers`. For each
half and setting of the monitor: alarms on honest answers, and on outputs whose end is an exact loop that had gone on
for 64 tokens behind its third copy; and the tokens between the end of the third copy and the alarm. Then the mean of
the largest probability of the next token behind the third copy (the paper's p1), in loops and in honest answers. At
last, the counts of the paper's monitor over both halves, of which one threshold at a time is changed (appendix B).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.loopguard.honest_answers import honest_answers
from experiments.loopguard.real import FULL, first_alarm, outputs_of
from experiments.loopguard.real_openings import HALVES
from experiments.loopguard.real_table import interval, judged
from experiments.loopguard.variants import Ungated
from experiments.record import Row, write_record
from experiments.script import run
from sinkscope.loops import MonitorSettings, PaperSettings, Tail, tail_period
from sinkscope.loops.guard.detect import largest_probability
from sinkscope.loops.text.monitor import Settings
from sinkscope.loops.text.repetition import TailRepetition
from sinkscope.opening.load import load

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
CHANGED: dict[str, tuple[float, float]] = {
    "votes": (1, 3),
    "window": (64, 128),
    "theta_ttr": (0.1, 0.4),
    "theta_cr": (0.06, 0.24),
    "theta_conf": (0.8, 0.95),
    "streak": (3, 12),
    "theta_nov": (0.01, 0.04),
    "stall": (2, 8),
    "warmup": (32, 128),
}
"""Fields of the paper's monitor, halved or doubled one at a time."""

Text = tuple[list[int], list[float]]
"""The tokens of an answer, and the largest probability at each step."""


def loop_of(tokens: Sequence[int]) -> Tail | None:
    """The exact loop in which an output ends, if it had gone on for 64 tokens behind its third copy."""
    tail = tail_period(tokens, repeats=3, shortest=24)
    if tail is None or len(tokens) - tail.start < 3 * tail.period + BEHIND:
        return None
    return tail


def measured(settings: MonitorSettings, tokenizer: Any, half: str, outputs: Sequence[Row]) -> Row:
    """What a setting finds in the honest answers and the outputs of a half."""
    fired: list[str] = []
    answers = honest_answers(half)
    for answer in answers:
        if first_alarm(settings, tokenizer, tokenizer(answer.answer)["input_ids"], answer.prompt) is not None:
            fired.append(answer.form)
    leads: list[int] = []
    missed = found = 0
    for output in outputs:
        alarm = first_alarm(settings, tokenizer, output["tokens"], "")
        exact = loop_of(output["tokens"]) is not None
        missed += exact and alarm is None
        found += exact and alarm is not None
        if alarm is not None and alarm[1] is not None and alarm[1].exact:
            leads.append(alarm[0] - alarm[1].start - 3 * alarm[1].period)
    return {
        "honest": len(answers),
        "honest_fired": fired,
        "loops": found + missed,
        "found": found,
        "found_interval": interval(found, found + missed),
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
def honest_texts(model: Any, tokenizer: Any) -> list[Text]:
    """The honest answers of both halves, as the model reads them."""
    texts: list[Text] = []
    for half in HALVES:
        for answer in honest_answers(half):
            prompt, ids = tokenizer(answer.prompt)["input_ids"], tokenizer(answer.answer)["input_ids"]
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            texts.append((ids, largest_probability(logits).tolist()))
    return texts


def of_printed(settings: Settings, tokenizer: Any, outputs: Sequence[Row], honest: Sequence[Text]) -> Row:
    """What a setting of the paper's monitor finds: loops, and alarms on healthy outputs and honest answers."""
    row: Row = {"loops": 0, "found": 0, "healthy": 0, "healthy_fired": 0, "honest": len(honest), "honest_fired": 0}
    delays: list[int] = []
    for output in outputs:
        alarm = first_alarm(settings, tokenizer, output["tokens"], "", output["largest"])
        loop = loop_of(output["tokens"])
        if loop is not None:
            row["loops"] += 1
            row["found"] += alarm is not None
            if alarm is not None:
                delays.append(alarm[0] - loop.start - 3 * loop.period)
        elif not judged(output, output, tokenizer)["near"] and tail_period(output["tokens"]) is None:
            row["healthy"] += 1
            row["healthy_fired"] += alarm is not None
    for ids, largest in honest:
        row["honest_fired"] += first_alarm(settings, tokenizer, ids, "", largest) is not None
    return {**row, "found_interval": interval(row["found"], row["loops"]), "delay": statistics.median(delays or [0])}


def alarms_of(model: Any, outputs: Sequence[Row]) -> Row:
    """Everything for one model and its outputs."""
    tokenizer = model.tokenizer
    result: Row = {}
    for half in HALVES:
        of_half = [one for one in outputs if one["half"] == half]
        for name, settings in SETTINGS.items():
            result[f"{name}, {half}"] = measured(settings, tokenizer, half, of_half)
    honest = honest_texts(model, tokenizer)
    read = {"honest": honest, "loops": []}
    for one in outputs:
        if tail_period(one["tokens"], repeats=3, shortest=24) is not None:
            read["loops"].append((one["tokens"], one["largest"]))
    result["largest probability"] = {}
    for kind, texts in read.items():
        means = [mean for mean in itertools.starmap(behind, texts) if mean is not None]
        tenth, median, ninth = np.quantile(means, [0.1, 0.5, 0.9]).round(4).tolist()
        result["largest probability"][kind] = {"texts": len(means), "low": tenth, "median": median, "high": ninth}
    rules: dict[str, Settings] = {"as printed": PaperSettings()}
    for field, values in CHANGED.items():
        for value in values:
            rules[f"{field} {value}"] = PaperSettings(**{field: value})
    rules["no gate"] = Ungated()
    result["printed"] = {name: of_printed(rule, tokenizer, outputs, honest) for name, rule in rules.items()}
    return result


def main(works: Sequence[Path], *, models: Sequence[Path], out: Path = Path("figures/loopguard_alarms.json")) -> None:
    """Make what the module describes.

    Args:
        works: Folders with a runs.jsonl.
        models: Files of the models, or folders, named as in the outputs.
        out: The JSON.
    """
    result: Row = {}
    for file in models:
        outputs = outputs_of(works, model=file.stem, arm=FULL)
        result[file.stem.split("-")[0]] = alarms_of(load(str(file), dtype="float32"), outputs)
    write_record(out, "loopguard-alarms", result, {})


if __name__ == "__main__":
    run(main)
