"""What every measurement begins with: an opened model, text to hold it against, and a record of how it ran."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.console import Progress, silent
from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Intervention
from sinkscope.interventions.decode import decode, watched
from sinkscope.interventions.sink_patch import SinkPatch
from sinkscope.kv.loopguard import LoopGuard
from sinkscope.kv.policy import policy_named
from sinkscope.kv.session import Observe
from sinkscope.models.load import load
from sinkscope.models.open import PartTarget, fingerprint_of, open_target
from sinkscope.models.target import Target
from sinkscope.registry import Hidden, Option
from sinkscope.results import ModelInfo, Provenance, provenance
from sinkscope.text import resolve_bos, text_rows, typical_text
from sinkscope.trace import attention_rows

PIECE = 64  # tokens in one piece of typical text
Loading = Literal["stream", "enough", "whole"]


@dataclass(frozen=True)
class Rows:
    """Attention of one layer for the last queries of one text.

    Attributes:
        text: which text, from 0.
        layer: which layer.
        probs: `[batch head query key]`, float32; rows sum to one unless the model has learned sink logits.
    """

    text: int
    layer: int
    probs: Float[Tensor, "batch head query key"]


@dataclass
class Setup:
    """An opened model and the text to hold it against; what the function of a measurement receives.

    Attributes:
        target: the model.
        bos: id of the BOS token that sequences begin with; None: they begin with none.
        text: the typical text.
        ids: pieces of it, `[row pos]`, each beginning with BOS where there is one.
        seed: of every random choice.
        progress: called as `progress(what, done, total)`.
        edit: the patch, policy, guard and other interventions that the caller asked for; None: none.
        settings: what `record` added to the result's settings.
        started: `time.perf_counter()` when the measurement began.
        source: the model as it was given, and the options that open it once more in another process.
        memory: what measurements on the same open model need not find out twice.
    """

    target: Target
    bos: int | None
    text: str
    ids: Int[Tensor, "row pos"]
    seed: int = 0
    progress: Progress = silent
    edit: Intervention | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    source: tuple[object, dict[str, Any]] = (None, {})
    memory: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        model: object = None,
        *,
        revision: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        bos: bool | None = None,
        text: str | Path | None = None,
        seed: Annotated[int, Option(min=0, max=(1 << 63) - 1)] = 0,
        tokenizer: Hidden = None,
        texts: Annotated[int, Option(min=1, hidden=True)] = 4,
        trust_remote_code: Annotated[bool, Option(hidden=True)] = False,
        progress: Hidden = None,
        loading: Annotated[Literal["stream", "enough", "whole"], Option(hidden=True)] = "stream",
    ) -> Setup:
        """Open a model and cut the typical text into pieces for it.

        Args:
            model: A short name, hub id, folder or .gguf file; from Python also a live model of any kind. By default
                the model in the package.
            revision: Branch, tag or commit on the hub.
            device: cpu, cuda, cuda:1 or mps, for a model given by name. By default the first CUDA device, else the CPU.
            dtype: float32, bfloat16 or float16, for a model given by name. By default the checkpoint's; a model that
                is read layer by layer on a CPU is float32.
            bos: Whether sequences begin with BOS. By default they do where the tokenizer has a BOS token.
            text: File of typical text. By default the neutral text in the package.
            seed: Seed of every random choice.
            tokenizer: For live models that carry none.
            texts: Pieces of 64 tokens of typical text; for 0 of them, no tokenizer is needed.
            trust_remote_code: Run code that comes with the checkpoint; the model is then loaded whole.
            progress: Called as `progress(what, done, total)`.
            loading: "stream" reads layer by layer where it can; "enough" may leave out the last layers of a GGUF file
                (see `more`); "whole" loads a model given by name into memory.

        Raises:
            SinkscopeError: Bad input; the message is one line and says what to do.
        """
        started, content = time.perf_counter(), typical_text(text)
        options: dict[str, Any] = {
            "tokenizer": tokenizer,
            "revision": revision,
            "dtype": dtype,
            "device": device,
            "trust_remote_code": trust_remote_code,
        }
        if loading == "whole" and (model is None or isinstance(model, str | os.PathLike)):
            model = load(model, backend="hf", **options)
        target = open_target(model, **options, needed=texts > 0)
        start = resolve_bos(target.tokenizer, target.config, bos)
        length = min(PIECE, target.max_positions or PIECE)
        none = torch.zeros(0, length, dtype=torch.long)
        ids = text_rows(target.tokenizer, content, texts, length, start) if texts else none
        source = (model, options)
        made = cls(target, start, content, ids, seed, progress or silent, started=started, source=source)
        return made if loading == "enough" else read_whole(made)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.target.tokenizer

    @property
    def n_layers(self) -> int:
        """Number of decoder layers."""
        return self.target.n_layers

    @property
    def n_heads(self) -> int:
        """Query heads of a layer."""
        return self.target.n_heads

    @property
    def n_texts(self) -> int:
        """Pieces of typical text."""
        return len(self.ids)

    def edited(self) -> AbstractContextManager[Any]:
        """A `with` in which the interventions that the caller asked for act; `attention` enters them itself."""
        return nullcontext() if self.edit is None else self.edit.on(self.target)

    def attention(self, *, last: int | None = None, layers: Sequence[int] | None = None) -> Iterator[Rows]:
        """Attention of every layer on each piece of typical text, under the caller's interventions.

        Without interventions a text is one pass. Under interventions it is read token by token from the first of
        these queries on, because a policy or a guard acts between passes; what it evicted has no attention.

        The rows of one text are in memory at a time: `layer x head x last x key` numbers.

        Args:
            last: Only the last queries of each text; None: all.
            layers: Only these layers; None: all.

        Raises:
            SinkscopeError: The model has no such layer.
        """
        wanted = None if layers is None else list(layers)
        if wrong := [layer for layer in wanted or () if not 0 <= layer < self.n_layers]:
            last_layer = self.n_layers - 1
            raise SinkscopeError(f"layer {wrong[0]} was given: {self.target.name} has layers 0 to {last_layer}")
        for text, row in enumerate(self.ids):
            parts: dict[int, list[Tensor]] = {}
            first = 0 if last is None else max(0, len(row) - last)
            (self._pass if self.edit is None else self._steps)(row, first, wanted, parts)
            self.progress("texts", text + 1, self.n_texts)
            for layer, rows in parts.items():
                yield Rows(text, layer, torch.cat(rows, 2))

    def _pass(self, row: Tensor, first: int, layers: list[int] | None, parts: dict[int, list[Tensor]]) -> None:
        """Rows from the query `first` on, from one pass."""

        def keep(layer: int, begin: int, probs: Tensor) -> None:
            if first < begin + probs.shape[2]:
                parts.setdefault(layer, []).append(probs[:, :, max(0, first - begin) :].cpu())

        with attention_rows(self.target, keep, layers=layers):
            self.target.forward(row[None])

    def _steps(self, row: Tensor, first: int, layers: list[int] | None, parts: dict[int, list[Tensor]]) -> None:
        """The same token by token under the interventions; keys are positions, evicted ones have nothing."""

        def keep(rows: Any) -> None:
            groups = rows.probs.shape[1] // rows.pos.shape[1]
            pos = rows.pos.repeat_interleave(groups, 1)[:, :, None]
            probs = rows.probs[:, :, -1:] * (pos >= 0)
            spread = probs.new_zeros(*probs.shape[:3], len(row)).scatter_add_(3, pos.clamp(min=0), probs)
            parts.setdefault(rows.layer, []).append(spread.cpu())

        edit = watched(self.edit, Observe(keep, layers, last=1))
        ids = row.tolist()
        decode(self.target, ids[: first + 1], len(ids) - first, edit, [*ids[first + 1 :], ids[0]])

    def record(self, **settings: Any) -> None:
        """Add to the settings of the result, or replace what was asked for by what was used."""
        self.settings.update(settings)

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

    def more(self) -> bool:
        """Put more layers into memory, where only the first ones are (loading "enough"); false where all are."""
        if isinstance(self.target, PartTarget):
            self.target = self.target.more()
            return True
        return False


def read_whole(made: Setup) -> Setup:
    """The same with every layer, where only the first layers of a file are in memory."""
    while made.more():
        pass
    return made


def edit_of(
    *,
    patch: Annotated[Any, Option(metavar="FILE")] = None,
    policy: Annotated[Any, Option(metavar="NAME[:BUDGET]")] = None,
    guard: bool = False,
    interventions: Hidden = None,
) -> Intervention | None:
    """What a measurement under interventions acts with: a patch, others, a cache policy and a guard, in this order.

    Args:
        patch: The patch.json to run under; from Python also a `SinkPatch`.
        policy: What the KV cache keeps, such as streaming:512, h2o:0.25 or package.module:Class:512; from Python also
            a policy.
        guard: Break repetition loops with LoopGuard.
        interventions: Any other: an intervention, several joined by |, the name of a policy, the path of a patch, or a
            list of these.

    Raises:
        SinkscopeError: The patch cannot be read, there is no such policy, or something is no intervention.
    """
    parts = [
        SinkPatch.load(patch) if isinstance(patch, str | os.PathLike) else patch,
        *_several(interventions),
        policy_named(policy) if isinstance(policy, str) else policy,
        LoopGuard() if guard is True else guard or None,
    ]
    given = [part for part in parts if part is not None]
    for part in given:
        if not isinstance(part, Intervention):
            raise SinkscopeError(
                f"{type(part).__name__} is no intervention: give a policy, a patch or a guard, the name of a policy "
                "such as h2o:0.25, or several of them in a list"
            )
    return reduce(or_, given) if given else None


def _several(given: Any) -> list[Any]:
    """What may be written for interventions, one by one."""
    if isinstance(given, list | tuple):
        return [one for part in given for one in _several(part)]
    if isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(".json")):
        return [SinkPatch.load(given)]
    return [policy_named(given) if isinstance(given, str) else given]
