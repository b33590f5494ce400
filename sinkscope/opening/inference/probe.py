"""Check that a model's adapter names the right modules, and that recomputed attention equals the model's own.

Neurons are checked on eight tokens, in a pass through the whole model for each kind of layer: a batch of equal rows,
each but the first with an edit. Attention is checked in passes that stop after the first layers, for the model's own
weights and the recomputed ones. In these passes every window, chunk and choice of keys is smaller than the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor, nn

from sinkscope.errors import UnsupportedError
from sinkscope.models.adapters import PATHS
from sinkscope.models.config import first_line
from sinkscope.models.down_projections import column_factor, w_out
from sinkscope.models.experts import experts_of
from sinkscope.models.grouped_heads import per_query_head
from sinkscope.models.hooks import Args, Hook, Kwargs, first_tensor, on_hidden, on_input, on_output
from sinkscope.models.norms import norms_of
from sinkscope.models.stack import kind_of
from sinkscope.models.target import LayerInput, Target
from sinkscope.opening.inference.passing import Passing, rounded
from sinkscope.opening.inference.positions import positions_problem
from sinkscope.tap.call import Attention
from sinkscope.tap.observers import attention_rows
from sinkscope.tap.stock import configs_of, eager
from sinkscope.tap.tap import listening

_LENGTH = 8
_SHORT = 3  # tokens of the passes that tell whether one may begin at a layer
_SAME = 1e-3  # largest relative distance between their ends
_TYPICAL = 1024  # neurons among which a typical one is looked for
_ROWS = 4  # of the batch; the first is not edited, and in the others
_MOVED, _TURNED, _SCALED = range(1, _ROWS)  # a neuron, what experts give, or `up` is
_POSITION = 4  # of the edits
_FACTOR = -2.0  # of `up`; no gate follows it, be its activation odd, such as tanh, or linear above 0, such as ReLU
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
def probe(target: Target, *, every_layer: bool = True) -> ProbeReport:
    """Check on a few tokens that edits at the adapter's sites work as intended and attention is recomputed correctly.

    Args:
        target: The model, with an adapter. It is left unchanged.
        every_layer: Whether passes go through all layers, up to the logits. Otherwise they end where the edits show. A
            model that is read layer by layer is never passed as a whole.

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
        _measure_edits(report, target, every_layer and target.resident)
        if every_layer and target.resident and target.adapter.from_any_layer:
            middle = len(target.layers) // 2
            if not begins_at(target, middle, len(target.layers) - 1):
                raise _WrongError(f"a pass that begins at layer {middle} does not end as the whole pass does")
        if every_layer and target.resident and target.kind != "hf":  # a plain model was checked where it was opened
            report.problem = positions_problem(target, token_ids(target, _LENGTH))
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
    for name in PATHS:
        path = getattr(target.adapter, name)
        is_optional = path is None or (target.adapter.experts is not None and name in ("down", "up", "gate"))
        if not is_optional and not any(target.has_part(layer, path) for layer in layers):
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
            else:
                output = target.forward(ids, unembed=whole, upto=None if whole else layer)
        edited.check_passed()
        if edited.writes_nothing():
            continue
        kinds.add(kind)
        report.layers += (layer,)
        report.edit_error = max(report.edit_error, *edited.errors())
        if output is not None:
            logits = (output if isinstance(output, Tensor) else output.logits).float()
            change = float((logits[edited.first] - logits[0])[_POSITION:].abs().max())
            report.logits_change = min(report.logits_change, change)
    if not report.edit_error <= report.tolerance:  # "not <=", so that NaN is wrong as well
        raise _WrongError(
            f"a moved neuron does not change the layer as the adapter says (relative error {report.edit_error:.2g})"
        )
    if not report.logits_change > 0:
        raise _WrongError("an edit at the down projection's input does not change the logits")


def _typical_neuron(target: Target, layer: int) -> int | None:
    """A neuron whose column is neither zero nor large; None if all are zero."""
    norms = norms_of(w_out(target, layer, range(min(target.width(layer), _TYPICAL))))
    order = norms.argsort()[int((norms == 0).sum()) :]
    if len(order):
        return int(order[len(order) // 2])
    return None


def measured_factors(target: Target, layer: int) -> dict[str, float]:
    """Constants between down projections and what the MLP gives, by the adapter's fields."""
    neuron: int | None = 0
    if target.has_part(layer, target.adapter.down):
        neuron = _typical_neuron(target, layer)
    if neuron is None:
        return {}
    edited = _EditedLayer(target, layer, neuron)
    with suppress(_WrongError), target.hooks(*edited.hooks()):
        target.forward(repeat(token_ids(target, _LENGTH), "1 pos -> row pos", row=_ROWS), upto=layer)
        edited.check_passed()
        edited.errors()
    return edited.factors


class _EditedLayer:
    """Edits in one layer at one position, in rows of a batch of their own, and what passed its modules in each row.

    At the input of the down projection, of a dense MLP or of a shared expert, a neuron is moved. The numbers that fused
    experts give change places. At the output of `up` of a dense MLP, every second neuron is multiplied by -2: only
    these may then change in post and, if `up` is the linear factor, by the same factor (those of the gate would not).
    """

    def __init__(self, target: Target, layer: int, neuron: int) -> None:
        self.target, self.layer, self.neuron, self.adapter = target, layer, neuron, target.adapter
        self.is_mixture = target.is_mixture(layer)
        self.first = _TURNED if self.is_mixture else _MOVED
        self.post, self.experts, self.mlp, self.end = (Passing(_ROWS) for _ in range(4))
        self.up, self.norm, self.shared_gate = (Passing(_ROWS) for _ in range(3))
        self.factors = dict[str, float]()  # as they would have to be
        self._expert_error = 0.0

    def hooks(self) -> list[Hook]:
        """The hooks that edit and record."""
        target, layer, adapter = self.target, self.layer, self.adapter
        hooks = list[Hook]()
        if target.has_part(layer, adapter.down):
            hooks.append((target.mlp_part(layer, "down"), "pre", on_input(self._edit(self.post, self._move))))
        if self.is_mixture:
            experts = target.sub(layer, adapter.experts or "")
            hooks.append((experts, "post", self._recompute))
            hooks.append((experts, "post", on_hidden(self._edit(self.experts, self._turn))))
        elif target.has_part(layer, adapter.up):
            hooks.append((target.mlp_part(layer, "up"), "post", on_hidden(self._edit(self.up, self._scale_up))))
        hooks += target.on_mlp(layer, self.mlp.keep)
        hooks.append((target.layers[layer], "post", on_output(self.end.keep)))
        for path, passing in ((adapter.post_mlp_norm, self.norm), (adapter.shared_gate, self.shared_gate)):
            if path is not None and target.has_part(layer, path):
                hooks.append((target.sub(layer, path), "post", on_output(passing.keep)))
        return hooks

    def check_passed(self) -> None:
        """Refuse a layer of which a part did not run; of some models, layers run for images only."""
        if not self.end.ran:
            raise _WrongError(f"layer {self.layer} does not run in a pass over text")
        needed = {"mlp": self.mlp, "post": self.post}
        if self.is_mixture:
            needed = {"experts": self.experts, "mlp": self.mlp}
        missing = [name for name, passing in needed.items() if not passing.ran]
        if missing:
            raise _WrongError(f"the adapter's {' and '.join(missing)} did not run in layer {self.layer}")

    def writes_nothing(self) -> bool:
        """A gain of zero before the experts or behind the MLP: the edit writes nothing, and the layer shows nothing."""
        written = self.experts if self.is_mixture else self.norm
        return written.ran and not written.rows.any() and not self.end.change(self.first).any()

    def errors(self) -> list[float]:
        """Relative distances between the actual and the expected changes."""
        errors = [self._expert_error]
        if self.post.ran:
            column = w_out(self.target, self.layer, [self.neuron])[0]
            written = self.post.change(_MOVED)[:, self.neuron, None] * column.to(self.post.rows.device)
            if self.shared_gate.ran:
                written = written * self.shared_gate.rows[_MOVED].sigmoid()
            errors += self._errors_of_write(_MOVED, written, "shared_factor" if self.is_mixture else "down_factor")
        if self.is_mixture:
            written = self.experts.change(_TURNED) * column_factor(self.target, self.layer, 0)
            errors += self._errors_of_write(_TURNED, written, "expert_factor")
        if self.up.ran:
            errors.append(self._error_of_up())
        return errors

    def _errors_of_write(self, row: int, written: Float[Tensor, "pos d_model"], name: str) -> list[float]:
        """How far what arrives behind the MLP and the layer is from what is written."""
        factor = self.adapter.write_factor
        if written.any():
            ratio = (self.mlp.change(row) * factor * written).sum() / (written * written).sum()
            self.factors[name] = rounded(float(ratio) * getattr(self.adapter, name))
        errors = [_relative(self.mlp.change(row) * factor, written, self.mlp.rows)]
        change = self.end.change(row)
        if self.adapter.adds:
            last = self.norm if self.norm.ran else self.mlp
            errors.append(_relative(change, last.change(row) * factor, self.end.rows))
        elif not change.any():
            raise _WrongError(f"what the MLP of layer {self.layer} gives does not change the residual stream")
        return errors

    def _error_of_up(self) -> float:
        width, neurons = self.up.rows.shape[-1], self.post.rows.shape[-1]
        expected = neurons
        if self.adapter.fused_gate_up:
            expected = 2 * neurons
        if width != expected:
            raise _WrongError(f"the output of {self.adapter.up!r} has width {width}, expected {expected}")
        post, change = self.post.rows[0], self.post.change(_SCALED)
        is_gated = self.adapter.gate is not None or self.adapter.fused_gate_up
        if not self.up.rows[0].any() or (is_gated and not post.any()):  # weights of zero
            return 0.0
        scaled = torch.zeros_like(post)
        if is_gated:
            scaled[_POSITION, ::2] = (_FACTOR - 1) * post[_POSITION, ::2]
            return _relative(change, scaled, post)
        scaled[_POSITION, ::2] = change[_POSITION, ::2]
        return _relative(change, scaled)

    def _recompute(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        """Compare what experts give with what they must give according to their layout."""
        experts = experts_of(module)
        if experts is not None:
            given = first_tensor(output).flatten(0, -2).float()
            try:
                computed = experts.output(experts.routed(args, kwargs)).float()
                self._expert_error = _relative(given, computed, given)
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                raise _WrongError(
                    f"its experts ({type(module).__name__}) compute something else than an MLP each"
                ) from None

    def _edit(self, passing: Passing, edit: Callable[[Tensor], None]) -> Callable[[Tensor], Tensor]:
        """A function that keeps what passes a module, of which `edit` has changed the rows at one position."""

        def edited(tensor: Tensor) -> Tensor:
            rows = passing.by_row(tensor).clone()
            edit(rows[:, _POSITION])
            passing.keep(rows)
            return rows.reshape(tensor.shape)

        return edited

    def _move(self, post: Float[Tensor, "row neuron"]) -> None:
        # By the norm of the whole vector, so that rounding does not hide the move.
        post[_MOVED, self.neuron] += post[0].float().norm().clamp(min=1).to(post.dtype)

    def _scale_up(self, up: Float[Tensor, "row output"]) -> None:
        first = self.target.width(self.layer) if self.adapter.fused_gate_up else 0
        up[_SCALED, first::2] *= _FACTOR

    def _turn(self, given: Float[Tensor, "row d_model"]) -> None:
        given[_TURNED] = given[_TURNED].roll(1)  # a change of size would be invisible behind a norm


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
    adapter, is_bridge = target.adapter, target.kind == "bridge"
    layers = [layer for layer in range(target.n_layers) if target.has_attention(layer)][:_ATTENTION_LAYERS]
    chunks: dict[int, list[Tensor]] = {}
    values, weights, heads = dict[int, Tensor](), dict[int, Tensor](), dict[int, Tensor]()

    def keep_rows(layer: int, _first: int, rows: Tensor) -> None:
        chunks.setdefault(layer, []).append(rows)

    def keep_values(call: Attention) -> None:
        values[call.layer] = call.value.float()

    def keep_weights(layer: int, output: Any) -> None:
        weights[layer] = output[1].float()

    def keep_heads(layer: int, entering: Tensor) -> None:
        heads[layer] = entering.float().reshape(1, _LONG, -1)

    hooks = [(target.sub(layer, adapter.attn), "post", on_output(partial(keep_weights, layer))) for layer in layers]
    if adapter.learned_sinks or not adapter.attention_interface:
        for layer in layers:
            hooks.append((target.output_projection(layer), "pre", on_input(partial(keep_heads, layer))))
    ids = token_ids(target, _LONG)
    with _narrowed(target):
        with attention_rows(target, keep_rows, layers=layers, rows_per_chunk=3):
            target.forward(ids, upto=layers[-1])
        if not is_bridge:
            with listening(target, keep_values):
                target.forward(ids, upto=layers[-1])
            with eager(target), target.hooks(*hooks):  # not under the tap, which may replace the model's attention
                target.forward(ids, upto=layers[-1])
    for layer in layers:
        if layer not in chunks:
            raise _WrongError(f"no attention was recomputed in layer {layer}")
        rows = torch.cat(chunks[layer], 2)
        own = weights.get(layer, rows)
        if not is_bridge and rows.shape[1] != target.n_heads:
            raise _WrongError(f"layer {layer} has {rows.shape[1]} heads, and the configuration {target.n_heads}")
        if rows.shape != own.shape:
            raise _WrongError(f"recomputed attention has shape {tuple(rows.shape)}, the model's own {tuple(own.shape)}")
        if layer in heads:
            value = per_query_head(values[layer], rows.shape[1])
            weighted = rearrange(rows @ value, "row head query d_head -> row query (head d_head)")
            report.attention_error = max(report.attention_error, _relative(weighted, heads[layer]))
        if adapter.learned_sinks:  # some models take the share of the sinks off the output, not the weights
            rows = rows / rows.sum(-1, keepdim=True)
            own = own / own.sum(-1, keepdim=True)
        report.row_sum_error = max(report.row_sum_error, float((rows.sum(-1) - 1).abs().max()))
        report.attention_error = max(report.attention_error, float((rows - own).abs().max()))
    if not report.row_sum_error <= report.tolerance:
        raise _WrongError(f"recomputed attention rows do not sum to one (off by {report.row_sum_error:.2g})")
    if not report.attention_error <= report.tolerance:
        raise _WrongError(f"recomputed attention differs from the model's own (by {report.attention_error:.2g})")


@contextmanager
def _narrowed(target: Target) -> Iterator[None]:
    """Context manager in which every window, chunk and choice of keys is small, so that few tokens go beyond it."""
    owners: list[Any] = configs_of(target)
    for layer in target.layers:
        owners += layer.modules()
    with ExitStack() as stack:
        for owner in owners:
            most = dict(_REACHES)
            if hasattr(owner, "topk_blocks"):
                most["block_size"] = _BLOCK
            for name, narrow in most.items():
                reach = getattr(owner, name, None)
                if isinstance(reach, int) and reach > narrow:
                    stack.callback(setattr, owner, name, reach)
                    setattr(owner, name, narrow)
        yield
