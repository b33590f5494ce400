"""What the settings of `generate`, and of a model for it, do to a conversation."""

from __future__ import annotations

import pytest
from kv_kit import shallow_of as model_of

from sinkscope.errors import SinkscopeError, SinkscopeWarning
from sinkscope.hooks.edit.base import Intervention
from sinkscope.lines.serve import LoopServe
from sinkscope.lines.serve.conversation import Conversation

PROMPTS = ([5, 17, 8, 33, 61, 12, 9, 40, 22, 7, 19, 30], [31, 6, 14])
SMALL = LoopServe(alpha=0.8, shortest=0, dense_above=9.0, sample=5, budget=8, first=0, interval=2)
EDITS = pytest.mark.parametrize("edit", [None, SMALL])


def held_so(edit: Intervention | None, answers: str, model=None, **generation) -> Conversation:
    chat = Conversation(model_of("llama") if model is None else model, edit, answers=answers)
    for prompt in PROMPTS:
        chat.ask(prompt, max_new_tokens=5, **generation)
    return chat


@pytest.mark.parametrize("name", ["prompt_lookup_num_tokens", "num_beams"])
def test_drafts_and_beams_are_refused_where_asked_for_and_set_aside_where_a_checkpoint_has_them(name, model):
    for chat in (Conversation(model), Conversation(model, SMALL)):
        with pytest.raises(SinkscopeError, match=f"^{name}.*give {name}="):
            chat.ask(PROMPTS[0], **{name: 3})
        assert not chat.turns
    setattr(model.generation_config, name, 3)
    for edit in (None, SMALL):
        with pytest.warns(SinkscopeWarning, match=f"ignores those of .*: .*{name} 3"):
            chat = held_so(edit, "keep", model)
        assert chat.ids == held_so(edit, "keep").ids
    one = {name: None if name.startswith("prompt") else 1}
    assert held_so(None, "keep", model, **one).ids == held_so(None, "keep").ids
