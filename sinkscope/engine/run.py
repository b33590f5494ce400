"""A run: what acts on one model, from entry to exit of a `with`; what it does in the calls of the model is in `calls`.

One thread steers a model at a time, and its runs nest. A run or a measurement that a second thread begins waits until
the first has left the model; a bare call of the model in a second thread is refused meanwhile. A thread that has ended
holds nothing, and a run may be left in another thread than it was entered in.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from sinkscope.engine.actor import Actor
from sinkscope.engine.calls import Calls, cache_in
from sinkscope.engine.rows import forget_rows
from sinkscope.engine.tap import Listener, check_attention_known, tapped
from sinkscope.engine.waiting import Wait
from sinkscope.errors import SinkscopeError, UnsupportedError, warn
from sinkscope.models.call_cache import bridge_hooks
from sinkscope.models.hooks import DEPTH, Hook
from sinkscope.models.target import Target

_MOST_PENDING = 64  # pending logs hold tensors of their calls; more are turned into events at once
_CHANGED = threading.Condition()
"""Guards the holds, and tells those who wait that one has ended."""


class Hold(NamedTuple):
    """A thread that holds a decoder.

    Attributes:
        thread: The thread.
        run: The run that it has entered; None for a measurement.
        since: `time.time()` when it began.
    """

    thread: threading.Thread
    run: Run | None
    since: float


_HOLDS: WeakKeyDictionary[nn.Module, tuple[Hold, ...]] = WeakKeyDictionary()
"""The threads that hold each decoder, from entry to exit of a run, or of a measurement."""


@contextmanager
def held(target: Target, run: Run | None = None) -> Iterator[None]:
    """Context manager in which this thread steers a model; it waits while another one does that lives.

    Raises:
        SinkscopeError: The other thread waits for this one, or it has been waited for too long (`waiting`).
    """
    me, decoder = threading.current_thread(), target.base
    with _CHANGED:
        _wait_for(decoder, target.name)
        hold = Hold(me, run, time.time())
        _HOLDS[decoder] = (*_HOLDS.get(decoder, ()), hold)  # another tuple: others read it without the lock
    try:
        yield
    finally:
        with _CHANGED:
            holds = list(_HOLDS[decoder])
            holds.remove(hold)
            _HOLDS[decoder] = tuple(holds)
            _CHANGED.notify_all()


def _wait_for(decoder: nn.Module, name: str) -> None:
    """Wait, with the lock, until no other thread that lives holds a decoder."""
    me = threading.current_thread()
    wait = Wait(name)
    try:
        while holds := _HOLDS.get(decoder, ()):
            holder = holds[-1]
            if holder.thread is me or not holder.thread.is_alive():
                return
            wait.check(holder.thread, holder.since)
            _CHANGED.wait(0.1)  # then look whether that thread still lives
    finally:
        wait.end()


def runs_here(decoder: nn.Module) -> list[Run]:
    """Return the runs that this thread has entered on a decoder."""
    me = threading.current_thread()
    return [hold.run for hold in _HOLDS.get(decoder, ()) if hold.thread is me and hold.run is not None]


@dataclass(frozen=True)
class Event:
    """Something that a guard did, or how a prompt was read along lines.

    Attributes:
        row: Row of the batch.
        step: Forward call of the run, from 0.
        position: True position in the row: 0 is the first token that is not padding.
        layer: Decoder layer; None if it does not belong to one.
        kind: "guard" or "prefill".
        data: Details that depend on the kind.
    """

    row: int
    step: int
    position: int
    layer: int | None
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)


class Run(Calls):
    """Interventions active on one model, from entry to exit. All state lives here or on the caches, none on the model.

    A run acts on forward calls of the thread that entered it; those of other threads are refused meanwhile. A call that
    began in another thread before the run was entered stays plain to its end.
    """

    def __init__(self, target: Target, parts: Sequence[Any]) -> None:
        super().__init__(target)
        self.parts = parts  # what is entered, `hooks.edit.base.Intervention`, in order
        self.stack = ExitStack()
        self._acts = any(part.ACTS for part in parts)
        self._is_used = False
        self._events: list[Event] = []
        self._pending: list[Callable[[], list[Event]]] = []
        self._changed: dict[str, Tensor] = {}  # numbers of what edits did, by kind
        self._names = {module: name for name, module in target.hf.named_modules()}
        self._ran: dict[nn.Module, bool] = {}  # whether edited modules did

    def __enter__(self) -> Run:
        """Begin to act on the model."""
        if self._is_used:
            raise SinkscopeError("an .on(...) that was entered before: call .on(model) again for another `with`")
        self._is_used, self._thread, self._depth = True, threading.current_thread(), DEPTH.value
        target = self.target
        with ExitStack() as self.stack:
            self.stack.enter_context(held(target, self))
            if target.kind == "nnsight":
                self.stack.enter_context(_not_remote(target))
            self.stack.enter_context(_following_generate(self))
            if target.kind == "bridge":
                self.stack.enter_context(target.hooks(*bridge_hooks(target.hf)))
            self.hook((target.base, "pre", self._begin), (target.base, "always", self._end))  # refuse other threads
            if target.base is not getattr(target.hf, "base_model", target.base):
                self.hook((target.hf, "first", self._begin_parts))
            for key, part in enumerate(self.parts):
                part.enter(self, key)
            if any(actor.reads_logits for actor in self.acting["after"]):
                self.hook((target.hf, "always", self._end_model))
            self.stack.push(self._check_edited)
            self.stack.callback(self._close)
            self.stack = self.stack.pop_all()
            self._is_open = True
        return self

    def __exit__(self, *error: Any) -> bool | None:
        """Restore the model."""
        return self.stack.__exit__(*error)

    def __del__(self) -> None:
        """Warn of a run that was made and never entered."""
        if not getattr(self, "_is_used", True) and not sys.is_finalizing():
            names = " | ".join(type(part).__name__ for part in self.parts)
            warn(f"{names}.on(...) was never entered, so it did nothing: write `with ... .on(model):`")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copying and pickling: a copied model would stay edited by this run, a pickled one be unreadable."""
        raise SinkscopeError(
            "a model cannot be copied or pickled while interventions act on it: leave the `with` first, or copy before"
        )

    # What parts ask for when they are entered ----------------------------------------------------------------------

    def act(self, actor: Actor) -> None:
        """Let an actor act in every call from now on, after those that were entered before.

        Raises:
            UnsupportedError: The attention of the model is a function of the user's own.
        """
        if self._listener is None:
            check_attention_known(self.target)
            self._listener = Listener(self._attend, idle=True, outside=self._refuse_attending)
            self.stack.enter_context(tapped(self.target, self._listener))
            for layer in self.target.attending:
                self.keep(self.target.sub(layer, "attn"))
        for moment, acting in self.acting.items():
            if getattr(type(actor), moment) is not getattr(Actor, moment):
                acting.append(actor)

    def begin_generation(self, options: Mapping[str, Any], settings: Any) -> None:
        """Note the settings of a generation, which reads a prompt with these arguments.

        Raises:
            UnsupportedError: Something that acts needs a cache, and there is none; or the model would read a second
                text beside the one from which tokens may be taken back.
        """
        self._settings = settings
        if self.uncached and not options.get("use_cache") and cache_in(options) is None:
            raise UnsupportedError(f"use_cache=False: {self.uncached}: generate with use_cache=True, or without them")
        scale = getattr(settings, "guidance_scale", None)
        if self.reads_one_text and scale not in (None, 1):
            raise UnsupportedError(
                f"guidance_scale={scale}: the model reads a second text beside the one that a guard watches: generate "
                "without it, or without the guard"
            )

    def hook(self, *hooks: Hook) -> None:
        """Register torch hooks with kwargs until the run ends. They run in all threads, and ask for `step` first."""
        self.stack.enter_context(self.target.hooks(*hooks, owned=False))

    def hook_edit(self, module: nn.Module, when: str, fn: Callable[..., Any]) -> None:
        """Register the hook of an edit, which would be lost if the module did not run or were replaced."""

        def noting(*args: Any) -> Any:
            if self.step is None:
                self._refuse_outside(module)
                return None
            self.keep(module)
            return fn(*args)

        self.keep(module, False)
        self.hook((module, when, noting))

    def keep(self, module: nn.Module, ran: bool = True) -> None:
        """Note a registered module of the model: the run may not end without it."""
        if module in self._names:
            self._ran[module] = ran

    def _refuse_attending(self, module: nn.Module) -> None:
        """Refuse an attention module of the decoder that runs while the decoder is in no call; others may attend.

        Raises:
            UnsupportedError: It is one, in the thread that steers.
        """
        if module in self._ran:
            self._refuse_outside(module)

    def _refuse_outside(self, module: nn.Module) -> None:
        """Refuse a module in which something acts, and which the decoder does not call itself.

        Raises:
            UnsupportedError: The thread that steers calls it.
        """
        if self.acts_here:
            name = self._names.get(module, type(module).__name__)
            raise UnsupportedError(
                f"{name} of {self.target.name} is called by itself, outside of a call of the decoder, where the "
                "positions of its tokens are not known and nothing acts: call the model inside the `with`, and single "
                "layers or modules outside of it"
            )

    # What it did ---------------------------------------------------------------------------------------------------

    @property
    def usage(self) -> list[Any]:
        """What each cache of the run held (`kv.usage.Usage`, in tokens and bytes); empty without a cache policy."""
        return [] if self.keeper is None else self.keeper.usage

    @property
    def events(self) -> list[Event]:
        """Events so far, in order: what a guard did, and how prompts were read along lines. Reading them may wait."""
        self._drain()
        return list(self._events)

    @property
    def counts(self) -> Counter[str]:
        """Number of events of each kind, of values that edits changed, and of cells of attention that a knockout hid.

        Reading them waits for the device.

        Rows of a batch that have ended continue as padding, which `generate` treats as real, so they count, too.
        """
        counts = Counter(event.kind for event in self.events)
        counts.update({kind: int(number) for kind, number in self._changed.items()})
        return counts

    def __repr__(self) -> str:
        words = " | ".join(type(part).__name__ for part in self.parts)
        return f"{words} on {self.target.name}: {self.summary()}"

    def summary(self) -> str:
        """Return what the interventions did, in one line."""
        sentences = [part.summary(self) for part in self.parts]
        return " ".join(filter(None, dict.fromkeys(sentences))) or "Nothing was logged."

    def log(self, events: Callable[[], list[Event]]) -> None:
        """Record events. `events` is called later, so that nothing waits for the device inside a forward call."""
        self._pending.append(events)
        if len(self._pending) >= _MOST_PENDING:
            self._drain()

    def count(self, kind: str, number: Tensor) -> None:
        """Add to what is counted, by kind; nothing waits for the device."""
        if kind in self._changed:
            number = number + self._changed[kind].to(number.device)
        self._changed[kind] = number

    def _drain(self) -> None:
        for events in self._pending:
            self._events += events()
        self._pending.clear()

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
        """Act on no call that begins from now on, and leave caches as they were."""
        self._is_open = False
        self._step = self._ended = None
        for cache in list(self._caches):
            forget_rows(cache, self.number)
        for acting in self.acting.values():
            acting.clear()  # some hold the run
        self._attending = []
        self._listener = None


@contextmanager
def _following_generate(run: Run) -> Iterator[None]:
    """Context manager in which `generate`, which alone knows it, tells a run which calls read a prompt.

    Runs may end in any order; the last of them puts back what stood on the model.
    """
    attributes = vars(run.target.hf)
    followed = getattr(attributes.get("_prefill"), "__self__", None)
    if not isinstance(followed, _Followed):
        followed = _Followed(run.target.hf)
    followed.runs.append(run)
    try:
        yield
    finally:
        followed.runs.remove(run)
        if not followed.runs:
            for name in followed.methods:
                attributes.pop(name, None)
            attributes.update(followed.before)


class _Followed:
    """Stands on a model in place of methods that `generate` calls.

    Attributes:
        runs: Who follows it.
        own: What the model calls by itself, by name.
        before: What of that stood on the model, and not on its class.
    """

    def __init__(self, model: Any) -> None:
        attributes = vars(model)
        methods = {
            "_prefill": self.prefill,
            "_get_candidate_generator": self.candidates,
            "init_continuous_batching": self.batch,
            "prepare_inputs_for_generation": self._preparing(model),
        }
        self.runs: list[Run] = []
        self.methods: dict[str, Any] = {name: getattr(model, name, None) for name in methods}
        self.before = {name: attributes[name] for name in methods if name in attributes}
        attributes.update(methods)

    def __deepcopy__(self, _memo: Any) -> _Followed:
        """Stay what it is on a copy of the model, which nobody lets generate."""
        return self

    def prefill(self, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any], **more: Any) -> Any:
        """Read a prompt."""
        runs = [run for run in self.runs if run.acts_here]
        for run in runs:
            run.begin_generation(model_kwargs, generation_config)
            run.prompting = True
        try:
            return self.methods["_prefill"](input_ids, generation_config, model_kwargs, **more)
        finally:
            for run in runs:
                run.prompting = False

    def candidates(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Begin assisted generation, where tokens need not come one by one, but not by the model's own layers."""
        for run in self.runs:
            why = run.by_token
            if generation_config.assistant_early_exit is not None:
                why = "what acts in all layers would act in the first ones alone (assistant_early_exit)"
            if run.acts_here and why:
                raise UnsupportedError(
                    f"assisted generation reads several tokens at a time and takes some back, and {why}: generate "
                    "without an assistant or prompt lookup"
                )
            if run.acts_here:
                read = [kwargs.get("input_ids"), kwargs.get("inputs_tensor"), *args[:2]]
                lengths = [tensor.shape[1] for tensor in read if isinstance(tensor, Tensor)]
                run.drafts_from = max(lengths, default=None)
        return self.methods["_get_candidate_generator"](generation_config, *args, **kwargs)

    def batch(self, *_: Any, **__: Any) -> Any:
        """Refuse to put several texts into one row."""
        raise UnsupportedError(
            "continuous batching puts several texts into one row, where an edit, a policy or a guard cannot tell their "
            "tokens apart: use model.generate inside the `with`"
        )

    def _preparing(self, model: Any) -> Any:
        """What prepares the inputs of a call, and has the signature of the model's own, which transformers reads."""
        own_prepare = getattr(model, "prepare_inputs_for_generation", None)

        def prepare(*args: Any, **kwargs: Any) -> Any:
            for run in self.runs:
                if run.acts_here:
                    run.note_told(kwargs)
            return self.methods["prepare_inputs_for_generation"](*args, **kwargs)

        return prepare if own_prepare is None else wraps(own_prepare)(prepare)


@contextmanager
def _not_remote(target: Target) -> Iterator[None]:
    """Context manager in which a model of nnsight sends no trace to a server."""
    attributes = vars(target.model)
    attributes["_remote_backend"] = _refuse_remote
    try:
        yield
    finally:
        if len(_HOLDS[target.base]) < 2:  # else an outer run goes on
            attributes.pop("_remote_backend", None)


def _refuse_remote(*_: Any) -> None:
    """Stands in a model of nnsight where it makes what sends a trace."""
    raise UnsupportedError(
        "a remote trace leaves this intervention behind, because its hooks are on this machine: trace without "
        "remote=, or write the edit in the trace (docs/other_libraries.md)"
    )
