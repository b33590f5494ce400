"""Where a pass is edited (neurons, heads, whole outputs), and the base of edits that give values new ones there."""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sinkscope.errors import UnsupportedError
from sinkscope.hooks.call import Call, Memory
from sinkscope.hooks.edit.base import Intervention, Run
from sinkscope.hooks.edit.sites import NeuronGroup
from sinkscope.models.call_cache import cache_in
from sinkscope.models.experts import Experts
from sinkscope.models.hooks import Hook, on_hidden, on_input
from sinkscope.models.target import Target
from sinkscope.models.weights import brought
from sinkscope.results.notation import count_of
from sinkscope.tap.internals import GenerateFollower, following_generate


class _LatestCall(threading.local):
    """The call in which the thread is, identified by its input, and the values that earlier hooks left in it."""

    hidden: Callable[[], Tensor | None] = staticmethod(lambda: None)
    edited: dict[tuple[int, int, int], Tensor]  # by id of the module, expert and neuron


_latest = _LatestCall()


def expert_hook(
    experts: Experts, expert: int, neurons: list[int], edit: Callable[[Tensor], Tensor | None]
) -> Callable[..., Any]:
    """Return the forward hook, with kwargs, by which `edit` acts on an expert; its module holds `experts`."""

    def corrected(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        entering = (*args, *kwargs.values())[0]
        if _latest.hidden() is not entering:
            _latest.hidden, _latest.edited = weakref.ref(entering), {}
        edited = _latest.edited
        with brought(module):
            routed = experts.routed(args, kwargs)
            post = experts.activate(*experts.factors(expert, routed.entering(expert), neurons)).clone()
            written = experts.columns(expert, neurons).to(post.dtype)
        for number, neuron in enumerate(neurons):
            if (id(module), expert, neuron) in edited:
                post[:, number] = edited[id(module), expert, neuron]
        new = edit(post)
        if new is None:
            return None
        new = new.to(post.dtype)
        for number, neuron in enumerate(neurons):
            edited[id(module), expert, neuron] = new[:, number]
        change = ((new - post) * routed.weight[:, expert, None]).to(post.dtype) @ written
        return on_hidden(lambda hidden: hidden + change.view_as(hidden))(module, args, kwargs, output)

    return corrected


Edit = Callable[[Tensor], Tensor | None]
"""Takes the values `[... d]` at a hook point and returns new ones; None leaves them."""


class HookPoint(NamedTuple):
    """A point of a pass at which values can be edited.

    Attributes:
        module: The module beside which they pass.
        when: "pre" if they enter it, "post" if they leave it.
        columns: The columns that are edited; None if all are.
        inside: Makes a torch hook with kwargs of an edit of values that never pass as a tensor.
    """

    module: nn.Module
    when: str
    columns: list[int] | None = None
    inside: Callable[[Edit], Callable[..., Any]] | None = None

    def hook(self, edit: Edit) -> Hook:
        """Return the hook by which an edit acts here."""
        if self.inside is not None:
            return self.module, self.when, self.inside(edit)
        if self.when == "pre":
            return self.module, self.when, on_input(edit, self.columns)
        return self.module, self.when, on_hidden(edit, self.columns)

    def rows(self, where: Bool[Tensor, "row _ _"], new: Callable[[Float[Tensor, "row pos d"]], Tensor]) -> Hook:
        """Return the hook of a pass whose rows each have an edit of their own.

        Args:
            where: Which values are replaced.
            new: What replaces them, of a shape that expands to theirs.
        """

        def replaced(values: Tensor) -> Tensor:
            rows = values.reshape(len(where), -1, values.shape[-1])  # experts and OPT run row and position together
            return torch.where(where.to(rows.device), new(rows).to(rows), rows).reshape(values.shape)

        return self.hook(replaced)


def heads_point(target: Target, layer: int, columns: list[int] | None = None) -> HookPoint:
    """Return the outputs of all heads of a layer, side by side (`hook_z`), or some columns of them."""
    return HookPoint(target.sub(layer, "o"), "pre", columns)


def neurons_point(target: Target, group: NeuronGroup, site: str = "post") -> HookPoint:
    """Return neurons of an MLP or of one expert: `hook_post`, or the linear factor with site="up"."""
    layer, expert, neurons = group
    if expert is not None:
        experts = target.experts(layer)
        return HookPoint(experts.module, "post", inside=partial(expert_hook, experts, expert, neurons))
    if site == "post":
        return HookPoint(target.sub(layer, "down"), "pre", neurons)
    first = 0
    if target.adapter.fused_gate_up:
        first = target.width(layer)
    return HookPoint(target.sub(layer, "up"), "post", [first + neuron for neuron in neurons])


@dataclass(frozen=True, eq=False)
class Values:
    """The values that pass a hook point in one forward call.

    Attributes:
        old: The values; of a head, the columns of its output.
        of: What the edit says of the hook point.
        call: The forward call.
        memory: What the edit remembers of these rows between calls.
        run: The run in which the edit acts.
    """

    old: Float[Tensor, "batch pos *d"]
    of: Any
    call: Call
    memory: Memory
    run: Run

    @property
    def index(self) -> Int[Tensor, "batch pos"]:
        """True position of each token in its row; -1 at padding."""
        return self.call.on(self.old.device)


class PlacedEdit(Intervention):
    """Base of edits that give new values to what passes some hook points."""

    @abstractmethod
    def hook_points(self, target: Target) -> list[tuple[HookPoint, Any]]:
        """Return the hook points in this model, each with what its values are values of."""

    @abstractmethod
    def edited(self, values: Values) -> Float[Tensor, "batch pos *d"]:
        """Return the values that replace `values.old`."""

    def summary(self, run: Run) -> str:
        """Return what was done; an edit that logs no events counts calls."""
        if self.KIND or not run.passes:
            return super().summary(run)
        return f"{type(self).__name__} acted in {count_of(run.passes, 'call')}."

    @property
    def remembers(self) -> str:
        """What the edit has to remember of earlier calls; "" if each call is edited by itself."""
        return ""

    @property
    def by_token(self) -> bool:
        """Whether what it remembers changes with every token, so that a token may not be read and taken back."""
        return False

    def enter(self, run: Run, key: int) -> None:
        """Register hooks on the modules beside which the values pass."""
        if self.remembers:
            follower = GenerateFollower(run.acts_here, self._check_generation)
            run.stack.enter_context(following_generate(run.target.hf, follower))
        for number, (point, of) in enumerate(self.hook_points(run.target)):
            run.hook_edit(*point.hook(partial(self._edit, run, (key, number), of)))

    def _check_generation(self, method: str, options: dict[str, Any], _settings: Any) -> None:
        """Refuse kinds of generation in which what the edit remembers is not that of single tokens, one by one.

        Raises:
            UnsupportedError: Generation runs without a cache; or it is assisted, and that matters.
        """
        name = f"{type(self).__name__} remembers {self.remembers}"
        if method != "_prefill":
            if self.by_token:
                raise UnsupportedError(
                    f"{name}, and assisted generation reads tokens that it takes back: generate without an assistant"
                )
        elif not options.get("use_cache") and cache_in(options) is None:
            raise UnsupportedError(
                f"{name}, and without a cache each call is a first one: generate with use_cache=True"
            )

    def _edit(self, run: Run, key: tuple[int, int], of: Any, tensor: Tensor) -> Tensor | None:
        """New values; None if the run does not act on this call."""
        call = run.call
        if call is None:
            return None
        if tensor.numel() != call.index.numel() * tensor.shape[-1]:
            raise UnsupportedError(
                f"a module of {run.target.name} reads {tensor.numel() // tensor.shape[-1]} tokens of a call with "
                f"{call.index.numel()}, whose positions are not known: leave its layer out of the edit"
            )
        # OPT and experts run batch and position together.
        old = tensor.reshape(*call.index.shape, tensor.shape[-1])
        memory = call.state.memory.setdefault(key, Memory())
        return self.edited(Values(old, of, call, memory, run)).reshape(tensor.shape)
