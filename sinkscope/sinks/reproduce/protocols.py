"""The protocols by which published quantities are measured: those of their sources, not the defaults of this package.

Texts begin with what the tokenizer itself puts before them, as the sources' scripts call it. They are pieces of the typical
text, which is not the sources' own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from sinkscope.hooks.trace.run import trace
from sinkscope.measure import PIECE, Setup
from sinkscope.models.checkpoints.published import Published
from sinkscope.models.checks import check_length, check_site
from sinkscope.models.draws import draws
from sinkscope.models.text import put_before, text_rows
from sinkscope.sinks.find.layer_scan import scan_layers
from sinkscope.sinks.find.neurons import stage_neurons
from sinkscope.sinks.find.repetitions import repeat_until_half
from sinkscope.sinks.find.survey import SinkContext
from sinkscope.sinks.tokens import TokenRows, known_token, vocabulary

LEAST, RATIO = 100, 1000  # a massive activation exceeds this, and this many times the median (Sun et al. 2024)
ABOVE, RATE_TEXTS = 0.3, 100  # mean attention of a head that has a sink, and texts (Gu et al. 2024)
SHARE_TEXTS, SHARE_LENGTH, SHARE_FROM = 300, 40, 3  # texts, their tokens and the first layer (arXiv 2604.14722)
CANDIDATES = 10  # neurons of a layer that are ablated: K in section 4.2 of Yona et al. 2025, which gives no number
REPEATED = ("cat", "dog", "the", "bla")  # words of Fig. 5 of Yona et al. 2025
TEXTS, AT_ONCE = 4, 50  # texts in which residual streams are read, and texts of attention in one pass


@dataclass(eq=False)
class Reading:
    """A model, and what several protocols read of it, each at most once."""

    setup: Setup

    def texts(self, count: int, length: int = PIECE) -> TokenRows:
        """Pieces of typical text, as many as there are; they begin as the tokenizer begins a text."""
        check_length(self.setup.target, "a text of the protocol", length)
        start = next(iter(put_before(self.setup.tokenizer)), None)
        return text_rows(self.setup.tokenizer, self.setup.text, count, length, start)

    @cached_property
    def context(self) -> SinkContext:
        """The first token of typical text, and the layers there."""
        ids = self.texts(TEXTS)
        return SinkContext.at_first(self.setup.target, ids, scan_layers(self.setup.target, ids, whole=True))

    @cached_property
    def hidden(self) -> Float[Tensor, "layer text kind d_model"]:
        """After each layer: whether a dimension of a text has a massive activation, and its value at position 0."""
        rows = trace(self.setup.target, self.texts(TEXTS), "blocks.*.hook_resid_post", _massive_and_first)
        return torch.stack(list(rows.values()))

    def to_first(self, ids: TokenRows) -> Float[Tensor, "layer text head query"]:
        """Attention of every query to position 0, in the layers that attend."""
        site = "blocks.*.attn.hook_pattern"
        rows = trace(self.setup.target, ids, site, lambda rows: rows[..., :1], batch_size=AT_ONCE)
        return torch.stack(list(rows.values()))[..., 0]


def _massive_and_first(resid: Float[Tensor, "text pos d_model"]) -> Float[Tensor, "text kind d_model"]:
    size = resid.float().abs()
    median = rearrange(size.flatten(1).median(1).values, "text -> text 1 1")
    massive = (size > LEAST) & (size > RATIO * median)
    return torch.stack([massive.any(1).float(), resid[:, 0].float()], 1)


def layers(reading: Reading, _: Published) -> list[int]:
    """The layer whose MLP adds most to the norm of the first token."""
    return [layer for layer in [reading.context.scan.sink_layer] if layer is not None]


def neurons(reading: Reading, record: Published) -> list[tuple[int, ...]]:
    """Of the ten neurons of each layer that write most at the first token, those without which its norm falls."""
    found: list[tuple[int, ...]] = []
    for layer in dict(record.value):
        check_site(reading.setup.target, layer)
        for neuron in stage_neurons(reading.context, layer, CANDIDATES, upto=layer):
            if neuron.causal:
                found.append(neuron.site)
    return found


def residual_dims(reading: Reading, _: Published) -> list[int]:
    """Dimensions with |a| > 100 and > 1000 x the median |hidden state|, at any position after any layer."""
    return reading.hidden[:, :, 0].amax((0, 1)).nonzero().flatten().tolist()


def massive_layers(reading: Reading, _: Published) -> list[int]:
    """The first and the last layer after which there is such a massive activation."""
    after = reading.hidden[:, :, 0].amax((1, 2)).nonzero().flatten().tolist()
    return [*after[:1], *after[-1:]]


def massive_values(reading: Reading, record: Published) -> list[list[float]]:
    """Values at position 0 after the first layer with a massive activation, or else layer 0; mean over texts."""
    layer = [*massive_layers(reading, record), 0][0]
    values = reading.hidden[layer, :, 1].mean(0).tolist()
    return [[dim, round(values[dim], 2)] for dim, _ in record.value if dim < len(values)]


def repeats(reading: Reading, record: Published) -> float | None:
    """Copies of "cat", "dog", "the" or "bla" until the norm is half of the first token's; median over these words."""
    words = [known_token(reading.setup.tokenizer, word) for word in REPEATED]
    tokens = [word for word in words if word is not None]
    if reading.context.scan.sink_layer is None:
        return None
    first = [int(reading.context.ids[0, 0])] * len(tokens)
    return repeat_until_half(reading.context, tokens, first, 2 * record.value).median


def sink_rate(reading: Reading, record: Published) -> float:
    """Share of heads with mean attention to position 0 above 0.3: 100 texts, or random or repeated tokens, 64 long."""
    ids = reading.texts(RATE_TEXTS)
    if record.quantity != "sink_rate":
        every = torch.tensor(vocabulary(reading.setup.target))
        generator = draws(reading.setup.seed, record.quantity)
        ids = every[torch.randint(len(every), (RATE_TEXTS, PIECE), generator=generator)]
    if record.quantity == "sink_rate_repeated":
        ids = ids[:, :1].expand(-1, PIECE)
    return float((reading.to_first(ids).mean(-1) > ABOVE).float().mean())


def attention_to_first(reading: Reading, _: Published) -> float:
    """Mean attention to position 0 from the second half of 300 texts of 40 tokens, layers 3 to the last but one."""
    check_site(reading.setup.target, SHARE_FROM + 1)
    to_first = reading.to_first(reading.texts(SHARE_TEXTS, SHARE_LENGTH))
    return float(to_first[SHARE_FROM:-1, ..., SHARE_LENGTH // 2 :].mean())


PROTOCOLS: dict[str, Callable[[Reading, Published], Any]] = {
    "layers": layers,
    "neurons": neurons,
    "residual_dims": residual_dims,
    "massive_layers": massive_layers,
    "massive_values": massive_values,
    "repeats": repeats,
    "sink_rate": sink_rate,
    "sink_rate_random": sink_rate,
    "sink_rate_repeated": sink_rate,
    "attention_to_first": attention_to_first,
}
"""How each quantity is measured; the docstring of a function is its protocol."""
