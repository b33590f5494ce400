"""Published results about the sink of a model beside what is measured here by the protocols of their sources.

    python -m experiments.reproduce.compare                               # lists what is published
    python -m experiments.reproduce.compare llama-2-7b --dtype float16    # measures what is published about one model

The exit code is 1 if a measured value does not agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.record import Row, write_record
from experiments.reproduce.protocols import PROTOCOLS
from experiments.reproduce.published import Published, published
from experiments.script import run
from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.models.checkpoints.locate import find
from sinkscope.models.text import put_before
from sinkscope.results.notation import count_of
from sinkscope.results.tables import cell
from sinkscope.sinks.spikes.survey import Survey, read_survey


def main(
    model: str | None = None,
    *,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    out: Path | None = None,
) -> None:
    """Measure what is published about a model, each result by its own protocol, and say whether it agrees.

    Args:
        model: A short name, hub id, folder or .gguf file. By default everything that is published is listed.
        revision: Branch, tag or commit on the hub.
        device: cpu, cuda, cuda:1 or mps. By default the first CUDA device, else the CPU.
        dtype: float32, bfloat16 or float16. By default the checkpoint's.
        out: JSON file for the rows.
    """
    rows = [row_of(one) for one in published()]
    if model is not None:
        rows = compared(model, published(), revision=revision, device=device, dtype=dtype)
    print_rows(rows)
    if model is not None:
        print(conclusion(rows))
    if out is not None:
        settings = {"model": model, "revision": revision}
        write_record(out, "reproduce", {"records": rows}, settings)
    if any(row["agrees"] is False for row in rows):
        raise SystemExit(1)


def compared(model: object, known: Sequence[Published], **opening: Any) -> list[Row]:
    """Measure the results that are published about a model.

    Args:
        model: A name, or a live model.
        known: Published results, also of other models.
        opening: How to open the model, as in `Setup.open`.

    Raises:
        SinkscopeError: Nothing is published about the model, or it cannot be opened.
    """
    target = Setup.open(model, **opening).target
    setup = Setup.open(target, bos=bool(put_before(target.tokenizer)))
    survey = read_survey(target, setup.ids)
    name = known_as(target.name)
    rows = [measured(one, setup, survey) for one in known if known_as(one.model) == name]
    if not rows:
        raise SinkscopeError(f"nothing is published here about {target.name}: give a model of the list")
    return rows


def measured(one: Published, setup: Setup, survey: Survey) -> Row:
    """Measure a published result again; a remark says why it cannot be measured."""
    if one.quantity not in PROTOCOLS:
        return row_of(one, remark="no protocol here")
    try:
        value = PROTOCOLS[one.quantity](setup, survey, one)
    except SinkscopeError as error:
        return row_of(one, remark=f"not measured: {error}")
    return row_of(one, measured=value, agrees=one.fits(value))


def row_of(one: Published, measured: Any = None, agrees: bool | None = None, remark: str | None = None) -> Row:
    """Return a published result as a row."""
    return {**vars(one), "measured": measured, "agrees": agrees, "remark": remark}


def known_as(name: str) -> str:
    """Return the short name of a model; without one, the last part of its name."""
    entry = find(name)
    return name.rpartition("/")[2].lower() if entry is None else entry.name


def print_rows(rows: Sequence[Row]) -> None:
    """Print a line for each result."""
    for row in rows:
        line = f"{row['model']}: {row['quantity']} {cell(row['value'])} ({row['source']})"
        if row["agrees"] is not None:
            line += f"; measured {cell(row['measured'])}, {'agrees' if row['agrees'] else 'does not agree'}"
        elif row["remark"] is not None:
            line += f"; {row['remark']}"
        print(line)


def conclusion(rows: Sequence[Row]) -> str:
    """Say how many results agree."""
    agree = [row["agrees"] for row in rows]
    absent, done = agree.count(None), len(agree) - agree.count(None)
    if not done:
        return f"None of {count_of(absent, 'published result')} was measured."
    said = f"Measured values agree with {agree.count(True)} of {done} published ones"
    return f"{said}; {absent} more were not measured." if absent else f"{said}."


if __name__ == "__main__":
    run(main)
