"""The shared run of all benchmarks: several methods answer with one model, in batches, over processes, resumable."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from sinkscope.bench.methods import Method
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.jobs import Pool, Tally, finish
from sinkscope.files.records import Budget
from sinkscope.files.result import ModelInfo
from sinkscope.files.store import Folder
from sinkscope.interventions.base import Event, Intervention, Run
from sinkscope.interventions.decode import decoding, noted_decoding
from sinkscope.kv.loopserve.serve import LoopServe
from sinkscope.kv.session import Session
from sinkscope.models.open import fingerprint_of
from sinkscope.models.target import Target
from sinkscope.serving.generate import ends_and_pad, padded


@dataclass(frozen=True)
class NamedModel:
    """A model given by name, which each process opens for itself.

    Attributes:
        name: As for `sinkscope.load`.
        options: As for `sinkscope.load`.
    """

    name: str | None
    options: dict[str, Any] = field(default_factory=dict)

    def open(self) -> Any:
        """The model itself."""
        from sinkscope.models.load import load

        return load(self.name, **self.options)


def named_model(model: Any, backend: str, **options: str | None) -> NamedModel:
    """A model that each process opens for itself."""
    return NamedModel(model, {"backend": backend, **{k: v for k, v in options.items() if v is not None}})


@dataclass(frozen=True)
class Asked:
    """The model that answers, and its settings.

    Attributes:
        target: The model.
        fingerprint: Fingerprint of the model.
        ends: Ids that end an answer.
        pad: Id used for padding.
        new: Maximum tokens per answer.
        budget: Budget of methods that have none of their own.
    """

    target: Target
    fingerprint: str
    ends: frozenset[int]
    pad: int
    new: int
    budget: Budget

    def settings(self) -> dict[str, Any]:
        """The settings that determine a record, whatever is done with the model."""
        t = self.target
        with noted_decoding() as used:
            decoding(t, do_sample=False)
        return {
            "model": asdict(ModelInfo(t.name, t.config.model_type, t.n_layers, t.d_model, t.d_mlp, self.fingerprint)),
            "kind": t.kind,
            "device": t.device.type,
            "dtype": str(t.dtype).removeprefix("torch."),
            "attention": str(getattr(t.config, "_attn_implementation", "unknown")),
            "max_new_tokens": self.new,
            "budget": self.budget,
            "decoding": used,
        }

    def cut(self, row: list[int]) -> tuple[list[int], bool]:
        """An answer up to and including the end of sequence, and whether that token occurred."""
        end = next((k + 1 for k, token in enumerate(row) if token in self.ends), None)
        return row[:end], end is not None

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens of an answer as text."""
        return self.target.tokenizer.decode(tokens, skip_special_tokens=True)

    def generate(
        self,
        rows: Sequence[list[int]],
        edit: Intervention | None,
        hook: Callable[..., None] | None = None,
        new: int | None = None,
        **options: Any,
    ) -> tuple[list[list[int]], list[Event]]:
        """Generate greedy answers to prompts padded on the left; also returns what the intervention did.

        Args:
            rows: Ids of the prompts.
            edit: The intervention to apply to the model.
            hook: Called after each pass of the causal model.
            new: Maximum tokens; None uses the maximum length of an answer.
            options: Additional options of transformers' `generate`.
        """
        ids, mask = padded(rows, self.pad, self.target.device)
        hooks = [] if hook is None else [(self.target.hf, "post", hook)]
        entered = nullcontext() if edit is None else edit.on(self.target)
        with entered as run, self.target.hooks(*hooks), torch.no_grad():
            made = self.target.hf.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=self.new if new is None else new,
                **decoding(self.target, do_sample=False, pad_token_id=self.pad, **options),
            )
            return made[:, ids.shape[1] :].tolist(), [] if run is None else run.events


def ask(model: object, tokenizer: Any, new: int, budget: Budget, chat: bool = False) -> Asked:
    """Prepare the model to answer prompts.

    Args:
        model: Hugging Face, TransformerBridge, nnsight (dispatched), `Target`, or `NamedModel`.
        tokenizer: Tokenizer for a model that carries none.
        new: Maximum tokens per answer.
        budget: Budget of methods that have none of their own.
        chat: Whether to wrap prompts in the tokenizer's chat template.

    Raises:
        SinkscopeError: The model carries no tokenizer or chat template.
    """
    target = Target.of(model.open() if isinstance(model, NamedModel) else model, tokenizer)
    tok = target.need_tokenizer()
    if chat and not getattr(tok, "chat_template", None):
        raise SinkscopeError(f"the tokenizer of {target.name} has no chat template: leave out chat")
    return Asked(target, fingerprint_of(target), *ends_and_pad(target), new, budget)


def check_can(to: Asked, methods: Sequence[Method], lengths: Iterable[int], window: int | None = None) -> None:
    """Reject impossible requests before any computation.

    Raises:
        SinkscopeError: The budget is too small for one of the prompts, the settings are invalid, or the model does not
            support a method.
    """
    lengths = sorted(set(lengths))
    for edit in (method.make(to.budget, window) for method in methods):
        if edit is not None and lengths:
            for length in lengths:
                (edit.decoding if isinstance(edit, LoopServe) and edit.decode else edit).check_prompt(length)
            with edit.on(to.target):
                pass


@dataclass(frozen=True)
class Batch:
    """Some prompts with one or several methods; a batch is run completely or not at all.

    Attributes:
        model: Fingerprint of the model.
        methods: Methods that answer.
        rows: The prompts, which have an `id`, each paired with the benchmark's other data about it.
    """

    model: str
    methods: tuple[Method, ...]
    rows: tuple[tuple[Any, Any], ...]

    @property
    def size(self) -> int:
        """The batch's share of the progress count."""
        return len(self.methods) * len(self.rows)

    @property
    def keys(self) -> tuple[tuple[Any, ...], ...]:
        """Keys of the records that the batch produces."""
        return tuple((self.model, method.spec, each.id) for method in self.methods for each, _ in self.rows)


Answer = Callable[[Asked, Batch], Sequence[Any]]


def run_batches(
    to: Asked,
    stages: Iterable[Sequence[Batch]],
    answer: Answer,
    kept: Folder[Any],
    tally: Tally,
    *,
    model: object,
    workers: int = 1,
    ray: str | None = None,
    here: Callable[[Batch], Sequence[Any]] | None = None,
) -> None:
    """Run every batch with a missing record, in order in this process, or over Ray.

    Args:
        to: The model in this process.
        stages: Batches by stage. A stage may need records of earlier stages; it is created when it is reached.
        answer: Produces the records of a batch.
        kept: Folder in which records are kept.
        tally: Progress so far.
        model: The model as given, for other processes.
        workers: Number of processes; more than one run over Ray.
        ray: Address of a Ray cluster, as `ray.init` takes it; None uses `RAY_ADDRESS`, or this machine.
        here: Replaces `answer` in this process if it can report progress in more detail.

    Raises:
        UnsupportedError: A live model cannot be sent to other processes.
    """
    elsewhere = None
    if workers > 1 or ray is not None:
        if not isinstance(model, NamedModel) and to.target.kind != "hf":
            raise UnsupportedError(
                "workers need the model by its name, or a plain Hugging Face model; this is a live "
                f"{type(model).__name__}: give its name, or workers=1"
            )
        given = model if isinstance(model, NamedModel) else to.target.hf
        elsewhere = partial(_reopen, given, to.target.tokenizer, to.new, to.budget, answer)
    with Pool(
        here or partial(answer, to),
        elsewhere,
        workers=workers,
        address=ray,
        gpu=to.target.device.type == "cuda",
        progress=tally.progress,
    ) as pool:
        for batches in stages:
            finish(pool, batches, kept, tally)


def _reopen(
    model: object, tokenizer: Any, new: int, budget: Budget, answer: Answer
) -> Callable[[Batch], Sequence[Any]]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return partial(answer, ask(model, tokenizer, new, budget))


class PerCall(Intervention):
    """Records something about the cache after every call of the model.

    Args:
        note: Function from the layers of the cache to what is recorded for the call.
        own: Whether to use sinkscope's own cache, which is needed if tokens are hidden.

    Attributes:
        found: The recorded values, call by call.
    """

    def __init__(self, note: Callable[[Sequence[Any]], Any], *, own: bool) -> None:
        self.found: list[Any] = []
        self._note, self._own = note, own

    def enter(self, run: Run, key: int) -> None:
        """Read the cache after every call."""
        session = Session.of(run)
        if self._own:
            session.own_cache()
        session.after_call(lambda moment: self.found.append(self._note(moment.layers)))
