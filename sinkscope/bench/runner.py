"""What every benchmark's run does: a model that is asked by several methods, in batches, over processes, resumed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from sinkscope.bench.methods import Budget, Method
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.generate import ends_and_pad, padded
from sinkscope.interventions.base import Event, Intervention, Run
from sinkscope.interventions.decode import decoding, noted_decoding
from sinkscope.kv.loopserve.serve import LoopServe
from sinkscope.kv.session import Session
from sinkscope.models.open import fingerprint_of
from sinkscope.models.target import Target
from sinkscope.parallel import Pool, Tally, finish
from sinkscope.results import ModelInfo
from sinkscope.store import Folder


@dataclass(frozen=True)
class NamedModel:
    """A model by its name, which each process opens for itself.

    Attributes:
        name: as for `sinkscope.load`.
        options: the same.
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
    """The model that is asked, and how.

    Attributes:
        target: the model.
        fingerprint: of it.
        ends: ids that end an answer.
        pad: id that fills rows up.
        new: most tokens of an answer.
        budget: of methods that have none of their own.
    """

    target: Target
    fingerprint: str
    ends: frozenset[int]
    pad: int
    new: int
    budget: Budget

    def settings(self) -> dict[str, Any]:
        """What decides a record, whatever is done with the model."""
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
        """An answer up to and with the end of sequence, and whether that came."""
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
        """Greedy answers to prompts that are filled up on the left, and what the edit did.

        Args:
            rows: ids of the prompts.
            edit: what is entered on the model.
            hook: called after each pass of the causal model.
            new: most tokens; None: as many as an answer may have.
            options: further ones of transformers' `generate`.
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
    """The model, ready to be asked.

    Args:
        model: Hugging Face, TransformerBridge, nnsight (dispatched), `Target`, or `NamedModel`.
        tokenizer: where the model carries none.
        new: most tokens of an answer.
        budget: of methods that have none of their own.
        chat: prompts are wrapped in its chat template.

    Raises:
        SinkscopeError: it carries no tokenizer, or no chat template.
    """
    target = Target.of(model.open() if isinstance(model, NamedModel) else model, tokenizer)
    tok = target.need_tokenizer()
    if chat and not getattr(tok, "chat_template", None):
        raise SinkscopeError(f"the tokenizer of {target.name} has no chat template: leave out chat")
    return Asked(target, fingerprint_of(target), *ends_and_pad(target), new, budget)


def check_can(to: Asked, methods: Sequence[Method], lengths: Iterable[int], window: int | None = None) -> None:
    """Refuse what cannot be done before anything is computed.

    Raises:
        SinkscopeError: a budget too small for one of the prompts, settings that make no sense, or a method that this
            model cannot have.
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
    """Some prompts by one method or several: what is run whole or not at all.

    Attributes:
        model: fingerprint of the model.
        methods: that answer.
        rows: the prompts, which have an `id`, each with what else the benchmark knows of it.
    """

    model: str
    methods: tuple[Method, ...]
    rows: tuple[tuple[Any, Any], ...]

    @property
    def size(self) -> int:
        """Of it in the progress."""
        return len(self.methods) * len(self.rows)

    @property
    def keys(self) -> tuple[tuple[Any, ...], ...]:
        """Keys of the records that it makes."""
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
    """Every batch that has a record missing, in this process in their order, or over Ray.

    Args:
        to: the model in this process.
        stages: batches; those of a stage may need records of the stages before it, which is made when it is reached.
        answer: makes the records of a batch.
        kept: where they are kept.
        tally: how much is done.
        model: as it was given, for other processes.
        workers: processes; more than one run over Ray.
        ray: address of a Ray cluster, as `ray.init` takes it; None: `RAY_ADDRESS`, or this machine.
        here: instead of `answer` in this process, where that shows more of the progress.

    Raises:
        UnsupportedError: a live model that cannot be sent to other processes.
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
    """Notes something about the cache after every call of the model.

    Args:
        note: of the layers of the cache -> what is kept of the call.
        own: look at a cache of ours, which it takes where tokens are hidden.

    Attributes:
        found: what was noted, call by call.
    """

    def __init__(self, note: Callable[[Sequence[Any]], Any], *, own: bool) -> None:
        self.found: list[Any] = []
        self._note, self._own = note, own

    def enter(self, run: Run, key: int) -> None:
        """Look at the cache after every call."""
        session = Session.of(run)
        if self._own:
            session.own_cache()
        session.after_call(lambda moment: self.found.append(self._note(moment.layers)))
