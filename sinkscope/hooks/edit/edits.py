"""Edits that give new values to what passes some hook points: of neurons and heads, and of the residual stream."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from functools import partial
from os import PathLike
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.engine.run import Run
from sinkscope.engine.step import Step
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import Finite, check_values, checked_value
from sinkscope.hooks.edit.base import Intervention
from sinkscope.hooks.edit.sites import (
    Positions,
    Where,
    checked_positions,
    chosen_positions,
    heads_of,
    listed,
    python_numbers,
    site_of,
)
from sinkscope.hooks.trace import Site, resolve
from sinkscope.models.inputs import check_site
from sinkscope.models.neurons import HookPoint, groups_of, heads_point, neurons_point
from sinkscope.models.target import Target
from sinkscope.results.notation import Head
from sinkscope.results.result import Result


@dataclass(frozen=True, eq=False)
class Values:
    """The values that pass a hook point in one forward call.

    Attributes:
        old: The values; of a head, the columns of its output.
        of: What the edit says of the hook point.
        step: The forward call.
        key: By what the edit remembers these rows between calls.
    """

    old: Float[Tensor, "batch pos *d"]
    of: Any
    step: Step
    key: tuple[int, int]

    @property
    def index(self) -> Int[Tensor, "batch pos"]:
        """True position of each token in its row; -1 at padding."""
        return self.step.on(self.old.device)

    def check_read(self, unknown: str, remedy: str) -> None:
        """Refuse a call that continues tokens which the edit had to see and did not.

        Args:
            unknown: What is not known.
            remedy: What to do instead of entering the run first.

        Raises:
            SinkscopeError: Such tokens were read before the run was entered.
        """
        past = self.step.past
        if self.step.state.partial and past > 1:  # the first token is edited by itself
            raise SinkscopeError(
                f"the first {past} tokens were read before this run was entered, so {unknown} is not known: enter the "
                f"run first, or {remedy}"
            )


class PlacedEdit(Intervention):
    """Base of edits that give new values to what passes some hook points, at some positions (`positions`)."""

    positions: Any

    @abstractmethod
    def hook_points(self, target: Target) -> list[tuple[HookPoint, Any]]:
        """Return the hook points in this model, each with what its values are values of."""

    @abstractmethod
    def edited(self, values: Values) -> Any:
        """Return the values that replace `values.old` at the chosen positions: a number, or of a shape that fits."""

    def count(self, values: Values, new: Tensor, chosen: Tensor) -> Tensor:
        """Return how many values have changed: of a head, all as one."""
        changed = (new.detach() != values.old.detach()) & chosen
        return (changed.any(-1) if isinstance(values.of, Head) else changed).sum()

    def enter(self, run: Run, key: int) -> None:
        """Register hooks on the modules beside which the values pass."""
        for number, (point, of) in enumerate(self.hook_points(run.target)):
            run.hook_edit(*point.hook(partial(self._edit, run, (key, number), of)))

    def _edit(self, run: Run, key: tuple[int, int], of: Any, tensor: Tensor) -> Tensor | None:
        """New values, which are counted where they differ; None if the run does not act on this call."""
        step = run.step
        if step is None:
            return None
        if tensor.numel() != step.index.numel() * tensor.shape[-1]:
            raise UnsupportedError(
                f"a module of {run.target.name} reads {tensor.numel() // tensor.shape[-1]} tokens of a call with "
                f"{step.index.numel()}, whose positions are not known: leave its layer out of the edit"
            )
        # OPT and experts run batch and position together.
        old = tensor.reshape(*step.index.shape, tensor.shape[-1])
        values = Values(old, of, step, key)
        chosen = chosen_positions(values.index, self.positions)[..., None]
        new = torch.where(chosen, self.edited(values), old)
        run.count(self.KIND, self.count(values, new, chosen))
        return new.reshape(tensor.shape)


@dataclass(frozen=True, kw_only=True)
class NeuronEdit(PlacedEdit):
    """Gives chosen neurons new values at chosen positions.

    Attributes:
        sites: The neurons, as (layer, neuron), as (layer, expert, neuron) in a mixture of experts, by name ("L1.N338",
            "L3.E2.N7"), or as a result has them. A neuron of a shared expert is (layer, neuron). `layer` with
            the numbers of `neurons` is a shorter form.
        site: "post" edits the input of the down projection, which is gate times up in a gated MLP (`hook_post`);
            "up" edits the linear factor (`hook_pre_linear`), as the paper's Listing 1 does.
    """

    sites: Any = field(default=(), kw_only=False)
    layer: InitVar[int | None] = None
    neurons: InitVar[int | Sequence[int]] = ()
    site: Where = "post"

    heads: ClassVar[Any] = ()
    """Layer and number of each edited head; only an ablation has any."""

    def __post_init__(self, layer: int | None, neurons: int | Sequence[int]) -> None:
        numbers = listed("neurons", neurons)
        if (layer is None) != (not numbers):
            raise SinkscopeError(f"layer={layer!r} with neurons={numbers!r}: give both, as in layer=1, neurons=[7890]")
        sites = [*listed("sites", self.sites), *((layer, number) for number in numbers)]
        self.store(sites=tuple(dict.fromkeys(map(site_of, sites))))
        checked_value(Where, self.site, "site")
        self.read_values()
        if not self.sites and not self.heads:
            raise SinkscopeError("no neuron given: expected layer=1, neurons=[7890] or sites=[(layer, neuron)]")

    def read_values(self) -> None:
        """Read the other values."""

    def hook_points(self, target: Target) -> list[tuple[HookPoint, Any]]:
        """Return the hook points with their neurons or `Head`.

        They are inputs of down projections and of output projections, up projections, or those of experts.
        """
        self.check(target)
        points: list[tuple[HookPoint, Any]] = []
        for group in groups_of(self.sites):
            points.append((neurons_point(target, group, self.site), group))
        for layer, head in self.heads:
            points.append((heads_point(target, layer, head), Head(layer, head)))
        return points

    def check(self, target: Target) -> None:
        """Refuse a model that lacks these neurons or heads, or in which they cannot be edited.

        Raises:
            SinkscopeError: The model has no such layer, neuron, expert or head.
            UnsupportedError: There is no up factor, or experts are quantised.
        """
        for layer, head in self.heads:
            check_site(target, layer, head=head)
        for site in self.sites:
            check_site(target, site.layer, site.neuron, site.expert)
            if self.site == "up" and (site.expert is not None or not target.is_gated(site.layer)):
                raise UnsupportedError(
                    f'site="up": the MLP of {target.name} ({target.adapter.model_type}) has no gate and so no up '
                    'factor, or it is one of many experts; use site="post"'
                )


def result_of(result: Any) -> Any:
    """Return a result, which a path of its file names as well.

    Raises:
        SinkscopeError: The file cannot be read, or is no result.
    """
    if isinstance(result, str | PathLike):
        return Result.load(result)
    return result


def spike_of(result: Any) -> Any:
    """Return the spike of the first token that most heads read, of those that need neurons.

    Args:
        result: The result of `find_sinks` or `why_sink`.

    Raises:
        SinkscopeError: There is no such spike, or `result` is another object.
    """
    if not hasattr(result, "first_spikes"):
        raise SinkscopeError(
            f"a {type(result).__name__} has no spikes: give the result of find_sinks or why_sink, or "
            "ss.Result.load(path) of its file"
        )
    for spike in result.first_spikes:
        if spike.needed_neurons:
            return spike
    places = ", ".join(spike.place.words for spike in result.spikes)
    raise SinkscopeError(
        f"no neurons were found that a spike of the first token needs, so there is nothing to edit (spikes: "
        f"{places or 'none'}): give the neurons yourself with sites=[...]"
    )


@dataclass(frozen=True, kw_only=True)
class Ablate(NeuronEdit):
    """Switch neurons or attention heads off.

    Args:
        heads: Query heads whose output (`hook_z`) is switched off: (layer, head), or names such as "L0.H4".
        value: A number, "zero", or "mean": the row's mean over its real positions after the first, in the first call
            that has any; drafts of assisted generation are none. The first token is left out because a sink there
            would distort the mean.
        positions: Positions to edit, counted from each row's first real token: None for all, "first", a number, several
            numbers, or a slice.

    Example:
        >>> Ablate(layer=1, neurons=[3, 4], positions="first").sites[0]
        Neuron(layer=1, expert=None, neuron=3)
        >>> Ablate("L1.N338").sites[0]
        Neuron(layer=1, expert=None, neuron=338)
        >>> Ablate(heads=["L0.H4", (2, 1)]).heads
        ((0, 4), (2, 1))
    """

    value: Literal["zero", "mean"] | float = "zero"
    positions: Positions = None
    heads: Any = ()  # pyright: ignore[reportIncompatibleVariableOverride]

    KIND = "ablated"

    def read_values(self) -> None:
        """Read heads, value and positions."""
        value = checked_value(Literal["zero", "mean"] | Finite, python_numbers(self.value), "value")
        self.store(heads=heads_of(self.heads), value=value, positions=checked_positions(self.positions))

    @classmethod
    def from_result(cls, result: Any) -> Ablate:
        """Return the ablation of the neurons that a spike of the first token needs (see `spike_of`).

        Args:
            result: The result of `find_sinks` or `why_sink`, or the path of its file.
        """
        return cls(spike_of(result_of(result)).needed_neurons)

    def enter(self, run: Run, key: int) -> None:
        """Register hooks; a mean is remembered from call to call, on the cache."""
        if self.value == "mean":
            run.uncached = "Ablate remembers the mean of the prompt, and without a cache each call is a first one"
        super().enter(run, key)

    def edited(self, values: Values) -> Any:
        """Return the number, or the mean of the row where there is one."""
        if self.value == "mean":
            return self._mean(values)
        return 0.0 if self.value == "zero" else self.value

    def _mean(self, values: Values) -> Float[Tensor, "batch pos neuron"]:
        """The mean of the first call that has one; before it nothing changes."""
        values.check_read("the mean of the row", "give a number as value")
        old, known, key = values.old, values.step.state.known, (*values.key, "mean")
        in_mean = (values.index > 0)[..., None]
        is_second = (values.index == 1)[..., None]  # after a prompt of one token, it alone gives the mean
        drafts_from = values.step.state.drafts_from
        if drafts_from is not None:
            column = torch.arange(values.step.past, values.step.past + values.step.new, device=old.device)
            in_mean = in_mean & ((column < drafts_from)[:, None] | is_second)
        exact = torch.promote_types(old.dtype, torch.float32)
        mean = torch.where(in_mean, old, 0).sum(1, dtype=exact) / in_mean.sum(1)
        earlier = known.get(key, mean)
        mean = torch.where(earlier.isnan() | is_second.any(1), mean, earlier)  # what was read there was taken back
        known[key] = mean.detach()  # for later calls
        return torch.where(mean.isnan()[:, None], old, mean[:, None].to(old.dtype))


_READ = ("hook_resid_pre", "hook_attn_out", "hook_mlp_out", "hook_resid_post")
_WHERE = ("hook_embed", *_READ)


def residual_sites(target: Target, pattern: str, width: int, parts: Sequence[str]) -> list[Site]:
    """Return the sites of the residual stream that a pattern names.

    Args:
        target: The model.
        pattern: The pattern.
        width: Numbers of what is to be written there.
        parts: The last parts of the names of sites that may be written.

    Raises:
        SinkscopeError: The width is not that of the residual stream, or a site is none of these.
    """
    if width != target.d_model:
        raise SinkscopeError(f"vector of {width} numbers: the residual stream of {target.name} has {target.d_model}")
    sites = resolve(target, pattern)
    for site in sites:
        if site.name.rpartition(".")[2] not in parts:
            raise SinkscopeError(f"site {site.name!r}: expected a site of the residual stream, {', '.join(parts)}")
    return sites


@dataclass(frozen=True, eq=False)
class Add(PlacedEdit):
    """Add a vector to the residual stream at a site, in the prompt and in everything that is generated.

    Attributes:
        vector: `[d_model]`, a tensor or numbers. A tensor that requires a gradient gets one, and its value is read in
            every call; of others the value now counts.
        site: Site by its TransformerLens name: `hook_embed` (what the first layer reads, behind any multiplication or
            norm of the embedding), or `hook_resid_pre`, `hook_attn_out`, `hook_mlp_out`
            or `hook_resid_post` of a layer, as in "blocks.3.hook_resid_post". A pattern such as
            "blocks.*.hook_resid_post" adds the vector at every site that it matches.
        scale: Factor on the vector.
        positions: Positions to edit, counted from each row's first real token: None for all, "first", a number, several
            numbers, or a slice.

    Raises:
        SinkscopeError: The vector does not consist of finite numbers, its length differs from the residual stream's, or
            the site is none of these.

    Example:
        >>> Add([0.5, -0.5], "blocks.3.hook_resid_post", scale=2.0)
        Add(site='blocks.3.hook_resid_post', scale=2.0, positions=None)
    """

    vector: Any = field(repr=False)
    site: str
    scale: int | float = 1.0
    positions: Positions = None

    KIND = "shifted"

    def __post_init__(self) -> None:
        vector = torch.empty(0)
        with suppress(TypeError, ValueError, RuntimeError):
            vector = torch.as_tensor(self.vector)
        if vector.ndim != 1 or len(vector) == 0 or not bool(vector.isfinite().all()):
            raise SinkscopeError(
                f"vector of type {type(self.vector).__name__} and shape {tuple(vector.shape)}: expected finite "
                "numbers, one for each dimension of the residual stream"
            )
        check_values(str, site=self.site)
        checked_value(Finite, self.scale, "scale")
        if not vector.requires_grad:
            vector = vector.float().clone()
        self.store(vector=vector, positions=checked_positions(self.positions))

    def hook_points(self, target: Target) -> list[tuple[HookPoint, float]]:
        """Return the modules whose input or output the sites are, each with the factor on what is added there."""
        points: list[tuple[HookPoint, float]] = []
        for site in residual_sites(target, self.site, len(self.vector), _WHERE):
            if site.name == "hook_embed":  # a model may multiply or normalise what its embedding gives
                (site,) = resolve(target, "blocks.0.hook_resid_pre")
            assert site.point is not None  # only attention rows have none
            # Divided, because what the module gives is multiplied before it is added.
            points.append((site.point, self.scale / site.factor))
        return points

    def edited(self, values: Values) -> Tensor:
        """Return the values with the vector added."""
        vector = self.vector.float().to(values.old.device)  # in every call, because whoever trains it changes it
        return values.old + (values.of * vector).to(values.old)

    def count(self, values: Values, new: Tensor, chosen: Tensor) -> Tensor:
        """Return to how many values something was added, without a look at the whole stream."""
        return chosen.sum() * len(self.vector)


@dataclass(frozen=True, eq=False)
class Put(PlacedEdit):
    """Put values of another prompt into the residual stream at a site (activation patching, Meng et al. 2022).

    Attributes:
        values: A row for each position, `[pos d_model]`, as `trace` of the other prompt gives them at this site:
            `trace(model, other, site)[site][0, [3, 4]]`; of one position also `[d_model]`.
        site: Site by its TransformerLens name: `hook_resid_pre`, `hook_attn_out`, `hook_mlp_out` or `hook_resid_post`
            of a layer. Several sites are several edits, joined by `|`.
        positions: The positions that get them, in the order of the rows, counted from each row's first real token:
            "first", a number, or several numbers.

    Raises:
        SinkscopeError: The values are not finite or not as many as positions, their width differs from the residual
            stream's, or the site is none of these.
    """

    values: Any = field(repr=False)
    site: str
    positions: Any

    KIND = "put"

    def __post_init__(self) -> None:
        rows = torch.empty(0)
        with suppress(TypeError, ValueError, RuntimeError):
            rows = torch.as_tensor(self.values).detach().float().clone()
        check_values(str, site=self.site)
        positions = tuple(self.positions) if isinstance(self.positions, range) else self.positions
        positions = 0 if positions == "first" else checked_positions(positions)
        numbers = (positions,) if isinstance(positions, int) else positions
        if not isinstance(numbers, tuple):
            raise SinkscopeError(f'positions={self.positions!r}: expected "first", a number, or several numbers')
        if rows.ndim == 1:
            rows = rows[None]
        if rows.ndim != 2 or len(rows) != len(numbers) or not bool(rows.isfinite().all()):
            raise SinkscopeError(
                f"values of shape {tuple(rows.shape)} for {len(numbers)} positions: expected finite numbers "
                "[pos d_model], a row for each position, such as ss.trace(model, other, site)[site][0, positions]"
            )
        self.store(values=rows, positions=numbers)

    def hook_points(self, target: Target) -> list[tuple[HookPoint, float]]:
        """Return the module whose input or output the site is, with the factor on what it gives."""
        site, *more = residual_sites(target, self.site, self.values.shape[1], _READ)
        if more:
            raise SinkscopeError(f"site {self.site!r} names several: give one, and join edits by |")
        assert site.point is not None  # only attention rows have none
        return [(site.point, site.factor)]

    def edited(self, values: Values) -> Tensor:
        """Return the value of each chosen position."""
        index = values.index
        numbers = torch.tensor(self.positions, device=index.device)
        row = (index[..., None] == numbers).int().argmax(-1)
        return (self.values.to(index.device)[row] / values.of).to(values.old)
