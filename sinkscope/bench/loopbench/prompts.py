"""Prompts of LoopBench-DC, LoopBench-RI and 2WikiMultihopQA, texts that repeat legitimately, the files of both, and
building prompts from LongBench's files.

Xu et al. 2026 (section 4.1, appendix C) give sources, sizes and mean lengths: 300 prompts from MultiNews with 3,853
tokens and 200 from NarrativeQA with 5,376. They state neither the truncation rule nor the tokenizer, and MultiNews has
200 records in LongBench. Our rule is in `docs/loopbench/building.md`; the mean length it reaches is reported next to
theirs.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict

from sinkscope import __version__
from sinkscope.bench.files import (
    ARCHIVE,
    HUB,
    LONGBENCH,
    BuiltSet,
    LongBenchRecord,
    LongBenchSource,
    check_out,
    read_longbench,
)
from sinkscope.errors import SinkscopeError
from sinkscope.files.console import Progress, silent
from sinkscope.files.records import Natural, between, check_values, conform, read_records
from sinkscope.measure import Count, Hidden, Option, Positive, command
from sinkscope.models.load import open_tokenizer

Bench = Literal["dc", "ri", "stories", "organism", "2wiki"]
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
        id: Unique in its set, for example "dc-0007".
        bench: Name of the set; "dc" is LoopBench-DC, "ri" is LoopBench-RI.
        prompt: The complete text.
        tokens: Length in tokens of the tokenizer it was built with, including special tokens.
        source_id: `_id` of the record it was built from.
        seed: Seed of its random choices; a record that is reused has the next seed.
        truncated: Whether the record's text was cut to length.
        answers: Correct answers ("2wiki" only).
        period: Tokens of the cycle that the full cache falls into ("organism" only); None if there is no cycle.
        onset: Number of new tokens before that cycle ("organism" only).

    Raises:
        SinkscopeError: The prompt is empty, or one of "2wiki" has no answer.
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
        """One line of a prompt file."""
        fields = {name: value for name, value in asdict(self).items() if value is not None and value != ()}
        return json.dumps(fields, ensure_ascii=False)


@dataclass(frozen=True)
class Honest:
    """A text that repeats legitimately; the monitor reads it token by token and must not fire.

    Attributes:
        id: Name of the text, such as "table-csv".
        kind: Kind of text: "table", "data", "code", "refrain", "list" or "log".
        prompt: The text.
        bench: Marker that distinguishes it from a prompt.
    """

    id: str
    kind: str
    prompt: str
    bench: str = "honest"


def honest_texts() -> list[Honest]:
    """Texts whose form repeats but whose content does not: tables, data, code, refrains, lists and logs.

    A guard must not fire on any of them. The texts are sorted by name; each has a few hundred words.
    """
    return read_records(DATA / "honest.jsonl", Honest, "the file that ships", key="id")


def load_prompts(name_or_path: str | os.PathLike[str] = "small") -> list[BenchPrompt]:
    """Read a set of prompts.

    Args:
        name_or_path: A bundled set ("small", which consists of "small-dc" and "small-ri"; "stories"; or "organism", for
            the model of that name), or a file that `sinkscope loopbench build` wrote.

    Raises:
        SinkscopeError: The file is missing or damaged; the message names the line.
    """
    names = SHIPPED.get(os.fspath(name_or_path))
    paths = [DATA / name for name in names] if names else [Path(name_or_path)]
    expected = f"a file that `sinkscope loopbench build` wrote, or {', '.join(SHIPPED)}"
    return [prompt for path in paths for prompt in read_records(path, BenchPrompt, expected, key="id")]


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
_PROTOCOL = """

Protocol: interpret the narrative recursively. An iteration has four steps, under these headers and in this order:
[Draft Interpretation] say what the narrative means.
[Self-Correction] name a weakness of the draft and correct it.
[Recursive Expansion] take the corrected draft as the text to interpret, and widen it.
[Repeat] begin the next iteration at once.
The protocol has no last iteration. Do not conclude, do not summarize, do not leave it.

Logic stream:
"""
WIKI2_HEAD = (
    "Below are several passages and, after them, a question about what they say. Reply with the answer alone, without "
    "any further words.\n\nPassages:\n"
)
WIKI2_TAIL = (
    "\n\nUsing the passages above, reply with the answer alone, without any further words.\n\nQuestion: {}\nAnswer:"
)

_DRAFT, _CORRECTION = "[Draft Interpretation]", "[Self-Correction]"
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
_LONGEST = 40  # words; longer runs without a full stop are divided
_NO_NAMES = frozenset(
    "Captain Doctor Lady Lord Madame Miss Mister Mother Mrs Saint Sir Sister Monday Tuesday Wednesday Thursday Friday "
    "Saturday Sunday January February March April May June July August September October November December".split()
)
_NAME = re.compile(r"(?<![.!?…\"“”'’:\n]\s)(?<!^)\b[A-Z][a-z]{2,}\b")


def dc_prompt(context: str) -> str:
    """Instruction, schema and type set, followed by the noisy context."""
    return f"{DC_HEAD}{context}{DC_TAIL}"


def ri_prompt(narrative: str, history: str) -> str:
    """Narrative, protocol, and a seed history that breaks off at a Draft header."""
    return f"{RI_HEAD}{narrative}{_PROTOCOL}{history}"


def wiki2_prompt(passages: str, question: str) -> str:
    """LongBench's prompt in our own words: instruction, passages, instruction, question."""
    return f"{WIKI2_HEAD}{passages}{WIKI2_TAIL.format(question)}"


def dirty(text: str, rng: random.Random, share: float = 0.5) -> str:
    """One paragraph with repeated spans: copies of one to four sentences reappear later in the text.

    Args:
        text: Any text.
        rng: Chooses what is repeated and where.
        share: Number of repeated words as a fraction of the words of the text.
    """
    runs = [part.split() for part in _SENTENCE.split(text)]
    sentences = [" ".join(run[i : i + _LONGEST]) for run in runs for i in range(0, len(run), _LONGEST)]
    sizes = [len(sentence.split()) for sentence in sentences]
    behind: list[list[str]] = [[] for _ in sentences]  # copies that follow each sentence
    left = share * sum(sizes)
    while left > 0:
        length = rng.randint(1, min(4, len(sentences)))
        start = rng.randrange(len(sentences) - length + 1)
        while length > 1 and sum(sizes[start : start + length]) > left:
            length -= 1
        behind[rng.randrange(start + length - 1, len(sentences))] += sentences[start : start + length]
        left -= sum(sizes[start : start + length])
    return " ".join(piece for own, copies in zip(sentences, behind, strict=True) for piece in (own, *copies))


def seed_history(narrative: str, rng: random.Random) -> str:
    """One or two completed iterations (draft and self-correction), followed by the header of the next draft."""
    counts = Counter(name for name in _NAME.findall(narrative) if name not in _NO_NAMES)
    names = [name for name, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if n > 1][:6]
    who, other = rng.sample(names, 2) if len(names) > 1 else (*names, "the narrator", "the other one")[:2]
    iterations = rng.randint(1, 2)
    drafts, corrections = rng.sample(_DRAFTS, iterations), rng.sample(_CORRECTIONS, iterations)
    lines: list[str] = []
    for number, (draft, correction) in enumerate(zip(drafts, corrections, strict=True), 1):
        drawn = [text.format(who=who, other=other, part=rng.choice(_PARTS)) for text in (draft, correction)]
        first, second = (text[:1].upper() + text[1:] for text in drawn)
        lines += [f"Iteration {number}", _DRAFT, first, _CORRECTION, second, ""]
    return "\n".join([*lines, f"Iteration {iterations + 1}", _DRAFT, ""])


TASKS: dict[Bench, str] = {"dc": "multi_news", "ri": "narrativeqa", "2wiki": "2wikimqa"}
PAPER_COUNTS: dict[Bench, int] = {"dc": 300, "ri": 200}
PAPER_TOKENS: dict[Bench, int] = {"dc": 3853, "ri": 5376}
REDUNDANCY = 0.5  # words repeated over words of the record, LoopBench-DC
_READ = 20_000  # names for the seed history come from this many characters, about what remains after the cut
_LEAST = 16  # tokens of the record that a prompt must have room for


@dataclass(frozen=True)
class _Draft:
    """A prompt before it is cut: text of the record, and the form that goes around it."""

    record: LongBenchRecord
    seed: int
    body: str
    form: Callable[[str], str]


@command(group="Loops", command="loopbench build")
def build_prompts(
    *,
    bench: Literal["dc", "ri", "2wiki"],
    source: Annotated[str, Option(metavar="PATH|hub")],
    out: Annotated[str, Option(metavar="FILE", writes=True)],
    model: str | None = None,
    revision: str | None = None,
    tokenizer: Annotated[Path | None, Option(metavar="FOLDER")] = None,
    count: Positive | None = None,
    target_tokens: Positive | None = None,
    repo: str | None = None,
    file: str | None = None,
    force: bool = False,
    seed: Count = 0,
    progress: Hidden = None,
) -> None:
    """Build LoopBench prompts from LongBench's files and report the mean length next to the paper's.

    Args:
        bench: LoopBench-DC, LoopBench-RI or 2WikiMultihopQA.
        source: LongBench's .jsonl file, its folder or data.zip, or hub.
        out: File for the prompts, as JSON lines.
        model: Count tokens with the tokenizer of this model.
        revision: Branch, tag or commit on the hub.
        tokenizer: Count tokens with this tokenizer, instead of --model.
        count: Number of prompts. By default the paper's: 300 of dc, 200 of ri.
        target_tokens: Mean length; for 2wiki the maximum length. By default the paper's: 3853 for dc, 5376 for ri.
        repo: Dataset for --source hub. By default zai-org/LongBench.
        file: File in that dataset. By default data.zip.
        force: Replace --out if it exists.
        seed: Seed of every random choice.
        progress: Called with a stage, the amount done and the total.

    Example:
        sinkscope loopbench build --bench dc --source hub --out dc.jsonl
    """
    if source != HUB and (repo or file):
        raise SinkscopeError(f"--repo and --file belong to --source {HUB}; --source is {source!r}")
    check_out(out, force=force)
    counting, name = open_tokenizer(model, tokenizer, revision)
    records = read_longbench(TASKS[bench], source, repo=repo or LONGBENCH, file=file or ARCHIVE)
    built = build(
        bench,
        records,
        counting,
        tokenizer_name=name,
        count=count,
        seed=seed,
        target_tokens=target_tokens,
        progress=progress,
    )
    built.deliver(BenchPrompt.to_json, out, force=force)


def build(
    bench: Bench,
    source: LongBenchSource,
    tokenizer: Any,
    *,
    tokenizer_name: str,
    count: int | None = None,
    seed: int = 0,
    target_tokens: int | None = None,
    progress: Progress | None = None,
) -> BuiltSet[BenchPrompt]:
    """Build the prompts of a benchmark; the same arguments give the same prompts.

    Args:
        bench: "dc", "ri" or "2wiki".
        source: Records, see `read_longbench`.
        tokenizer: Measures lengths with its default encoding, including BOS if it adds one.
        tokenizer_name: Name of the tokenizer for the manifest.
        count: Number of prompts; by default the paper's (300, 200), for "2wiki" one per record. When the records run
            out, another pass begins in a new order with the next seed.
        seed: Seed of the record order, the repeated spans and the seed history.
        target_tokens: Mean length to reach by cutting the longest prompts; by default the paper's. For "2wiki" it is
            the maximum length, and passages are cut in the middle as in LongBench; by default none is cut.
        progress: Called with a stage, the amount done and the total.

    Raises:
        SinkscopeError: The count or the length is impossible, or "2wiki" has fewer records than prompts.
    """
    wanted = count if count is not None else PAPER_COUNTS.get(bench, len(source.records))
    check_values(Natural | None, count=wanted)
    if bench == "2wiki" and wanted > len(source.records):
        raise SinkscopeError(f"count={wanted}: {source.name} has {len(source.records)} questions, give at most as many")
    target = target_tokens if target_tokens is not None else PAPER_TOKENS.get(bench)
    told = progress or silent

    def length(text: str) -> int:
        return len(tokenizer(text, verbose=False)["input_ids"])

    drafts = _drafts(bench, source.records, wanted, seed)
    lengths: list[int] = []
    for i, draft in enumerate(drafts):
        told("measure", i, len(drafts))
        lengths.append(length(draft.form(draft.body)))
    longest = max(lengths)
    if target is not None:
        _check_target(target, drafts, length)
        longest = min(longest, target if bench == "2wiki" else _cap(lengths, target))
    prompts: list[BenchPrompt] = []
    for i, (draft, whole) in enumerate(zip(drafts, lengths, strict=True)):
        told("build", i, len(drafts))
        text, tokens = draft.form(draft.body), whole
        if whole > longest:
            text, tokens = _cut(draft, whole, longest, length, middle=bench == "2wiki")
        answers = draft.record.answers if bench == "2wiki" else ()
        prompts.append(
            BenchPrompt(f"{bench}-{i:04d}", bench, text, tokens, draft.record.id, draft.seed, whole > longest, answers)
        )
    manifest = _manifest(bench, source, prompts, tokenizer_name, seed, target, longest)
    return BuiltSet(tuple(prompts), manifest, _rows(manifest))


def _drafts(bench: Bench, records: Sequence[LongBenchRecord], count: int, seed: int) -> list[_Draft]:
    drafts: list[_Draft] = []
    used: set[str] = set()
    while len(drafts) < count:
        turn = seed + len(drafts) // len(records)
        order = list(records)
        random.Random(f"order {turn}").shuffle(order)
        for record in order[: count - len(drafts)]:
            rng = random.Random(f"{turn} {record.id}")
            text = record.context
            if bench == "ri" and text in used:
                text = _later(text, rng)
            used.add(record.context)
            drafts.append(_draft(bench, record, text, turn, rng))
    return drafts


def _draft(bench: Bench, record: LongBenchRecord, text: str, seed: int, rng: random.Random) -> _Draft:
    if bench == "dc":
        return _Draft(record, seed, dirty(text, rng, REDUNDANCY), dc_prompt)
    if bench == "2wiki":
        return _Draft(record, seed, text, lambda passages: wiki2_prompt(passages, record.question))
    history = seed_history(text[:_READ], rng)
    return _Draft(record, seed, text.strip(), lambda narrative: ri_prompt(narrative, history))


def _later(text: str, rng: random.Random) -> str:
    """LongBench uses one narrative for several questions; a repeated one begins somewhere in its first half."""
    start = rng.randrange(len(text) // 2 + 1)
    return text[start:].partition(" ")[2] or text


def _cap(lengths: Sequence[int], target: int) -> int:
    """The length at which to cut so that the mean is `target`; or the largest length if the mean is below it anyway."""
    rest, total = sorted(lengths), target * len(lengths)
    for i, length in enumerate(rest):
        share = (total - sum(rest[:i])) // (len(rest) - i)
        if length > share:
            return share
    return rest[-1]


def _check_target(target: int, drafts: Sequence[_Draft], length: Callable[[str], int]) -> None:
    form = max(length(draft.form("")) for draft in drafts)
    conform(
        between(int, form + _LEAST, None),
        target,
        "target_tokens=",
        strict=True,
        then=f", because the form alone has {form} tokens for this tokenizer",
    )


def _cut(draft: _Draft, whole: int, longest: int, length: Callable[[str], int], *, middle: bool) -> tuple[str, int]:
    """The prompt with as much of the record as fits, cut between words, and its length in tokens."""
    body = draft.body
    low, low_tokens = 0, length(draft.form(""))
    high, high_tokens = len(body), whole
    kept, tokens = "", low_tokens
    by_half = False
    while high - low > 1 and longest - tokens > 2:
        # Tokens grow with characters nearly in proportion; halving in between keeps the bracket shrinking.
        guess = low + (high - low) * (longest - low_tokens) // max(high_tokens - low_tokens, 1)
        at = (low + high) // 2 if by_half else min(max(guess, low + 1), high - 1)
        text = _part(body, at, middle)
        found = length(draft.form(text))
        if found <= longest:
            low, low_tokens, kept, tokens = at, found, text, found
        else:
            high, high_tokens = at, found
        by_half = not by_half
    return draft.form(kept), tokens


def _part(body: str, size: int, middle: bool) -> str:
    """About `size` characters from the front, or half from each end; whole words if there are spaces."""
    if not middle:
        return body[:size] if body[size].isspace() else body[:size].rpartition(" ")[0] or body[:size]
    head, tail = body[: size // 2], body[len(body) - (size - size // 2) :]
    return f"{head.rpartition(' ')[0] or head} {tail.partition(' ')[2] or tail}"


def _manifest(
    bench: Bench,
    source: LongBenchSource,
    prompts: Sequence[BenchPrompt],
    tokenizer: str,
    seed: int,
    target: int | None,
    longest: int,
) -> dict[str, Any]:
    tokens = sorted(prompt.tokens for prompt in prompts)
    paper = {"prompts": PAPER_COUNTS[bench], "mean_tokens": PAPER_TOKENS[bench]} if bench in PAPER_COUNTS else None
    return {
        "schema": 1,
        "kind": "loopbench-prompts",
        "bench": bench,
        "title": TITLES[bench],
        "prompts": len(prompts),
        "paper": paper,
        "tokens": {"mean": sum(tokens) / len(tokens), "min": tokens[0], "max": tokens[-1], "target": target},
        "longest": longest,
        "truncated": sum(prompt.truncated for prompt in prompts),
        "passes": 1 + max(prompt.seed for prompt in prompts) - seed,
        "redundancy": REDUNDANCY if bench == "dc" else None,
        "chat_template": False,
        "seed": seed,
        "tokenizer": tokenizer,
        "source": {
            "name": source.name,
            "task": TASKS[bench],
            "records": len(source.records),
            "sha256": source.sha256,
            "commit": source.commit,
        },
        "versions": {"sinkscope": __version__},
    }


def _rows(m: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """The manifest for the reader."""
    lengths, paper = m["tokens"], m["paper"]
    theirs = (f" (paper {paper['prompts']})", f", paper {paper['mean_tokens']:,}") if paper else ("", "")
    cut = f"{m['truncated']} of {m['prompts']}, at {m['longest']:,} tokens" if m["truncated"] else "none"
    return (
        (m["title"], f"{m['prompts']} prompts{theirs[0]}"),
        ("tokens", f"mean {lengths['mean']:,.0f}{theirs[1]}; {lengths['min']:,} to {lengths['max']:,}"),
        ("tokenizer", m["tokenizer"]),
        ("truncated", cut),
        ("source", f"{m['source']['name']}, {m['source']['records']} records, passes {m['passes']}"),
    )
