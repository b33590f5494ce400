"""What edits of single components do to one position of a text: its norm in each layer and the attention it receives.

All edits run side by side in one forward pass: one row per edit, after a row that stays intact. A streamed model is
therefore read once for any number of edits, and every value that is written comes from the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange, reduce, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.display.notation import head_name
from sinkscope.errors import UnsupportedError
from sinkscope.interventions.edits import expert_hook
from sinkscope.measure.evidence import NEEDED
from sinkscope.models.hooks import first_tensor, on_hidden, on_input, on_output
from sinkscope.models.norms import norm_of
from sinkscope.models.target import LayerInput, Target
from sinkscope.sinks.tokens import TokenRows
from sinkscope.tap.observers import visible_rows
from sinkscope.trace.entering import NOT_READ, Entering
from sinkscope.trace.sites import resolve

ComponentKind = Literal["token embedding", "position embedding", "attention", "mixer", "head", "mlp", "key bias"]
BATCH_ELEMENTS = 1 << 25  # largest number of elements of the widest activation in a batch
Sites = tuple[tuple[int, ...], ...]
"""Neurons as interventions take them: (layer, neuron), or (layer, expert, neuron) in a mixture."""
Heads = Sequence[tuple[int, int]]
"""Heads as pairs of layer and head."""
At = int | Int[Tensor, " text"]
"""A position, the same in every text or one of each."""
Hook = tuple[Any, str, Any]  # module, "pre" or "post", and the function, as `Target.hooks` takes them


class Component(NamedTuple):
    """A part of the model that writes into the residual stream, or the bias of a layer's keys.

    A mixer is what a layer without softmax attention has in its place, such as a convolution.
    """

    kind: ComponentKind
    layer: int | None = None
    head: int | None = None

    def __str__(self) -> str:
        if self.layer is None:
            return self.kind
        if self.head is not None:
            return head_name(self.layer, self.head)
        kind = "MLP" if self.kind == "mlp" else self.kind
        return f"{kind} of layer {self.layer}"


class Edit(NamedTuple):
    """One intervention.

    Attributes:
        zero: Neurons silenced at every position, as (layer, neuron) or (layer, expert, neuron).
        swap: Components that write at the position what they write at the source position of the intact text. A key
            bias is instead removed at every position, in all layers.
    """

    zero: Sites = ()
    swap: tuple[Component, ...] = ()

    @property
    def layers(self) -> list[int]:
        """The layers that are edited."""
        return [site[0] for site in self.zero] + [component.layer or 0 for component in self.swap]


def one_by_one(components: Iterable[Component]) -> list[Edit]:
    """Edits that replace one component each."""
    return [Edit(swap=(component,)) for component in components]


def silencing(sets: Iterable[Sites]) -> list[Edit]:
    """Edits that silence a set of neurons each."""
    return [Edit(zero=sites) for sites in sets]


@dataclass(frozen=True)
class Effects:
    """The state of the position under each edit.

    Attributes:
        norms: L2 norm of the residual stream after each layer, without the dimensions that were left out.
        attention: Mean attention from later queries that see the position; of no layer if it was not requested.
        intact_norms: The same norms without an edit.
        intact_attention: The same attention without an edit.
    """

    norms: Float[Tensor, "edit text layer"]
    attention: Float[Tensor, "edit text _ head"]
    intact_norms: Float[Tensor, "text layer"]
    intact_attention: Float[Tensor, "text _ head"]

    def drops(self, layer: int) -> Float[Tensor, " edit"]:
        """Share of the norm after a layer that each edit takes away, mean over texts."""
        return (1 - self.norms[..., layer] / self.intact_norms[:, layer]).mean(1)

    def attention_drops(self, heads: Heads) -> Float[Tensor, "edit pair"]:
        """Share of the attention to the position that each (layer, head) pair loses, in all texts together."""
        layer, head = torch.tensor(heads).T
        return 1 - self.attention[:, :, layer, head].mean(1) / self.intact_attention[:, layer, head].mean(0)


def heads_lost(attention_drops: Float[Tensor, "edit pair"]) -> list[float]:
    """For each edit, the share of the heads that lose at least half of their attention to the position."""
    return reduce((attention_drops >= NEEDED).float(), "edit pair -> edit", "mean").tolist()


@dataclass(frozen=True, eq=False)
class Trial:
    """Texts, edits of them, and what is read.

    Attributes:
        ids: The texts.
        edits: The edits; each takes as many rows of a batch as there are texts.
        at: The position that swaps edit, and where effects are read; one, or one of each text.
        source: The position whose values replace those of swapped components; one, or one of each text.
        upto: The last layer to run. None: all.
        attention: Whether to read attention.
        behind: The first layer whose attention is read; that of earlier layers is 0.
        without: Residual dimensions that norms leave out.
        entering: What entered each layer when the texts were read intact.
    """

    ids: TokenRows
    edits: Sequence[Edit]
    at: At = 0
    source: At = -1
    upto: int | None = None
    attention: bool = False
    behind: int = 0
    without: Sequence[int] = ()
    entering: Entering = NOT_READ

    @property
    def begin(self) -> int:
        """The first layer to run: before the first layer that any edit changes, all rows are the same."""
        begin = max(self.entering.inputs, default=0)
        layers = [layer for edit in self.edits for layer in edit.layers]
        if layers:
            begin = min(layers)
        if self.attention:
            begin = min(begin, self.behind)
        if self.upto is not None:
            begin = min(begin, self.upto)
        return self.entering.latest(begin)

    def batches(self, target: Target) -> list[_EditedRows]:
        """The rows, in as few batches as memory allows."""
        texts, length = self.ids.shape
        size = max(1, BATCH_ELEMENTS // (texts * length * max(target.d_mlp, target.d_model)) - 1)
        starts = range(0, max(len(self.edits), 1), size)
        return [_EditedRows(target, self, self.edits[start : start + size]) for start in starts]

    def effects(self, batches: Sequence[_EditedRows]) -> Effects:
        """What was read in the batches; NaN in layers before the first, where nothing differed."""
        read = [batch.read() for batch in batches]
        return Effects(
            norms=torch.cat([norms[1:] for norms, _ in read]),
            attention=torch.cat([attention[1:] for _, attention in read]),
            intact_norms=read[0][0][0],
            intact_attention=read[0][1][0],
        )


@torch.no_grad()
def side_by_side(target: Target, trials: Sequence[Trial]) -> list[Effects]:
    """Run trials. A streamed model is walked once: in each layer, the rows of all trials pass before the next is read.

    Args:
        target: The model.
        trials: What is run.

    Returns:
        The effects of each trial. Entries of layers that were not run are missing at the end.
    """
    batches = [trial.batches(target) for trial in trials]
    depth = len(target.layers)
    lasts = range(depth - 1, depth)
    if not target.resident and target.skips_layers:
        lasts = range(min(trial.begin for trial in trials), depth)
    for last in lasts:
        for of_trial in batches:
            for batch in of_trial:
                batch.run(last)
    return [trial.effects(of_trial) for trial, of_trial in zip(trials, batches, strict=True)]


def effects(target: Target, ids: TokenRows, edits: Sequence[Edit], **reading: Any) -> Effects:
    """Run every edit on every text in as few passes as memory allows.

    Args:
        target: The model.
        ids: The texts.
        edits: The edits.
        reading: What is read, as the other fields of a `Trial` say.
    """
    return side_by_side(target, [Trial(ids, edits, **reading)])[0]


def writers(target: Target, count: int) -> list[Component]:
    """Everything that writes into the residual stream: embeddings, and the attention and MLP of the first layers."""
    components = [Component("token embedding")]
    if target.adapter.absolute_positions:
        components.append(Component("position embedding"))
    for layer in range(count):
        components += [*mixing(target, layer), Component("mlp", layer)]
    return components


def mixing(target: Target, layer: int) -> list[Component]:
    """The attention of a layer, or its mixer; none if the layer has neither."""
    if target.has_attention(layer):
        return [Component("attention", layer)]
    if _mixer(target, layer) is not None:
        return [Component("mixer", layer)]
    return []


def _mixer(target: Target, layer: int) -> Any:
    """The module of a layer that is neither a norm nor a part of its MLP; None if there is none."""
    adapter = target.adapter
    paths = "|".join(filter(None, (adapter.mlp, adapter.down, adapter.experts)))
    of_mlp = {path.split(".")[0] for path in paths.split("|")}
    for name, module in target.layers[layer].named_children():
        if name not in of_mlp and any(parameter.dim() > 1 for parameter in module.parameters()):
            return module
    return None


def writing_modules(target: Target, component: Component) -> list[Any]:
    """The modules whose outputs are what a component adds to the residual stream."""
    layer = component.layer or 0
    match component.kind:
        case "attention":
            module = target.sub(layer, target.adapter.attn)
            original = getattr(module, "original_component", module)  # also below a bridge's wrapper
            if "residual" in signature(original.forward).parameters:  # BLOOM adds the residual stream inside
                return [target.output_projection(layer)]
            return [module]
        case "mixer":
            return [_mixer(target, layer)]
        case "mlp":
            return target.mlp_writers(layer)
        case _:
            return [target.embedding]


def key_projection(target: Target, layer: int) -> Any:
    """The module that gives the keys of a layer, alone or with queries and values; None if there are no keys."""
    path = target.adapter.k or target.adapter.fused_qkv or ""
    if not target.has_part(layer, path):
        return None
    return target.sub(layer, path)


def key_bias(target: Target, layer: int) -> Tensor | None:
    """The bias of the keys, zero where the module gives something else; None if there is none or it is not known."""
    module = key_projection(target, layer)
    bias = getattr(getattr(module, "original_component", module), "bias", None)  # also below a bridge's wrapper
    if bias is None or target.adapter.k is not None:
        return bias
    if target.kind == "bridge" or not target.adapter.attention_interface:  # fused projections are split, or keys hidden
        return None
    with suppress(UnsupportedError):  # the layout of the projection is not known
        (site,) = resolve(target, [f"blocks.{layer}.attn.hook_k"])
        columns = site.cut(torch.arange(len(bias), dtype=torch.float32, device=bias.device)).flatten().long()
        return torch.zeros_like(bias).index_copy(0, columns, bias.detach()[columns])
    return None


def has_key_bias(target: Target) -> bool:
    """Whether some layer's keys have a bias that can be removed."""
    return any(key_bias(target, layer) is not None for layer in range(target.n_layers))


class _EditedRows:
    """One batch of rows on its way upward: all texts intact, then all texts under the first edit, and so on."""

    def __init__(self, target: Target, trial: Trial, edits: Sequence[Edit]) -> None:
        self.target = target
        self.trial = trial
        self.edits = edits
        self.texts = trial.ids
        self._layer = trial.begin  # the next to run
        self._next = trial.entering.at(trial.begin, len(edits) + 1) if trial.begin else None
        self._norms = torch.full((self.count, target.n_layers), torch.nan)
        self._received = torch.zeros(self.count, target.n_layers, target.n_heads)
        self._seeing = torch.zeros(self.count, target.n_layers)  # later queries that see the position
        self._rows = torch.arange(self.count)
        texts, length = self.texts.shape
        self._at = (torch.as_tensor(trial.at) % length).expand(texts).repeat(len(edits) + 1)
        self._source = (torch.as_tensor(trial.source) % length).expand(texts)

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.texts) * (len(self.edits) + 1)

    def by_row(self, tensor: Tensor) -> Float[Tensor, "row pos d"]:
        """An activation with separate rows; experts and OPT run row and position together."""
        return rearrange(tensor.flatten(0, -2), "(row pos) d -> row pos d", row=self.count)

    def read(self) -> tuple[Float[Tensor, "edit text depth"], Float[Tensor, "edit text _ head"]]:
        """The norms and the attention in each layer up to the last that was run, the intact texts first."""
        depth = 0
        if self.trial.attention:
            depth = self._layer
        mean = self._received[:, :depth] / self._seeing[:, :depth].clamp(min=1)[..., None]
        by_edit = (len(self.edits) + 1, len(self.texts))
        return self._norms[:, : self._layer].unflatten(0, by_edit), mean.unflatten(0, by_edit)

    def run(self, upto: int) -> None:
        """Go on to the end of a layer, or to the last layer that is wanted; nothing to do if it has been passed."""
        target = self.target
        trial = self.trial
        if trial.upto is not None:
            upto = min(upto, trial.upto)
        if upto < self._layer:
            return
        ids = repeat(self.texts, "text pos -> (edit text) pos", edit=len(self.edits) + 1)

        def layer_done(output: Any) -> None:
            hidden = first_tensor(output)
            self._norms[:, self._layer] = norm_of(hidden[self._rows, self._at], trial.without)
            self._layer += 1
            self._next = LayerInput(self._layer, hidden, isinstance(output, tuple))

        def attention_read(
            layer: int,
            first: int,
            probs: Float[Tensor, "row head query key"],
            visible: Callable[[], Bool[Tensor, "row _ query key"]],
        ) -> None:
            queries = torch.arange(first, first + probs.shape[2])
            later = queries > rearrange(self._at, "row -> row 1")
            sees = visible().expand(self.count, -1, -1, -1)
            later &= sees[self._rows, 0, :, self._at].cpu()
            to_position = probs[self._rows, :, :, self._at].cpu() * rearrange(later, "row query -> row 1 query")
            self._received[:, layer] += reduce(to_position, "row head query -> row head", "sum")
            self._seeing[:, layer] += later.sum(1)

        hooks = self.hooks()
        hooks += [(layer, "post", on_output(layer_done)) for layer in target.layers[self._layer : upto + 1]]
        listening = nullcontext()
        if trial.attention and upto >= trial.behind:
            listening = visible_rows(target, attention_read, layers=list(range(trial.behind, upto + 1)))
        with listening, target.hooks(*hooks):
            target.forward(ids, upto=upto, start=self._next)

    def hooks(self) -> list[Hook]:
        """The hooks that carry out all edits, each on its own rows."""
        silenced: dict[tuple[int, ...], list[tuple[int, range]]] = {}  # (layer) or (layer, expert): neurons, their rows
        swapped: dict[Component, list[int]] = {}
        texts = len(self.texts)
        for number, edit in enumerate(self.edits, start=1):
            rows = range(number * texts, (number + 1) * texts)
            for site in edit.zero:
                silenced.setdefault(site[:-1], []).append((site[-1], rows))
            for component in edit.swap:
                swapped.setdefault(component, []).extend(rows)
        hooks = [self._silence(mlp, neurons) for mlp, neurons in silenced.items()]
        for component, its_rows in swapped.items():
            hooks += self._swap(component, torch.tensor(its_rows))
        return hooks

    def _silence(self, mlp: tuple[int, ...], neurons: list[tuple[int, range]]) -> Hook:
        numbers = list(dict.fromkeys(neuron for neuron, _ in neurons))
        mask = torch.zeros(self.count, 1, len(numbers), dtype=torch.bool)
        for neuron, rows in neurons:
            mask[rows, :, numbers.index(neuron)] = True

        def zeroed(values: Tensor) -> Tensor:
            return self.by_row(values).masked_fill(mask.to(values.device), 0).reshape(values.shape)

        def before(post: Tensor) -> Tensor:
            index = torch.tensor(numbers, device=post.device)
            return post.index_copy(-1, index, zeroed(post[..., index]))

        if len(mlp) == 1:
            return self.target.mlp_part(mlp[0], "down"), "pre", on_input(before)
        experts = self.target.experts(mlp[0])
        return experts.module, "post", expert_hook(experts, mlp[1], numbers, "post", zeroed)

    def _swap(self, component: Component, rows: Int[Tensor, " swapped"]) -> list[Hook]:
        target = self.target
        layer = component.layer or 0
        text = rows % len(self.texts)
        at, source = self._at[rows], self._source[text]
        token_embeddings = []

        def replaced(output: Tensor) -> Tensor:
            """What a component writes, with the source's value at the position."""
            whole = self.by_row(output).clone()
            whole[rows, at] = whole[text, source]
            return whole.reshape(output.shape)

        def head_replaced(z: Tensor) -> Tensor:
            heads = list(z.chunk(target.n_heads, -1))
            heads[component.head or 0] = replaced(heads[component.head or 0])
            return torch.cat(heads, -1)

        def unbiased(number: int, keys: Tensor) -> Tensor:
            without = keys.clone()
            bias = key_bias(target, number)  # a streamed layer is there only now
            assert bias is not None
            without[rows] -= bias
            return without

        def embedded(output: Tensor) -> None:
            token_embeddings[:] = [output.detach()[: len(self.texts)].clone()]

        def positions_replaced(entering: Tensor) -> Tensor:
            """The learned position embedding is what the first layer gets beyond the token embedding."""
            hidden = entering.clone()
            positions = hidden[: len(self.texts)] - token_embeddings[0]
            hidden[rows, at] += positions[text, source] - positions[text, at]
            return hidden

        match component.kind:
            case "head":
                return [(target.output_projection(layer), "pre", on_input(head_replaced))]
            case "key bias":
                biased = [number for number in range(target.n_layers) if key_bias(target, number) is not None]
                return [(key_projection(target, one), "post", on_output(partial(unbiased, one))) for one in biased]
            case "position embedding":
                first_layer = target.layers[0]
                return [
                    (target.embedding, "post", on_hidden(embedded)),
                    (first_layer, "pre", on_input(positions_replaced)),
                ]
            case _:
                return [(module, "post", on_hidden(replaced)) for module in writing_modules(target, component)]
