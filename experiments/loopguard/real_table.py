"""Tables of what remedies do to the loops of real models, from the outputs of `experiments.loopguard.real`.

    python -m experiments.loopguard.real_table WORK [WORK ...] --models FOLDER ... --out figures/loopguard_real.json

A folder is named like the model in the outputs and holds its tokenizer. For each model, half and arm: outputs that end
in an exact loop (three copies, 24 tokens) or nearly loop (of the last 8 sentences or lines, 6 resemble one of the 12
before by 80 % of their letters, numbers apart), that say the same token again and again right behind the first act, the
share of different 4-grams behind it and in the last 200 tokens, and outputs without an alarm that are those of the
model alone. The cost is the number of tokens that were written over those that stay, in all outputs with an act. Rows
of the JSON whose outputs are not in the folders stay as they are.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import AutoTokenizer

from experiments.loopguard.real import FULL, outputs_of
from experiments.record import Row, earlier, write_record
from experiments.script import run
from sinkscope.loops import tail_period
from sinkscope.measure.margin import mean_known, share_interval

LAST, NEARLY, BACK, ALIKE = 8, 6, 12, 0.8
LATEST = 200
BEHIND = 24  # tokens behind an act, of which a third are those before them where one token is said again and again


def units(text: str) -> list[str]:
    """The sentences and lines of a text, small letters, numbers masked."""
    parts = re.split(r"(?<=[.!?;])\s+|\n+", text)
    return [re.sub(r"\d+", "#", part.strip().lower()) for part in parts if part.strip()]


def nearly_loops(text: str) -> bool:
    """Whether most of the last sentences or lines resemble earlier ones."""
    parts = units(text)
    if len(parts) < LAST + 2:
        return False
    alike = 0
    for place in range(len(parts) - LAST, len(parts)):
        earlier = parts[max(0, place - BACK) : place]
        alike += any(SequenceMatcher(None, parts[place], one).ratio() >= ALIKE for one in earlier)
    return alike >= NEARLY


def different(tokens: Sequence[int | str], size: int = 4) -> float | None:
    """Share of n-grams that are different; None of fewer than 2 n-grams."""
    grams = [tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)]
    if len(grams) < 2:
        return None
    return len(set(grams)) / len(grams)


def interval(hits: int, cases: int) -> list[float]:
    """The interval of 95 %; everything of fewer than three cases."""
    rate = share_interval(hits, cases)
    if rate is None:
        return [0.0, 1.0]
    return [round(rate.low, 4), round(rate.high, 4)]


def judged(output: Row, stock: Row, tokenizer: Any) -> Row:
    """What one output is."""
    tokens: list[int] = output["tokens"]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    exact = not output["ended"] and tail_period(tokens, repeats=3, shortest=24) is not None
    row: Row = {
        "exact": exact,
        "near": not exact and nearly_loops(text),
        "ended": output["ended"],
        "acted": bool(output["acts"]),
        "acts": len(output["acts"]) or None,
        "same": False,
        "behind": None,
        "distinct": different(tokens[-LATEST:]),
        "unchanged": tokens == stock["tokens"],
        "taken": output.get("taken", False),
        "stay": len(tokens),
        "taken_back": sum(act["taken_back"] for act in output["acts"]),
    }
    if output["acts"]:
        first = output["acts"][0]
        behind = tokens[first["generated"] - first["taken_back"] :]
        again = sum(one == other for one, other in pairwise(behind[: BEHIND + 1]))
        row["same"] = len(behind) >= BEHIND and again >= BEHIND // 3
        row["behind"] = different(behind)
    return row


def table(outputs: list[Row], tokenizer: Any) -> dict[str, dict[str, Row]]:
    """A row for each half and arm of one model, and what its healthy text is."""
    stock = {(one["half"], one["number"]): one for one in outputs if one["arm"] == FULL}
    judgements: list[Row] = []
    for one in outputs:
        place = one["half"], one["number"]
        if place in stock:
            judgements.append({"half": one["half"], "arm": one["arm"], **judged(one, stock[place], tokenizer)})
    judgement = pd.DataFrame(judgements)
    rows: dict[str, dict[str, Row]] = defaultdict(dict)
    for (half, arm), own in judgement.groupby(["half", "arm"], sort=False):
        acted, quiet = own[own.acted], own[~own.acted & ~own.taken]
        row: Row = {"outputs": len(own), **own[["exact", "near", "ended", "acted", "same", "taken"]].sum().to_dict()}
        row |= {"near_acted": acted.near.sum(), "quiet": len(quiet), "quiet_unchanged": quiet.unchanged.sum()}
        for name in ("exact", "near"):
            row[f"{name}_interval"] = interval(int(row[name]), len(own))
        for name in ("behind", "distinct", "acts"):
            row[name] = mean_known(own[name])
        if acted.stay.sum():
            row["cost"] = 1 + acted.taken_back.sum() / acted.stay.sum()
        rows[str(half)][str(arm)] = row
    healthy = judgement[(judgement.arm == FULL) & ~judgement.exact & ~judgement.near].distinct
    rows["healthy"]["text"] = {"distinct": mean_known(healthy), "outputs": len(healthy)}
    return dict(rows)


def main(works: Sequence[Path], *, models: Sequence[Path], out: Path = Path("figures/loopguard_real.json")) -> None:
    """Make what the module describes.

    Args:
        works: Folders with a runs.jsonl.
        models: Folders of the models.
        out: The JSON.
    """
    result = earlier(out)
    for folder in models:
        name = folder.name.split("-")[0]
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        for half, rows in table(outputs_of(works, model=folder.name), tokenizer).items():
            result.setdefault(name, {}).setdefault(half, {}).update(rows)
    write_record(out, "loopguard-real", result, {"new": 400})


if __name__ == "__main__":
    run(main)
