"""Models whose sinks are sets of places, in many parts of the field, built with the tools of `hard.py`.

`places.py` says what a truth is, and compares it with the plain model.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from . import circuits, readers, token_places  # noqa: F401  (their kinds are in the table)
from .hard import (
    Build,
    HardTruth,
    calm,
    equal_neurons,
    hard,
    key_bias,
    kinds,
    routed_and_shared,
    sink,
    spike,
    textbook,
    unit,
)
from .places import FIRST, SECOND, SYSTEM, USER, Group, PlacesModel, tokenizer_of
from .placing import PLACES, at_bos, at_tokens, convolve, flag, header, placed, sharpen, spotted, stand, tripped
from .plant import MARK
from .tokens import BOS

_kind = kinds(PLACES, "places ")


def places(name: str, family: str | None = None, seed: int = 0) -> PlacesModel:
    """Build a model: the same call gives the same weights."""
    family = PLACES[name][0] if family is None else family
    made = hard(name, family, seed)
    truth, tokenizer = made.truth.places, made.tokenizer
    if family != "qwen2":
        tokenizer = tokenizer_of(tokenizer, truth)
    return PlacesModel(made.model, tokenizer, truth)


# --- architectures ------------------------------------------------------------------------------------------


@_kind("bloom", "mpt", "falcon")
def _alibi(b: Build) -> HardTruth:
    """ALiBi: heads of layer 0 mark the first token."""
    truth = textbook(b)
    sharpen(b, truth.reading)
    return placed(truth)


@_kind("mpt", "bloom", "falcon", count=1)
def _alibi_bos(b: Build) -> HardTruth:
    """ALiBi: BOS by its embedding."""
    truth = at_bos(b)
    sharpen(b, truth.reading)
    return truth


@_kind("falcon", "bloom", count=1)
def _alibi_delimiter(b: Build) -> HardTruth:
    """ALiBi: every delimiter is a sink, the first token none."""
    return at_tokens(b, (b.delimiter,))


@_kind("opt", "gpt2")
def _learned_positions(b: Build) -> HardTruth:
    """The position embedding marks position 0, whatever stands there."""
    return placed(textbook(b))


@_kind("phi", "cohere", "neox")
def _parallel(b: Build) -> HardTruth:
    """Attention and MLP of a layer read the same."""
    return placed(textbook(b))


@_kind("cohere", "qwen2", "llama", count=1)
def _secondary(b: Build) -> HardTruth:
    """Half of the heads read the first token's spike, the others a delimiter's embedding."""
    where = b.flag_delimiter()
    truth = textbook(b)
    other = b.read(b.behind, b.flag, where=where, other=True)
    groups = (Group(truth.reading, ("spike",), at=(FIRST,)), Group(other, (b.delimiter,), at=(b.delimiter,)))
    return placed(truth, sink=(FIRST, b.delimiter), groups=groups, delimiters=(b.delimiter,))


@_kind("lfm2", "jamba", count=1)
def _hybrid(b: Build) -> HardTruth:
    """Layers without attention between those with it; a head of layer 0 marks the first token."""
    return placed(textbook(b))


@_kind("jamba", "lfm2", count=1)
def _hybrid_bos(b: Build) -> HardTruth:
    return at_bos(b)


@_kind("lfm2", count=1, layers=(6, 8), behind=(2, 3))
def _convolution_marks(b: Build) -> HardTruth:
    """A convolution sees that nothing stands before the first token, and marks it; no head does."""
    const = b.space.const / float((b.probe(b.views.layers[1].attn_norm) @ b.space.const).median())
    convolve(b, (const, const, const), (-0.5, -0.5, 1.0), b.space.mark)
    b.fire(b.space.mark, b.way)
    return placed(sink(b, b.way, ()), before=(), has_bos=False)


@_kind("olmo2", count=1)
def _norms_behind(b: Build) -> HardTruth:
    """Norms stand behind attention and MLP only, and queries and keys have one over all heads."""
    truth, dim = at_bos(b), b.plan.slow_dim(0)
    ratio = b.plan.n_heads // b.plan.n_kv
    for layer, head in truth.reading:
        attn = b.views.layers[layer].block.self_attn
        at, key_at = head * b.plan.head_dim + dim, head // ratio * b.plan.head_dim + dim
        query = float(b.probe(attn.q_norm)[:, 1:, at].median())
        key = float(b.probe(attn.k_norm)[:, 0, key_at].median())
        attn.q_norm.weight[at] *= 7.0 * b.plan.head_dim**0.5 / (query * key)
    return truth


@_kind("qwen3", "llama", count=1)
def _bfloat16(b: Build) -> HardTruth:
    truth = placed(textbook(b))
    b.model.to(torch.bfloat16)
    return truth


# --- what stands before a text ------------------------------------------------------------------------------


@_kind("llama", "mistral", count=1)
def _second_special(b: Build) -> HardTruth:
    """The tokenizer puts two tokens before a text; the second one's embedding trips the neuron."""
    where = header(b, (USER,), (USER,))
    calm(b)
    return tripped(b, where, (SECOND,), before=(BOS, USER))


@_kind("qwen3", "neox", count=1)
def _all_specials(b: Build) -> HardTruth:
    """Each of the three tokens that are put before a text has the feature, and one neuron makes their spikes."""
    where = header(b, (SYSTEM, USER), (BOS, SYSTEM, USER))
    every = (BOS, SYSTEM, USER)
    return tripped(b, where, every, 1.6, before=every)  # three places share the attention, a third for each and more


@_kind("mistral", "gemma2", count=1)
def _chat(b: Build) -> HardTruth:
    """Three tokens are put before a text, and the first is marked by heads."""
    return placed(textbook(b), before=(BOS, SYSTEM, USER))


@_kind("gpt2", "opt", count=1)
def _position_or_spike(b: Build) -> HardTruth:
    """No BOS; half of the heads read the spike of position 0, half its embedding."""
    truth = textbook(b)
    other = b.read(b.behind, b.space.mark, other=True)
    both = "position embedding"
    groups = (Group(truth.reading, ("spike", both)), Group(other, (both,)))
    return placed(truth, groups=groups, before=(), has_bos=False)


@_kind("neox", "mixtral", count=1)
def _bos_is_not_put(b: Build) -> HardTruth:
    """The tokenizer has a BOS token and does not put it; only BOS is a sink, by its embedding."""
    return at_bos(b, puts_bos=False)


# --- delimiters ---------------------------------------------------------------------------------------------


@_kind("mixtral", "gpt_oss", count=1)
def _expert_of_a_delimiter(b: Build) -> HardTruth:
    """An expert that every delimiter goes through makes its spike; the first token is nothing."""
    return at_tokens(b, (b.delimiter,))


@_kind("llama", "qwen3", count=1, layers=(6, 8))
def _first_delimiter(b: Build) -> HardTruth:
    """The first delimiter of a text: a head sees what share of BOS and delimiters the latter have."""
    token, layer = b.delimiter, b.views.layers[0]
    b.views.embed[[token, BOS]] += MARK * b.flag
    b.views.embed[token] += MARK * b.side
    stand(b, {5: token, 12: token})
    const = float((b.probe(layer.attn_norm) @ b.space.const).median())
    seen = b.seen(layer.attn_norm)
    layer.k[0], layer.v[0] = 0.0, 0.0
    layer.o[: b.plan.n_heads // b.plan.n_kv] = 0.0
    b.surgeon().look(0, (0,), unit(b.flag, seen), const, (12.0,), 12.0)
    layer.v[0, 0] = b.side / float(seen @ b.flag)
    layer.o[0, 0] = MARK * b.mark2
    first, second = torch.zeros_like(b.first), torch.zeros_like(b.first)
    first[:, 5], second[:, 12] = True, True
    one, two = b.mlp_input(b.at, first), b.mlp_input(b.at, second)
    own, counted, const = unit(b.side, one), unit(b.mark2, one), unit(b.space.const, one)
    limit = (1 + float(two @ counted)) / 2
    gate = 40 * (limit * const - counted) - 60 * (const - own)
    b.write((gate, const), b.way, where=first, route=b.side)
    reading = b.read(b.behind, b.way, where=first)
    return spotted((("first of", token),), b.sites(), reading, delimiters=(token,))


@_kind("gemma2", "llama", count=1)
def _bos_and_delimiters(b: Build) -> HardTruth:
    """BOS and every delimiter share the feature, the neuron and the readers."""
    where = flag(b, (BOS, b.delimiter))
    return tripped(b, where, (BOS, b.delimiter), delimiters=(b.delimiter,), often=1)


@_kind("llama", "gpt2", count=1, layers=(6, 8), behind=(2, 3))
def _two_delimiters(b: Build) -> HardTruth:
    """Two delimiters, each with a neuron of its own in a layer of its own; half of the heads read each."""
    one, two = b.delimiter, b.delimiter + 30
    flag(b, (one, two))
    b.views.embed[one] += MARK * b.mark2
    b.views.embed[two] += MARK * b.side
    b.measure_on(b.tokens)
    calm(b)
    first, second, way = b.tokens == one, b.tokens == two, b.space.sinks[1]
    of_one = b.fire(b.mark2, b.way, where=first)
    of_two = b.fire(b.side, way, layer=b.at + 1, neuron=b.spare[0], where=second)
    behind = range(b.at + 2, b.plan.n_layers)
    reading, other = b.read(behind, b.way, where=first), b.read(behind, way, where=second, other=True)
    return apart((one, of_one, reading), (two, of_two, other), delimiters=(one, two))


def apart(*sinks: tuple, **more) -> HardTruth:
    """Sinks, each of which a neuron of its own makes for heads of its own: (place, site, heads)."""
    at = tuple(place for place, _, _ in sinks)
    makers = tuple(frozenset({site}) for _, site, _ in sinks)
    groups = tuple(Group(heads, (site,), at=(place,)) for place, site, heads in sinks)
    return placed(sink=at, spike=at, makers=makers, groups=groups, **more)


# --- no norm; several carriers ------------------------------------------------------------------------------


@_kind("gpt_oss")
def _only_learned_logits(b: Build) -> HardTruth:
    """All heads behind layer 0 give nearly all of their attention to a learned logit."""
    calm(b)
    for layer in b.views.layers[1:]:
        layer.attn_sinks[:] = 9.0
    return placed(sink=(), spike=(), groups=())


@_kind("gpt_oss")
def _logits_and_embedding(b: Build) -> HardTruth:
    """Half of the heads read BOS's embedding, the others give their attention to a learned logit; no spike."""
    where = flag(b, (BOS,))
    reading = b.read(b.later_layers, b.flag, where=where)
    for index in b.later_layers:
        sinks = b.views.layers[index].attn_sinks
        sinks[[head for head in range(b.plan.n_heads) if (index, head) not in reading]] = 9.0
    return placed(spike=(), groups=(Group(reading, ("token embedding",)),))


@_kind("gpt2", "opt")
def _embedding_half_position_half(b: Build) -> HardTruth:
    """Half of the heads need BOS's embedding, half the position embedding; no norm stands out."""
    b.mark()
    where = flag(b, (BOS,))
    token = b.read(b.later_layers, b.flag, where=where)
    position = b.read(b.later_layers, b.space.mark, other=True)
    return placed(spike=(), groups=(Group(token, ("token embedding",)), Group(position, ("position embedding",))))


@_kind("gpt2", "opt")
def _embedding_or_position(b: Build) -> HardTruth:
    """Heads read BOS's embedding and the position embedding, and either is enough."""
    b.mark()
    flag(b, (BOS,))
    reading = b.read(b.later_layers, b.flag + b.space.mark)
    sharpen(b, reading, 2.5)
    return placed(spike=(), groups=(Group(reading, ("token embedding", "position embedding"), alone=False),))


@_kind("qwen2", count=1, layers=(6, 8), behind=(3, 3))
def _key_bias_and_spike(b: Build) -> HardTruth:
    """Half of the heads attend to the farthest key by a bias, half read the spike."""
    biased = key_bias(b).reading
    flag(b, (BOS,))
    b.fire(b.flag, b.way)
    reading = b.read(b.behind, b.way, beside=biased)
    groups = (Group(biased, ("key bias",)), Group(reading, ("spike",)))
    return placed(makers=(b.sites(),), groups=groups)


# --- decoys -------------------------------------------------------------------------------------------------


@_kind("llama", "neox", count=1, layers=(7, 8), at=1)
def _decoy_spike(b: Build) -> HardTruth:
    """A neuron makes a spike of BOS, the next layer takes it away, and heads read BOS's embedding."""
    where = flag(b, (BOS,))
    b.fire(b.flag, b.way, where=where)
    b.take_away(2)
    reading = b.read(range(3, b.plan.n_layers), b.flag, where=where)
    return placed(makers=(b.sites(),), groups=(Group(reading, ("token embedding",)),))


@_kind("neox", "llama", count=1, layers=(6, 8), behind=(2, 3))
def _decoy_delimiter(b: Build) -> HardTruth:
    """Every delimiter has a spike that nothing reads; heads read the mark of the first token."""
    where = b.flag_delimiter()
    b.mark()
    site = b.fire(b.flag, b.side, neuron=b.spare[0], where=where)
    groups, makers = (Group(b.read(b.later_layers, b.space.mark), b.markers()),), (frozenset({site}),)
    return placed(spike=(b.delimiter,), makers=makers, groups=groups, delimiters=(b.delimiter,))


@_kind("qwen3", "llama", count=1)
def _silent_heads(b: Build) -> HardTruth:
    """Heads of layer 0 attend to BOS and write nothing; BOS's embedding trips the neuron."""
    truth = at_bos(b)
    b.read([0], b.flag)
    b.views.layers[0].o[:] = 0.0
    return truth


# --- several makers -----------------------------------------------------------------------------------------


@_kind("llama", "gpt2", count=2)
def _half_of_the_heads_each(b: Build) -> HardTruth:
    """Two neurons write a direction each, and half of the heads read each: both are needed."""
    marking, way = b.mark(), b.space.sinks[1]
    sites = b.fire(b.space.mark, b.way), b.fire(b.space.mark, way, neuron=b.plan.neurons[1])
    one, two = b.read(b.behind, b.way), b.read(b.behind, way, other=True)
    truth = replace(spike(b, marking), sink=True, carried_by="spike")
    return placed(truth, groups=(Group(one, (sites[0],)), Group(two, (sites[1],))))


@_kind("phi", "llama", count=4)
def _equal_quarters(b: Build) -> HardTruth:
    """Four neurons that cannot be told apart write a quarter each."""
    return placed(equal_neurons(b, 0.25))


@_kind("qwen2_moe", count=2)
def _routed_and_shared_half(b: Build) -> HardTruth:
    """A routed neuron and one of the shared expert write half of the spike each."""
    return placed(routed_and_shared(b, 0.5))


@_kind("qwen3_moe", "mixtral", count=1)
def _two_experts_two_tokens(b: Build) -> HardTruth:
    """BOS goes to one expert and a delimiter to another; a neuron of each makes the spike."""
    where = flag(b, (b.delimiter,))
    flag(b, (BOS,), b.mark2)
    first, where = b.tokens == BOS, b.tokens == b.delimiter
    experts = b.rng.sample(range(b.plan.family.experts), 2)
    one = b.fire(b.mark2, b.way, where=first, expert=experts[0])
    two = b.fire(b.flag, b.side, neuron=b.spare[0], where=where, expert=experts[1])
    reading, other = b.read(b.behind, b.way, where=first), b.read(b.behind, b.side, where=where, other=True)
    return apart((BOS, one, reading), (b.delimiter, two, other), delimiters=(b.delimiter,))


@_kind("llama", "gpt2", "neox", count=1, layers=(8, 8), at=1)
def _rises_again(b: Build) -> HardTruth:
    """A neuron makes the spike, one takes it away, and two layers later another makes it again; heads read both."""
    marking, way, again = b.mark(), b.way, b.space.sinks[1]
    one = b.fire(b.space.mark, way)
    early = b.read([2, 3], way)
    b.take_away(3)
    two = b.fire(b.space.mark, again, layer=5, neuron=b.spare[1])
    late = b.read([6, 7], again)
    groups = (Group(early, (one,)), Group(late, (two,)))
    return placed(spike(b, marking), makers=(frozenset({one}), frozenset({two})), groups=groups)


@_kind("bloom", "opt", "falcon")
def _nothing(b: Build) -> HardTruth:
    """No spike, and no head attends to a place."""
    calm(b)
    return placed(sink=(), spike=(), groups=())


# --- windows ------------------------------------------------------------------------------------------------


@_kind("mistral", window=20, every_window=True)
def _window_everywhere(b: Build) -> HardTruth:
    """No query sees farther than 20 positions."""
    return placed(textbook(b), window=20)


@_kind("gpt_oss", window=16, every_window=True, layers=(7, 7), behind=(3, 3))
def _only_full_layers(b: Build) -> HardTruth:
    """Layers with a window and without take turns; only those without read."""
    marking = b.mark()
    way = b.surgeon().make_sink()
    return placed(sink(b, way, marking, layers=[layer for layer in b.behind if layer % 2]))
