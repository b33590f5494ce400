"""How each setting of the monitor affects detection, false alarms and delay, on recorded tokens.

    python -m experiments.loopguard.sensitivity [--per-form 2] [--out figures]

A loop consists of 600 tokens of the prose in the package and then copies of a piece of 1 to 100 tokens, for 1,000
tokens. The copies are exact, or 1 % or 5 % of the tokens are replaced, or one token differs in every copy (as in a
numbered list). False alarms are counted on prose and on texts that repeat honestly. Each text is read in two
vocabularies: words as ids below 151,936, and the tokens of the model in the package. Probabilities are assumed: the
model is confident (0.97) in a loop, except at a replaced token and the next one; in prose at every other token; and in
honest texts at every token, which is the worst case.

One field is changed at a time. A setting that acts only after an intervention (cooldown) cannot be swept here.
"""

from __future__ import annotations

import random
import statistics
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from experiments.loopguard.honest import honest_texts
from experiments.record import Row, record
from experiments.script import run
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import write_atomic
from sinkscope.loops import VARIANTS, Monitor, MonitorSettings
from sinkscope.loops.text.outputs import split
from sinkscope.models.text import typical_text
from sinkscope.results.console import ProgressBar

PERIODS = (1, 2, 3, 5, 8, 12, 16, 20, 25, 30, 35, 40, 45, 50, 60, 80, 100)
FORMS = {"exact": 0.0, "1 % replaced": 0.01, "5 % replaced": 0.05, "counting": None}
HEALTHY, LOOPED, SURE, VOCABULARY = 600, 1000, 0.97, 151_936
SWEEPS: dict[str, tuple[Any, ...]] = {
    "votes": (1, 2, 3),
    "streak": (1, 3, 6, 7, 12, 24),
    "theta_conf": (0.45, 0.9, 0.96, 0.98),
    "theta_ttr": (0.1, 0.15, 0.2, 0.25, 0.3),
    "theta_cr": (0.06, 0.09, 0.12, 0.15, 0.2),
    "window": (64, 128, 256, 512, 1024),
    "stride": (1, 4, 16, 64, 256),
    "novelty_n": (1, 2, 3, 4, 6, 8),
    "novelty_span": (8, 16, 32, 64, 128, 200),
    "theta_nov": (0.005, 0.02, 0.05, 0.1, 0.2),
    "stall": (1, 2, 4, 8, 16, 32),
    "tail_repeats": (2, 2.5, 3, 4, 6),
    "tail_shortest": (8, 16, 32, 64, 128),
    "tail_longest": (8, 16, 32, 64, 128),
    "tail_hold": (1, 2, 4, 8, 16, 32),
    "gates": ((), ("stall",), ("tail",), ("stall", "tail")),
    "voters": (("ttr", "cr"), ("ttr", "p1"), ("cr", "p1"), ("ttr", "cr", "p1")),
    "variant": tuple(name for name in VARIANTS if name != "none"),
}


@dataclass(frozen=True)
class Recorded:
    """Tokens, how sure the model was after each, and where the loop begins (None: there is none)."""

    form: str
    period: int | None
    ids: list[int]
    p_max: list[float | None]
    onset: int | None


def encoders() -> Row:
    """The two vocabularies: text -> ids."""
    from tokenizers import Tokenizer

    small = Tokenizer.from_file(str(files("sinkscope.models") / "bundled/tokenizer.json"))
    return {
        "words": lambda text: [zlib.crc32(word.encode()) % VOCABULARY for word in split(text)],
        "bundled": lambda text: small.encode(text, add_special_tokens=False).ids,
    }


def sequences(per_form: int) -> list[Recorded]:
    """Loops of every period and form, prose, and honest texts, in both vocabularies."""
    made: list[Recorded] = []
    for name, encode in encoders().items():
        text = encode(typical_text())
        rng = random.Random(f"{name} loops")
        for form in FORMS:
            for period in PERIODS:
                for _ in range(per_form):
                    made.append(_loop(text, period, form, rng))
        for start in range(0, min(len(text) - 1600, 1600 * 12), 1600):
            made.append(_healthy("prose", text[start : start + 1600], rng))
        for honest in honest_texts():
            ids = encode(honest.prompt)
            made.append(Recorded("honest", None, ids, [1.0] * len(ids), None))
    return made


def _healthy(form: str, ids: list[int], rng: random.Random) -> Recorded:
    return Recorded(form, None, ids, [rng.choice([0.5, SURE]) for _ in ids], None)


def _loop(text: Sequence[int], period: int, form: str, rng: random.Random) -> Recorded:
    at = rng.randrange(len(text) - HEALTHY - period)
    before = list(text[at : at + HEALTHY])
    piece = text[at + HEALTHY : at + HEALTHY + period]
    looped: list[int] = []
    for each in range(LOOPED):
        looped.append(piece[each % period])
    sure: list[float | None] = [0.5] * period + [SURE] * (LOOPED - period)
    noise = FORMS[form]
    if noise is None:  # the first token of a copy is a number of its own
        for count, place in enumerate(range(0, LOOPED, period)):
            looped[place] = VOCABULARY + count
    else:
        changed = [place for place in range(LOOPED) if rng.random() < noise]
        for place in changed:
            looped[place] = rng.choice(text)
            for unsure in (place - 1, place):
                sure[max(0, unsure)] = 0.5
    return Recorded(form, period, before + looped, [rng.choice([0.5, SURE]) for _ in before] + sure, HEALTHY)


def watch(one: Recorded, settings: MonitorSettings) -> tuple[bool, int | None]:
    """Whether anything healthy triggered, and the first step after the beginning of the loop that did."""
    monitor = Monitor(settings)
    early = False
    for token, p_max in zip(one.ids, one.p_max, strict=True):
        step = monitor.update(token, p_max)
        if step.trigger:
            if one.onset is None or step.step > one.onset:
                return early or one.onset is None, step.step
            early = True
    return early, None


def score(data: Sequence[Recorded], settings: MonitorSettings) -> Row:
    """Share of loops found, by form and by period of exact loops, their delay, and false alarms by kind of text.

    The share over all and the delays leave out counting loops: no exact signal is made for them.
    """
    found: dict[str, list[int | None]] = {}
    periods: dict[str, list[bool]] = {}
    alarms: dict[str, list[bool]] = {}
    for one in data:
        early, first = watch(one, settings)
        if one.onset is None:
            alarms.setdefault(one.form, []).append(early)
            continue
        alarms.setdefault("before a loop", []).append(early)
        found.setdefault(one.form, []).append(None if first is None else first - one.onset)
        if one.form == "exact":
            periods.setdefault(str(one.period), []).append(first is not None)
    every = [delay for form, delays in found.items() if form != "counting" for delay in delays]
    delays = sorted(delay for delay in every if delay is not None)
    return {
        "detected": _share([delay is not None for delay in every]),
        "detected_by_form": {form: _share([delay is not None for delay in some]) for form, some in found.items()},
        "detected_by_period": {period: _share(hits) for period, hits in periods.items()},
        "median_delay": statistics.median(delays) if delays else None,
        "delay_90": delays[int(0.9 * (len(delays) - 1))] if delays else None,
        "alarms": {kind: _share(hits) for kind, hits in alarms.items()},
    }


def _share(hits: Sequence[bool]) -> float:
    return round(sum(hits) / len(hits), 4)


def settings_of(field: str, value: Any) -> MonitorSettings:
    """The default with one field changed, or a variant by name."""
    if field == "variant":
        return MonitorSettings.variant(value)
    return MonitorSettings.paper(**{field: value})


def main(*, per_form: int = 2, out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        per_form: Loops of each period, form and vocabulary.
        out: Folder of the JSON.
    """
    if per_form < 1:
        raise SinkscopeError(f"--per-form {per_form}: give 1 or more")
    started = time.perf_counter()
    data = sequences(per_form)
    sweeps: dict[str, list[Row]] = {}
    with ProgressBar() as progress:
        for done, (field, values) in enumerate(SWEEPS.items()):
            progress("settings", done, len(SWEEPS))
            for value in values:
                sweeps.setdefault(field, []).append({"value": value, **score(data, settings_of(field, value))})
    settings = {
        "per_form": per_form,
        "periods": PERIODS,
        "forms": FORMS,
        "healthy": HEALTHY,
        "looped": LOOPED,
        "sure": SURE,
        "vocabulary": VOCABULARY,
        "default": vars(MonitorSettings.paper()),
    }
    text = record("loopguard-sensitivity", {"sweeps": sweeps}, settings, started=started, dtype="int")
    write_atomic(out / "loopguard_sensitivity.json", text)


if __name__ == "__main__":
    run(main)
