"""One verdict: what the checker, and the guard in the tokens of a model, say of texts that repeat themselves.

    python -m experiments.loopguard.verdicts [WORK ...] --models FILE ... [--out figures/loopguard_verdicts.json]

Honest texts are the answers in `honest_answers` and the longer ones in `honest_data.jsonl` (data, code, markup, logs,
and what was asked for); loops are the outputs "full" of `experiments.loopguard.real` in the folders. Half of both is
for choosing. For each half and setting: honest texts that are cut, and that are only reported; texts of which checker
and guard say different things; loops that are cut, and how many come later, or no more, than if data never waited.
Rows of loops whose outputs are not in the
folders stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.loopguard.alarms import loop_of
from experiments.loopguard.honest_answers import HonestAnswer, honest_answers
from experiments.loopguard.real import FULL, outputs_of
from experiments.loopguard.real_openings import HALVES
from experiments.record import Row, earlier, write_record
from experiments.script import run
from sinkscope.files.records import read_records
from sinkscope.loops import MonitorSettings, check
from sinkscope.loops.guard.detect import monitors
from sinkscope.loops.text.repetition import asked_copies
from sinkscope.models.checkpoints.config import read_tokenizer

DATA = Path(__file__).with_name("honest_data.jsonl")
EAGER = "data never waits"
SETTINGS = {
    EAGER: MonitorSettings(data_tokens=1),
    **{f"data waits for {tokens} tokens": MonitorSettings(data_tokens=tokens) for tokens in (256, 384, 512, 768)},
}


def honest_texts(half: str) -> list[HonestAnswer]:
    """The honest texts of a half."""
    data = read_records(DATA, HonestAnswer, "the file of honest texts")
    return [*honest_answers(half), *(text for text in data if text.half == half)]


def guard_says(
    settings: MonitorSettings, tokenizer: Any, ids: Sequence[int], prompt: str = ""
) -> tuple[int | None, bool]:
    """The number of the token at which the guard acts, or None; and whether anything is reported."""
    monitor = monitors(settings, tokenizer)(asked=asked_copies(prompt))
    reported = False
    for token in ids:
        step = monitor.update(token)
        if step.trigger:
            return step.step, reported
        reported = reported or step.suspect
    return None, reported


def of_honest(settings: MonitorSettings, tokenizers: dict[str, Any], half: str) -> Row:
    """What is said of the honest texts of a half."""
    texts = honest_texts(half)
    row: Row = {"texts": len(texts), "checker": [], "suspicious": 0, "disagree": []}
    for text in texts:
        verdict = check(text.answer, settings=settings, prompt=text.prompt).records[0].verdict
        loops = verdict in ("loops", "looped")
        row["suspicious"] += verdict == "suspicious"
        row["checker"] += [text.form] * loops
        for name, tokenizer in tokenizers.items():
            ids = tokenizer(text.answer, add_special_tokens=False, verbose=False)["input_ids"]
            alarm, _ = guard_says(settings, tokenizer, ids, text.prompt)
            row.setdefault(name, []).extend([text.form] * (alarm is not None))
            row["disagree"] += [f"{name}: {text.form}"] * (loops != (alarm is not None))
    return row


def of_loops(settings: MonitorSettings, tokenizer: Any, outputs: Sequence[Row]) -> Row:
    """What is said of a model's own outputs, beside a rule without exceptions."""
    counted = "exact", "cut", "reported", "later", "no_more", "checker_disagrees"
    row: Row = {"outputs": len(outputs), **dict.fromkeys(counted, 0)}
    delays: list[int] = []
    for output in outputs:
        ids = output["tokens"]
        alarm, reported = guard_says(settings, tokenizer, ids)
        eager, _ = guard_says(SETTINGS[EAGER], tokenizer, ids)
        exact = loop_of(ids) is not None
        row["exact"] += exact
        row["cut"] += exact and alarm is not None
        row["reported"] += alarm is None and reported
        row["no_more"] += eager is not None and alarm is None
        if eager is not None and alarm is not None:
            row["later"] += alarm > eager
            delays.append(alarm - eager)
        verdict = check(tokenizer.decode(ids, skip_special_tokens=True), settings=settings).records[0].verdict
        row["checker_disagrees"] += (verdict in ("loops", "looped")) != (alarm is not None)
    row["delay_most"] = max(delays, default=None)
    return row


def main(
    works: Sequence[Path] = (), *, models: Sequence[Path], out: Path = Path("figures/loopguard_verdicts.json")
) -> None:
    """Make what the module describes.

    Args:
        works: Folders with a runs.jsonl.
        models: Files of the models, named as in the outputs.
        out: The JSON.
    """
    outputs = outputs_of(works, arm=FULL)
    tokenizers = {file.stem.split("-")[0]: read_tokenizer(file.stem, file.parent, gguf=file.name) for file in models}
    result: Row = {"honest": {}, "loops": {}}
    before = earlier(out).get("loops", {})
    for half in HALVES:
        for name, settings in SETTINGS.items():
            result["honest"][f"{name}, {half}"] = of_honest(settings, tokenizers, half)
            for file in models:
                of_half = [one for one in outputs if (one["model"], one["half"]) == (file.stem, half)]
                short = file.stem.split("-")[0]
                row = f"{short}, {name}, {half}"
                if of_half or row not in before:
                    result["loops"][row] = of_loops(settings, tokenizers[short], of_half)
                else:
                    result["loops"][row] = before[row]
    write_record(out, "loopguard-verdicts", result, {}, dtype="text")


if __name__ == "__main__":
    run(main)
