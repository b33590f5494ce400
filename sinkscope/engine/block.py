"""A block: what acts on one model, from entry to exit of a `with`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from sinkscope.engine.actor import Actor
from sinkscope.engine.calls import BlockCalls
from sinkscope.engine.internals import GenerateFollower, following_generate
from sinkscope.engine.owners import Hold, held, holds_on, wait_for_calls
from sinkscope.engine.rows import forget_rows
from sinkscope.engine.tap import tapped
from sinkscope.errors import SinkscopeError, UnsupportedError, warn
from sinkscope.models.call_cache import bridge_hooks
from sinkscope.models.hooks import Hook
from sinkscope.models.target import Target


@dataclass(frozen=True)
class Event:
    """Something that an intervention did.

    Attributes:
        row: Row of the batch.
        step: Forward call of the run, from 0.
        position: True position in the row: 0 is the first token that is not padding.
        layer: Decoder layer; None if it does not belong to one.
        head: Query head; None if it does not belong to one.
        kind: "patched", "ablated", "guard", "prefill".
        data: Details that depend on the kind, e.g. the neuron with its old and new value.
    """

    row: int
    step: int
    position: int
    layer: int | None
    head: int | None
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)


class Part(Protocol):
    """What acts in a block; `hooks.edit.base.Intervention` is the base of all."""

    def enter(self, run: Run, key: int) -> None:
        """Begin to act."""
        ...

    def summary(self, run: Run) -> str:
        """Return what it did, in one sentence."""
        ...


class Reach:
    """Whether an edit has met a token, which is asked of the device as late as possible.

    Attributes:
        is_certain: Whether it certainly has.
    """

    def __init__(self) -> None:
        self.is_certain = False
        self._pending: Tensor | None = None

    def note(self, met: Tensor) -> None:
        """Note which tokens it meets in a call."""
        if self.is_certain:
            return
        here = met.any()
        if here.device.type == "cpu":
            self.is_certain = bool(here)
        else:
            self._pending = here if self._pending is None else self._pending.to(here.device) | here

    @property
    def is_any(self) -> bool:
        """Whether it has met one."""
        return self.is_certain or (self._pending is not None and bool(self._pending))


class Run(BlockCalls):
    """Interventions active on one model, from entry to exit. All state lives here or on the caches, none on the model.

    A run acts on forward calls of the thread that entered it, and of threads that have not entered a run on the same
    model themselves, so that generating in a worker thread, as for streaming, works unchanged. While it is open no
    other thread can enter a run on the model (`engine.owners`). A call that began before the run was entered stays
    plain to its end, and one that began inside is edited to its end: leaving waits for it.
    """

    def __init__(self, target: Target, parts: Sequence[Part], *, confined: bool = False, wait: bool = False) -> None:
        super().__init__(target)
        self.parts = parts  # what acts, in order
        self.stack = ExitStack()
        self._confined, self._wait = confined, wait
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._pending: list[Callable[[], list[Event]]] = []
        self._names = {module: name for name, module in target.hf.named_modules()}
        self._ran: dict[nn.Module, bool] = {}  # whether edited modules did

    def __enter__(self) -> Run:
        """Begin to act on the model."""
        if self._hold is not None:
            raise SinkscopeError("an .on(...) that was entered before: call .on(model) again for another `with`")
        what = " | ".join(type(part).__name__ for part in self.parts)
        self._hold = Hold(threading.current_thread(), what, self._confined, self.number)
        target = self.target
        with ExitStack() as self.stack:
            self.stack.enter_context(held(target.base, self._hold, target.name, wait=self._wait))
            self.stack.enter_context(_not_remote(self))
            generation = self._begin_generation, self._set_prompting, _no_packed_rows(target)
            self.stack.enter_context(following_generate(target.hf, GenerateFollower(self.acts_here, *generation)))
            if target.kind == "bridge":
                self.stack.enter_context(target.hooks(*bridge_hooks(target.hf)))
            # Hooks of every thread, which find out by themselves whose call it is.
            self.stack.enter_context(
                target.hooks(
                    (target.base, "pre", self._begin),
                    (target.base, "always", self._end),
                    owned=False,
                )
            )
            for key, part in enumerate(self.parts):
                part.enter(self, key)
            if any(type(actor).after is not Actor.after and actor.reads_logits for actor in self.actors):
                around = (target.hf, "first", self._begin_model), (target.hf, "always", self._end_model)
                self.stack.enter_context(target.hooks(*around, owned=False))
            self.stack.push(self._check_edited)
            self.stack.callback(self._close)
            self.stack = self.stack.pop_all()
            self._is_open = True
        return self

    def __exit__(self, *error: Any) -> bool | None:
        """Restore the model."""
        return self.stack.__exit__(*error)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copying and pickling: a copied model would stay edited by this run, a pickled one be unreadable."""
        raise SinkscopeError(
            "a model cannot be copied or pickled while interventions act on it: leave the `with` first, or copy before"
        )

    # What parts ask for when they are entered ----------------------------------------------------------------------

    def act(self, actor: Actor, *, first: bool = False) -> None:
        """Let an actor act in every call from now on, after those that were entered before, or `first` of all."""
        if self._configs is None:
            self._configs = self.stack.enter_context(tapped(self.target))
            for layer in self.target.attending:
                self.keep(self.target.sub(layer, "attn"))
        self.actors.insert(0 if first else len(self.actors), actor)
        self._moments()

    def reach(self, name: str, why: str) -> Reach:
        """Return what notes whether an edit has met any token; one that never does gives a warning at the end.

        Args:
            name: Name of the edit.
            why: Why it did nothing, if it did not.
        """
        reach = Reach()

        def warn_if_none(error: object, *_: object) -> None:
            if error is None and self.passes and not reach.is_any:
                warn(f"{name} never acted: {why}, so all results are those without it")

        self.stack.push(warn_if_none)
        return reach

    def check_generate(self, check: Callable[[str, dict[str, Any]], None]) -> None:
        """Let `check` refuse kinds of generation.

        Args:
            check: Called with the name of the method of the model that `generate` calls, and the arguments of the call.
        """
        self._checks.append(check)

    @property
    def usage(self) -> list[Any]:
        """What each cache of the run held (`kv.usage.Usage`, in tokens and bytes); empty without a cache policy."""
        for actor in self.actors:
            usage = getattr(actor, "usage", None)
            if usage is not None:
                return usage
        return []

    @property
    def events(self) -> list[Event]:
        """Events so far, in order. Reading them waits for the device once.

        `Ablate` logs every value that it changes, `SinkPatch` those that it moves by more than a tenth of the neuron's
        value at the row's first token, where the sink is.
        Rows of a batch that have ended continue as padding, which `generate` treats as real, so they have events too.
        """
        with self._lock:
            self._drain()
            return list(self._events)

    @property
    def counts(self) -> Counter[str]:
        """Number of events of each kind."""
        return Counter(event.kind for event in self.events)

    def summary(self) -> str:
        """Return what the interventions did, in one line."""
        sentences = [part.summary(self) for part in self.parts]
        return " ".join(filter(None, dict.fromkeys(sentences))) or "Nothing was logged."

    def log(self, events: Callable[[], list[Event]]) -> None:
        """Record events. `events` is called later, so that nothing waits for the device inside a forward call."""
        with self._lock:
            self._pending.append(events)
            if len(self._pending) >= _MOST_PENDING:
                self._drain()

    def _drain(self) -> None:
        for events in self._pending:
            self._events += events()
        self._pending.clear()

    def hook(self, *hooks: Hook) -> None:
        """Register torch hooks with kwargs until the run ends. They run in all threads, and ask for `step` first."""
        self.stack.enter_context(self.target.hooks(*hooks, owned=False))

    def hook_edit(self, module: nn.Module, when: str, fn: Callable[..., Any]) -> None:
        """Register the hook of an edit, which would be lost if the module did not run or were replaced."""

        def noting(*args: Any) -> Any:
            if self.step is None:
                return None
            self.keep(module)
            return fn(*args)

        self.keep(module, False)
        self.hook((module, when, noting))

    def keep(self, module: nn.Module, ran: bool = True) -> None:
        """Note a registered module of the model: the run may not end without it."""
        if module in self._names:
            self._ran[module] = ran

    def _check_edited(self, error: object, *_: object) -> None:
        """Refuse a run that ends without an error and in which an edit was lost, although the model ran.

        Raises:
            UnsupportedError: Another module has taken the place of an edited one, or an edited module never ran.
        """
        present = set(self.target.hf.modules())
        lost = [self._names[module] for module, ran in self._ran.items() if not ran or module not in present]
        if lost and self.passes and error is None:
            raise UnsupportedError(
                f"{min(lost)} of {self.target.name} was replaced inside the `with`, or never ran while the model did, "
                "so that the edit there was lost: replace modules (or add an adapter) before the `with`, and switch "
                "off what does their work in another way (a fused kernel, a captured graph, a skipped layer)"
            )

    def _close(self) -> None:
        """Act on no call that begins from now on, wait for those of other threads, and leave caches as they were."""
        self._is_open = False
        self._drop()
        wait_for_calls(self._live)
        for cache in list(self._caches):
            forget_rows(cache, self.number)
        self.actors = [actor for actor in self.actors if hasattr(actor, "usage")]  # others hold the block
        self._moments()
        self._checks.clear()


def _no_packed_rows(target: Target) -> UnsupportedError:
    return UnsupportedError(
        f"continuous batching puts several texts into one row of {target.name}, where edits cannot tell their tokens "
        "apart: use model.generate inside the `with`"
    )


_MOST_PENDING = 64  # pending logs hold tensors of their calls; more are turned into events at once


@contextmanager
def _not_remote(run: Run) -> Iterator[None]:
    """Context manager in which a model of nnsight sends no trace to a server."""
    model = run.target.model
    if run.target.kind == "nnsight":
        vars(model)["_remote_backend"] = _refuse_remote
    try:
        yield
    finally:
        if run.target.kind == "nnsight" and len(holds_on(run.target.base)) < 2:  # else an outer block goes on
            vars(model).pop("_remote_backend", None)


def _refuse_remote(*_: Any) -> None:
    """Stands in a model of nnsight where it makes what sends a trace."""
    raise UnsupportedError(
        "a remote trace leaves this intervention behind, because its hooks are on this machine: trace without "
        "remote=, or write the edit in the trace (docs/other_libraries.md)"
    )
