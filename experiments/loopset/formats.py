"""Formats of streams and records, by the channels that each can carry, and what the readers make of them.

    python -m experiments.loopset.formats [--out figures/loops_formats.json]

Each format writes an answer with a text, a reasoning and two calls of tools. For each channel that it has, that one
loops and the others do not, in pieces of drawn sizes that alternate where the format lets them; then nothing loops;
then the end comes twice, an error comes in the middle, and the stream is cut off. The checker has to name the one
answer and the channel, and the proxy has to end the answer, or to pass it on byte for byte.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

from experiments.record import Row, write_record
from experiments.script import run
from sinkscope.loops import MonitorSettings, check_file
from sinkscope.loops.servers.answers import StreamWatch
from tests.server_streams import filled

TEXT, CALL, OTHER = "text", "call 0", "call 1"
LOOP = "I will now check the file again and report what I see there. " * 14
WORDS = "river stone lamp window garden letter morning soldier bridge engine flour violin pocket winter corner".split()
SEEDS = 5  # drawn sizes of pieces
Event = dict[str, Any]
Said = list[tuple[str, str]]
"""Pieces of text, each with its channel."""


@dataclass(frozen=True)
class Format:
    """A format of streams, as `formats.json` has it; "<piece>" stands for a piece of text.

    Attributes:
        channels: The channels that it has: the event of a piece, and what opens and closes the channel.
        end: The events that end an answer.
        begin: The events before it.
        lines: Whether it has lines of JSON, and else server-sent events.
        mixed: Whether pieces of channels may alternate.
        whole_calls: Whether each call comes in one piece.
        error: The event that reports an error.
    """

    channels: dict[str, dict[str, Event]]
    end: list[Event]
    begin: Sequence[Event] = ()
    lines: bool = False
    mixed: bool = False
    whole_calls: bool = False
    error: Event = field(default_factory=lambda: {"error": {"message": "overloaded", "code": 529}})

    def write(self, said: Said) -> list[Event]:
        """Write the events of pieces, without the end."""
        events = [*self.begin]
        last = {channel: place for place, (channel, _) in enumerate(said)}
        begun = set[str]()
        for place, (channel, text) in enumerate(said):
            own = self.channels[channel]
            if channel not in begun and "open" in own:
                events.append(own["open"])
            begun.add(channel)
            events.append(filled(own["piece"], {"piece": text}))
            if place == last[channel] and "close" in own:
                events.append(own["close"])
        return events


FORMATS = {name: Format(**form) for name, form in json.loads(Path(__file__).with_suffix(".json").read_text()).items()}


def honest(rng: Random, words: int = 150) -> str:
    """A text of random words."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


def pieces(texts: dict[str, str], rng: Random, mixed: bool) -> Said:
    """The texts of channels in pieces of drawn sizes, in turn or one channel after another."""
    cut: dict[str, list[tuple[str, str]]] = {}
    for channel, text in texts.items():
        size = rng.choice([5, 12, 40])
        cut[channel] = [(channel, text[place : place + size]) for place in range(0, len(text), size)]
    if not mixed:
        return [piece for channel in cut.values() for piece in channel]
    return [piece for turn in zip_longest(*cut.values()) for piece in turn if piece is not None]


def sent(form: Format, events: Sequence[Event]) -> bytes:
    """The bytes of events."""
    if form.lines:
        return "".join(f"{json.dumps(event)}\n" for event in events).encode()
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()


@dataclass(frozen=True)
class Case:
    """A stream and what it is.

    Attributes:
        name: What happens in it: a channel that loops, or what ends it.
        data: Its bytes.
        verdict: The verdict on its answer.
        channel: The channel of the verdict; empty: any.
    """

    name: str
    data: bytes
    verdict: str
    channel: str = ""


def cases(name: str, seed: int = 0) -> Iterator[Case]:
    """The cases of a format."""
    form, rng = FORMATS[name], Random(f"{name} {seed}")
    fine = {channel: honest(rng) for channel in form.channels}

    def events(texts: dict[str, str]) -> list[Event]:
        whole = [(channel, text) for channel, text in texts.items() if form.whole_calls and channel in (CALL, OTHER)]
        cut = {channel: text for channel, text in texts.items() if (channel, text) not in whole}
        return form.write(pieces(cut, rng, form.mixed) + whole)

    for channel in form.channels:
        yield Case(channel, sent(form, [*events({**fine, channel: LOOP}), *form.end]), "loops", channel)
    whole = events(fine)
    yield Case("nothing", sent(form, [*whole, *form.end]), "clean")
    yield Case("two ends", sent(form, [*whole, *form.end, *form.end]), "clean")
    half = events({TEXT: LOOP})
    yield Case("an error behind a loop", sent(form, [*half, form.error]), "loops", TEXT)
    yield Case("an error", sent(form, [*events({TEXT: fine[TEXT]}), form.error]), "clean")
    data = sent(form, [*events({TEXT: fine[TEXT]}), *form.end])
    yield Case("cut off", data[: len(data) * 2 // 3], "clean")
    data = sent(form, events({TEXT: LOOP}))
    yield Case("cut off in a loop", data[: len(data) * 2 // 3], "loops", TEXT)


def checked_right(case: Case, lines: bool) -> bool:
    """Whether the checker finds the one answer, its verdict and its channel."""
    records = check_file(io.BytesIO(case.data), name="a.jsonl" if lines else "a.sse").records
    if len(records) != 1:
        return False
    return records[0].verdict == case.verdict and case.channel in ("", records[0].channel)


def proxied_right(case: Case) -> bool:
    """Whether the proxy ends a looping answer, names the channel, and passes all others on unchanged."""
    watch, passed, place = StreamWatch(MonitorSettings()), b"", 0
    rng = Random(len(case.data))
    while place < len(case.data) and watch.alarm is None:
        size = rng.choice([1, 50, 1000])
        passed += watch.feed(case.data[place : place + size])
        place += size
    if case.verdict == "loops":
        found = watch.alarm is not None and watch.alarm.channel == case.channel
        return (
            found
            and bool(watch.ending() or b"contentBlock" in case.data)
            and case.data.startswith(passed.rstrip(b"\n"))
        )
    return watch.alarm is None and passed + watch.end() == case.data


def main(*, out: Path = Path("figures/loops_formats.json")) -> None:
    """Make what the module describes."""
    rows: list[Row] = []
    for name, form in FORMATS.items():
        row: Row = {"format": name, "channels": list(form.channels)}
        for seed in range(SEEDS):
            for case in cases(name, seed):
                both = checked_right(case, form.lines), proxied_right(case)
                checker, proxy = row.setdefault(case.name, [0, 0])
                row[case.name] = [checker + both[0], proxy + both[1]]
        rows.append(row)
    write_record(out, "loops-formats", {"seeds": SEEDS, "formats": rows}, {}, dtype="text")


if __name__ == "__main__":
    run(main)
