"""What LoopServe's bands cost a real model: cells, KL and loss by alpha, kind of text and length.

    python -m experiments.loopserve.real MODEL ... [--dialogue-files FILE ...] [--page figures/loopserve.md]

Texts of four kinds: prose (Python's manual), code (its library), tables (names of letters as CSV), and,
where files are given, dialogue (JSON lines with "turns" of MT-bench, and answers of other files between; "prompt" of
LongEval). They are cut into pieces
of each length. The default was chosen on other texts: the manual's first part, the module `tarfile`, LongEval's prompts
0 to 3, 6, 7, 10 and 11. A prompt is read once by the model's own attention and once under
`LoopServe(alpha, decode=False, shortest=0)`; distributions of the next token are compared at `--positions` places of
its second half. With `--random-alphas` it is also read from embeddings, in which no copies are known, so that the whole
sample is random. Steps that are done are not done again.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product, repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from experiments.drawn import markdown, put_table
from experiments.gpu.steps import Steps
from experiments.record import Row, read_rows
from experiments.script import run
from sinkscope.errors import SinkscopeError
from sinkscope.measure.margin import margin_of
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load
from sinkscope.sparse.bands import Copies
from sinkscope.sparse.serve import LoopServe

PART = 256  # places at a time
CHARACTERS = 10  # of a token at most, on average
CHOSE_PROSE = 70_000  # characters of the manual that the default was chosen on
CHOSE_TALKS = (0, 1, 2, 3, 6, 7, 10, 11)
Columns = dict[str, Callable[[pd.DataFrame], str]]


def prose(_: Sequence[Path]) -> str:
    """Python's manual."""
    import pydoc_data.topics

    return "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))[CHOSE_PROSE:]


def code(_: Sequence[Path]) -> str:
    """Modules of Python's library."""
    import argparse
    import inspect
    import subprocess
    import typing

    modules = argparse, typing, inspect, subprocess
    return "\n".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules)


def tables(_: Sequence[Path]) -> str:
    """Letters with their names and kinds, as CSV."""
    import unicodedata

    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(("name", "category", "number", "bidirectional", "width"))
    for number in (*range(0xC0, 0x250), *range(0x391, 0x700), *range(0x900, 0x1200)):
        letter = chr(number)
        name = unicodedata.name(letter, "none").title()
        kind, side = unicodedata.category(letter), unicodedata.bidirectional(letter)
        writer.writerow((name, kind, number, side, unicodedata.east_asian_width(letter)))
    return file.getvalue()


def dialogue(files: Sequence[Path]) -> str:
    """Turns of users, with answers between them where files give them, and recorded prompts."""
    rows = [row for file in files for row in read_rows(file)]
    answers = {row["question_id"]: row["choices"][0]["turns"] for row in rows if "choices" in row}
    said: list[str] = []
    for row in rows:
        own = answers.get(row.get("question_id"), repeat(None))
        for turn, answer in zip(row.get("turns", ()), own, strict=False):
            said.append(f"User: {turn}")
            if answer is not None:
                said.append(f"Assistant: {answer}")
    recorded = [row["prompt"] for row in rows if "prompt" in row]
    said += [prompt for number, prompt in enumerate(recorded) if number not in CHOSE_TALKS]
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
def measured(target: Target, ids: Tensor, alphas: Sequence[float], randoms: Sequence[float], positions: int) -> Row:
    """All alphas on one prompt, beside what the model's own attention gives; random samples are of embeddings."""
    length, embeddings = ids.shape[1], target.hf.get_input_embeddings()
    at = torch.linspace(length // 2, length - 2, min(positions, length // 2 - 1)).long().to(ids.device)

    def states(**given: Tensor) -> Tensor:
        return target.base(**given, use_cache=False).last_hidden_state[0, at]

    dense = states(input_ids=ids)
    rows: Row = {"copies": len(Copies.of(ids[0].cpu(), length, ids.device).at), "positions": len(at)}
    named = [(f"{alpha:g}", alpha, {"input_ids": ids}) for alpha in alphas]
    named += [(f"random, {alpha:g}", alpha, {"inputs_embeds": embeddings(ids)}) for alpha in randoms]
    for name, alpha, given in named:
        with LoopServe(alpha=alpha, decode=False, shortest=0).on(target) as told:
            own = states(**given)
        shares = [event.data.get("attended", 1.0) for event in told.events if event.kind == "prefill"]
        rows[name] = {**compared(target, own, dense, ids[0, at + 1]), "attended": float(np.mean(shares or [1.0]))}
    return rows


def compared(target: Target, own: Tensor, dense: Tensor, following: Tensor) -> Row:
    """Distributions of the next token beside those of the model's own attention, from hidden states."""
    head = target.hf.get_output_embeddings()
    parts: list[Tensor] = []
    for ours, plain, token in zip(own.split(PART), dense.split(PART), following.split(PART), strict=True):
        found, wanted = (head(states).float().log_softmax(-1) for states in (ours, plain))
        kl = (wanted.exp() * (wanted - found)).sum(1)
        nll, dense_nll = (-logs.gather(1, token[:, None])[:, 0] for logs in (found, wanted))
        parts.append(torch.stack([kl, nll, dense_nll, (wanted.argmax(1) == found.argmax(1)).float()]))
    means = torch.cat(parts, 1).double().mean(1).tolist()
    return dict(zip(("kl", "nll", "dense_nll", "same"), means, strict=True))


def with_margin(values: Any, shown: str) -> str:
    """The mean of values, with two standard errors from three values on."""
    margin = margin_of(np.asarray(values))
    return f"{values.mean():{shown}}" + ("" if margin is None else f" ± {margin:{shown.strip('+')}}")


COLUMNS: Columns = {
    "texts": lambda own: str(len(own)),
    "attended": lambda own: f"{own['attended'].mean():.0%}",
    "KL": lambda own: f"{own['kl'].mean():.4f}",
    "NLL": lambda own: with_margin(own["change"], "+.4f"),
    "largest": lambda own: f"{own['change'].max():+.4f}",
    "top-1 same": lambda own: with_margin(own["same"], ".1%"),
    "worst text": lambda own: f"{own['change'].max():+.4f}",
    "least top-1 same": lambda own: f"{own['same'].min():.1%}",
}
"""What tables say of some texts."""
BY_KIND = ("sample, alpha", "text", "tokens"), ("texts", "attended", "KL", "NLL", "largest", "top-1 same")
BY_LENGTH = ("model", "tokens", "sample, alpha"), ("texts", "attended", "NLL", "worst text", "least top-1 same")


def table(rows: Row, places: Sequence[str] = BY_KIND[0], columns: Sequence[str] = BY_KIND[1]) -> str:
    """A line for each place: means over texts."""
    lines: list[Row] = []
    for name, row in rows.items():
        model, kind, length, _ = name.split(", ")
        for alpha, found in row.items():
            if isinstance(found, dict):
                place = {"sample, alpha": alpha, "model": model, "text": f"{model}, {kind}", "tokens": length}
                lines.append({**place, **found, "change": found["nll"] - found["dense_nll"]})
    groups = pd.DataFrame(lines).groupby(list(places), sort=False)
    said: list[list[str]] = []
    for place, own in groups:
        at: Any = place
        said.append([*at, *(COLUMNS[name](own) for name in columns)])
    return markdown([*places, *columns], said)


def main(
    models: Sequence[str],
    *,
    alphas: Sequence[float] = (LoopServe.alpha,),
    random_alphas: Sequence[float] = (),
    lengths: Sequence[int] = (4096, 8192),
    kinds: Sequence[Literal[*TEXTS]] = tuple(TEXTS),
    dialogue_files: Sequence[Path] = (),
    pieces: Sequence[int] = (1,),
    positions: int = 4096,
    device: str = "cpu",
    page: Path | None = None,
    short_page: Path | None = None,
    out: Path = Path("figures/loopserve_real.json"),
) -> None:
    """Make what the module describes.

    Args:
        models: Names, folders or files.
        kinds: Kinds of text.
        dialogue_files: JSON lines of dialogues.
        pieces: Which pieces of each text.
        random_alphas: Alphas with a sample that is random.
        positions: Places of the second half, at most, at which distributions are compared.
        page: Page whose table of texts is replaced.
        short_page: Page whose table of lengths is replaced.
    """
    steps = Steps("loopserve-real", out, {"dense_above": LoopServe.dense_above}, device, "float32")
    for model in models:
        target = target_of(load(model, device=device))
        for number, length, kind in product(pieces, lengths, kinds):
            ids = piece(target, TEXTS[kind](dialogue_files), length, number).to(target.device)
            work = partial(measured, target, ids, alphas, random_alphas, positions)
            steps.do(f"{Path(model).stem}, {kind}, {length}, {number}", work)
    for file, parts in ((page, BY_KIND), (short_page, BY_LENGTH)):
        if file is not None:
            put_table(file, "loopserve.real", table(steps.rows, *parts))
    steps.end()


if __name__ == "__main__":
    run(main)
