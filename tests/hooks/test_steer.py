"""Heads switched off, vectors added: against edited weights and edits by hand."""

from __future__ import annotations

import pytest
from organisms import tiny_model
from refusals import refused

from sinkscope.hooks.edit import Add, SinkPatch


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SinkPatch(layer=-1, neurons=[3]), ["(-1, 3)", "from 0"]),
        (lambda: Add([1.0, 2.0], "blocks.1.hook_resid_post"), ["2 numbers", "has 32"]),
        (lambda: Add([float("nan")] * 32, "hook_embed"), ["finite"]),
        (lambda: Add([1.0] * 32, "hook_embed", scale=float("inf")), ["scale", "inf"]),
        (lambda: Add([1.0] * 32, "blocks.1.mlp.hook_post"), ["blocks.1.mlp.hook_post", "hook_resid_post"]),
    ],
)
def test_bad_arguments_of_add_are_refused(make, words):
    model, _ = tiny_model("llama")
    with refused(words=words), make().on(model):
        pass
