"""How soon loops are found, and what a token costs: our monitors and servers' rules.

    python -m experiments.bench_detect [--draws 10] [--seed report] [--out figures/bench_detect.json] [--page PAGE]

A stream is 600 tokens of the prose that ships, then the next P tokens of it again and again, in tokens of the bundled
tokenizer: exactly, or nearly so, with a random token in place of one token of every copy, somewhere else each time, or
counting, with another token at the start of every copy.
The delay is counted from the first token of the first copy, so three copies of 16 tokens are a delay of 48.

The probabilities that the paper's monitor gets are made up in its favour: in a loop the model is sure (0.97), in prose
it is for every other token.

Servers' rules are written from their documentation, with its numbers or, where it has none, with those of an example:

- vllm: `repetition_detection` (vllm-project/vllm pull request 35451) has no default sizes; 1 to 20, 3 copies are those
  of pull request 40097 (structured output), 4 to 128, 4 copies those of pull request 52677 (end of reasoning).
- llama.cpp: ggml-org/llama.cpp pull request 26039.
- vllm-mlx: waybarrios/vllm-mlx pull request 723; it looks every 16th token, from the 64th on.

Their cost is that of these few lines of Python, and servers may do better.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from experiments.drawn import put_table
from experiments.loopguard.sensitivity import SURE, encoders
from experiments.record import Row, record, value_of_each
from experiments.script import run
from sinkscope.files.output import write_atomic
from sinkscope.loops import Monitor, MonitorSettings
from sinkscope.models.text import typical_text

PERIODS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
FORMS = ("exact", "near", "counting")
HEALTHY, COPIES, LEAST = 600, 8, 480  # tokens before the loop; copies of it, or as many as make so many tokens
HISTORIES, BLOCK = (1_000, 10_000, 100_000), 512
ENOUGH = 48  # tokens of 3 copies that any rule may wait for


class Rule(Protocol):
    """What takes one token at a time and says whether it is in a loop."""

    def add(self, token: int, p_max: float) -> bool:
        """Take the next token."""
        ...


@dataclass
class Watching:
    """One of our monitors."""

    monitor: Monitor

    def add(self, token: int, p_max: float) -> bool:
        """Take the next token."""
        return self.monitor.update(token, p_max).trigger


class Server:
    """The last tokens are `copies` exact copies of something of `smallest` to `largest` tokens, `tokens` in all."""

    def __init__(
        self, smallest: int, largest: int, copies: int, *, tokens: int = 0, every: int = 1, after: int = 0
    ) -> None:
        self.sizes = range(smallest, largest + 1)
        self.copies = copies
        self.tokens = tokens
        self.every = every
        self.after = after
        self.ids = list[int]()
        self.seen = 0
        self.most = max(copies * largest, tokens)

    def add(self, token: int, p_max: float) -> bool:
        """Take the next token."""
        ids = self.ids
        ids.append(token)
        self.seen += 1
        if len(ids) > 2 * self.most:
            del ids[: -self.most]
        if self.seen < self.after or self.seen % self.every:
            return False
        before = ids[-1 - self.sizes[0] : -2 - self.sizes[-1] : -1]
        at = -1
        for _ in range(before.count(token)):
            at = before.index(token, at + 1)
            if self._repeats(self.sizes[at]):
                return True
        return False

    def _repeats(self, size: int) -> bool:
        long = max(self.copies * size, self.tokens)
        return long <= len(self.ids) and self.ids[size - long :] == self.ids[-long:-size]


RULES: dict[str, Callable[[], Rule]] = {
    "default": lambda: Watching(Monitor()),
    "paper": lambda: Watching(Monitor(MonitorSettings.paper())),
    "vllm (1 to 20, 3 copies)": lambda: Server(1, 20, 3),
    "vllm (4 to 128, 4 copies)": lambda: Server(4, 128, 4),
    "llama.cpp (16 to 1024, 4 copies)": lambda: Server(16, 1024, 4),
    "vllm-mlx (1 to 128, 3 copies, 48 tokens)": lambda: Server(1, 128, 3, tokens=48, every=16, after=64),
}


def stream(text: Sequence[int], period: int, form: str, rng: random.Random) -> list[int]:
    """Prose, then a loop."""
    at = rng.randrange(len(text) - HEALTHY - period)
    made = list(text[at : at + HEALTHY])
    piece = text[at + HEALTHY : at + HEALTHY + period]
    for _ in range(max(COPIES, -(-LEAST // period))):
        copy = list(piece)
        if form == "near":
            copy[rng.randrange(period)] = rng.choice(text)
        if form == "counting":
            copy[0] = rng.choice(text)
        made += copy
    return made


def first_alarm(rule: Rule, ids: Sequence[int], sure: Callable[[int], float]) -> int | None:
    """Number of tokens after which the rule speaks up first."""
    return next((i + 1 for i, token in enumerate(ids) if rule.add(token, sure(i))), None)


def certain(period: int, seed: str) -> Callable[[int], float]:
    """The probability that is made up for each position: from the second copy on the model is sure."""
    draw = random.Random(seed)
    return lambda i: SURE if i >= HEALTHY + period else draw.choice((0.5, SURE))


def delays(draws: int, seed: str) -> dict[str, dict[str, list[Row]]]:
    """By rule and form, for each period: share of loops found, and median delay in tokens and copies."""
    text = encoders()["bundled"](typical_text())
    found: dict[str, dict[str, list[Row]]] = {name: {form: [] for form in FORMS} for name in RULES}
    for form in FORMS:
        for period in PERIODS:
            if period <= 256:
                several = draws
            else:
                several = max(2, draws // 3)
            loops = []
            for i in range(several):
                loops.append(stream(text, period, form, random.Random(f"{seed} {form} {period} {i}")))
            for name, make in RULES.items():
                alarms = []
                for ids in loops:
                    alarms.append(first_alarm(make(), ids, certain(period, f"{seed} certainty")))
                after = []
                for alarm in alarms:
                    if alarm is not None and alarm > HEALTHY:
                        after.append(alarm - HEALTHY)
                median = None
                if after:
                    median = statistics.median(after)
                counts = []
                for each in alarms:
                    counts.append(each is not None and each <= HEALTHY)
                found[name][form].append(
                    {
                        "period": period,
                        "found": round(len(after) / len(loops), 3),
                        "before": sum(counts),
                        "tokens": median,
                        "copies": None if median is None else round(median / period, 2),
                    }
                )
    return found


def costs(rounds: int) -> dict[str, dict[str, dict[int, float]]]:
    """By rule and kind of stream: microseconds a token takes at each length of history, the median of rounds."""
    text = encoders()["bundled"](typical_text())
    piece = text[:24]
    kinds = {"text": lambda i: text[i % len(text)], "loop": lambda i: piece[i % 24]}
    out: dict[str, dict[str, dict[int, float]]] = {}
    for rule, make in RULES.items():
        for kind, token in kinds.items():
            ids = []
            for each in range(HISTORIES[-1] + BLOCK):
                ids.append(token(each))
            taken: dict[int, list[float]] = {history: [] for history in HISTORIES}
            for _ in range(rounds):
                watching = make()
                at = 0
                for history in HISTORIES:
                    for i in range(at, history):
                        watching.add(ids[i], SURE)
                    at = history + BLOCK
                    start = time.thread_time()
                    for i in range(history, at):
                        watching.add(ids[i], SURE)
                    taken[history].append((time.thread_time() - start) / BLOCK * 1e6)
            out.setdefault(rule, {})[kind] = {h: round(statistics.median(t), 2) for h, t in taken.items()}
    return out


def table(result: Row) -> str:
    """A row per rule, as the page has it."""
    lines = [
        "| rule | exact | near | counting | delay / allowed | us per token |",
        "|---|---|---|---|---|---|",
    ]
    for rule in RULES:
        rows = result["delays"][rule]
        shares = []
        for form in FORMS:
            values = value_of_each(rows[form], "found")
            shares.append(statistics.mean(values))
        late = []
        for r in rows["exact"]:
            if r["tokens"] is not None:
                late.append(r["tokens"] / max(3 * r["period"], ENOUGH))
        cost = result["microseconds"][rule]
        most = max(value for kind in cost.values() for value in kind.values())
        lines.append(
            f"| {rule} | {' | '.join(f'{share:.0%}' for share in shares)} | {statistics.median(late):.2f} | "
            f"{most:.1f} |"
        )
    return "\n".join(lines)


def main(
    *,
    draws: int = 10,
    rounds: int = 3,
    seed: str = "report",
    out: Path = Path("figures/bench_detect.json"),
    page: Path | None = None,
) -> None:
    """Make what the module describes.

    Args:
        draws: Loops of each period and form; a third above 256 tokens.
        rounds: Times that the cost is measured.
        seed: Another one gives other loops.
        page: Replace the table in this page.
    """
    started = time.perf_counter()
    result = {
        "delays": delays(draws, seed),
        "microseconds": costs(rounds),
    }
    settings = {"draws": draws, "rounds": rounds, "seed": seed, "default": vars(MonitorSettings())}
    write_atomic(out, record("bench-detect", result, settings, started=started, dtype="int"))
    if page is not None:
        put_table(page, "bench_detect", table(result))
    print(table(result))


if __name__ == "__main__":
    run(main)
