"""A model as sinkscope sees it: its parts, its sizes, and a pass over it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.adapters import Found, layer_kind
from sinkscope.models.experts import Experts, experts_of
from sinkscope.models.hooks import Hook, LayerInput, bounded, hooked, on_hidden, parameters_of, stop
from sinkscope.models.weights import ALONE, Shards, brought, input_width, shards_of, split_weight

ModelKind = Literal["bridge", "hf", "nnsight"]
"""Kinds of objects that hold a model: of TransformerLens, of transformers, of nnsight."""


def check_divides(config: Any, name: str, count: int) -> None:
    """Refuse to split a model over processes among which its heads cannot be shared out.

    Raises:
        SinkscopeError: They cannot.
    """
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config.get_text_config(), what, None) or count
        if heads % count:
            raise SinkscopeError(
                f"{count} processes cannot share the {heads} heads ({what}) of {name}: start a number that divides them"
            )


@dataclass(frozen=True, eq=False)
class Parts:
    """A model with its tokenizer, and where its modules are.

    Attributes:
        model: The object the user gave.
        hf: The plain Hugging Face module inside. Hooks go here and fire for all three kinds of object.
        kind: Which of the three kinds `model` is.
        adapter: Where the model's parts are.
        tokenizer: The tokenizer; None if the caller gave none and the model carries none.
        name: Short name, hub id or base name of the folder, for reports.
        store: Reads the weights of a layer when the layer is called (`models.checkpoints.stream`); None if they are in
            memory. Code that reads them outside such a call must be inside `with target.loaded(k):`.
    """

    model: Any
    hf: Any
    kind: ModelKind
    adapter: Found
    tokenizer: Any = None
    name: str = "model"
    store: Any = None

    @property
    def resident(self) -> bool:
        """Whether the model is in memory, and not read layer by layer."""
        return self.store is None

    @cached_property
    def available_tokenizer(self) -> Any:
        """The tokenizer, or else that of the checkpoint from which a live model says it was loaded; None if neither."""
        origin = getattr(self.hf.config, "_name_or_path", "")
        if self.tokenizer is not None or not origin:
            return self.tokenizer
        from transformers import AutoTokenizer

        with suppress(Exception):  # the origin may not exist any more
            tokenizer = AutoTokenizer.from_pretrained(origin, trust_remote_code=False)
            if tokenizer("a text", add_special_tokens=False)["input_ids"]:  # else it was made of no files
                return tokenizer
        return None

    @cached_property
    def config(self) -> Any:
        """The text part of the configuration."""
        return self.hf.config.get_text_config()

    @cached_property
    def base(self) -> nn.Module:
        """The module from ids to the last hidden state; every way of calling the model goes through it."""
        return self.hf.get_submodule(self.adapter.base)

    @property
    def embedding(self) -> nn.Module:
        """The token embedding."""
        hf: Any = self.hf
        return hf.get_input_embeddings()

    @cached_property
    def layers(self) -> list[nn.Module]:
        """The decoder layers."""
        return list(self.hf.get_submodule(self.adapter.layers).children())

    @cached_property
    def n_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @cached_property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return int(self.config.hidden_size)

    @cached_property
    def n_heads(self) -> int:
        """Query heads of a layer."""
        return int(self.config.num_attention_heads)

    @cached_property
    def n_kv_heads(self) -> int:
        """Key/value heads of a layer."""
        is_grouped = getattr(self.config, "new_decoder_architecture", False)  # of Falcon
        if getattr(self.config, "multi_query", False) and not is_grouped:
            return 1
        if self.config.model_type == "falcon":
            return int(self.config.num_kv_heads)
        return int(getattr(self.config, "num_key_value_heads", None) or self.n_heads)

    def head_columns(self, layer: int, head: int) -> list[int]:
        """Return the inputs of the output projection that hold a head; layers may have heads of different widths."""
        width = input_width(self.sub(layer, "o")) // self.n_heads
        return list(range(head * width, (head + 1) * width))

    def n_experts(self, layer: int) -> int:
        """Return the number of routed experts in a layer; 0 if it is not a mixture."""
        if self.is_mixture(layer):
            return self.experts(layer).count
        return 0

    def width(self, layer: int, expert: int | None = None) -> int:
        """Return the number of neurons of an expert; for None, of the layer's dense MLP or shared expert."""
        if expert is not None:
            return self.experts(layer).width
        return input_width(self.sub(layer, "down"))

    @cached_property
    def d_mlp(self) -> int:
        """Neurons of one MLP (of one expert in a mixture)."""
        for layer in filter(self.is_mixture, range(self.n_layers)):
            return self.width(layer, 0)
        return self.width(next(filter(self.has_neurons, range(self.n_layers))))

    @property
    def max_positions(self) -> int | None:
        """Longest context according to the configuration."""
        value = getattr(self.config, "max_position_embeddings", None) or getattr(self.config, "n_positions", None)
        if value:
            return int(value)
        return None

    @property
    def device(self) -> torch.device:
        """Device on which token ids are expected."""
        device = next(self.embedding.parameters()).device
        if device.type == "meta":  # accelerate keeps the weights elsewhere, and brings them for each call
            device = torch.device(getattr(getattr(self.embedding, "_hf_hook", None), "execution_device", None) or "cpu")
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the embedding, which is that of the residual stream."""
        return next(self.embedding.parameters()).dtype

    def path(self, layer: int, *parts: str) -> str | None:
        """Return where a layer has the first of some parts that it has, by names of an adapter's fields.

        It is None if the layer has none of them.
        """
        row = self.adapter.rows[layer] if self.adapter.rows else self.adapter
        for part in parts:
            for path in filter(None, (getattr(row, part) or "").split("|")):
                with suppress(AttributeError):
                    self.layers[layer].get_submodule(path)
                    return path
        return None

    def sub(self, layer: int, *parts: str) -> nn.Module:
        """Return the first of some parts that a layer has, by names of an adapter's fields.

        Raises:
            UnsupportedError: The layer has none of them.
        """
        path = self.path(layer, *parts)
        if path is None:
            raise UnsupportedError(
                f"layer {layer} of {self.name} has no part {parts[-1]!r}; `sinkscope models --check MODEL` says what "
                "is served"
            )
        return self.layers[layer].get_submodule(path)

    def has_part(self, layer: int, *parts: str) -> bool:
        """Return whether a layer has one of some parts; layers of a model may be of several kinds."""
        return self.path(layer, *parts) is not None

    def has_attention(self, layer: int) -> bool:
        """Return whether a layer attends with a softmax; layers of hybrid models may keep a state instead."""
        return self.has_part(layer, "attn" if self.adapter.o is None else "o")

    @cached_property
    def attending(self) -> list[int]:
        """The layers that attend with a softmax."""
        return list(filter(self.has_attention, range(self.n_layers)))

    def has_neurons(self, layer: int) -> bool:
        """Return whether a layer has an MLP, dense or a mixture."""
        return self.is_mixture(layer) or self.has_part(layer, "down")

    def is_mixture(self, layer: int) -> bool:
        """Return whether this layer's MLP is a mixture of experts (some models mix both kinds)."""
        return self.has_part(layer, "experts")

    def has_shared(self, layer: int) -> bool:
        """Return whether the layer is a mixture with a shared expert, which processes every token."""
        return self.is_mixture(layer) and self.has_part(layer, "down")

    def has_mlp(self, layer: int, expert: int | None) -> bool:
        """Return whether the layer has neurons of this expert; None: neurons of a dense MLP or a shared expert."""
        return self.is_mixture(layer) != (expert is None) or (expert is None and self.has_shared(layer))

    def experts(self, layer: int) -> Experts:
        """Return the routed experts of a layer.

        Raises:
            UnsupportedError: Their weights are not plain tensors.
        """
        experts = experts_of(self.sub(layer, "experts"))
        if experts is None:
            raise UnsupportedError(
                f"the experts of {self.name} hold no plain weights here: load it dequantised and, if this layout is "
                "split over processes, in one process (device_map= spreads it over devices)"
            )
        return experts

    def is_gated(self, layer: int) -> bool:
        """Return whether the layer's dense MLP has a gate, and so an up factor."""
        return self.adapter.fused_gate_up or self.has_part(layer, "gate")

    def loaded(self, layer: int) -> AbstractContextManager[None]:
        """Context manager in which a layer's weights may be read and its parts called, outside a call of the layer.

        It has an effect on streamed models (`checkpoints.stream`) and on weights that accelerate keeps elsewhere.
        """
        if self.store is not None:
            return self.store.pinned(layer)
        if any(parameter.is_meta for parameter in self.layers[layer].parameters()):
            return brought(self.layers[layer])
        return nullcontext()


class Target(Parts):
    """A model as every measurement and intervention of sinkscope sees it. The model is not changed.

    Whether the user holds a plain Hugging Face, TransformerBridge or nnsight object makes no difference.
    """

    @cached_property
    def shards(self) -> Shards:
        """The processes over which the model is split.

        Raises:
            SinkscopeError: They cannot share its heads.
        """
        found = split_weight(self.hf)
        if found is None:
            return ALONE
        shards = shards_of(found)
        check_divides(self.hf.config, self.name, shards.size)
        return shards

    @property
    def processes(self) -> int:
        """Number of processes over which the model is split."""
        return self.shards.size

    def whole_heads(self, tensor: Shaped[Tensor, ...], count: int, dim: int = 1) -> Shaped[Tensor, ...]:
        """Return a tensor of all heads, in each process, from those of the heads that this process holds.

        Args:
            tensor: The tensor; it may be whole already.
            count: Number of all heads, `n_heads` or `n_kv_heads`.
            dim: Its dimension of heads.
        """
        return self.shards.gather(tensor, count, dim)

    def agree(self, what: str, *plan: object) -> None:
        """Refuse to go on if the processes of a split model were given different things to do; see `Shards.agree`."""
        self.shards.agree(what, *plan)

    def check_alone(self, what: str) -> None:
        """Refuse a split model for what one process does; see `Shards.check_alone`."""
        self.shards.check_alone(what)

    @torch.no_grad()
    def forward(
        self,
        ids: Int[Tensor, "batch pos"],
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        *,
        unembed: bool = False,
        last_layer: int | None = None,
        start: LayerInput | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one pass without a cache, and without the unembedding unless requested.

        The pass ends after `last_layer`, if one is given, or where a hook calls `stop`; it then returns None. If there
        is a `start`, the layers before it are skipped, and its layer gets what `start` holds.
        """
        self.check_loaded()
        kwargs.setdefault("use_cache", False)
        model = self.base
        if unembed:
            model = self.hf
        ids = ids.to(self.device)
        with bounded(self.layers, start, last_layer, self.store):
            return model(input_ids=ids, attention_mask=attention_mask, **kwargs)

    def logits_at(
        self, ids: Int[Tensor, "batch pos"], positions: Int[Tensor, " some"], start: LayerInput | None = None
    ) -> Float[Tensor, "batch some vocab"]:
        """Run a pass, and return the logits at some positions, which most models then compute alone."""
        kept: dict[str, Any] = {}
        if "logits_to_keep" in parameters_of(self.hf):
            kept = {"logits_to_keep": positions.to(self.device)}
        logits = self.forward(ids, unembed=True, start=start, **kept).logits
        return logits if kept else logits[:, positions]

    def check_loaded(self) -> None:
        """Refuse a model whose weights are on the meta device, unless they are read from elsewhere when needed.

        Raises:
            UnsupportedError: The model holds no weights.
        """
        if next(self.embedding.parameters()).is_meta and not hasattr(self.embedding, "_hf_hook"):
            raise UnsupportedError(
                f"{self.name} holds no weights yet (they are on the meta device): load it with sinkscope.load(...), or "
                "make it with dispatch=True (nnsight)"
            )

    @cached_property
    def skips_layers(self) -> bool:
        """Whether a pass may begin at a layer, with what entered it in another pass."""
        return self.adapter.from_any_layer and self.adapter.adds

    stop = staticmethod(stop)
    hooks = staticmethod(hooked)

    def part_hooks(self, layer: int, part: str, when: str, *functions: Any) -> list[Hook]:
        """Return hooks on a part of a layer, by the name of an adapter's field; none if the layer has no such part."""
        if not self.has_part(layer, part):
            return []
        return [(self.sub(layer, part), when, function) for function in functions]

    def mlp_writers(self, layer: int) -> list[nn.Module]:
        """Return the modules whose sum is what the MLP gives: one, or a mixture and the shared expert beside it."""
        writers = [self.sub(layer, "mlp")]
        if self.has_shared(layer) and not f"{self.path(layer, 'down')}.".startswith(f"{self.path(layer, 'mlp')}."):
            writers.append(self.sub(layer, "down"))
        return writers

    def on_mlp(self, layer: int, see: Callable[[Tensor], None]) -> list[Hook]:
        """Return hooks by which `see` gets what the MLP gives, before any norm after it."""
        writers = self.mlp_writers(layer)
        if len(writers) == 1:
            return [(writers[0], "post", on_hidden(see))]
        given: list[Tensor] = []

        def keep(output: Tensor) -> None:
            given.append(output)
            if len(given) == len(writers):
                total = given[0]
                for other in given[1:]:
                    total = total + other.view_as(total)
                given.clear()
                see(total)

        return [(writer, "post", on_hidden(keep)) for writer in writers]


def layer_kinds(target: Target) -> list[int]:
    """Return, for each layer, the first layer of its kind, whose parameters have the same names and shapes."""
    firsts = dict[str, int]()
    return [firsts.setdefault(layer_kind(layer), number) for number, layer in enumerate(target.layers)]


def first_of_kinds(target: Target) -> list[int]:
    """Return the first layer of each kind."""
    return sorted(set(layer_kinds(target)))
