"""What every measurement of a sink begins and ends with: a model, text, a place, and how the result was made."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.models.open import PartTarget, fingerprint_of, open_target
from sinkscope.models.target import Target
from sinkscope.results import ModelInfo, Provenance, provenance
from sinkscope.sinks._ablation import Neuron, prove
from sinkscope.sinks._walk import Progress, Walk, walk
from sinkscope.text import resolve_bos, text_rows, typical_text

PIECE = 64  # tokens of a piece of typical text


@dataclass(frozen=True)
class Setup:
    """A model and the text to hold it against.

    Attributes:
        target: the model.
        bos: id of the BOS token that sequences begin with; None: they begin with none.
        text: the typical text.
        ids: pieces of it, `[row pos]`, BOS first where there is one.
        seed: of every random choice.
        started: when the measurement began.
    """

    target: Target
    bos: int | None
    text: str
    ids: Int[Tensor, "row pos"]
    seed: int
    started: float

    def info(self) -> ModelInfo:
        """Which model, for the result."""
        t = self.target
        return ModelInfo(t.name, t.config.model_type, t.n_layers, t.d_model, t.d_mlp, fingerprint_of(t))

    def provenance(self) -> Provenance:
        """How, when and on what, for the result."""
        return provenance(
            started=self.started,
            device=self.target.device,
            dtype=self.target.dtype,
            seed=self.seed,
            bos=self.bos is not None,
            attention=str(getattr(self.target.config, "_attn_implementation", "unknown")),
        )


def setup(
    model: object,
    *,
    tokenizer: Any = None,
    bos: bool | None = None,
    text: str | Path | None = None,
    texts: int = 4,
    seed: int = 0,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    part: bool = False,
) -> Setup:
    """Open `model` (see `find_sinks` for the arguments) and cut the typical text into pieces for it.

    With `part` a GGUF file may come with its first layers only, for `walk_far_enough`; else every layer is there.
    """
    started, content = time.perf_counter(), typical_text(text)
    target = open_target(model, tokenizer, revision, dtype, device, trust_remote_code)
    start = resolve_bos(target.tokenizer, target.config, bos)
    length = min(PIECE, target.max_positions or PIECE)
    ids = text_rows(target.tokenizer, content, texts, length, start)
    made = Setup(target, start, content, ids, seed, started)
    return made if part else read_whole(made)


def walk_far_enough(made: Setup, *, whole: bool, progress: Progress | None = None) -> tuple[Setup, Walk]:
    """`walk`, and where only the first layers of a file are in memory, again with more of them until they suffice."""
    while True:
        seen = walk(made.target, made.ids, whole=whole, progress=progress)
        enough = len(seen.first) == made.target.n_layers or (seen.flat() and not whole)
        if enough or not isinstance(made.target, PartTarget):
            return made, seen
        made = replace(made, target=made.target.more())


def read_whole(made: Setup) -> Setup:
    """The same with every layer, where only the first layers of a file are in memory."""
    while isinstance(made.target, PartTarget):
        made = replace(made, target=made.target.more())
    return made


def causal_neurons(made: Setup, layer: int | None = None, top_k: int = 8) -> tuple[int | None, tuple[Neuron, ...]]:
    """Sink layer and its causal neurons, proven by ablation; (None, ()) for a model without a sink.

    Args:
        made: the model and its text.
        layer: the sink layer, where it is known; None: it is searched.
        top_k: candidates.
    """
    if layer is None:
        layer = walk(made.target, made.ids, whole=made.target.resident).sink_layer()
    if layer is None:
        return None, ()
    proof = prove(made.target, made.ids, layer, top_k, torch.Generator().manual_seed(made.seed), None)
    return layer, tuple(n for n in proof.neurons if n.causal)


__all__ = ["Progress", "Setup", "causal_neurons", "read_whole", "setup", "walk_far_enough"]
