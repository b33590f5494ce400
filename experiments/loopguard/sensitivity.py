"""How each setting of the monitor affects detection, false alarms and delay, on recorded tokens.

    python -m experiments.loopguard.sensitivity [--runs FILE.jsonl ...] [--per-form 2] [--out figures]

A loop consists of 600 tokens of the prose in the package and then copies of a piece of 1 to 100 tokens, for 1,000
tokens. The copies are exact, or 1 % or 5 % of the tokens are replaced, or one token differs in every copy (as in a
numbered list). False alarms are counted on prose and on texts that repeat honestly. Each text is read in two
vocabularies: words as ids below 151,936, and the tokens of the model in the package. Probabilities are assumed: the
model is confident (0.97) in a loop, except at a replaced token and the next one; in prose at every other token; and in
honest texts at every token, which is the worst case. `--runs` adds outputs of real runs with real probabilities (JSON
lines with `tokens` and `top1`, as `sinkscope bench --task loops` writes them); such a run loops if its last 256 tokens
do (the rule without length).

One field is changed at a time. Settings that act only after an intervention (cooldown, relapse) cannot be swept here.
"""

from __future__ import annotations

import json
import random
import statistics
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from experiments.drawn import save
from experiments.loopguard.figure2 import collapse_point
from experiments.loopguard.honest import honest_texts
from experiments.record import record
from experiments.script import run
from sinkscope.display.console import ProgressBar
from sinkscope.display.style import BLUE, GREEN, GREY, ORANGE, RED, finished
from sinkscope.errors import SinkscopeError
from sinkscope.loops import (
    VARIANTS,
    Monitor,
    MonitorSettings,
    compression_ratio,
    ends_in_loop,
    tail_period,
    type_token_ratio,
)
from sinkscope.loops.outputs import split
from sinkscope.models.text import typical_text

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


def encoders() -> dict[str, Any]:
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
                made += [_loop(text, period, form, rng) for _ in range(per_form)]
        for start in range(0, min(len(text) - 1600, 1600 * 12), 1600):
            made.append(_healthy("prose", text[start : start + 1600], rng))
        made += [Recorded("honest", None, ids, [1.0] * len(ids), None) for ids in _honest(encode)]
    return made


def _honest(encode: Any) -> Iterator[list[int]]:
    for text in honest_texts():
        yield encode(text.prompt)


def _healthy(form: str, ids: list[int], rng: random.Random) -> Recorded:
    return Recorded(form, None, ids, [rng.choice([0.5, SURE]) for _ in ids], None)


def _loop(text: Sequence[int], period: int, form: str, rng: random.Random) -> Recorded:
    at = rng.randrange(len(text) - HEALTHY - period)
    before, piece = list(text[at : at + HEALTHY]), text[at + HEALTHY : at + HEALTHY + period]
    looped = [piece[i % period] for i in range(LOOPED)]
    noise = FORMS[form]
    if noise is None:  # the first token of a copy is a number of its own
        changed = list(range(0, LOOPED, period))
        for count, i in enumerate(changed):
            looped[i] = VOCABULARY + count
    else:
        changed = [i for i in range(LOOPED) if rng.random() < noise]
        for i in changed:
            looped[i] = rng.choice(text)
    unsure = {j - 1 for i in changed for j in (i, i + 1)} if noise is not None else set[int]()
    sure: list[float | None] = [0.5 if i in unsure or i < period else SURE for i in range(LOOPED)]
    return Recorded(form, period, before + looped, [rng.choice([0.5, SURE]) for _ in before] + sure, HEALTHY)


def recorded(files: Sequence[Path]) -> list[Recorded]:
    """Outputs of real runs."""
    made: list[Recorded] = []
    for file in files:
        for i, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                data = json.loads(line)
                ids, top1 = list(data["tokens"]), data.get("steps", {}).get("top1")
            except (ValueError, KeyError, TypeError) as error:
                raise SinkscopeError(f"{file.name} line {i} is no run ({error!r}): expected JSON with tokens") from None
            after = [*top1[1:], 0.0] if top1 else [None] * len(ids)  # top1[t] is of the token at t, p_max of the next
            onset, tail = None, tail_period(ids, shortest=64)
            if ends_in_loop(ids):
                onset = tail.start if tail else (collapse_point(ids) or len(ids)) - 256
            made.append(Recorded("recorded", tail.period if tail else None, ids, after, onset))
    return made


def watch(one: Recorded, settings: MonitorSettings) -> tuple[bool, int | None]:
    """Whether anything healthy triggered, and the first step after the beginning of the loop that did."""
    monitor, early = Monitor(settings), False
    for token, p_max in zip(one.ids, one.p_max, strict=True):
        step = monitor.update(token, p_max)
        if step.trigger:
            if one.onset is None or step.step > one.onset:
                return early or one.onset is None, step.step
            early = True
    return early, None


def score(data: Sequence[Recorded], settings: MonitorSettings) -> dict[str, Any]:
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
    delays = sorted(d for d in every if d is not None)
    return {
        "detected": _share([d is not None for d in every]),
        "detected_by_form": {form: _share([d is not None for d in ds]) for form, ds in found.items()},
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


def compressors(per_period: int = 8) -> list[dict[str, Any]]:
    """Compression ratio of 256 tokens that repeat with each period, by what is compressed."""
    words = split(typical_text())
    small = encoders()["bundled"](typical_text())
    rows: list[dict[str, Any]] = []
    for period in PERIODS:
        rng = random.Random(f"compressors {period}")
        values: dict[str, list[float]] = {}
        for _ in range(per_period):
            at = rng.randrange(len(words) - period)
            piece = [words[at + i % period] for i in range(256)]
            large = [zlib.crc32(word.encode()) % VOCABULARY for word in piece]
            at = rng.randrange(len(small) - period)
            bundled = [small[at + i % period] for i in range(256)]
            values.setdefault("ids of 32 bits, 151,936 words", []).append(compression_ratio(large))
            values.setdefault("ids of 32 bits, 4k tokens", []).append(compression_ratio(bundled))
            values.setdefault("ids of 16 bits, 4k tokens", []).append(_narrow(bundled))
            values.setdefault("text", []).append(compression_ratio(" ".join(piece)))
            values.setdefault("type-token ratio", []).append(type_token_ratio(bundled))
        rows.append({"period": period, **{name: round(statistics.median(v), 4) for name, v in values.items()}})
    return rows


def _narrow(ids: Sequence[int]) -> float:
    raw = b"".join(i.to_bytes(2, "little") for i in ids)
    return len(zlib.compress(raw, 9)) / len(raw)


def figure(data: dict[str, Any]) -> Any:
    """Compression and detection by period, then a small panel per setting."""
    result = data["result"]
    from plotly.subplots import make_subplots

    names = [name for name in SWEEPS if name in result["sweeps"]]
    rows = 1 + -(-len(names) // 6)
    titles = ["compression of 256 tokens", "exact loops found, by variant", *names]
    grid: list[list[Any]] = [[{"colspan": 3}, None, None, {"colspan": 3}, None, None]]
    fig = make_subplots(
        rows,
        6,
        specs=grid + [[{"secondary_y": True}] * 6 for _ in range(rows - 1)],
        subplot_titles=titles,
        row_heights=[1.4] + [1] * (rows - 1),
        vertical_spacing=0.08,
        horizontal_spacing=0.045,
    )
    _compression(fig, result["compressors"])
    _by_period(fig, result["sweeps"]["variant"])
    for i, name in enumerate(names):
        _sweep(fig, result["sweeps"][name], name, 2 + i // 6, 1 + i % 6, legend=i == 0)
    spread = {n: [r["detected"] for r in result["sweeps"][n]] for n in names if n not in ("variant", "voters", "gates")}
    most = max(spread, key=lambda n: max(spread[n]) - min(spread[n]))
    found = (
        f"Of the settings of LoopGuard's monitor, {most} matters most: it finds {min(spread[most]):.0%} to "
        f"{max(spread[most]):.0%} of the loops (the default is in bold)"
    )
    return finished(
        fig,
        None,
        found,
        width=1800,
        height=440 + 270 * (rows - 1),
        font={"size": 12},
        margin={"l": 60, "r": 60, "t": 110, "b": 110},
        legend={"y": -0.07, "x": 0, "xanchor": "left"},
    )


def _compression(fig: Any, rows: list[dict[str, Any]]) -> None:
    dashes = {BLUE: "solid", GREEN: "solid", ORANGE: "dash", GREY: "solid", RED: "dot"}
    for name, (color, dash) in zip([k for k in rows[0] if k != "period"], dashes.items(), strict=True):
        fig.add_scatter(
            x=[r["period"] for r in rows],
            y=[r[name] for r in rows],
            name=name,
            line={"color": color, "dash": dash},
            row=1,
            col=1,
        )
    fig.add_hline(0.12, line={"color": GREY, "dash": "dot", "width": 1}, row=1, col=1)
    fig.add_hline(0.2, line={"color": RED, "dash": "dot", "width": 1}, row=1, col=1)
    fig.update_xaxes(title_text="period of the loop in tokens (dotted: thresholds 0.12 and 0.2)", row=1, col=1)
    fig.update_yaxes(range=[0, 0.5], row=1, col=1)


def _by_period(fig: Any, rows: list[dict[str, Any]]) -> None:
    """A row per variant; "always" finds by accident."""
    shown = [r for r in rows if r["value"] != "always"]
    periods = list(shown[0]["detected_by_period"])
    fig.add_heatmap(
        x=periods,
        y=[r["value"] for r in shown],
        z=[list(r["detected_by_period"].values()) for r in shown],
        zmin=0,
        zmax=1,
        colorscale=[[0, "#f7f7f7"], [1, BLUE]],
        xgap=1,
        ygap=1,
        showscale=False,
        row=1,
        col=4,
        hovertemplate="%{y}, period %{x}: %{z:.0%}<extra></extra>",
    )
    fig.update_xaxes(title_text="period of the loop (blue: all found)", type="category", row=1, col=4)
    fig.update_yaxes(autorange="reversed", row=1, col=4)


def _sweep(fig: Any, rows: list[dict[str, Any]], name: str, row: int, col: int, *, legend: bool) -> None:
    x = [_label(r["value"]) for r in rows]
    quiet = [r["alarms"].get("prose", 0.0) for r in rows]
    mode = "markers" if name in ("gates", "voters", "variant") else "lines+markers"  # names have no order
    lines = (
        ("loops found", [r["detected"] for r in rows], BLUE, "solid"),
        ("counting loops found", [r["detected_by_form"]["counting"] for r in rows], GREEN, "dash"),
        ("false alarms, prose", quiet, ORANGE, "solid"),
        ("false alarms, honest repetition", [r["alarms"].get("honest", 0.0) for r in rows], RED, "solid"),
    )
    for label, y, color, dash in lines:
        fig.add_scatter(
            x=x,
            y=y,
            name=label,
            line={"color": color, "dash": dash},
            mode=mode,
            showlegend=legend,
            row=row,
            col=col,
            secondary_y=False,
        )
    fig.add_scatter(
        x=x,
        y=[r["median_delay"] for r in rows],
        name="median delay in tokens (right)",
        showlegend=legend,
        line={"color": GREY, "dash": "dot"},
        mode=mode,
        row=row,
        col=col,
        secondary_y=True,
    )
    default = "full" if name == "variant" else _label(getattr(MonitorSettings.paper(), name))
    fig.update_xaxes(
        type="category", tickvals=x, ticktext=[f"<b>{v}</b>" if v == default else v for v in x], row=row, col=col
    )
    fig.update_yaxes(range=[-0.03, 1.05], tickformat=".0%", row=row, col=col, secondary_y=False)
    fig.update_yaxes(
        range=[-12, 420], tickvals=[0, 100, 200, 300, 400], showgrid=False, row=row, col=col, secondary_y=True
    )


def _label(value: Any) -> str:
    return "+".join(value) or "none" if isinstance(value, tuple | list) else str(value)


def main(*, runs: Sequence[Path] = (), per_form: int = 2, out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        runs: Outputs of real runs, JSON lines.
        per_form: Loops of each period, form and vocabulary.
        out: Folder of the figure.
    """
    if per_form < 1:
        raise SinkscopeError("--per-form: give 1 or more")
    started = time.perf_counter()
    data = [*sequences(per_form), *recorded(runs)]
    sweeps: dict[str, list[dict[str, Any]]] = {}
    total, done = sum(map(len, SWEEPS.values())), 0
    with ProgressBar() as progress:
        for field, values in SWEEPS.items():
            for value in values:
                progress("settings", done, total)
                sweeps.setdefault(field, []).append({"value": value, **score(data, settings_of(field, value))})
                done += 1
    counts = {"loops": sum(s.onset is not None for s in data), "others": sum(s.onset is None for s in data)}
    result = {"sequences": counts, "compressors": compressors(), "sweeps": sweeps}
    settings = {
        "per_form": per_form,
        "runs": [file.name for file in runs],
        "periods": PERIODS,
        "forms": FORMS,
        "healthy": HEALTHY,
        "looped": LOOPED,
        "sure": SURE,
        "vocabulary": VOCABULARY,
        "default": vars(MonitorSettings.paper()),
    }
    text = record("loopguard-sensitivity", result, settings, started=started, dtype="int")
    save("loopguard_sensitivity", text, figure, out)
    for row in sweeps["variant"]:
        print(json.dumps({k: v for k, v in row.items() if k != "detected_by_period"}))


if __name__ == "__main__":
    run(main)
