"""The table of several cards repeats their numbers, and says at which checkpoint the sink emerges."""

from __future__ import annotations

import csv
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from organisms import organism

from sinkscope.app.card import SinkCard, read_card
from sinkscope.app.scan_table import scan_table
from sinkscope.results.result import Number
from sinkscope.sinks.find.result import FindSinks

pytestmark = pytest.mark.few_texts


def checkpoint(folder: Path, card: SinkCard, name: str, share: float | None, margin: float = 0.01):
    """A card whose sink has this share of heads; without one, there is no sink."""
    sinks, *others = card.parts
    numbers = [Number("sink", "where it is", "no position")]
    if share is not None:
        numbers = [Number("sink", "where it is", "the first token"), Number("heads", "who", share, margin=margin)]
    (folder / name).mkdir()
    replace(card, parts=(replace(sinks, numbers=tuple(numbers)), *others)).save(folder / name / "card.json")


def test_the_numbers_of_the_table_are_those_of_the_cards(alone, typed):
    _, row = csv.DictReader(StringIO(typed(f"scan table {alone} --csv -").out))
    numbers = {number.label: number for part in read_card(alone / "llama").parts for number in part.numbers}
    heads = numbers["share of heads that attend to the sink"]
    assert (float(row["heads"]), float(row["heads_margin"])) == (heads.value, heads.margin)
    ((layer, neuron),) = organism("llama", 2).truth.neurons
    assert (row["neurons"], row["sink_layer"], row["sink"]) == (f"L{layer}.N{neuron}", str(layer), "the first token")
    sinks = FindSinks.load(alone / "llama/find-sinks.json")
    assert float(row["sink_rate"]) == sinks.sink_rate.value and row["repeats"] == str(sinks.repeats.median or "")
    assert float(row["share"]) == max(one.share for one in sinks.neurons)
    assert (row["scan"], row["loops"], row["problem"]) == ("llama", "", "")  # the part about loops did not run


def test_the_sink_emerges_where_all_later_checkpoints_have_one(alone, tmp_path):
    card = read_card(alone / "llama")
    for step, share in ((1000, 0.5), (20, 0.1), (100, None), (9, None), (200, 0.25)):
        checkpoint(tmp_path, card, f"run-checkpoint-{step}", share)
    checkpoint(tmp_path, card, "run-final", 0.75)
    table = scan_table(tmp_path)
    (series,) = table.series()
    assert [row.step for row in series] == [9, 20, 100, 200, 1000]
    assert table.conclusion() == (
        "The attention sink is there from run-checkpoint-200 on, where 0.25 of heads attend to it; "
        "run-checkpoint-100 has none."
    )
    (line,) = table.figure().data
    assert list(line.x) == [9, 20, 100, 200, 1000] and list(line.y) == [0, 0.1, 0, 0.25, 0.5]
    assert list(line.error_y.array) == [0, 0.01, 0, 0.01, 0.01]


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ((0.5, 0.5), "from a-1 on, where 0.5 of heads attend to it; it is the first checkpoint."),
        ((0.5, None), "The last checkpoint, a-2, has no attention sink."),
    ],
)
def test_a_sink_that_is_always_there_or_goes_away_does_not_emerge(alone, tmp_path, shares, said):
    for step, share in enumerate(shares, 1):
        checkpoint(tmp_path, read_card(alone / "llama"), f"a-{step}", share)
    assert scan_table(tmp_path).conclusion().endswith(said)


def test_models_of_other_shapes_and_names_are_no_checkpoints(alone, tmp_path):
    card = read_card(alone / "llama")
    wide = replace(card, model=replace(card.model, d_model=2 * card.model.d_model))
    checkpoint(tmp_path, card, "m-2-7b", 0.5)
    checkpoint(tmp_path, wide, "m-2-13b", 0.25)
    checkpoint(tmp_path, card, "n-2-7b", None)
    (tmp_path / "n-2-70b").mkdir()
    table = scan_table(tmp_path)
    assert table.series() == [] and table.conclusion() == "2 of 3 models have an attention sink."
    assert table.exit_code == 1 and any("n-2-70b has no card" in line for line in table.details())
