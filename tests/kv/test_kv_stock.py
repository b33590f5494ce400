"""Beside each attention of transformers a policy or another edit says the same."""

from __future__ import annotations

import pytest
import torch
from kv_kit import attends_by, close, prompts
from kv_kit import shallow_of as model_of

from sinkscope.kv import H2O
from sinkscope.sparse.shapes import AShape


@pytest.mark.parametrize("attention", ["flash", "flex_attention"])
@pytest.mark.parametrize(
    ("family", "edit", "padded"),
    [("gemma3_text", H2O(budget=12), True), ("mistral", AShape(first=2, local=5), False)],
)
def test_under_each_attention_of_transformers(family, edit, padded, attention):
    """Each takes a mask of its own form: of padding alone, a function of blocks."""
    model, (ids, mask) = model_of(family), prompts([26, 19] if padded else [26])
    ask = {"attention_mask": mask, "max_new_tokens": 4, "output_scores": True, "return_dict_in_generate": True}
    found = []
    for name in (attention, "sdpa"):
        with attends_by(model, name), edit.on(model):
            found.append(torch.stack(model.generate(ids, do_sample=False, **ask).scores))
    close(found[0], found[1], 1e-4)
