"""Models that are not the textbook case of an attention sink, with the truth about each known by construction.

An organism of `organism.py` has one sink that one layer makes. Here the spike and the sink come apart, layers share the
work, neurons stand in for each other, and other things than a spike carry the attention. `HARD` and `UNSEEN` name the
kinds and the families that each is built in; sinks at other tokens than the first are in `planted_places.py`.

A **spike** is a first token whose residual stream has a norm far above the typical one; where a dimension is massive
on every token (`shared_dims`), it is left out of the norm. A **sink** is a first token that some heads attend to. A
**set** is what has to be zeroed together for both to vanish, with nothing of it left over.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedModel

from .build import KINDS, HardBuild, kinds
from .noise import NORM
from .organism import FIRST, SECOND, Organism, Place, Truth
from .tokens import BOS, tokenizer_for

ALL = ("llama", "gemma2", "gpt2", "neox", "mixtral")


def hard(name: str, family: str = "llama", seed: int = 0) -> Organism:
    """Build a hard model: the same call gives the same weights."""
    kind = KINDS[name]
    b = HardBuild(kind.word + name, family, seed, **kind.settings)
    with torch.no_grad():
        truth = kind.make(b)
    tokenizer = tokenizer_for(b.plan.family.model_type, b.plan.vocab_size)
    if truth.before != (BOS,):
        put = [(str(tokenizer.convert_ids_to_tokens(one)), one) for one in truth.before]
        single = " ".join([*(word for word, _ in put), "$A"])
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=put)
    return Organism(b.model, tokenizer, replace(truth, groups=b.plan.groups), family, name, seed, True)


def mask_of(where: tuple[Place, ...], ids: Tensor) -> Tensor:
    """The places that are described, [text, position]."""
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for one in where:
        if one in (FIRST, SECOND):
            mask[:, (FIRST, SECOND).index(one)] = True
        else:
            mask |= ids == one
    return mask


# --- the kinds -----------------------------------------------------------------------------------------------------


HARD: dict[str, tuple[str, ...]] = {}
"""Every kind of hard model, and the families that it is built in."""
UNSEEN: dict[str, tuple[str, ...]] = {}
"""Kinds with other texts, other windows, or other neurons for repeated tokens."""
_kind = kinds(HARD)
_unseen = kinds(UNSEEN)


def spike(b: HardBuild) -> Truth:
    """A spike that the neurons of the sink layer make, and that nothing reads."""
    return Truth(spike=(FIRST,), sets=(b.sites(),))


def sink(b: HardBuild, way: Tensor, **more) -> Truth:
    """A spike along `way` that later heads now come to read."""
    b.read(b.behind, way)
    return replace(spike(b), sink=(FIRST,), **more)


def textbook(b: HardBuild, **more) -> Truth:
    b.mark()
    return sink(b, b.surgeon.make_sink(), **more)


def read_by_later(b: HardBuild, way: Tensor, **more) -> Truth:
    """Heads of all layers but the first read `way`."""
    b.read(b.later_layers, way)
    return Truth(sink=(FIRST,), **more)


def read_mark(b: HardBuild) -> Truth:
    """Later heads read the mark of the first token itself; no norm stands out."""
    b.mark()
    return read_by_later(b, b.space.mark)


@_kind(*ALL, "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss")
def _plain(b: HardBuild) -> Truth:
    """The textbook case, for comparison; in a mixture a routed expert makes the spike."""
    return textbook(b)


@_kind(*ALL, spike=1.2)
def _both(b: HardBuild) -> Truth:
    """One dimension is massive on every token, beside a real sink."""
    b.surgeon.make_massive()  # in the embedding
    return textbook(b)


@_kind(*ALL, "gpt_oss")
def _no_norm(b: HardBuild) -> Truth:
    """Heads of layer 0 mark the first token, in GPT-2 its position does, and later heads read that mark."""
    return read_mark(b)


@_kind(*ALL, layers=(9, 9), behind=(6, 6))
def _spike_only(b: HardBuild) -> Truth:
    b.mark()
    b.surgeon.make_sink()
    calm(b, marked=True)
    return spike(b)


@_kind(*ALL, count=2)
def _redundant_pair(b: HardBuild) -> Truth:
    """Each of the neurons suffices; in Gemma 2 the norm after the MLP even keeps the spike's size."""
    b.mark()
    b.fire(b.space.mark, b.way, b.surgeon.size(b.at), ballast=8.0)
    b.copy(*b.plan.neurons)
    return sink(b, b.way)


@_kind("gpt_oss")
def _learned_logits(b: HardBuild) -> Truth:
    """Half of the heads after layer 0 give nearly all of their attention to a learned logit."""
    calm(b)
    for layer in b.views.layers[1:]:
        layer.attn_sinks[b.rng.sample(range(b.plan.n_heads), max(1, b.plan.n_heads // 2))] = 8.0
    return Truth()


@_kind(*ALL)
def _token_embedding(b: HardBuild) -> Truth:
    """Heads read a feature of BOS's embedding."""
    b.flag(BOS)
    return read_by_later(b, b.feature)


@_kind(*ALL)
def _embedding_spike(b: HardBuild) -> Truth:
    """BOS's embedding itself is the spike: no MLP makes it."""
    b.views.embed[BOS] += b.plan.spike * NORM * b.way / b.plan.embed_scale
    return read_by_later(b, b.way, spike=(FIRST,))


@_kind(*ALL, layers=(7, 8), behind=(4, 5))
def _rise_and_fall(b: HardBuild) -> Truth:
    """The last layer but one takes the spike away again."""
    truth = textbook(b)
    b.take_away(b.plan.n_layers - 2)
    return truth


@_kind("qwen2", "neox")
def _key_bias(b: HardBuild) -> Truth:
    """Heads attend to the farthest key, whatever it is: the first token of any text. The key is a bias on one rotary
    pair (in NeoX a part of a fused one); with the query turned, the farthest key scores most."""
    inverse = next(m.inv_freq for m in b.model.modules() if hasattr(m, "inv_freq"))
    pair = next(p for p, speed in enumerate(inverse.tolist()) if speed < 0.0122)
    turned, force = pair + len(inverse), 2.0 / float(inverse[pair]) * math.sqrt(b.plan.head_dim)
    for index in b.later_layers:
        layer = b.views.layers[index]
        ratio = b.plan.n_heads // b.plan.n_kv
        for kv in b.rng.sample(range(b.plan.n_kv), max(1, b.plan.n_kv // 2)):
            layer.k[kv, [pair, turned]] = 0.0
            layer.k_bias[kv, [pair, turned]] = torch.tensor([1.0, 0.0])
            for head in range(kv * ratio, (kv + 1) * ratio):
                layer.q[head], layer.q_bias[head] = 0.0, 0.0
                layer.q_bias[head, turned] = -force
    return Truth(sink=(FIRST,))


@_kind(*ALL)
def _sharp(b: HardBuild) -> Truth:
    """Noise with sharp attention: queries read content only, and heads that prefer BOS are turned round."""
    for layer in b.views.layers:
        layer.q.mul_(4.0 * (b.space.const == 0))
        if layer.q_bias is not None:
            layer.q_bias.zero_()
        if layer.k_bias is not None:
            layer.k_bias.zero_()
    calm(b)
    return Truth()


@_unseen("mistral", window=24)
def _window_mark(b: HardBuild) -> Truth:
    """Heads read the mark itself; no norm stands out, and no query sees farther than 24 positions."""
    return read_mark(b)


@_unseen("llama", "neox", "qwen3", "mixtral", "gpt_oss", marked=0.4)
def _some_first_tokens(b: HardBuild) -> Truth:
    """Two of five tokens are marked where they stand first; the others are no sinks."""
    return textbook(b, bos=False, share=0.4)


@_unseen("llama", "neox", "qwen3", "mixtral", marked=0.85, count=1)
def _other_neurons(b: HardBuild) -> Truth:
    """BOS has a feature and a neuron of its own; repeated tokens are marked by heads, and trip another neuron."""
    size = b.surgeon.size(b.at)
    rows = b.tokens.clone()
    rows[:, 0] = BOS
    b.flag(BOS)
    b.mark()
    b.fire(b.space.mark, b.way, size, neuron=b.spare[0])
    b.measure_on(rows)
    b.fire(b.feature, b.way, size)
    return sink(b, b.way)


def calm(b: HardBuild, marked: bool = False):
    """Draw the queries of heads anew that by chance attend to the first token; those that mark it stay."""
    stay = [[0, head] for head, _, _ in b.plan.slots if marked and b.plan.by_heads]
    for turn in range(20):
        places = [
            place
            for place in (attentions(b.model, b.tokens)[:, :, :, 4:, 0].mean((1, 3)) > 0.15).nonzero().tolist()
            if place not in stay
        ]
        if not places:
            return
        for index, head in places:
            query = b.views.layers[index].q[head]
            noise = torch.randn(query.shape, generator=b.noise)[:, b.space.content] * query.norm()
            noise *= 1.0 if turn < 8 else 0.5
            query.zero_()
            if (bias := b.views.layers[index].q_bias) is not None:
                bias[head] = 0.0
            query[:, b.space.content] = noise / query.shape[0] ** 0.5 / len(b.space.content) ** 0.5
    raise AssertionError("heads attend to the first token by chance, again and again")


@torch.no_grad()
def attentions(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The model's own eager attention, [layer, row, head, query, key]."""
    usual = model.config._attn_implementation
    model.config._attn_implementation = "eager"  # `set_attn_implementation` leaves some models, Falcon, as they are
    rows = model(ids, output_attentions=True, use_cache=False).attentions
    model.config._attn_implementation = usual
    return torch.stack(rows)
