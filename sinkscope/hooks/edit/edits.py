"""Edits of neurons and heads: the mechanism shared by all edits, ablation, and written values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import Finite, check_values, checked_value
from sinkscope.hooks.edit.base import Event, Intervention, Run
from sinkscope.hooks.edit.expert_edit import expert_hook
from sinkscope.hooks.edit.positions import Call, Memory
from sinkscope.hooks.edit.sites import (
    PAGE,
    NeuronGroup,
    NeuronSite,
    Positions,
    SiteLike,
    Where,
    checked_positions,
    chosen_positions,
    head_of,
    site_of,
)
from sinkscope.models.checks import check_site
from sinkscope.models.hooks import on_input, on_output
from sinkscope.models.target import Target

Edit = Callable[[Tensor], Tensor | None]
EVENT_SHARE = 0.1
"""A change counts as an event when it moves the neuron by more than this part of its value at the first token."""


@dataclass(frozen=True, eq=False)
class NeuronValues:
    """The values of a group of neurons in one forward call.

    Attributes:
        old: The values; of a head, the columns of its output.
        group: The neurons.
        call: The forward call.
        memory: What the edit keeps of these rows between calls; `memory["first"]` has the values at the first token.
        run: The run in which the edit acts.
    """

    old: Float[Tensor, "batch pos neuron"]
    group: NeuronGroup
    call: Call
    memory: Memory
    run: Run

    @property
    def index(self) -> Int[Tensor, "batch pos"]:
        """True position of each token in its row; -1 at padding."""
        return self.call.on(self.old.device)

    def log(self, kind: str, where: Bool[Tensor, "batch pos neuron"], data: Mapping[str, Tensor], **fixed: Any) -> None:
        """Log one event for each True in `where`.

        Args:
            kind: Kind of the events.
            where: Where something happened; for a head, its last dimension is 1.
            data: Values of the events' data, each of a shape that expands to that of `where`.
            fixed: What is the same in the data of all these events.
        """
        group, step, index = self.group, self.call.step, self.index
        tensors = {name: tensor.detach() for name, tensor in data.items()}
        if group.expert is not None:
            fixed["expert"] = group.expert

        def events() -> list[Event]:
            columns = {name: tensor.expand(where.shape)[where].tolist() for name, tensor in tensors.items()}
            positions = index.tolist()
            logged = list[Event]()
            for number, (row, token, neuron) in enumerate(where.nonzero().tolist()):
                entry = {name: values[number] for name, values in columns.items()}
                if group.head is None:
                    entry = {"neuron": group.neurons[neuron], **entry}
                position = positions[row][token]
                logged.append(Event(row, step, position, group.layer, group.head, kind, {**entry, **fixed}))
            return logged

        self.run.log(events)


@dataclass(frozen=True, kw_only=True)
class NeuronEdit(Intervention):
    """Gives chosen neurons new values at chosen positions.

    Attributes:
        sites: The neurons, as (layer, neuron), as (layer, expert, neuron) in a mixture of experts, or by name:
            "L1.N338", "L3.E2.N7". A neuron of a shared expert is (layer, neuron). `neurons` takes the same, and with
            `layer` the numbers of neurons of this layer.
        site: "post" edits the input of the down projection, which is gate times up in a gated MLP (`hook_post`);
            "up" edits the linear factor (`hook_pre_linear`), as the paper's Listing 1 does.
    """

    sites: Sequence[SiteLike] = ()
    layer: InitVar[int | None] = None
    neurons: InitVar[int | str | Sequence[int | SiteLike]] = ()
    site: Where = "post"

    KIND: ClassVar[str] = "edited"

    def __post_init__(self, layer: int | None, neurons: int | str | Sequence[int | SiteLike]) -> None:
        check_values(Iterable[Any], PAGE, sites=self.sites)
        check_values(Iterable[Any] | int, PAGE, neurons=neurons)
        if isinstance(neurons, int | str):
            neurons = [neurons]
        numbers = [one for one in neurons if isinstance(one, int)]
        if (layer is None) != (not numbers):
            raise SinkscopeError(
                f"layer={layer!r} with neurons={[*neurons]!r}: give both, as in layer=1, neurons=[7890], or names, as "
                'in neurons="L1.N338"',
                page=PAGE,
            )
        sites = self.sites
        if isinstance(sites, str):
            sites = [sites]
        every = [site_of(site) for site in sites]
        every += [site_of((layer, one) if isinstance(one, int) else one) for one in neurons]
        if not every and not self._heads:
            raise SinkscopeError(
                "no neuron given: expected layer=1, neurons=[7890] or sites=[(layer, neuron)]", page=PAGE
            )
        object.__setattr__(self, "sites", tuple(dict.fromkeys(every)))
        checked_value(Where, self.site, "site", page=PAGE)

    @property
    def _heads(self) -> Sequence[tuple[int, int]]:
        """Layer and number of each edited head; only an ablation has any."""
        return ()

    @property
    def checked_sites(self) -> tuple[NeuronSite, ...]:
        """`sites`, typed: in whatever form they were given, they are stored as `NeuronSite`s."""
        return cast("tuple[NeuronSite, ...]", self.sites)

    @abstractmethod
    def new_values(self, values: NeuronValues) -> Float[Tensor, "batch pos neuron"] | None:
        """The values that replace `values.old`; None leaves them unchanged."""

    def groups(self) -> list[NeuronGroup]:
        """The sites, grouped by MLP."""
        neurons: dict[tuple[int, int | None], list[int]] = {}
        for site in self.checked_sites:
            neurons.setdefault((site.layer, site.expert), []).append(site.neuron)
        return [NeuronGroup(layer, expert, members) for (layer, expert), members in neurons.items()]

    def _all_groups(self, target: Target) -> list[NeuronGroup]:
        """`groups`, and the heads, each with its columns of `hook_z`."""
        groups = self.groups()
        for layer, head in self._heads:
            groups.append(NeuronGroup(layer, None, target.head_columns(layer, head), head))
        return groups

    def enter(self, run: Run, key: int) -> None:
        """Hooks on the down projection, the up projection, the experts, or the output projection of attention."""
        target = run.target
        self.check(target)
        for group in self._all_groups(target):
            edit = self._editor(run, key, group)
            if group.head is not None:
                run.hook_edit(target.output_projection(group.layer), "pre", on_input(_columns(group.neurons, edit)))
            elif group.expert is not None:
                experts = target.experts(group.layer)
                run.hook_edit(
                    experts.module, "post", expert_hook(experts, group.expert, group.neurons, self.site, edit)
                )
            elif self.site == "post":
                run.hook_edit(target.mlp_part(group.layer, "down"), "pre", on_input(_columns(group.neurons, edit)))
            else:
                module, first = _up_place(target, group.layer)
                up_columns = [first + neuron for neuron in group.neurons]
                run.hook_edit(module, "post", on_output(_columns(up_columns, edit)))

    def _editor(self, run: Run, key: int, group: NeuronGroup) -> Edit:
        """Function from values `[... neuron]` to new ones; it returns None if the run does not act on this call."""

        def edit(tensor: Tensor) -> Tensor | None:
            call = run.call
            if call is None:
                return None
            index = call.on(tensor.device)
            old = tensor.reshape(*index.shape, len(group.neurons))  # OPT and experts run batch and position together
            memory = call.sequence.memory.setdefault((key, group.layer, group.expert, group.head), Memory())
            if not call.sequence.settled or "first" not in memory:
                memory.keep("first", old, index == 0)
            values = NeuronValues(old, group, call, memory, run)
            new = self.new_values(values)
            if new is None:
                return None
            first = group.size(memory["first"].nan_to_num(0))[:, None]
            has_moved = group.size((new - old).detach()) > EVENT_SHARE * first
            data = {"old": old, "new": new}
            if group.head is not None:
                data = {"old": group.size(old), "new": group.size(new)}
            values.log(self.KIND, has_moved & (index >= 0)[..., None], data)
            return new.reshape(tensor.shape)

        return edit

    def check(self, target: Target) -> None:
        """Refuse a model without these neurons or heads, or one in which they cannot be edited.

        Raises:
            SinkscopeError: The model has no such layer, neuron, expert or head.
            UnsupportedError: The model has no up factor, or its experts are quantised.
        """
        adapter = target.adapter
        for layer, head in self._heads:
            check_site(target, layer, head=head)
        for site in self.checked_sites:
            check_site(target, *site)
            is_gated = adapter.fused_gate_up or target.has_part(site.layer, adapter.gate)
            if site.expert is not None:
                is_gated = target.experts(site.layer).GATED
            if self.site == "up" and not is_gated:
                raise UnsupportedError(
                    f'site="up": the MLP of {target.name} ({adapter.model_type}) has no gate and so no up factor; use '
                    'site="post"',
                    page="no-up-factor",
                )


@dataclass(frozen=True, kw_only=True)
class Ablate(NeuronEdit):
    """Switch neurons or attention heads off.

    Args:
        heads: Query heads whose output (`hook_z`) is switched off: (layer, head), or names such as "L0.H4".
        value: "zero", a number, or "mean": the row's mean over its real positions after the first, in the first call
            that has any. The first token is excluded because a sink there would distort the mean. Before such a call,
            "mean" leaves the values unchanged.
        positions: Positions to edit, counted from each row's first real token: None for all, "first", a number, several
            numbers, or a slice.

    Example:
        >>> Ablate(layer=1, neurons=[3, 4], positions="first").sites[0]
        NeuronSite(layer=1, neuron=3, expert=None)
        >>> Ablate(neurons="L1.N338").sites[0]
        NeuronSite(layer=1, neuron=338, expert=None)
        >>> Ablate(heads=["L0.H4", (2, 1)]).heads
        ((0, 4), (2, 1))
    """

    value: Literal["zero", "mean"] | float = "zero"
    positions: Positions = None
    heads: str | Sequence[str | Sequence[int]] = ()

    KIND: ClassVar[str] = "ablated"

    def __post_init__(self, layer: int | None, neurons: int | str | Sequence[int | SiteLike]) -> None:
        check_values(Iterable[Any], PAGE, heads=self.heads)
        heads = self.heads
        if isinstance(heads, str):
            heads = [heads]
        object.__setattr__(self, "heads", tuple(dict.fromkeys(map(head_of, heads))))
        super().__post_init__(layer, neurons)
        checked_value(Literal["zero", "mean"] | Finite, self.value, "value", page=PAGE)
        object.__setattr__(self, "positions", checked_positions(self.positions))

    @property
    def _heads(self) -> Sequence[tuple[int, int]]:
        return cast("tuple[tuple[int, int], ...]", self.heads)

    def new_values(self, values: NeuronValues) -> Float[Tensor, "batch pos neuron"]:
        """Zero, the mean or the number at the chosen positions."""
        old, index, memory = values.old, values.index, values.memory
        if self.value == "mean":
            is_later = (index > 0)[..., None]
            exact = torch.promote_types(old.dtype, torch.float32)
            mean = torch.where(is_later, old, 0).sum(1, dtype=exact) / is_later.sum(1)
            earlier = memory.get("mean", mean)
            mean = torch.where(earlier.isnan(), mean, earlier)
            memory["mean"] = mean.detach()  # for later calls
            value = torch.where(mean.isnan()[:, None], old, mean[:, None].to(old.dtype))
        else:
            value = torch.full_like(old, 0.0 if self.value == "zero" else float(self.value))
        return torch.where(chosen_positions(index, self.positions)[..., None], value, old)


def _columns(neurons: list[int], edit: Edit) -> Edit:
    """An edit of whole tensors that gives new values to the columns of these neurons."""
    index = torch.tensor(neurons)

    def edited(tensor: Tensor) -> Tensor | None:
        nonlocal index
        if index.device != tensor.device:  # once, not a copy to the device in every call
            index = index.to(tensor.device)
        new = edit(tensor[..., index])
        # A copy, because others may need the caller's tensor, and so does autograd.
        if new is None:
            return None
        return tensor.index_copy(-1, index, new.to(tensor.dtype))

    return edited


def _up_place(target: Target, layer: int) -> tuple[nn.Module, int]:
    """The module that computes the linear factor, and the column of its output at which it begins."""
    if not target.adapter.fused_gate_up:
        return target.mlp_part(layer, "up"), 0
    if target.kind == "bridge":  # a bridge splits the fused projection into two
        return target.sub(layer, f"{target.adapter.mlp}.in"), 0
    return target.mlp_part(layer, "up"), target.width(layer)
