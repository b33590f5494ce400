"""Base of all interventions: objects that are entered on a model, act while entered, and leave no trace."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch import nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.hooks.edit.positions import Call, Tracker
from sinkscope.models.call_cache import CACHE_NAMES, bridge_hooks, by_name, cache_in, tokens_in
from sinkscope.models.hooks import Args, AroundCall, Hook, Kwargs
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.results.notation import count_of
from sinkscope.tap.internals import in_backward, is_checkpointing, without_continuous_batching


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


class Run:
    """Interventions active on one model, from entry to exit. All state lives here, none on the intervention objects.

    A run acts on forward calls of the thread that entered it, and of threads that have not entered a run on the same
    model themselves. Generating in a worker thread, as for streaming, therefore works unchanged, and two threads
    with one run each do not disturb each other.
    """

    def __init__(self, target: Target, parts: tuple[Intervention, ...]) -> None:
        self.target = target
        self.parts = parts  # what acts, in order
        self.stack = ExitStack()
        self.tracker = Tracker()
        self.thread: int | None = None  # the one that entered it
        self._local = threading.local()
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._pending: list[Callable[[], list[Event]]] = []
        self._names = {module: name for name, module in target.hf.named_modules()}
        self._ran: dict[nn.Module, bool] = {}  # whether edited modules did
        self.passes = 0  # whole ones on which the run acted
        self.session: Any = None  # of the cache, once a policy or an observer of attention is entered (kv.session)

    def __enter__(self) -> Run:
        """Begin to act on the model."""
        if self.thread is not None:
            raise SinkscopeError("an .on(...) that was entered before: call .on(model) again for another `with`")
        self.thread = threading.get_ident()
        with ExitStack() as self.stack:
            self.stack.enter_context(_registered(self))
            self.stack.enter_context(without_continuous_batching(self.target.hf, _no_packed_rows(self.target)))
            self._follow_calls()
            for key, part in enumerate(self.parts):
                part.enter(self, key)
            self.stack.push(self._check_edited)
            self.stack = self.stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        """Restore the model."""
        return self.stack.__exit__(*error)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copying and pickling: a copied model would stay edited by this run, a pickled one be unreadable."""
        raise SinkscopeError(
            "a model cannot be copied or pickled while interventions act on it: leave the `with` first, or copy before"
        )

    @property
    def usage(self) -> list[Any]:
        """What each cache of the run held (`kv.usage.Usage`, in tokens and bytes); empty without a cache policy."""
        if self.session is None:
            return []
        return self.session.usage

    @property
    def call(self) -> Call | None:
        """The forward call that this thread is in; None outside a call, or if the run does not act on it.

        Raises:
            UnsupportedError: A backward pass recomputes a layer, and it is not known for which call.
        """
        call: Call | None = getattr(self._local, "call", None)
        if call is None and in_backward():
            raise UnsupportedError(
                f"a backward pass recomputes a layer of {self.target.name}, and the call to which it belongs is not "
                "known: checkpoint no layer inside the `with`"
            )
        return call

    @property
    def events(self) -> list[Event]:
        """Events so far, in order. Reading them waits for the device once.

        An edit is logged if it moves a neuron by more than a tenth of that neuron's value at the row's first token.
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
        """Register torch hooks with kwargs until the run ends."""
        self.stack.enter_context(self.target.hooks(*hooks))

    def hook_edit(self, module: nn.Module, when: str, fn: Callable[..., Any]) -> None:
        """Register the hook of an edit, which would be lost if the module did not run or were replaced."""

        def noting(*args: Any) -> Any:
            self.keep(module)
            return fn(*args)

        self.keep(module, False)
        self.hook((module, when, noting))

    def keep(self, module: nn.Module, ran: bool = True) -> None:
        """Refuse to end without this module, if the model registers it; else nothing can be said of it."""
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

    def _follow_calls(self) -> None:
        """Follow the forward calls of the model with a generator for each: `call` is set while one runs.

        After an error or an interruption the generator is closed: at once, or where torch runs no hook, as after
        Ctrl-C, before the next call or at the end.
        """
        if self.target.kind == "bridge":
            self.hook(*bridge_hooks(self.target.hf))
        self.stack.callback(self._leave_call)
        self.hook((self.target.base, "pre", self._begin_call), (self.target.base, "always", self._end_call))

    def _leave_call(self) -> None:
        """Close the generator of a call that has ended or broken off."""
        following: AroundCall | None = vars(self._local).pop("following", None)
        if following is not None:
            following.close()

    def _begin_call(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        """Run a generator up to its `yield`; the arguments for the module, or None if the run does not act."""
        self._leave_call()
        if not _acts(self):
            return None
        following = self._follow(module, args, kwargs)
        given = next(following)
        self._local.following = following
        return given

    def _end_call(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        """Let the generator go on with the output, if there is one."""
        if output is not None and hasattr(self._local, "following"):
            with suppress(StopIteration):
                self._local.following.send(output)
        self._leave_call()

    def _follow(self, module: nn.Module, args: Args, kwargs: Kwargs) -> AroundCall:
        """Yield the arguments of a forward call and take its output; a session acts on its cache."""
        given = by_name(module, args, kwargs)
        tokens = given.get("input_ids")
        if tokens is None:
            tokens = given["inputs_embeds"]
        call = self.tracker.begin(tokens, given.get("attention_mask"), cache_in(given))
        if is_checkpointing(self.target.layers[0]):
            raise UnsupportedError(
                f"{self.target.name} runs with gradient checkpointing, which keeps no cache and computes layers again "
                "without the edits: call model.eval() or model.gradient_checkpointing_disable()"
            )
        self._local.call = call
        try:
            if self.session is None:
                output = yield args, kwargs
            else:
                output = yield from self.session.follow(call, module, given)
        finally:
            self._local.call = None
        self.passes += 1
        cache = cache_in(output)
        if call.past == 0 and cache is not None:  # else the cache was given, and is bound
            self.tracker.bind(call.sequence, cache)
            if tokens_in(cache) > call.new:
                raise UnsupportedError(
                    f"positions cannot be counted in {self.target.name}, because its cache does not come as "
                    f"{' or '.join(CACHE_NAMES)}, or does not hold what earlier calls have read; rename that argument, "
                    "or install the versions in constraints.txt"
                )


def _no_packed_rows(target: Target) -> UnsupportedError:
    return UnsupportedError(
        f"continuous batching puts several texts into one row of {target.name}, where edits cannot tell their tokens "
        "apart: use model.generate inside the `with`"
    )


_MOST_PENDING = 64  # pending logs hold tensors of their calls; more are turned into events at once
_ACTIVE: WeakKeyDictionary[nn.Module, list[Run]] = WeakKeyDictionary()
_ACTIVE_LOCK = threading.Lock()


def _acts(run: Run) -> bool:
    me = threading.get_ident()
    if me == run.thread:
        return True
    with _ACTIVE_LOCK:
        return all(other.thread != me for other in _ACTIVE.get(run.target.hf, ()))


@contextmanager
def _registered(run: Run) -> Iterator[None]:
    """Register the run with its model, which sends no trace of nnsight to a server meanwhile."""
    model, given = run.target.hf, run.target.model
    with _ACTIVE_LOCK:
        _ACTIVE.setdefault(model, []).append(run)
        if run.target.kind == "nnsight":
            vars(given)["_remote_backend"] = _refuse_remote
    try:
        yield
    finally:
        with _ACTIVE_LOCK:
            _ACTIVE[model].remove(run)
            if all(other.target.model is not given for other in _ACTIVE[model]):
                vars(given).pop("_remote_backend", None)


def _refuse_remote(*_: Any) -> None:
    """Stands in a model of nnsight where it makes what sends a trace."""
    raise UnsupportedError(
        "a remote trace leaves this intervention behind, because its hooks are on this machine: trace without "
        "remote=, or write the edit in the trace (docs/other_libraries.md)"
    )


class Intervention(ABC):
    """An edit of a model's activations or cache that can be entered on any kind of model.

    Interventions are immutable descriptions: one object may be entered many times and on several models. Edits of
    activations may also be nested on one model, and entered from several threads, each of which sees its own. Cache
    policies and guards own the model's cache, so a second one on the same model is refused while the first acts.
    `a | b` enters both; `a` acts first where they overlap.
    """

    KIND: ClassVar[str] = ""
    """The kind of the events that say what it did."""

    @abstractmethod
    def enter(self, run: Run, key: int) -> None:
        """Register hooks on `run.target` with `run.hook` or `run.stack`; `key` identifies a part of a composition."""

    def summary(self, run: Run) -> str:
        """Return what the intervention did in a run, in one sentence; "" if there is nothing to say."""
        if not self.KIND:
            return ""
        return f"{type(self).__name__} {self.KIND} {count_of(run.counts[self.KIND], 'value')}."

    def check_prompt(self, tokens: int) -> None:  # noqa: B027 - nothing to refuse by default
        """Refuse a prompt of this length before it is read; most interventions accept any length.

        Raises:
            SinkscopeError: The budget, a fraction of this prompt, is less than what is always kept.
        """

    @property
    def parts(self) -> tuple[Intervention, ...]:
        """The interventions to enter, in order."""
        return (self,)

    def __or__(self, other: Intervention) -> Composed:
        if not isinstance(other, Intervention):
            return NotImplemented
        return Composed((*self.parts, *other.parts))

    def on(self, model: object) -> Run:
        """Act on `model` (Hugging Face, TransformerBridge or nnsight) inside the `with`. What is returned is used once.

        Everything that calls the model there is edited: forward, `generate` and its variants, nnsight's `trace` and
        `generate`. On exit, even by an exception, the model is restored. `Run` explains which threads are
        affected. Weights are never changed.

        Raises:
            SinkscopeError: The model has no such layer or neuron.
            UnsupportedError: The model cannot be edited this way (no such site); the message says what can.
        """
        target = target_of(model)
        target.check_loaded()
        return Run(target, self.parts)


@dataclass(frozen=True)
class Composed(Intervention):
    """Several interventions entered together, in order of application; made by `a | b`."""

    members: tuple[Intervention, ...]

    @property
    def parts(self) -> tuple[Intervention, ...]:
        """The members."""
        return self.members

    def enter(self, run: Run, key: int) -> None:
        """Refuse: `parts` are entered one by one instead."""
        raise NotImplementedError


def under(edit: Intervention | None, target: Target) -> AbstractContextManager[Any]:
    """Return a `with` block in which the edit acts; without an edit, nothing does."""
    return nullcontext() if edit is None else edit.on(target)
