"""The table of the documentation: each row is typed as it stands, and both sides give the same numbers."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from intervention_kit import bridge_of, nnsight_of
from organisms import tiny_model
from repository import ROOT

import sinkscope as ss

PAGE = ROOT / "docs/other_libraries.md"
ROWS = [
    (section.partition("\n")[0], *row)
    for section in PAGE.read_text().split("\n## ")[1:]
    for row in re.findall(r"^\| `(.+)` \| `(.+)` \|$", section, re.M)
]


def typed(source: str, file: Path, given: dict[str, Any]) -> torch.Tensor:
    """`out` after the lines of a cell. nnsight reads the source of a trace from its file."""
    if source.startswith("with"):
        source = source.replace("): ", "):\n    ", 1).replace("; ", "\n    ")
    file.write_text(f"{source}\n")
    with torch.no_grad():
        return runpy.run_path(str(file), given, run_name="__main__")["out"]


@pytest.mark.parametrize(("library", "theirs", "ours"), ROWS)
def test_our_line_and_that_of_the_other_library_give_the_same_values(library, theirs, ours, tmp_path):
    model: Any
    model, tokenizer = tiny_model("llama")
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, 90, (1, 24))
    weights = {"W_enc": torch.randn(32, 64), "W_dec": torch.randn(64, 32)}
    sae = SimpleNamespace(**weights, encode=lambda x: torch.relu(x @ weights["W_enc"]))
    given = {"torch": torch, "ss": ss, "model": model, "ids": ids, "v": torch.randn(32), "sae": sae}
    given["site"] = "blocks.1.hook_resid_post"
    out = typed(ours, tmp_path / "ours.py", given)
    assert "with" not in ours or not torch.equal(out, model(ids).logits)
    if library == "kvpress":
        given |= vars(pytest.importorskip("kvpress"))
    elif library == "nnsight":
        given["traced"] = nnsight_of(model, tokenizer)
    else:
        given["bridge"] = bridge_of(model, tokenizer)
    torch.testing.assert_close(typed(theirs, tmp_path / "theirs.py", given), out, atol=1e-4, rtol=1e-3)
