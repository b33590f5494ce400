"""Conversations over turns: against one long prompt, policies that never left, and given answers."""

from __future__ import annotations

from copy import copy
from unittest.mock import Mock

import pytest
import torch
from kv_kit import close
from kv_kit import shallow_of as model_of
from organisms.tiny import tiny_model
from refusals import refused
from torch import Tensor
from transformers import DynamicCache

from sinkscope.generation.conversation import Conversation, Turn
from sinkscope.hooks.edit import SinkPatch
from sinkscope.kv import H2O, TOVA, AdaKV, StreamingLLM
from sinkscope.sparse.serve import LoopServe

SMALL = LoopServe(alpha=0.8, budget=12, shortest=0, sample=12, dense_rows=2, begin=1, first=0, interval=4)
WHOLE = LoopServe(alpha=1.0, budget=500, first=0, interval=4)
LENGTHS, NEW = (40, 12, 25), 6


def said(turn: int) -> list[int]:
    """What is said in a turn."""
    generator = torch.Generator().manual_seed(turn)
    return torch.randint(5, 96, (LENGTHS[turn],), generator=generator).tolist()


def heard(chat: Conversation, turn: int, **more) -> tuple[Turn, Tensor]:
    """A turn, and the logits of its answer."""
    rows: list[Tensor] = []
    hook = chat.target.hf.register_forward_hook(lambda *given: rows.append(given[-1].logits[:, -1].clone()))
    try:
        return chat.ask(said(turn), max_new_tokens=NEW, **more), torch.cat(rows)
    finally:
        hook.remove()


def tensors(chat: Conversation, layers=None) -> list[Tensor]:
    """All that the cache holds, or these layers."""
    held = []
    for layer in layers or chat._layers:  # pyright: ignore[reportPrivateUsage]
        held += [layer.keys, layer.values, layer.pos]
        held += [layer.extra("h2o"), layer.extra("tova")]
    return held


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize(("family", "edit", "answers"), [("llama", WHOLE, "recompute"), ("mistral", None, "keep")])
def test_equals_one_long_prompt_where_nothing_is_hidden(family, edit, answers):
    """Read by the stock model without a cache, the whole text anew for every token."""
    model, ids = model_of(family), []
    chat = Conversation(model, edit, answers=answers)
    for number in range(3):
        turn, logits = heard(chat, number)
        ids += said(number)
        assert turn.prompt_tokens == len(ids)
        assert turn.queries == LENGTHS[number] + (0 if number == 0 else NEW if answers == "recompute" else 1)
        assert turn.read == len(ids) + NEW / 2  # of the answer, 1 to NEW - 1 tokens
        for token, row in zip(turn.ids, logits, strict=True):
            with torch.no_grad():
                want = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            close(row, want, 1e-5)
            assert token == int(want.argmax())
            ids.append(token)
    assert chat.ids == ids


def test_copies_share_what_was_read_and_go_on_as_if_alone(model):
    def talk(*turns):
        chat = Conversation(model, SMALL, answers="keep")
        return chat, [heard(chat, turn)[0].ids for turn in turns]

    trunk, (first,) = talk(0)
    branch = copy(trunk)
    for chat, turn in ((branch, 1), (trunk, 2)):
        alone, said_alone = talk(0, turn)
        assert len(chat.turns) == 1 and [first, heard(chat, turn)[0].ids] == said_alone
        assert same(tensors(chat), tensors(alone))


@pytest.mark.parametrize(
    ("policy", "answers"),
    [
        (AdaKV(budget=20, window=4, floor=0.0), "keep"),
        (TOVA(budget=20), "recompute"),
        (SinkPatch(sites=["L1.N3"], calibrated={"L1.N3": 0.5}) | StreamingLLM(budget=20), "recompute"),
    ],
)
def test_leaving_and_entering_changes_nothing_for_a_policy(policy, answers, model):
    """The same turns inside one `with`, on a cache of the caller's own, cropped by hand."""
    chat = Conversation(model, policy, answers=answers)
    turns = [heard(chat, number) for number in range(2)]
    cache, ids = DynamicCache(), []
    settings = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with policy.on(model):
        for number, (turn, logits) in enumerate(turns):
            ids += said(number)
            given = torch.tensor([ids])
            made = model.generate(given, attention_mask=torch.ones_like(given), past_key_values=cache, **settings)
            assert made.sequences[0, len(ids) :].tolist() == list(turn.ids)
            assert torch.equal(torch.cat(made.logits), logits)
            if answers == "recompute":
                cache.crop(-(NEW - 1))
            ids += turn.ids
    assert same(tensors(chat), tensors(chat, cache.layers))


def test_a_patch_that_needs_the_second_token_needs_calibrated_values_in_a_later_turn(model):
    chat = Conversation(model, SinkPatch(layer=1, neurons=[3]))
    heard(chat, 0)
    with refused("the first 40 tokens were read before this run was entered.*give calibrated values"):
        heard(chat, 1)


def test_a_given_answer_leaves_the_cache_that_it_would_have_left(model):
    asked, told, other = (Conversation(model, H2O(budget=20)) for _ in range(3))
    first, _ = heard(asked, 0)
    gold, _ = heard(told, 0, answer=first.ids)
    assert (gold.ids, gold.read, gold.queries) == (first.ids, first.read, first.queries)
    assert same(tensors(asked), tensors(told))
    second = heard(asked, 1)[1]
    assert torch.equal(second, heard(told, 1)[1])
    heard(other, 0, answer=[7] * NEW)
    assert other.ids == [*said(0), *[7] * NEW] and not torch.equal(heard(other, 1)[1], second)


def test_the_end_token_is_not_in_the_text():
    """That of the model, and the one that is asked for."""
    model, tokenizer = tiny_model("llama")

    def ask(edit=None, **more):
        return Conversation(model, edit, tokenizer=tokenizer).ask([5, 17, 8], **{"max_new_tokens": 6, **more})

    plain = ask()
    end = plain.ids.index(plain.ids[3]) + 1
    for ended in (ask(H2O(40), eos_token_id=plain.ids[3]), ask(H2O(40), eos_token_id=[95, plain.ids[3]])):
        assert ended.ids == plain.ids[:end] and ended.text == tokenizer.decode(ended.ids[:-1])
    model.generation_config.eos_token_id = [95, plain.ids[1]]
    assert ask().ids == plain.ids[:2] and ask().text == tokenizer.decode([plain.ids[0]])
    assert ask(answer=[30, 31]).text == tokenizer.decode([30, 31])


def test_a_turn_that_fails_leaves_the_conversation_as_it_was():
    """It is interrupted, or exceeds the context."""
    model = model_of("llama", max_position_embeddings=64)
    chat, calm = (Conversation(model, SMALL) for _ in range(2))
    for each in (chat, calm):
        heard(each, 0)
    with pytest.raises(KeyboardInterrupt):  # the prompt comes first
        heard(chat, 1, streamer=Mock(put=Mock(side_effect=[None, None, None, KeyboardInterrupt])))
    with refused("turn 2, with the 46 tokens before it, has 71 tokens and 6 more are to come, but the context of"):
        heard(chat, 2)
    with refused("ask for at most 6 new tokens"):
        chat.ask(said(1), max_new_tokens=7)
    assert len(chat.ids) == 46 and same(tensors(chat), tensors(calm))
    assert torch.equal(heard(chat, 1)[1], heard(calm, 1)[1])
