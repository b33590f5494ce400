"""Conversations over turns: against one long prompt, policies that never left, and given answers."""

from __future__ import annotations

import re
from copy import copy
from unittest.mock import Mock

import pytest
import torch
from kv_kit import shallow_of as model_of
from organisms.tiny import tiny_model
from refusals import refused

from sinkscope.generation.conversation import Conversation, Turn
from sinkscope.hooks.edit import SinkPatch
from sinkscope.kv import StreamingLLM
from sinkscope.sparse.serve import LoopServe

SMALL = LoopServe(alpha=0.8, budget=12, shortest=0, sample=12, dense_rows=2, begin=1, first=0, interval=4)
WHOLE = LoopServe(alpha=1.0, budget=500, first=0, interval=4)
LENGTHS, NEW = (40, 12, 25), 6


def said(turn: int) -> list[int]:
    """What is said in a turn."""
    generator = torch.Generator().manual_seed(turn)
    return torch.randint(5, 96, (LENGTHS[turn],), generator=generator).tolist()


def heard(chat: Conversation, turn: int, **more) -> Turn:
    return chat.ask(said(turn), max_new_tokens=NEW, **more)


@pytest.mark.parametrize(("family", "edit"), [("llama", WHOLE), ("mistral", None)])
def test_equals_one_long_prompt_where_nothing_is_hidden(family, edit):
    model, ids = model_of(family), []
    chat = Conversation(model, edit)
    for number in range(3):
        turn = heard(chat, number)
        ids += said(number)
        assert turn.prompt_tokens == len(ids)
        assert turn.queries == LENGTHS[number] + (NEW if number else 0)
        assert turn.read == len(ids) + NEW / 2  # of the answer, 1 to NEW - 1 tokens
        for token in turn.ids:  # by the stock model without a cache, the whole text anew for every token
            with torch.no_grad():
                assert token == int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            ids.append(token)
    assert chat.ids == ids


def test_a_patch_that_needs_the_second_token_needs_calibrated_values_in_a_later_turn(model):
    chat = Conversation(model, SinkPatch(layer=1, neurons=[3]))
    heard(chat, 0)
    with refused("the first 40 tokens were read before this run was entered.*give calibrated values"):
        heard(chat, 1)


def test_the_end_token_is_not_in_the_text():
    """That of the model, which the tokenizer does not know; one that is asked for ends a turn as well."""
    model, tokenizer = tiny_model("llama")

    def ask(edit=None, **more) -> Turn:
        return Conversation(model, edit, tokenizer=tokenizer).ask([5, 17, 8], **{"max_new_tokens": 6, **more})

    ids = ask().ids
    assert ask(StreamingLLM(40), eos_token_id=[95, ids[3]]).ids == ids[: ids.index(ids[3]) + 1]
    model.generation_config.eos_token_id = [95, ids[1]]
    assert ask().ids == ids[:2] and ask().text == tokenizer.decode([ids[0]])
    assert ask(answer=[30, 31]).text == tokenizer.decode([30, 31])


def test_a_turn_that_fails_and_a_copy_leave_the_conversation_as_it_was():
    """It is interrupted, or exceeds the context; a copy goes on from there by itself."""
    model = model_of("llama", max_position_embeddings=64)
    chat, calm = (Conversation(model, SMALL) for _ in range(2))
    for each in (chat, calm):
        heard(each, 0)
    with pytest.raises(KeyboardInterrupt):  # the prompt comes first
        heard(chat, 1, streamer=Mock(put=Mock(side_effect=[None, None, None, KeyboardInterrupt])))
    with refused("the conversation has 71 tokens and 6 more are to come, but the context of"):
        heard(chat, 2)
    with refused("has 58 tokens and 7 more are to come, but .* is 64: ask something shorter"):
        chat.ask(said(1), max_new_tokens=7)
    other = copy(chat)
    assert len(chat.ids) == 46 and heard(chat, 1).ids == heard(calm, 1).ids == heard(other, 1).ids
    assert len(chat.turns) == len(other.turns) == 2


def test_a_conversation_says_what_it_is():
    chat = Conversation(model_of("llama"), StreamingLLM(budget=40))
    assert re.fullmatch(r"Conversation with \S+: no turn, no token, StreamingLLM\(budget=40.*\)", repr(chat))
    heard(chat, 1)
    assert f"1 turn, {LENGTHS[1] + NEW} tokens, StreamingLLM" in repr(chat)
    assert repr(Conversation(model_of("llama"))).endswith("no token, no edit")
