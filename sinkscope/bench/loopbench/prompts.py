"""Prompts of LoopBench-DC, LoopBench-RI and 2WikiMultihopQA: what one is, and the files they are kept in."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from sinkscope.errors import SinkscopeError

Bench = Literal["dc", "ri", "2wiki"]
BENCHES: tuple[Bench, ...] = get_args(Bench)
TITLES: dict[Bench, str] = {"dc": "LoopBench-DC", "ri": "LoopBench-RI", "2wiki": "2WikiMultihopQA"}
DATA = Path(__file__).with_name("data")
# Sets that ship, sized for the model in the package: name -> files in `DATA`.
SHIPPED: dict[str, tuple[str, ...]] = {
    "small": ("small-dc.jsonl", "small-ri.jsonl"),
    "small-dc": ("small-dc.jsonl",),
    "small-ri": ("small-ri.jsonl",),
}


@dataclass(frozen=True)
class Prompt:
    """One prompt of a benchmark.

    Attributes:
        id: unique in its set, such as "dc-0007".
        bench: "dc" (LoopBench-DC), "ri" (LoopBench-RI) or "2wiki".
        prompt: the whole text.
        tokens: its length for the tokenizer it was built with, special tokens included.
        source_id: `_id` of the record it was made of.
        seed: of its random choices; a record used again has the next one.
        truncated: whether the text of the record was cut for length.
        answers: right answers ("2wiki" only).
    """

    id: str
    bench: Bench
    prompt: str
    tokens: int
    source_id: str
    seed: int
    truncated: bool
    answers: tuple[str, ...] = ()

    def to_json(self) -> str:
        """One line of a file of prompts."""
        fields = asdict(self)
        if not self.answers:
            del fields["answers"]
        return json.dumps(fields, ensure_ascii=False)


_TYPES: dict[str, type] = {
    "id": str,
    "bench": str,
    "prompt": str,
    "tokens": int,
    "source_id": str,
    "seed": int,
    "truncated": bool,
}


def load_prompts(name_or_path: str | os.PathLike[str] = "small") -> list[Prompt]:
    """Read a set of prompts.

    Args:
        name_or_path: "small" (the set that ships; "small-dc" and "small-ri" are its halves), or a file that
            `sinkscope loopbench build` wrote.

    Raises:
        SinkscopeError: no such file, or a damaged one; the message has the line.
    """
    names = SHIPPED.get(os.fspath(name_or_path))
    if names is not None:
        return [prompt for name in names for prompt in _read(DATA / name)]
    path = Path(name_or_path)
    if not path.is_file():
        raise SinkscopeError(
            f"there is no file of prompts {os.fspath(name_or_path)!r}: give one that `sinkscope loopbench build` "
            f"wrote, or {', '.join(SHIPPED)}"
        )
    return _read(path)


def manifest_path(prompts: str | os.PathLike[str]) -> Path:
    """Where the manifest of a file of prompts lies: dc.jsonl has dc.manifest.json."""
    path = Path(prompts)
    return path.with_name(f"{path.stem if path.suffix == '.jsonl' else path.name}.manifest.json")


def _read(path: Path) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = (getattr(error, "strerror", None) or "not UTF-8").lower()
        raise SinkscopeError(f"{path.name} cannot be read ({reason}): build it again") from None
    found: list[Prompt] = []
    numbers: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = _parse(line, f"{path.name} line {number}")
        if prompt.id in numbers:
            raise SinkscopeError(
                f"{path.name} line {number}: the id {prompt.id!r} is that of line {numbers[prompt.id]} too: "
                "each prompt needs its own"
            )
        numbers[prompt.id] = number
        found.append(prompt)
    if not found:
        raise SinkscopeError(f"{path.name} has no prompts in it: build it again with `sinkscope loopbench build`")
    return found


def _parse(line: str, where: str) -> Prompt:
    remedy = "build the file again with `sinkscope loopbench build`"
    try:
        content: Any = json.loads(line)
    except ValueError:
        raise SinkscopeError(f"{where} is not JSON (it begins {line[:40]!r}): {remedy}") from None
    if not isinstance(content, dict):
        raise SinkscopeError(
            f"{where} is {type(content).__name__}, expected an object with id, bench, prompt: {remedy}"
        )
    if unknown := sorted(content.keys() - {*_TYPES, "answers"}):
        raise SinkscopeError(f"{where}: unknown field {unknown[0]!r}, expected {', '.join(_TYPES)}: {remedy}")
    for name, kind in _TYPES.items():
        if name not in content:
            raise SinkscopeError(f"{where}: the field {name!r} is missing: {remedy}")
        if type(content[name]) is not kind:
            raise SinkscopeError(f"{where}: {name} is {content[name]!r:.40}, expected {kind.__name__}: {remedy}")
    if content["bench"] not in BENCHES:
        raise SinkscopeError(f"{where}: bench is {content['bench']!r}, expected one of {', '.join(BENCHES)}: {remedy}")
    if not content["prompt"].strip():
        raise SinkscopeError(f"{where}: the prompt is empty: {remedy}")
    answers = content.get("answers", [])
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise SinkscopeError(f"{where}: answers is {answers!r:.40}, expected a list of texts: {remedy}")
    if content["bench"] == "2wiki" and not answers:
        raise SinkscopeError(f"{where}: the field 'answers' is missing, so nothing can be scored: {remedy}")
    fields: dict[str, Any] = {**content, "answers": tuple(answers)}
    return Prompt(**fields)
