"""Write the tables of two real models from what was measured: python -m experiments.real.page

The numbers that all pages cite go to docs/real_models.md, what every command says to figures/real_models.md. Both stand
between two marks, and a test compares them with the data in figures/.
"""

from __future__ import annotations

from math import log
from pathlib import Path
from textwrap import shorten

from experiments.drawn import markdown, put_table
from experiments.real.commands import COLUMN, COMMANDS
from experiments.record import Row, earlier
from experiments.script import run as run_script
from sinkscope.results import row as results
from sinkscope.sinks.spikes.result import FindSinks

ROOT = Path(__file__).parents[2]
PAGE, COMMANDS_PAGE = ROOT / "docs/real_models.md", ROOT / "figures/real_models.md"
TABLE, READINGS = ROOT / "figures/real_models.json", ROOT / "figures/real_readings.json"
FOUND = {"smollm2": ROOT / "figures/find_sinks_smollm2.json", "gemma3": ROOT / "figures/find_sinks_gemma3.json"}
TITLES = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "Gemma-3-270M"}
MOST = 204
HEAD = ("command", "CPU s", "peak GB", "what it says")


def main() -> None:
    """Write the tables into their pages."""
    table, readings = earlier(TABLE), earlier(READINGS)
    found = {name: FindSinks.load(path) for name, path in FOUND.items()}
    put_table(PAGE, "real.page", numbers(found, readings))
    put_table(COMMANDS_PAGE, "real.page", tables(table))


def numbers(found: dict[str, FindSinks], readings: Row) -> str:
    """The table of the numbers that pages cite: what `find-sinks` measures, beside plain hooks on other texts."""
    columns: list[list[str]] = []
    for name in TITLES:
        columns.append(measured_numbers(found[name]))
        columns.append(plain_numbers(readings[name]))
    head = ("", "SmolLM2: `find-sinks`", "plain hooks", "Gemma: `find-sinks`", "plain hooks")
    return markdown(head, list(zip(NUMBERS, *columns, strict=True)))


def measured_numbers(found: FindSinks) -> list[str]:
    """The column of a result of `find-sinks`; the main spike is that of the largest norm."""
    main, other = sorted(found.spikes, key=lambda spike: -spike.named("spike", "norm").get("norm_after"))[:2]
    gone, busiest, readers = main.named("effects", "at place"), main.named("controls", "busiest"), found.readers
    hidden = main.named("effects", "hidden")
    return [
        f"{readers.get('heads'):.0f} ± {readers.margin('heads'):.0f} of {readers.get('total'):.0f}",
        f"layers {main.layers[0]} to {main.layers[1]}, {main.ratio:.0f} times",
        names_of(list(main.needed)),
        f"{gone.get('left'):.0%} of the spike",
        f"{gone.get('heads'):.0f} of {gone.get('intact'):.0f}",
        f"{nats(gone)} at the place, {nats(main.named('effects', 'everywhere'))} everywhere",
        nats(hidden) if hidden.numbers else "-",
        f"{busiest.get('left'):.0%} of the spike, {nats(busiest)} ({busiest.get('size'):.0f} neurons)",
        f"layers {other.layers[0]} to {other.layers[1]}, {other.ratio:.0f} times",
    ]


def nats(row: results.Row) -> str:
    """A rise of the loss with its margin."""
    return f"{row.get('loss'):.2f} ± {row.margin('loss'):.2f} nats"


def plain_numbers(readings: Row) -> list[str]:
    """The column of plain hooks, which zero the first neurons only and read texts of four kinds."""
    attention, spike, gone = readings["attention"], readings["spike"], readings["ablation"]
    needed, random = gone["needed"], gone["random"]
    left = f"{random['ratio'] / gone['intact']['ratio']:.0%} of the norm"
    return [
        f"{attention['heads_bos']} of {spike['n_layers'] * spike['n_heads']}",
        f"after layer {spike['layer']}, {spike['ratio']:.0f} times",
        names_of([f"L{layer}.N{neuron}" for layer, neuron in gone["neurons"]]),
        f"{needed['ratio'] / gone['intact']['ratio']:.0%} of the norm",
        f"{needed['later_heads']} of {gone['intact']['later_heads']}",
        f"{log(needed['perplexity_ratio']):.2f} nats everywhere",
        "-",
        f"{left}, {log(random['perplexity_ratio']):.2f} nats (random neurons)",
        "-",
    ]


def names_of(parts: list[str]) -> str:
    """Some neurons: the first two by name, the others by their number."""
    shown = ", ".join(parts[:2])
    return f"{shown} and {len(parts) - 2} more" if len(parts) > 2 else shown


def tables(table: Row) -> str:
    """A table for each model."""
    parts: list[str] = []
    for model, title in TITLES.items():
        rows: list[list[str]] = []
        for name in COMMANDS:
            if name in table:
                rows.append(row_of(name, table[name][model][COLUMN]))
        parts.append(f"### {title}\n\n{markdown(HEAD, rows)}")
    return "\n\n".join(parts)


def row_of(name: str, measured: Row) -> list[str]:
    """A line of a table."""
    if "not_run" in measured:
        return [f"`{name}`", "-", "-", f"not run: {measured['not_run']}"]
    said = shorten(measured["said"], MOST, placeholder=" ...").replace("|", "\\|").replace("<", "&lt;") or "nothing"
    if measured["cut"]:
        said = f"cut after {measured['cpu_seconds']:.0f} CPU seconds, before it ended"
    elif measured["exit_code"]:
        said = f"exit code {measured['exit_code']}: {said}"
    return [f"`{name}`", f"{measured['cpu_seconds']:.0f}", f"{measured['peak_bytes'] / 1e9:.1f}", said]


NUMBERS = (
    "heads that give the first token more than 0.3 of their attention",
    "main spike: where, and its norm over the typical one",
    "the neurons that it needs, which are zeroed below",
    "zeroed: what is left",
    "zeroed: heads of later layers that still attend",
    "zeroed: rise of the loss, nats a token",
    "the first token hidden from later tokens in the layers after these",
    "the busiest others of these layers zeroed, which write as much",
    "second spike",
)
"""The quantities of the table of numbers."""


if __name__ == "__main__":
    run_script(main)
