"""What makes a position the sink: planted truths are said, and cells are those of plain masks and plain positions."""

from __future__ import annotations

import pytest
import torch
from attack_kit import measured_spikes
from covering import slow
from organisms.blind import BLIND
from raw_kit import blocks, part
from test_spikes import bundled  # noqa: F401  (a fixture)

from sinkscope.sinks.spikes.conditions import Layout, conditions_of, read_layout
from sinkscope.sinks.spikes.find import circuit, sinks_of

pytestmark = pytest.mark.few_texts

TRUTHS = [
    ("plain", "llama", ("sight",), ("sight",)),  # heads mark a token that sees none but its own group
    ("embedding_spike", "llama", ("token",), ("token",)),  # the embedding of BOS has it
    (
        "attention_spike",
        "mistral",
        ("token", "sight"),
        ("token", "sight"),
    ),  # heads write it for BOS, if nothing dilutes
    ("many_small", "gpt2", ("position",), ("position",)),  # the embedding of position 0 marks it
    ("saturated", "llama", ("sight", "token"), ()),  # heads and the embedding of BOS both do, and either is enough
    slow("relay", "llama", ("sight",), ("sight",)),
]


@pytest.mark.parametrize(("name", "family", "sufficient", "necessary"), TRUTHS)
def test_the_cause_that_was_planted_is_said(name, family, sufficient, necessary):
    assert name in BLIND or name in ("plain", "embedding_spike")
    _, _, found = measured_spikes(circuit, name, family)
    conditions = found.answered.conditions
    assert (conditions.sufficient, conditions.necessary) == (sufficient, necessary)
    words = {"token": "carries '<s>'", "sight": "sees only itself", "position": "has position id 0"}
    first = found.conclusion().partition(" becomes the sink")[0]
    assert all(words[cause] in first for cause in sufficient)
    assert (" or " in first) == (name == "saturated") and (" and " in first) == (name == "attention_spike")


def plain_share(model, spike, ids, at, masks, positions) -> torch.Tensor:
    """The share of the spike, with what each query sees, and position ids, given to the model as they are."""
    seen = []
    handle = blocks(model)[spike.peak].register_forward_hook(
        lambda _m, _a, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    added = torch.zeros(masks.shape).masked_fill(~masks, torch.finfo(torch.float32).min)[:, None]
    with torch.no_grad():
        model(input_ids=ids, attention_mask=added, position_ids=positions, use_cache=False)
    handle.remove()
    return spike.along(seen[0][torch.arange(len(ids)), at])


def test_cells_are_those_of_plain_masks_and_positions(bundled):  # noqa: F811
    model, (one,) = bundled.target.hf, sinks_of(bundled).spikes
    spike, ids = one.reported, one.reported.survey.ids[:4]
    at, rows = torch.tensor([17, 20, 24, 31]), torch.arange(4)
    ordinary, length = Layout.of(ids, at), ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(4, -1, -1)
    own = torch.arange(length).expand(4, -1)
    alone, moved, token = causal.clone(), own.clone(), ids.clone()
    alone[rows, at] = False
    alone[rows, at, at] = True
    moved[rows, at] = 0
    token[rows, at] = ids[:, 0]
    for layout, given in (
        (ordinary, (ids, causal, own)),
        (ordinary.alone(), (ids, alone, own)),
        (ordinary.at_id(0), (ids, causal, moved)),
        (ordinary.with_token(ids[:, 0]).alone().at_id(0), (token, alone, moved)),
    ):
        expected = plain_share(model, spike, given[0], at, given[1], given[2])
        torch.testing.assert_close(read_layout([spike], layout).share[0], expected, atol=1e-4, rtol=1e-4)


def test_another_seed_draws_other_positions_and_says_the_same(bundled):  # noqa: F811
    spike = sinks_of(bundled).spikes[0].reported
    found = [conditions_of([spike], seed)[0] for seed in (0, 1)]
    assert found[0].cells != found[1].cells
    assert found[0].sufficient == found[1].sufficient and found[0].necessary == found[1].necessary


def test_the_layers_are_the_fewest_first_ones_in_which_seeing_only_itself_suffices(bundled):  # noqa: F811
    spike = sinks_of(bundled).spikes[0].reported
    conditions = conditions_of([spike], 0)[0]
    assert conditions.layers is not None and conditions.layers < spike.peak + 1
    assert part(blocks(bundled.target.hf)[0], "self_attn")  # it attends in every layer
