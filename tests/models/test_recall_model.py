"""The recall model is what its script makes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.testing import assert_close

import sinkscope as ss
from experiments import make_recall

FOLDER = Path(ss.__file__ or "").parent / "models/recall"


def test_script_makes_the_weights_of_the_package():
    shipped = ss.load("recall", device="cpu")
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 16_000_000
    assert all(torch.equal(weight, weight.half().float()) for weight in shipped.state_dict().values())
    for name, weight in make_recall.build().state_dict().items():
        # Random numbers are the same everywhere, the least-squares fit of recency is so to rounding.
        assert_close(weight, shipped.state_dict()[name], atol=2e-3, rtol=2e-3, msg=name)
    assert shipped.tokenizer.get_vocab() == make_recall.ID
