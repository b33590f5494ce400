"""Conversations over turns: against one long prompt, masks made of the kept lines, and policies that never left."""

from __future__ import annotations

from functools import cache
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
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.kv import H2O, TOVA, AdaKV, StreamingLLM
from sinkscope.sparse.serve import LoopServe

SPARSE = {"alpha": 0.8, "shortest": 0, "dense_above": 9.0, "sample": 12, "budget": 1000, "dense_rows": 2}
SPARSE |= {"begin": 1}  # prompts are short here
SMALL = LoopServe(**{**SPARSE, "budget": 12}, first=0, interval=4)  # pyright: ignore[reportArgumentType]
WHOLE = LoopServe(alpha=1.0, budget=500, first=0, interval=4)
LENGTHS, NEW = (40, 12, 25), 6


def said(turn: int, length: int | None = None) -> list[int]:
    """What is said in a turn."""
    generator = torch.Generator().manual_seed(turn)
    return torch.randint(5, 96, (LENGTHS[turn] if length is None else length,), generator=generator).tolist()


def ask(chat: Conversation, turn: int, **more) -> Turn:
    return chat.ask(said(turn), max_new_tokens=NEW, output_logits=True, return_dict_in_generate=True, **more)


def logits(turn: Turn) -> Tensor:
    return torch.stack(turn.output.logits, 1)


def tensors(chat: Conversation, layers=None) -> list[Tensor]:
    """All that the cache holds, or these layers."""
    held = []
    for layer in layers or chat._layers:  # pyright: ignore[reportPrivateUsage]
        held += [layer.keys, layer.values, layer.pos]
        held += [layer.extra("h2o"), layer.extra("tova")]
    return held


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@cache
@torch.no_grad()
def one_prompt(family: str) -> list[tuple[list[int], Tensor]]:
    """The stock model without a cache: what follows each prompt, the whole text read anew for every token."""
    model, ids = model_of(family), []
    found = []
    for turn in range(3):
        ids += said(turn)
        rows = []
        for _ in range(NEW):
            rows.append(model(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1])
            ids.append(int(rows[-1].argmax()))
        found.append((ids[-NEW:], torch.stack(rows, 1)))
    return found


@pytest.mark.parametrize(
    ("family", "edit", "answers"),
    [
        ("llama", WHOLE, "recompute"),
        ("mistral", None, "keep"),
    ],
)
def test_equals_one_long_prompt_where_nothing_is_hidden(family, edit, answers):
    model = model_of(family)
    chat = Conversation(model, edit, answers=answers)
    for number, (ids, expected) in enumerate(one_prompt(family)):
        turn = ask(chat, number)
        assert turn.ids == tuple(ids)
        close(logits(turn), expected, 1e-5)
        before = sum(LENGTHS[:number]) + number * NEW
        assert turn.prompt_tokens == before + LENGTHS[number]
        assert turn.queries == LENGTHS[number] + (0 if number == 0 else NEW if answers == "recompute" else 1)
        window = getattr(model.config, "sliding_window", None) or chat.target.max_positions
        seen = [min(turn.prompt_tokens + step, window) for step in range(1, NEW)]  # of the answer, 1 to NEW - 1
        assert turn.read == sum(seen) / len(seen)
    assert chat.ids == [token for turn in chat.turns for token in (*turn.prompt, *turn.ids)]


def test_branches_share_what_was_read_and_go_on_as_if_alone(model):

    def talk(*turns):
        chat = Conversation(model, SMALL, answers="keep")
        return chat, [ask(chat, turn).ids for turn in turns]

    trunk, (first,) = talk(0)
    branch = trunk.branch()
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(tensors(trunk), tensors(branch), strict=True) if a.numel())
    for chat, turn in ((branch, 1), (trunk, 2)):
        alone, said_alone = talk(0, turn)
        assert len(chat.turns) == 1 and [first, ask(chat, turn).ids] == said_alone
        assert same(tensors(chat), tensors(alone))


@pytest.mark.parametrize(
    ("policy", "answers"),
    [
        (AdaKV(budget=20, window=4, floor=0.0), "keep"),
        (TOVA(budget=20), "recompute"),
        (SinkPatch(layer=1, neurons=[3, 5]) | StreamingLLM(budget=20), "recompute"),
    ],
)
def test_leaving_and_entering_changes_nothing_for_a_policy(policy, answers, model):
    """The same turns inside one `with`, on a cache of the caller's own, cropped by hand."""
    chat = Conversation(model, policy, answers=answers)
    turns = [ask(chat, number) for number in range(2)]
    cache, ids = DynamicCache(), []
    with policy.on(model):
        for number, turn in enumerate(turns):
            ids += said(number)
            given = torch.tensor([ids])
            made = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                past_key_values=cache,
                max_new_tokens=NEW,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            assert made.sequences[0, len(ids) :].tolist() == list(turn.ids)
            assert torch.equal(torch.stack(made.logits, 1), logits(turn))
            if answers == "recompute":
                cache.crop(-(NEW - 1))
            ids += turn.ids
    assert same(tensors(chat), tensors(chat, cache.layers))


def test_say_leaves_the_cache_that_ask_would_leave(model):
    asked, told, other = (Conversation(model, H2O(budget=20)) for _ in range(3))
    first = ask(asked, 0)
    gold = told.say(said(0), first.ids)
    assert (gold.ids, gold.read, gold.queries) == (first.ids, first.read, first.queries)
    assert same(tensors(asked), tensors(told))
    assert torch.equal(logits(ask(asked, 1)), logits(ask(told, 1)))
    other.say(said(0), [7] * NEW)
    assert other.ids == [*said(0), *[7] * NEW]
    assert not torch.equal(logits(ask(other, 1)), logits(asked.turns[1]))


def test_the_end_token_is_not_in_the_text():
    model, tokenizer = tiny_model("llama")
    free = Conversation(model, tokenizer=tokenizer).ask([5, 17, 8], max_new_tokens=4)
    model.generation_config.eos_token_id = [95, free.ids[1]]
    ended = Conversation(model, tokenizer=tokenizer).ask([5, 17, 8], max_new_tokens=4)
    assert ended.ids == free.ids[:2] and ended.text == tokenizer.decode([free.ids[0]])
    told = Conversation(model, tokenizer=tokenizer).say([5, 17], [30, 31])
    assert told.text == tokenizer.decode([30, 31])


def test_an_interrupted_turn_leaves_the_conversation_as_it_was(model):
    chat, calm = (Conversation(model, SMALL) for _ in range(2))
    for each in (chat, calm):
        ask(each, 0)
    with pytest.raises(KeyboardInterrupt):
        ask(
            chat, 2, streamer=Mock(put=Mock(side_effect=[None, None, None, KeyboardInterrupt]))
        )  # the prompt comes first
    assert len(chat.turns) == 1
    assert same(tensors(chat), tensors(calm))
    assert torch.equal(logits(ask(chat, 1)), logits(ask(calm, 1)))
    assert chat.turns[1].events == calm.turns[1].events


def test_a_turn_that_exceeds_the_context_is_named_and_nothing_changes():
    model = model_of("llama", max_position_embeddings=64)
    chat = Conversation(model)
    ask(chat, 0)
    with refused("turn 2, with the 46 tokens before it, has 71 tokens and 6 more are to come, but the context of"):
        ask(chat, 2)
    with refused("ask for at most 6 new tokens"):
        chat.ask(said(1), max_new_tokens=7)
    assert len(chat.ids) == 46
    close(
        logits(chat.ask(said(1), max_new_tokens=6, output_logits=True, return_dict_in_generate=True)),
        one_prompt("llama")[1][1],
    )


def test_an_end_that_is_asked_for_ends_the_text():
    model, tokenizer = tiny_model("llama")
    plain = Conversation(model, tokenizer=tokenizer).ask([5, 17, 8], max_new_tokens=6)
    for end in (plain.ids[3], [95, plain.ids[3]]):
        ended = Conversation(model, H2O(40), tokenizer=tokenizer).ask([5, 17, 8], max_new_tokens=6, eos_token_id=end)
        assert ended.ids == plain.ids[: plain.ids.index(plain.ids[3]) + 1]
        assert ended.text == tokenizer.decode(ended.ids[:-1])
