"""Small models are scanned by an array of jobs, here one after another on this machine."""

from __future__ import annotations

import os
import sys

import pytest
from organisms import organism
from repository import ran

from sinkscope.app.card import SinkCard


@pytest.mark.slow
def test_an_array_of_jobs_scans_every_model(tmp_path):
    """Every model has its card, with the neurons that were planted."""
    organisms = {f"seed{seed}": organism(seed=seed) for seed in (1, 2)}
    models = [one.save(tmp_path / "models" / name) for name, one in organisms.items()]
    command = tmp_path / "sinkscope"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m sinkscope "$@"\n')
    command.chmod(0o755)
    words = ["bash", "experiments/cluster/array.slurm", str(tmp_path / "out"), *models]
    for number in ("1", "2"):
        ran(words, PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_ARRAY_TASK_ID=number)
    for name, one in organisms.items():
        numbers = SinkCard.load(tmp_path / "out" / name / "card.json").by_key()
        planted = " and ".join(f"L{layer}.N{index}" for layer, index in one.truth.neurons)
        assert numbers["find_sinks", "neurons"].value == planted
