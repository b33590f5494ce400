"""Fixed shapes of prompts against passes under the same masks."""

from __future__ import annotations

from kv_kit import close, decode, model_of, prompts

from sinkscope.lines.shapes import AShape, MInference, TriShape

LENGTHS = (40, 26)


def test_shapes_that_hold_the_whole_prompt_are_the_plain_model():
    model = model_of("llama")
    ids, mask = prompts(list(LENGTHS), 4)
    plain = decode(model, ids, mask, 40)
    for shape in (AShape(), TriShape(), MInference()):
        with shape.on(model):
            close(decode(model, ids, mask, 40), plain)
