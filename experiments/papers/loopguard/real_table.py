"""Tables of what remedies do to the loops of real models, from the outputs of `experiments.papers.loopguard.real`.

    python -m experiments.papers.loopguard.real_table WORK --models FILE ... [--out figures/loopguard_real.json]

For each model, half and arm: outputs that end in an exact loop (three copies, 24 tokens) or nearly loop (of the last 8
sentences or lines, 6 resemble one of the 12 before by 80 % of their letters, numbers apart), that say the same token
again and again right behind the first act, the share of different 4-grams behind it and in the last 200 tokens, and
outputs without an alarm that are those of the model alone. The cost is the number of tokens that were written over
those that stay, in all outputs with an act. Rows of the JSON whose outputs are not in the folder stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.papers.loopguard.real import FULL, outputs_of
from experiments.record import Row, earlier, write_record
from experiments.script import run
from sinkscope.bench.answer import mean_known
from sinkscope.loops.text.signals import end_loop
from sinkscope.measure.margin import SCORES, interval_of
from sinkscope.opening.load import load

LAST, NEARLY, BACK, ALIKE = 8, 6, 12, 0.8
LATEST = 200
BEHIND = 24  # tokens behind an act, of which a third are those before them where one token is said again and again
COUNTED = ["exact", "near", "ended", "acted", "same", "near_acted", "quiet", "quiet_unchanged"]


def nearly_loops(text: str) -> bool:
    """Whether most of the last sentences or lines resemble earlier ones."""
    parts = re.split(r"(?<=[.!?;])\s+|\n+", re.sub(r"\d+", "#", text.lower()))
    parts = [part.strip() for part in parts if part.strip()]
    if len(parts) < LAST + 2:
        return False
    alike = 0
    for place in range(len(parts) - LAST, len(parts)):
        before = parts[max(0, place - BACK) : place]
        alike += any(SequenceMatcher(None, parts[place], one).ratio() >= ALIKE for one in before)
    return alike >= NEARLY


def different(tokens: Sequence[int]) -> float | None:
    """Share of 4-grams that are different; None of fewer than two."""
    grams = [tuple(tokens[at : at + 4]) for at in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams) if len(grams) > 1 else None


def judged(output: Row, stock: Row, tokenizer: Any) -> Row:
    """What one output is."""
    tokens: list[int] = output["tokens"]
    exact = not output["ended"] and end_loop(tokens) is not None
    near = not exact and nearly_loops(tokenizer.decode(tokens, skip_special_tokens=True))
    acted = bool(output["acts"])
    row: Row = {
        "exact": exact,
        "near": near,
        "ended": output["ended"],
        "acted": acted,
        "acts": len(output["acts"]) or None,
        "same": False,
        "behind": None,
        "distinct": different(tokens[-LATEST:]),
        "near_acted": near and acted,
        "quiet": not acted,
        "quiet_unchanged": not acted and tokens == stock["tokens"],
        "stay": len(tokens) * acted,
        "taken_back": sum(act["taken_back"] for act in output["acts"]),
    }
    if acted:
        first = output["acts"][0]
        behind = tokens[first["generated"] - first["taken_back"] :]
        again = sum(one == other for one, other in pairwise(behind[: BEHIND + 1]))
        row["same"] = len(behind) >= BEHIND and again >= BEHIND // 3
        row["behind"] = different(behind)
    return row


def table(outputs: list[Row], tokenizer: Any) -> dict[str, dict[str, Row]]:
    """A row for each half and arm of one model, and what its healthy text is."""
    stock = {(one["half"], one["number"]): one for one in outputs if one["arm"] == FULL}
    judgement: Any = pd.DataFrame(
        {"half": one["half"], "arm": one["arm"], **judged(one, stock[one["half"], one["number"]], tokenizer)}
        for one in outputs
    )
    healthy = judgement[(judgement.arm == FULL) & ~judgement.exact & ~judgement.near].distinct
    rows: dict[str, dict[str, Row]] = {"healthy": {"text": {"distinct": mean_known(healthy), "outputs": len(healthy)}}}
    for (half, arm), own in judgement.groupby(["half", "arm"], sort=False):
        row: Row = {"outputs": len(own), **own[COUNTED].sum().to_dict()}
        for name in ("exact", "near"):
            rate = interval_of(np.repeat([1.0, 0.0], [row[name], len(own) - row[name]]), SCORES)
            row[f"{name}_interval"] = [0.0, 1.0] if rate is None else [round(rate.low, 4), round(rate.high, 4)]
        for name in ("behind", "distinct", "acts"):
            row[name] = mean_known(own[name])
        if own.stay.sum():
            row["cost"] = 1 + own.taken_back.sum() / own.stay.sum()
        rows.setdefault(str(half), {})[str(arm)] = row
    return rows


def main(work: Path, *, models: Sequence[Path], out: Path = Path("figures/loopguard_real.json")) -> None:
    """Make what the module describes.

    Args:
        work: Folder with a runs.jsonl.
        models: Files of the models.
        out: The JSON.
    """
    result = earlier(out)
    for file in models:
        tokenizer = load(str(file), device="cpu").tokenizer
        for half, rows in table(outputs_of(work, model=file.stem), tokenizer).items():
            result.setdefault(file.stem.split("-")[0], {}).setdefault(half, {}).update(rows)
    write_record(out, "loopguard-real", result, {"new": 400})


if __name__ == "__main__":
    run(main)
