"""Edits of neurons and heads: how they are named, the mechanism shared by all edits, ablation, and written values.

The experts of a mixture are one fused call, so an edit corrects its output instead: the output is a weighted sum over
each token's experts, and if neuron j of expert e has value `a` and should have `b`, it changes by
`weight[e] * (b - a) * W_out[e][:, j]` for the tokens routed to e, exactly. `a` is recomputed from that neuron's own
weight rows for all tokens. For a token that is routed elsewhere it is the value the neuron would have, which is needed
for the neutral value of a patch.
"""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.notation import neuron_name, read_head, read_neuron
from sinkscope.files.records import Number, Whole, conform
from sinkscope.interventions.base import Event, Intervention, Run
from sinkscope.interventions.positions import Call, Memory
from sinkscope.models.experts import activate, bind, columns, gate_up
from sinkscope.models.target import Target, on_input, on_output

SiteLike = Sequence[int | None] | str
Where = Literal["post", "up"]
Positions = int | tuple[int, ...] | list[int] | slice | Literal["first"] | None
Edit = Callable[[Tensor], Tensor | None]
# A change counts as an event when it moves the neuron by more than this part of its value at the first token.
FIRED = 0.1
_PAGE = "neuron-sites"


class NeuronSite(NamedTuple):
    """One neuron of a layer's MLP (in a mixture, of its shared expert) or of one routed expert of a mixture."""

    layer: int
    neuron: int
    expert: int | None = None

    def __str__(self) -> str:
        return neuron_name(*self.numbers)

    @property
    def numbers(self) -> tuple[int, ...]:
        """(layer, neuron), or (layer, expert, neuron) for a routed expert, as in results."""
        return (self.layer, self.neuron) if self.expert is None else (self.layer, self.expert, self.neuron)


class NeuronGroup(NamedTuple):
    """The neurons of one MLP or expert, or the columns of one head in `hook_z`, that one hook edits."""

    layer: int
    expert: int | None
    neurons: list[int]
    head: int | None = None

    def size(self, values: Float[Tensor, "*n neuron"]) -> Float[Tensor, "*n size"]:
        """Size of the values: the absolute value of each neuron, or the norm of a head."""
        return values.abs() if self.head is None else torch.linalg.vector_norm(values, dim=-1, keepdim=True)

    @property
    def sites(self) -> list[NeuronSite]:
        """Each neuron as a site."""
        return [NeuronSite(self.layer, neuron, self.expert) for neuron in self.neurons]


def site_of(given: Any) -> NeuronSite:
    """A `NeuronSite` from (layer, neuron), (layer, expert, neuron) or a name such as "L1.N338".

    Raises:
        SinkscopeError: The site is neither two or three whole numbers from 0 nor such a name.
    """
    if isinstance(given, NeuronSite):
        return given
    if isinstance(given, str):
        given = read_neuron(given, "site")
    numbers: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) else (given,)
    if len(numbers) not in (2, 3) or not all(map(_whole, numbers)):
        raise SinkscopeError(
            f"site {given!r}: expected (layer, neuron) or (layer, expert, neuron), whole numbers from 0, or a name "
            'such as "L1.N338"',
            page=_PAGE,
        )
    return NeuronSite(numbers[0], numbers[-1], numbers[1] if len(numbers) == 3 else None)


def head_of(given: Any, layer: int | None = None) -> tuple[int, int]:
    """Layer and query head from (layer, head), from its name "L0.H4", or from its number if the layer is known.

    Raises:
        SinkscopeError: The head is given in any other form.
    """
    if isinstance(given, str):
        return read_head(given, "head")
    numbers = (layer, given) if isinstance(given, int) and layer is not None else given
    pair: Any = numbers if isinstance(numbers, tuple | list) and len(numbers) == 2 else (None, None)
    if not _whole(pair[1]) or type(pair[0]) is not int:  # layer -1 is the last one
        raise SinkscopeError(
            f'head {given!r}: expected (layer, head), whole numbers from 0, or a name such as "L0.H4"', page=_PAGE
        )
    return pair[0], pair[1]


def _whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


@dataclass(frozen=True, kw_only=True)
class NeuronEdit(Intervention):
    """Gives chosen neurons new values at chosen positions.

    Attributes:
        sites: The neurons, as (layer, neuron), as (layer, expert, neuron) in a mixture of experts, or by name:
            "L1.N338", "L3.E2.N7". A neuron of a shared expert is (layer, neuron). `layer` and `neurons` are a shorter
            way to give one or several neurons of one layer, where layer -1 is the last.
        site: "post" edits the input of the down projection, which is gate times up in a gated MLP (`hook_post`);
            "up" edits the linear factor (`hook_pre_linear`), as the paper's Listing 1 does.
    """

    sites: Sequence[SiteLike] = ()
    layer: InitVar[int | None] = None
    neurons: InitVar[int | Sequence[int]] = ()
    site: Where = "post"

    KIND: ClassVar[str] = "edited"
    EDITS: ClassVar[bool] = True  # False: `new_values` only watches, and the values at the first token are not kept

    def __post_init__(self, layer: int | None, neurons: int | Sequence[int]) -> None:
        several = [neurons] if isinstance(neurons, int) else list(neurons)
        if (layer is None) != (not several):
            raise SinkscopeError(
                f"layer={layer!r} with neurons={several!r}: give both, as in layer=1, neurons=[7890], or "
                "sites=[(layer, neuron)]",
                page=_PAGE,
            )
        if layer is not None and layer < 0:  # counted from the last one, which the model tells
            every = [site_of((0, n))._replace(layer=layer) for n in several]
        else:
            every = [site_of((layer, n)) for n in several]
        given = [self.sites] if isinstance(self.sites, str) else self.sites
        every = [site_of(s) for s in given] + every
        if not every and not self._heads:
            raise SinkscopeError(
                "no neuron given: expected layer=1, neurons=[7890] or sites=[(layer, neuron)]", page=_PAGE
            )
        object.__setattr__(self, "sites", tuple(dict.fromkeys(every)))
        conform(Where, self.site, "site", page=_PAGE)

    @property
    def _heads(self) -> Sequence[tuple[int, int]]:
        """Layer and number of each edited head; only an ablation has any."""
        return ()

    @property
    def checked_sites(self) -> tuple[NeuronSite, ...]:
        """`sites`, typed: in whatever form they were given, they are stored as `NeuronSite`s."""
        return cast("tuple[NeuronSite, ...]", self.sites)

    @abstractmethod
    def new_values(
        self, old: Float[Tensor, "batch pos neuron"], call: Call, memory: Memory, group: NeuronGroup, run: Run
    ) -> Float[Tensor, "batch pos neuron"] | None:
        """The values that replace `old` in the neurons of `group`; None leaves them unchanged.

        `memory["first"]` has their values at the first token.
        """

    def groups(self) -> list[NeuronGroup]:
        """The sites, grouped by MLP."""
        by: dict[tuple[int, int | None], list[int]] = {}
        for s in self.checked_sites:
            by.setdefault((s.layer, s.expert), []).append(s.neuron)
        return [NeuronGroup(layer, expert, neurons) for (layer, expert), neurons in by.items()]

    def head_groups(self, target: Target) -> list[NeuronGroup]:
        """The heads, each with its columns of `hook_z`."""
        width = target.head_width
        return [NeuronGroup(layer, None, list(range(h * width, (h + 1) * width)), h) for layer, h in self._heads]

    def prepared(self, target: Target) -> NeuronEdit:
        """The edit with layer numbers counted from the first layer."""
        if all(site.layer >= 0 for site in self.checked_sites):
            return self
        return replace(self, sites=[s._replace(layer=target.layer_number(s.layer)) for s in self.checked_sites])

    def enter(self, run: Run, key: int) -> None:
        """Hooks on the down projection, the up projection, the experts, or the output projection of attention."""
        self._check(run.target)
        adapter = run.target.adapter
        for group in [*self.groups(), *self.head_groups(run.target)]:
            edit = self._editor(run, key, group)
            if group.head is not None:
                run.hook(run.target.sub(group.layer, adapter.o), "pre", on_input(_columns(group.neurons, edit)))
            elif group.expert is not None:
                experts = run.target.sub(group.layer, adapter.experts or "")
                run.hook(experts, "post", expert_hook(group.expert, group.neurons, self.site, edit))
            elif self.site == "post":
                run.hook(run.target.mlp_part(group.layer, "down"), "pre", on_input(_columns(group.neurons, edit)))
            else:
                module, offset = _up_module(run.target, group.layer)
                run.hook(module, "post", on_output(_columns([offset + n for n in group.neurons], edit)))

    def bridge_hooks(self, run: Run, key: int) -> list[tuple[str, Callable[..., Any]]]:
        """The same at `hook_post` or `hook_pre_linear`."""
        self._check(run.target)
        point = "hook_post" if self.site == "post" else "hook_pre_linear"
        hooks = []
        for group in self.groups():
            name = f"blocks.{group.layer}.mlp.{point}"
            if run.target.is_mixture(group.layer) or name not in run.target.model.hook_dict:
                raise UnsupportedError(
                    f"this bridge has no hook point for {group.sites[0]} at "
                    f"site={self.site!r}: use `with ....on(bridge):` instead",
                    page="no-up-factor",
                )
            edited = _columns(group.neurons, self._editor(run, key, group))
            hooks.append((name, lambda tensor, hook, edited=edited: edited(tensor)))
        for group in self.head_groups(run.target):
            edited = _columns(group.neurons, self._editor(run, key, group))
            hooks.append((f"blocks.{group.layer}.attn.hook_z", lambda z, hook, edited=edited: _beside(z, edited)))
        return hooks

    def _editor(self, run: Run, key: int, group: NeuronGroup) -> Edit:
        """Function from values `[... neuron]` to new ones; it returns None if the run does not act on this call."""

        def edit(flat: Tensor) -> Tensor | None:
            call = run.call
            if call is None:
                return None
            index = call.on(flat.device)
            old = flat.reshape(*index.shape, len(group.neurons))  # OPT and experts run batch and position together
            memory = call.sequence.memory.setdefault((key, group.layer, group.expert, group.head), Memory())
            if self.EDITS and (not call.sequence.settled or "first" not in memory):
                memory.keep("first", old, index == 0)
            if (new := self.new_values(old, call, memory, group, run)) is None:
                return None
            moved = group.size((new - old).detach()) > FIRED * group.size(memory["first"].nan_to_num(0))[:, None]
            said = {"old": old, "new": new} if group.head is None else {"old": group.size(old), "new": group.size(new)}
            log_values(run, call, group, self.KIND, moved & (index >= 0)[..., None], said)
            return new.reshape(flat.shape)

        return edit

    def _check(self, target: Target) -> None:
        adapter = target.adapter
        gated = adapter.gate is not None or adapter.fused_gate_up
        for layer, head in self._heads:
            target.check_site(layer, head=head)
        for s in self.checked_sites:
            target.check_site(*s)
            if s.expert is not None:
                check_experts(target, s.layer)
            elif self.site == "up" and not gated:
                raise UnsupportedError(
                    f'site="up": the MLP of {target.name} ({adapter.model_type}) has no gate and so no up factor; use '
                    'site="post"',
                    page="no-up-factor",
                )


@dataclass(frozen=True, kw_only=True)
class Ablate(NeuronEdit):
    """Switch neurons or attention heads off.

    Args:
        heads: Query heads whose output (`hook_z`) is switched off: (layer, head), names such as "L0.H4", or head
            numbers together with `layer`.
        value: "zero", a number, or "mean": the row's mean over its real positions after the first, in the first call
            that has any. The first token is excluded because a sink there would distort the mean. Before such a call,
            "mean" leaves the values unchanged.
        positions: Positions to edit, counted from each row's first real token: None for all, "first", a number, several
            numbers, or a slice.

    Example:
        >>> Ablate(layer=1, neurons=[3, 4], positions="first").sites[0]
        NeuronSite(layer=1, neuron=3, expert=None)
        >>> Ablate(heads=["L0.H4", (2, 1)]).heads
        ((0, 4), (2, 1))
    """

    value: Literal["zero", "mean"] | float = "zero"
    positions: Positions = None
    heads: int | str | Sequence[int | str | Sequence[int]] = ()

    KIND: ClassVar[str] = "ablated"

    def __post_init__(self, layer: int | None, neurons: int | Sequence[int]) -> None:
        given = [self.heads] if isinstance(self.heads, int | str) else self.heads
        object.__setattr__(self, "heads", tuple(dict.fromkeys(head_of(head, layer) for head in given)))
        super().__post_init__(None if self.heads and neurons == () else layer, neurons)
        conform(Literal["zero", "mean"] | Number, self.value, "value", page=_PAGE)
        object.__setattr__(self, "positions", checked_positions(self.positions))

    @property
    def _heads(self) -> Sequence[tuple[int, int]]:
        return cast("tuple[tuple[int, int], ...]", self.heads)

    def prepared(self, target: Target) -> NeuronEdit:
        """The edit with layer numbers counted from the first layer."""
        if any(layer < 0 for layer, _ in self._heads):
            return replace(self, heads=[(target.layer_number(i), head) for i, head in self._heads]).prepared(target)
        return super().prepared(target)

    def new_values(
        self, old: Float[Tensor, "batch pos neuron"], call: Call, memory: Memory, group: NeuronGroup, run: Run
    ) -> Float[Tensor, "batch pos neuron"]:
        """Zero, the mean or the number at the chosen positions."""
        index = call.on(old.device)
        if self.value == "mean":
            later = (index > 0)[..., None]
            mean = torch.where(later, old.detach(), 0).sum(1, dtype=torch.float32) / later.sum(1)
            kept = memory.get("mean", torch.full_like(mean, torch.nan))
            memory["mean"] = torch.where(kept.isnan(), mean, kept)
            value = torch.where(memory["mean"].isnan()[:, None], old, memory["mean"][:, None].to(old.dtype))
        else:
            value = torch.full_like(old, 0.0 if self.value == "zero" else float(self.value))
        return torch.where(chosen_positions(index, self.positions)[..., None], value, old)


@dataclass(frozen=True, kw_only=True)
class Write(NeuronEdit):
    """Write a value into neurons at chosen positions, for instance to test whether that alone creates a sink there.

    Args:
        value: The number to write.
        position: Positions to edit, counted from each row's first real token: a number, several, "first" or a slice.

    Example:
        >>> Write(sites=[(1, 3)], value=40.0, position=[5, 9]).position
        (5, 9)
    """

    value: float
    position: Positions

    KIND: ClassVar[str] = "written"

    def __post_init__(self, layer: int | None, neurons: int | Sequence[int]) -> None:
        super().__post_init__(layer, neurons)
        conform(Number, self.value, "value", page=_PAGE)
        object.__setattr__(self, "position", checked_positions(self.position))

    def new_values(
        self, old: Float[Tensor, "batch pos neuron"], call: Call, memory: Memory, group: NeuronGroup, run: Run
    ) -> Float[Tensor, "batch pos neuron"]:
        """The number at the chosen positions."""
        return old.masked_fill(chosen_positions(call.on(old.device), self.position)[..., None], float(self.value))


def checked_positions(given: Any) -> Positions:
    """Positions in the form in which an edit stores them.

    Raises:
        SinkscopeError: These are not positions.
    """
    numbers = (given.start or 0, given.stop or 0, given.step or 0) if isinstance(given, slice) else given
    try:
        conform(Literal["first"] | Whole | tuple[Whole, ...] | None, numbers, "positions")
    except SinkscopeError:
        raise SinkscopeError(
            f'positions {given!r}: expected "first", whole numbers from 0 (0 is the first token that is not padding) '
            "or a slice of them",
            page=_PAGE,
        ) from None
    return tuple(given) if isinstance(given, list) else given


def chosen_positions(index: Int[Tensor, "batch pos"], positions: Positions) -> Bool[Tensor, "batch pos"]:
    """Which tokens of a call are at these positions; padding (-1) never is."""
    if positions is None:
        return index >= 0
    if isinstance(positions, slice):
        start, step = positions.start or 0, positions.step or 1
        inside = (index >= start) & ((index - start) % step == 0)
        return inside if positions.stop is None else inside & (index < positions.stop)
    wanted = (0,) if positions == "first" else positions if isinstance(positions, tuple) else (positions,)
    return torch.isin(index, torch.tensor(wanted, device=index.device, dtype=index.dtype))


_REASONS = {1: "no BOS", 2: "one-token prompt", 3: "sink-like second value", 4: "prompt read before the run"}


def log_values(
    run: Run,
    call: Call,
    group: NeuronGroup,
    kind: str,
    where: Bool[Tensor, "batch pos neuron"],
    data: dict[str, Tensor],
) -> None:
    """Log one event for each True in `where`, with the entries of `data` at that place."""
    index = call.on(where.device)
    kept = {name: value.detach() for name, value in data.items()}

    def make() -> list[Event]:
        at = where.nonzero(as_tuple=True)
        rows, _, columns = (t.tolist() for t in at)
        found = {name: value.expand(where.shape)[at].tolist() for name, value in kept.items()}
        positions = index[at[0], at[1]].tolist()
        if "reason" in found:
            found["reason"] = [_REASONS[int(reason)] for reason in found["reason"]]
        expert = {} if group.expert is None else {"expert": group.expert}
        names = [{"neuron": n} for n in group.neurons] if group.head is None else [{}]
        data = [
            {**names[column], **{name: values[i] for name, values in found.items()}, **expert}
            for i, column in enumerate(columns)
        ]
        return [
            Event(row, call.step, position, group.layer, group.head, kind, entry)
            for row, position, entry in zip(rows, positions, data, strict=True)
        ]

    run.log(make)


def _columns(neurons: list[int], edit: Edit) -> Edit:
    """An edit of whole tensors that gives new values to the columns of these neurons."""
    index = torch.tensor(neurons)

    def edited(tensor: Tensor) -> Tensor | None:
        nonlocal index
        if index.device != tensor.device:  # once, not a copy to the device in every call
            index = index.to(tensor.device)
        new = edit(tensor[..., index])
        # A copy, because others may need the caller's tensor, and so does autograd.
        return None if new is None else tensor.index_copy(-1, index, new.to(tensor.dtype))

    return edited


def _beside(z: Float[Tensor, "batch pos head d_head"], edited: Edit) -> Tensor | None:
    """The same edit with heads concatenated, as the output projection reads them."""
    new = edited(z.flatten(2))
    return None if new is None else new.view_as(z)


def _up_module(target: Target, layer: int) -> tuple[nn.Module, int]:
    """The module that computes the linear factor, and the column at which that factor begins."""
    if target.adapter.fused_gate_up and target.kind == "bridge":  # a bridge splits the fused projection into two
        return target.sub(layer, f"{target.adapter.mlp}.in"), 0
    return target.mlp_part(layer, "up"), target.width(layer) if target.adapter.fused_gate_up else 0


_last = threading.local()  # values already edited in this call of an experts module, by other hooks


def check_experts(target: Target, layer: int) -> None:
    """Refuse experts whose neurons cannot be edited.

    Raises:
        UnsupportedError: Their weights are not plain tensors.
    """
    experts: Any = target.sub(layer, target.adapter.experts or "")
    weight = getattr(experts, "down_proj", None)
    if not isinstance(weight, Tensor) or weight.ndim != 3 or not weight.is_floating_point():
        raise UnsupportedError(
            f"the experts of {target.name} hold no plain weights (quantised?): load the model dequantised to edit "
            "neurons of an expert",
            page="quantised-experts",
        )


def expert_hook(expert: int, neurons: list[int], site: str, edit: Edit) -> Callable[..., Any]:
    """Forward hook (with kwargs) for a fused experts module of transformers."""

    def hook(experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        hidden, chosen, weights = bind(args, kwargs)
        gate, up = gate_up(experts, expert, hidden, neurons)
        before = _edited(hidden)
        keys = [(id(experts), expert, n) for n in neurons]
        # What the neurons have now: as computed, or as an earlier hook on this same call left them.
        up = torch.stack([before.get((*k, "up"), up[..., i]) for i, k in enumerate(keys)], -1)
        post = activate(experts, gate, up)
        post = torch.stack([before.get((*k, "post"), post[..., i]) for i, k in enumerate(keys)], -1)
        new = edit(up if site == "up" else post)
        if new is None:
            return None
        after = activate(experts, gate, new.to(up.dtype)) if site == "up" else new.to(post.dtype)
        for i, k in enumerate(keys):
            before[(*k, "post")] = after[..., i]
            if site == "up":
                before[(*k, "up")] = new[..., i].to(up.dtype)
        weight = torch.where(chosen == expert, weights, 0).sum(-1, keepdim=True)
        written = columns(experts, expert, neurons).to(post.dtype)
        return output + ((after - post) * weight).to(post.dtype) @ written

    return hook


def _edited(hidden: Tensor) -> dict[Any, Tensor]:
    """State shared by all hooks of one call, which is identified by its input; a new call starts empty."""
    if getattr(_last, "hidden", None) is None or _last.hidden() is not hidden:
        _last.hidden, _last.values = weakref.ref(hidden), {}
    return _last.values
