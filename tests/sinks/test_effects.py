"""Edits side by side in one pass, against the same edits made the long way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from covering import every_nth
from intervention_kit import effects
from organisms import organism
from organisms.decoders import decoder
from raw_kit import attention, blocks, norms, zeroed
from torch.testing import assert_close

from sinkscope.opening.live import target_of
from sinkscope.opening.open import open_stream
from sinkscope.results.parts import Component, Head, Neuron, sites_of
from sinkscope.sinks.find.layer_scan import scan_layers
from sinkscope.sinks.removal.components import has_key_bias
from sinkscope.sinks.removal.effects import Effects, Trial
from sinkscope.sinks.removal.position_effect import PositionEffect


def _long_way(model, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms `[text layer]` at the first token, and attention to it `[text layer head]`, by the model itself."""
    return norms(model, ids)[:, :, 0].T, attention(model, ids)[..., 1:, 0].mean(-1).transpose(0, 1)


def test_a_drop_is_the_mean_over_texts():
    norms = torch.tensor([[[10.0, 2.0], [10.0, 30.0]], [[5.0, 1.0], [8.0, 3.0]]])
    edited = Effects(norms, norms, torch.zeros(2, 2, 2, 1))
    assert_close(edited.drops(0), torch.tensor([(0.5 + 0.2) / 2]))
    assert_close(edited.drops(1), torch.tensor([(0.5 + 0.9) / 2]))


@pytest.mark.parametrize("family", ["gpt2", "neox", "gpt_oss"])
def test_a_swapped_token_embedding_is_another_token(family):
    o = organism(family, 2)
    target, ids = target_of(o.model, o.tokenizer), o.natural(2, 10)
    edited = effects(target, ids, [(Component("token embedding"),)], source=4, attention=True)
    other = ids.clone()
    other[:, 0] = ids[:, 4]
    length, received = _long_way(o.model, other)
    assert_close(edited.norms[1], length, rtol=1e-4, atol=1e-4)
    assert_close(edited.attention[1], received, rtol=1e-4, atol=1e-5)


def test_position_embeddings_are_those_of_other_position_ids():
    o = organism("gpt2", 1)
    target, ids = target_of(o.model, o.tokenizer), o.natural(1, 9)
    edited = effects(target, ids, [(Component("position embedding"),)], source=6)
    places = torch.tensor([[6, *range(1, 9)]])
    with torch.no_grad():
        hidden = o.model(ids, position_ids=places, output_hidden_states=True).hidden_states[1:-1]
    assert_close(edited.norms[1, 0, :-1], torch.stack(hidden)[:, 0, 0].norm(dim=-1), rtol=1e-4, atol=1e-4)


def test_a_key_bias_taken_away_is_a_bias_of_zero():
    o = organism("qwen2", 4)
    with torch.no_grad():  # a bias large enough to matter after the rotation
        o.model.model.layers[1].self_attn.k_proj.bias.uniform_(-3, 3)
    target, ids = target_of(o.model, o.tokenizer), o.natural(1, 9)
    assert has_key_bias(target) and not has_key_bias(target_of(organism("llama", 0).model))
    edited = effects(target, ids, [(Component("key bias"),)], attention=True)
    bare = copy.deepcopy(o.model)
    with torch.no_grad():
        for layer in bare.model.layers:
            layer.self_attn.k_proj.bias.zero_()
    received = _long_way(bare, ids)[1]
    assert_close(edited.attention[1], received, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(edited.attention[0], received, atol=1e-3)


def test_batches_of_edits_give_what_one_batch_gives(monkeypatch):
    o = organism("llama", 6)
    target, ids = target_of(o.model, o.tokenizer), o.natural(2, 8)
    edits = [(Neuron(layer, None, n),) for layer in range(2) for n in range(5)]
    whole = effects(target, ids, edits, without=[0, 3], attention=True)
    monkeypatch.setattr("sinkscope.sinks.removal.effects.BATCH_ELEMENTS", 3 * 2 * 8 * max(target.d_mlp, target.d_model))
    parts = effects(target, ids, edits, without=[0, 3], attention=True)
    assert_close(whole.norms, parts.norms)
    assert_close(whole.attention, parts.attention)
    entering = scan_layers(target, ids, whole=True).entering  # edits of a later batch begin in a later layer
    begun = effects(target, ids, edits, without=[0, 3], entering=entering)
    assert_close(whole.norms, begun.norms)
    assert (effects(target, ids, []).norms[0] > whole.norms[0]).all(), "dimensions were left out"


@pytest.mark.parametrize(
    ("family", "streamed"),
    every_nth(
        [("gemma2", False), ("gpt2", False), ("llama", True), ("neox", False), ("gpt_oss", False), ("mixtral", True)], 2
    ),
)
def test_rows_that_part_at_a_layer_give_what_whole_passes_and_zeroed_neurons_give(family, streamed, tmp_path):
    o = organism(family, 5)
    target, ids = target_of(o.model, o.tokenizer), o.natural(2, 12)
    last = target.n_layers - 1
    component = Component("attention", last)
    neurons = tuple(map(Neuron.of, o.truth.neurons))
    edits = [neurons, (), (component,), (*neurons, component)]
    whole = effects(target, ids, edits, attention=True)
    for number, edit in enumerate(edits[:2], 1):
        with zeroed(o.model, sites_of(edit)):
            length, received = _long_way(o.model, ids)
        assert_close(whole.norms[number], length, rtol=1e-4, atol=1e-4)
        assert_close(whole.attention[number], received, rtol=1e-4, atol=1e-5)
    assert_close(whole.norms[0], whole.norms[2], rtol=1e-4, atol=1e-4)
    assert_close(whole.attention[0], whole.attention[2], rtol=1e-4, atol=1e-5)
    for end in range(o.truth.sink_layer, target.n_layers):
        ended = effects(target, ids, edits[:2], upto=end)
        attending = effects(target, ids, edits[:2], upto=end, attention=True)
        assert_close(ended.norms, whole.norms[:3, ..., : end + 1], rtol=1e-4, atol=1e-4)
        assert_close(attending.attention, whole.attention[:3, ..., : end + 1, :], rtol=1e-4, atol=1e-5)
    if streamed:
        target = open_stream(o.save(tmp_path / "model"), resident=1, tokenizer=o.tokenizer)
    entering = scan_layers(target, ids, whole=True).entering
    layer = o.truth.neurons[0][0]
    for chosen, behind in ((edits, layer + 1), (edits[2:3], last), (edits[1:2], last)):
        parts = effects(target, ids, chosen, attention=True, behind=behind, entering=entering)
        numbers = [0, *(1 + edits.index(edit) for edit in chosen)]
        ran = ~parts.norms[0, 0].isnan()
        assert ran[behind:].all()
        assert_close(parts.norms[..., ran], whole.norms[numbers][..., ran], rtol=1e-5, atol=1e-5)
        assert_close(parts.attention[..., behind:, :], whole.attention[numbers][..., behind:, :], rtol=1e-5, atol=1e-6)
    assert all("forward" not in layer.__dict__ for layer in target.layers), "skipping left something behind"


@pytest.mark.parametrize("model_type", ["bloom", "opt", "axk1", "zaya"])
def test_what_an_mlp_gets_beside_the_residual_stream_stays_whole(model_type):
    """BLOOM's adds the residual stream, OPT's runs rows and positions together, others get what a router said."""
    model = decoder(model_type)
    target, ids = target_of(model), torch.randint(5, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    last = target.n_layers - 2
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[last + 1]
    at = torch.tensor([3, 5])
    for part in (Component("attention", 0), Component("mlp", last)):
        ended = effects(target, ids, [(part,)], at=at, source=9, upto=last).norms
        assert_close(ended[0, :, last], hidden[[0, 1], at].norm(dim=-1), rtol=1e-4, atol=1e-4)
        whole = effects(target, ids, [(part,)], at=at, source=9).norms
        assert_close(ended, whole[..., : last + 1], rtol=1e-4, atol=1e-4)


@contextmanager
def swapped(model, ids: torch.Tensor, component: Component | Head, at: int, source: int) -> Iterator[None]:
    """A component of a llama writes at one position what it writes at another of the same intact texts."""
    block = blocks(model)[component.layer]
    of_head = isinstance(component, Head)
    module = block.self_attn.o_proj if of_head else {"mlp": block.mlp, "attention": block.self_attn}[component.kind]
    kept = []

    def columns(values: torch.Tensor) -> torch.Tensor:
        return values.unflatten(-1, (-1, model.config.head_dim))[..., component.head, :] if of_head else values

    def before(_module, given):
        return (edited(given[0]), *given[1:])

    def after(_module, _given, output):
        if isinstance(output, tuple):
            return (edited(output[0]), *output[1:])
        return edited(output)

    def edited(values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        if not kept:
            kept.append(columns(values)[:, source].clone())
        else:
            columns(values)[:, at] = kept[0]
        return values

    handle = module.register_forward_pre_hook(before) if of_head else module.register_forward_hook(after)
    with torch.no_grad():
        model(ids)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize(("at", "other"), [(0, 5), (6, 2)])
def test_effects_of_components_in_both_directions_are_those_of_plain_hooks(at, other):
    """One after another, as `circuit` asks: the intact texts are run once for norms and once for attention."""
    o = organism("llama", 7)
    target, ids = target_of(o.model, o.tokenizer), o.natural(2, 12)
    last = target.n_layers - 1
    heads = [(layer, head) for layer in (1, last) for head in (0, 1)]
    base = Trial(ids, (), at=torch.tensor([at, at]), source=torch.tensor([other, other]), upto=last)
    norm, received = PositionEffect(target, base), PositionEffect(target, base, heads)
    top, floor = (norms(o.model, ids)[last, :, place].mean() for place in (at, other))
    for layer in range(target.n_layers):
        components = [Head(layer, 1), Component("mlp", layer), Component("attention", layer)]
        for reverse, (here, source) in enumerate([(at, other), (other, at)]):
            edits = [(component,) for component in components]
            of_norm, of_heads = norm.values(edits, bool(reverse))[1:, 0], received.values(edits, bool(reverse))[1:]
            if not reverse:
                assert norm.necessity(edits).mean(1).tolist() == pytest.approx(
                    ((top - of_norm) / (top - floor)).tolist(), abs=1e-4
                )
            for number, component in enumerate(components):
                with swapped(o.model, ids, component, here, source):
                    assert_close(of_norm[number], norms(o.model, ids)[last, :, here].mean(), rtol=1e-4, atol=1e-4)
                    rows = attention(o.model, ids)[..., here + 1 :, here].mean(-1)  # [layer, text, head]
                expected = torch.stack([rows[of, :, head].mean() for of, head in heads])
                assert_close(of_heads[number], expected, rtol=1e-4, atol=1e-5)
    assert_close(norm.typical[0], norms(o.model, ids)[last, :, other].mean(), rtol=1e-4, atol=1e-4)
    assert_close(received.typical, received.values([], reverse=True)[0])
    mixed = [(Component("mlp", layer),) for layer in (2, 0, 1)]  # in another order than they run
    alone = [norm.values([edit])[1] for edit in mixed]
    assert_close(norm.values(mixed)[1:], torch.stack(alone), rtol=1e-4, atol=1e-4)


def test_what_an_edit_of_several_parts_writes_comes_from_the_intact_text():
    o = organism("llama", 7)
    target, ids = target_of(o.model, o.tokenizer), o.natural(2, 12)
    first, later = Component("attention", 0), Component("attention", 1)  # which reads what the first one writes
    edited = effects(target, ids, [(first, later)], source=5)
    with swapped(o.model, ids, later, 0, 5), swapped(o.model, ids, first, 0, 5):
        assert_close(edited.norms[1], norms(o.model, ids)[:, :, 0].T, rtol=1e-4, atol=1e-4)
