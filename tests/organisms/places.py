"""What is so of a model whose sinks are sets of places, compared with the plain model.

A **place** is a position of a text. `Places` says which places are sinks and which have a spike, which neurons make it
and what each group of heads needs; `untrue` compares that with the model by plain hooks. `planted_places.py` has kinds.
"""

from __future__ import annotations

import random
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .hard import Head, Site
from .tokens import BOS, N_SPECIAL
from .views import filled, views, weights_of

FIRST, SECOND, NOWHERE = "first", "second", "nowhere"
USER, SYSTEM = 4, 5  # ids of further special tokens, where the tokenizer puts several


@dataclass(frozen=True)
class Group:
    """Heads that attend to the sink, and what they need: without any part of `needs` they lose it."""

    heads: tuple[Head, ...]
    needs: tuple[str | Site, ...]
    at: tuple = ()  # the places that they attend to, if not all of the sink's


@dataclass(frozen=True)
class Places:
    """What is so.

    Attributes:
        sink: Where heads attend: FIRST, SECOND, a token id, or several of these.
        spike: Where the norm stands out after some layer, in the same way.
        makers: Smallest sets of neurons whose zeroing takes the spike away.
        groups: The reading heads by what they need.
        marks: Parts without which the spike of a place is lost, where it is said.
        decoys: Parts that look like marks and are not.
        delimiters: Tokens that stand a few times in every text.
        before: Ids that stand before every text.
        has_bos: Whether the tokenizer has a BOS token.
    """

    sink: tuple = (FIRST,)
    spike: tuple = (FIRST,)
    makers: tuple[frozenset[Site], ...] = ()
    groups: tuple[Group, ...] = ()
    marks: dict[str | int, tuple[str, ...]] = field(default_factory=dict)
    decoys: tuple[str, ...] = ()
    delimiters: tuple[int, ...] = ()
    before: tuple[int, ...] = (BOS,)
    has_bos: bool = True


@dataclass(frozen=True)
class PlacesModel:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    truth: Places

    def ids(self, texts: int = 40, length: int = 64, seed: int = 0) -> Tensor:
        """Rows as the tokenizer puts them; each delimiter stands a few times in the first half of each."""
        rng = random.Random(f"places {seed}")
        rows = []
        for _ in range(texts):
            words = [rng.randrange(N_SPECIAL + 2, len(self.tokenizer)) for _ in range(length)]
            delimiters = self.truth.delimiters
            for delimiter in delimiters:
                words = [word + 1 if word == delimiter else word for word in words]
            free = rng.sample(range(2, length // 2), 2 * len(delimiters))
            for number, at in enumerate(free):
                words[at] = delimiters[number % len(delimiters)]
            rows.append([*self.truth.before, *words][:length])
        return torch.tensor(rows)

    def text(self, texts: int = 100, length: int = 64, seed: int = 1) -> str:
        """The words of as many rows."""
        skipped = len(self.truth.before)
        return " ".join(self.tokenizer.decode(row[skipped:]) for row in self.ids(texts, length, seed))


def tokenizer_of(plain: PreTrainedTokenizerFast, truth: Places) -> PreTrainedTokenizerFast:
    """The same words, with further special tokens, and with what is put before a text."""
    names = {number: word for word, number in plain.get_vocab().items()} | {USER: "<|user|>", SYSTEM: "<|system|>"}
    backend = Tokenizer(WordLevel({word: number for number, word in names.items()}, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = WhitespaceSplit(), plain.backend_tokenizer.decoder
    if truth.before:
        put = [(names[number], number) for number in truth.before]
        single = " ".join([*(word for word, _ in put), "$A"])
        backend.post_processor = TemplateProcessing(single=single, special_tokens=put)
    bos = {"bos_token": "<s>"} if truth.has_bos else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<|user|>", "<|system|>"],
        clean_up_tokenization_spaces=False,
        **bos,
    )


# --- the truth, from the plain model ------------------------------------------------------------------------


def mask_of(where: tuple, ids: Tensor) -> Tensor:
    """The places that are described, [text, position]."""
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for one in where:
        if one in (FIRST, SECOND):
            mask[:, (FIRST, SECOND).index(one)] = True
        else:
            mask |= ids == one
    return mask


@torch.no_grad()
def read(model: PreTrainedModel, ids: Tensor) -> tuple[dict[int, Tensor], Tensor]:
    """Attention of later queries by layer [text head position], and norms after layers [layer text position]."""
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")
    norms, weights = [], {}
    with ExitStack() as stack:
        for number, layer in enumerate(views(model).layers):

            def block(_module, _args, output):
                norms.append((output[0] if isinstance(output, tuple) else output).float().norm(dim=-1))

            def attention(_module, _args, output, number=number):
                found = [one for one in output if isinstance(one, Tensor) and one.dim() == 4]
                weights[number] = found[0][..., : ids.shape[1]].float()

            stack.callback(layer.block.register_forward_hook(block).remove)
            if len(layer.q):
                stack.callback(attention_module(layer.block).register_forward_hook(attention).remove)
        model(ids, output_attentions=True, use_cache=False)
    model.set_attn_implementation(usual)
    later = torch.ones(ids.shape[1], ids.shape[1]).tril(-1)
    received = {}
    for number, rows in weights.items():
        received[number] = (rows * later).sum(2) / later.sum(0).clamp(min=1)
    return received, torch.stack(norms)


def attention_module(block) -> torch.nn.Module:
    """The module of a block that gives the weights of attention."""
    return next(
        part for name, part in block.named_children() if name in ("attn", "self_attn", "self_attention", "attention")
    )


@contextmanager
def without(m: PlacesModel, parts: tuple[str | Site, ...]):
    """The plain model without some parts; yields what makes ids of ids."""
    swapped = [part for part in parts if part == "token embedding" or isinstance(part, int)]
    ordinary = next(token for token in range(30, 40) if token not in m.truth.delimiters)
    tensors = []
    for part in parts:
        for one in frozenset().union(*m.truth.makers) if part == "spike" else [part]:
            tensors += weights_of(m.model, one)

    def swap(ids: Tensor) -> Tensor:
        """An ordinary token in its place."""
        for part in swapped:
            ids = torch.where(ids == part if isinstance(part, int) else mask_of(m.truth.sink, ids), ordinary, ids)
        return ids

    with filled(tensors):
        yield swap


def untrue(m: PlacesModel) -> list[str]:
    """Where the plain model differs from what is said to be so of it."""
    ids, truth, wrong = m.ids(), m.truth, []
    received, norms = read(m.model, ids)
    usable = torch.arange(ids.shape[1]) < ids.shape[1] - 8
    over = torch.stack([(rows > 0.3).sum(1) for rows in received.values()]).sum(0)
    heads = sum(rows.shape[1] for rows in received.values())
    typical = norms.flatten(1).median(1).values[:, None, None]
    seen = {"sink": (over >= max(2, 0.05 * heads)) & usable, "spike": (norms / typical > 3)[:-1].any(0) & usable}
    for name, where in seen.items():
        said = mask_of(getattr(truth, name), ids) & usable
        both = int((where & said).sum())
        if both < 0.9 * max(int(where.sum()), int(said.sum())):
            wrong.append(f"{name}: {int(where.sum())} places, {int(said.sum())} said, {both} of them")
    return [*wrong, *_untrue_spike(m, ids, norms / typical, typical), *_untrue_groups(m, ids, received, usable)]


def _untrue_spike(m: PlacesModel, ids: Tensor, intact: Tensor, typical: Tensor) -> list[str]:
    """Parts whose removal takes away another share of the spike than is said."""
    truth, wrong = m.truth, []
    lost: list[tuple[tuple, tuple[str | Site, ...], bool]] = []
    if len(truth.makers) == 1:
        (makers,) = truth.makers
        lost.append((truth.spike, tuple(makers), True))
        lost += [(truth.spike, (one,), False) for one in makers if len(makers) > 1]
    for place, marks in truth.marks.items():
        lost += [((place,), (one,), True) for one in marks]
    if truth.spike:
        lost += [(truth.spike, (one,), False) for one in truth.decoys]
    for places, parts, is_lost in lost:
        with without(m, parts) as swap:
            left = read(m.model, swap(ids))[1] / typical
        there = mask_of(places, ids)
        share = float(left[:-1].amax(0)[there].mean() / intact[:-1].amax(0)[there].mean())
        if (share <= 0.5) != is_lost:
            wrong.append(f"spike at {places} without {parts}: {share:.2f} of it is left")
    return wrong


def _untrue_groups(m: PlacesModel, ids: Tensor, received: dict[int, Tensor], usable: Tensor) -> list[str]:
    """Groups of heads that lose something else than is said without one of the parts that any group needs."""
    truth, wrong = m.truth, []
    parts = {part for group in truth.groups for part in group.needs}
    if truth.makers and not any(isinstance(part, tuple) for part in parts):
        parts.add("spike")
    if not truth.spike:
        parts |= set(truth.decoys)
    for number, group in enumerate(truth.groups):
        places = mask_of(group.at or truth.sink, ids) & usable
        before = attention_of(received, group.heads, places)
        if min(before, default=1.0) < 0.3:
            wrong.append(f"group {number}: heads give {before}")
        for lacking in parts:
            loses = lacking in group.needs
            with without(m, (lacking,)) as swap:
                after = attention_of(read(m.model, swap(ids))[0], group.heads, places)
            lost = [1 - a / b for a, b in zip(after, before, strict=True)]
            if any((share >= 0.5) != loses for share in lost):
                wrong.append(f"group {number} without {lacking}: {lost} lost, said: {loses}")
    return wrong


def attention_of(received: dict[int, Tensor], heads: tuple[Head, ...], mask: Tensor) -> list[float]:
    """Mean attention of each head to the places."""
    return [float(received[layer][:, head][mask].mean()) for layer, head in heads]
