"""Why a loop goes on: scores that repeat under rotary positions (Xu et al. 2026, section 3.3 and appendix A)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from sinkscope.attention._contraction import Decay, Disturbed
from sinkscope.attention._loop import (
    Loop,
    checked_ids,
    chosen_layers,
    generated,
    healthy_ids,
    loop_of,
    opened,
    prompt_ids,
)
from sinkscope.attention._shift import tails
from sinkscope.attention._tail import Drift, RotaryHead, curves_of, heads_of, positions_of
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.results import Result
from sinkscope.sinks.first_token.locate import Progress, Setup

TAIL = 32  # positions of the window, rounded up to whole periods
PERIODS = 8  # that a disturbance is followed for
_SHOWN = (
    "query_norm",
    "delta_q",
    "other_delta_q",
    "healthy_delta_q",
    "key_norm",
    "delta_k",
    "spread",
    "change",
    "other_change",
    "healthy_change",
    "bound",
    "tail_mass",
    "drift",
    "step_drift",
)
SMALL, LARGE = 0.01, 1.0  # sizes of a disturbance, over the length of the hidden state


@dataclass(frozen=True, kw_only=True)
class RotaryInvariance(Result):
    """Lemma 1 on a real loop.

    Attributes:
        tokens: prompt and generated ids.
        prompt_tokens: of them, those of the prompt.
        period: of the loop; None: none was found, and everything below is empty.
        onset: position of its first token.
        repeated: the text of one period.
        tail: positions of the window (the paper's B_t).
        rotary_scale: factor of rotary on queries and keys (1, but for YaRN).
        heads: every head of every layer.
        positions: of the drift curves.
        drift: a curve per layer.
        decays: what becomes of disturbances of one period.
        healthy_decays: the same in ordinary text.
    """

    kind: ClassVar[str] = "rotary"

    tokens: int
    prompt_tokens: int
    period: int | None
    onset: int | None
    repeated: str | None
    tail: int | None
    rotary_scale: float | None
    heads: tuple[RotaryHead, ...]
    positions: tuple[int, ...]
    drift: tuple[Drift, ...]
    decays: tuple[Decay, ...]
    healthy_decays: tuple[Decay, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row per layer: medians over its heads, the bound's tightness and the error at their largest."""
        out: list[dict[str, Any]] = []
        for layer in sorted({h.layer for h in self.heads}):
            own = [h for h in self.heads if h.layer == layer]
            row: dict[str, Any] = {"layer": layer}
            for name in _SHOWN:
                row[name] = _median([getattr(h, name) for h in own])
            row |= {"tightness": max(h.tightness for h in own), "error": max(h.error for h in own)}
            row["contraction"] = _median([d.contraction for d in self._small(layer)])
            out.append(row)
        return out

    def _small(self, layer: int) -> list[Decay]:
        return [d for d in self.decays if d.layer == layer and d.size == SMALL and not d.within]

    def summary(self) -> str:
        """What was found, in a few lines."""
        m = self.model
        lines = [f"{m.name} ({m.family}, {m.n_layers} layers)"]
        if self.period is None:
            lines.append(
                f"No loop in {self.tokens} tokens: nothing to measure; more tokens or another prompt may end in one."
            )
            return "\n".join(lines)
        lines.append(
            f"Loop of period {self.period} from position {self.onset} of {self.tokens}: {self.repeated!r}; "
            f"tail of {self.tail} positions."
        )
        h = self.heads
        lines.append(f"Eq. 13 against the model's own scores: largest error {max(x.error for x in h):.1e} of a score.")
        lines.append(
            f"Scores P apart differ by {_of(h, 'change')} of their spread, P + 1 apart by {_of(h, 'other_change')}, "
            f"P apart in ordinary text by {_of(h, 'healthy_change')} (median over heads)."
        )
        tight = max(x.tightness for x in h)
        said = "holds" if tight <= 1 else "DOES NOT HOLD"
        lines.append(
            f"Eq. 15 {said}: differences reach at most {tight:.0%} of the bound; the bound itself is "
            f"{_of(h, 'bound')} of the spread, without blocks {_of(h, 'whole_bound')}."
        )
        in_period, in_step, in_text, in_text_step = (
            _median([getattr(x, name) for x in h])
            for name in ("drift", "step_drift", "healthy_drift", "healthy_step_drift")
        )
        moves = in_step is not None and in_period is not None and in_step > max(0.1, 2 * in_period)
        lines.append(
            f"The tail operator moves by {_share(in_period)} of its length in a period and {_share(in_step)} in a step "
            f"(in ordinary text {_share(in_text)} and {_share(in_text_step)})"
            + (": it is periodic, not constant." if moves else ".")
        )
        lines += self._contraction()
        return "\n".join(lines)

    def _contraction(self) -> list[str]:
        def middle(decays: tuple[Decay, ...], within: bool, size: float = SMALL) -> list[Decay]:
            return [d for d in decays if d.size == size and d.within == within]

        own, inside, plain = middle(self.decays, False), middle(self.decays, True), middle(self.healthy_decays, False)
        if not own:
            return ["The tail subspace leaves no orthogonal direction: contraction cannot be asked for."]
        found = [_median([d.contraction for d in part]) for part in (own, inside, plain)]
        slower = _median([d.rate for d in own])
        lines = [
            f"A small disturbance orthogonal to the tail subspace is {_times(found[0])} its size a period later "
            f"(inside the subspace {_times(found[1])}, in ordinary text {_times(found[2])}), and {_times(slower)} with "
            "each further one."
        ]
        if self.provenance.dtype != "float32":
            lines.append(f"So small a disturbance is near the rounding of {self.provenance.dtype}: use float32 for it.")
        if found[0] is not None and found[0] >= 1:
            lines.append("It grows: no contraction was found, against appendix A.3.")
        elif found[2] is not None and found[0] is not None and found[0] > 0.5 * found[2]:
            lines.append("Ordinary text forgets disturbances about as fast: the decay is not a mark of the loop.")
        large, other = middle(self.decays, False, LARGE), middle(self.healthy_decays, False, LARGE)
        if large and other:
            lines.append(
                f"With one as large as the hidden state, {_share(_mean([d.kept for d in large]))} of the directions "
                f"leave all later choices of tokens as they were, in ordinary text "
                f"{_share(_mean([d.kept for d in other]))}."
            )
        return lines


def rotary_invariance(
    model: object = None,
    prompt: str | Sequence[int] | None = None,
    *,
    ids: Sequence[int] | None = None,
    max_new_tokens: int = 512,
    layers: Sequence[int] | None = None,
    tokenizer: Any = None,
    bos: bool | None = None,
    text: str | Path | None = None,
    seed: int = 0,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> RotaryInvariance:
    """Hold the paper's account of persistent loops against a loop that the model is in.

    Args:
        model: None (the bundled model), short name, hub id, folder, `.gguf` file, or a live plain or nnsight model.
        prompt: text or ids that are continued greedily; None: the beginning of the typical text.
        ids: a whole sequence that ends in a loop, instead of generating one.
        max_new_tokens: how many to generate.
        layers: which to measure; None: all.
        tokenizer: for live models that carry none.
        bos: begin sequences with BOS; None: where the tokenizer has one.
        text: file of ordinary text, the control; None: the text that ships.
        seed: of the directions of disturbances.
        revision: of a hub id.
        dtype: of the weights of a model given by name.
        device: for models given by name; None: the first cuda device if there is one.
        trust_remote_code: run code that comes with the checkpoint.
        progress: called as `progress(what, done, total)`.

    No loop is an answer: `period` is None.

    Raises:
        UnsupportedError: a model without rotary positions, or one whose queries and keys cannot be had.
        SinkscopeError: bad input; the message is one line and says what to do.
    """
    if prompt is not None and ids is not None:
        raise SinkscopeError("a prompt and ids are given: expected one of them")
    made = opened(
        model,
        tokenizer=tokenizer,
        bos=bos,
        text=text,
        seed=seed,
        revision=revision,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    target = made.target
    if target.adapter.absolute_positions:
        raise UnsupportedError(
            f"{target.name} ({target.config.model_type}) has learned absolute positions, nothing turns: rotary is for "
            "models with rotary positions (barcode and locking work on this one)"
        )
    if target.kind == "bridge" or not target.adapter.attention_interface:
        if target.kind == "bridge":
            raise UnsupportedError(
                "queries and keys of a TransformerBridge are not offered: use a plain model (backend='hf')"
            )
        raise UnsupportedError(f"queries and keys of {target.config.model_type} are not offered: use another model")
    wanted = chosen_layers(made, layers)
    if progress is not None:
        progress("loop", 0, 4)
    loop = (
        generated(made, prompt_ids(made, prompt), max_new_tokens) if ids is None else loop_of(checked_ids(made, ids), 0)
    )
    return _measured(
        made,
        loop,
        wanted,
        {
            "prompt": prompt if isinstance(prompt, str) else None if prompt is None else list(prompt),
            "ids": None if ids is None else list(ids),
            "max_new_tokens": max_new_tokens,
            "layers": None if layers is None else list(layers),
            "bos": made.bos is not None,
            "text": None if text is None else Path(text).name,
            "seed": seed,
            "revision": revision,
        },
        progress,
    )


def _measured(
    made: Setup, loop: Loop, layers: list[int], settings: dict[str, Any], progress: Progress | None
) -> RotaryInvariance:
    def done(n: int) -> None:
        if progress is not None:
            progress("loop", n, 4)

    target, period, count = made.target, loop.period, len(loop.ids)
    common: dict[str, Any] = {
        "model": made.info(),
        "settings": settings,
        "tokens": count,
        "prompt_tokens": loop.prompt,
        "period": period,
        "onset": loop.onset,
    }
    if period is None:
        return RotaryInvariance(
            **common,
            repeated=None,
            tail=None,
            rotary_scale=None,
            heads=(),
            positions=(),
            drift=(),
            decays=(),
            healthy_decays=(),
            provenance=made.provenance(),
        )
    tail = period * max(1, min(-(-TAIL // period), (loop.length - period) // (2 * period)))
    shifts = [period] if period == 1 else [period, period + 1]
    steps = sorted({1, period})
    done(1)
    own = tails(target, loop.ids, layers, tail, shifts, steps)
    done(2)
    control = healthy_ids(made, count)
    plain = [None] * len(own) if control is None else tails(target, control, layers, tail, [period], steps)
    done(3)
    periods = min(PERIODS, (loop.length // period - 1) // 2)
    decays = _decays(made, loop.ids, layers, period, periods)
    healthy = () if control is None else _decays(made, control, layers, period, periods)
    positions = positions_of(count)
    done(4)
    return RotaryInvariance(
        **common,
        repeated=target.tokenizer.decode(loop.ids[-period:].tolist()),
        tail=tail,
        rotary_scale=own[0].scale,
        heads=tuple(h for part, other in zip(own, plain, strict=True) for h in heads_of(part, other, period)),
        positions=positions,
        drift=tuple(curves_of(part, other, period, positions) for part, other in zip(own, plain, strict=True)),
        decays=decays,
        healthy_decays=healthy,
        provenance=made.provenance(),
    )


def _decays(made: Setup, ids: torch.Tensor, layers: list[int], period: int, periods: int) -> tuple[Decay, ...]:
    bench = Disturbed(made.target, ids, period, periods, seed=made.seed)
    found = [
        bench.decay(layer, size=size, within=within)
        for layer in layers
        for size, within in ((SMALL, False), (SMALL, True), (LARGE, False))
    ]
    return tuple(d for d in found if d is not None)


def _median(values: Sequence[float | None]) -> float | None:
    known = sorted(v for v in values if v is not None)
    return known[len(known) // 2] if known else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _of(heads: tuple[RotaryHead, ...], name: str) -> str:
    """A field over the spread of the scores, median over the heads."""
    found = [None if getattr(h, name) is None or not h.spread else getattr(h, name) / h.spread for h in heads]
    return _share(_median(found))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}" if value < 0.1 else f"{value:.0%}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} times"
