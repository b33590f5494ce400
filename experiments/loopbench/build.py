"""Prompts of LoopBench-DC and LoopBench-RI from LongBench's files, for `sinkscope bench`.

    python -m experiments.loopbench.build dc multi_news.jsonl --model MODEL --out dc.jsonl
    python -m experiments.loopbench.build ri narrativeqa.jsonl --model MODEL --out ri.jsonl
    sinkscope bench --task loops:source=dc.jsonl --model MODEL --methods full,streaming,h2o,loopguard:paper --out dc

Xu et al. 2026 (section 4.1, appendix C) give sources, sizes and mean lengths: 300 prompts from MultiNews with 3,853
tokens and 200 from NarrativeQA with 5,376. They state neither the truncation rule nor the tokenizer, and MultiNews has
200 records in LongBench. Here a second pass in another order begins where the records run out, and the longest prompts
are cut so that the mean is the paper's; the mean that is reached is printed.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.longbench import LongBenchRecord, read_longbench
from experiments.record import Row, write_rows
from experiments.script import run
from sinkscope.models.checkpoints.checkpoint import Files

COUNTS = {"dc": 300, "ri": 200}
TOKENS = {"dc": 3853, "ri": 5376}
"""The paper's numbers of prompts and mean lengths."""
REDUNDANCY = 0.5
"""Words repeated over words of the record, for LoopBench-DC."""
NAMES_FROM = 20_000
"""Characters from which the seed history takes names: about what remains after the cut."""

DC_HEAD = """\
Task: entity extraction and normalization.
Go through the transcript below and list every person, organization, location, event and other named entity that \
occurs in it. Write each name as the title of its Wikipedia article, so that all spellings of one entity become \
one name.

Format: strict JSON, one item after another, separated by commas, and nothing else. Each item has exactly these fields:
{"name": "<title of the article>", "wikipedia url": "<address of the article>", "type": "<type>"}
The type is one of: Organization, Person, Location, Event, Other.

Transcript:
"""
# Without this line a base model would continue the transcript.
DC_TAIL = "\n\nItems:\n"
RI_HEAD = "Narrative:\n"
RI_PROTOCOL = """

Protocol: interpret the narrative recursively. An iteration has four steps, under these headers and in this order:
[Draft Interpretation] say what the narrative means.
[Self-Correction] name a weakness of the draft and correct it.
[Recursive Expansion] take the corrected draft as the text to interpret, and widen it.
[Repeat] begin the next iteration at once.
The protocol has no last iteration. Do not conclude, do not summarize, do not leave it.

Logic stream:
"""
DRAFT, CORRECTION = "[Draft Interpretation]", "[Self-Correction]"
_DRAFTS = (
    "On the surface this is the story of {who}; below it, it asks what is owed to those who were there before.",
    "{who} stands for a choice that was made long ago, and the rest of the narrative counts what it cost.",
    "What happens to {who} matters less than the order in which we are told of it.",
    "The narrative sets {who} against a world that goes on without taking notice, and lets neither of them win.",
    "Everything turns on what {who} does not say; the silence is the plot.",
    "{who} seems to look for something outside, yet every step leads back to where the account began.",
    "The narrative is a promise that {who} gave, kept in a way that nobody had in mind.",
    "Read as a whole, this is an account of how {who} learns to see what had been in plain sight.",
)
_CORRECTIONS = (
    "The draft takes {who} at their word. The narrator has reasons of their own, and these belong into the reading.",
    "This is too tidy: it leaves out {other}, without whom the middle of the narrative could not be told.",
    "The draft names a theme but no passage. It has to begin from {part} and show the theme there.",
    "Cause and sign were mixed up here. {who} does not bring about the turn, {who} only marks it.",
    "The draft speaks of an end, but {part} leaves the matter open, so the reading must stay open as well.",
    "What was said of {who} holds for {other} with more right; the two have to be read together.",
    "The draft repeats the narrative instead of interpreting it. It must say what would be lost without {part}.",
    "That reading would fit many stories. What sets this one apart is {part}, and it was passed over.",
)
_PARTS = ("the opening", "the first turn", "the middle", "the last scene", "the longest silence", "the smallest detail")
_SENTENCE = re.compile(r"(?<=[.!?…])\s+|(?<=[.!?…][\"'”’)])\s+|\n+")
_LONGEST_SENTENCE = 40  # words; longer runs without a full stop are divided
_NO_NAMES = frozenset(
    "Captain Doctor Lady Lord Madame Miss Mister Mother Mrs Saint Sir Sister Monday Tuesday Wednesday Thursday Friday "
    "Saturday Sunday January February March April May June July August September October November December".split()
)
_NAME = re.compile(r"(?<![.!?…\"“”'’:\n]\s)(?<!^)\b[A-Z][a-z]{2,}\b")


@dataclass(frozen=True)
class Draft:
    """A prompt before it is cut: the text of a record, and the form that goes around it."""

    record: LongBenchRecord
    body: str
    form: Callable[[str], str]


def dirty(text: str, rng: random.Random) -> str:
    """One paragraph with repeated spans: copies of one to four sentences reappear later in the text.

    Args:
        text: Any text.
        rng: Chooses what is repeated and where.
    """
    sentences: list[str] = []
    for part in _SENTENCE.split(text):
        words = part.split()
        for start in range(0, len(words), _LONGEST_SENTENCE):
            sentences.append(" ".join(words[start : start + _LONGEST_SENTENCE]))
    sizes = [len(each.split()) for each in sentences]
    copies: list[list[str]] = [[] for _ in sentences]
    left = REDUNDANCY * sum(sizes)
    while left > 0:
        length = rng.randint(1, min(4, len(sentences)))
        start = rng.randrange(len(sentences) - length + 1)
        while length > 1 and sum(sizes[start : start + length]) > left:
            length -= 1
        copies[rng.randrange(start + length - 1, len(sentences))] += sentences[start : start + length]
        left -= sum(sizes[start : start + length])
    pieces: list[str] = []
    for sentence, after in zip(sentences, copies, strict=True):
        pieces += [sentence, *after]
    return " ".join(pieces)


def seed_history(narrative: str, rng: random.Random) -> str:
    """One or two completed iterations (draft and self-correction), followed by the header of the next draft."""
    counts = Counter(name for name in _NAME.findall(narrative) if name not in _NO_NAMES)
    items = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    names = [name for name, number in items if number > 1][:6]
    who, other = rng.sample(names, 2) if len(names) > 1 else (*names, "the narrator", "the other one")[:2]
    iterations = rng.randint(1, 2)
    drafts = rng.sample(_DRAFTS, iterations)
    corrections = rng.sample(_CORRECTIONS, iterations)
    lines: list[str] = []
    for number, texts in enumerate(zip(drafts, corrections, strict=True), 1):
        filled = [text.format(who=who, other=other, part=rng.choice(_PARTS)) for text in texts]
        draft, correction = (sentence[:1].upper() + sentence[1:] for sentence in filled)
        lines += [f"Iteration {number}", DRAFT, draft, CORRECTION, correction, ""]
    return "\n".join([*lines, f"Iteration {iterations + 1}", DRAFT, ""])


def drafts_of(bench: str, records: Sequence[LongBenchRecord], count: int, seed: int) -> list[Draft]:
    """The prompts before they are cut; a further pass over the records has another order and another seed."""
    drafts: list[Draft] = []
    used: set[str] = set()
    while len(drafts) < count:
        turn = seed + len(drafts) // len(records)
        order = list(records)
        random.Random(f"order {turn}").shuffle(order)
        for record in order[: count - len(drafts)]:
            rng = random.Random(f"{turn} {record.id}")
            text = record.context
            if bench == "ri" and text in used:  # LongBench uses one narrative for several questions
                start = rng.randrange(len(text) // 2 + 1)
                text = text[start:].partition(" ")[2] or text
            used.add(record.context)
            drafts.append(_draft(bench, record, text, rng))
    return drafts


def _draft(bench: str, record: LongBenchRecord, text: str, rng: random.Random) -> Draft:
    if bench == "dc":
        return Draft(record, dirty(text, rng), lambda context: f"{DC_HEAD}{context}{DC_TAIL}")
    history = seed_history(text[:NAMES_FROM], rng)
    return Draft(record, text.strip(), lambda narrative: f"{RI_HEAD}{narrative}{RI_PROTOCOL}{history}")


def build(
    bench: str, records: Sequence[LongBenchRecord], tokenizer: Any, count: int | None, target: int | None, seed: int
) -> list[Row]:
    """Rows of the file of prompts; the same arguments give the same rows.

    Args:
        bench: "dc" or "ri".
        records: Records of LongBench.
        tokenizer: Measures lengths with its default encoding.
        count: Number of prompts; by default the paper's.
        target: Mean length to reach by cutting the longest prompts, by default the paper's.
        seed: Seed of the order, the repeated spans and the seed history.
    """

    def length(text: str) -> int:
        return len(tokenizer(text, verbose=False)["input_ids"])

    drafts = drafts_of(bench, records, count or COUNTS[bench], seed)
    longest = longest_for_mean([length(each.form(each.body)) for each in drafts], target or TOKENS[bench])
    rows: list[Row] = []
    for number, draft in enumerate(drafts):
        row: Row = {"id": f"{bench}-{number:04d}", "set": bench, "source_id": draft.record.id}
        rows.append({**row, "prompt": cut(draft, longest, length)})
    return rows


def longest_for_mean(lengths: Sequence[int], target: int) -> int:
    """The length at which to cut so that the mean is `target`; the largest length if the mean is below it anyway."""
    items = sorted(lengths)
    total = target * len(lengths)
    for number, length in enumerate(items):
        share = (total - sum(items[:number])) // (len(items) - number)
        if length > share:
            return share
    return items[-1]


def cut(draft: Draft, longest: int, length: Callable[[str], int]) -> str:
    """The prompt with as much of the record as fits, cut between words."""
    if length(draft.form(draft.body)) <= longest:
        return draft.form(draft.body)
    low = 0
    high = len(draft.body)
    while high - low > 1:
        at = (low + high) // 2
        if length(draft.form(_part(draft.body, at))) <= longest:
            low = at
        else:
            high = at
    return draft.form(_part(draft.body, low))


def _part(body: str, size: int) -> str:
    """About `size` characters from the front; whole words if there are spaces."""
    return body[:size].rpartition(" ")[0] or body[:size]


def main(
    bench: Literal[*COUNTS],
    source: Path,
    *,
    model: str | None = None,
    count: int | None = None,
    target_tokens: int | None = None,
    out: Path,
) -> None:
    """Make what the module describes.

    Args:
        source: LongBench's .jsonl of the task.
        model: Count tokens with the tokenizer of this model.
    """
    tokenizer = Files(model).read_tokenizer()
    records = read_longbench(source)
    rows = build(bench, records, tokenizer, count, target_tokens, 0)
    write_rows(out, rows)
    lengths = [len(tokenizer(row["prompt"], verbose=False)["input_ids"]) for row in rows]
    counted_by = model or "the model in the package"
    print(f"{len(rows)} prompts, mean {sum(lengths) / len(lengths):,.0f} tokens of {counted_by}")


if __name__ == "__main__":
    run(main)
