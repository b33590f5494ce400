"""The recall model does not answer what was never said, and is what its script makes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import sinkscope as ss
from experiments import make_recall
from sinkscope.bench.tasks import vocabulary as words
from sinkscope.bench.tasks.recall import POSITIONS, recall_dialogue

FOLDER = Path(ss.__file__ or "").parent / "models/recall"


@cache
def model(dtype: str | None = None):
    return ss.load("recall", dtype=dtype, device="cpu")


def continued(hf, text: str, count: int) -> str:
    inputs = hf.tokenizer(text, return_tensors="pt")
    out = hf.generate(**inputs, do_sample=False, max_new_tokens=count)
    return hf.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])


@pytest.mark.parametrize("position", POSITIONS)
def test_what_was_never_stated_is_not_answered(position):
    seed = POSITIONS.index(position)
    text = recall_dialogue(seed, tokens=[300], position=position).turns[0].text
    other = next(key for key in words.KEYS if key not in text.split())
    text = re.sub(r"ask \w+", f"ask {other}", text)
    assert continued(model(), text, 5) == f"{words.UNKNOWN} {words.END}"


def test_script_makes_the_weights_of_the_package():
    made = make_recall.build()
    shipped = model().state_dict()
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 16_000_000
    assert all(torch.equal(weight, weight.half().float()) for weight in shipped.values()), "float16 holds every weight"
    for name, weight in made.state_dict().items():
        # Random numbers are the same everywhere, the least-squares fit of recency is so to rounding.
        assert_close(weight, shipped[name], atol=2e-3, rtol=2e-3, msg=name)
    vocabulary = model().tokenizer.get_vocab()
    assert vocabulary == make_recall.ID
