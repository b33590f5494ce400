"""Barcodes and locking heads against planted ones and against the attention of stock eager runs."""

from __future__ import annotations

from functools import partial
from unittest import mock

import numpy as np
import pytest
from organisms import LoopOrganism, tiny_model
from organisms import loop_organism as new_loop_organism
from refusals import refused
from torch import Tensor

from sinkscope.loops.barcode import Barcode, barcode

loop_organism = partial(new_loop_organism, n_layers=3, vocab_size=1024)
PROMPT = [1, *range(10, 30)]


def measured(organism: LoopOrganism, prompt: Tensor, new: int, **options) -> Barcode:
    """A barcode beside a walk on the ring, which for an organism is ordinary text."""
    walk = organism.healthy_prompt(prompt.shape[1] + new, start=400)
    with mock.patch("sinkscope.loops.barcode.text_rows", lambda *_: walk):
        return barcode(organism.model, prompt[0].tolist(), max_new_tokens=new, tokenizer=organism.tokenizer, **options)


def test_the_default_number_of_tokens_fits_the_context():
    """A model whose context is shorter than the default is measured to its end, and does not refuse its own default."""
    model, tokenizer = tiny_model("llama", max_position_embeddings=96)
    result = barcode(model, PROMPT, tokenizer=tokenizer, heads=[(0, 0)])
    assert result.prompt_tokens + result.steps == 96


@pytest.mark.parametrize("ids", [[5, 6], [5]])
def test_too_few_tokens_are_refused_and_three_are_enough(ids):
    model, tokenizer = tiny_model("llama")
    with refused(words=["a barcode needs 2"]):
        barcode(model, ids=ids, tokenizer=tokenizer)
    found = barcode(model, ids=[5, 6, 7], tokenizer=tokenizer)
    assert np.isfinite(found.score).all() and np.isfinite(found.control_score).all()
    with refused(words=["give no prompt and no max_new_tokens"]):
        barcode(model, ids=[5, 6, 7], max_new_tokens=3, tokenizer=tokenizer)
