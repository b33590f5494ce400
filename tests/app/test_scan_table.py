"""The table of several cards repeats their numbers."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from organisms import organism

from sinkscope.app.card import SinkCard
from sinkscope.app.report import scan_table
from sinkscope.results.result import Number

pytestmark = pytest.mark.few_texts


def checkpoint(folder: Path, card: SinkCard, name: str, share: float, spikes: bool):
    """A card with this share of heads, which may attend to a place where no norm stands out."""
    sinks, *others = card.parts
    numbers = [Number("heads", "who", share)]
    if spikes:
        numbers.append(Number("place", "where", "the first token"))
    (folder / name).mkdir()
    replace(card, parts=(replace(sinks, numbers=tuple(numbers)), *others)).save(folder / name / "card.json")


def only_one(folder: Path) -> Path:
    """A folder with the last of the scans alone."""
    (folder / "one").mkdir()
    (folder / "run-checkpoint-1000").rename(folder / "one" / "run")
    return folder / "one"


def test_the_numbers_of_the_table_are_those_of_the_cards(alone, typed):
    (row,) = csv.DictReader(StringIO(typed(f"scan table {alone} --csv -").out))
    numbers = {
        number.label: number for part in SinkCard.load(alone / "llama/card.json").parts for number in part.numbers
    }
    heads = numbers["share of heads that attend to the sink"]
    assert float(row["heads"]) == heads.value
    ((layer, neuron),) = organism("llama", 2).truth.neurons
    assert (row["neurons"], row["place"]) == (f"L{layer}.N{neuron}", "the first token")
    assert int(row["layers"].split("-")[0]) == layer
    assert (row["scan"], row["loops"], row["problem"]) == ("llama", "", "")  # the part about loops did not run


def test_scans_are_sorted_and_those_without_a_card_are_named(alone, tmp_path):
    card = SinkCard.load(alone / "llama/card.json")
    for step, share, spikes in ((1000, 0.5, True), (20, 0.1, True), (100, 0.2, False), (9, 0.0, False)):
        checkpoint(tmp_path, card, f"run-checkpoint-{step}", share, spikes)
    for name, command in (("run-checkpoint-30", "scan"), ("answers", "bench")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "settings.json").write_text(json.dumps({"command": command}))
    (tmp_path / "pictures").mkdir()
    table = scan_table(tmp_path)
    assert [row["scan"].rpartition("-")[2] for row in table.scans] == ["9", "20", "30", "100", "1000"]
    assert table.conclusion() == "2 of 4 models have a norm spike; 0% to 50% of the heads attend to the sink."
    assert scan_table(only_one(tmp_path)).conclusion().startswith("1 of 1 models have a norm spike; 50% of")
    assert table.exit_code == 1 and any("run-checkpoint-30 has no card" in line for line in table.details())
