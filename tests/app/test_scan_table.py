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
from sinkscope.app.scan_table import scan_table
from sinkscope.results.result import Number

pytestmark = pytest.mark.few_texts


def checkpoint(folder: Path, card: SinkCard, name: str, share: float | None):
    """A card whose sink has this share of heads; without one, there is no sink."""
    sinks, *others = card.parts
    numbers = [Number("heads", "who", share or 0.0)]
    (folder / name).mkdir()
    replace(card, parts=(replace(sinks, numbers=tuple(numbers)), *others)).save(folder / name / "card.json")


def test_the_numbers_of_the_table_are_those_of_the_cards(alone, typed):
    _, row = csv.DictReader(StringIO(typed(f"scan table {alone} --csv -").out))
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
    for step, share in ((1000, 0.5), (20, 0.1), (100, None), (9, None)):
        checkpoint(tmp_path, card, f"run-checkpoint-{step}", share)
    for name, command in (("run-checkpoint-30", "scan"), ("answers", "bench")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "settings.json").write_text(json.dumps({"command": command}))
    (tmp_path / "pictures").mkdir()
    table = scan_table(tmp_path)
    assert [row["scan"].rpartition("-")[2] for row in table.scans] == ["9", "20", "30", "100", "1000"]
    assert table.conclusion() == "2 of 4 models have an attention sink."
    assert table.exit_code == 1 and any("run-checkpoint-30 has no card" in line for line in table.details())
