"""Write the table of two real models from what was measured: python -m experiments.real.page

The numbers that all pages cite go to docs/real_models.md, between two marks, and a test compares them with the data in
figures/.
"""

from __future__ import annotations

from math import log
from pathlib import Path

from experiments.drawn import markdown, put_table
from experiments.record import Row, earlier
from experiments.script import run as run_script
from sinkscope.results import row as results
from sinkscope.sinks.spikes.result import FindSinks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/real_models.md"
READINGS = ROOT / "figures/real_readings.json"
FOUND = {"smollm2": ROOT / "figures/find_sinks_smollm2.json", "gemma3": ROOT / "figures/find_sinks_gemma3.json"}


def main() -> None:
    """Write the table into its page."""
    readings = earlier(READINGS)
    found = {name: FindSinks.load(path) for name, path in FOUND.items()}
    put_table(PAGE, "real.page", numbers(found, readings))


def numbers(found: dict[str, FindSinks], readings: Row) -> str:
    """The table of the numbers that pages cite: what `find-sinks` measures, beside plain hooks on other texts."""
    columns: list[list[str]] = []
    for name in FOUND:
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
