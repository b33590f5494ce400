"""A patch for a model nobody has looked at: find the neurons, take as few as suffice, verify, and refuse to harm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Intervention
from sinkscope.interventions.sink_patch import SinkPatch
from sinkscope.models.target import Target, first_tensor
from sinkscope.progress import silent
from sinkscope.results import Result
from sinkscope.sinks.first_token.ablation import Neuron, numbers, prove
from sinkscope.sinks.first_token.locate import Setup, setup
from sinkscope.sinks.first_token.tokens import pick_tokens
from sinkscope.sinks.first_token.walk import Progress, Walk, repeat_until_half, walk
from sinkscope.sinks.patch.loss import Change, held_out, losses, perplexity_change, whole

HEADROOM = 1.5  # times the 95 % line: one position of ordinary text in twenty lies above that line anyway
TOP_K = 8
Verdict = Literal["made", "refused", "no-sink", "no-repeats"]


@dataclass(frozen=True)
class PatchedNeuron:
    """A neuron of the patch and its neutral value, the median of `hook_post` on typical text."""

    layer: int
    expert: int | None
    neuron: int
    calibrated: float

    @property
    def site(self) -> tuple[int, ...]:
        """(layer, neuron) or (layer, expert, neuron), as interventions take it."""
        return numbers(self.layer, self.expert, self.neuron)


@dataclass(frozen=True)
class Tried:
    """A set of causal neurons, and the largest norm of the repeated tokens it was chosen with, under its patch."""

    neurons: tuple[tuple[int, ...], ...]
    norm: float


@dataclass(frozen=True)
class HeldOutToken:
    """A token that took no part in the choice, repeated `repeats` times; norms are the largest after the first token.

    Attributes:
        token: as text.
        id: its id.
        repeats: length of the repetition.
        intact: without the patch.
        patched: with it.
    """

    token: str
    id: int
    repeats: int
    intact: float
    patched: float


@dataclass(frozen=True, kw_only=True)
class PatchMade(Result):
    """A patch and the evidence for it, or why there is none.

    Attributes:
        verdict: "made"; "refused": `reason` says why; "no-sink": the model has none; "no-repeats": it has one, but
            repetition makes none.
        reason: one sentence.
        neurons: the smallest set of causal neurons that suffices; of a refused patch, the set that was examined.
        causal: number of causal neurons it was chosen from.
        sink_layer: None: no sink.
        layer: where norms were read: the last layer that builds the spike.
        first_norm: the first token's norm there.
        typical_low: 5 % of the norms on typical text there.
        typical_norm: their median.
        typical_high: 95 %.
        ceiling: norms up to here count as typical: 1.5 times the 95 % line.
        tried: every set that was tried, in order; the first is the empty one.
        unreached: words that no repetition turned into a sink; they say nothing about a patch.
        held_out: the tokens the patch was verified with.
        perplexity: on pieces of typical text that took no part in the choice.
        limit: largest relative rise of the perplexity that is accepted.
    """

    kind: ClassVar[str] = "patch-make"

    verdict: Verdict
    reason: str
    neurons: tuple[PatchedNeuron, ...]
    causal: int
    sink_layer: int | None
    layer: int | None
    first_norm: float | None
    typical_low: float | None
    typical_norm: float | None
    typical_high: float | None
    ceiling: float | None
    tried: tuple[Tried, ...]
    unreached: int
    held_out: tuple[HeldOutToken, ...]
    perplexity: Change | None
    limit: float

    @property
    def patch(self) -> SinkPatch:
        """The patch.

        Raises:
            SinkscopeError: none was made.
        """
        if self.verdict != "made":
            raise SinkscopeError(f"no patch was made for {self.model.name}: {self.reason}", page="no-sink")
        sites: dict[Any, float] = {n.site: n.calibrated for n in self.neurons}
        return SinkPatch(sites=tuple(sites), calibrated=sites, model=asdict(self.model))

    def rows(self) -> list[dict[str, Any]]:
        """One row per held-out token."""
        return [asdict(t) for t in self.held_out]

    def summary(self) -> str:
        """Verdict and evidence in a few lines."""
        lines = [f"{self.model.name}: {_VERDICTS[self.verdict]}{self.reason}"]
        if self.neurons:
            names = ", ".join(
                f"layer {n.layer}" + (f" expert {n.expert}" if n.expert is not None else "") + f" neuron {n.neuron}"
                for n in self.neurons
            )
            lines.append(
                f"Neurons ({len(self.neurons)} of {self.causal} causal, sets tried: {len(self.tried) - 1}): {names}."
            )
        if self.held_out and self.ceiling is not None:
            good = sum(t.patched <= self.ceiling for t in self.held_out)
            lines.append(
                f"Held-out tokens, repeated: {good} of {len(self.held_out)} fall to the typical range (up to "
                f"{self.ceiling:.4g} in layer {self.layer}; first token {self.first_norm:.4g})."
            )
        if self.perplexity is not None:
            p = self.perplexity
            se = "" if p.se is None else f" +- {p.se / p.before:.3%}"
            lines.append(
                f"Perplexity on held-out text: {p.before:.4g} -> {p.after:.4g} ({p.difference / p.before:+.3%}{se}, "
                f"limit {self.limit:+.1%})."
            )
        return "\n".join(lines)


_VERDICTS = {"made": "patch made: ", "refused": "refused: ", "no-sink": "", "no-repeats": ""}


def make_patch(
    model: object = None,
    *,
    tokenizer: Any = None,
    bos: bool | None = None,
    text: str | Path | None = None,
    tokens: Sequence[str] | None = None,
    words: int = 8,
    max_repeats: int | None = None,
    limit: float = 0.01,
    pieces: int = 32,
    length: int = 256,
    batch_size: int = 8,
    seed: int = 0,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> PatchMade:
    """Find the smallest set of causal neurons whose patch keeps repeated tokens from becoming sinks.

    Every set is tried by real passes under a `SinkPatch`, smaller sets first and of one size those of larger
    contributions first, until the norm of the repeated tokens stays typical; then tokens that took no part in the
    choice and held-out text are measured. (Yona et al. 2025, section 5.3, patch the neurons of their Table 1 by hand.)

    Args:
        model: see `find_sinks`; a model given by name is loaded whole.
        tokenizer: for live models that carry none.
        bos: begin sequences with BOS; None: where the tokenizer has one.
        text: file of typical text; None: the text that ships.
        tokens: strings to repeat, one token each, at least two: every other one is held out. None: words of the text.
        words: how many words are drawn to choose with, and as many to verify with.
        max_repeats: largest number of repetitions; None: 1,024, or what the context holds.
        limit: largest relative rise of the perplexity on held-out text that is accepted.
        pieces: of held-out text.
        length: tokens of a piece.
        batch_size: rows that run together.
        seed: of the choice of words and of the control.
        revision: of a hub id.
        dtype: for models given by name.
        device: for models given by name.
        trust_remote_code: run code that comes with the checkpoint.
        progress: called as `progress(what, done, total)`.

    Raises:
        SinkscopeError: bad input. A refusal is a result, not an error.
    """
    _check(tokens, words, limit, pieces, length, batch_size)
    live = whole(
        model, tokenizer=tokenizer, revision=revision, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    )
    made = setup(live, tokenizer=tokenizer, bos=bos, text=text, seed=seed)
    target = made.target
    largest = (target.max_positions or 1 << 30) - 1
    if max_repeats is not None and not 1 < max_repeats <= largest:
        raise SinkscopeError(f"--max-repeats {max_repeats}: expected 2 to {largest}, which the context still holds")
    most = max_repeats or min(1024, largest)
    fields: dict[str, Any] = {
        "neurons": (),
        "causal": 0,
        "sink_layer": None,
        "layer": None,
        "first_norm": None,
        "typical_low": None,
        "typical_norm": None,
        "typical_high": None,
        "ceiling": None,
        "tried": (),
        "unreached": 0,
        "held_out": (),
        "perplexity": None,
        "limit": limit,
        "settings": {
            "text": None if text is None else Path(text).name,
            "tokens": None if tokens is None else list(tokens),
            "words": words,
            "max_repeats": most,
            "limit": limit,
            "pieces": pieces,
            "length": length,
            "seed": seed,
            "bos": made.bos is not None,
            "revision": revision,
        },
    }

    def result(verdict: Verdict, reason: str) -> PatchMade:
        return PatchMade(model=made.info(), provenance=made.provenance(), verdict=verdict, reason=reason, **fields)

    seen = walk(target, made.ids, whole=True, progress=progress)
    if (sink_layer := seen.sink_layer()) is None:
        return result("no-sink", "it has no attention sink at the first token, so there is nothing to patch.")
    layer = max(seen.stages())
    low, middle, high = seen.typical[layer]
    ceiling = HEADROOM * high
    fields |= {
        "sink_layer": sink_layer,
        "layer": layer,
        "first_norm": seen.first[layer],
        "typical_low": low,
        "typical_norm": middle,
        "typical_high": high,
        "ceiling": ceiling,
    }
    drawn = pick_tokens(target.tokenizer, made.ids, tokens, seed, 2 * words)
    prefixes = [made.bos if made.bos is not None else _other(made.ids, w) for w in drawn]
    found = repeat_until_half(target, sink_layer, drawn, prefixes, most, progress or silent).repeats
    reached = [(w, p, n) for w, p, n in zip(drawn, prefixes, found, strict=True) if n is not None]
    fields["unreached"] = len(drawn) - len(reached)
    if len(reached) < 2:
        return result(
            "no-repeats",
            f"it has a sink, but {fields['unreached']} of {len(drawn)} words repeated {most} times make none, so there "
            "is nothing to patch or to verify with; a larger --max-repeats may find some.",
        )
    # Twice as many repetitions as the slowest word needs: well inside the sink, and no longer than that.
    count = min(most, 2 * max(n for _, _, n in reached))
    rows = torch.tensor([[p, *[w] * count] for w, p, _ in reached])
    choose, verify = rows[::2], rows[1::2]
    candidates = _candidates(made, seen, sink_layer)
    fields["causal"] = len(candidates)
    tried: list[Tried] = []
    chosen = _smallest(target, candidates, layer, choose, ceiling, batch_size, tried, progress)
    fields["tried"] = tuple(tried)
    if chosen is None:
        what = "no neuron is causal by itself" if not candidates else "no set of the causal neurons suffices"
        return result("refused", f"{what}: the norm of repeated tokens does not fall to the typical range.")
    fields["neurons"] = tuple(PatchedNeuron(n.layer, n.expert, n.neuron, n.neutral_post) for n in chosen)
    patch = _patch(chosen)
    intact = largest_norms(target, layer, verify, None, batch_size)
    patched = largest_norms(target, layer, verify, patch, batch_size)
    fields["held_out"] = tuple(
        HeldOutToken(target.tokenizer.decode([w]), w, count, before, after)
        for (w, _, _), before, after in zip(reached[1::2], intact.tolist(), patched.tolist(), strict=True)
    )
    ids = held_out(made, pieces, length)
    before = losses(target, ids, None, batch_size, progress)
    change = perplexity_change(before, losses(target, ids, patch, batch_size, progress))
    fields["perplexity"] = change
    above = int((patched > ceiling).sum())
    if above:
        return result("refused", f"{above} of {len(verify)} held-out tokens keep a norm above the typical range.")
    rise = change.difference / change.before
    if not rise <= limit:
        return result(
            "refused", f"it would harm: the perplexity on held-out text rises by {rise:.2%}, the limit is {limit:.2%}."
        )
    return result("made", "repeated tokens keep a typical norm, and ordinary text is read as before.")


@torch.no_grad()
def largest_norms(
    target: Target, layer: int, rows: Int[Tensor, "row pos"], edit: Intervention | None, batch_size: int
) -> Float[Tensor, " row"]:
    """Per row, the largest norm of the residual stream after `layer` at positions behind the first."""
    norms: list[Tensor] = []

    def keep(_m: object, _a: object, _k: object, out: Any) -> None:
        norm = torch.linalg.vector_norm(first_tensor(out), dim=-1, dtype=torch.float32)
        norms.append(norm[:, 1:].amax(1).cpu())
        target.stop()

    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        if edit is None:
            with target.hooks((target.layers[layer], "post", keep)):
                target.forward(batch)
        else:
            with edit.on(target), target.hooks((target.layers[layer], "post", keep)):
                target.forward(batch)
    return torch.cat(norms)


def _check(tokens: Sequence[str] | None, words: int, limit: float, pieces: int, length: int, batch_size: int) -> None:
    if tokens is not None and len(set(tokens)) < 2:
        raise SinkscopeError(
            f"{len(set(tokens))} token to repeat: at least two different ones are needed, one to choose the patch with "
            "and one to verify it"
        )
    if not 0 <= limit < float("inf"):
        raise SinkscopeError(f"--limit {limit}: expected a share such as 0.01, for 1 % more perplexity")
    for name, value, least in (
        ("words", words, 1),
        ("pieces", pieces, 2),
        ("length", length, 8),
        ("batch size", batch_size, 1),
    ):
        if value < least:
            raise SinkscopeError(f"{name} {value}: expected at least {least}")


def _candidates(made: Setup, seen: Walk, sink_layer: int) -> list[Neuron]:
    """Causal neurons of the sink layer, largest contribution first, then those of other stages."""
    generator = torch.Generator().manual_seed(made.seed)
    return list(prove(made.target, made.ids, sink_layer, TOP_K, generator, None, seen.stages()).causal)


def _smallest(
    target: Target,
    candidates: list[Neuron],
    layer: int,
    rows: Tensor,
    ceiling: float,
    batch_size: int,
    tried: list[Tried],
    progress: Progress | None,
) -> tuple[Neuron, ...] | None:
    for size in range(len(candidates) + 1):
        for some in combinations(candidates, size):
            edit = _patch(some) if some else None  # no neuron at all: how far there is to fall
            worst = float(largest_norms(target, layer, rows, edit, batch_size).max())
            tried.append(Tried(tuple(n.site for n in some), worst))
            if progress is not None:
                progress("sets of neurons", len(tried), 2 ** len(candidates))
            if some and worst <= ceiling:
                return some
    return None


def _patch(neurons: Sequence[Neuron]) -> SinkPatch:
    return SinkPatch(sites=[n.site for n in neurons], calibrated={n.site: n.neutral_post for n in neurons})


def _other(ids: Tensor, token: int) -> int:
    """A token of the text that stands first where there is no BOS; it must not be the repeated one."""
    return int(ids[ids != token][0])
