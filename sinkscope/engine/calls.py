"""What a block does in the calls of its model: it makes the record of each, and asks the actors at their moments.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

from torch import nn

from sinkscope.engine.actor import Actor, TakeBack
from sinkscope.engine.attention import Attention
from sinkscope.engine.internals import in_backward, is_checkpointing
from sinkscope.engine.owners import Hold, acts, tell_waiting
from sinkscope.engine.rows import RowState, put_rows
from sinkscope.engine.step import Step, begin_step, cache_in, tokens_in
from sinkscope.engine.stock import NAME, attention_name, stock_of
from sinkscope.engine.tap import HANDLERS, Handler
from sinkscope.errors import UnsupportedError
from sinkscope.models.call_cache import CACHE_NAMES, by_name, new_call_cache, with_cache
from sinkscope.models.hooks import Args, Kwargs
from sinkscope.models.target import Target

_NUMBERS = itertools.count()


def check_generation(method: str, options: Mapping[str, Any], *, assisted: str | None, uncached: str) -> None:
    """Refuse kinds of generation that do not read tokens one by one behind a prompt.

    Args:
        method: The method of a model that `generate` calls: `_prefill`, or another for assisted generation.
        options: Arguments of the forward call.
        assisted: Why generation may not be assisted; None if it may.
        uncached: Why it may not run without a cache.

    Raises:
        UnsupportedError: Generation is assisted and may not be, or runs without a cache.
    """
    if method != "_prefill":
        if assisted is not None:
            raise UnsupportedError(
                f"assisted generation reads several tokens at a time and takes some back, and {assisted}: generate "
                "without an assistant or prompt lookup"
            )
    elif not options.get("use_cache") and cache_in(options) is None:
        raise UnsupportedError(f"use_cache=False: {uncached}: generate with use_cache=True, or without them")


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


class BlockCalls:
    """The calls of a block.

    Attributes:
        target: The model.
        number: Number of the block.
        passes: Number of whole calls on which it acted.
        takes_back: Whether some actor may take tokens back.
        actors: What acts, in order.
        here: What the current thread is doing with the model.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.number = next(_NUMBERS)
        self.passes = 0  # whole ones on which the block acted
        self.takes_back = False  # whether some actor may take tokens back
        self.actors: list[Actor] = []
        self._moments()
        self.here = _Here()
        self._configs: frozenset[int] | None = None  # of the model, once something acts in its attention
        self._hold: Hold | None = None  # once the block is entered
        self._is_open = False  # whether calls that begin now are acted on
        self._live: dict[int, threading.Thread] = {}  # threads of calls that have begun and not ended, by number
        self._steps = itertools.count()
        self._checks: list[Callable[[str, dict[str, Any]], None]] = []
        self._caches: WeakSet[Any] = WeakSet()  # on which something is known of rows

    def acts_here(self) -> bool:
        """Return whether the block acts on calls that begin now in this thread."""
        if not self._is_open or self._hold is None:
            return False
        return self._hold.thread is threading.current_thread() or acts(self.target.base, self._hold)

    def _moments(self) -> None:
        """Note which actors act at which moment, so that nothing is called in vain at every token."""
        kinds = [(actor, type(actor)) for actor in self.actors]
        self._before = [actor.before for actor, kind in kinds if kind.before is not Actor.before]
        self._attends = [actor.attends for actor, kind in kinds if kind.attends is not Actor.attends]
        self._attend_in = [actor.attend for actor, kind in kinds if kind.attend is not Actor.attend]
        self._after = [actor.after for actor, kind in kinds if kind.after is not Actor.after]

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
        arguments = by_name(module, args, kwargs) if args else kwargs
        first = self.target.layers[0]
        if first.training and is_checkpointing(first):
            raise UnsupportedError(
                f"{self.target.name} runs with gradient checkpointing, which keeps no cache and computes layers again "
                "without the edits: call model.eval() or model.gradient_checkpointing_disable()"
            )
        changed, cache = None, cache_in(arguments)
        if self.actors and cache is None:
            cache = new_call_cache(arguments, self.target)
            if cache is not None:
                arguments = with_cache(module, arguments, cache)
                changed = (), arguments
        step = begin_step(self.number, next(self._steps), arguments, cache)
        self._live[step.number] = threading.current_thread()
        if not self._is_open:  # it was closed in the meantime
            self._note_end(step)
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
        if step.unsure is not None:
            step.refuse_unsure(step.unsure)
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

    def _note_mask(self, step: Step, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Read from the mask that the first layer gets whether texts are packed into a row."""
        kind = stock_of(self.target.config).kind
        mask = by_name(module, args, kwargs).get("attention_mask")  # GPT-2 passes it without a name
        step.note_mask(mask, packs_in_kernel="flash" in kind)

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
            handler.__exit__()
            if not handler.was_reached:
                self._note_end(step)
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
            self._note_end(step)
            return
        logits = getattr(output, "logits", None)
        if logits is None and isinstance(output, tuple):
            logits = output[0]
        if logits is not None and logits.ndim == 3:
            step.logits = logits[:, -1]
        self._finish(step)

    def _finish(self, step: Step) -> None:
        """Let every actor act after a call, and hand what one takes back to the writer."""
        self._note_end(step)
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
                self._note_end(call)

    def _note_end(self, step: Step) -> None:
        """Note that a call has ended, for which somebody who leaves the block may be waiting."""
        self._live.pop(step.number, None)
        if not self._is_open:
            tell_waiting()

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
