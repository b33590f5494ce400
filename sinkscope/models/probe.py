"""Check that a model's adapter names the right modules, and that recomputed attention equals the model's own.

The check runs eight tokens: one pass through the whole model with a batch of four rows, three of them edited, and two
passes that stop after the first layers, for the model's own attention weights and the recomputed ones.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.models.target import Target, first_tensor, on_hidden, on_input, on_output, plain_weight

_LENGTH, _ROWS, _POSITION = 8, 4, 4
_ATTENTION_LAYERS = 2  # neighbours may differ: windows alternate


@dataclass(frozen=True)
class ProbeReport:
    """What the probe measured. Every number is relative, and 0 is perfect unless stated otherwise.

    Attributes:
        layers: Layers whose MLP was edited; none if every column of every down projection is zero, or its output is
            multiplied by a gain of zero.
        edit_error: Distance between what an edited neuron changed and what it must change according to the adapter: its
            own input to the down projection, and its column in the MLP's output and the residual stream at its
            position.
        logits_change: Largest change of a later logit; must not be 0.
        row_sum_error: Distance of the recomputed attention rows' sums from 1 (0 if learned sinks take a share).
        attention_error: Largest distance between recomputed attention and the model's own.
        silent: Adapter fields whose module never runs in this kind of model, so that hooks on it see nothing (a bridge
            splits fused projections and calls the parts).
        tolerance: Allowed difference between numbers in the model's dtype.
        problem: What is wrong. None if nothing is.
    """

    layers: tuple[int, ...]
    edit_error: float = 0.0
    logits_change: float = 0.0
    row_sum_error: float = 0.0
    attention_error: float = 0.0
    silent: tuple[str, ...] = ()
    tolerance: float = 0.0
    problem: str | None = None


class _WrongError(Exception):
    """The message says what does not fit."""


def prove(model: object) -> None:
    """Raise if `probe` finds a problem. Models with weights elsewhere (meta, disk) are skipped.

    Raises:
        UnsupportedError: There is a problem; the message says what, and what to try.
    """
    target = Target.of(model)
    if not target.resident or any(p.is_meta for p in target.hf.parameters()):
        return
    if (problem := probe(target).problem) is not None:
        other = "" if target.kind == "hf" else 'try backend="hf", or '
        raise UnsupportedError(
            f"the load-time probe of this {target.config.model_type} model failed ({target.kind}): {problem}; "
            f"{other}report it with the model's name; probe=False loads it all the same",
            page="probe-failed",
        )


@torch.no_grad()
def probe(model: object) -> ProbeReport:
    """Check on a few tokens that edits at the adapter's sites work as intended and attention is recomputed correctly.

    Args:
        model: Any kind of model, or a Target. It is left unchanged.

    Returns:
        What was measured; `problem` says what is wrong. A wrong adapter does not raise an error.
    """
    target = Target.of(model)
    layers: list[int] = []
    tolerance = 1e-3 if target.dtype in (torch.float32, torch.float64) else 16 * torch.finfo(target.dtype).eps
    tolerance = max(tolerance, 0.2 if getattr(target.hf, "is_quantized", False) else 0)
    numbers: dict[str, float] = {}
    problem: str | None = None
    silent: set[str] = set()
    try:
        layers, numbers["edit_error"], numbers["logits_change"], silent = _edits(target)
        numbers["row_sum_error"], numbers["attention_error"] = _attention(target)
        problem = _verdict(numbers, tolerance, bool(layers))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except _WrongError as wrong:
        problem = str(wrong)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        problem = f"a forward pass raised {type(error).__name__}: {first}"
    return ProbeReport(tuple(layers), silent=tuple(sorted(silent)), tolerance=tolerance, problem=problem, **numbers)


def _verdict(numbers: dict[str, float], tolerance: float, edited: bool) -> str | None:
    off, change, rows, attention = (
        numbers[name] for name in ("edit_error", "logits_change", "row_sum_error", "attention_error")
    )
    wrong = {  # "not <=", so that NaN is wrong as well
        f"an edited neuron does not change what it should, as it should (off by {off:.2g})": not off <= tolerance,
        "an edit at the down projection's input does not change the logits": edited and not change > 0,
        f"recomputed attention rows do not sum to one (off by {rows:.2g})": not rows <= tolerance,
        f"recomputed attention differs from the model's own (by {attention:.2g})": not attention <= tolerance,
    }
    return next((problem for problem, holds in wrong.items() if holds), None)


def _typical_neuron(target: Target, layer: int) -> int | None:
    """A neuron whose column is neither zero nor large; None if all are zero or the adapter's path is wrong."""
    try:
        norms = target.w_out_norms(layer)
    except (AttributeError, IndexError):
        return 0  # the probe will say what is wrong with the path
    order = norms.argsort()[int((norms == 0).sum()) :]
    return int(order[len(order) // 2]) if len(order) else None


def _ids(target: Target) -> Tensor:
    rows = int(next(target.embedding.parameters()).shape[0])
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(16, rows // 2), rows, (1, _LENGTH), generator=generator).to(target.device)


# -- edits ---------------------------------------------------------------------------------------------------------


def _edits(target: Target) -> tuple[list[int], float, float, set[str]]:
    """(layers, error of the edits, change of the logits, fields of the adapter whose module never ran).

    The first layer of each kind of MLP that writes anything is edited; a wrong path is wrong in every layer.
    """
    ids = _ids(target).repeat(_ROWS, 1)
    layers, error, change, silent = dict[bool, int](), 0.0, float("inf"), set[str]()
    for layer in range(target.n_layers):
        kind = target.is_mixture(layer)
        if kind in layers or (not kind and _typical_neuron(target, layer) is None):
            continue
        watch = _Watch(target, layer)
        with watch.installed():
            output = target.model(ids) if target.kind == "bridge" else target.hf(input_ids=ids, use_cache=False)
        logits = (output if isinstance(output, Tensor) else output.logits).float()
        if watch.is_mute():
            continue
        layers[kind] = layer
        change = min(change, float((logits[1] - logits[0])[_POSITION:].abs().max()))
        silent |= watch.silent()
        error = max(error, watch.error())
    return sorted(layers.values()), error, change if layers else 0.0, silent


class _Watch:
    """Edits in one layer, one per row of a batch, and the hooks that record their effects.

    Row 0 is not edited. In row 1, a neuron at the input of the down projection is moved; in a mixture, the output of
    the fused experts is halved instead. In row 2 of a mixture with a shared expert, a neuron of that expert is moved.
    In rows 2 and 3 of a dense MLP, every second neuron is moved up and down at the output of `up`. Only these may then
    change in post, and if `up` is the linear factor, by opposite amounts (those of the gate would not be).
    """

    def __init__(self, target: Target, layer: int) -> None:
        self.target, self.layer, self.adapter = target, layer, target.adapter
        self.mixture, self.shared = target.is_mixture(layer), target.has_shared(layer)
        self.neuron = 0 if self.mixture and not self.shared else _typical_neuron(target, layer) or 0
        self.seen: dict[str, Tensor] = {}
        self.ran: set[str] = set()
        ungated = ("shared_gate",) if self.mixture else ("down", "up", "gate")
        names = ("attn", "mlp", "q", "k", "v", "fused_qkv", "o", "post_attn_norm", "post_mlp_norm", *ungated)
        self.paths: dict[str, str] = {n: path for n in names if (path := getattr(self.adapter, n)) is not None}

    def silent(self) -> set[str]:
        """Fields whose module exists but did not run."""
        return self.paths.keys() - self.ran

    @contextmanager
    def installed(self) -> Generator[None]:
        """Context manager with the hooks installed."""
        a = self.adapter
        pairs: list[tuple[Any, str, Any]] = [(self.target.layers[self.layer], "post", partial(self._see, "layer"))]
        pairs += [(self._sub(path), "post", partial(self._see, name)) for name, path in self.paths.items()]
        if self.mixture:
            pairs.append((self._sub(a.experts), "post", on_hidden(self._halve)))
            if self.shared:
                moved = on_input(partial(self._move, 2, "shared"))
                pairs.append((self.target.mlp_part(self.layer, "down"), "pre", moved))
        else:
            moved = on_input(partial(self._move, 1, "post"))
            pairs += [(self._sub(a.down), "pre", moved), (self._sub(a.up), "post", on_output(self._move_up))]
        self._check_shapes()
        with self.target.hooks(*pairs):
            yield

    def _sub(self, path: str | None) -> Any:
        try:
            return self.target.sub(self.layer, path or "")
        except AttributeError as error:
            raise _WrongError(f"the adapter names a module that is not there ({error})") from None

    def _check_shapes(self) -> None:
        t, a = self.target, self.adapter
        if self.mixture:
            experts = self._sub(a.experts)
            found = {f"{a.experts}.down_proj": (experts.down_proj[0], t.d_mlp, t.d_model)}
            input_first = experts.is_transposed
        else:
            width = (
                t.d_mlp if a.experts is None else int(t.config.intermediate_size)
            )  # experts have a width of their own
            fans = {a.down: (width, t.d_model), a.up: (t.d_model, width * (2 if a.fused_gate_up else 1))}
            fans |= {a.gate: (t.d_model, width)} if a.gate else {}
            found = {path: (plain_weight(self._sub(path)), *fan) for path, fan in fans.items()}
            input_first = a.transposed_down
        for path, (weight, fan_in, fan_out) in found.items():
            wanted = (fan_in, fan_out) if input_first else (fan_out, fan_in)
            if weight is not None and tuple(weight.shape) != wanted:  # None: quantised
                raise _WrongError(f"the weight of {path!r} has shape {tuple(weight.shape)}, expected {wanted}")

    def _see(self, name: str, _module: object, _args: object, _kwargs: object, output: Any) -> None:
        self.ran.add(name)
        self.seen[name] = self._shaped(first_tensor(output))

    @staticmethod
    def _shaped(tensor: Tensor) -> Tensor:
        return tensor.detach().float().reshape(_ROWS, _LENGTH, -1)  # OPT flattens batch and position

    def _move(self, row: int, name: str, post: Tensor) -> Tensor:
        """Move the neuron in one row at the input of its down projection."""
        edited = post.clone()
        rows = edited.view(_ROWS, _LENGTH, -1)
        rows[row, _POSITION, self.neuron] += _step(rows)
        self.seen[name] = self._shaped(edited)
        return edited

    def _move_up(self, output: Tensor) -> Tensor:
        edited = output.clone()
        rows = edited.view(_ROWS, _LENGTH, -1)
        first = self.target.d_mlp if self.adapter.fused_gate_up else 0
        rows[2, _POSITION, first::2] += _step(rows)
        rows[3, _POSITION, first::2] -= _step(rows)
        return edited

    def _halve(self, output: Tensor) -> Tensor:
        edited = output.clone()
        edited.view(_ROWS, _LENGTH, -1)[1, _POSITION] *= 0.5
        self.seen["post"] = self._shaped(edited)
        return edited

    def error(self) -> float:
        """Largest relative distance between the actual and the expected change."""
        if missing := {"layer", "mlp", "post"} - self.seen.keys():
            raise _WrongError(f"the adapter's {' and '.join(sorted(missing))} did not run in layer {self.layer}")
        change = {name: rows - rows[:1] for name, rows in self.seen.items()}
        post = change["post"]
        expected = torch.zeros_like(post[1])
        if self.mixture:
            expected[_POSITION] = -0.5 * self.seen["post"][0, _POSITION]
            written = expected
        else:
            expected[_POSITION, self.neuron] = post[1, _POSITION, self.neuron]
            column = self.target.w_out(self.layer, [self.neuron]).float().to(post.device)
            written = expected[:, self.neuron, None] * column
        errors = [_relative(post[1], expected), _relative(change["mlp"][1], written, self.seen["mlp"])]
        if self.shared:
            step = change["shared"][2, :, self.neuron, None]
            weight = self.seen["shared_gate"][2].sigmoid() if "shared_gate" in self.seen else 1.0
            column = self.target.w_out(self.layer, [self.neuron]).float().to(step.device)
            errors.append(_relative(change["mlp"][2], weight * step * column, self.seen["mlp"]))
        if not self._normed_after():
            added = change.get("post_mlp_norm", change["mlp"])
            errors.append(_relative(change["layer"][1], added[1], self.seen["layer"]))
        if "up" in self.ran and not self._gate_is_closed():
            moved = torch.zeros_like(post[2:])
            moved[:, _POSITION, ::2] = post[2:, _POSITION, ::2]
            errors.append(_relative(post[2:], moved))
            if self.adapter.gate or self.adapter.fused_gate_up:
                errors.append(_relative(post[2], -post[3], self.seen["post"]))
        return max(errors)

    def is_mute(self) -> bool:
        """A gain of zero before the experts or behind the MLP: the edit writes nothing, and the layer shows nothing."""
        writes = self.seen.get("post" if self.mixture else "post_mlp_norm")
        return writes is not None and not writes.any() and not (self.seen["layer"][1] - self.seen["layer"][0]).any()

    def _gate_is_closed(self) -> bool:
        """The gate of every moved neuron is exactly zero (weights of zero), so that no move of `up` shows."""
        gate = self.seen.get("gate", self.seen["up"] if self.adapter.fused_gate_up else None)
        return gate is not None and not gate[0, _POSITION, : self.target.width(self.layer) : 2].any()

    def _normed_after(self) -> bool:
        """OPT-350m normalises the residual stream itself, after adding the MLP's output."""
        config = self.target.config
        return config.model_type == "opt" and not config.do_layer_norm_before


def _step(rows: Tensor) -> Tensor:
    """How far a neuron is moved: by the norm of the whole vector, so that rounding does not hide the move."""
    return rows[0, _POSITION].float().norm().clamp(min=1).to(rows.dtype)


def _relative(found: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    """Largest distance, relative to the expected change or, if larger, to the numbers that were subtracted."""
    size = expected.abs().max()
    if not size > 0:
        return float("inf")
    if scale is not None:
        size = torch.maximum(size, scale.abs().max())
    return float((found - expected).abs().max() / size)


# -- attention -----------------------------------------------------------------------------------------------------


def _attention(target: Target) -> tuple[float, float]:
    """(distance of row sums from one, distance from the model's own weights) of the first layers."""
    # The one import of a package further down: what is recomputed there is what has to be proven here.
    from sinkscope.trace.attention import attention_rows, eager

    layers = list(range(min(_ATTENTION_LAYERS, target.n_layers)))
    ids = _ids(target)
    own: dict[int, Tensor] = {}
    rows: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def keep(layer: int, _module: object, _args: object, _kwargs: object, output: Any) -> None:
        own[layer] = output[1].float()

    with attention_rows(
        target, lambda layer, _first, chunk: rows[layer].append(chunk), layers=layers, rows_per_chunk=3
    ):
        target.forward(ids, upto=layers[-1])
    if target.kind == "bridge":
        own = {layer: torch.cat(chunks, 2) for layer, chunks in rows.items()}
    else:
        shown = ((target.sub(i, target.adapter.attn), "post", partial(keep, i)) for i in layers)
        with eager(target), target.hooks(*shown):
            target.forward(ids, upto=layers[-1])
    sums, distance = 0.0, 0.0
    for layer in layers:
        if not rows[layer]:
            raise _WrongError(f"no attention was recomputed in layer {layer}")
        found = torch.cat(rows[layer], 2)
        if found.shape != own[layer].shape:
            raise _WrongError(
                f"recomputed attention has shape {tuple(found.shape)}, the model's own {tuple(own[layer].shape)}"
            )
        if not target.adapter.learned_sinks:
            sums = max(sums, float((found.sum(-1) - 1).abs().max()))
        distance = max(distance, float((found - own[layer]).abs().max()))
    return sums, distance
