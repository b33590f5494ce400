"""Several models are scanned as each would be alone, whoever runs them and whatever goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from organisms import organism
from scan_kit import few_parts
from test_resumed_scan import results

from sinkscope.app.many import scan_many
from sinkscope.app.scan import scan

NAMES = ("llama", "gpt2")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Small models with known sinks, a folder each."""
    place = tmp_path_factory.mktemp("models")
    return [Path(organism(name, 2).save(place / name)) for name in NAMES]


@pytest.fixture(autouse=True)
def few(monkeypatch, tmp_path_factory):
    """The tests are about what runs the scans, and not about all their parts."""
    few_parts(monkeypatch, tmp_path_factory.mktemp("start"))


def test_the_default_pool_gives_the_cards_of_scans_one_by_one(models, tmp_path):
    outcomes = scan_many(models, tmp_path / "many", quick=True)
    assert [outcome.problem for outcome in outcomes] == [None] * len(models)
    for model in models:
        scan(model, out=tmp_path / "alone" / model.name, quick=True)
        assert results(tmp_path / "alone" / model.name) == results(tmp_path / "many" / model.name)
