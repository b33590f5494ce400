"""What remedies did: the figure, and the tables and examples of `docs/what_to_try.md`.

The columns of a table:

- `loops`: outputs that end in a loop, by the rule of `sinkscope bench --task loops`.
- `perplexity`: of up to 400 tokens after the guard's first act (for samplers, after the first alarm in the output with
  the whole cache), read once more by the model itself with a clean cache, over the outputs that do not end in a loop.
  Beside it, over the perplexity of the model's own outputs that raise no alarm, from token 48 on.
- `acts`: interventions per output that had any, and the most. `taken back`: tokens removed from such an output.
- `ends at once`: outputs that end within 10 tokens of the last act, of those with an act; in brackets, the share of the
  model's own outputs without an alarm that end within 10 tokens of the same places.
- `changed`: outputs that differ from those with the whole cache although these raise no alarm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.drawn import put_table, save
from experiments.loopguard.openings import CHOOSING, FORMS, openings
from experiments.record import Row, record, value_of_each
from sinkscope.bench.tasks.loops import loops
from sinkscope.opening.load import load
from sinkscope.results.style import COLOURS, figure_of

AT_ONCE = 10
MODULE = "loopguard.remedies"
SEAMS = Path(__file__).with_name("seams.jsonl")
"""Forty seams that were read by eye, and what is damaged."""


def read(work: Path) -> list[Row]:
    """The outputs in a folder."""
    file = work / "runs.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def perplexity(outputs: Sequence[Row]) -> float | None:
    """Of the tokens that were read once more."""
    counted = sum(value_of_each(outputs, "counted"))
    if not counted:
        return None
    return math.exp(sum(value_of_each(outputs, "nll")) / counted)


def summary(method: str, outputs: Sequence[Row], full: dict[Any, Row]) -> Row:
    """One row of a table; `full` are the outputs of the whole cache, by family and number."""
    own = [output for output in full.values() if output["alarm"] is None]
    acted: list[Row] = []
    alarmed: list[Row] = []
    looping = at_once = changed = healthy = acts = taken_back = most = 0
    for output in outputs:
        looped = loops(output["tokens"])
        looping += looped
        plain = full[output["family"], output["number"]]
        if plain["alarm"] is None:
            healthy += 1
            changed += output["tokens"] != plain["tokens"]
        elif not looped:
            alarmed.append(output)
        if output["acts"]:
            acted.append(output)
            acts += len(output["acts"])
            most = max(most, len(output["acts"]))
            taken_back += sum(back for _, back in output["acts"])
            at_once += output["ended"] and len(output["tokens"]) - output["acts"][-1][0] <= AT_ONCE
    last = [output["acts"][-1][0] for output in acted]
    own_perplexity = perplexity(own)
    after = perplexity(alarmed)
    return {
        "method": method,
        "outputs": len(outputs),
        "loops": looping,
        "perplexity": after,
        "ratio": None if own_perplexity is None or after is None else after / own_perplexity,
        "acted": len(acted),
        "acts": acts / max(1, len(acted)),
        "most": most,
        "taken_back": taken_back / max(1, len(acted)),
        "at_once": at_once,
        "own_at_once": ending_after(own, last),
        "ended": sum(value_of_each(outputs, "ended")),
        "healthy": healthy,
        "changed": changed,
        "own": own_perplexity,
    }


def ending_after(outputs: Sequence[Row], places: Sequence[int]) -> float | None:
    """Share of the outputs, of those that are longer than a place, that end within 10 tokens of it; over all places."""
    longer = ending = 0
    for output in outputs:
        length = len(output["tokens"])
        for place in places:
            if length > place:
                longer += 1
                ending += output["ended"] and length - place <= AT_ONCE
    if not longer:
        return None
    return ending / longer


def settings_of(outputs: Sequence[Row]) -> list[Row]:
    """Every model, length and temperature, with the rows over the families for choosing and over the others."""
    grouped: dict[Any, dict[str, dict[Any, Row]]] = {}
    for output in outputs:
        key = (output["model"], output["new"], output["temperature"])
        place = (output["family"], output["number"])
        grouped.setdefault(key, {}).setdefault(output["method"], {})[place] = output
    settings: list[Row] = []
    for (model, new, temperature), methods in grouped.items():
        setting: Row = {"model": model, "new": new, "temperature": temperature}
        for name, chosen in (("chosen", True), ("reported", False)):
            full = _of_families(methods["full"], chosen)
            rows = []
            for method, by_place in methods.items():
                mine = list(_of_families(by_place, chosen).values())
                if mine:
                    rows.append(summary(method, mine, full))
            setting[name] = rows
        settings.append(setting)
    return settings


def _of_families(outputs: dict[Any, Row], chosen: bool) -> dict[Any, Row]:
    return {place: output for place, output in outputs.items() if (place[0] in CHOOSING) == chosen}


def name_of(setting: Row) -> str:
    """A setting in words."""
    decoding = "greedy"
    if setting["temperature"]:
        decoding = f"temperature {setting['temperature']:g}"
    return f"{setting['model']}, {setting['new']:,} tokens, {decoding}"


def table(setting: Row, part: str) -> str:
    """The table of a setting in Markdown."""
    lines = [
        "| remedy | loops | perplexity | over own text | acts | taken back | ends at once | changed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in setting[part]:
        after, ratio, acts, back, ends = "-", "-", "-", "-", "-"
        if row["perplexity"] is not None:
            after, ratio = f"{row['perplexity']:.2f}", f"{row['ratio']:.2f}"
        if row["acted"]:
            acts, back = f"{row['acts']:.1f}, at most {row['most']}", f"{row['taken_back']:.0f}"
            ends = f"{row['at_once']} of {row['acted']}"
            if row["own_at_once"] is not None:
                ends += f" ({row['own_at_once']:.0%})"
        lines.append(
            f"| {row['method']} | {row['loops']} of {row['outputs']} | {after} | {ratio} | {acts} | {back} | {ends} | "
            f"{row['changed']} of {row['healthy']} |"
        )
    return "\n".join(lines)


def in_short(setting: Row) -> str:
    """What the guard did on the reported families of a setting, in a sentence."""
    rows = {row["method"]: row for row in setting["reported"]}
    words = [f"{rows['full']['loops']} of {rows['full']['outputs']} outputs loop without a guard"]
    for method, way in (("LoopGuard, plain generate", "under plain `generate`"), ("LoopGuard", "with `ss.generate`")):
        row = rows.get(method)
        if row is None:
            continue
        ratio = ""
        if row["acted"] and row["ratio"] is not None:
            ratio = f" at {row['ratio']:.2f} times the perplexity of the model's own text"
        words.append(f"{row['loops']} of {row['outputs']} {way}{ratio}")
    return f"- {name_of(setting)}: {', '.join(words)}."


def pages(settings: Sequence[Row]) -> str:
    """All tables, the families that did not serve to choose first."""
    parts: list[str] = []
    parts.append("\n".join(in_short(setting) for setting in settings if setting["reported"]))
    for setting in settings:
        if setting["reported"]:
            parts += [f"**{name_of(setting)}**", table(setting, "reported")]
    parts.append("The same on the families that served to choose:")
    for setting in settings:
        if setting["chosen"]:
            parts += [f"**{name_of(setting)}**", table(setting, "chosen")]
    return "\n\n".join(parts)


def figure(data: Row) -> Any:
    """Loops and perplexity of each remedy on the reported families, a colour for each setting."""
    from plotly.subplots import make_subplots

    titles = ["outputs that loop", "perplexity after the act, over own text"]
    fig: Any = make_subplots(rows=1, cols=2, horizontal_spacing=0.08, subplot_titles=titles)
    looping = outputs = 0
    for number, setting in enumerate(data["result"]["settings"]):
        rows = setting["reported"]
        names = value_of_each(rows, "method")
        name = name_of(setting)
        style = {"marker_color": COLOURS[number % len(COLOURS)], "legendgroup": name, "name": name}
        shares = []
        for row in rows:
            shares.append(row["loops"] / row["outputs"])
            if row["method"] == "LoopGuard":
                looping += row["loops"]
                outputs += row["outputs"]
        fig.add_bar(x=names, y=shares, **style, row=1, col=1)
        fig.add_bar(x=names, y=value_of_each(rows, "ratio"), **style, showlegend=False, row=1, col=2)
    fig.update_yaxes(range=[0, 1.03], tickformat=".0%", row=1, col=1)
    found = f"With LoopGuard, {looping} of {outputs} outputs loop"
    return figure_of(fig, None, found, width=1500, height=650, barmode="group", bottom=190)


def seams(outputs: Sequence[Row], method: str, tokenizer: Any) -> list[Row]:
    """The text around the first act in the greedy outputs of a method on the reported families."""
    full: dict[Any, Row] = {}
    made: list[Row] = []
    for output in outputs:
        if output["method"] == "full":
            full[output["family"], output["number"]] = output
    for output in outputs:
        if output["method"] != method or not output["acts"] or output["family"] in CHOOSING:
            continue
        place = output["acts"][0][0]
        tokens = output["tokens"]
        plain = full[output["family"], output["number"]]["tokens"]
        made.append(
            {
                "family": output["family"],
                "number": output["number"],
                "method": method,
                "opening": openings(output["family"], 12)[output["number"]],
                "without": tokenizer.decode(plain[-30:]),
                "before": tokenizer.decode(tokens[max(0, place - 20) : place]),
                "after": tokenizer.decode(tokens[place : place + 50], skip_special_tokens=True),
                "perplexity": perplexity([output]) or 1.0,
            }
        )
    return made


def examples(outputs: Sequence[Row], tokenizer: Any) -> list[Row]:
    """Two outputs with an act of each reported family, and the two of the highest perplexity among the others."""
    chosen: list[Row] = []
    others: list[Row] = []
    taken: dict[str, int] = {}
    for seam in seams(outputs, "LoopGuard", tokenizer):
        taken[seam["family"]] = taken.get(seam["family"], 0) + 1
        if taken[seam["family"]] <= 2:
            chosen.append(seam)
        else:
            others.append(seam)
    others.sort(key=lambda seam: seam["perplexity"], reverse=True)
    return chosen + others[:2]


def example_table(found: Sequence[Row]) -> str:
    """Outputs before and after in Markdown."""
    lines = ["| opening | without a guard, its end | with LoopGuard: before the act → after it |", "|---|---|---|"]
    for seam in found:
        shown = f"…{seam['before']} **→** {seam['after']}…"
        lines.append(f"| {_cell(seam['opening'])} | {_cell('…' + seam['without'])} | {_cell(shown)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    for written, shown in (("\n", " ⏎ "), ("|", "\\|"), ("<", "&lt;"), ("_", "\\_")):
        text = text.replace(written, shown)
    return text


def draw(outputs: Sequence[Row], out: Path, page: Path) -> None:
    """Write the figure, and the tables of the page."""
    families: Row = {}
    for family in FORMS:
        families[family] = openings(family, 12)
    settings = settings_of(outputs)
    first = settings[0]
    mine: list[Row] = []
    for output in outputs:
        if all(output[key] == first[key] for key in ("model", "new", "temperature")):
            mine.append(output)
    tokenizer = load(None, backend="hf").tokenizer
    result = {
        "families": families,
        "choosing": CHOOSING,
        "settings": settings,
        "examples": examples(mine, tokenizer),
        "seams": [json.loads(line) for line in SEAMS.read_text().splitlines()],
    }
    save("loopguard_remedies", record("loopguard-remedies", result, {}), figure, out)
    put_table(page, MODULE, pages(settings))
    put_table(page, "loopguard.outcome", example_table(result["examples"]))
