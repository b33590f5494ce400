"""The loss along lines: own lines are LoopServe's, and each control has as many cells and no line that it can spare."""

from __future__ import annotations

import json

import numpy as np
import torch
from refusals import refused

from experiments.loopserve.lines_loss import main, partner
from sinkscope.files.store import json_lines

LENGTH = 320


def ids_of(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(4, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_text_borrows_from_the_next_of_its_kind():
    assert [partner(text, "abaca") for text in range(5)] == [2, 2, 4, 4, 0]


def test_a_file_names_kinds_and_short_texts_are_refused(tmp_path):
    file, out = tmp_path / "texts.jsonl", tmp_path / "x.json"
    rows = [{"text": f"one line {number} and another. " * 90, "kind": kind} for number, kind in enumerate("abab")]
    file.write_text(json_lines(rows))
    main("bundled", data=file, out=out, count=3, length=256, alphas=[0.5])
    result = json.loads(out.read_text())["result"]
    assert result["kinds"] == ["a", "b", "a"] and np.shape(result["loss"]) == (1, 3, 3)
    for count, length in ((1, 256), (3, 1000), (3, 100)):
        with refused(f"expected two texts or more of --length {length}, at least 256"):
            main("bundled", data=file, out=out, count=count, length=length)
