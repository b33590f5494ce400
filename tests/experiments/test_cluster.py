"""Models are scanned by an array of jobs, of which one runs here."""

from __future__ import annotations

import os
import sys

import pytest
from organisms import organism
from repository import ran

from sinkscope.app.card import SinkCard


@pytest.mark.slow
def test_a_job_scans_the_model_of_its_number(tmp_path):
    """The card names the neurons that were planted."""
    planted = organism(seed=2)
    model = planted.save(tmp_path / "second")
    command = tmp_path / "sinkscope"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m sinkscope "$@"\n')
    command.chmod(0o755)
    words = ["bash", "experiments/cluster/array.slurm", tmp_path / "out", "first", model, "third"]
    ran(words, PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_ARRAY_TASK_ID="2")
    assert [folder.name for folder in (tmp_path / "out").iterdir()] == ["second"]
    said = SinkCard.load(tmp_path / "out/second/card.json").conclusion()
    assert all(f"L{layer}.N{index}" in said for layer, index in planted.truth.neurons)
