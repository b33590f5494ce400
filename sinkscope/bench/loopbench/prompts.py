"""Prompts of LoopBench-DC, LoopBench-RI and 2WikiMultihopQA, texts that repeat honestly, and the files of both."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from pydantic import ConfigDict

from sinkscope.errors import SinkscopeError
from sinkscope.records import read_records

Bench = Literal["dc", "ri", "stories", "organism", "2wiki"]
BENCHES: tuple[Bench, ...] = get_args(Bench)
TITLES: dict[Bench, str] = {
    "dc": "LoopBench-DC",
    "ri": "LoopBench-RI",
    "stories": "Story openings",
    "organism": "Loop organism",
    "2wiki": "2WikiMultihopQA",
}
DATA = Path(__file__).with_name("data")
# Sets that ship, sized for the model in the package: name -> files in `DATA`.
SHIPPED: dict[str, tuple[str, ...]] = {
    "small": ("small-dc.jsonl", "small-ri.jsonl"),
    "small-dc": ("small-dc.jsonl",),
    "small-ri": ("small-ri.jsonl",),
    "stories": ("openings.jsonl",),
    "organism": ("organism.jsonl",),
}


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt of a benchmark.

    Attributes:
        id: unique in its set, such as "dc-0007".
        bench: the set; "dc" is LoopBench-DC, "ri" is LoopBench-RI.
        prompt: the whole text.
        tokens: its length for the tokenizer it was built with, special tokens included.
        source_id: `_id` of the record that it was made from.
        seed: seed of its random choices; a record that is used again has the next one.
        truncated: whether the record's text was cut to length.
        answers: right answers ("2wiki" only).
        period: tokens of the cycle that the full cache falls into ("organism" only); None: it falls into none.
        onset: new tokens before that cycle ("organism" only).

    Raises:
        SinkscopeError: the prompt is empty, or one of "2wiki" has no answer.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    id: str
    bench: Bench
    prompt: str
    tokens: int
    source_id: str
    seed: int
    truncated: bool
    answers: tuple[str, ...] = ()
    period: int | None = None
    onset: int | None = None

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise SinkscopeError("the prompt is empty, expected a text")
        if self.bench == "2wiki" and not self.answers:
            raise SinkscopeError("answers is missing or empty, expected at least one, or nothing can be scored")

    def to_json(self) -> str:
        """One line of a file of prompts."""
        fields = {name: value for name, value in asdict(self).items() if value is not None and value != ()}
        return json.dumps(fields, ensure_ascii=False)


@dataclass(frozen=True)
class Honest:
    """A text that repeats honestly; the monitor reads it token by token and must stay silent.

    Attributes:
        id: its name, such as "table-csv".
        kind: "table", "data", "code", "refrain", "list" or "log".
        prompt: the text.
        bench: what distinguishes it from a prompt.
    """

    id: str
    kind: str
    prompt: str
    bench: str = "honest"


def honest_texts() -> list[Honest]:
    """Texts in which form repeats and content does not: tables, data, code, refrains, lists and logs.

    A guard that fires on one of them is wrong. In order of their names, each of a few hundred words.
    """
    return read_records(DATA / "honest.jsonl", Honest, "the file that ships", key="id")


def load_prompts(name_or_path: str | os.PathLike[str] = "small") -> list[BenchPrompt]:
    """Read a set of prompts.

    Args:
        name_or_path: a set that ships ("small", of which "small-dc" and "small-ri" are the halves, "stories", or
            "organism", for the model of that name), or a file that `sinkscope loopbench build` wrote.

    Raises:
        SinkscopeError: no such file, or a damaged one; the message has the line.
    """
    names = SHIPPED.get(os.fspath(name_or_path))
    paths = [DATA / name for name in names] if names else [Path(name_or_path)]
    expected = f"a file that `sinkscope loopbench build` wrote, or {', '.join(SHIPPED)}"
    return [prompt for path in paths for prompt in read_records(path, BenchPrompt, expected, key="id")]
