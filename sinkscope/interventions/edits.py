"""Edits of single neurons: which ones, and the one mechanism by which all of them act."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.interventions.base import Event, Intervention, Run
from sinkscope.interventions.experts import check_experts, expert_hook
from sinkscope.interventions.positions import Call, Memory
from sinkscope.models.target import Target, plain_weight

SiteLike = Sequence[int | None]
Where = Literal["post", "up"]
# A change counts as an event when it moves the neuron by more than this part of its value at the first token.
FIRED = 0.1


class Site(NamedTuple):
    """One neuron: of a layer's MLP, or of one expert of a mixture."""

    layer: int
    neuron: int
    expert: int | None = None

    def __str__(self) -> str:
        expert = "" if self.expert is None else f", expert {self.expert}"
        return f"layer {self.layer}{expert}, neuron {self.neuron}"


class Group(NamedTuple):
    """The edited neurons of one MLP or expert: what one hook handles."""

    layer: int
    expert: int | None
    neurons: list[int]


def site_of(given: Any) -> Site:
    """A `Site` from (layer, neuron) or (layer, expert, neuron).

    Raises:
        SinkscopeError: not two or three whole numbers from 0.
    """
    if isinstance(given, Site):
        numbers = (given.layer, given.neuron) if given.expert is None else (given.layer, given.expert, given.neuron)
    else:
        numbers = tuple(given) if isinstance(given, Iterable) else (given,)
    if len(numbers) not in (2, 3) or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise SinkscopeError(
            f"site {given!r}: expected (layer, neuron) or (layer, expert, neuron), whole numbers from 0",
            page="neuron-sites",
        )
    return Site(numbers[0], numbers[-1], numbers[1] if len(numbers) == 3 else None)


def _sites(sites: Iterable[Any], layer: int | None, neurons: Iterable[int]) -> tuple[Site, ...]:
    neurons = list(neurons)
    if (layer is None) != (not neurons):
        raise SinkscopeError(
            f"layer={layer!r} with neurons={neurons!r}: give both, as in layer=1, neurons=[7890], or "
            "sites=[(layer, neuron)]",
            page="neuron-sites",
        )
    every = [site_of(s) for s in sites] + [site_of((layer, n)) for n in neurons if layer is not None]
    if not every:
        raise SinkscopeError(
            "no neuron given: expected layer=1, neurons=[7890] or sites=[(layer, neuron)]", page="neuron-sites"
        )
    return tuple(dict.fromkeys(every))


@dataclass(frozen=True, kw_only=True)
class NeuronEdit(Intervention):
    """Gives chosen neurons other values at chosen positions.

    Attributes:
        sites: the neurons: (layer, neuron), or (layer, expert, neuron) in a mixture of experts. `layer` and `neurons`
            are a shorter way to give those of one layer.
        site: "post" edits the input of the down projection, which is gate times up in a gated MLP (`hook_post`);
            "up" edits the linear factor (`hook_pre_linear`), as the paper's Listing 1 does.
    """

    sites: Sequence[SiteLike] = ()
    layer: InitVar[int | None] = None
    neurons: InitVar[Sequence[int]] = ()
    site: Where = "post"

    KIND: ClassVar[str] = "edited"

    def __post_init__(self, layer: int | None, neurons: Sequence[int]) -> None:
        object.__setattr__(self, "sites", _sites(self.sites, layer, neurons))
        if self.site not in ("post", "up"):
            raise SinkscopeError(f'site={self.site!r}: expected "post" or "up"', page="neuron-sites")

    @property
    def checked_sites(self) -> tuple[Site, ...]:
        """`sites` with their type: whatever was given, they are `Site`s afterwards."""
        return cast("tuple[Site, ...]", self.sites)

    @abstractmethod
    def new_values(
        self, old: Float[Tensor, "batch pos neuron"], call: Call, memory: Memory, group: Group, run: Run
    ) -> Float[Tensor, "batch pos neuron"]:
        """What the neurons of `group` get instead of `old`. `memory["first"]` has their values at the first token."""

    def groups(self) -> list[Group]:
        """The sites by MLP."""
        by: dict[tuple[int, int | None], list[int]] = {}
        for s in self.checked_sites:
            by.setdefault((s.layer, s.expert), []).append(s.neuron)
        return [Group(layer, expert, neurons) for (layer, expert), neurons in by.items()]

    def enter(self, run: Run, key: int) -> None:
        """Hooks on the down projection, the up projection or the experts."""
        self._check(run.target)
        adapter = run.target.adapter
        for group in self.groups():
            edit = self._editor(run, key, group)
            if group.expert is not None:
                experts = run.target.sub(group.layer, adapter.experts or "")
                run.hook(experts, "post", expert_hook(group.expert, group.neurons, self.site, edit))
            elif self.site == "post":
                run.hook(run.target.sub(group.layer, adapter.down), "pre", _down_hook(group.neurons, edit))
            else:
                module, offset = _up_module(run.target, group.layer)
                run.hook(module, "post", _up_hook([offset + n for n in group.neurons], edit))

    def bridge_hooks(self, run: Run, key: int) -> list[tuple[str, Callable[..., Any]]]:
        """The same at `hook_post` or `hook_pre_linear`."""
        self._check(run.target)
        point = "hook_post" if self.site == "post" else "hook_pre_linear"
        hooks = []
        for group in self.groups():
            name = f"blocks.{group.layer}.mlp.{point}"
            if group.expert is not None or name not in run.target.model.hook_dict:
                raise UnsupportedError(
                    f"this bridge has no hook point for {Site(group.layer, group.neurons[0], group.expert)} at "
                    f"site={self.site!r}: use `with ....on(bridge):` instead",
                    page="no-up-factor",
                )
            hooks.append((name, _point_hook(group.neurons, self._editor(run, key, group))))
        return hooks

    def _editor(self, run: Run, key: int, group: Group) -> Callable[[Tensor], Tensor | None]:
        """From values in any shape (..., neuron) to new ones; None if the run does not act on this call."""

        def edit(flat: Tensor) -> Tensor | None:
            call = run.call
            if call is None:
                return None
            index = call.on(flat.device)
            old = flat.reshape(*index.shape, len(group.neurons))  # OPT and experts run batch and position together
            memory = call.sequence.memory.setdefault((key, group.layer, group.expert), Memory())
            if not call.sequence.settled or "first" not in memory:
                memory.keep("first", old, index == 0)
            first = memory["first"]
            new = self.new_values(old, call, memory, group, run)
            moved = (new - old).detach().abs() > FIRED * first.nan_to_num(0).abs()[:, None]
            log_values(run, call, group, self.KIND, moved & (index >= 0)[..., None], {"old": old, "new": new})
            return new.reshape(flat.shape)

        return edit

    def _check(self, target: Target) -> None:
        for s in self.checked_sites:
            if s.layer >= target.n_layers:
                raise _range("layer", s.layer, target.n_layers, target)
            adapter, mixture = target.adapter, target.is_mixture(s.layer)
            if mixture != (s.expert is not None):
                want = "(layer, expert, neuron)" if mixture else "(layer, neuron)"
                what = "a mixture of experts" if mixture else "one MLP without experts"
                raise SinkscopeError(
                    f"{s}: layer {s.layer} of {target.name} is {what}; give {want}", page="neuron-sites"
                )
            if s.expert is not None:
                experts, width = check_experts(target, s.layer)
                if s.expert >= experts:
                    raise _range("expert", s.expert, experts, target)
            else:
                width = _width(target, s.layer)
            if s.neuron >= width:
                raise _range("neuron", s.neuron, width, target)
            if self.site == "up" and s.expert is None and adapter.gate is None and not adapter.fused_gate_up:
                raise UnsupportedError(
                    f'site="up": the MLP of {target.name} ({adapter.model_type}) has no gate and so no up factor; use '
                    'site="post"',
                    page="no-up-factor",
                )


_REASONS = {1: "no BOS", 2: "one-token prompt", 3: "sink-like second value", 4: "prompt read before the run"}


def log_values(
    run: Run,
    call: Call,
    group: Group,
    kind: str,
    where: Bool[Tensor, "batch pos neuron"],
    data: dict[str, Tensor],
) -> None:
    """One event for each True of `where`, with the entries of `data` at that place."""
    index = call.on(where.device)
    kept = {name: value.detach() for name, value in data.items()}

    def make() -> list[Event]:
        at = where.nonzero(as_tuple=True)
        rows, places, columns = (t.tolist() for t in at)
        found = {name: value.expand(where.shape)[at].tolist() for name, value in kept.items()}
        positions = index[at[0], at[1]].tolist()
        events = []
        for i, (row, _, column) in enumerate(zip(rows, places, columns, strict=True)):
            entry: dict[str, Any] = {"neuron": group.neurons[column], **{n: v[i] for n, v in found.items()}}
            if group.expert is not None:
                entry["expert"] = group.expert
            if "reason" in entry:
                entry["reason"] = _REASONS[int(entry["reason"])]
            events.append(Event(row, call.step, positions[i], group.layer, None, kind, entry))
        return events

    run.log(make)


class _Columns:
    """Chosen columns of the last dimension of a tensor."""

    def __init__(self, columns: list[int]) -> None:
        self.columns = torch.tensor(columns)

    def of(self, tensor: Tensor) -> Tensor:
        if self.columns.device != tensor.device:  # once, not a copy to the device in every call
            self.columns = self.columns.to(tensor.device)
        return tensor[..., self.columns]

    def edited(self, tensor: Tensor, edit: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        new = edit(self.of(tensor))
        # A copy: the caller's tensor may be needed by others, and by autograd.
        return None if new is None else tensor.index_copy(-1, self.columns, new.to(tensor.dtype))


def _down_hook(neurons: list[int], edit: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
    columns = _Columns(neurons)

    def hook(
        _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        post = columns.edited(args[0], edit)
        return None if post is None else ((post, *args[1:]), kwargs)

    return hook


def _up_hook(neurons: list[int], edit: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
    columns = _Columns(neurons)
    return lambda _module, _args, _kwargs, output: columns.edited(output, edit)


def _point_hook(neurons: list[int], edit: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
    columns = _Columns(neurons)

    def at_point(tensor: Tensor, hook: Any) -> Tensor | None:
        return columns.edited(tensor, edit)

    return at_point


def _up_module(target: Target, layer: int) -> tuple[nn.Module, int]:
    """The module that computes the linear factor, and the column where it begins."""
    if target.adapter.fused_gate_up and target.kind == "bridge":  # a bridge splits the fused projection into two
        return target.sub(layer, f"{target.adapter.mlp}.in"), 0
    module = target.sub(layer, target.adapter.up or "")
    return module, _width(target, layer) if target.adapter.fused_gate_up else 0


def _width(target: Target, layer: int) -> int:
    """Neurons of this layer's MLP (in some mixtures, layers without experts have another width)."""
    weight = plain_weight(target.sub(layer, target.adapter.down))
    return target.d_mlp if weight is None else int(weight.shape[0 if target.adapter.transposed_down else 1])


def _range(what: str, value: int, count: int, target: Target) -> SinkscopeError:
    return SinkscopeError(
        f"{what} {value} is not in {target.name}, which has {count} there: give one from 0 to {count - 1}",
        page="neuron-sites",
    )


def calibrated_tensor(values: list[float | None], like: Tensor) -> Float[Tensor, " neuron"]:
    """Numbers as a tensor beside `like`; NaN for None."""
    return torch.tensor([torch.nan if v is None else v for v in values], device=like.device, dtype=like.dtype)
