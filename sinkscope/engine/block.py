"""A block: what acts on one model, from entry to exit of a `with`."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from sinkscope.engine.internals import in_backward, is_checkpointing, without_continuous_batching
from sinkscope.engine.step import Call, RowState, begin_call, forget_rows, put_rows
from sinkscope.errors import SinkscopeError, UnsupportedError, warn
from sinkscope.models.call_cache import CACHE_NAMES, bridge_hooks, by_name, cache_in, tokens_in
from sinkscope.models.hooks import Args, AroundCall, Hook, Kwargs
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


class CallSession(Protocol):
    """What policies, guards and observers of a run share; `kv.session.Session` is one."""

    @property
    def usage(self) -> list[Any]:
        """What each cache of the run held."""
        ...

    def follow(self, call: Call, module: nn.Module, given: Kwargs) -> AroundCall:
        """Act on the cache of a call before and after it; its arguments are given by name."""
        ...


class _Here(threading.local):
    """The call in which a thread is.

    Attributes:
        call: Its record; None outside a call, or if the run does not act on it.
        following: What the session does about it.
    """

    call: Call | None = None
    following: AroundCall | None = None


class Run:
    """Interventions active on one model, from entry to exit. All state lives here or on the caches, none on the model.

    A run acts on forward calls of the thread that entered it, and of threads that have not entered a run on the same
    model themselves. Generating in a worker thread, as for streaming, therefore works unchanged, and two threads
    with one run each do not disturb each other. What sinkscope enters for itself, as in a measurement, is confined to
    its own thread, and a measurement is left alone by other threads (`apart`). A call that began before the run was
    entered stays plain to its end, and one that began inside is edited to its end: leaving waits for it.
    """

    def __init__(self, target: Target, parts: Sequence[Part], *, confined: bool = False) -> None:
        self.target = target
        self.parts = parts  # what acts, in order
        self.confined = confined  # whether it acts in the thread that entered it alone
        self.stack = ExitStack()
        self.number = next(_NUMBERS)
        self.thread: int | None = None  # the one that entered it
        self.session: CallSession | None = None  # once a policy or an observer of attention is entered
        self.passes = 0  # whole ones on which the run acted
        self._here = _Here()
        self._is_open = False  # whether calls that begin now are acted on
        self._live: dict[Call, threading.Thread] = {}  # calls that have begun and not ended
        self._steps = itertools.count()
        self._caches: WeakSet[Any] = WeakSet()  # on which something is known of rows
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._pending: list[Callable[[], list[Event]]] = []
        self._names = {module: name for name, module in target.hf.named_modules()}
        self._ran: dict[nn.Module, bool] = {}  # whether edited modules did

    def __enter__(self) -> Run:
        """Begin to act on the model."""
        if self.thread is not None:
            raise SinkscopeError("an .on(...) that was entered before: call .on(model) again for another `with`")
        self.thread = threading.get_ident()
        with ExitStack() as self.stack:
            self.stack.enter_context(_registered(self))
            self.stack.enter_context(without_continuous_batching(self.target.hf, _no_packed_rows(self.target)))
            if self.target.kind == "bridge":
                self.stack.enter_context(self.target.hooks(*bridge_hooks(self.target.hf)))
            # Hooks of every thread, which find out by themselves whose call it is.
            self.stack.enter_context(
                self.target.hooks(
                    (self.target.base, "pre", self._begin_call),
                    (self.target.base, "always", self._end_call),
                    owned=False,
                )
            )
            for key, part in enumerate(self.parts):
                part.enter(self, key)
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

    @property
    def usage(self) -> list[Any]:
        """What each cache of the run held (`kv.usage.Usage`, in tokens and bytes); empty without a cache policy."""
        return [] if self.session is None else self.session.usage

    @property
    def call(self) -> Call | None:
        """The record of the forward call that this thread is in; None outside a call, or if the run does not act on it.

        Raises:
            UnsupportedError: A backward pass recomputes a layer, and it is not known for which call.
        """
        call = self._here.call
        if call is None and in_backward():
            raise UnsupportedError(
                f"a backward pass recomputes a layer of {self.target.name}, and the call to which it belongs is not "
                "known: checkpoint no layer inside the `with`"
            )
        return call

    def acts_here(self) -> bool:
        """Return whether the run acts on calls that begin now in this thread."""
        me = threading.get_ident()
        if not self._is_open or me == self.thread:
            return self._is_open
        if self.confined or _APART.is_on:
            return False
        return all(other.thread != me for other in _ACTIVE.get(self.target.base, ()))

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
        """Register torch hooks with kwargs until the run ends. They run in all threads, and ask for `call` first."""
        self.stack.enter_context(self.target.hooks(*hooks, owned=False))

    def hook_edit(self, module: nn.Module, when: str, fn: Callable[..., Any]) -> None:
        """Register the hook of an edit, which would be lost if the module did not run or were replaced."""

        def noting(*args: Any) -> Any:
            if self.call is None:
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
        self._drop_call()
        me = threading.current_thread()
        while any(thread is not me and thread.is_alive() for thread in list(self._live.values())):
            time.sleep(_WAIT)
        for cache in list(self._caches):
            forget_rows(cache, self.number)

    def know_rows(self, cache: Any, state: RowState) -> None:
        """Lay what is known of some rows on their cache."""
        with suppress(TypeError):  # an object that cannot be referred to weakly
            self._caches.add(cache)
        put_rows(cache, self.number, state)

    def _begin_call(self, module: nn.Module, args: Args, kwargs: Kwargs | None = None) -> tuple[Args, Kwargs] | None:
        """Make the record of a call; the arguments for the module, or None if they stay as they are."""
        here = self._here
        if here.call is not None:  # it was broken off, as by Ctrl-C, after which PyTorch runs no hook
            self._drop_call()
        if kwargs is None or not self.acts_here():
            return None
        given = by_name(module, args, kwargs) if args else kwargs
        first = self.target.layers[0]
        if first.training and is_checkpointing(first):
            raise UnsupportedError(
                f"{self.target.name} runs with gradient checkpointing, which keeps no cache and computes layers again "
                "without the edits: call model.eval() or model.gradient_checkpointing_disable()"
            )
        call = begin_call(self.number, next(self._steps), given)
        self._live[call] = threading.current_thread()
        if not self._is_open:  # it was closed in the meantime
            del self._live[call]
            return None
        here.call = call
        if call.cache is not None and (call.past == 0 or call.state.partial):
            self.know_rows(call.cache, call.state)
        if self.session is None:
            return None
        here.following = self.session.follow(call, module, given)
        return next(here.following)

    def _end_call(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any = None) -> None:
        """End the record of a call with its output, or, after an error, without."""
        here = self._here
        call, following = here.call, here.following
        if call is None:
            return
        if output is not None and following is not None:
            here.following = None
            try:
                following.send(output)
            except StopIteration:
                pass
            except BaseException:
                self._drop_call()
                raise
        if output is None:
            self._drop_call()
            return
        here.call = None
        del self._live[call]
        self.passes += 1
        if call.past == 0:
            self._note_cache(call, cache_in(output))

    def _note_cache(self, call: Call, cache: Any) -> None:
        """Lay what is known of the rows of a first call on the cache that it made, if it was given none."""
        if cache is None:
            return
        if call.cache is None:
            self.know_rows(cache, call.state)
        if tokens_in(cache) > call.new:
            raise UnsupportedError(
                f"positions cannot be counted in {self.target.name}, because its cache does not come as "
                f"{' or '.join(CACHE_NAMES)}, or does not hold what earlier calls have read; rename that argument, "
                "or install the versions in constraints.txt"
            )

    def _drop_call(self) -> None:
        """Forget the call in which this thread is."""
        here = self._here
        call, following = here.call, here.following
        here.call = here.following = None
        if call is not None:
            self._live.pop(call, None)
        if following is not None:
            following.close()


def _no_packed_rows(target: Target) -> UnsupportedError:
    return UnsupportedError(
        f"continuous batching puts several texts into one row of {target.name}, where edits cannot tell their tokens "
        "apart: use model.generate inside the `with`"
    )


_MOST_PENDING = 64  # pending logs hold tensors of their calls; more are turned into events at once
_WAIT = 0.001  # seconds between two looks at calls that have not ended
_NUMBERS = itertools.count()
_ACTIVE: WeakKeyDictionary[nn.Module, list[Run]] = WeakKeyDictionary()
_ACTIVE_LOCK = threading.Lock()


@contextmanager
def _registered(run: Run) -> Iterator[None]:
    """Register the run with its model, which sends no trace of nnsight to a server meanwhile."""
    model, given = run.target.base, run.target.model  # the decoder: the same whatever is around it
    with _ACTIVE_LOCK:
        _ACTIVE[model] = [*_ACTIVE.get(model, ()), run]  # a new list: others read it without the lock
        if run.target.kind == "nnsight":
            vars(given)["_remote_backend"] = _refuse_remote
    try:
        yield
    finally:
        with _ACTIVE_LOCK:
            _ACTIVE[model] = [other for other in _ACTIVE[model] if other is not run]
            if all(other.target.model is not given for other in _ACTIVE[model]):
                vars(given).pop("_remote_backend", None)


def runs_here(decoder: nn.Module) -> list[int]:
    """Return the numbers of the runs that act on calls of a model's decoder which begin now in this thread."""
    return [run.number for run in _ACTIVE.get(decoder, ()) if run.acts_here()]


class _Apart(threading.local):
    """Whether no other thread's run acts on the calls of a thread."""

    is_on = False


_APART = _Apart()


@contextmanager
def apart() -> Iterator[None]:
    """Context manager, and decorator, in which no other thread's run acts on the calls of this thread."""
    before, _APART.is_on = _APART.is_on, True
    try:
        yield
    finally:
        _APART.is_on = before


def check_apart(target: Target, what: str) -> None:
    """Warn of a run that is left out because another thread entered it, and would act on other calls of this thread.

    Args:
        target: The model.
        what: What leaves it out.
    """
    me, runs = threading.get_ident(), _ACTIVE.get(target.base, ())
    if any(not run.confined for run in runs) and all(run.thread != me for run in runs):
        warn(
            f"another thread is inside a `with` that edits {target.name}, and {what} measures the model without it: "
            "enter it in the thread that measures"
        )


def _refuse_remote(*_: Any) -> None:
    """Stands in a model of nnsight where it makes what sends a trace."""
    raise UnsupportedError(
        "a remote trace leaves this intervention behind, because its hooks are on this machine: trace without "
        "remote=, or write the edit in the trace (docs/other_libraries.md)"
    )
