"""Fixed shapes of prompts against passes under the same masks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from intervention_kit import bridge_of
from kv_kit import close, decode, model_of, prompts
from organisms.tiny import tiny_model
from torch import Tensor

from sinkscope.conformance.masked import plain_logits
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.kv import shapes
from sinkscope.kv.shapes import AShape, MInference, TriShape
from sinkscope.lines.votes import minference_lines

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


def test_minference_follows_its_lines(monkeypatch):
    """Of one layer: the lines of its own queries, and nothing else."""
    model = model_of("llama", num_hidden_layers=1, num_key_value_heads=4)
    ids, mask = prompts([300], 3)
    found = []
    shape = MInference(vertical=32, slash=104, last=16, dense_above=9.0)

    def note(query, key, *rest, **kwargs):
        found.append((query, key))
        return minference_lines(query, key, *rest, **kwargs)

    monkeypatch.setattr(shapes, "minference_lines", note)
    with shape.on(model) as run:
        ours = decode(model, ids, mask, 300)
    lines = minference_lines(*found[0], 32, 104, last=16)
    assert len(found) == 1 and run.events[0].data["attended"] < 0.8
    sees = torch.ones(303, 303).tril().bool().expand(1, 4, -1, -1).clone()
    sees[0, :, :300, :300] = lines.rows(torch.arange(300))
    close(ours, plain_logits(model, ids, mask, {0: sees})[:, 299:])
    plain = decode(model, ids, mask, 300)
    with replace(shape, dense_above=None).on(model) as run:  # lines that cost more than everything
        close(decode(model, ids, mask, 300), plain)
    assert run.events[0].data["dense_heads"] == 4


def test_what_is_refused():
    for make in (lambda: AShape(local=0), lambda: TriShape(dense_rows=-1), lambda: MInference(slash=0)):
        with pytest.raises(SinkscopeError, match="expected"):
            make()
    model, tokenizer = tiny_model("llama")
    with pytest.raises(UnsupportedError, match="AShape"):
        AShape().on(bridge_of(model, tokenizer)).__enter__()
