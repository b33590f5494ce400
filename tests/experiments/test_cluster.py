"""Small models are scanned by an array of jobs, here one after another on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from organisms import organism
from repository import ran

from sinkscope.app.card import SinkCard

SEEDS = {"one": 1, "two": 2, "three": 3}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[str]:
    place = tmp_path_factory.mktemp("models")
    return [organism(seed=seed).save(place / name) for name, seed in SEEDS.items()]


def check(out: Path):
    """Every model has its card, with the neurons that were planted."""
    for name, seed in SEEDS.items():
        numbers = SinkCard.load(out / name / "card.json").by_key()
        truth = organism(seed=seed).truth
        planted = " and ".join(f"L{layer}.N{index}" for layer, index in truth.neurons)
        assert numbers["find_sinks", "neurons"].value == planted


@pytest.mark.slow
def test_an_array_of_jobs_scans_every_model(models, tmp_path):
    command = tmp_path / "sinkscope"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m sinkscope "$@"\n')
    command.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    for number in range(1, 4):
        words = ["bash", "experiments/cluster/array.slurm", str(tmp_path / "out"), *models]
        ran(words, PATH=path, SLURM_ARRAY_TASK_ID=str(number))
    check(tmp_path / "out")
