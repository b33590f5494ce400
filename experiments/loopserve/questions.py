"""How often the rules of `experiments.loopserve.positions` are right on messages of real users.

    python -m experiments.loopserve.questions data/arena-hard-v0.1/question.jsonl [--out figures]

The file is Arena-Hard's (github.com/lmarena/arena-hard-auto; Li et al. 2024): 500 prompts that users of Chatbot Arena
wrote. Of those in ASCII with less than 900 characters and at least two ends of sentence or line, 60 were drawn,
labelled by hand and used to better the rules (development), and then 60 others (held-out), labelled before the rules
were run on them; the rules were not changed after. Labels lie beside this file, by the prompts' uid. A sample of our
own writing, also beside this file, is measured too; what is found on its held-out part
lies beside the rules.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.loopserve.positions import PLACES, Accuracy, locate
from experiments.record import record
from sinkscope.errors import SinkscopeError
from sinkscope.files.console import note
from sinkscope.files.output import write_atomic
from sinkscope.files.rate import wilson
from sinkscope.files.records import read_rows

LABELS = Path(__file__).with_name("question_labels.jsonl")
OWN = Path(__file__).with_name("questions.jsonl")
SHIPPED = LABELS.with_name("question_accuracy.json")


def sample(part: str) -> tuple[tuple[str, str], ...]:
    """Labels and messages of our own: of "development", by which the rules were made, or "held-out"."""
    rows = [row for _, row in read_rows(OWN, "the file that lies beside this one")]
    return tuple((row["label"], row["text"]) for row in rows if row["part"] == part)


def accuracy(part: str = "held-out") -> Accuracy:
    """The rules against the labels of a part of our own sample."""
    pairs = [(label, locate(text).place) for label, text in sample(part)]
    right = sum(label == said for label, said in pairs)
    rate, counts = wilson(right, len(pairs)), Counter(pairs)
    confusion = {label: {said: counts[label, said] for said in PLACES} for label in PLACES}
    return Accuracy(len(pairs), right, rate.share, rate.low, rate.high, confusion)


def shipped() -> str:
    """What is said of the rules with every count."""
    return json.dumps(asdict(accuracy())) + "\n"


def measure(prompts: dict[str, str], part: str) -> dict[str, Any]:
    """Share of labels that the rules give, its interval, and the pairs of label and what the rules say."""
    rows = [json.loads(line) for line in LABELS.read_text(encoding="utf-8").splitlines()]
    mine = [row for row in rows if row["part"] == part]
    missing = [row["uid"] for row in mine if row["uid"] not in prompts]
    if missing:
        raise SinkscopeError(f"the file has no prompt {missing[0]}: give arena-hard-v0.1/question.jsonl")
    pairs = Counter((row["label"], locate(prompts[row["uid"]]).place) for row in mine)
    right = sum(count for (label, said), count in pairs.items() if label == said)
    return {
        "messages": len(mine),
        "right": right,
        **asdict(wilson(right, len(mine))),
        "always_end": sum(row["label"] == "end" for row in mine) / len(mine),
        "pairs": [{"label": label, "rules": said, "count": n} for (label, said), n in sorted(pairs.items())],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.loopserve.questions", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("file", type=Path, help="Arena-Hard's question.jsonl")
    parser.add_argument("--out", type=Path, default=Path("figures"))
    args = parser.parse_args(argv)
    started = time.perf_counter()
    rows = [row for _, row in read_rows(args.file, "arena-hard-v0.1/question.jsonl")]
    prompts = {row["uid"]: row["prompt"] for row in rows}
    result = {
        "arena_hard": {part: measure(prompts, part) for part in ("development", "held-out")},
        "packaged": {part: asdict(accuracy(part)) for part in ("development", "held-out")},
    }
    digest = hashlib.sha256(args.file.read_bytes()).hexdigest()
    settings = {"file": args.file.name, "sha256": digest, "control": "always_end: the rule that always says end"}
    text = record("loopserve-questions", result, settings, started=started)
    write_atomic(args.out / "loopserve_questions.json", text)
    write_atomic(SHIPPED, shipped())
    for source, parts in result.items():
        for part, found in parts.items():
            note(f"{source}, {part}: {found['right']} of {found['messages']}")


if __name__ == "__main__":
    main()
