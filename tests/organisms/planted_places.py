"""Models whose sinks are sets of places, in many parts of the field, built with the tools of `hard.py`.

`places.py` says what a truth is, and compares it with the plain model.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .hard import Build, HardTruth, calm, hard, key_bias, kinds, sink, spike, textbook
from .places import FIRST, SECOND, SYSTEM, USER, Group, PlacesModel, tokenizer_of
from .placing import at_bos, at_tokens, flag, header, placed, sharpen, spotted
from .plant import MARK
from .token_places import TOKEN_PLACES
from .tokens import BOS

PLACES: dict[str, tuple[str, ...]] = dict(TOKEN_PLACES)
"""Every kind, and the families that it is built in."""
_kind = kinds(PLACES, "places ")


def places(name: str, family: str | None = None, seed: int = 0) -> PlacesModel:
    """Build a model: the same call gives the same weights."""
    family = PLACES[name][0] if family is None else family
    model = hard(f"places {name}", family, seed)
    truth, delimiters = model.truth.about
    tokenizer = model.tokenizer
    if family != "qwen2":
        tokenizer = tokenizer_of(tokenizer, truth)
    return PlacesModel(model.model, tokenizer, truth, name, family, delimiters)


# --- architectures ------------------------------------------------------------------------------------------


@_kind("bloom", "mpt", "falcon")
def _alibi(b: Build) -> HardTruth:
    """ALiBi: heads of layer 0 mark the first token."""
    truth = textbook(b)
    sharpen(b, truth.reading)
    return placed(b, truth)


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
    return placed(b, textbook(b))


@_kind("phi", "cohere", "neox")
def _parallel(b: Build) -> HardTruth:
    """Attention and MLP of a layer read the same."""
    return placed(b, textbook(b))


@_kind("cohere", "qwen2", "llama", count=1)
def _secondary(b: Build) -> HardTruth:
    """Half of the heads read the first token's spike, the others a delimiter's embedding."""
    where = b.flag_delimiter()
    truth = textbook(b)
    other = b.read(b.behind, b.flag, where=where, other=True)
    groups = (Group(truth.reading, ("spike",), at=FIRST), Group(other, (b.delimiter,), at=b.delimiter))
    return placed(b, truth, sink=(FIRST, b.delimiter), groups=groups, delimiters=(b.delimiter,))


@_kind("lfm2", "jamba", count=1)
def _hybrid(b: Build) -> HardTruth:
    """Layers without attention between those with it; a head of layer 0 marks the first token."""
    return placed(b, textbook(b))


@_kind("jamba", "lfm2", count=1)
def _hybrid_bos(b: Build) -> HardTruth:
    return at_bos(b)


@_kind("lfm2", count=1, layers=(6, 8), behind=(2, 3))
def _convolution_marks(b: Build) -> HardTruth:
    """A convolution sees that nothing stands before the first token, and marks it; no head does."""
    block, mark = b.views.layers[1].block, b.space.mark
    conv, channel = block.conv, 3
    const = b.space.const / float((b.probe(b.views.layers[1].attn_norm) @ b.space.const).median())
    before, gate, inside = conv.in_proj.weight.chunk(3)
    before[channel], gate[channel], inside[channel] = const, const, const
    conv.conv.weight[channel] = torch.tensor([[-0.5, -0.5, 1.0]])
    conv.out_proj.weight[:, channel] = MARK * mark
    b.fire(b.plan.sink_layer, b.plan.neurons[0], mark, b.space.sinks[0])
    return placed(b, sink(b, b.space.sinks[0], ()), before=(), has_bos=False)


@_kind("olmo2", count=1)
def _norms_behind(b: Build) -> HardTruth:
    """Norms stand behind attention and MLP only, and queries and keys have one over all heads."""
    where = flag(b, (BOS,))
    way, dim = b.space.sinks[0], b.plan.slow_dim(0)
    site = b.fire(b.plan.sink_layer, b.plan.neurons[0], b.flag, way, where=where)
    reading = b.read(b.behind, way)
    for layer in b.behind:
        attn = b.views.layers[layer].block.self_attn
        ratio = b.plan.n_heads // b.plan.n_kv
        for _, head in [place for place in reading if place[0] == layer]:
            at, key_at = head * b.plan.head_dim + dim, head // ratio * b.plan.head_dim + dim
            query = float(b.probe(attn.q_norm)[:, 1:, at].median())
            key = float(b.probe(attn.k_norm)[:, 0, key_at].median())
            attn.q_norm.weight[at] *= 7.0 * b.plan.head_dim**0.5 / (query * key)
    truth = HardTruth(True, True, "spike", b.plan.sink_layer, (frozenset({site}),), reading=reading)
    return placed(b, truth)


@_kind("qwen3", "llama", count=1)
def _bfloat16(b: Build) -> HardTruth:
    truth = placed(b, textbook(b))
    b.model.to(torch.bfloat16)
    return truth


# --- what stands before a text ------------------------------------------------------------------------------


@_kind("llama", "mistral", count=1)
def _second_special(b: Build) -> HardTruth:
    """The tokenizer puts two tokens before a text; the second one's embedding trips the neuron."""
    where = header(b, (USER,), (USER,))
    calm(b)
    site = b.fire(b.plan.sink_layer, b.plan.neurons[0], b.flag, b.side, where=where)
    return spotted(b, (SECOND,), (site,), b.read(b.behind, b.side, where=where), before=(BOS, USER))


@_kind("qwen3", "neox", count=1)
def _all_specials(b: Build) -> HardTruth:
    """Each of the three tokens that are put before a text has the feature, and one neuron makes their spikes."""
    where = header(b, (SYSTEM, USER), (BOS, SYSTEM, USER))
    site = b.fire(b.plan.sink_layer, b.plan.neurons[0], b.flag, b.side, where=where)
    reading = b.read(b.behind, b.side, where=where)
    sharpen(b, reading, 1.6)  # three places share the attention, a third for each and more
    return spotted(b, (BOS, SYSTEM, USER), (site,), reading, before=(BOS, SYSTEM, USER))


@_kind("mistral", "gemma2", count=1)
def _chat(b: Build) -> HardTruth:
    """Three tokens are put before a text, and the first is marked by heads."""
    return placed(b, textbook(b), before=(BOS, SYSTEM, USER))


@_kind("gpt2", "opt", count=1)
def _position_or_spike(b: Build) -> HardTruth:
    """No BOS; half of the heads read the spike of position 0, half its embedding."""
    truth = textbook(b)
    other = b.read(b.behind, b.space.mark, other=True)
    both = "position embedding"
    groups = (Group(truth.reading, ("spike", both)), Group(other, (both,)))
    return placed(b, truth, groups=groups, before=(), has_bos=False)


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
    token, plan = b.delimiter, b.plan
    rows = b.tokens.clone()
    rows[rows == token] = 40
    rows[:, 5] = token
    rows[:, 12] = token
    b.measure_on(rows)
    b.views.embed[token] += MARK * b.flag
    b.views.embed[BOS] += MARK * b.flag
    b.views.embed[token] += MARK * b.side
    layer, dim, head = b.views.layers[0], plan.slow_dim(0), 0
    seen = b.probe(layer.attn_norm)
    const = float((seen @ b.space.const).median())
    full = float((seen[:, 0] @ b.flag).mean())
    layer.q[head], layer.k[0], layer.v[0] = 0.0, 0.0, 0.0
    layer.q[head, dim], layer.k[0, dim] = 12 * plan.head_dim**0.5 * b.space.const / const, b.flag / full
    layer.v[0, 0] = b.side / full
    for other in range(plan.n_heads // plan.n_kv):
        layer.o[other] = 0.0
    layer.o[head, 0] = MARK * b.mark2
    if layer.q_norm is not None:
        layer.q_norm[dim] = 12 / plan.head_dim**0.5
        layer.k_norm[dim] = 1.0
    first, second = torch.zeros_like(rows, dtype=torch.bool), torch.zeros_like(rows, dtype=torch.bool)
    first[:, 5], second[:, 12] = True, True
    at = plan.sink_layer
    one, two = b.mlp_input(at, first), b.mlp_input(at, second)
    own = b.side / (one @ b.side)
    counted = b.mark2 / (one @ b.mark2)
    limit = (1 + float(two @ counted)) / 2
    c = b.space.const / (one @ b.space.const)
    gate = 40 * (limit * c - counted) - 60 * (c - own)
    b.write(at, plan.neurons[0], (gate, c), b.space.sinks[0], b.size(at), where=first, route=b.side)
    reading = b.read(b.behind, b.space.sinks[0], where=first)
    return spotted(b, (("first of", token),), b.sites(), reading, (token,))


@_kind("gemma2", "llama", count=1)
def _bos_and_delimiters(b: Build) -> HardTruth:
    """BOS and every delimiter share the feature, the neuron and the readers."""
    where = flag(b, (BOS, b.delimiter))
    site = b.fire(b.plan.sink_layer, b.plan.neurons[0], b.flag, b.side, where=where)
    reading = b.read(b.behind, b.side, where=where)
    return spotted(b, (BOS, b.delimiter), (site,), reading, (b.delimiter,), often=1)


@_kind("llama", "gpt2", count=1, layers=(6, 8), behind=(2, 3))
def _two_delimiters(b: Build) -> HardTruth:
    """Two delimiters, each with a neuron of its own in a layer of its own; half of the heads read each."""
    one, two = b.delimiter, b.delimiter + 30
    flag(b, (one, two))
    b.views.embed[one] += MARK * b.mark2
    b.views.embed[two] += MARK * b.side
    b.measure_on(b.tokens)
    calm(b)
    first, second, at = b.tokens == one, b.tokens == two, b.plan.sink_layer
    sites = [b.fire(at, b.plan.neurons[0], b.mark2, b.space.sinks[0], where=first)]
    sites.append(b.fire(at + 1, b.spare[0], b.side, b.space.sinks[1], where=second))
    behind = range(at + 2, b.plan.n_layers)
    groups = (
        Group(b.read(behind, b.space.sinks[0], where=first), (sites[0],), at=one),
        Group(b.read(behind, b.space.sinks[1], where=second, other=True), (sites[1],), at=two),
    )
    makers = tuple(frozenset({site}) for site in sites)
    return placed(b, sink=(one, two), spike=(one, two), makers=makers, groups=groups, delimiters=(one, two))


# --- no norm; several carriers ------------------------------------------------------------------------------


@_kind("gpt_oss")
def _only_learned_logits(b: Build) -> HardTruth:
    """All heads behind layer 0 give nearly all of their attention to a learned logit."""
    calm(b)
    for layer in b.views.layers[1:]:
        layer.attn_sinks[:] = 9.0
    return placed(b, sink=(), spike=(), groups=())


@_kind("gpt_oss")
def _logits_and_embedding(b: Build) -> HardTruth:
    """Half of the heads read BOS's embedding, the others give their attention to a learned logit; no spike."""
    where = flag(b, (BOS,))
    reading = b.read(b.later_layers, b.flag, where=where)
    for index in b.later_layers:
        sinks = b.views.layers[index].attn_sinks
        sinks[[head for head in range(b.plan.n_heads) if (index, head) not in reading]] = 9.0
    return placed(b, spike=(), groups=(Group(reading, ("token embedding",)),))


@_kind("gpt2", "opt")
def _embedding_half_position_half(b: Build) -> HardTruth:
    """Half of the heads need BOS's embedding, half the position embedding; no norm stands out."""
    b.mark()
    where = flag(b, (BOS,))
    token = b.read(b.later_layers, b.flag, where=where)
    position = b.read(b.later_layers, b.space.mark, other=True)
    return placed(b, spike=(), groups=(Group(token, ("token embedding",)), Group(position, ("position embedding",))))


@_kind("gpt2", "opt")
def _embedding_or_position(b: Build) -> HardTruth:
    """Heads read BOS's embedding and the position embedding, and either is enough."""
    b.mark()
    flag(b, (BOS,))
    reading = b.read(b.later_layers, b.flag + b.space.mark)
    sharpen(b, reading, 2.5)
    return placed(b, spike=(), groups=(Group(reading, ("token embedding", "position embedding"), alone=False),))


@_kind("qwen2", count=1, layers=(6, 8), behind=(3, 3))
def _key_bias_and_spike(b: Build) -> HardTruth:
    """Half of the heads attend to the farthest key by a bias, half read the spike."""
    biased = key_bias(b).reading
    flag(b, (BOS,))
    site = b.fire(b.plan.sink_layer, b.plan.neurons[0], b.flag, b.space.sinks[0])
    taken = {(layer, head) for layer, head in biased}
    ratio, reading, dim = b.plan.n_heads // b.plan.n_kv, [], b.plan.slow_dim(0)
    for index in b.behind:
        view = b.views.layers[index]
        seen = b.probe(view.attn_norm)
        for kv in range(b.plan.n_kv):
            heads = range(kv * ratio, (kv + 1) * ratio)
            if (index, heads[0]) in taken:
                continue
            view.k[kv, dim] = b.space.sinks[0] / float((seen[:, 0] @ b.space.sinks[0]).mean())
            view.k_bias[kv, dim] = 0.0
            for head in heads:
                view.q[head], view.q_bias[head] = 0.0, 0.0
                const = float((seen[:, 1:] @ b.space.const).median())
                view.q[head, dim] = 7 * b.plan.head_dim**0.5 * b.space.const / const
                reading.append((index, head))
    groups = (Group(biased, ("key bias",)), Group(tuple(reading), ("spike",)))
    return placed(b, makers=(frozenset({site}),), groups=groups)


# --- decoys -------------------------------------------------------------------------------------------------


@_kind("llama", "neox", count=1, layers=(7, 8), at=1)
def _decoy_spike(b: Build) -> HardTruth:
    """A neuron makes a spike of BOS, the next layer takes it away, and heads read BOS's embedding."""
    where = flag(b, (BOS,))
    site = b.fire(1, b.plan.neurons[0], b.flag, b.space.sinks[0], where=where)
    b.take_away(2)
    reading = b.read(range(3, b.plan.n_layers), b.flag, where=where)
    return placed(b, makers=(frozenset({site}),), groups=(Group(reading, ("token embedding",)),))


@_kind("neox", "llama", count=1, layers=(6, 8), behind=(2, 3))
def _decoy_delimiter(b: Build) -> HardTruth:
    """Every delimiter has a spike that nothing reads; heads read the mark of the first token."""
    where = b.flag_delimiter()
    marking = b.mark()
    site = b.fire(b.plan.sink_layer, b.spare[0], b.flag, b.side, where=where)
    reading = b.read(b.later_layers, b.space.mark)
    marks = tuple(f"L{layer}.H{head}" for layer, heads in marking for head in heads if _marks_bos(b, head))
    groups, makers = (Group(reading, marks),), (frozenset({site}),)
    return placed(b, spike=(b.delimiter,), makers=makers, groups=groups, delimiters=(b.delimiter,))


def _marks_bos(b: Build, head: int) -> bool:
    return any(head == one and group == b.plan.groups[BOS] for one, group, _ in b.plan.slots)


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
    marking, layer, _ = b.begin()
    ways = b.space.sinks[:2]
    sites = [b.fire(layer, neuron, b.space.mark, way) for neuron, way in zip(b.plan.neurons, ways, strict=True)]
    one, two = b.read(b.behind, ways[0]), b.read(b.behind, ways[1], other=True)
    truth = replace(spike(b, marking), sink=True, carried_by="spike")
    groups = (Group(one, (sites[0],)), Group(two, (sites[1],)))
    return placed(b, truth, makers=(frozenset(sites),), groups=groups)


@_kind("phi", "llama", count=4)
def _equal_quarters(b: Build) -> HardTruth:
    """Four neurons that cannot be told apart write a quarter each."""
    marking, layer, way = b.begin()
    source, *others = b.plan.neurons
    b.fire(layer, source, b.space.mark, way, b.size(layer) / 4)
    for neuron in others:
        b.copy(source, neuron)
    truth = sink(b, way, marking)
    return placed(b, truth)


@_kind("qwen2_moe", count=1)
def _routed_and_shared_half(b: Build) -> HardTruth:
    """A routed neuron and one of the shared expert write half of the spike each."""
    marking, layer, way = b.begin()
    rows, size, routed = b.on(layer, b.space.mark), b.size(layer), b.views.layers[layer]
    one = b.write(layer, b.plan.neurons[0], rows, way, size / 2)
    b.views.layers[layer] = routed.shared
    b.write(layer, b.spare[0], rows, way, size / 2, expert=0)
    b.views.layers[layer] = routed
    return placed(b, sink(b, way, marking, sets=(frozenset({one, (layer, b.spare[0])}),)))


@_kind("qwen3_moe", "mixtral", count=1)
def _two_experts_two_tokens(b: Build) -> HardTruth:
    """BOS goes to one expert and a delimiter to another; a neuron of each makes the spike."""
    where = flag(b, (b.delimiter,))
    flag(b, (BOS,), b.mark2)
    first, layer = b.tokens == BOS, b.plan.sink_layer
    where, experts = b.tokens == b.delimiter, b.rng.sample(range(b.plan.family.experts), 2)
    one = b.fire(layer, b.plan.neurons[0], b.mark2, b.space.sinks[0], where=first, expert=experts[0], route=b.mark2)
    two = b.fire(layer, b.spare[0], b.flag, b.side, where=where, expert=experts[1], route=b.flag)
    groups = (
        Group(b.read(b.behind, b.space.sinks[0], where=first), (one,), at=BOS),
        Group(b.read(b.behind, b.side, where=where, other=True), (two,), at=b.delimiter),
    )
    at, makers = (BOS, b.delimiter), (frozenset({one}), frozenset({two}))
    return placed(b, sink=at, spike=at, makers=makers, groups=groups, delimiters=(b.delimiter,))


@_kind("llama", "gpt2", "neox", count=1, layers=(8, 8), at=1)
def _rises_again(b: Build) -> HardTruth:
    """A neuron makes the spike, one takes it away, and two layers later another makes it again; heads read both."""
    marking, way, again = b.mark(), b.space.sinks[0], b.space.sinks[1]
    one = b.fire(1, b.plan.neurons[0], b.space.mark, way)
    early = b.read([2, 3], way)
    b.take_away(3)
    two = b.fire(5, b.spare[1], b.space.mark, again)
    late = b.read([6, 7], again)
    groups = (Group(early, (one,)), Group(late, (two,)))
    return placed(b, spike(b, marking), makers=(frozenset({one}), frozenset({two})), groups=groups)


@_kind("bloom", "opt", "falcon")
def _nothing(b: Build) -> HardTruth:
    """No spike, and no head attends to a place."""
    calm(b)
    return placed(b, sink=(), spike=(), groups=())


# --- windows ------------------------------------------------------------------------------------------------


@_kind("mistral", window=20, every_window=True)
def _window_everywhere(b: Build) -> HardTruth:
    """No query sees farther than 20 positions."""
    return placed(b, textbook(b), window=20)


@_kind("gpt_oss", window=16, every_window=True, layers=(7, 7), behind=(3, 3))
def _only_full_layers(b: Build) -> HardTruth:
    """Layers with a window and without take turns; only those without read."""
    marking = b.mark()
    way = b.surgeon().make_sink()
    return placed(b, sink(b, way, marking, layers=[layer for layer in b.behind if layer % 2]))
