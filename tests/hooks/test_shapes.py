"""Fixed shapes of prompts against passes under the same masks."""

from __future__ import annotations

import pytest
import torch
from intervention_kit import bridge_of
from kv_kit import close, decode, model_of, prompts
from organisms.tiny import tiny_model
from torch import Tensor

from sinkscope.conformance.masked import plain_logits
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.lines.shapes import AShape, MInference, TriShape

LENGTHS = (40, 26)


def shape_mask(first: int, local: int, rows: int, mask: Tensor) -> Tensor:
    """`[row 1 query key]`, entry by entry; the prompts are the first 40 columns."""
    total = mask.shape[1]
    sees = torch.zeros(len(mask), 1, total, total, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        pad = 40 - length
        for query in range(total - pad):
            free = query >= length - rows  # also what is generated
            for key in range(query + 1):
                sees[row, 0, query + pad, key + pad] = free or key < first or query - key < local
    return sees


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        (AShape(first=3, local=6), 0),
        (TriShape(first=3, local=6, dense_rows=5), 5),
        (TriShape(first=2, local=4, dense_rows=30), 30),
    ],
)
def test_prompts_have_the_shape_and_decoding_sees_all(family, shape, rows):
    model = model_of(family)
    ids, mask = prompts(list(LENGTHS), 4)
    with shape.on(model) as run:
        ours = decode(model, ids, mask, 40)
    sees = shape_mask(shape.first, shape.local, rows, mask)
    whole = dict.fromkeys(range(3), sees.expand(-1, 4 if family == "gpt2" else 2, -1, -1))
    close(ours, plain_logits(model, ids, mask, whole)[:, 39:])
    for event in run.events:
        length = LENGTHS[event.row]
        pad = 40 - length
        some = sees[event.row, 0, pad:40, pad:40]
        assert event.data["cells"] == pytest.approx(float(some.sum()) / (length * (length + 1) / 2), rel=1e-4)
        assert event.data["dense_heads"] == (4 if rows >= length else 0)


def test_shapes_that_hold_the_whole_prompt_are_the_plain_model():
    model = model_of("llama")
    ids, mask = prompts(list(LENGTHS), 4)
    plain = decode(model, ids, mask, 40)
    for shape in (AShape(), TriShape(), MInference()):
        with shape.on(model):
            close(decode(model, ids, mask, 40), plain)


def test_what_is_refused():
    for make in (lambda: AShape(local=0), lambda: TriShape(dense_rows=-1), lambda: MInference(slash=0)):
        with pytest.raises(SinkscopeError, match="expected"):
            make()
    model, tokenizer = tiny_model("llama")
    with pytest.raises(UnsupportedError, match="a TransformerBridge computes its own attention"):
        AShape().on(bridge_of(model, tokenizer)).__enter__()
