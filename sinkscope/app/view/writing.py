"""What a model writes after the beginning of typical text, with and without the guard."""

from __future__ import annotations

from dataclasses import replace

import torch

from sinkscope.app.view.packed import Packed, codes_of
from sinkscope.app.view.result import Generation, Writing
from sinkscope.loops.barcode import Barcode, barcode
from sinkscope.loops.guard.guard import LoopGuard
from sinkscope.measure import Setup

PROMPT_TOKENS, NEW_TOKENS = 48, 144


def generation_of(setup: Setup, new: int = NEW_TOKENS) -> Generation:
    """What the model writes after the beginning of typical text, with and without the guard."""
    prompt = setup.ids[0, :PROMPT_TOKENS].tolist()
    sides: list[Writing] = []
    copied: list[int] = []
    heads: tuple[str, ...] | None = None
    for name, edit in (("without the guard", None), ("with the guard", LoopGuard())):
        result = barcode.on(
            replace(setup, edit=edit), prompt=prompt, max_new_tokens=new, heads=heads, control=heads is None
        )
        heads = result.shown[:1]
        sides.append(_writing(setup, name, result))
        copied.append(0 if result.onset is None else len(result.ids) - max(result.onset, len(prompt)))
    sentence = (
        f"Without the guard, {copied[0]} of {len(sides[0].tokens)} new tokens belong to a repetition at the end; "
        f"with it, {copied[1]} of {len(sides[1].tokens)} (its alarms: {len(sides[1].alarms)})."
    )
    return Generation(setup.tokenizer.decode(prompt), sentence, tuple(sides))


def _writing(setup: Setup, name: str, result: Barcode) -> Writing:
    return Writing(
        name=name,
        tokens=tuple(setup.tokenizer.decode([token]) for token in result.ids[result.prompt_tokens :]),
        alarms=result.events.get("guard", ()),
        head=result.shown[0],
        first_step=result.first_step,
        first_position=result.first_position,
        picture=Packed.of(codes_of(torch.from_numpy(result.attention[0]))),
    )
