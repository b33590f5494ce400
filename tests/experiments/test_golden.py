"""The golden files, read by an engine of numpy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.golden import make, reader

FOLDER = Path(make.__file__).parent


def test_an_engine_without_torch_agrees():
    found = list(reader.check(FOLDER))
    assert len(found) == 6 and sum(bool(case.get("answer")) for case, _, _ in found) == 2
    for case, error, answered in found:
        assert error < 1e-4 and answered, case
    data = json.loads((FOLDER / "golden.json").read_text())
    assert data["no_sink_error"] > 1  # so a loss of the first tokens is seen
    assert (FOLDER / "golden.npz").stat().st_size + (FOLDER / "golden.json").stat().st_size < 2e6


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["position", "fact", "window"])
def test_a_faulty_engine_is_seen(fault, monkeypatch):
    own = reader.Llama

    class Faulty(own):
        def read(self, ids, first):
            held = self.cache[0]
            if fault == "position" and held is not None:
                first = held[0].shape[1]
            return super().read(ids, first)

        def evict(self, keep):
            if fault == "fact":
                keep = keep & (np.arange(len(keep)) > 44)
            super().evict(keep)

    monkeypatch.setattr(reader, "Llama", Faulty)
    if fault == "window":
        monkeypatch.setattr(reader, "Llama", lambda config, weights, window: own(config, weights))
    wrong = {case["name"] for case, error, answered in reader.check(FOLDER) if error > 1e-4 or not answered}
    unanswered = {case["name"] for case, _, answered in reader.check(FOLDER) if not answered}
    assert (
        wrong
        == {
            "position": {"hole", "no-sink", "answer-before", "answer-behind"},
            "fact": {"everything", "hole", "no-sink", "window", "answer-before", "answer-behind"},
            "window": {"window"},
        }[fault]
    )
    assert (fault != "window") == bool(unanswered)


@pytest.mark.slow
def test_the_command_makes_them_again(tmp_path):
    make.main(out=tmp_path)
    before, after = np.load(FOLDER / "golden.npz"), np.load(tmp_path / "golden.npz")
    assert set(before.files) == set(after.files)
    for name in before.files:
        np.testing.assert_allclose(after[name], before[name], atol=1e-4)
