"""What this paper's artefacts read: openings of four kinds of text, continued under methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from experiments.papers.loopguard.real import BUDGET, openings_of
from sinkscope.bench.benchmark import run
from sinkscope.bench.record import BenchRecord, Prompt, Turn
from sinkscope.bench.tasks.loops import Loops
from sinkscope.errors import SinkscopeError
from sinkscope.loops.text.signals import end_loop
from sinkscope.measure import Mean, Setup
from sinkscope.measure.margin import SCORES, margin_of
from sinkscope.models.target import Target
from sinkscope.models.text import KINDS

COUNT, NEW = 24, 640
"""Openings of a half, and new tokens: more than those that the paper calls early."""
EARLY = 400
"""Generated tokens before which an intervention is early, from Fig. 4 b."""
Half = Literal["choose", "report"]
VARIANTS = "experiments.papers.loopguard.variants"
METHODS = {
    "whole": "full",
    "streaming": f"streaming:{BUDGET}",
    "h2o": f"h2o:{BUDGET}",
    "random": f"random:{BUDGET}",
    "always": f"{VARIANTS}:always:{BUDGET}",
    "p1": f"{VARIANTS}:p1:{BUDGET}",
    "printed": f"loopguard:paper:{BUDGET}",
    "default": f"loopguard:{BUDGET}",
}
"""Caches and guards. In a batch, the default guard cuts and steers, and takes nothing back."""


@dataclass(frozen=True, kw_only=True)
class Openings(Loops):
    """Openings of prose, dialogue, code and tables, as many of each.

    Attributes:
        half: Those for choosing, or those for reporting.
        new: New tokens.
    """

    half: Half
    new: int

    def prompts(self, target: Target) -> list[Prompt]:
        """Return the openings."""
        openings = openings_of(self.half)
        each = len(openings) // len(KINDS)
        prompts: list[Prompt] = []
        for number, (kind, text) in enumerate(openings):
            if number % each < (self.count or 0) // len(KINDS):
                prompts.append(Prompt(f"{self.half}-{number}", (Turn(text),), kind))
        return prompts

    def prompts_of_file(self) -> None:
        """Return none: the openings are shipped."""

    def new_tokens(self, target: Target) -> int:
        """Return how many were asked for."""
        return self.new


@dataclass(frozen=True)
class Source:
    """Where outputs come from.

    Attributes:
        setup: The model.
        count: Openings of a half, a multiple of four.
        new: New tokens.
        runs: Folder in which outputs stay, so that a measurement goes on where it was interrupted; None: they do not.
    """

    setup: Setup
    count: int
    new: int
    runs: Path | None

    def outputs(self, names: Iterable[str], half: Half = "report", heat: float = 0.0) -> dict[str, list[BenchRecord]]:
        """Continue the openings of a half in one batch, under each method, at a temperature.

        Raises:
            SinkscopeError: The number of openings is no multiple of four, or there are not as many.
        """
        most = len(openings_of(half))
        if self.count % len(KINDS) or self.count > most:
            raise SinkscopeError(f"--count {self.count}: give a multiple of {len(KINDS)} from {len(KINDS)} to {most}")
        out, target = None, self.setup.target
        if self.runs is not None:
            out = self.runs / f"{Path(target.name).stem}-{half}-{self.count}-{self.new}-{heat:g}"
        task, asked = Openings(half=half, count=self.count, new=self.new), {METHODS[name]: name for name in names}
        settings = {"batch_size": self.count, "temperature": heat, "seed": self.setup.seed}
        outputs: dict[str, list[BenchRecord]] = {name: [] for name in asked.values()}
        for record in run(target, task, [*asked], out=out, progress=self.setup.progress, **settings):
            outputs[asked[record.method]].append(record)
        return outputs

    def opening(self, record: BenchRecord) -> list[int]:
        """Return the tokens of the opening of an output."""
        half, _, number = record.prompt.partition("-")
        ids: list[int] = self.setup.tokenizer(openings_of(half)[int(number)][1], verbose=False)["input_ids"]
        return ids

    @torch.no_grad()
    def largest(self, before: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Return the largest probability of the token after each of an output's, read with the whole cache."""
        logits = self.setup.target.hf(input_ids=torch.tensor([[*before, *tokens]])).logits[0, len(before) :]
        largest: list[float] = logits.float().softmax(-1).amax(-1).tolist()
        return largest


def loops(record: BenchRecord) -> bool:
    """Return whether an output ends in three equal copies, 24 tokens or more."""
    return record.ended == "cap" and end_loop(record.tokens) is not None


def share(values: Iterable[float | bool]) -> Mean:
    """Return the share of outputs of which something holds, with its margin over outputs."""
    each = np.array([*values], dtype=float)
    return Mean(float(each.mean()), margin_of(each, SCORES), tuple(each.tolist()))


def mean(values: Iterable[float]) -> Mean:
    """Return the mean of a number over outputs, with its margin."""
    each = np.array([*values], dtype=float)
    return Mean(float(each.mean()), margin_of(each), tuple(each.tolist()))


def acts_of(record: BenchRecord) -> list[int]:
    """Return the steps at which the guard acted, of whatever kind it is."""
    return [event["step"] for event in record.events if event["kind"] == "guard"]
