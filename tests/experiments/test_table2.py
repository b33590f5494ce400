"""Table 2: what the paper prints, what was measured, and no number that is neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.repeated_token import table2
from sinkscope.files.provenance import ModelInfo, Provenance
from sinkscope.sinks.patch.evaluate import PatchEvaluation


def _cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_without_weights_only_the_paper_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    table2.main([])
    head, _, *rows = _cells(capsys.readouterr().out)
    assert len(rows) == 15
    assert all(row[6:] == [table2.ABSENT] * 4 for row in rows)
    assert len(head) == len(rows[0]) == 10
    by = {(row[0], row[1]): row[2:5] for row in rows}
    assert by["LLaMa-1-7B-HF", "TruthfulQA"] == ["31.21", "29.38", "-1.83"]
    assert by["LLaMa-2-7B-HF", "MMLU"] == ["41.20", "42.17", "+0.97"]
    assert by["Mistral-7B-Instruct-v0.1", "AI2-ARC"] == ["50.17", "49.66", "-0.51"]


def test_measured_numbers_stand_beside_the_papers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[Any] = []

    def fake(model: Any, patch: Any, *, tasks: Any, **_: Any) -> PatchEvaluation:
        asked.append((model, patch.checked_sites, tasks))
        return PatchEvaluation(
            model=ModelInfo("x", "llama", 32, 4096, 11008, "f"),
            settings={},
            provenance=Provenance(("x",), {}, "cpu", "float32", "sdpa", True, 0, 1.0, None),
            tasks=("hellaswag",),
            metrics=("acc_norm",),
            samples=np.array([10]),
            original=np.array([0.5712]),
            changed=np.array([[0.5713], [0.57]]),
            errors=np.array([[0.002], [0.001]]),
            neurons=(),
        )

    pytest.importorskip("nnsight")  # importing it hangs a `save` on every object
    monkeypatch.setattr(table2, "evaluate_patch", fake)
    assert table2.main(["--run", f"llama-2-7b={tmp_path}"]) == 0
    rows = [row for row in _cells(capsys.readouterr().out) if row[0] == "LLaMa-2-7B-HF"]
    assert [(s.layer, s.neuron) for s in asked[0][1]] == [(1, 7890), (1, 10411)]
    assert asked[0][0] == str(tmp_path)
    assert set(asked[0][2]) == {
        "mmlu",
        "hellaswag",
        "truthfulqa_mc1",
        "truthfulqa_mc2",
        "winogrande",
        "arc_easy",
        "arc_challenge",
    }
    measured = [row for row in rows if row[6] not in ("not measured", table2.ABSENT)]
    assert measured == [
        [
            "LLaMa-2-7B-HF",
            "HellaSwag",
            "57.12",
            "57.13",
            "+0.01",
            "hellaswag acc_norm",
            "57.12",
            "57.13",
            "+0.01 +- 0.20",
            "-0.12 +- 0.10",
        ]
    ]
