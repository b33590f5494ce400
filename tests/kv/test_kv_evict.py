"""A cache that lacks tokens against the whole one under a mask, which an independent attention applies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kv_kit import FAMILIES, Drawn, Everywhere, Ragged, close, decode, dense, masks_of, prompts
from kv_kit import shallow_of as model_of
from transformers import DynamicCache

from sinkscope.kv import AttentionRows, Moment, Observe, Session, StreamingLLM
from sinkscope.kv.policy import Policy

SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("gpt_neox", "gpt2")]
SOME = ["llama", "gemma2", "gpt_oss", *SLOW]


@pytest.mark.parametrize(
    ("family", "lengths"),
    [
        pytest.param(family, lengths, id=f"{family}-{len(lengths)}", marks=pytest.mark.slow if later else [])
        for family in FAMILIES
        for lengths in ([26], [26, 20, 23])
        for later in [len(lengths) == 1 and family not in ("llama", "gpt_oss")]
    ],
)
def test_evicted_is_the_whole_cache_under_a_mask(family: str, lengths: list[int]) -> None:
    """Other tokens, and other numbers of them, in every layer, row and head; longer than the windows."""
    model = model_of(family)
    ids, mask = prompts(lengths, 4)
    # Both where it is quick with either number of rows; of the other families every second one has ragged heads.
    both = (Drawn(budget=9), Ragged(budget=9))
    for policy in both if family in SOME else both[FAMILIES.index(family) % 2 :][:1]:
        with policy.on(model):
            got = decode(model, ids, mask, 26)
        close(got, dense(model, ids, mask, masks_of(model, policy, mask, 26))[:, 25:])


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("every", [3, "prefill"])
def test_when_a_policy_acts_and_what_it_protects(family: str, every: Any) -> None:
    model = model_of(family)
    ids, mask = prompts([20, 14], 8)
    policy = Drawn(budget=9, first=2, last=3, every=every)
    with policy.on(model):
        got = decode(model, ids, mask, 20)
    sees = masks_of(model, policy, mask, 20, every=None if every == "prefill" else every)
    close(got, dense(model, ids, mask, sees)[:, 19:])


HIDDEN = (Drawn(budget=7, every="prefill"), StreamingLLM(budget=7), Ragged(budget=7))


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        pytest.param(family, policy, marks=[] if quick else pytest.mark.slow)
        for family in ("llama", "gemma2", "gpt_oss", "gpt_neox", "gpt2")
        for policy in HIDDEN
        for quick in [family == "llama" or (family, policy) in (("gemma2", HIDDEN[2]), ("gpt_oss", HIDDEN[0]))]
    ],
)
def test_hiding_is_evicting(family: str, policy: Policy) -> None:
    model = model_of(family)
    ids, mask = prompts([20, 14, 5], 6)
    with policy.on(model):
        evicted = decode(model, ids, mask, 20)
    cache = DynamicCache()
    with replace(policy, mode="select").on(model):
        hidden = decode(model, ids, mask, 20, cache)
    close(hidden, evicted)
    assert cache.layers[0].keys.shape[2] == 26  # nothing was freed


@pytest.mark.parametrize("family", SOME)
def test_a_fraction_is_of_each_rows_prompt(family: str) -> None:
    model = model_of(family)
    ids, mask = prompts([20, 12], 5)
    with Drawn(budget=0.5).on(model):
        together = decode(model, ids, mask, 20)
    for row, length in enumerate((20, 12)):
        with Drawn(budget=length // 2, rows=(row + 1,)).on(model):
            alone = decode(model, ids[row : row + 1, 20 - length :], mask[row : row + 1, 20 - length :], length)
        close(together[row : row + 1], alone)


@pytest.mark.parametrize("family", SOME)
def test_generate_reads_prompts_in_chunks(family: str) -> None:
    """The last chunk of 11 is a single token, and still part of the prompt."""
    model = model_of(family)
    ids, mask = prompts([23, 17])
    ask: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    budgets: list[Any] = []

    class Noting(Drawn):
        def tokens(self, prompt: Any) -> Any:
            budgets.append(prompt.tolist())
            return super().tokens(prompt)

    with Noting(budget=8).on(model):
        whole = model.generate(ids, **ask)
        for size in (5, 11):  # 23 tokens: the last chunk has 3 or 1
            assert torch.equal(whole, model.generate(ids, prefill_chunk_size=size, **ask))
    assert budgets == [[23, 17]] * 3


@pytest.mark.parametrize("family", SOME)
def test_a_second_turn_is_a_longer_prompt(family: str) -> None:
    """Nothing was evicted in the first turn, so the policy sees one prompt of both."""
    model = model_of(family)
    ids, mask = prompts([24, 20], 5)
    policy = Drawn(budget=30)  # more than there ever is in the first turn
    late = Drawn(budget=9)
    with policy.on(model):
        long = decode(model, ids, mask, 24)
    cache = DynamicCache(config=model.config)
    with policy.on(model):
        decode(model, ids[:, :15], mask[:, :15], 12, cache)
        close(decode(model, ids, mask, 24, cache), long)
    with late.on(model):
        evicted = decode(model, ids, mask, 24)
    cache = DynamicCache(config=model.config)
    with policy.on(model):
        decode(model, ids[:, :15], mask[:, :15], 12, cache)
    with late.on(model):  # another run goes on with the cache
        close(decode(model, ids, mask, 24, cache), evicted)


@pytest.mark.parametrize("family", SOME)
def test_a_second_turn_sees_what_the_first_one_left(family: str) -> None:
    """Evict in the first turn, read another prompt in chunks on top, evict again."""
    model = model_of(family)
    ids, mask = prompts([20, 15], 14)
    policy = Ragged(budget=9, every="prefill")
    cache = DynamicCache()
    with policy.on(model):
        decode(model, ids[:, :24], mask[:, :24], 20, cache)
        got = decode(model, ids, mask, 30, cache, chunks=[4, 2])
    # The mask of it: before columns 20 and 30 the policy acted, and all that a query saw of what was held then stays.
    first, second = (masks_of(model, policy, mask, n, every=None) for n in (20, 30))
    sees = []
    for layer, both in zip(first, second, strict=True):
        see = layer.clone()
        see[:, :, 30:] &= both[:, :, 30:]
        sees.append(see)
    close(got, dense(model, ids, mask, sees)[:, 29:])


def test_padding_inside_later_prompts_stays_unseen() -> None:
    """Rows of different length in the second turn, after an eviction that left no holes."""
    model = model_of("llama")
    ids, mask = prompts([12, 12], 12)
    mask[1, 16:19] = 0  # the second prompt of the second row is shorter
    policy = Everywhere(budget=6, every="prefill")
    cache = DynamicCache()
    with policy.on(model):
        decode(model, ids[:, :16], mask[:, :16], 12, cache)
        huge = replace(policy, budget=100)
    with huge.on(model):
        together = decode(model, ids, mask, 20, cache)
    row = torch.cat([ids[1:, :16], ids[1:, 19:]], 1)
    ones = torch.ones_like(row)
    cache = DynamicCache()
    with policy.on(model):
        decode(model, row[:, :16], ones[:, :16], 12, cache)
    with huge.on(model):
        alone = decode(model, row, ones, 17, cache)
    close(together[1:], alone)


@pytest.mark.parametrize("family", SOME)
def test_anyone_may_evict_at_any_call(family: str) -> None:
    """What a session offers without a policy: `before_decode`, and evicting by hand, here on an event."""
    model = model_of(family)
    ids, mask = prompts([12], 8)
    policy = Drawn(budget=100)
    events: list[int] = []

    class OnEvent(Drawn):
        def enter(self, run: Any, key: int) -> None:
            session = Session.of(run)
            session.own_cache()

            def act(moment: Moment) -> None:
                if int(moment.call.index[0, 0]) == 15:
                    events.append(moment.call.step)
                    for kv in moment.layers:
                        kv.evict(kv.pos % 3 != 1)

            session.before_decode(act)

    with OnEvent(budget=1).on(model):
        got = decode(model, ids, mask, 12)
    sees = masks_of(model, policy, mask, 12)
    for see in sees:
        see[:, :, 15:, 1:15:3] = False
    close(got, dense(model, ids, mask, sees)[:, 11:])
    assert events == [4]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "opt"])
def test_rows_of_what_is_left(family: str) -> None:
    """Observers see the slots of an edited cache, and change nothing."""
    model = model_of(family)
    ids, mask = prompts([20, 13], 6)
    policy = Ragged(budget=8)
    with policy.on(model):
        plain = decode(model, ids, mask, 20)
    seen: list[AttentionRows] = []
    with (policy | Observe(seen.append)).on(model):
        close(decode(model, ids, mask, 20), plain)
    masks = masks_of(model, policy, mask, 20)
    for rows in seen:
        learned = family == "gpt_oss"
        total = rows.probs.sum(-1)[(rows.query_pos >= 0)[:, None].expand(-1, 4, -1)]
        assert bool((total < 1).all() if learned else ((total - 1).abs() < 1e-5).all())
        if rows.call.past < 20:
            continue
        for row, pad in enumerate((0, 7)):
            for head in range(rows.pos.shape[1]):
                shown = rows.probs[row, head * (4 // rows.pos.shape[1])] if learned else rows.probs[row, head]
                where = rows.pos[row, head]
                want = masks[rows.layer][row, head, rows.call.past].nonzero().flatten() - pad
                if family in ("llama", "opt"):  # without a window
                    assert sorted(where[where >= 0].tolist()) == want.tolist()
                assert set(where[(shown[0, :] > 0)].tolist()) <= set(where[where >= 0].tolist())
