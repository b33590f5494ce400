"""Published results: the records, and every protocol against plain hooks and sums on planted models."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from organisms import organism
from raw_kit import attention, norms, residuals

import sinkscope as ss
from experiments.reproduce import compare
from experiments.reproduce.compare import compared
from experiments.reproduce.protocols import PROTOCOLS
from experiments.reproduce.published import Published, published
from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.models.checkpoints.locate import find, list_models
from sinkscope.models.text import typical_text

# --- The records


def test_every_record_has_a_source_a_model_and_a_quantity_that_is_measured_or_a_note():
    assert {*PROTOCOLS, "note"} == {one.quantity for one in published()}
    names = {entry.name for entry in list_models()}
    seen = set()
    for record in published():
        assert record.source.strip() and record.source[0] != " "
        assert record.model in names or "/" in record.model or record.quantity == "note", record
        if "/" in record.model:
            assert find(record.model) is None, f"{record.model} has a short name"
        key = (record.model, record.quantity, record.value, record.source, record.where)
        assert key not in seen, f"{record} stands twice"
        seen.add(key)
        if record.quantity.startswith(("sink_rate", "massive_", "repeats")):
            assert record.tolerance > 0, record
    assert len(seen) > 140


TABLE_1 = {  # Yona et al. 2025: repeats, layers, neurons
    "llama-1-7b": (450, (2,), ("L2.N7003",)),
    "llama-2-7b": (1000, (1,), ("L1.N7890", "L1.N10411")),
    "llama-3-8b-instruct": (4000, (1,), ("L1.N198", "L1.N2427")),
    "mistral-7b-instruct-v0.1": (1200, (1,), ("L1.N7310", "L1.N8572")),
}


def test_table_1_of_the_paper_is_there_as_it_is_printed():
    there = [one for one in published() if one.source == "Yona et al. 2025, Table 1" and one.model in TABLE_1]
    printed = {(one.model, one.quantity): one.value for one in there}
    assert all(one.primary for one in there) and len(there) == 3 * len(TABLE_1)
    for name, row in TABLE_1.items():
        assert tuple(printed[name, quantity] for quantity in ("repeats", "layers", "neurons")) == row


@pytest.mark.parametrize(
    ("quantity", "value", "tolerance", "measured", "fits"),
    [
        ("residual_dims", [3, 5], 0, [5, 3, 9], True),
        ("residual_dims", [3, 5], 0, [3], False),
        ("sink_rate", 0.5, 0.03, 0.53, True),
        ("sink_rate", 0.5, 0.03, 0.5301, False),
        ("massive_layers", [1, 29], 1, [2, 28], True),
        ("massive_layers", [1, 29], 1, [1, 27], False),
        ("repeats", 10, 5, float("inf"), False),
    ],
)
def test_a_set_is_to_be_contained_and_a_number_to_be_within_the_tolerance(quantity, value, tolerance, measured, fits):
    assert Published("m", quantity, value, "s", tolerance=tolerance).fits(measured) is fits


# --- Protocols against plain hooks


@cache
def planted(family: str):
    """A planted model: with BOS, or of six layers without."""
    if family == "llama":
        return organism("llama", 0)
    return organism(family, 0, bos=False, n_layers=6)


def measured(one: Any, quantity: str, value: Any) -> Any:
    """What a record of this quantity is compared with."""
    name = getattr(one.model, "sinkscope_name", type(one.model).__name__)
    (row,) = compared(one.model, [Published(name, quantity, value, "me")], tokenizer=one.tokenizer)
    assert row["remark"] is None, row["remark"]
    return row["measured"]


def pieces(tokenizer: Any, bos: bool, count: int, length: int) -> torch.Tensor:
    """Pieces of the typical text, with BOS before each if the tokenizer puts it there."""
    ids = tokenizer(typical_text(), add_special_tokens=False)["input_ids"]
    body = length - bos
    count = min(count, len(ids) // body)
    rows = torch.tensor(ids[: count * body]).reshape(count, body)
    if bos:
        rows = torch.cat([torch.full((count, 1), tokenizer.bos_token_id), rows], 1)
    return rows


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_sink_rates_are_shares_of_heads_above_a_third_nearly(family):
    one = copy.deepcopy(planted(family))
    ids = pieces(one.tokenizer, one.bos, 100, 64)
    if not one.bos:  # as GPT-2's has one and does not put it there: other measurements do
        one.tokenizer.bos_token = "<unused>"
        assert Setup.open(one.model, tokenizer=one.tokenizer).bos == 1
    alpha = attention(one.model, ids)[..., 0].mean(-1)
    found = measured(one, "sink_rate", 0.5)
    assert found == pytest.approx(float((alpha > 0.3).float().mean()), abs=2e-4)
    assert family == "gpt2" or found > 0.02


@torch.no_grad()
def test_massive_activations_are_large_values_at_the_first_token_against_plain_hooks():
    model = ss.load()
    ids = pieces(model.tokenizer, True, 4, 64)
    after = residuals(model, ids)
    dims, layers = set(), []
    for layer, resid in enumerate(after):
        first = resid[:, 0].mean(0)
        massive = (first.abs() > 100) & (first.abs() > 1000 * resid[:, 1:].abs().median())
        dims |= set(massive.nonzero().flatten().tolist())
        layers += [layer] * bool(massive.any())
    assert 0 < layers[0] and layers[-1] <= 5 and 0 < len(dims) < 10
    one = SimpleNamespace(model=model, tokenizer=model.tokenizer)
    assert set(measured(one, "residual_dims", [*dims][:1])) == dims
    assert measured(one, "massive_layers", [layers[0], layers[-1]]) == [layers[0], layers[-1]]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_neurons_and_their_layer_are_the_planted_ones(family):
    one = planted(family)
    truth = one.truth
    assert measured(one, "layers", [0]) == [truth.sink_layer]
    names = [f"L{layer}.N{neuron}" for layer, neuron in truth.neurons]
    assert set(measured(one, "neurons", names[:1])) == set(names)
    other = (truth.sink_layer + 1) % one.model.config.num_hidden_layers
    assert measured(one, "neurons", [f"L{other}.N0"]) == []


@torch.no_grad()
def test_repeats_are_copies_until_half_of_the_norm_of_the_first_token():
    one = planted("llama")
    counts = []
    for word in ("cat", "dog", "the"):
        (token,) = one.tokenizer(word, add_special_tokens=False)["input_ids"]
        norm = norms(one.model, one.repeated(240, token))[one.truth.sink_layer, 0]
        reached = (norm[1:] >= norm[0] / 2).nonzero().flatten().tolist()
        if reached and reached[0] > 0:
            counts.append(reached[0] + 1)
    assert counts, "none of these words becomes a sink"
    assert measured(one, "repeats", 120) == median(counts)
    short = max(counts) - 1  # twice as many copies are tried
    assert measured(one, "repeats", short) == median(counts)
    assert measured(one, "repeats", 2) == float("inf")  # not within 4 copies
    none = organism("llama", 0, kind="none")
    assert measured(none, "repeats", 20) == float("inf")
    assert measured(none, "layers", [1]) == [None]


# --- The script


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planted("llama").save("tiny")
    return tmp_path


def test_a_result_that_does_not_agree_ends_with_1(folder, capsys, monkeypatch):
    layer = planted("llama").truth.sink_layer
    known = [
        Published("org/Tiny", "layers", [layer], "first paper"),
        Published("another", "layers", [0], "third paper"),
        Published("tiny", "note", "a word", "a note"),
        Published("tiny", "neurons", ["L99.N1"], "me"),
    ]
    monkeypatch.setattr(compare, "published", lambda: known)
    compare.main("./tiny", out=Path("found.json"))
    said = capsys.readouterr().out
    assert "Measured values agree with 1 of 1 published ones; 2 more were not measured." in said
    assert f"layers {layer} (first paper); measured {layer}, agrees" in said and "third paper" not in said
    assert "no protocol here" in said and "not measured: layer 99 is not in tiny" in said
    rows = json.loads(Path("found.json").read_text())["result"]["records"]
    assert [row["agrees"] for row in rows] == [True, None, None]
    known[1:] = [Published("tiny", "layers", [layer + 1], "me")]
    with pytest.raises(SystemExit) as end:
        compare.main("./tiny")
    assert end.value.code == 1
    assert "Measured values agree with 1 of 2 published ones." in capsys.readouterr().out


def test_a_model_of_which_nothing_is_published_is_refused(folder):
    with pytest.raises(SinkscopeError, match="nothing is published here about tiny: give a model of the list"):
        compare.main("./tiny")


def test_the_list_shows_every_record_with_its_source(capsys):
    compare.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(published())
    assert all(one.source in line for one, line in zip(published(), lines, strict=True))
