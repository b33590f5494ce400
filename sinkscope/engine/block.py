"""A block: what acts on one model, from entry to exit of a `with`.

A forward call goes through the block in this order:

1. `_begin`: the record of the call is made (`Step`), and every actor acts before the model reads.
2. The tap shows the attention of each layer to every actor (`_attend`), and edits of activations act by hooks that read
   the same record.
3. `_end`: the decoder has read. `_end_model`: logits exist, and every actor acts after them; what one takes back goes
   to the writer of the text, if it can take tokens back (`Writer`).
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

from torch import Tensor, nn

from sinkscope.engine.actor import Actor, TakeBack
from sinkscope.engine.attention import Attention
from sinkscope.engine.internals import (
    GenerateFollower,
    following_generate,
    in_backward,
    is_checkpointing,
    without_continuous_batching,
)
from sinkscope.engine.owners import Hold, acts, held, holds_on, wait_for_calls
from sinkscope.engine.rows import RowState, forget_rows, put_rows
from sinkscope.engine.step import Step, begin_step
from sinkscope.engine.stock import NAME, attention_name, stock_of
from sinkscope.engine.tap import HANDLERS, Handler, tapped
from sinkscope.errors import SinkscopeError, UnsupportedError, warn
from sinkscope.models.call_cache import (
    CACHE_NAMES,
    bridge_hooks,
    by_name,
    cache_in,
    new_call_cache,
    tokens_in,
    with_cache,
)
from sinkscope.models.hooks import Args, Hook, Kwargs
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


class Writer(Protocol):
    """Who writes a text by calls of the model, and can take tokens back (`generation.write`)."""

    @property
    def allowance(self) -> list[int]:
        """How many tokens of each row may still be taken back."""
        ...

    @property
    def room(self) -> list[int]:
        """How many columns each row has when it is full."""
        ...

    @property
    def taken(self) -> TakeBack | None:
        """What was taken back in this piece of the text, which ends; None if nothing."""
        ...

    @property
    def goes_on(self) -> bool:
        """Whether a piece follows another, so that `generate` reads no prompt."""
        ...

    def take(self, back: TakeBack) -> None:
        """Take tokens back once the call has ended."""
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


class _Here(threading.local):
    """What a thread is doing with the model of a block.

    Attributes:
        step: The record of the call in which the decoder is; None outside a call, or if the block does not act on it.
        ended: The record of the call that the decoder has ended, until its logits exist.
        in_model: Whether the whole model runs, so that logits will come.
        reading: The hook that reads the mask of the first layer, if texts may be packed in this call.
        handler: What the tap calls in the layers of this call.
        prompting: Whether `generate` is reading a prompt, so that even a single-token call is a part of it.
        settings: Settings of the latest `generate`; None without one.
        writer: Who writes the text; None if tokens cannot be taken back.
    """

    step: Step | None = None
    ended: Step | None = None
    in_model: bool = False
    reading: AbstractContextManager[None] | None = None
    handler: Handler | None = None
    prompting: bool = False
    settings: Any = None
    writer: Writer | None = None


class Run:
    """Interventions active on one model, from entry to exit. All state lives here or on the caches, none on the model.

    A run acts on forward calls of the thread that entered it, and of threads that have not entered a run on the same
    model themselves, so that generating in a worker thread, as for streaming, works unchanged. While it is open no
    other thread can enter one (`engine.owners`). A call that began before the run was entered stays plain to its end,
    and one that began inside is edited to its end: leaving waits for it.
    """

    def __init__(self, target: Target, parts: Sequence[Part], *, confined: bool = False, wait: bool = False) -> None:
        self.target = target
        self.parts = parts  # what acts, in order
        self.stack = ExitStack()
        self.number = next(_NUMBERS)
        self.takes_back = False  # whether some actor may take tokens back
        self.passes = 0  # whole ones on which the run acted
        self.actors: list[Actor] = []
        self._moments()
        self.here = _Here()
        self._confined, self._wait = confined, wait
        self._hold: Hold | None = None  # once it is entered
        self._configs: frozenset[int] | None = None  # of the model, once something acts in its attention
        self._is_open = False  # whether calls that begin now are acted on
        self._live: dict[int, threading.Thread] = {}  # threads of calls that have begun and not ended, by number
        self._steps = itertools.count()
        self._checks: list[Callable[[str, dict[str, Any]], None]] = []
        self._caches: WeakSet[Any] = WeakSet()  # on which something is known of rows
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
            self.stack.enter_context(without_continuous_batching(target.hf, _no_packed_rows(target)))
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

    def act(self, actor: Actor) -> None:
        """Let an actor act in every call from now on, after those that were entered before."""
        if self._configs is None:
            self._configs = self.stack.enter_context(tapped(self.target))
            for layer in self.target.attending:
                self.keep(self.target.sub(layer, "attn"))
        self.actors.append(actor)
        self._moments()

    def _moments(self) -> None:
        """Note which actors act at which moment, so that nothing is called in vain at every token."""
        kinds = [(actor, type(actor)) for actor in self.actors]
        self._before = [actor.before for actor, kind in kinds if kind.before is not Actor.before]
        self._attends = [actor.attends for actor, kind in kinds if kind.attends is not Actor.attends]
        self._attend_in = [actor.attend for actor, kind in kinds if kind.attend is not Actor.attend]
        self._after = [actor.after for actor, kind in kinds if kind.after is not Actor.after]

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
        """Let `check` refuse kinds of generation; and learn when `generate` reads a prompt, and its settings.

        Args:
            check: Called with the name of the method of the model that `generate` calls, and the arguments of the call.
        """
        self._checks.append(check)
        if len(self._checks) == 1:
            follower = GenerateFollower(self.acts_here, self._begin_generation, self._set_prompting)
            self.stack.enter_context(following_generate(self.target.hf, follower))

    def _begin_generation(self, method: str, options: dict[str, Any], settings: Any) -> None:
        if settings is not None:
            self.here.settings = settings
        for check in self._checks:
            check(method, options)

    def _set_prompting(self, reads: bool) -> None:
        writer = self.here.writer
        self.here.prompting = reads and (writer is None or not writer.goes_on)

    @contextmanager
    def writing(self, writer: Writer) -> Iterator[None]:
        """Context manager in which a writer of this thread can take tokens back."""
        self.here.writer = writer
        try:
            yield
        finally:
            self.here.writer = None

    @property
    def usage(self) -> list[Any]:
        """What each cache of the run held (`kv.usage.Usage`, in tokens and bytes); empty without a cache policy."""
        for actor in self.actors:
            usage = getattr(actor, "usage", None)
            if usage is not None:
                return usage
        return []

    @property
    def step(self) -> Step | None:
        """The record of the forward call that this thread is in; None outside a call, or if the run does not act on it.

        Raises:
            UnsupportedError: A backward pass recomputes a layer, and it is not known for which call.
        """
        step = self.here.step
        if step is None and in_backward():
            raise UnsupportedError(
                f"a backward pass recomputes a layer of {self.target.name}, and the call to which it belongs is not "
                "known: checkpoint no layer inside the `with`"
            )
        return step

    def acts_here(self) -> bool:
        """Return whether the run acts on calls that begin now in this thread."""
        if not self._is_open or self._hold is None:
            return False
        return self._hold.thread is threading.current_thread() or acts(self.target.base, self._hold)

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

    def know_rows(self, cache: Any, state: RowState) -> None:
        """Lay what is known of some rows on their cache."""
        with suppress(TypeError):  # an object that cannot be referred to weakly
            self._caches.add(cache)
        put_rows(cache, self.number, state)

    # What the model calls ------------------------------------------------------------------------------------------

    def _begin_model(self, *_: Any) -> None:
        """Note that logits will come."""
        self.here.in_model = True

    def _begin(self, module: nn.Module, args: Args, kwargs: Kwargs | None = None) -> tuple[Args, Kwargs] | None:
        """Make the record of a call; the arguments for the module, or None if they stay as they are."""
        here = self.here
        if here.step is not None:  # it was broken off, as by Ctrl-C, after which PyTorch runs no hook
            self._drop()
        if kwargs is None or not self.acts_here():
            return None
        given = by_name(module, args, kwargs) if args else kwargs
        first = self.target.layers[0]
        if first.training and is_checkpointing(first):
            raise UnsupportedError(
                f"{self.target.name} runs with gradient checkpointing, which keeps no cache and computes layers again "
                "without the edits: call model.eval() or model.gradient_checkpointing_disable()"
            )
        changed, cache = None, cache_in(given)
        if self.actors and cache is None:
            cache = new_call_cache(given, self.target)
            if cache is not None:
                given = with_cache(module, given, cache)
                changed = (), given
        step = begin_step(self.number, next(self._steps), given, cache)
        self._live[step.number] = threading.current_thread()
        if not self._is_open:  # it was closed in the meantime
            self._live.pop(step.number, None)
            return None
        here.step, here.ended = step, None
        if step.jumps is not None:
            hook = (self.target.layers[0], "first", partial(self._note_mask, step))
            here.reading = self.target.hooks(hook)
            here.reading.__enter__()
        if step.cache is not None and (step.past == 0 or step.state.partial):
            self.know_rows(step.cache, step.state)
        if self.actors:
            self._act_before(step)
        return changed

    def _act_before(self, step: Step) -> None:
        """Let every actor act, and listen to the attention of the layers if one of them has something to do there."""
        here = self.here
        step.settings, step.prompting = here.settings, here.prompting
        if here.writer is not None:
            step.may_take_back, step.room = here.writer.allowance, here.writer.room
            step.is_over = here.writer.taken is not None
        for before in self._before:
            before(step)
        idle = True
        for attends in self._attends:
            if attends(step):
                idle = False

        assert self._configs is not None
        attend = partial(self._attend, step)
        here.handler = handler = Handler(attend, self._configs, step.past, has_gaps=step.has_gaps, idle=idle)
        HANDLERS.set((handler, *HANDLERS.get()))

    def _attend(self, step: Step, attention: Attention) -> None:
        """Let every actor act in the attention of a layer."""
        for attend in self._attend_in:
            attend(step, attention)

    def _note_mask(self, step: Step, _module: nn.Module, _args: Args, kwargs: Kwargs) -> None:
        """Read from the mask that the first layer gets whether texts are packed into a row."""
        kind = stock_of(self.target.config).kind
        step.note_mask(kwargs.get("attention_mask"), packs_in_kernel="flash" in kind)

    def _end(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any = None) -> None:
        """End the record of a call with the decoder's output, or, after an error, without."""
        here = self.here
        step, handler = here.step, here.handler
        if step is None:
            return
        if output is None:
            self._drop()
            return
        here.step = None
        if here.reading is not None:
            here.reading.__exit__(None, None, None)
            here.reading = None
        if handler is not None:
            here.handler = None
            if HANDLERS.get() == (handler,):
                HANDLERS.set(())
            else:
                handler.__exit__()
            if not handler.was_reached:
                self._live.pop(step.number, None)
                raise self._attention_elsewhere()
        self.passes += 1
        if step.past == 0:
            self._note_cache(step, cache_in(output))
        if here.in_model and self.actors:
            here.ended = step
        else:
            self._finish(step)

    def _end_model(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any = None) -> None:
        """Let every actor act after logits exist."""
        here = self.here
        step, here.ended, here.in_model = here.ended, None, False
        if step is None:
            return
        if output is None:
            self._live.pop(step.number, None)
            return
        logits = getattr(output, "logits", None)
        if logits is None and isinstance(output, tuple):
            logits = output[0]
        if logits is not None and logits.ndim == 3:
            step.logits = logits[:, -1]
        self._finish(step)

    def _finish(self, step: Step) -> None:
        """Let every actor act after a call, and hand what one takes back to the writer."""
        self._live.pop(step.number, None)
        for after in self._after:
            back = after(step)
            if back is not None and self.here.writer is not None:
                self.here.writer.take(back)

    def _drop(self) -> None:
        """Forget the call in which this thread is."""
        here = self.here
        step, handler, ended = here.step, here.handler, here.ended
        if here.reading is not None:
            here.reading.__exit__(None, None, None)
        here.step = here.handler = here.ended = here.reading = None
        here.in_model = False
        if handler is not None:
            handler.__exit__()
        for call in (step, ended):
            if call is not None:
                self._live.pop(call.number, None)

    def _attention_elsewhere(self) -> UnsupportedError:
        """The error for a call whose attention did not come by the tap, because it was set after entering a run."""
        names = ", ".join(sorted({repr(attention_name(config)) for config in self.target.configs} - {repr(NAME)}))
        return UnsupportedError(
            f"the attention of {self.target.name} was set to {names} inside the `with`, which goes past what acts "
            "here: set it before the `with`"
        )

    def _note_cache(self, step: Step, cache: Any) -> None:
        """Lay what is known of the rows of a first call on the cache that it made, if it was given none."""
        if cache is None:
            return
        if step.cache is None:
            self.know_rows(cache, step.state)
        if tokens_in(cache) > step.new:
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
_NUMBERS = itertools.count()


@contextmanager
def _not_remote(run: Run) -> Iterator[None]:
    """Context manager in which a model of nnsight sends no trace to a server."""
    given = run.target.model
    if run.target.kind == "nnsight":
        vars(given)["_remote_backend"] = _refuse_remote
    try:
        yield
    finally:
        if run.target.kind == "nnsight" and len(holds_on(run.target.base)) < 2:  # else an outer block goes on
            vars(given).pop("_remote_backend", None)


def _refuse_remote(*_: Any) -> None:
    """Stands in a model of nnsight where it makes what sends a trace."""
    raise UnsupportedError(
        "a remote trace leaves this intervention behind, because its hooks are on this machine: trace without "
        "remote=, or write the edit in the trace (docs/other_libraries.md)"
    )
