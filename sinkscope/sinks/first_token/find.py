"""From any model to its sink neurons, proven by ablation (Yona et al. 2025, sections 4.2 and 4.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.models.target import Target
from sinkscope.results import Result
from sinkscope.sinks.first_token.ablation import Neuron, Proof, prove, prove_stage, set_drop_across
from sinkscope.sinks.first_token.around_sink import (
    first_token_attention,
    repeat_until_half,
    sink_rate,
    spike_dims,
    view_layer,
)
from sinkscope.sinks.first_token.layer import LayerView
from sinkscope.sinks.first_token.locate import setup, walk_far_enough
from sinkscope.sinks.first_token.tokens import pick_tokens
from sinkscope.sinks.first_token.walk import Progress, Walk
from sinkscope.text import text_rows

RATE_EPS, RATE_LENGTH, RATE_TEXTS = 0.3, 64, 100  # Gu et al. 2024


@dataclass(frozen=True)
class Stage:
    """A layer whose MLP builds the spike; share is what it adds over the first token's largest norm."""

    layer: int
    share: float


@dataclass(frozen=True)
class RepeatedToken:
    """A token and the first number of repetitions whose norm reaches half of the first token's; None: never."""

    token: str
    id: int
    repeats: int | None


@dataclass(frozen=True)
class Repeats:
    """Repetitions until a sink; median over the tokens that got there, and how many never did."""

    tokens: tuple[RepeatedToken, ...]
    median: float | None
    unreached: int
    max_repeats: int


@dataclass(frozen=True)
class SinkRate:
    """Share of (layer, head) whose mean attention to position 0 exceeds eps (Gu et al. 2024)."""

    eps: float
    length: int
    samples: int
    value: float


@dataclass(frozen=True)
class FirstTokenAttention:
    """Mean attention to the first token behind the sink: intact, causal neurons zeroed, random ones zeroed."""

    layers: tuple[int, ...]
    intact: float
    ablated: float
    control: float


@dataclass(frozen=True)
class Published:
    """What the literature says of this model, and whether the same was found."""

    source: str
    matches: bool


@dataclass(frozen=True, kw_only=True)
class FindSinks(Result):
    """Where the attention sink of a model is made. Lists over layers are None where a layer was not read.

    Attributes:
        sink_layer: the stage that adds most; None: the model has no sink.
        neurons: candidates, largest contribution first, with their proof.
        set_drop: share of the first token's norm that goes with all causal neurons together.
        set_control_drop: largest drop among 20 random draws of as many neurons.
        stages: every layer that builds the spike.
        residual_dims: massive activations of the first token at the sink layer, largest first (Sun et al. 2024).
        first_token_norm: L2 of the residual stream after each layer, first token (median over texts).
        typical_norm: median over later positions of typical text.
        typical_low: 5 % of the same.
        typical_high: 95 % of the same.
        layers_read: number of layers read.
        notebook_rule_layer: first layer with MLP norm above mean + 2 sd; None if none, or if not all were read.
        repeats: repetitions that make a repeated token a sink.
        attention: what zeroing does to the attention behind the sink layer.
        learned_sinks: the model has learned sink logits, which took part in every attention row.
        sink_rate: None where not all layers were read; over 100 texts, over 25 where layers are read from disk.
        published: None where nothing is published for the model.
    """

    kind: ClassVar[str] = "find-sinks"
    percent: ClassVar[tuple[str, ...]] = ("share", "ablation_drop", "repeat_drop", "control_drop")

    sink_layer: int | None
    neurons: tuple[Neuron, ...]
    set_drop: float | None
    set_control_drop: float | None
    stages: tuple[Stage, ...]
    residual_dims: tuple[int, ...]
    first_token_norm: tuple[float | None, ...]
    typical_norm: tuple[float | None, ...]
    typical_low: tuple[float | None, ...]
    typical_high: tuple[float | None, ...]
    layers_read: int
    notebook_rule_layer: int | None
    repeats: Repeats
    attention: FirstTokenAttention | None
    learned_sinks: bool
    sink_rate: SinkRate | None
    published: Published | None

    @property
    def causal(self) -> tuple[Neuron, ...]:
        """The neurons proven to make the sink."""
        return tuple(n for n in self.neurons if n.causal)

    def rows(self) -> list[dict[str, Any]]:
        """One row per candidate neuron."""
        names = (
            "layer",
            "expert",
            "neuron",
            "contribution_norm",
            "share",
            "ablation_drop",
            "repeat_drop",
            "control_drop",
            "causal",
        )
        return [{name: getattr(neuron, name) for name in names} for neuron in self.neurons]

    def summary(self) -> str:
        """What was found, in a few lines."""
        from sinkscope.sinks.first_token.summary import summary

        return summary(self)


def find_sinks(
    model: object = None,
    *,
    tokenizer: Any = None,
    bos: bool | None = None,
    text: str | Path | None = None,
    tokens: Sequence[str] | None = None,
    all_layers: bool = False,
    top_k: int = 8,
    max_repeats: int | None = None,
    texts: int = 4,
    seed: int = 0,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> FindSinks:
    """Find the layer and the neurons that make the attention sink, and prove them by ablation.

    Args:
        model: None (the bundled model), short name, hub id, folder, `.gguf` file, or a live model of any kind.
        tokenizer: for live models that carry none.
        bos: begin sequences with BOS; None: where the tokenizer has one.
        text: file of typical text; None: the neutral text that ships.
        tokens: strings to repeat, one token each; None: five words of the text.
        all_layers: read every layer of a model that is not in memory, too (late stages, sink rate, notebook's rule).
        top_k: candidates at the sink layer.
        max_repeats: largest number of repetitions tried; None: 1,024, or what the context holds.
        texts: pieces of 64 tokens of typical text.
        seed: of random draws and of the choice of words.
        revision: of a hub id.
        dtype: of the weights of a model given by name; None: float32 on a CPU, else bfloat16, layer by layer.
        device: for models given by name; None: the first cuda device if there is one.
        trust_remote_code: run code that comes with the checkpoint (it is then loaded whole).
        progress: called as `progress(what, done, total)`.

    A model given by name is streamed: its layers are read upward, a few in memory at a time, until the first token's
    norm has stayed flat for a third of the layers. A model without a sink is an answer: `sink_layer` is None.

    Raises:
        SinkscopeError: bad input; the message is one line and says what to do.
    """
    _check(top_k, max_repeats, seed, texts)
    made = setup(
        model,
        tokenizer=tokenizer,
        bos=bos,
        text=text,
        texts=texts,
        seed=seed,
        revision=revision,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        part=True,
    )
    start_id, ids = made.bos, made.ids
    if top_k > (width := made.target.d_mlp):
        raise SinkscopeError(f"--top-k {top_k} is more than the {width} neurons of a layer; give at most that")
    limit = _repeat_limit(made.target, max_repeats)
    words = pick_tokens(made.target.tokenizer, ids, tokens, seed)
    whole = all_layers or made.target.resident
    made, seen = walk_far_enough(made, whole=whole, progress=progress)
    target = made.target
    layer = seen.sink_layer()

    proof, repeats, attention, dims = Proof((), None, None, ()), Repeats((), None, 0, limit), None, []
    if layer is not None:
        generator = torch.Generator().manual_seed(seed)
        prefixes = [start_id if start_id is not None else _other(ids, w) for w in words]
        found = repeat_until_half(target, layer, words, prefixes, limit, progress)
        repeats = _repeats(target, words, found.repeats, limit)
        reached = found.view.rows(torch.tensor(found.reached)) if any(found.reached) else None
        proof = _proof(target, ids, layer, seen.stages(), top_k, generator, reached)
        attention = _attention(target, ids, layer, proof)
        dims = _dims(target, ids, layer)
    rate = _rate(target, made.text, start_id, progress) if whole else None
    return FindSinks(
        model=made.info(),
        settings={
            "bos": start_id is not None,
            "text": None if text is None else Path(text).name,
            "texts": len(ids),
            "tokens": None if tokens is None else list(tokens),
            "all_layers": all_layers,
            "top_k": top_k,
            "max_repeats": limit,
            "seed": seed,
            "revision": revision,
            "unknown_tokens": _unknown(target, ids),
        },
        provenance=made.provenance(),
        sink_layer=layer,
        neurons=proof.neurons,
        set_drop=proof.set_drop,
        set_control_drop=proof.set_control_drop,
        stages=tuple(Stage(i, seen.mlp_first[i] / max(seen.first)) for i in seen.stages()),
        residual_dims=tuple(dims),
        first_token_norm=_padded(seen, seen.first),
        typical_norm=_padded(seen, [t[1] for t in seen.typical]),
        typical_low=_padded(seen, [t[0] for t in seen.typical]),
        typical_high=_padded(seen, [t[2] for t in seen.typical]),
        layers_read=len(seen.first),
        notebook_rule_layer=seen.notebook_layer(),
        repeats=repeats,
        attention=attention,
        learned_sinks=target.adapter.learned_sinks,
        sink_rate=rate,
        published=_published(target, layer, proof.neurons, dims),
    )


def _check(top_k: int, max_repeats: int | None, seed: int, texts: int) -> None:
    if top_k < 1:
        raise SinkscopeError(f"--top-k {top_k}: at least one candidate is needed; give 1 or more")
    if max_repeats is not None and max_repeats < 1:
        raise SinkscopeError(f"--max-repeats {max_repeats}: at least one repetition is needed; give 1 or more")
    if seed < 0:
        raise SinkscopeError(f"--seed {seed} is negative; give 0 or more")
    if seed >= 1 << 63:
        raise SinkscopeError(f"--seed {seed} is too large; give a number below 2**63")
    if texts < 1:
        raise SinkscopeError(f"texts {texts}: at least one piece of text is needed; give 1 or more")


def _repeat_limit(target: Target, asked: int | None) -> int:
    largest = (target.max_positions or 1 << 30) - 1
    if asked is not None and asked > largest:
        raise SinkscopeError(
            f"--max-repeats {asked} does not fit the context of {target.max_positions} tokens; the largest is {largest}"
        )
    return min(1024, largest) if asked is None else asked


def _repeats(target: Target, words: list[int], found: list[int | None], limit: int) -> Repeats:
    rows = tuple(RepeatedToken(target.tokenizer.decode([w]), w, n) for w, n in zip(words, found, strict=True))
    got = sorted(n for n in found if n is not None)
    median = float(torch.tensor(got, dtype=torch.float64).quantile(0.5)) if got else None
    return Repeats(rows, median, len(found) - len(got), limit)


def _proof(
    target: Target,
    ids: Int[Tensor, "row pos"],
    layer: int,
    stages: list[int],
    top_k: int,
    generator: torch.Generator,
    repeated: LayerView | None,
) -> Proof:
    proof = prove(target, ids, layer, top_k, generator, repeated)
    others = [n for s in stages if s != layer for n in prove_stage(target, ids, s, layer, generator)]
    neurons = (*proof.neurons, *others)
    drop = proof.set_drop
    if any(n.causal and n.layer < layer for n in others):
        drop = set_drop_across(target, ids, layer, [n.site for n in neurons if n.causal])
    return Proof(neurons, drop, proof.set_control_drop, proof.controls)


def _attention(target: Target, ids: Int[Tensor, "row pos"], layer: int, proof: Proof) -> FirstTokenAttention | None:
    layers = list(range(layer + 1, min(layer + 4, target.n_layers)))
    sites = [n.site for n in proof.neurons if n.causal]
    if not layers or not sites:
        return None
    from sinkscope.interventions import Ablate

    row = ids[:1]
    values = [first_token_attention(target, row, layers)]
    for zeroed in (sites, list(proof.controls)):
        values.append(first_token_attention(target, row, layers, Ablate(sites=zeroed)))
    return FirstTokenAttention(tuple(layers), *values)


def _dims(target: Target, ids: Int[Tensor, "row pos"], layer: int) -> list[int]:
    view = view_layer(target, layer, ids, torch.ones_like(ids, dtype=torch.bool))
    return spike_dims(view.resid.unflatten(0, tuple(ids.shape))[:, 0].median(0).values, view.resid)


def _rate(target: Target, content: str, bos: int | None, progress: Progress | None) -> SinkRate | None:
    if target.max_positions is not None and target.max_positions < RATE_LENGTH:
        return None
    # A batch holds 128 MB in the widest place. Layers that are read from disk are read once: one, smaller batch.
    fitting = max(1, (1 << 25) // (RATE_LENGTH * target.d_mlp))
    texts, batch = (RATE_TEXTS, fitting) if target.resident else (RATE_TEXTS // 4, RATE_TEXTS)
    ids = text_rows(target.tokenizer, content, texts, RATE_LENGTH, bos)
    return SinkRate(RATE_EPS, RATE_LENGTH, len(ids), sink_rate(target, ids, RATE_EPS, progress, batch))


def _published(target: Target, layer: int | None, neurons: tuple[Neuron, ...], dims: list[int]) -> Published | None:
    from sinkscope.models.names import published_for

    known = published_for(target.name)
    if known is None:
        return None
    if known.neurons:
        found = {(n.layer, n.neuron) for n in neurons if n.causal}
        return Published(known.source, layer in known.layers and set(known.neurons) <= found)
    if known.residual_dims:
        return Published(known.source, set(known.residual_dims) <= set(dims))
    return None


def _unknown(target: Target, ids: Tensor) -> float:
    """Share of the typical text that the tokenizer does not know: repeated unknowns would be a repeated token."""
    unknown = getattr(target.tokenizer, "unk_token_id", None)
    return 0.0 if unknown is None else float((ids[:, 1:] == unknown).float().mean())


def _other(ids: Tensor, token: int) -> int:
    """A token of the text that stands first where there is no BOS; it must not be the repeated one."""
    return int(ids[ids != token][0])


def _padded(seen: Walk, values: list[float]) -> tuple[float | None, ...]:
    return (*values, *[None] * (seen.n_layers - len(values)))
