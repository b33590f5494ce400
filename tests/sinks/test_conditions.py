"""What makes a position the sink: planted truths are said, and cells are those of plain masks and plain positions."""

from __future__ import annotations

import pytest
import torch
import transformers
from attack_kit import measured_spikes
from raw_kit import blocks, part
from test_spikes import bundled  # noqa: F401  (a fixture)

from sinkscope.models.hooks import on_hidden
from sinkscope.opening.live import target_of
from sinkscope.sinks.spikes.conditions import Layout, conditions_of, masked, read_layout
from sinkscope.sinks.spikes.find import sinks_of
from sinkscope.sinks.why_sink import why_sink

pytestmark = pytest.mark.few_texts


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
    first, second = (conditions_of([spike], seed)[0] for seed in (0, 1))
    assert first.cells != second.cells
    assert first.sufficient == second.sufficient and first.necessary == second.necessary
    assert first.layers is not None and first.layers < spike.peak + 1, "in these, seeing only itself suffices"
    assert part(blocks(bundled.target.hf)[0], "self_attn")  # it attends in every layer


@pytest.mark.parametrize("kind", ["sliding", "chunked", "learned"])
def test_a_layout_that_changes_nothing_reads_what_the_model_reads(kind):
    """A window or a chunk of a layer stays, although the mask of a whole text is given."""
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 120, "initializer_range": 0.2}
    torch.manual_seed(0)
    if kind == "learned":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=4, n_head=4, n_embd=64, vocab_size=120))
    elif kind == "sliding":
        types = ["sliding_attention", "full_attention"] * 2
        config = transformers.Gemma3TextConfig(**sizes, sliding_window=6, layer_types=types)
        model = transformers.Gemma3ForCausalLM(config)
    else:
        own = {"intermediate_size_mlp": 96, "attention_chunk_size": 8, "num_local_experts": 2}
        model = transformers.Llama4ForCausalLM(
            transformers.Llama4TextConfig(**sizes, **own, interleave_moe_layer_step=9)
        )
    model.eval()
    target = target_of(model)
    ids = torch.randint(3, 110, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids, use_cache=False, output_hidden_states=True).hidden_states[3]
    layout, states = Layout.of(ids, torch.tensor([5, 17, 23])), []
    with layout.hiding(target), target.hooks((target.layers[2], "post", on_hidden(states.append))):
        target.forward(ids, last_layer=2, **masked(target, layout.positions))
    torch.testing.assert_close(states[0].reshape(expected.shape), expected, atol=1e-4, rtol=1e-4)


def test_of_a_place_that_is_not_the_first_token_it_is_said_that_it_is_not_asked():
    with pytest.warns(UserWarning, match="is asked of the first token, and this spike is at"):
        _, _, found = measured_spikes(why_sink, "two_delimiters", "llama")
    assert found.answered is None and found.spikes[0].place.words != "the first token"
