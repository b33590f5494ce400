"""What every cache policy must do on every family of models; a policy joins by being registered.

Padded rows are what they are alone, a budget that covers everything changes nothing, what was evicted is what a mask
hides, and a prompt in chunks is a whole prompt.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from covering import every_nth
from kv_kit import (
    FAMILIES,
    WINDOWED,
    Drawn,
    Everywhere,
    Ragged,
    Stepped,
    close,
    decode,
    dense,
    masks_of_run,
    prompts,
    run_policy,
)
from kv_kit import shallow_of as model_of
from torch import Tensor

from sinkscope.kv import H2O, Full, Policy, Pyramid, SnapKV, make_policy, policies
from sinkscope.kv.windows import layer_window
from sinkscope.opening.live import target_of

PROMPT, LENGTHS, STEPS = 26, (26, 19), 4  # longer than the windows of 16
CHUNKS = (7, 9, 7, 3)  # the first is the padding of the second row alone
BUDGET = 12
SMALLER = {  # where the default protects more than the budget, or acts after these steps
    "snapkv": {"window": 8, "kernel": 3},
    "adakv": {"window": 8, "kernel": 3},
    "progressive": {"every": 2, "after": 1},
    "pyramid": {"scorer": SnapKV(window=4, kernel=3)},
}
OURS = {
    "drawn": Drawn(budget=BUDGET),
    "ragged": Ragged(budget=BUDGET),
    "drawn, hidden": Drawn(budget=BUDGET, mode="select"),
    "ragged, hidden": Ragged(budget=BUDGET, mode="select"),
    "everywhere": Everywhere(budget=BUDGET, first=2, every=2),
    "budgets of layers and heads": Stepped(budget=BUDGET, first=1, last=2),
    "pyramid of h2o": Pyramid(budget=BUDGET, scorer=H2O(first=2), every=1, beta=4),
}
QUICK = ("llama", "gpt2", "mistral", "gemma2", "gemma3_text", "gpt_oss", "opt")
NAMES = (*policies(), *OURS)
CELLS = [
    pytest.param(name, family, marks=[] if quick else pytest.mark.slow)
    for row, name in enumerate(NAMES)
    for family in FAMILIES
    # "drawn" meets every kind of attention; each other policy one of them, in turn.
    for quick in [family in QUICK and (name == "drawn" or (QUICK.index(family) + row) % 7 == 0)]
]


def policy_of(name: str, **options) -> Policy:
    if name in OURS:
        return replace(OURS[name], **options)
    return make_policy(name, **{"budget": BUDGET, **SMALLER.get(name, {}), **options})


@cache
def model_for(family: str):
    return model_of(family)


def same(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return all(torch.equal(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))


@pytest.mark.parametrize(("name", "family"), CELLS)
def test_a_policy_on_a_family(name, family):
    model, policy = model_for(family), policy_of(name)
    ids, mask = prompts(list(LENGTHS), STEPS, seed=1)
    logits, kept = run_policy(policy, model, ids, mask, (PROMPT,))

    # Evicted, or hidden, is what a mask hides: one pass over everything under masks of what the steps read.
    sees = list(masks_of_run(model, kept, mask, PROMPT).values())
    close(logits, dense(model, ids, mask, sees)[:, PROMPT - 1 :], 2e-5)
    fewest = min(int(layer[0].sum(-1).min()) for step in kept for layer in step)
    assert fewest == PROMPT + 1 if isinstance(policy, Full) else fewest < PROMPT

    # Padding makes no difference.
    for row, length in enumerate(LENGTHS):
        own = replace(policy, rows=policy.rows[row:]) if isinstance(policy, Drawn) else policy
        part, pad = slice(row, row + 1), PROMPT - length
        alone, alone_kept = run_policy(own, model, ids[part, pad:], mask[part, pad:], (length,))
        close(logits[part], alone, 2e-5)
        assert same([[layer[part, :, pad:] for layer in step] for step in kept], alone_kept)

    # Nor do chunks.
    pieces, pieces_kept = run_policy(policy, model, ids, mask, CHUNKS)
    close(pieces, logits, 2e-5)
    assert same(pieces_kept, kept)


@cache
def stock(family: str, lengths: tuple[int, ...]) -> Tensor:
    """What the model says without any policy."""
    ids, mask = prompts(list(lengths), STEPS)
    return decode(model_for(family), ids, mask, max(lengths))


@pytest.mark.parametrize(("name", "family"), CELLS)
def test_a_budget_that_covers_everything_is_the_stock_model(name, family):
    if name.startswith("ragged"):
        pytest.skip("it has no budget")
    model = model_for(family)
    assert layer_window(target_of(model), 0) == (16 if family in WINDOWED else None)
    for budget in (64, 1.0) if name == "full" else (64,):
        policy = policy_of(name, budget=budget)
        # A batch, and one row, shorter than the windows or longer.
        alone = [(9,), (PROMPT,)] if name == "full" else [(9,), (PROMPT,)][FAMILIES.index(family) % 2 :][:1]
        for lengths in (*alone, LENGTHS):
            ids, mask = prompts(list(lengths), STEPS)
            with policy.on(model):
                got = decode(model, ids, mask, max(lengths))
            close(got, stock(family, lengths))
            if name == "full" and lengths == (9,):
                assert torch.equal(got, stock(family, lengths))


@pytest.mark.parametrize("name", every_nth(NAMES, 3))
def test_generate_reads_a_prompt_in_chunks(name):
    """Chunks of 5 end with a single token, which looks like a generated one."""
    model = model_for("llama")
    ids, _ = prompts([PROMPT])
    ask = {"max_new_tokens": 8, "do_sample": False}
    with policy_of(name).on(model):
        whole = model.generate(ids, **ask)
        for size in (5, 9, 64) if name == "drawn" else (5,):  # 64: the prompt is a single chunk
            assert torch.equal(model.generate(ids, prefill_chunk_size=size, **ask), whole)
