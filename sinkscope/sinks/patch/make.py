"""Makes a patch for an unknown model: finds the neurons, takes as few as suffice, verifies, and refuses to harm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import RefusedError, SinkscopeError
from sinkscope.files.notation import neuron_names
from sinkscope.interventions.base import Intervention
from sinkscope.interventions.sink_patch import SinkPatch
from sinkscope.measure import Option, Output, Positive, Result, Setup, measurement
from sinkscope.models.target import Target, norm_of
from sinkscope.models.text import text_rows
from sinkscope.sinks.first_token.attention_received import attention_received
from sinkscope.sinks.first_token.context import SinkContext
from sinkscope.sinks.first_token.layer_scan import LayerScan, scan_layers
from sinkscope.sinks.first_token.neurons import repeat_until_half, verify_neurons
from sinkscope.sinks.first_token.result import RATE_EPS, Member, Neuron
from sinkscope.sinks.first_token.sets import CANDIDATES, causal_sets
from sinkscope.sinks.patch.evaluate import Change, held_out, losses, perplexity_change, under
from sinkscope.sinks.tokens import pick_tokens, prefixes, repetition_limit
from sinkscope.trace.attention import attention_rows
from sinkscope.trace.run import trace

HEADROOM = 1.5  # times the 95 % quantile, which one position of ordinary text in twenty exceeds anyway
# Share of the first token's norm that is tolerated in later layers: a model that copies well is certain of a repeated
# token, so its last layers raise the norm a little, far below that of a sink.
SLACK = 0.03
MOST = 256  # sets that are tried, smaller ones first, before neurons are left out of the whole set one at a time
TAKEN = 0.05  # attention to the first token that repetition must take in a layer, for the layer to be compared
Verdict = Literal["made", "not-repaired", "refused", "no-sink", "no-repeats"]


@dataclass(frozen=True)
class PatchedNeuron(Member):
    """A neuron of the patch and its neutral value, the median of `hook_post` on typical text."""

    calibrated: float


@dataclass(frozen=True)
class Tried:
    """A set of causal neurons, and the largest norm that the repeated tokens used for the choice have under its patch.

    Attributes:
        neurons: The neurons of the set.
        norm: Largest norm of these tokens after the layer where the spike is complete.
        returns_in: First layer, from that one on, after which a norm is above the typical range. None if there is none.
        attention_taken_in: First layer in which these tokens still take attention from the first token. None if there
            is none, or if norms are not typical, in which case attention was not measured.
    """

    neurons: tuple[tuple[int, ...], ...]
    norm: float
    returns_in: int | None = None
    attention_taken_in: int | None = None


@dataclass(frozen=True)
class HeldOutToken:
    """A token that took no part in the choice, repeated `repeats` times. Norms are the largest after the first token.

    Attributes:
        token: The token as text.
        id: Token id.
        repeats: How often the token is repeated.
        intact: Largest norm after the first token without the patch.
        patched: The same with the patch.
        returns_in: First layer, there or later, after which its norm with the patch is above the typical range. None if
            there is none.
    """

    token: str
    id: int
    repeats: int
    intact: float
    patched: float
    returns_in: int | None = None


@dataclass(frozen=True)
class LaterLayer:
    """A layer from the one where the spike is complete to the last: the held-out tokens, intact and patched.

    Norms are the largest after the first token. Attention is the attention to the first token, averaged over heads and
    over the second half of the queries. It is None in the first of these layers, whose heads come before the spike.

    Attributes:
        layer: Layer number.
        ceiling: Norms up to this value count as typical.
        intact: Norm without the patch.
        patched: Norm with the patch.
        ordinary_attention: Attention on ordinary text of the same length.
        intact_attention: Attention on the repeated tokens without the patch.
        patched_attention: Attention on the repeated tokens with the patch.
    """

    layer: int
    ceiling: float
    intact: float
    patched: float
    ordinary_attention: float | None = None
    intact_attention: float | None = None
    patched_attention: float | None = None

    @property
    def attention(self) -> tuple[float, float]:
        """The attention that repetition takes from the first token, and how much of it the patch restores."""
        if self.ordinary_attention is None or self.intact_attention is None or self.patched_attention is None:
            return 0.0, 0.0
        taken = self.ordinary_attention - self.intact_attention
        return (taken, self.patched_attention - self.intact_attention) if taken > TAKEN else (0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class PatchMade(Result):
    """A patch and the evidence for it, or why there is none.

    Attributes:
        verdict: "made"; "not-repaired": repeated tokens remain sinks, or become sinks again in a later layer;
            "refused": the patch would harm; "no-sink": the model has no spike; "no-repeats": it has one, but repetition
            makes none. `reason` explains the verdict.
        reason: One sentence.
        neurons: The smallest set of causal neurons that suffices. For a refused patch, the set that was examined.
        causal: Number of neurons in the causal set that these were chosen from.
        sink_layer: Sink layer. None if there is no sink.
        layer: Layer where norms were read: the last layer that builds the spike.
        first_norm: The first token's norm in that layer.
        typical_low: The 5 % quantile of norms on typical text in that layer.
        typical_norm: The median of these norms.
        typical_high: Their 95 % quantile.
        ceiling: Norms up to this value count as typical: 1.5 times the 95 % quantile.
        tried: All sets that were tried, in order. The first is the empty set.
        unreached: Number of words that no repetition turned into a sink; they are no evidence about a patch.
        held_out: The tokens that the patch was verified with.
        later: These tokens in every layer from `layer` on.
        perplexity: Perplexity on pieces of typical text that took no part in the choice.
        limit: Largest relative increase of the perplexity that is accepted.
    """

    page: ClassVar[str] = "measure/patch"
    kind: ClassVar[str] = "patch-make"
    table_of: ClassVar[str] = "held_out"

    verdict: Verdict
    reason: str
    neurons: tuple[PatchedNeuron, ...] = ()
    causal: int = 0
    sink_layer: int | None = None
    layer: int | None = None
    first_norm: float | None = None
    typical_low: float | None = None
    typical_norm: float | None = None
    typical_high: float | None = None
    ceiling: float | None = None
    tried: tuple[Tried, ...] = ()
    unreached: int = 0
    held_out: tuple[HeldOutToken, ...] = ()
    later: tuple[LaterLayer, ...] = ()
    perplexity: Change | None = None
    limit: float

    @property
    def patch(self) -> SinkPatch:
        """The patch.

        Raises:
            SinkscopeError: No patch was made.
        """
        if self.verdict != "made":
            raise SinkscopeError(f"no patch was made for {self.model.name}: {self.reason}", page="no-sink")
        sites: dict[Any, float] = {n.site: n.calibrated for n in self.neurons}
        return SinkPatch(sites=tuple(sites), calibrated=sites, model=asdict(self.model))

    def conclusion(self) -> str:
        """Whether there is a patch, and its effect on held-out tokens and text."""
        if self.verdict == "not-repaired":
            return f"Not repaired, and no patch was made: {self.reason}"
        if self.verdict != "made" or self.perplexity is None or self.ceiling is None:
            return f"No patch was made: {self.reason}"
        rise = self.perplexity.difference / self.perplexity.before
        good = sum(t.returns_in is None and t.patched <= self.ceiling for t in self.held_out)
        before = sum(t.intact <= self.ceiling for t in self.held_out)
        return (
            f"A patch of {len(self.neurons)} neuron{'s' * (len(self.neurons) > 1)} repairs repetition: {good} of "
            f"{len(self.held_out)} held-out tokens keep a typical norm when they are repeated ({before} without the "
            f"patch), and the perplexity of held-out text changes by {rise:+.3%}."
        )

    def details(self) -> list[str]:
        """The neurons, and the evidence."""
        lines: list[str] = []
        if self.neurons:
            lines.append(
                f"The patch holds {neuron_names(self.neurons)}. The causal set has {self.causal}, and "
                f"{len(self.tried) - 1} of its subsets were tried."
            )
        if self.held_out and self.ceiling is not None:
            lines.append(
                f"Norms up to {self.ceiling:.4g} in layer {self.layer} count as typical; the first token's is "
                f"{self.first_norm:.4g}."
            )
        lines += self._later()
        if self.perplexity is not None:
            p = self.perplexity
            se = "" if p.se is None else f" +- {p.se / p.before:.3%}"
            lines.append(
                f"The patch changes the perplexity of held-out text from {p.before:.4g} to {p.after:.4g} "
                f"({p.difference / p.before:+.3%}{se}, where up to {self.limit:+.1%} is accepted)."
            )
        return lines

    def _later(self) -> list[str]:
        """The last layers of the model, and the layer in which repetition takes most attention."""
        if not self.later:
            return []
        high = max(self.later, key=lambda one: one.patched / one.ceiling)
        lines = [
            f"In layers {self.later[0].layer} to {self.later[-1].layer}, the largest norm of these tokens is at most "
            f"{high.patched / high.ceiling:.2g} times what counts as typical (layer {high.layer})."
        ]
        compared = [
            (one.ordinary_attention - one.intact_attention, one)
            for one in self.later
            if one.ordinary_attention is not None and one.intact_attention is not None
        ]
        taken, most = max(compared, default=(0.0, None), key=lambda pair: pair[0])
        if most is not None and taken > TAKEN:
            lines.append(
                f"Repetition takes most attention from the first token in layer {most.layer}: it is "
                f"{most.ordinary_attention:.3f} on ordinary text, {most.intact_attention:.3f} without the patch and "
                f"{most.patched_attention:.3f} with it."
            )
        return lines


def _check(tokens: Sequence[str] | None, **_: object) -> None:
    if tokens is not None and len(set(tokens)) < 2:
        raise SinkscopeError(
            f"{len(set(tokens))} token to repeat: at least two different ones are needed, one to choose the patch with "
            "and one to verify it"
        )


def _write(made: PatchMade, path: str) -> str | None:
    """A refusal is an error, because a script that goes on to use the patch must stop; "nothing to patch" is not."""
    if made.verdict in ("refused", "not-repaired"):
        what = "not repaired, and " * (made.verdict == "not-repaired")
        raise RefusedError(f"{what}no patch was written: {made.reason}", page="no-sink")
    if made.verdict != "made":
        return f"{Path(path).name} was not written: there is nothing to patch"
    return made.patch.save(path)


@measurement(
    group="Sinks",
    figure="sinkscope.figures.patch:draw_make",
    command="patch make",
    loading="whole",
    check=_check,
    quick={"words": 1, "max_repeats": 300, "pieces": 2, "length": 16},
    outputs=[Output("out", "Where the patch is written, if one is made.", _write, required=True, kind="sink-patch")],
    scan={
        "order": 48,
        "seconds": [2.6, 12.0],
        "quick": {"words": 2, "pieces": 4, "length": 64},
        "numbers": {"repeated token's norm under the patch": ["held_out.*.patched", "held_out.*.intact"]},
        "facts": {"a patch repairs repetition": "verdict"},
    },
)
def make_patch(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    words: Positive = 8,
    max_repeats: Annotated[int, Option(min=2)] | None = None,
    limit: Annotated[float, Option(min=0, max=1e6)] = 0.01,
    pieces: Annotated[int, Option(min=2)] = 32,
    length: Annotated[int, Option(min=8)] = 256,
    batch_size: Positive = 8,
) -> PatchMade:
    """Find the smallest set of causal neurons whose patch keeps repeated tokens from becoming sinks.

    The candidates are subsets of the smallest causal set of `find_sinks`. Each is tried in real passes under a
    `SinkPatch`, smaller sets first and, within one size, those with larger contributions first, until the norm of the
    repeated tokens stays typical in every later layer and later heads attend to the first token as in ordinary text.
    The patch is then verified on tokens that took no part in the choice and on held-out text. If the sink returns in a
    later layer, the verdict is that nothing is repaired; a patch that harms is refused. (Yona et al. 2025, section 5.3,
    patch the neurons of their Table 1 by hand.)

    Args:
        tokens: Words to repeat, one token each, at least two: every other one is held out. By default words of the
            text.
        words: Number of words to choose with; as many again are drawn to verify with.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.
        limit: Largest accepted relative increase of the perplexity on held-out text; 0.01 is 1 %.
        pieces: Number of pieces of held-out text.
        length: Tokens per piece.
        batch_size: Rows per pass.

    Example:
        sinkscope patch make --model llama-2-7b --out patch.json
    """
    target = setup.target
    most = repetition_limit(target, max_repeats)
    setup.record(max_repeats=most)
    fields: dict[str, Any] = {"limit": limit}
    seen = scan_layers(target, setup.ids, whole=True, progress=setup.progress)
    if (sink_layer := seen.sink_layer) is None:
        reason = "no MLP makes a norm spike at the first token, so there is nothing to patch."
        return PatchMade(verdict="no-sink", reason=reason, **fields)
    high = _Ceilings.of(seen)
    low, typical, top = high.typical[0]
    fields |= {"typical_low": low, "typical_norm": typical, "typical_high": top, "ceiling": float(high.ceilings[0])}
    fields |= {"sink_layer": sink_layer, "layer": high.layers[0], "first_norm": seen.first_norm[high.layers[0]]}
    drawn = pick_tokens(setup.tokenizer, setup.ids, tokens, setup.seed, 2 * words)
    starts = prefixes(setup, drawn)
    found = repeat_until_half(SinkContext.of(setup, seen), drawn, starts, most, setup.progress).repeats
    reached = [(w, p, n) for w, p, n in zip(drawn, starts, found, strict=True) if n is not None]
    fields["unreached"] = len(drawn) - len(reached)
    if len(reached) < 2:
        reason = (
            f"it has a sink, but {fields['unreached']} of {len(drawn)} words repeated {most} times make none, so there "
            "is nothing to patch or to verify with; a larger --max-repeats may find some."
        )
        return PatchMade(verdict="no-repeats", reason=reason, **fields)
    # Twice as many repetitions as the slowest word needs: well inside the sink, and no longer than that.
    count = min(most, 2 * max(n for _, _, n in reached))
    rows = torch.tensor([[p, *[w] * count] for w, p, _ in reached])
    candidates = _candidates(setup, seen)
    chosen, fields["tried"] = _smallest(setup, candidates, high, rows[::2], batch_size)
    fields["causal"] = len(candidates)
    if chosen is None:
        return PatchMade(verdict="not-repaired", reason=_no_set(high, fields["tried"]), **fields)
    fields["neurons"] = tuple(PatchedNeuron(n.layer, n.expert, n.neuron, n.neutral_post) for n in chosen)
    verify, patch = rows[1::2], _patch(chosen)
    intact, patched = (largest_norms(target, high, verify, edit, batch_size) for edit in (None, patch))
    fields["held_out"] = tuple(
        HeldOutToken(setup.tokenizer.decode([w]), w, count, float(before[0]), float(after[0]), high.first_above(after))
        for (w, _, _), before, after in zip(reached[1::2], intact, patched, strict=True)
    )
    after = _attention_to_first(target, high.layers[1:], verify, patch, batch_size)
    before = _attention_before(setup, high, verify, batch_size)
    fields["later"] = _later_layers(high, (intact, patched), (*before, after))
    ids = held_out(setup, pieces, length)
    read = [losses(target, ids, edit, batch_size, setup.progress) for edit in (None, patch)]
    change = fields["perplexity"] = perplexity_change(*read)
    return PatchMade(**_verdict(fields["held_out"], fields["later"], change, limit), **fields)


@dataclass(frozen=True)
class _Ceilings:
    """The layers from the last one that builds the spike to the end, and up to where a norm is typical in each.

    `typical` is 5 %, median and 95 % of the norms on typical text, `spike` the norm of the first token; `without` are
    dimensions that norms leave out.
    """

    layers: tuple[int, ...]
    typical: tuple[tuple[float, float, float], ...]
    spike: tuple[float, ...]
    without: tuple[int, ...]

    @classmethod
    def of(cls, seen: LayerScan) -> _Ceilings:
        layers = tuple(range(max(seen.stages), seen.n_layers))
        at = torch.tensor([0.05, 0.5, 0.95])
        typical = (seen.norms[i][:, 1:].flatten().quantile(at).tolist() for i in layers)
        spike = tuple(seen.first_norm[i] for i in layers)
        return cls(layers, tuple((low, mid, top) for low, mid, top in typical), spike, tuple(seen.shared_dims))

    @property
    def ceilings(self) -> Float[Tensor, " layer"]:
        slack = SLACK * torch.tensor(self.spike)
        slack[0] = 0.0  # the norm must be typical where the spike is made
        return (HEADROOM * torch.tensor([top for _, _, top in self.typical])).maximum(slack)

    def first_above(self, norms: Float[Tensor, " layer"]) -> int | None:
        """The first of the layers after which the norm is above the typical range; None if there is none."""
        above = (norms > self.ceilings).nonzero().flatten()
        return self.layers[int(above[0])] if len(above) else None


def _no_set(high: _Ceilings, tried: tuple[Tried, ...]) -> str:
    if len(tried) == 1:
        return "no neuron is causal, alone or in a set."
    best = max(tried[1:], key=lambda t: high.layers[-1] + 1 if t.returns_in is None else t.returns_in)
    if best.returns_in is None:
        return (
            f"in layer {best.attention_taken_in} repeated tokens still take the attention of the first token, "
            "whichever of the causal neurons are patched, although their norm is typical."
        )
    if best.returns_in == high.layers[0]:
        return "no set of the causal neurons suffices: the norm of repeated tokens does not fall to the typical range."
    return (
        f"the sink returns in layer {best.returns_in}, whichever of the causal neurons are patched: with the best set "
        f"the norm of repeated tokens is typical before that layer, and above the typical range after it."
    )


def _still_taken(later: tuple[LaterLayer, ...]) -> list[LaterLayer]:
    """The layers whose attention is not restored, if less than half of all attention that was taken is restored.

    Layers are judged together: in some, heads that attend to repeated tokens for another reason restore less than half.
    """
    taken, back = (sum(one.attention[i] for one in later) for i in (0, 1))
    return [one for one in later if one.attention[1] < one.attention[0] / 2] if back < taken / 2 else []


def _verdict(
    tokens: tuple[HeldOutToken, ...], later: tuple[LaterLayer, ...], change: Change, limit: float
) -> dict[str, Any]:
    rise = change.difference / change.before
    above = [t.returns_in for t in tokens if t.returns_in is not None]
    taken = _still_taken(later)
    if above:
        reason = (
            f"{len(above)} of {len(tokens)} held-out tokens have a norm above the typical range, the first of them "
            f"after layer {min(above)}."
        )
    elif taken:
        reason = (
            f"in layer {taken[0].layer} repeated tokens still take the attention: the first token receives "
            f"{taken[0].patched_attention:.3f} of it, and {taken[0].ordinary_attention:.3f} in ordinary text of the "
            "same length."
        )
    elif not rise <= limit:
        reason = f"it would harm: the perplexity on held-out text rises by {rise:.2%}, the limit is {limit:.2%}."
        return {"verdict": "refused", "reason": reason}
    else:
        return {
            "verdict": "made",
            "reason": "repeated tokens keep a typical norm, and ordinary text is read as before.",
        }
    return {"verdict": "not-repaired", "reason": reason}


@torch.no_grad()
def largest_norms(
    target: Target, high: _Ceilings, rows: Int[Tensor, "row pos"], edit: Intervention | None, batch_size: int
) -> Float[Tensor, "row layer"]:
    """For each row, the largest norm of the residual stream after the first position, after each of the layers."""
    sites = [f"blocks.{i}.hook_resid_post" for i in high.layers]
    with under(edit, target):
        got = trace(target, rows, sites, lambda r: norm_of(r, high.without)[:, 1:].amax(1), batch_size=batch_size)
    return torch.stack([got[site] for site in sites], 1)


def _attention_before(setup: Setup, high: _Ceilings, rows: Tensor, batch_size: int) -> list[dict[int, float]]:
    """Attention to the first token behind the spike: on ordinary text, and on the repeated tokens without a patch."""
    texts = (_ordinary(setup, rows), rows)
    return [_attention_to_first(setup.target, high.layers[1:], ids, None, batch_size) for ids in texts]


def _later_layers(
    high: _Ceilings,
    norms: tuple[Float[Tensor, "row layer"], Float[Tensor, "row layer"]],
    attention: Sequence[dict[int, float]],
) -> tuple[LaterLayer, ...]:
    """Repeated tokens in each layer: norms intact and patched; attention as in `_attention_before`, then patched."""
    sizes = [t.amax(0).tolist() for t in (high.ceilings[None], *norms)]
    return tuple(
        LaterLayer(layer, *(n[i] for n in sizes), *((a[layer] for a in attention) if i else ()))
        for i, layer in enumerate(high.layers)
    )


@torch.no_grad()
def _attention_to_first(
    target: Target, layers: Sequence[int], rows: Int[Tensor, "row pos"], edit: Intervention | None, batch_size: int
) -> dict[int, float]:
    """Mean attention to position 0, over rows, heads and the queries of the second half, where tokens are sinks."""
    half = rows.shape[1] // 2
    total = dict.fromkeys(layers, 0.0)

    def add(layer: int, first: int, probs: Tensor) -> None:
        late = probs[:, :, max(0, half - first) :, 0]
        total[layer] += float(late.double().sum()) / probs.shape[1]

    for batch in rows.split(batch_size) if layers else ():
        with under(edit, target), attention_rows(target, add, layers=list(layers)):
            target.forward(batch, upto=layers[-1])
    return {layer: value / (len(rows) * (rows.shape[1] - half)) for layer, value in total.items()}


def _ordinary(setup: Setup, rows: Int[Tensor, "row pos"]) -> Int[Tensor, "row pos"]:
    """Ordinary text as long as the rows: the typical text, or, where it is too short, its words in random order."""
    try:
        return text_rows(setup.tokenizer, setup.text, len(rows), rows.shape[1], setup.bos)
    except SinkscopeError:
        words = setup.ids[:, 1:].flatten()
        generator = torch.Generator().manual_seed(setup.seed)
        drawn = words[torch.randint(len(words), tuple(rows.shape), generator=generator)]
        return torch.cat([setup.ids[:1, :1].expand(len(rows), 1), drawn[:, 1:]], 1)


def _candidates(setup: Setup, seen: LayerScan) -> list[Neuron]:
    """The smallest causal set, largest contribution first; if none removes the spike, every causal neuron."""
    context = SinkContext.of(setup, seen)
    proof = verify_neurons(context, CANDIDATES)
    heads = attention_received(setup.target, setup.ids, RATE_EPS).heads
    found = causal_sets(context, proof.neurons, heads)
    return sorted(found.members or proof.causal, key=lambda n: -n.contribution_norm)


def _smallest(
    setup: Setup, candidates: list[Neuron], high: _Ceilings, rows: Tensor, batch_size: int
) -> tuple[tuple[Neuron, ...] | None, tuple[Tried, ...]]:
    """The smallest set whose patch keeps the norms below the ceilings, None if none does; and all sets tried.

    Not every subset of a large causal set can be tried. Neurons are then left out one after another, those that write
    least first, as long as the rest suffices.
    """
    tried: list[Tried] = []
    every, target = len(candidates), setup.target
    before: list[dict[int, float]] = []

    def suffices(some: Sequence[Neuron]) -> bool:
        edit = _patch(some) if some else None  # the empty set shows the norm without a patch
        norms = largest_norms(target, high, rows, edit, batch_size)
        above, taken = high.first_above(norms.amax(0)), None
        if edit is not None and above is None:
            before.extend([] if before else _attention_before(setup, high, rows, batch_size))
            after = _attention_to_first(target, high.layers[1:], rows, edit, batch_size)
            later = _later_layers(high, (norms, norms), (*before, after))
            taken = next((one.layer for one in _still_taken(later)), None)
        tried.append(Tried(tuple(n.site for n in some), float(norms[:, 0].max()), above, taken))
        setup.progress("sets of neurons", len(tried), min(2**every, MOST + every))
        return edit is not None and above is None and taken is None

    for size in range(every + 1):
        if len(tried) + comb(every, size) > MOST:
            break
        for some in combinations(candidates, size):
            if suffices(some):
                return some, tuple(tried)
    else:
        return None, tuple(tried)
    left = tuple(candidates)
    if not suffices(left):
        return None, tuple(tried)
    for neuron in reversed(candidates):
        rest = tuple(n for n in left if n is not neuron)
        left = rest if suffices(rest) else left
    return left, tuple(tried)


def _patch(neurons: Sequence[Neuron]) -> SinkPatch:
    return SinkPatch(sites=[n.site for n in neurons], calibrated={n.site: n.neutral_post for n in neurons})
