"""The forms of LoopBench-DC and LoopBench-RI (Xu et al. 2026, appendix C), in words of our own.

The paper lists the parts of an instance but not their text. The parts, their order, the fields and the set of types are
the paper's; the wording, the way redundancy is added and the seed history are ours.
"""

from __future__ import annotations

import random
import re
from collections import Counter

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
    """Instruction, schema and type set, then the dirty context."""
    return f"{DC_HEAD}{context}{DC_TAIL}"


def ri_prompt(narrative: str, history: str) -> str:
    """Narrative, protocol, and a seed history that breaks off at a Draft header."""
    return f"{RI_HEAD}{narrative}{_PROTOCOL}{history}"


def dirty(text: str, rng: random.Random, share: float = 0.5) -> str:
    """One paragraph with repeated spans: copies of one to four sentences appear later in the text.

    Args:
        text: any text.
        rng: chooses what is repeated and where.
        share: repeated words as a fraction of the words of the text.
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
    """One or two completed iterations (draft and self-correction), then the header of the next draft."""
    counts = Counter(name for name in _NAME.findall(narrative) if name not in _NO_NAMES)
    names = [name for name, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if n > 1][:6]
    who, other = rng.sample(names, 2) if len(names) > 1 else (*names, "the narrator", "the other one")[:2]
    iterations = rng.randint(1, 2)
    drafts, corrections = rng.sample(_DRAFTS, iterations), rng.sample(_CORRECTIONS, iterations)
    lines: list[str] = []
    for number, (draft, correction) in enumerate(zip(drafts, corrections, strict=True), 1):
        filled = [text.format(who=who, other=other, part=rng.choice(_PARTS)) for text in (draft, correction)]
        lines += [f"Iteration {number}", _DRAFT, _capital(filled[0]), _CORRECTION, _capital(filled[1]), ""]
    return "\n".join([*lines, f"Iteration {iterations + 1}", _DRAFT, ""])


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
