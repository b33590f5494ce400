"""When an alarm comes: on loops that real models wrote, and on answers that repeat because they should.

    python -m experiments.loopguard.alarms WORK [WORK ...] --tokenizer FOLDER [--out figures/loopguard_alarms.json]

The loops are the outputs "full" of `experiments.loopguard.real`; the honest answers are in `honest_answers`. For each
half and setting of the monitor: alarms on honest answers, and on outputs whose end is an exact loop that had gone on
for 64 tokens behind its third copy; and the tokens between the end of the third copy and the alarm.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from experiments.loopguard.honest_answers import honest_answers
from experiments.loopguard.real import FULL
from experiments.loopguard.real_openings import HALVES
from experiments.loopguard.real_table import interval
from experiments.record import Row, record
from experiments.script import run
from sinkscope.files.output import write_atomic
from sinkscope.loops import MonitorSettings, Tail, tail_period
from sinkscope.loops.guard.detect import monitors
from sinkscope.loops.text.counters import asked_copies

BEHIND = 64  # tokens behind the third copy within which an alarm should come
SETTINGS = {
    "48 tokens, three copies": MonitorSettings(tail_beyond=0, counter_tokens=1 << 20),
    **{
        f"{beyond} tokens beyond": MonitorSettings(tail_beyond=beyond, counter_tokens=1 << 20)
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


def main(works: Sequence[Path], *, tokenizer: Path, out: Path = Path("figures/loopguard_alarms.json")) -> None:
    """Make what the module describes.

    Args:
        works: Folders with a runs.jsonl, of one model.
        tokenizer: Folder of its tokenizer.
        out: The JSON.
    """
    loaded: Any = AutoTokenizer.from_pretrained(tokenizer)
    outputs: list[Row] = []
    for work in works:
        for line in (work / "runs.jsonl").read_text().splitlines():
            one = json.loads(line)
            if one["arm"] == FULL and one["model"] == tokenizer.name:
                outputs.append(one)
    result: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        for half in HALVES:
            of_half = [one for one in outputs if one["half"] == half]
            result[f"{name}, {half}"] = measured(settings, loaded, half, of_half)
            print(name, half, json.dumps(result[f"{name}, {half}"]))
    write_atomic(out, record("loopguard-alarms", result, {"model": tokenizer.name}))


if __name__ == "__main__":
    run(main)
