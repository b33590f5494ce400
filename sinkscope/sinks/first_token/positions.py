"""A text as the model sees it: the norm of each token, the sink neurons, and the attention each token receives."""

from __future__ import annotations

import html
import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.notation import neuron_name, read_neuron
from sinkscope.files.output import read_text
from sinkscope.files.plain import visible
from sinkscope.interventions.edits import site_of
from sinkscope.measure import Count, Option, Result, Setup, measurement
from sinkscope.models.target import norm_of
from sinkscope.models.text.chat import chat_text
from sinkscope.sinks.first_token.context import SinkContext
from sinkscope.sinks.first_token.layer_scan import SPIKE_RATIO, scan_layers
from sinkscope.sinks.first_token.layer_view import flat_number, view_layer
from sinkscope.sinks.first_token.neurons import verify_sink_layer
from sinkscope.trace.attention import attention_rows
from sinkscope.trace.run import trace

SINK_SHARE = 0.5  # a token's norm spikes from this share of the first token's on (Yona et al. 2025)
CANDIDATES = 8  # neurons of the sink layer to ablate
SHOWN = 36  # rows of the table
KINDS = {
    "BOS": "BOS",
    "special": "special tokens",
    "template": "tokens of the chat template",
    "delimiter": "delimiters",
    "word": "other tokens",
}
_COLOURS = {"norm": "0,114,178", "attention": "230,159,0", "largest": "230,159,0", "neuron": "0,158,115"}


@dataclass(frozen=True)
class TextToken:
    """A token of the text.

    Attributes:
        text: The token as it stands in the text, with the space before it.
        id: Its id in the vocabulary.
        kind: "BOS", "special", "template" (written by the chat template), "delimiter" (contains no letter and no digit)
            or "word".
    """

    text: str
    id: int
    kind: str


@dataclass(frozen=True)
class NeuronValues:
    """`hook_post` of a neuron at every position (in a mixture, times the routing weight)."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class TokenPositions(Result):
    """Norm, neuron values and attention received for every token of a text.

    Attributes:
        tokens: The tokens of the text.
        layer: Layer that the table and the conclusion report: the sink layer, if there is one.
        sink_layer: The layer whose MLP makes the first token's norm spike. None if no MLP does.
        norm: L2 norm of the residual stream after each layer, without `shared_dims`.
        attention: Attention that each position receives, averaged over heads and all later queries; NaN at the last
            position.
        largest: The same from the head that gives it most.
        uniform: Attention the position would receive if every query attended to all positions equally.
        first_norm: Norm of BOS in each layer (of first tokens of typical text, if the tokenizer has no BOS).
        typical_norm: Median norm over later positions of typical text, in each layer.
        bos: Whether `first_norm` is the norm of BOS.
        shared_dims: Residual dimensions that are massive on all tokens and would hide a spike; usually there are none.
        neurons: Values of the sink neurons (if none is causal, of those that write most), or of those requested.
    """

    kind: ClassVar[str] = "positions"
    percent: ClassVar[tuple[str, ...]] = ("of_first",)
    glossary: ClassVar[dict[str, str]] = {
        "norm": "norm after the sink layer",
        "of_first": "norm over that of BOS, or of a first token without BOS",
        "attention": "attention that the position receives in later layers, mean over heads and later queries",
        "largest_head": "the same for the head that gives it most",
        "uniform": "attention it would receive if every query attended to all positions alike",
    }

    tokens: tuple[TextToken, ...]
    layer: int
    sink_layer: int | None
    norm: Float[np.ndarray, "layer pos"]
    attention: Float[np.ndarray, "layer pos"]
    largest: Float[np.ndarray, "layer pos"]
    uniform: Float[np.ndarray, " pos"]
    first_norm: tuple[float, ...]
    typical_norm: tuple[float, ...]
    bos: bool
    shared_dims: tuple[int, ...]
    neurons: tuple[NeuronValues, ...]

    def spiking(self, layer: int) -> tuple[int, ...]:
        """Positions whose norm spikes after a layer: half of the first token's or more, and three times the typical."""
        usual, first = self.typical_norm[layer], self.first_norm[layer]
        bar = SPIKE_RATIO * usual if first <= SPIKE_RATIO * usual else max(SINK_SHARE * first, SPIKE_RATIO * usual)
        return tuple(int(i) for i in np.flatnonzero(self.norm[layer] >= bar))

    @property
    def high(self) -> tuple[int, ...]:
        """Positions whose norm spikes after `layer`."""
        return self.spiking(self.layer)

    @property
    def elsewhere(self) -> dict[int, int]:
        """Other positions whose norm spikes, and the first layer after which it does so."""
        layers = reversed(range(len(self.norm)))
        return {i: layer for layer in layers for i in self.spiking(layer) if i not in self.high}

    @property
    def received(self) -> Float[np.ndarray, "row pos"]:
        """Attention that each position receives in the layers after `layer`: mean over heads, and the largest head."""
        after = slice(self.layer + 1, None) if self.layer + 1 < len(self.norm) else slice(None)
        return np.stack([self.attention[after].mean(0), self.largest[after].max(0)])

    def rows(self) -> list[dict[str, Any]]:
        """One row per token."""
        mean, largest = self.received
        return [
            {
                "position": i,
                "token": repr(token.text),
                "kind": token.kind,
                "norm": float(self.norm[self.layer, i]),
                "of_first": float(self.norm[self.layer, i] / self.first_norm[self.layer]),
                "attention": None if np.isnan(mean[i]) else float(mean[i]),
                "largest_head": None if np.isnan(mean[i]) else float(largest[i]),
                "uniform": None if np.isnan(mean[i]) else float(self.uniform[i]),
                **{neuron.name: neuron.values[i] for neuron in self.neurons},
            }
            for i, token in enumerate(self.tokens)
        ]

    def shown_rows(self) -> list[dict[str, Any]]:
        """The rows of the tokens with the largest norm, and of those that receive most attention."""
        rows = self.rows()
        if len(rows) <= SHOWN:
            return rows
        most = np.argsort(-self.norm[self.layer])[: SHOWN // 2].tolist()
        given = np.argsort(-np.nan_to_num(self.received[0])).tolist()
        kept = [*most, *(i for i in given if i not in most)][:SHOWN]
        return [rows[i] for i in sorted(kept)]

    def conclusion(self) -> str:
        """Which tokens' norms spike, beside the others and typical text."""
        norms, i = self.norm[self.layer], self.layer
        usual, first = self.typical_norm[i], f"{'BOS' if self.bos else 'a first token'} has {self.first_norm[i]:.4g}"
        high = self.high
        if not high:
            top = int(norms.argmax())
            return (
                f"No token's norm spikes in this text: the largest after layer {i} is {norms[top]:.4g}, of "
                f"{self._named(top)}; {first} there, and typical text has {usual:.4g}."
            )
        rest = np.delete(norms, high)
        more = len(high) > 1
        others = f"; the others have {np.median(rest):.4g} in the median" if len(rest) else ""
        return (
            f"After layer {i}, {len(high)} of {len(self.tokens)} tokens ha{'ve' if more else 's'} a norm spike: "
            f"{', '.join(f'{self._named(p)} ({norms[p]:.4g})' for p in high[:6])}{' ...' if len(high) > 6 else ''}"
            f"{others}, {first}, and typical text has {usual:.4g}."
        )

    def _named(self, position: int) -> str:
        return f"{self.tokens[position].text!r} at {position}"

    def details(self) -> list[str]:
        """The model, the neurons, what receives most attention, and norms and attention by kind of token."""
        mean = self.received[0]
        lines = [f"The text has {len(self.tokens)} token{'s' * (len(self.tokens) > 1)}."]
        if self.sink_layer is None:
            lines.append("No MLP makes a norm spike of the first token.")
        if self.shared_dims:
            dims = ", ".join(map(str, self.shared_dims))
            lines.append(f"Norms leave out residual dimensions {dims}, which are massive on all tokens.")
        if late := sorted(self.elsewhere.items()):
            named = ", ".join(f"{self._named(i)} ({self.norm[at, i]:.4g} after layer {at})" for i, at in late[:6])
            lines.append(f"After other layers, {len(late)} more have a norm spike: {named}{' ...' * (len(late) > 6)}.")
        if self.neurons:
            lines.append(f"The table shows the hook_post values of {', '.join(n.name for n in self.neurons)}.")
        above = [i for i in np.argsort(self.uniform - mean).tolist() if mean[i] > self.uniform[i]][:3]
        if above:
            most = ", ".join(f"{self._named(i)} ({mean[i]:.3f}, uniform {self.uniform[i]:.3f})" for i in above)
            where = f"behind layer {self.layer}" if self.layer + 1 < len(self.norm) else "in all layers"
            lines.append(f"Attention received {where} is most above uniform for {most}.")
        for kind, what in KINDS.items():
            there = [i for i, t in enumerate(self.tokens) if t.kind == kind and not np.isnan(mean[i])]
            if there:
                norm = float(np.median(self.norm[self.layer, there])) / self.typical_norm[self.layer]
                lines.append(
                    f"{what[0].upper()}{what[1:]} ({len(there)}): median norm {norm:.3g} times the typical one, mean "
                    f"attention received {mean[there].mean():.4f} (uniform {self.uniform[there].mean():.4f})."
                )
        return lines

    def inset(self) -> str:
        """The text with its tokens shaded by norm, attention or neuron."""
        return _page(self)


@measurement(
    group="Sinks",
    figure="sinkscope.figures.first_token:draw_positions",
    command="positions",
    quick={"passage": "the first token takes it all"},
    check=lambda passage, file, **_: _refuse(passage, file),
)
def token_positions(
    setup: Setup,
    passage: Annotated[str | None, Option(argument=True, metavar="TEXT")] = None,
    *,
    file: Annotated[str | Path | None, Option(metavar="FILE|-")] = None,
    chat: bool = False,
    layer: Count | None = None,
    neurons: Sequence[str] | None = None,
) -> TokenPositions:
    """Look at a text: norm, sink neurons and attention received of every token, layer by layer.

    The page (--html) shows the text shaded by norm, by attention or by a neuron, with a choice of layer. Attention
    received is the mean over heads and over all later queries. A token's norm spikes if it is at least half of BOS's
    after the sink layer (Yona et al. 2025, Table 1). Without a text, a piece of the typical text is read.

    Args:
        passage: The text.
        file: File that contains the text; - is standard input.
        chat: Put the text into the tokenizer's chat template as the user's message.
        layer: Layer that the table reports. By default the sink layer.
        neurons: Neuron to show, such as L1.N338, or L3.E2.N7 in a mixture. By default those that make the sink.

    Example:
        sinkscope positions "Sch Com" --model llama-2-7b --no-bos
    """
    target = setup.target
    target.check_site(layer or 0)
    asked = [site_of(read_neuron(name)) for name in neurons or ()]
    for site in asked:
        target.check_site(*site)
    given = read_text(str(file)) if file is not None else passage
    words = _words(setup, given, chat)
    target.check_length("the text", len(words))
    setup.record(passage=None)  # the result contains the tokens instead
    own, pieces = getattr(setup.tokenizer, "bos_token_id", None), setup.ids
    if setup.bos is None and own is not None:  # spikes are compared with BOS even if the text has none
        pieces = torch.cat([torch.full((len(pieces), 1), own), pieces[:, :-1]], 1)
    seen = scan_layers(target, pieces, whole=True, progress=setup.progress)
    found, sites = seen.sink_layer, [site.numbers for site in asked]
    if found is not None and not asked:
        proof = verify_sink_layer(replace(SinkContext.of(setup, seen), ids=pieces), CANDIDATES)
        sites = [n.site for n in proof.causal or proof.neurons[:2]]
    ids = torch.tensor([[token.id for token in words]])
    norm, total = _pass(setup, ids, seen.shared_dims)
    later = torch.arange(len(words) - 1, -1, -1)
    received = torch.where(later > 0, total / later.clamp(min=1), torch.nan)  # layer head pos
    uniform = torch.cat([(1 / torch.arange(1.0, len(words) + 1)).flip(0).cumsum(0).flip(0)[1:], torch.zeros(1)])
    shown = found if layer is None else layer
    if shown is None:
        shown = int((norm.amax(1) / torch.tensor(seen.typical_norm)).argmax())
    return TokenPositions(
        tokens=tuple(words),
        layer=shown,
        sink_layer=found,
        norm=norm.numpy(),
        attention=received.mean(1).numpy(),
        largest=received.amax(1).numpy(),
        uniform=torch.where(later > 0, uniform / later.clamp(min=1), torch.nan).numpy(),
        first_norm=tuple(seen.first_norm),
        typical_norm=tuple(seen.typical_norm),
        bos=own is not None,
        shared_dims=tuple(seen.shared_dims),
        neurons=tuple(_values(setup, ids, sites)),
    )


def _refuse(passage: str | None, file: object) -> None:
    if passage is not None and file is not None:
        raise SinkscopeError("the text is given twice: give either TEXT or --file")
    if passage is not None and not passage.strip():
        raise SinkscopeError("the text is empty: give at least one word")


def _words(setup: Setup, given: str | None, chat: bool) -> list[TextToken]:
    """The tokens of the text, with BOS and the chat template if requested."""
    tokenizer, special = setup.tokenizer, set(setup.tokenizer.all_special_ids)
    own = getattr(tokenizer, "bos_token_id", None)
    if given is None:
        given = str(tokenizer.decode(setup.ids[0, int(setup.bos is not None) :]))
    if not given.strip():
        raise SinkscopeError("the text is empty: give at least one word")
    text, begin, inside = given, setup.bos, (0, len(given))
    if chat:  # the user's message is inside the filled template, which may have trimmed it
        text, begin = chat_text(tokenizer, [{"role": "user", "content": given}], setup.target.name), None
        start = max(0, text.find(given.strip()))
        inside = (start, start + len(given.strip()))
    ids, ends = _tokenized(tokenizer, text)
    if ids and all(i == getattr(tokenizer, "unk_token_id", None) for i in ids):
        raise SinkscopeError("the tokenizer of this model knows nothing of the text: give another one")
    if chat and setup.bos is None and ids[:1] == [own]:  # --no-bos
        ids, ends = ids[1:], ends[1:]
    found = [TextToken(str(tokenizer.decode([begin])), begin, "BOS")] if begin not in (None, *ids[:1]) else []
    last = 0
    for i, end in zip(ids, ends, strict=True):
        piece = text[last:end]
        last = max(last, end)
        spelled = piece or str(tokenizer.convert_ids_to_tokens(i))
        if i in special:
            kind = "BOS" if i == own and not found else "special"
        elif not inside[0] < end <= inside[1]:
            kind = "template"
        else:
            kind = "delimiter" if _delimits(spelled) else "word"
        found.append(TextToken(spelled, i, kind))
    return found


def _tokenized(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Ids, and for each the position in the text where it ends."""
    options: dict[str, Any] = {"add_special_tokens": False, "verbose": False}
    if getattr(tokenizer, "is_fast", False):
        got = tokenizer(text, return_offsets_mapping=True, **options)
        return [int(i) for i in got["input_ids"]], [int(end) for _, end in got["offset_mapping"]]
    ids = [int(i) for i in tokenizer(text, **options)["input_ids"]]
    ends, last = list[int](), 0
    for i in ids:  # each token is searched for after the previous one
        word = str(tokenizer.decode([i])).strip()
        at = text.find(word, last) if word else -1
        last = at + len(word) if at >= 0 else last
        ends.append(last)
    return ids, ends


def _delimits(word: str) -> bool:
    """Punctuation, symbols and line ends: nothing in it is a letter, a digit or a part of a character."""
    return all(unicodedata.category(c)[0] in "PSZC" and c != "\ufffd" for c in word)


@torch.no_grad()
def _pass(
    setup: Setup, ids: Int[Tensor, "1 pos"], without: Sequence[int]
) -> tuple[Float[Tensor, "layer pos"], Float[Tensor, "layer head pos"]]:
    """Norm after each layer, and per head the sum of the attention that each position gets from later queries."""
    target = setup.target
    total = torch.zeros(target.n_layers, target.n_heads, ids.shape[1])

    def add(layer: int, first: int, probs: Tensor) -> None:
        total[layer] += probs[0].tril(first - 1).sum(1).cpu()
        setup.progress("layers", layer + 1, target.n_layers)

    with attention_rows(target, add):
        got = trace(target, ids, ["blocks.*.hook_resid_post"], lambda resid: norm_of(resid, without))
    return torch.cat(list(got.values())), total


def _values(setup: Setup, ids: Int[Tensor, "1 pos"], sites: Sequence[tuple[int, ...]]) -> list[NeuronValues]:
    """`hook_post` of the neurons at every position; one pass per layer."""
    found: dict[tuple[int, ...], tuple[float, ...]] = {}
    for layer in dict.fromkeys(site[0] for site in sites):
        post = view_layer(setup.target, layer, ids, torch.ones_like(ids, dtype=torch.bool)).post
        for site in (s for s in sites if s[0] == layer):
            flat = flat_number(setup.target, layer, site[1] if len(site) == 3 else None, site[-1])
            found[site] = tuple(post[:, flat].tolist())
    return [NeuronValues(neuron_name(*site), found[site]) for site in sites]


def _share(result: TokenPositions, position: int) -> float:
    """How dark a token is shown at first: its norm after the layer, scaled from the typical to the largest one."""
    norms, usual = result.norm[result.layer], result.typical_norm[result.layer]
    top = max(float(norms.max()), SPIKE_RATIO * usual)
    return min(1.0, max(0.0, float(norms[position] - usual) / (top - usual)))


def _page(result: TokenPositions) -> str:
    """The text with its tokens shaded; a script updates the shading for another number or layer."""
    choices = {"norm": "norm", "attention": "attention received (mean of heads)"}
    choices |= {"largest": "attention received (largest head)"}
    choices |= {f"{i}": neuron.name for i, neuron in enumerate(result.neurons)}
    options = "".join(f'<option value="{value}">{html.escape(name)}</option>' for value, name in choices.items())
    spans = []
    for i, token in enumerate(result.tokens):
        words = html.escape(visible(token.text)).replace("\n", "\u21b5\n").replace("\t", "\u21e5")
        shade = f"background:rgba({_COLOURS['norm']},{0.7 * _share(result, i):.3f})"
        edge = "" if token.kind in ("word", "delimiter") else ";outline:1px dotted"
        spans.append(f'<span class="t" style="{shade}{edge};border-radius:2px">{words}</span>')
    data = {
        "norm": _short(result.norm),
        "attention": _short(result.attention),
        "largest": _short(result.largest),
        "typical": [float(f"{v:.4g}") for v in result.typical_norm],
        "neurons": [[float(f"{v:.4g}") for v in neuron.values] for neuron in result.neurons],
        "kinds": [token.kind for token in result.tokens],
        "colours": _COLOURS,
        "ratio": SPIKE_RATIO,
    }
    packed = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<div><p><label>shade by <select aria-label="shade by">{options}</select></label> '
        f'<label>layer <input type="range" min="0" max="{len(result.norm) - 1}" value="{result.layer}"></label> '
        f'<output>layer {result.layer}</output></p><p style="white-space:pre-wrap;overflow-wrap:anywhere;'
        f'line-height:1.9">{"".join(spans)}</p>'
        f'<script type="application/json">{packed}</script><script>{_SCRIPT}</script></div>'
    )


def _short(values: Float[np.ndarray, "layer pos"]) -> list[list[float | None]]:
    return [[None if np.isnan(v) else float(f"{v:.4g}") for v in row] for row in values]


_SCRIPT = """
(() => {
  const box = document.currentScript.parentElement, data = JSON.parse(box.querySelector("script").textContent);
  const by = box.querySelector("select"), layer = box.querySelector("input"), out = box.querySelector("output");
  const spans = [...box.querySelectorAll("span.t")];
  function shade() {
    const l = +layer.value, what = by.value, own = data.neurons[what];
    const values = own ?? data[what][l], sizes = values.map((v) => Math.abs(v ?? 0));
    const low = what === "norm" ? data.typical[l] : 0, top = Math.max(...sizes, what === "norm" ? data.ratio * low : 0);
    layer.disabled = Boolean(own);
    out.textContent = own ? "" : "layer " + l + (what === "norm" ? ", typical norm " + low : "");
    spans.forEach((span, i) => {
      const part = what === "norm" || own ? (sizes[i] - low) / (top - low || 1) : Math.sqrt(sizes[i]);
      const colour = data.colours[own ? "neuron" : what];
      span.style.background = "rgba(" + colour + "," + 0.7 * Math.min(1, Math.max(0, part)) + ")";
      const lines = ["position " + i + ", " + data.kinds[i], by.selectedOptions[0].text + ": " + (values[i] ?? "-")];
      if (!own) lines.push("norm " + data.norm[l][i], "attention " + (data.attention[l][i] ?? "-"));
      span.title = lines.join("\\n");
    });
  }
  by.addEventListener("change", shade);
  layer.addEventListener("input", shade);
  shade();
})();
"""
