"""What LoopServe's bands cost a real model: cells, KL, loss and time by alpha, kind of text and length.

    python -m experiments.loopserve.real MODEL ... [--dialogue-files FILE ...] [--page docs/serve.md]

Texts of four kinds: prose (Python's manual), code (its library), tables (names of letters as CSV), and,
where files are given, dialogue (JSON lines with "turns" of MT-bench, and answers of other files between). They are cut
into pieces of each length; alpha was chosen on piece 0. A prompt is read once by the model's own attention and once
under `LoopServe(alpha, decode=False, shortest=0)`, with the heads dense that a GPU would compute densely; distributions
of the next token are compared at `--positions` places of its second half. Steps that are done are not done again.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from experiments.drawn import markdown, put_table
from experiments.gpu.steps import Steps
from experiments.record import Row, read_rows, value_of_each
from experiments.script import run
from experiments.timing import seconds_of
from sinkscope.errors import SinkscopeError
from sinkscope.lines.serve import LoopServe
from sinkscope.lines.serve.serve import DENSE_ABOVE
from sinkscope.measure.margin import margin_of
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load

ABOVE = DENSE_ABOVE["cuda"]
CHARACTERS = 10  # of a token at most, on average
HEAD = ("alpha", "text", "tokens", "texts", "attended", "KL", "NLL", "top-1 same", "time over dense")


def prose(_: Sequence[Path]) -> str:
    """Python's manual."""
    import pydoc_data.topics

    return "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))


def code(_: Sequence[Path]) -> str:
    """Modules of Python's library."""
    import argparse
    import tarfile
    import typing

    return "\n".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in (tarfile, argparse, typing))


def tables(_: Sequence[Path]) -> str:
    """Letters with their names and kinds, as CSV."""
    import unicodedata

    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(("name", "category", "number", "bidirectional", "width"))
    for number in (*range(0xC0, 0x250), *range(0x391, 0x700)):
        letter = chr(number)
        name = unicodedata.name(letter, "none").title()
        kind, side = unicodedata.category(letter), unicodedata.bidirectional(letter)
        writer.writerow((name, kind, number, side, unicodedata.east_asian_width(letter)))
    return file.getvalue()


def talks(files: Sequence[Path]) -> list[list[tuple[str, str | None]]]:
    """Dialogues of MT-bench: what users say, and the answers where files give them; None without any."""
    rows: list[Row] = []
    for file in files:
        rows += read_rows(file)
    answers: dict[Any, list[str]] = {}
    for row in rows:
        if "choices" in row:
            answers[row["question_id"]] = row["choices"][0]["turns"]
    found: list[list[tuple[str, str | None]]] = []
    for row in rows:
        if "turns" in row:
            said = row["turns"]
            found.append(list(zip(said, answers.get(row["question_id"], [None] * len(said)), strict=True)))
    return found


def dialogue(files: Sequence[Path]) -> str:
    """Turns of users, with answers between them where files give them."""
    said: list[str] = []
    for talk in talks(files):
        for turn, answer in talk:
            said.append(f"User: {turn}")
            if answer is not None:
                said.append(f"Assistant: {answer}")
    return "\n\n".join(said)


TEXTS = {"prose": prose, "code": code, "tables": tables, "dialogue": dialogue}


def piece(target: Target, text: str, length: int, number: int) -> Tensor:
    """A piece of a text, `[1 pos]`."""
    enough = text[: CHARACTERS * (number + 1) * length]
    ids = target.tokenizer(enough, return_tensors="pt", verbose=False).input_ids
    ids = ids[:, number * length : (number + 1) * length]
    if ids.shape[1] < length:
        raise SinkscopeError(f"the text has no {(number + 1) * length} tokens")
    return ids


@torch.no_grad()
def next_tokens(target: Target, ids: Tensor, at: Tensor) -> tuple[Tensor, float]:
    """Logarithms of next-token probabilities after some positions, and the seconds that the layers took."""
    seconds, output = seconds_of(partial(target.base, input_ids=ids, use_cache=False))
    hidden = output.last_hidden_state[0, at]
    parts: list[Tensor] = []
    for part in hidden.split(128):
        parts.append(target.hf.get_output_embeddings()(part).float().log_softmax(-1))
    return torch.cat(parts), seconds


def compared(target: Target, ids: Tensor, alpha: float, at: Tensor, dense: tuple[Tensor, float]) -> Row:
    """One prompt under LoopServe, beside what the model's own attention gives."""
    wanted, dense_seconds = dense
    with LoopServe(alpha=alpha, decode=False, shortest=0, dense_above=ABOVE).on(target) as told:
        found, seconds = next_tokens(target, ids, at)
    attended: list[float] = []
    for event in told.events:
        if event.kind == "prefill":
            attended.append(event.data.get("attended", 1.0))
    following = ids[0, at + 1][:, None]
    row: Row = {
        "kl": float((wanted.exp() * (wanted - found)).sum(1).mean()),
        "nll": float(-found.gather(1, following).mean()),
        "dense_nll": float(-wanted.gather(1, following).mean()),
        "same": float((wanted.argmax(1) == found.argmax(1)).float().mean()),
        "attended": fmean(attended or [1.0]),  # with alpha 1 nothing is done
        "time": seconds / dense_seconds,
    }
    return row


def measured(target: Target, ids: Tensor, alphas: Sequence[float], positions: int) -> Row:
    """All alphas on one prompt."""
    length = ids.shape[1]
    at = torch.linspace(length // 2, length - 2, min(positions, length // 2 - 1)).long().to(ids.device)
    next_tokens(target, ids[:, :64], at[:0])
    dense = next_tokens(target, ids, at)
    rows: Row = {"dense_seconds": dense[1]}
    for alpha in alphas:
        rows[f"{alpha:g}"] = compared(target, ids, alpha, at, dense)
    return rows


def table(rows: Row) -> str:
    """A line for each alpha, text and length: means over texts, with two standard errors from three texts on."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for name, row in rows.items():
        model, kind, length, _ = name.split(", ")
        for alpha, found in row.items():
            if isinstance(found, dict):
                change = {"change": found["nll"] - found["dense_nll"]}
                groups.setdefault((alpha, f"{model}, {kind}", length), []).append(found | change)
    lines: list[list[str]] = []
    for place, found in groups.items():
        cells = [*place, str(len(found))]
        for name, shown in (("attended", ".0%"), ("kl", ".4f"), ("change", "+.4f"), ("same", ".1%"), ("time", ".2f")):
            values = value_of_each(found, name)
            cells.append(f"{fmean(values):{shown}}")
            if len(found) > 2 and name in ("change", "same"):
                cells[-1] += f" ± {margin_of(np.array(values)):{shown.strip('+')}}"
        lines.append(cells)
    return markdown(HEAD, lines)


def main(
    models: Sequence[str],
    *,
    alphas: Sequence[float] = (0.98, 0.99, 0.995, 0.999),
    lengths: Sequence[int] = (2048, 4096, 8192),
    kinds: Sequence[Literal[*TEXTS]] = tuple(TEXTS),
    dialogue_files: Sequence[Path] = (),
    pieces: Sequence[int] = (1,),
    positions: int = 384,
    seconds: float = 3600.0,
    device: str = "cpu",
    page: Path | None = None,
    out: Path = Path("figures/loopserve_real.json"),
) -> None:
    """Make what the module describes.

    Args:
        models: Names, folders or files.
        kinds: Kinds of text.
        dialogue_files: JSON lines of dialogues.
        pieces: Which pieces of each text.
        positions: Places of the second half at which distributions are compared.
        seconds: No step begins after so many.
        page: Page whose table is replaced.
    """
    settings = {"positions": positions, "dense_above": ABOVE}
    steps = Steps("loopserve-real", out, settings, device, "float32")
    end = time.monotonic() + seconds
    for model in models:
        target: Target | None = None
        for length, kind, number in product(lengths, kinds, pieces):
            step = f"{Path(model).stem}, {kind}, {length}, {number}"
            if step in steps.rows or time.monotonic() > end:
                continue
            target = target or target_of(load(model, device=device))
            ids = piece(target, TEXTS[kind](dialogue_files), length, number).to(target.device)
            steps.do(step, partial(measured, target, ids, alphas, positions))
    if page is not None:
        put_table(page, "loopserve.real", table(steps.rows))
    steps.end()


if __name__ == "__main__":
    run(main)
