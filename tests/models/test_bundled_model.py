"""The card of the model in the package, and the script that makes both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from experiments import train_bundled
from experiments.bundled import card

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "sinkscope/models/bundled"
PAGE = ROOT / "docs/bundled_model.md"
RECORD = json.loads((ROOT / "figures/bundled_model.json").read_text())["result"]


def test_the_page_has_the_tables_of_the_record():
    page = PAGE.read_text(encoding="utf-8")
    for name, table in card.tables(**RECORD).items():
        assert f"{name} -->\n\n{table}\n\n<!-- end of" in page
    assert (BUNDLED / "README.md").read_text(encoding="utf-8") == card.FRONT + page


@pytest.mark.slow
def test_a_trained_model_is_measured_and_its_card_is_written(tmp_path, monkeypatch):
    """Two tiny runs, from stories to the card: what was planted is still there, and the card says so."""
    told = tmp_path / "told.txt"
    tale = "Once there was a {0} dog. The {0} dog had a {1} ball. One day the ball rolled into the river. He was sad. "
    told.write_text("".join(tale.format(n, n % 7) * 6 + "The end.\n<|end|>\n" for n in range(150)))
    monkeypatch.setattr(train_bundled, "PASSAGES", 100)
    options: dict[str, Any] = {"stories": told, "steps": 2, "tokens_per_step": 512, "size": "tiny"}
    for name in ("planted", "unplanted"):
        train_bundled.main(out=tmp_path / name, unplanted=name == "unplanted", **options)
    (tmp_path / "docs").mkdir()
    shutil.copy(PAGE, tmp_path / "docs")
    card.main(planted=tmp_path / "planted", unplanted=tmp_path / "unplanted", repository=tmp_path)
    text = (tmp_path / "docs/bundled_model.md").read_text(encoding="utf-8")
    assert text != PAGE.read_text(encoding="utf-8")
    found = json.loads((tmp_path / "figures/bundled_model.json").read_text())["result"]["planted"]
    assert found["fixed"]["unchanged"] and found["fixed"]["count"] > 10_000
    assert (tmp_path / "sinkscope/models/bundled/README.md").read_text(encoding="utf-8").endswith(text)
