"""What remedies did: the rows of the tables in `docs/remedies.md` and `docs/papers/loopguard.md`.

    python -m experiments.loopguard.outcome WORK [--out figures]

WORK is a folder of `python -m experiments.loopguard.remedies`. The values of a row:

- `loops`: outputs that end in a loop, by the rule of `sinkscope bench --task loops`.
- `over own text`: perplexity of up to 400 tokens after the guard's first act (for samplers, after the first alarm in
  the output with the whole cache), read once more by the model itself with a clean cache, over the outputs that do not
  end in a loop; divided by that of the model's own outputs that raise no alarm, from token 48 on.
- `acts`: interventions per output that had any.
- `changed`: outputs that differ from those with the whole cache although these raise no alarm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.loopguard.openings import FORMS, openings
from experiments.loopguard.remedies import CHOICES, FULL, GUARD, PLAIN, PRINTED, SAMPLERS, read
from experiments.record import Row, record, value_of_each
from experiments.script import run
from sinkscope.bench.tasks.loops import loops
from sinkscope.files.output import write_atomic
from sinkscope.loops.text.monitor import MonitorSettings

REMEDIES = (FULL, PLAIN, GUARD, PRINTED, *SAMPLERS)


def perplexity(outputs: Sequence[Row]) -> float | None:
    """Of the tokens that were read once more."""
    counted = sum(value_of_each(outputs, "counted"))
    if not counted:
        return None
    return math.exp(sum(value_of_each(outputs, "nll")) / counted)


def summary(method: str, outputs: Sequence[Row], full: dict[Any, Row]) -> Row:
    """One row of a table; `full` are the outputs of the whole cache, by family and number."""
    own = perplexity([output for output in full.values() if output["alarm"] is None])
    alarmed: list[Row] = []
    counts: list[int] = []
    row = dict.fromkeys(("loops", "changed", "healthy", "looping", "met", "sure"), 0)
    for output in outputs:
        looped = loops(output["tokens"])
        row["loops"] += looped
        plain = full[output["family"], output["number"]]
        if plain["alarm"] is None:
            row["healthy"] += 1
            row["changed"] += output["tokens"] != plain["tokens"]
        elif not looped:
            alarmed.append(output)
        if loops(plain["tokens"]):
            row["looping"] += 1
            row["met"] += bool(output["acts"])
            row["sure"] += plain["streak"] >= MonitorSettings.paper().streak
        if output["acts"]:
            counts.append(len(output["acts"]))
    after = perplexity(alarmed)
    return {
        "method": method,
        "outputs": len(outputs),
        **row,
        "perplexity": after,
        "ratio": None if own is None or after is None else after / own,
        "acts": sum(counts) / max(1, len(counts)),
        "own": own,
    }


def settings_of(outputs: Sequence[Row], methods: Sequence[str]) -> list[Row]:
    """Every model, length and temperature, with a row for each of the methods that was run."""
    grouped: dict[Any, dict[str, dict[Any, Row]]] = {}
    for output in outputs:
        key = (output["model"], output["new"], output["temperature"])
        if output["family"] in FORMS:
            place = (output["family"], output["number"])
            grouped.setdefault(key, {}).setdefault(output["method"], {})[place] = output
    settings: list[Row] = []
    for (model, new, temperature), found in grouped.items():
        rows = []
        for method in methods:
            if method in found:
                rows.append(summary(method, list(found[method].values()), found[FULL]))
        settings.append({"model": model, "new": new, "temperature": temperature, "rows": rows})
    return settings


def main(work: Path, *, out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        work: Folder of the outputs.
        out: Folder of what is written.
    """
    outputs = read(work)
    families: Row = {}
    for family in FORMS:
        families[family] = openings(family, 12)
    for name, methods in (("choices", (FULL, *CHOICES)), ("remedies", REMEDIES)):
        settings = settings_of(outputs, methods)
        write_atomic(out / f"loopguard_{name}.json", record(f"loopguard-{name}", {"settings": settings}, families))


if __name__ == "__main__":
    run(main)
