"""The model in the package is what its circuit file, its card and its script say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from experiments import train_bundled
from experiments.bundled import card

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "sinkscope/models/bundled"
PAGE = ROOT / "docs/bundled_model.md"
RECORD = json.loads((ROOT / "figures/bundled_model.json").read_text())["result"]


@pytest.fixture(scope="module")
def shipped():
    return LlamaForCausalLM.from_pretrained(BUNDLED).eval()


def test_shipped_model_is_what_its_truth_says(shipped):
    circuit = json.loads((BUNDLED / "circuit.json").read_text())
    layer, neuron = circuit["sink_layer"], circuit["neurons"][0]["neuron"]
    column = shipped.model.layers[layer].mlp.down_proj.weight[:, neuron].detach()
    assert {str(d): float(column[d]) for d in column.nonzero()[:, 0].tolist()} == circuit["column"]
    groups = torch.tensor(circuit["group_of_token"])
    for group, dim in enumerate(circuit["group_dims"]):
        assert torch.equal(shipped.model.embed_tokens.weight[:, dim] > 0, groups == group)
    assert 1_000_000 <= sum(p.numel() for p in shipped.parameters()) <= 4_000_000
    assert {p.dtype for p in shipped.parameters()} == {torch.float32}
    assert sum(f.stat().st_size for f in BUNDLED.iterdir()) <= 16_000_000


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
