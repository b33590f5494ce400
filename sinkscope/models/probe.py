"""Check that a model's adapter names the right modules, and that recomputed attention equals the model's own.

Neurons are checked on eight tokens, in a pass through the whole model for each kind of layer: a batch of four equal
rows, three of them edited. Attention is checked in two passes that stop after the first layers, for the model's own
weights and the recomputed ones. In these two passes every window, chunk and choice of keys is smaller than the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor, nn

from sinkscope.errors import UnsupportedError
from sinkscope.models.config import first_line
from sinkscope.models.experts import experts_of
from sinkscope.models.target import (
    Args,
    Hook,
    Kwargs,
    LayerInput,
    Target,
    first_tensor,
    kind_of,
    on_hidden,
    on_input,
    on_output,
)

_LENGTH = 8
_SHORT = 3  # tokens of the passes that tell whether one may begin at a layer
_SAME = 1e-3  # largest relative distance between their ends
_ROWS = 4  # not edited; one neuron moved; `up` moved up, or the shared expert's neuron moved; `up` moved down
_POSITION = 4  # of the edits
_ATTENTION_LAYERS = 2  # neighbours may differ: windows alternate
_NARROW = 6  # tokens of every window, chunk and choice of keys while attention is checked
_LONG = 20  # tokens of that check, so that it goes beyond all of them
_REACHES = {  # in configurations and modules: how far, or to how many keys, a layer attends, and the most meanwhile
    "sliding_window": _NARROW,
    "sliding_window_size": _NARROW,
    "attention_window_size": _NARROW,
    "attention_chunk_size": _NARROW,
    "window_size": _NARROW,
    "local_attention": _NARROW,
    "index_topk": _NARROW,
    "topk_blocks": 2,
}
_BLOCK = 2  # tokens of a block of keys, where an indexer chooses blocks
_PATHS = ("attn", "mlp", "q", "k", "v", "fused_qkv", "o", "mid", "post_attn_norm", "post_mlp_norm", "experts")
_DENSE_PATHS = (*_PATHS, "down", "up", "gate")


@dataclass
class ProbeReport:
    """What the probe measured. Every number is relative, and 0 is perfect unless stated otherwise.

    Attributes:
        tolerance: Allowed difference between numbers in the model's dtype.
        layers: Layers whose MLP was edited; none if every column of every down projection is zero, or its output is
            multiplied by a gain of zero.
        edit_error: Distance between what an edited neuron changed and what it must change according to the adapter: its
            own input to the down projection, and its column in the MLP's output and the residual stream at its
            position.
        logits_change: Smallest change of a later logit; must not be 0. It is 1 where passes end before the logits.
        row_sum_error: Distance of the recomputed attention rows' sums from 1 (0 if learned sinks take a share).
        attention_error: Largest distance between recomputed attention and the model's own.
        problem: What is wrong. None if nothing is.
    """

    tolerance: float
    layers: tuple[int, ...] = ()
    edit_error: float = 0.0
    logits_change: float = 1.0
    row_sum_error: float = 0.0
    attention_error: float = 0.0
    problem: str | None = None


class _WrongError(Exception):
    """The message says what does not fit."""


@torch.no_grad()
def probe(target: Target, *, whole: bool = True) -> ProbeReport:
    """Check on a few tokens that edits at the adapter's sites work as intended and attention is recomputed correctly.

    Args:
        target: The model, with an adapter. It is left unchanged.
        whole: Whether passes go through all layers, up to the logits. Otherwise they end where the edits show. A model
            that is read layer by layer is never passed as a whole.

    Returns:
        What was measured; `problem` says what is wrong. A wrong adapter does not raise an error.
    """
    tolerance = 1e-3
    if target.dtype not in (torch.float32, torch.float64):
        tolerance = max(tolerance, 16 * torch.finfo(target.dtype).eps)
    if getattr(target.hf, "is_quantized", False):
        tolerance = max(tolerance, 0.2)
    report = ProbeReport(tolerance)
    try:
        _measure_edits(report, target, whole and target.resident)
        if whole and target.resident and target.adapter.from_any_layer:
            middle = len(target.layers) // 2
            if not begins_at(target, middle, len(target.layers) - 1):
                raise _WrongError(f"a pass that begins at layer {middle} does not end as the whole pass does")
        _measure_attention(report, target)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (_WrongError, UnsupportedError) as wrong:
        report.problem = str(wrong)
    except Exception as error:
        report.problem = f"a forward pass raised {type(error).__name__}: {first_line(error)}"
    return report


def token_ids(target: Target, length: int) -> Int[Tensor, "1 pos"]:
    """Some tokens, always the same ones."""
    vocabulary = int(next(target.embedding.parameters()).shape[0])
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(16, vocabulary // 2), vocabulary, (1, length), generator=generator).to(target.device)


# -- edits ---------------------------------------------------------------------------------------------------------


def _measure_edits(report: ProbeReport, target: Target, whole: bool) -> None:
    """Edit the first layer of each kind of MLP that writes anything; a wrong path is wrong in every layer."""
    layers = range(target.n_layers)
    for name in _DENSE_PATHS if target.adapter.experts is None else _PATHS:
        path = getattr(target.adapter, name)
        if path is not None and not any(target.has_part(layer, path) for layer in layers):
            raise _WrongError(f"the adapter names a module that is not there ({path!r} in no layer)")
    ids = repeat(token_ids(target, _LENGTH), "1 pos -> row pos", row=_ROWS)
    kinds = set[str]()
    for layer in layers:
        kind = kind_of(target.layers[layer])
        if kind in kinds or not target.has_neurons(layer):
            continue
        neuron: int | None = 0
        if target.has_part(layer, target.adapter.down):
            neuron = _typical_neuron(target, layer)
        if neuron is None:
            continue
        edited = _EditedLayer(target, layer, neuron)
        with target.hooks(*edited.hooks()):
            if target.kind == "bridge":
                output = target.model(ids)
            elif whole:
                output = target.hf(input_ids=ids, use_cache=False)
            else:
                output = target.forward(ids, upto=layer)
        edited.check_passed()
        if edited.writes_nothing():
            continue
        kinds.add(kind)
        report.layers += (layer,)
        report.edit_error = max(report.edit_error, *edited.errors())
        if output is not None:
            logits = (output if isinstance(output, Tensor) else output.logits).float()
            change = float((logits[1] - logits[0])[_POSITION:].abs().max())
            report.logits_change = min(report.logits_change, change)
    if not report.edit_error <= report.tolerance:  # "not <=", so that NaN is wrong as well
        raise _WrongError(
            f"a moved neuron does not change the layer as the adapter says (relative error {report.edit_error:.2g})"
        )
    if not report.logits_change > 0:
        raise _WrongError("an edit at the down projection's input does not change the logits")


def _typical_neuron(target: Target, layer: int) -> int | None:
    """A neuron whose column is neither zero nor large; None if all are zero."""
    norms = target.w_out_norms(layer)
    order = norms.argsort()[int((norms == 0).sum()) :]
    if len(order):
        return int(order[len(order) // 2])
    return None


class _EditedLayer:
    """Edits in one layer, one per row of a batch, and what passed its modules.

    Row 0 is not edited. In row 1, a neuron at the input of the down projection is moved; in a mixture, the numbers
    that the fused experts give change places instead. In row 2 of a mixture with a shared expert, a neuron of that
    expert is moved. In rows 2 and 3 of a dense MLP, every second neuron is moved up and down at the output of `up`.
    Only these may then change in post, and if `up` is the linear factor, by opposite amounts (those of the gate would
    not be).
    """

    def __init__(self, target: Target, layer: int, neuron: int) -> None:
        self.target, self.layer, self.neuron, self.adapter = target, layer, neuron, target.adapter
        self.is_mixture, self.has_shared = target.is_mixture(layer), target.has_shared(layer)
        self.passed: dict[str, Float[Tensor, "row pos width"]] = {}
        self._expert_error = 0.0

    def hooks(self) -> list[Hook]:
        """The hooks that edit and record."""
        target, layer = self.target, self.layer
        hooks = list[Hook]()
        recorded = ["post_mlp_norm", "shared_gate"]
        if self.is_mixture:
            experts = target.sub(layer, self.adapter.experts or "")
            hooks.append((experts, "post", self._recompute))
            hooks.append((experts, "post", on_hidden(self._turn)))
            if self.has_shared:
                hooks.append((target.mlp_part(layer, "down"), "pre", on_input(partial(self._move, "shared", 2))))
        else:
            recorded = ["post_mlp_norm", "gate", "up"]
            hooks.append((target.mlp_part(layer, "down"), "pre", on_input(partial(self._move, "post", 1))))
            if target.has_part(layer, self.adapter.up):
                hooks.append((target.mlp_part(layer, "up"), "post", on_output(self._move_up)))
        hooks += target.on_mlp(layer, partial(self._record, "mlp"))
        hooks.append((target.layers[layer], "post", on_output(partial(self._record, "layer"))))
        for name in recorded:
            path = getattr(self.adapter, name)
            if target.has_part(layer, path):
                hooks.append((target.sub(layer, path), "post", on_output(partial(self._record, name))))
        return hooks

    def check_passed(self) -> None:
        """Refuse a layer of which a part did not run; of some models, layers run for images only."""
        if "layer" not in self.passed:
            raise _WrongError(f"layer {self.layer} does not run in a pass over text")
        missing = {"mlp", "post"} - self.passed.keys()
        if missing:
            raise _WrongError(f"the adapter's {' and '.join(sorted(missing))} did not run in layer {self.layer}")

    def writes_nothing(self) -> bool:
        """A gain of zero before the experts or behind the MLP: the edit writes nothing, and the layer shows nothing."""
        written = self.passed.get("post" if self.is_mixture else "post_mlp_norm")
        return written is not None and not written.any() and not self._change("layer", 1).any()

    def errors(self) -> list[float]:
        """Relative distances between the actual and the expected changes."""
        moved = torch.zeros_like(self.passed["post"][0])
        if self.is_mixture:
            post = self.passed["post"][0, _POSITION]
            moved[_POSITION] = post.roll(1) - post
            written = moved * self.target.factor(self.layer, 0)
        else:
            moved[_POSITION, self.neuron] = self._change("post", 1)[_POSITION, self.neuron]
            written = self._written(moved)
        errors = [
            _relative(self._change("post", 1), moved),
            _relative(self._change("mlp", 1) * self.adapter.write_factor, written, self.passed["mlp"]),
        ]
        if not self.adapter.adds:
            if not self._change("layer", 1).any():
                raise _WrongError(f"what the MLP of layer {self.layer} gives does not change the residual stream")
        else:
            last = "mlp"
            if "post_mlp_norm" in self.passed:
                last = "post_mlp_norm"
            added = self._change(last, 1) * self.adapter.write_factor
            errors.append(_relative(self._change("layer", 1), added, self.passed["layer"]))
        if self.has_shared:
            written = self._written(self._change("shared", 2))
            if "shared_gate" in self.passed:
                written = written * self.passed["shared_gate"][2].sigmoid()
            added = self._change("mlp", 2) * self.adapter.write_factor
            errors.append(_relative(added, written, self.passed["mlp"]))
        errors.append(self._expert_error)
        if "up" in self.passed and not self._gate_is_closed():
            errors += self._errors_of_up()
        return errors

    def _errors_of_up(self) -> list[float]:
        width, neurons = self.passed["up"].shape[-1], self.passed["post"].shape[-1]
        expected = neurons
        if self.adapter.fused_gate_up:
            expected = 2 * neurons
        if width != expected:
            raise _WrongError(f"the output of {self.adapter.up!r} has width {width}, expected {expected}")
        higher, lower = self._change("post", 2), self._change("post", 3)
        both = torch.stack([higher, lower])
        moved = torch.zeros_like(both)
        moved[:, _POSITION, ::2] = both[:, _POSITION, ::2]
        errors = [_relative(both, moved)]
        if self.adapter.gate or self.adapter.fused_gate_up:
            errors.append(_relative(higher, -lower, self.passed["post"]))
        return errors

    def _gate_is_closed(self) -> bool:
        """The gate of every moved neuron is exactly zero (weights of zero), so that no move of `up` shows."""
        gate = self.passed.get("gate", self.passed["up"] if self.adapter.fused_gate_up else None)
        return gate is not None and not gate[0, _POSITION, : self.target.width(self.layer) : 2].any()

    def _change(self, name: str, row: int) -> Float[Tensor, "pos width"]:
        """What an edit of a row changed at a module."""
        return self.passed[name][row] - self.passed[name][0]

    def _written(self, moved: Float[Tensor, "pos neuron"]) -> Float[Tensor, "pos d_model"]:
        """What the moved neuron writes according to its column."""
        column = self.target.w_out(self.layer, [self.neuron])[0].float().to(moved.device)
        return moved[:, self.neuron, None] * column

    def _record(self, name: str, output: Any) -> None:
        self.passed[name] = _by_row(first_tensor(output).detach().float())

    def _move(self, name: str, row: int, post: Tensor) -> Tensor:
        """Move the neuron in one row at the input of its down projection."""
        edited = _by_row(post).clone()
        edited[row, _POSITION, self.neuron] += _step(edited)
        self.passed[name] = edited.float()
        return edited.reshape(post.shape)

    def _move_up(self, output: Tensor) -> Tensor:
        edited = _by_row(output).clone()
        first = 0
        if self.adapter.fused_gate_up:
            first = self.target.width(self.layer)
        edited[2, _POSITION, first::2] += _step(edited)
        edited[3, _POSITION, first::2] -= _step(edited)
        return edited.reshape(output.shape)

    def _recompute(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        """Compare what experts give with what they must give according to their layout."""
        experts = experts_of(module)
        if experts is not None:
            given = first_tensor(output).flatten(0, -2).float()
            computed = experts.output(experts.routed(args, kwargs)).float()
            self._expert_error = _relative(given, computed, given)

    def _turn(self, output: Tensor) -> Tensor:
        """Move every number one dimension on; a change of size would be invisible behind a norm."""
        edited = _by_row(output).clone()
        edited[1, _POSITION] = edited[1, _POSITION].roll(1)
        self.passed["post"] = edited.float()
        return edited.reshape(output.shape)


def _by_row(tensor: Tensor) -> Float[Tensor, "row pos width"]:
    """A tensor by row and position, which OPT and experts run together."""
    if tensor.ndim == 2:
        return rearrange(tensor, "(row pos) width -> row pos width", row=_ROWS)
    return rearrange(tensor, "row pos ... -> row pos (...)")


def _step(rows: Float[Tensor, "row pos width"]) -> Tensor:
    """How far a neuron is moved: by the norm of the whole vector, so that rounding does not hide the move."""
    return rows[0, _POSITION].float().norm().clamp(min=1).to(rows.dtype)


def _relative(change: Tensor, expected: Tensor, numbers: Tensor | None = None) -> float:
    """Largest distance, relative to the expected change or, if larger, to the numbers that were subtracted."""
    size = expected.abs().max()
    if not size > 0:
        return float("inf")
    if numbers is not None:
        size = torch.maximum(size, numbers.abs().max())
    return float((change - expected).abs().max() / size)


# -- passes that begin at a layer ----------------------------------------------------------------------------------


def begins_at(target: Target, layer: int, last: int) -> bool:
    """Whether a pass that begins at a layer, with what entered it in a whole pass, gives the same in a later one."""
    ids = token_ids(target, _SHORT)
    entering = list[Tensor]()
    wrapped = list[bool]()
    ends = list[Tensor]()
    entered = on_input(lambda hidden: entering.append(hidden.clone()))
    passed = on_output(lambda output: wrapped.append(isinstance(output, tuple)))
    ending = target.layers[last], "post", on_output(lambda output: ends.append(first_tensor(output).clone()))
    with target.hooks((target.layers[layer], "pre", entered), (target.layers[layer - 1], "post", passed), ending):
        target.forward(ids, upto=last)
    try:
        start = LayerInput(layer, entering[0], wrapped[0])
        with target.hooks(ending):
            target.forward(ids, upto=last, start=start)
    except (IndexError, TypeError, ValueError):  # layers pass on more than the residual stream, or do not run
        return False
    return _relative(ends[1], ends[0]) < _SAME


# -- attention -----------------------------------------------------------------------------------------------------


def _measure_attention(report: ProbeReport, target: Target) -> None:
    """Compare recomputed attention rows of the first layers with a sum of one, and with the model's own weights."""
    adapter = target.adapter
    layers = [layer for layer in range(target.n_layers) if target.has_attention(layer)][:_ATTENTION_LAYERS]
    with _narrowed(target):
        recomputed = _recomputed_rows(target, layers)
        own = recomputed
        if target.kind != "bridge":
            own = _own_rows(target, layers)
            if adapter.learned_sinks or not adapter.attention_interface:
                report.attention_error = _distance_of_weighted(target, recomputed)
    for layer in layers:
        if layer not in recomputed:
            raise _WrongError(f"no attention was recomputed in layer {layer}")
        rows, weights = recomputed[layer], own[layer]
        if target.kind != "bridge" and rows.shape[1] != target.n_heads:
            raise _WrongError(f"layer {layer} has {rows.shape[1]} heads, and the configuration {target.n_heads}")
        if rows.shape != weights.shape:
            raise _WrongError(
                f"recomputed attention has shape {tuple(rows.shape)}, the model's own {tuple(weights.shape)}"
            )
        if adapter.learned_sinks:  # some models take the share of the sinks off the output, not the weights
            rows = rows / rows.sum(-1, keepdim=True)
            weights = weights / weights.sum(-1, keepdim=True)
        report.row_sum_error = max(report.row_sum_error, float((rows.sum(-1) - 1).abs().max()))
        report.attention_error = max(report.attention_error, float((rows - weights).abs().max()))
    if not report.row_sum_error <= report.tolerance:
        raise _WrongError(f"recomputed attention rows do not sum to one (off by {report.row_sum_error:.2g})")
    if not report.attention_error <= report.tolerance:
        raise _WrongError(f"recomputed attention differs from the model's own (by {report.attention_error:.2g})")


_Rows = dict[int, Float[Tensor, "1 head query key"]]


def _recomputed_rows(target: Target, layers: list[int]) -> _Rows:
    # The one import of a package further down: what is recomputed there is what has to be proven here.
    from sinkscope.trace.attention import attention_rows

    chunks: dict[int, list[Tensor]] = {}

    def keep(layer: int, _first: int, rows: Tensor) -> None:
        chunks.setdefault(layer, []).append(rows)

    with attention_rows(target, keep, layers=layers, rows_per_chunk=3):
        target.forward(token_ids(target, _LONG), upto=layers[-1])
    return {layer: torch.cat(parts, 2) for layer, parts in chunks.items()}


@contextmanager
def _narrowed(target: Target) -> Iterator[None]:
    """Context manager in which every window, chunk and choice of keys is small, so that few tokens go beyond it."""
    from sinkscope.trace.attention import configs_of

    owners: list[Any] = configs_of(target)
    for layer in target.layers:
        owners += layer.modules()
    wide: list[tuple[Any, str, int, int]] = []
    for owner in owners:
        most = dict(_REACHES)
        if hasattr(owner, "topk_blocks"):
            most["block_size"] = _BLOCK
        for name, narrow in most.items():
            reach = getattr(owner, name, None)
            if isinstance(reach, int) and reach > narrow:
                wide.append((owner, name, reach, narrow))
    try:
        for owner, name, _, narrow in wide:
            setattr(owner, name, narrow)
        yield
    finally:
        for owner, name, reach, _ in wide:
            setattr(owner, name, reach)


def _own_rows(target: Target, layers: list[int]) -> _Rows:
    """The weights that the model's own eager attention returns."""
    from sinkscope.trace.attention import eager

    weights: _Rows = {}

    def keep(layer: int, output: Any) -> None:
        weights[layer] = output[1].float()

    hooks = [(target.sub(layer, target.adapter.attn), "post", on_output(partial(keep, layer))) for layer in layers]
    with eager(target), target.hooks(*hooks):
        target.forward(token_ids(target, _LONG), upto=layers[-1])
    return weights


def _distance_of_weighted(target: Target, rows: _Rows) -> float:
    """How far the values, weighted by recomputed rows, are from what the output projections read, relatively."""
    from sinkscope.trace.attention import Attention, eager, listening

    values: dict[int, Tensor] = {}
    heads: dict[int, Tensor] = {}

    def keep_values(call: Attention) -> None:
        values[call.layer] = call.value.float()

    def keep_heads(layer: int, entering: Tensor) -> None:
        heads[layer] = entering.float().reshape(1, _LONG, -1)

    hooks = [(target.output_projection(layer), "pre", on_input(partial(keep_heads, layer))) for layer in rows]
    with eager(target), target.hooks(*hooks):
        target.forward(token_ids(target, _LONG), upto=max(rows))
    with listening(target, keep_values):  # in a pass of its own: the tap may replace the model's attention
        target.forward(token_ids(target, _LONG), upto=max(rows))
    distances = list[float]()
    for layer, of_layer in rows.items():
        value = values[layer].repeat_interleave(of_layer.shape[1] // values[layer].shape[1], 1)
        weighted = rearrange(of_layer @ value, "row head query d_head -> row query (head d_head)")
        distances.append(_relative(weighted, heads[layer]))
    return max(distances)
