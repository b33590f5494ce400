"""Which attention heads mark the first token (Yona et al. 2025, section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from sinkscope.errors import SinkscopeError
from sinkscope.results import Result
from sinkscope.sinks._ablation import DRAWS
from sinkscope.sinks._heads import Replacement
from sinkscope.sinks._marking import First, Head, Marking
from sinkscope.sinks._setup import Progress, causal_neurons, setup
from sinkscope.sinks._tokens import first_tokens, single_token


@dataclass(frozen=True, kw_only=True)
class MarkingHeads(Result):
    """Which heads mark the first token.

    Attributes:
        sink_layer: where the marked neurons are; None: the model has no sink, and everything else is empty.
        neurons: the sink neurons whose activation is measured; in a mixture (expert, neuron); empty: no single one is
            causal, and the whole MLP of the sink layer stands for them.
        answer: "single head": for most first tokens one head suffices; "several heads": it takes more than one;
            "several layers": no layer's heads by themselves make the mark, together they do; "no head": they do not;
            "no token fires": none of the tokens given makes a sink when it stands first; "no sink".
        marking_layer: the layer whose heads make it; None if there is none.
        layer_drops: per layer up to the sink layer, lost with all its heads replaced (median over first tokens).
        all_drop: lost with all heads of all these layers replaced.
        single_share: share of the first tokens that fire for which one head suffices.
        heads: every head of layers 0 to the sink layer, marking heads first.
        first_tokens: every token that was put first.
    """

    kind: ClassVar[str] = "heads"
    percent: ClassVar[tuple[str, ...]] = ("drop", "largest_drop", "bos_drop", "alone", "control")

    sink_layer: int | None
    neurons: tuple[tuple[int, ...], ...]
    answer: str
    marking_layer: int | None
    layer_drops: tuple[float, ...]
    all_drop: float | None
    single_share: float | None
    heads: tuple[Head, ...]
    first_tokens: tuple[First, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row per head, at most 16 of them."""
        return [{k: v for k, v in vars(h).items() if k != "largest_drop"} for h in self.heads[:16]]

    def summary(self) -> str:
        """What was found, in a few lines."""
        m = self.model
        lines = [f"{m.name} ({m.family}, {m.n_layers} layers)"]
        if self.sink_layer is None:
            return "\n".join([*lines, "No attention sink, so no head marks for one (see find-sinks)."])
        fire = [f for f in self.first_tokens if f.fires]
        names = ", ".join(" ".join(map(str, n)) for n in self.neurons) or "no single one: the whole MLP"
        lines.append(f"Sink layer {self.sink_layer}, neurons: {names}.")
        lines.append(f"{len(fire)} of {len(self.first_tokens)} tokens make them fire when they stand first.")
        if self.layer_drops:
            drops = ", ".join(f"{i}: {d:.0%}" for i, d in enumerate(self.layer_drops))
            lines.append(f"Lost with all heads of a layer replaced: {drops}; of all layers: {_percent(self.all_drop)}.")
        if self.marking_layer is None:
            said = {
                "several layers": "No layer's heads mark by themselves; those of several layers together do.",
                "no head": "No head marks: the mark is not made by attention.",
            }
            return "\n".join([*lines, said.get(self.answer, "Nothing can be said of heads: give other first tokens.")])
        late = "" if self.marking_layer == 0 else " (not layer 0)"
        lines.append(f"The heads of layer {self.marking_layer}{late} mark the first token.")
        sizes = sorted(len(f.heads) for f in fire if f.heads)
        if self.answer == "single head":
            lines.append(f"For {_percent(self.single_share)} of the first tokens a single head suffices.")
        else:
            usual = sizes[len(sizes) // 2] if sizes else 0
            lines.append(f"No single head suffices for most first tokens; it takes {usual} (median).")
        marking = [h for h in self.heads if h.serves]
        names = (f"{h.layer}.{h.head} ({h.serves} token{'s' * (h.serves != 1)})" for h in marking)
        lines.append(f"Marking heads: {', '.join(names)}.")
        lost = [f.set_drop for f in fire if f.set_drop is not None]
        chance = [f.control_drop for f in fire if f.control_drop is not None]
        if lost and chance:
            lines.append(
                f"Without them {_percent(_median(lost))} is lost (median), without as many others "
                f"{_percent(_median(chance))} (largest of {DRAWS} draws, median)."
            )
        return "\n".join(lines)


def marking_heads(
    model: object = None,
    *,
    tokenizer: Any = None,
    bos: bool | None = None,
    text: str | Path | None = None,
    tokens: Sequence[str] | None = None,
    count: int = 32,
    texts: int = 4,
    batch_size: int | None = None,
    seed: int = 0,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> MarkingHeads:
    """Find the heads that mark the first token, by what replacing their output does to the sink neurons.

    A head's output at the first position (`hook_z`, before the output projection) is replaced by its mean over later
    positions of typical text. Different tokens may be marked by different heads, so many tokens are put first, each
    alone and without BOS, beside BOS itself.

    Args:
        model: None (the bundled model), short name, hub id, folder, `.gguf` file, or a live model of any kind.
        tokenizer: for live models that carry none.
        bos: begin sequences with BOS; None: where the tokenizer has one.
        text: file of typical text; None: the neutral text that ships.
        tokens: strings to put first, one token each; None: `count` tokens of the text, drawn by the seed.
        count: how many to draw.
        texts: pieces of 64 tokens of typical text.
        batch_size: rows of a pass; None: as many as a bounded memory allows.
        seed: of random draws.
        revision: of a hub id.
        dtype: of the weights of a model given by name.
        device: for models given by name; None: the first cuda device if there is one.
        trust_remote_code: run code that comes with the checkpoint (it is then loaded whole).
        progress: called as `progress(what, done, total)`.

    A model without a sink is an answer: `sink_layer` is None.

    Raises:
        SinkscopeError: bad input; the message is one line and says what to do.
    """
    if count < 1:
        raise SinkscopeError(f"--count {count}: at least one first token is needed; give 1 or more")
    if batch_size is not None and batch_size < 1:
        raise SinkscopeError(f"--batch-size {batch_size}: at least one row is needed; give 1 or more")
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
    )
    target = made.target
    words = (
        first_tokens(target, made.ids, count, seed)
        if not tokens
        else list(dict.fromkeys(single_token(target.tokenizer, t) for t in tokens))
    )
    layer, neurons = causal_neurons(made)
    empty: dict[str, Any] = {
        "model": made.info(),
        "sink_layer": layer,
        "neurons": tuple(n.site[1:] for n in neurons if n.layer == layer),
        "settings": {
            "bos": made.bos is not None,
            "text": None if text is None else Path(text).name,
            "texts": len(made.ids),
            "tokens": None if tokens is None else list(tokens),
            "count": count,
            "batch_size": batch_size,
            "seed": seed,
            "revision": revision,
        },
    }
    if layer is None:
        return MarkingHeads(
            **empty,
            answer="no sink",
            marking_layer=None,
            layer_drops=(),
            all_drop=None,
            single_share=None,
            heads=(),
            first_tokens=(),
            provenance=made.provenance(),
        )
    work = Marking(made, Replacement.of(target, layer, neurons, made.ids), batch_size, progress)
    return MarkingHeads(**empty, **work.measure(words), provenance=made.provenance())


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}".replace("-0%", "0%")


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
