"""Fixed shapes of prompts against passes under the same masks."""

from __future__ import annotations

import pytest
from intervention_kit import bridge_of
from kv_kit import close, decode, model_of, prompts
from organisms.tiny import tiny_model

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.lines.shapes import AShape, MInference, TriShape

LENGTHS = (40, 26)


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
