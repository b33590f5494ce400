"""Loops: prompts that make greedy decoding repeat itself, and who escapes (Xu et al. 2026, LoopGuard, section 4).

The prompts are those of LoopBench's two sets in a size for the bundled model ("small"), openings of ordinary text
("text"), or a file of prompts. Another benchmark, of circular reasoning, is also called LoopBench.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sinkscope.bench.answer import Batch
from sinkscope.bench.methods import GUARD
from sinkscope.bench.record import Answer, Metrics, Prompt, Turn, read_prompts
from sinkscope.bench.task import Size, Task
from sinkscope.loops.text.monitor import Monitor
from sinkscope.loops.text.signals import (
    LOOP_TOKENS,
    MAX_NEW,
    WINDOW,
    compression_ratio,
    end_loop,
    is_loop,
    type_token_ratio,
)
from sinkscope.models.target import Target, tokenizer_of
from sinkscope.models.text import text_rows, typical_text

DATA = Path(__file__).with_name("data")
SMALL, TEXT = "small", "text"
_TEXT_NEW, _TEXT_COUNT = 384, 16


@dataclass(frozen=True, kw_only=True)
class Loops(Task):
    """Prompts that make decoding loop.

    Attributes:
        source: small, text, or a file of prompts.
        count: Number of prompts of each file, from the first one on, or of openings of text. None: all, or 16 openings.
        opening: Tokens of each opening.
    """

    name = "loops"
    main = "loop"
    low_is_good = True
    unit = "answers that loop"
    columns = ("loop_paper", "eos", "ttr", "cr", "length", "interventions", "alarm")
    budget = 1024

    source: str = SMALL
    count: Size | None = None
    opening: Size = 16

    def prompts(self, target: Target) -> list[Prompt]:
        """Return the prompts of the source."""
        prompts = self.prompts_of_file()
        return self._text(target) if prompts is None else prompts

    def prompts_of_file(self) -> list[Prompt] | None:
        """Return the prompts of the file, or of those in the package; None of openings of text."""
        if self.source == TEXT:
            return None
        files = sorted(DATA.glob("small-*.jsonl")) if self.source == SMALL else [Path(self.source)]
        prompts: list[Prompt] = []
        for file in files:
            prompts += read_prompts(file)[: self.count]
        return prompts

    def new_tokens(self, target: Target) -> int:
        """Return 2,500 as in the paper; 384 for openings of text."""
        if self.source != TEXT:
            return MAX_NEW
        limit = target.max_positions or MAX_NEW
        return max(LOOP_TOKENS, min(_TEXT_NEW, limit - self.opening - 2))

    def _text(self, target: Target) -> list[Prompt]:
        """Openings of pieces of ordinary text, each as long as an answer."""
        tokenizer = tokenizer_of(target)
        bos = getattr(tokenizer, "bos_token_id", None)
        length = self.opening + self.new_tokens(target)
        rows = text_rows(tokenizer, typical_text(), self.count or _TEXT_COUNT, length, bos).tolist()
        openings = [tokenizer.decode(row[int(bos is not None) : self.opening]) for row in rows]
        return [Prompt(f"text-{number}", (Turn(opening),), TEXT) for number, opening in enumerate(openings)]

    def score(self, target: Target, batch: Batch, turn: Turn, answer: Answer) -> Metrics:
        """Return how repetitive the answer is, how it ended, and what a guard did.

        - loop: it ends in three copies of a period with 24 tokens in all, or as the paper's rule says, without the
          length, of the last 256 tokens.
        - loop_paper: the paper's rule (Eq. 7), length included.
        - alarm: step of the first intervention; without one, the step at which LoopGuard's monitor would first fire.
        """
        tokens = answer.tokens
        steps = [event["step"] for event in answer.events if event["kind"] == "guard"]
        return {
            "loop": float(is_looping(tokens)),
            "loop_paper": float(is_loop(tokens, batch.new)),
            "eos": float(answer.ended == "eos"),
            "ttr": type_token_ratio(tokens),
            "cr": compression_ratio(tokens),
            "interventions": float(len(steps)) if batch.methods[0].startswith(GUARD) else None,
            "alarm": steps[0] if steps else first_alarm(tokens),
        }


def is_looping(tokens: Sequence[int]) -> bool:
    """Return whether tokens end in three copies of a period, 24 tokens in all, or their last 256 are a loop."""
    return is_loop(tokens[-WINDOW:], None) or end_loop(tokens) is not None


def first_alarm(tokens: Sequence[int]) -> int | None:
    """Return the step at which the default monitor first fires on an output; None: it does not."""
    monitor = Monitor()
    return next((step.step for step in map(monitor.update, tokens) if step.trigger), None)
