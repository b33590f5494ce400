"""What this paper's artefacts read: openings of four kinds of text, continued under methods, and signals of outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from experiments.papers.loopguard.real import BUDGET, openings_of
from experiments.papers.loopguard.verdicts import HALVES
from sinkscope.bench.benchmark import run
from sinkscope.bench.record import BenchRecord, Prompt, Turn
from sinkscope.bench.tasks.loops import Loops
from sinkscope.errors import SinkscopeError
from sinkscope.measure import Mean, Setup, mean_of
from sinkscope.measure.margin import SCORES, margin_of
from sinkscope.models.target import Target
from sinkscope.models.text import KINDS

COUNT, NEW = 24, 640
"""Openings of a half, and new tokens: more than those that the paper calls early."""
Half = Literal["choose", "report"]
VARIANTS = "experiments.papers.loopguard.variants"
METHODS = {
    "whole cache": "full",
    "StreamingLLM": f"streaming:{BUDGET}",
    "H2O": f"h2o:{BUDGET}",
    "random": f"random:{BUDGET}",
    "always on": f"{VARIANTS}:always:{BUDGET}",
    "p1 alone": f"{VARIANTS}:p1:{BUDGET}",
    "as printed": f"loopguard:paper:{BUDGET}",
    "default": f"loopguard:{BUDGET}",
}
"""What continues the openings, by the names of tables; the default cuts and steers here, and takes no token back."""


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
        assert self.count is not None
        prompts: list[Prompt] = []
        taken = dict.fromkeys(KINDS, 0)
        for number, (kind, text) in enumerate(openings_of(self.half)):
            taken[kind] += 1
            if taken[kind] <= self.count // len(KINDS):
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

    def __post_init__(self) -> None:
        most = len(openings_of(HALVES[0]))
        if self.count % len(KINDS) or not 0 < self.count <= most:
            raise SinkscopeError(f"--count {self.count}: give a multiple of {len(KINDS)} from {len(KINDS)} to {most}")

    def outputs(
        self, methods: Iterable[str], half: Half = "report", temperature: float = 0.0
    ) -> dict[str, list[BenchRecord]]:
        """Continue the openings of a half in one batch, under methods by their names in tables."""
        task = Openings(half=half, count=self.count, new=self.new)
        target = self.setup.target
        out = None
        if self.runs is not None:
            out = self.runs / f"{Path(target.name).stem}-{half}-{self.count}-{self.new}-{temperature:g}"
        settings = {"batch_size": self.count, "temperature": temperature, "seed": self.setup.seed}
        outputs: dict[str, list[BenchRecord]] = {}
        for name in methods:
            report = partial(self._report, name)
            outputs[name] = [*run(target, task, [METHODS[name]], out=out, progress=report, **settings)]
        return outputs

    def _report(self, name: str, what: str, done: int, total: int) -> None:
        self.setup.progress(f"{name}: {what}", done, total)

    def ids_of(self, record: BenchRecord) -> list[int]:
        """Return the tokens of the opening of an output."""
        texts = {prompt.id: prompt for prompt in self.prompts(record.prompt)}
        ids: list[int] = self.setup.tokenizer(texts[record.prompt].turns[0].text, verbose=False)["input_ids"]
        return ids

    def prompts(self, name: str) -> list[Prompt]:
        """Return the openings of the half of an output."""
        half: Half = "choose" if name.startswith("choose") else "report"
        return Openings(half=half, count=self.count, new=self.new).prompts(self.setup.target)

    @torch.no_grad()
    def largest(self, before: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Return the largest probability of the token after each of an output's, read with the whole cache."""
        ids = torch.tensor([[*before, *tokens]], device=self.setup.target.device)
        logits = self.setup.target.hf(input_ids=ids, use_cache=False).logits[0, len(before) :]
        largest: list[float] = logits.float().softmax(-1).amax(-1).tolist()
        return largest


def share(values: Iterable[float | bool]) -> Mean:
    """Return the share of outputs of which something holds, with its margin over outputs."""
    each = np.array([float(value) for value in values])
    return Mean(float(each.mean()), margin_of(each, SCORES), tuple(each.tolist()))


def mean(values: Iterable[float]) -> Mean:
    """Return the mean of a number over outputs, with its margin."""
    found = mean_of(np.array([*values], dtype=float))
    assert found is not None
    return found


def acts_of(record: BenchRecord) -> list[int]:
    """Return the steps at which the guard acted, of whatever kind it is."""
    return [event["step"] for event in record.events if event["kind"] == "guard"]
