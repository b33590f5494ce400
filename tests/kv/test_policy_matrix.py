"""What every cache policy must do on every family of models; a policy joins by being registered.

The kit of `sinkscope check-cache` says what is right: padded rows are what they are alone, a budget that covers
everything changes nothing, and what was evicted is what a mask hides.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from covering import each_other, every_nth
from kv_kit import FAMILIES, WINDOWED, Drawn, Ragged, Stepped, attends_by, prompts
from kv_kit import shallow_of as model_of
from transformers import DynamicCache

from sinkscope.conformance.checks import alone
from sinkscope.conformance.flow import Flow, error_of, outcome_of, right_logits
from sinkscope.conformance.kit import Kit
from sinkscope.conformance.models import MODELS, kit_model
from sinkscope.kv import Full, Observe, Policy, make_policy, policies
from sinkscope.kv.windows import layer_window
from sinkscope.loops.guard import LoopGuard
from sinkscope.opening.live import target_of
from sinkscope.sparse.serve import LoopServe
from sinkscope.sparse.shapes import AShape

PROMPT, LENGTHS, STEPS = 26, (26, 19), 4  # longer than the windows of 16
CHUNKS = (7, 9, 7, 3)  # the first is the padding of the second row alone
BUDGET = 12
SMALLER = {  # where the default protects more than the budget, or acts after these steps
    "snapkv": {"window": 8, "kernel": 3},
    "adakv": {"window": 8, "kernel": 3},
    "progressive": {"every": 2, "after": 1},
    "pyramid": {"window": 4, "kernel": 3},
}
OURS = {
    "drawn": Drawn(budget=BUDGET),
    "ragged": Ragged(budget=BUDGET),
    "budgets of layers and heads": Stepped(budget=BUDGET, first=1, last=2, every=2),
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


for _family in FAMILIES:
    MODELS[_family] = partial(model_of, _family)


def policy_of(name: str, **options) -> Policy:
    if name in OURS:
        return replace(OURS[name], **options)
    return make_policy(name, **{"budget": BUDGET, **SMALLER.get(name, {}), **options})


def made(name: str, budget: int) -> Policy:
    """Smaller budgets than `BUDGET` have no room for what these policies always keep."""
    return policy_of(name, budget=max(budget, BUDGET))


@pytest.mark.parametrize(("name", "family"), CELLS)
def test_a_policy_on_a_family(name, family):
    assert layer_window(target_of(kit_model(family)), 0) == (16 if family in WINDOWED else None)
    kit = Kit(lambda budget: made(name, budget), 3e-4)
    flow = Flow(model=family, lengths=LENGTHS, steps=STEPS)
    if name not in OURS:  # whose choice depends on the number of the row
        alone(kit, flow)
    elif not name.startswith("ragged"):  # it has no budget
        kit.right(flow, budget=False)
    part = replace(flow, budget=BUDGET)
    whole = outcome_of(kit.factory, part)
    assert error_of(whole.logits, right_logits(part, whole.sees)) < 3e-4
    fewest = min(int(sees[:, :, PROMPT:].sum(-1).min()) for sees in whole.sees.values())
    if not isinstance(policy_of(name), Full):
        assert fewest <= BUDGET + 1
    elif family not in WINDOWED:
        assert fewest == min(LENGTHS) + 1
    pieces = outcome_of(kit.factory, replace(flow, budget=BUDGET, chunks=CHUNKS))
    assert error_of(pieces.logits, whole.logits) < 3e-4
    for layer, sees in whole.sees.items():
        assert torch.equal(pieces.sees[layer][:, :, PROMPT:], sees[:, :, PROMPT:])


OTHERS = {
    "guard": LoopGuard(40),
    "loopserve": LoopServe(BUDGET, shortest=0, interval=2, first=0),
    "a-shape": AShape(first=2, local=5),
    "observer": Observe(lambda rows: rows.pos),
}


ATTENTIONS = ["eager", "flash", "flex_attention"]


@cache
def scores_under(name: str, attention: str, padded: bool) -> torch.Tensor:
    """What a model says under a policy or another edit, by one of the attentions of transformers."""
    way = OTHERS[name] if name in OTHERS else policy_of(name)
    families = ("llama", "mistral", "gemma3_text")
    model = kit_model(families[[*NAMES, *OTHERS].index(name) % 3])
    ids, mask = prompts([*LENGTHS] if padded else [PROMPT])
    ask = {"attention_mask": mask, "max_new_tokens": 4, "output_scores": True, "return_dict_in_generate": True}
    with attends_by(model, attention), way.on(model):
        return torch.stack(model.generate(ids, do_sample=False, **ask).scores)


@pytest.mark.parametrize(
    ("name", "attention"), each_other([*NAMES, *OTHERS], ATTENTIONS, 3, always=["drawn", "a-shape"])
)
def test_under_each_attention_of_transformers(name, attention):
    """Each takes a mask of its own form: additive, of padding alone, a function of blocks."""
    padded = ([*NAMES, *OTHERS].index(name) + ATTENTIONS.index(attention)) % 2 == 0  # each is met with and without
    assert error_of(scores_under(name, attention, padded), scores_under(name, "sdpa", padded)) < 1e-4


@pytest.mark.parametrize("family", every_nth(FAMILIES, 3))
def test_with_nothing_to_evict_the_logits_are_equal_bit_for_bit(family):
    flow = Flow(model=family, lengths=(9,))
    stock = outcome_of(lambda config: DynamicCache(config=config), flow)
    assert torch.equal(outcome_of(lambda: Full(), flow).logits, stock.logits)
