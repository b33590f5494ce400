"""The calls of a run: the record of each is made, and actors are asked at their moments.

1. `_begin`: the record of the call is made (`begin_step`), and actors act before the model reads. The cache says how
   many columns it holds, and what this block knows of its rows; the mask says which of the new tokens are real; each
   gets its position in its row, which is one text. Where a row may hold several (position ids that jump without a
   mask, or a caller's own mask of queries and keys) whatever acts refuses the call.
2. The tap shows the attention of each layer to actors (`_attend`), and edits of activations act by hooks that read the
   same record.
3. `_end`: the decoder has read. `_end_model`: logits exist, and actors that read them act; what one takes back is noted
   on the text that is being written, if there is one (`Draft`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from sinkscope.engine.actor import Actor
from sinkscope.engine.attention import NAME, Attention, attention_name
from sinkscope.engine.rows import put_rows
from sinkscope.engine.step import ROWS, Draft, RowState, Step, TokenPositions
from sinkscope.engine.tap import Listener
from sinkscope.engine.visible import CausalMask, FunctionMask
from sinkscope.errors import UnsupportedError
from sinkscope.models.call_cache import CACHE_NAMES, by_name, cache_argument, new_call_cache
from sinkscope.models.hooks import DEPTH, Args, Kwargs
from sinkscope.models.quirks import tokens_in
from sinkscope.models.target import Target

_NUMBERS = itertools.count()


class Calls:
    """The calls of a run.

    Attributes:
        target: The model.
        number: Number of the run.
        passes: Number of whole calls on which it acted.
        takes_back: Whether some actor may take tokens back.
        reads_one_text: Whether some actor watches the text of each row, beside which `generate` may read no other.
        owns_attention: Whether some actor owns caches or replaces attention, which no other run may do beside it.
        acting: What acts in calls, in order, by the moments at which it does something: others are not asked.
        keeper: Who keeps the caches (`kv.keeper.CacheKeeper`), if anybody does.
        uncached: Why `generate` may not run without a cache; "" if it may.
        by_token: Why tokens have to be read one by one, which those of assisted generation are not; "" if not.
        drafts_from: First column behind the prompt of the assisted generation that is about to begin; None if none is.
        prompting: Whether `generate` is reading a prompt, so that even a single-token call is a part of it.
        draft: The text that is being written, of which actors may take tokens back; None if there is none.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.number = next(_NUMBERS)
        self.passes = 0
        self.takes_back = self.owns_attention = self.reads_one_text = False
        self.uncached = self.by_token = ""
        self.acting: dict[str, list[Actor]] = {"before": [], "attends": [], "after": []}
        self.keeper: Any = None
        self.prompting = False
        self.drafts_from: int | None = None
        self.draft: Draft | None = None
        self._acts = False  # whether something is changed, and not only read
        self._thread = threading.current_thread()  # who steers
        self._is_open = False  # whether calls are acted on
        self._listener: Listener | None = None  # at the tap, once something acts in calls
        self._steps = itertools.count()
        self._settings: Any = None  # of the latest `generate`
        self._told: Mapping[str, Any] | None = None  # in the call that is about to begin, where masks are made of it
        self._caches: WeakSet[Any] = WeakSet()  # on which something is known of rows
        self._step: Step | None = None  # the call in which the decoder is
        self._ended: Step | None = None  # the call that the decoder has ended, until its logits exist
        self._depth = DEPTH.value  # of this thread: calls in which it has gone apart are not acted on
        self._attending: list[Actor] = []  # in the layers of this call

    @property
    def acts_here(self) -> bool:
        """Whether the run acts on what the current thread does, which has not gone apart since it was entered."""
        return self._is_open and self._thread is threading.current_thread() and DEPTH.value <= self._depth

    @property
    def step(self) -> Step | None:
        """The record of the forward call that this thread is in; None outside a call, or if the run does not act on it.

        Raises:
            UnsupportedError: A backward pass recomputes a layer, and it is not known for which call.
        """
        step = self._step
        if step is not None and self._thread is threading.current_thread() and DEPTH.value <= self._depth:
            return step
        if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateUsage]
            raise UnsupportedError(
                f"a backward pass recomputes a layer of {self.target.name}, and the call to which it belongs is not "
                "known: checkpoint no layer inside the `with`"
            )
        return None

    # What the model calls ------------------------------------------------------------------------------------------

    def _begin_parts(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Note what a model of several parts is told, before it makes masks of queries and keys."""
        told = by_name(module, args, kwargs)
        if self.acts_here and _says_tokens(told):
            self._told = told

    def note_told(self, told: Mapping[str, Any]) -> None:
        """Note what `generate` is told, before it makes masks for a cache of fixed size."""
        self._told = told

    def _begin(self, module: nn.Module, args: Args, kwargs: Kwargs | None = None) -> tuple[Args, Kwargs] | None:
        """Make the record of a call; the arguments for the module, or None if they stay as they are."""
        # PyTorch adds a hook before it notes that the hook takes keywords: a call that runs meanwhile gives none.
        if kwargs is None or DEPTH.value > self._depth:
            return None
        if self._thread is not threading.current_thread():
            if not self._thread.is_alive():
                return None
            raise UnsupportedError(
                f"{self.target.name} is inside a `with` of thread {self._thread.name!r}, and one thread steers a "
                "model at a time: call it in that thread, or enter a `with` in this one, which waits for the other"
            )
        if not self._is_open:
            return None
        arguments = by_name(module, args, kwargs) if args else kwargs
        first = self.target.layers[0]
        if first.training and getattr(first, "gradient_checkpointing", False):  # which keeps no activations
            raise UnsupportedError(
                f"{self.target.name} runs with gradient checkpointing, which keeps no cache and computes layers again "
                "without the edits: call model.eval() or model.gradient_checkpointing_disable()"
            )
        changed = None
        cache = cache_in(arguments)
        if self._listener is not None and cache is None:
            cache = new_call_cache(arguments, self.target)
            if cache is not None:
                arguments = {**arguments, **cache_argument(cache)}
                changed = (), arguments
        told = arguments
        if self._told is not None and not _says_tokens(arguments):
            told = self._told
        self._told = None
        step = begin_step(self.number, next(self._steps), arguments, cache, told, acts=self._acts)
        if self.drafts_from is not None:
            step.state.drafts_from = self.drafts_from
            self.drafts_from = None
        self._step = step
        self._ended = None
        if cache is not None and (step.past == 0 or step.state.partial):
            self._know_rows(cache, step.state)
        if self._listener is not None:
            self._begin_actors(step, self._listener)
        return changed

    def _begin_actors(self, step: Step, listener: Listener) -> None:
        """Let actors act before the model reads, and note which of them act in its layers."""
        step.settings = self._settings
        step.prompting = self.prompting
        if self.draft is not None and self.draft.cache is step.cache:  # a processor may read a text of its own
            step.draft = self.draft
        note_layers(step)
        for actor in self.acting["before"]:
            actor.before(step)
        for kv in step.layers:  # a plain loop: every token comes here
            if kv.slot_positions is not None:
                step.has_gaps = True
        self._attending = []
        for actor in self.acting["attends"]:
            if actor.attends(step):
                self._attending.append(actor)
        listener.first_query = step.past
        listener.has_gaps = step.has_gaps
        listener.idle = not self._attending
        listener.was_reached = False
        listener.in_call = True

    def _know_rows(self, cache: Any, state: RowState) -> None:
        """Lay what is known of some rows on their cache."""
        with suppress(TypeError):  # an object that cannot be referred to weakly
            self._caches.add(cache)
        put_rows(cache, self.number, state)

    def _attend(self, attention: Attention) -> None:
        """Let actors act in a layer; where the cache lacks tokens, keys stand in the columns of slots."""
        step = self._step
        if step is None or DEPTH.value > self._depth:
            return
        kv = step.by_number.get(attention.layer) if step.has_gaps else None
        if kv is not None:
            source = attention.source
            sees_all = isinstance(source, CausalMask) or (isinstance(source, FunctionMask) and source.is_causal)
            attention.slots_of = lambda: step.tokens.columns_of(kv.pos)
            attention.is_whole = attention.query.shape[2] == 1 and kv.gapless and sees_all and not attention.hidden
        for actor in self._attending:
            actor.attend(step, attention)

    def _end(self, *values: Any) -> None:
        """End the record of a call with the decoder's output, or, after an error, without."""
        step = self._step
        output = values[-1]
        if step is None or self._thread is not threading.current_thread() or DEPTH.value > self._depth:
            return
        self._step = None
        listener = self._listener
        if listener is not None:
            listener.idle = True
            listener.has_gaps = False
            listener.in_call = False
            listener.functions = {}  # a model of several parts makes those of the next call before it begins
        if output is None:
            return
        if listener is not None and not listener.was_reached:  # it was set after the run was entered
            names = {attention_name(config) for config in self.target.configs} - {NAME}
            raise UnsupportedError(
                f"the attention of {self.target.name} was set to {', '.join(map(repr, sorted(names)))} inside the "
                "`with`, which goes past what acts here: set it before the `with`"
            )
        self.passes += 1
        if step.past == 0:
            self._note_cache(step, cache_in(output))
        self._ended = step
        for actor in self.acting["after"]:
            if not actor.reads_logits:
                actor.after(step)

    def _end_model(self, *values: Any) -> None:
        """Let actors act that read logits, which may be changed, and note what one takes back."""
        step = self._ended
        output = values[-1]
        if step is None or output is None or self._thread is not threading.current_thread():
            return
        self._ended = None
        logits = getattr(output, "logits", None)
        if logits is None and isinstance(output, tuple):
            logits = output[0]
        if logits is not None and logits.ndim == 3:
            step.logits = logits[:, -1]
        for actor in self.acting["after"]:
            if actor.reads_logits:
                back = actor.after(step)
                if back is not None and step.draft is not None:
                    step.draft.taken = back

    def _note_cache(self, step: Step, cache: Any) -> None:
        """Lay what is known of the rows of a first call on the cache that it made, if it was given none."""
        if cache is None:
            return
        if step.cache is None:
            self._know_rows(cache, step.state)
        if tokens_in(cache) > step.new:
            raise UnsupportedError(
                f"positions cannot be counted in {self.target.name}, because its cache does not come as "
                f"{' or '.join(CACHE_NAMES)}, or does not hold what earlier calls have read; rename that argument, "
                "or install the versions in constraints.txt"
            )


def note_layers(step: Step) -> None:
    """Find the layers of a call's cache that can evict, and tell them of the tokens that the call appends."""
    tokens = step.state.tokens
    for kv in getattr(step.cache, "layers", None) or ():  # a plain loop: every token comes here
        if hasattr(kv, "slot_positions"):
            kv.upcoming = tokens
            step.layers.append(kv)


def cache_in(holder: Any) -> Any:
    """Return the cache that a call's arguments, or a model's output, hold; None if there is none."""
    for name in CACHE_NAMES:
        cache: Any = holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
        if cache is not None:
            return cache
    return None


def begin_step(
    run: int, number: int, arguments: Mapping[str, Any], cache: Any, told: Mapping[str, Any], *, acts: bool = True
) -> Step:
    """Make the record of a forward call.

    Args:
        run: Number of the run that acts in the call.
        number: Number of the call within the run.
        arguments: Arguments of the decoder's call, by name.
        cache: The cache among them.
        told: What the caller said, of which `generate`, or a model of several parts, may have made the masks of queries
            and keys among the arguments. A mask of shape (batch, tokens) has 1 at real tokens. Tokens that were read in
            an earlier call keep the mask of that call.
        acts: Whether something is changed in the call; what only reads counts columns where positions are not known.

    Raises:
        UnsupportedError: Several texts may stand in a row, and something is changed.
    """
    ids: Tensor | None = arguments.get("input_ids")
    tokens: Tensor = arguments["inputs_embeds"] if ids is None else ids
    batch, new = tokens.shape[:2]
    past = 0 if cache is None else tokens_in(cache)
    total = past + new
    state = _state_of_rows(run, cache, past, batch, tokens.device)
    earlier = state.tokens
    if past < earlier.n_columns:  # tokens were taken back
        earlier = earlier.first(past)
    mask = told.get("attention_mask")
    says_tokens = isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= total
    if acts and not says_tokens and (mask is not None or told.get("position_ids") is not None):
        _check_one_text(mask, told)
    real = torch.ones(batch, total - earlier.n_columns, dtype=torch.bool, device=tokens.device)
    if isinstance(mask, Tensor) and says_tokens:
        real = mask[:, earlier.n_columns : total].bool().to(tokens.device)
    state.tokens = earlier.continued(real)
    if earlier.n_columns != past:  # some were read in calls on which the run did not act
        earlier = state.tokens.first(past)
    return Step(number, past, new, ids, cache, arguments, earlier, state)


def _state_of_rows(run: int, cache: Any, past: int, batch: int, device: torch.device) -> RowState:
    """What a run keeps of the rows on their cache; a new state if they are others, or nothing was read."""
    states: dict[int, RowState] = getattr(cache, ROWS, None) or {}
    state = states.get(run) if past else None
    if state is not None and len(state.tokens.pos) == batch:
        return state
    nothing = torch.zeros(batch, 0, dtype=torch.int64, device=device)
    return RowState(TokenPositions.of(nothing), partial=past > 0)


def _check_one_text(mask: Any, told: Mapping[str, Any]) -> None:
    """Refuse rows in which several texts may stand, because there is no mask that says which tokens are real.

    Without mask and cache transformers reads position ids that do not count on as several texts.

    Raises:
        UnsupportedError: There may be such a row.
    """
    positions = told.get("position_ids")
    reason = f"a mask of type {type(mask).__name__} and shape {tuple(getattr(mask, 'shape', ()))}"
    if mask is None:
        reason = "position ids that do not count on"
        if not isinstance(positions, Tensor) or positions.ndim != 2 or cache_in(told) is not None:
            return
        if bool((positions.diff(dim=1) == 1).all()):
            return
    raise UnsupportedError(
        f"{reason}: several texts may stand in a row, and an edit, a policy or a guard takes a row for one text: pad "
        "the rows and pass a mask of shape (batch, tokens) with 1 at real tokens, or call row by row"
    )


def _says_tokens(arguments: Mapping[str, Any]) -> bool:
    """Whether a call says which tokens are real, or nothing, and no masks of queries and keys were made of it."""
    mask = arguments.get("attention_mask")
    return mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)
