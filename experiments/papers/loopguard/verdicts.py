"""What the checker, and the guard in the tokens of a model, say of honest texts that repeat themselves.

    python -m experiments.papers.loopguard.verdicts --models FILE ... [--out figures/loopguard_verdicts.json]

The texts repeat because they should: what was asked for, or what their form brings (`honest_answers.jsonl`), and longer
ones of data, code, markup and logs (`honest_data.jsonl`). Half of them is for choosing; the halves share no form. For
each half and rule: texts that are a loop for the checker, or in which a guard acts, and texts that are suspicious.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.record import Row, read_rows, write_record
from experiments.script import run
from sinkscope.loops import MonitorSettings, check
from sinkscope.loops.guard import LoopGuard
from sinkscope.loops.guard.detect import monitors
from sinkscope.loops.text.monitor import Settings
from sinkscope.loops.text.repetition import asked_copies, asked_items
from sinkscope.models.checkpoints.checkpoint import Files

HALVES = ("choose", "report")
RULES = {
    "checker": MonitorSettings(),
    "guard": LoopGuard().settings,
    "data never waits": MonitorSettings(data_tokens=1),
}


def honest_texts(half: str) -> list[Row]:
    """The honest texts of a half: their `form`, `prompt` and `answer`."""
    texts: list[Row] = []
    for name in ("honest_answers.jsonl", "honest_data.jsonl"):
        texts += [text for text in read_rows(Path(__file__).with_name(name)) if text["half"] == half]
    return texts


def of_honest(settings: Settings, tokenizers: dict[str, Any], half: str) -> Row:
    """What is said of the honest texts of a half."""
    texts = honest_texts(half)
    row: Row = {"texts": len(texts), "checker": [], "suspicious": 0, **{name: [] for name in tokenizers}}
    for text in texts:
        verdict = check(text["answer"], settings=settings, prompt=text["prompt"]).records[0].verdict
        row["suspicious"] += verdict == "suspicious"
        if verdict in ("loops", "looped"):
            row["checker"].append(text["form"])
        for name, tokenizer in tokenizers.items():
            ids = tokenizer(text["answer"], add_special_tokens=False, verbose=False)["input_ids"]
            monitor = monitors(settings, tokenizer)(
                asked=asked_copies(text["prompt"]), asked_items=asked_items(text["prompt"])
            )
            if any(monitor.update(token).trigger for token in ids):
                row[name].append(text["form"])
    return row


def main(*, models: Sequence[Path], out: Path = Path("figures/loopguard_verdicts.json")) -> None:
    """Make what the module describes.

    Args:
        models: Files of the models.
        out: The JSON.
    """
    tokenizers: dict[str, Any] = {file.stem.split("-")[0]: Files(file).read_tokenizer() for file in models}
    result: Row = {}
    for half in HALVES:
        for name, settings in RULES.items():
            result[f"{name}, {half}"] = of_honest(settings, tokenizers, half)
    write_record(out, "loopguard-verdicts", result, {}, dtype="text")


if __name__ == "__main__":
    run(main)
