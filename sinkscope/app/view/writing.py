"""What a model writes after the beginning of a story, with and without the guard."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sinkscope.app.view.packed import Packed, codes_of
from sinkscope.app.view.result import Generation, Writing
from sinkscope.app.view.texts import LOOPING_STORY, story_ids
from sinkscope.loops.barcode import Barcode, barcode
from sinkscope.loops.generate import generate
from sinkscope.measure import Setup

NEW_TOKENS = 160


def generation_of(setup: Setup, new: int = NEW_TOKENS) -> Generation:
    """What the model writes after the beginning of a story, with and without the guard, which takes copies back."""
    prompt = story_ids(setup, LOOPING_STORY)
    plain = barcode.on(setup, prompt=prompt, max_new_tokens=new)
    (guarded,) = generate(setup.target, [prompt], guard=True, max_new_tokens=new)
    kept = barcode.on(setup, ids=[*prompt, *guarded.tokens], heads=plain.shown[:1])
    cuts: list[int] = []
    for event in guarded.events:
        cuts.append(min(event.position + 1 - len(prompt) - event.data["taken_back"], len(guarded.tokens)))
    sides: list[Writing] = []
    copied: list[int] = []
    for name, result, alarms in (("without the guard", plain, []), ("with the guard", kept, cuts)):
        sides.append(_writing(setup, name, result, len(prompt), alarms))
        copied.append(0 if result.onset is None else len(result.ids) - max(result.onset, len(prompt)))
    sentence = (
        f"Without the guard, {copied[0]} of {len(sides[0].tokens)} new tokens belong to a repetition at the end; "
        f"with it, {copied[1]} of {len(sides[1].tokens)} (its alarms: {len(cuts)})."
    )
    return Generation(setup.tokenizer.decode(prompt), sentence, tuple(sides))


def _writing(setup: Setup, name: str, result: Barcode, prompt: int, alarms: Sequence[int]) -> Writing:
    return Writing(
        name=name,
        tokens=tuple(setup.tokenizer.decode([token]) for token in result.ids[prompt:]),
        alarms=tuple(alarms),
        head=result.shown[0],
        first_step=result.first_step + result.prompt_tokens - prompt,
        first_position=result.first_position,
        picture=Packed.of(codes_of(torch.from_numpy(result.attention[0]))),
    )
