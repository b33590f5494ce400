"""A model as sinkscope sees it: its parts, its sizes, and a pass over it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.adapters import DRAFT, Adapter
from sinkscope.models.hooks import Hook, forward_parameters, has_hooks, hidden_of, hooked, on_hidden
from sinkscope.models.shards import Shards, split_weight
from sinkscope.models.weights import Experts, brought, experts_of, input_width, is_plain

ModelKind = Literal["bridge", "hf", "nnsight"]
"""Kinds of objects that hold a model: of TransformerLens, of transformers, of nnsight."""


def check_divides(config: Any, name: str, count: int) -> None:
    """Refuse to split a model over processes among which its heads cannot be shared out.

    Raises:
        SinkscopeError: They cannot.
    """
    for heads in heads_of(config.get_text_config()):
        if heads % count:
            raise SinkscopeError(
                f"{count} processes cannot share the {heads} heads of {name}: start a number that divides them"
            )


def heads_of(config: Any) -> tuple[int, int]:
    """Return how many query heads, and key and value heads, the configuration of a decoder names."""
    heads = getattr(config, "num_attention_heads", 0)
    kv_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1
    return heads, kv_heads


def parts_of(layer: nn.Module, named: Mapping[str, str]) -> dict[str, str]:
    """Return those parts that an adapter names which a layer has."""
    paths: dict[str, str] = {}
    for part, path in named.items():
        with suppress(AttributeError):
            layer.get_submodule(path)
            paths[part] = path
    return paths


def has_shared_beside(paths: Mapping[str, Any]) -> bool:
    """Return whether a layer with these parts has a shared expert beside its mixture, which is no part of it."""
    has_both = bool(paths.get("experts") and paths.get("down"))
    return has_both and not f"{paths['down']}.".startswith(f"{paths['mlp']}.")


# -- a part of a pass -----------------------------------------------------------------------------------------------


class _Stop(Exception):  # noqa: N818 - no error: it ends a pass
    """Raised inside a hook, to end a forward pass early."""


class LayerInput(NamedTuple):
    """The residual stream of some texts where it enters a layer, at which a later pass over them may begin.

    Attributes:
        layer: The layer.
        hidden: What enters it.
        wrapped: Whether the layers of the model return a tuple.
    """

    layer: int
    hidden: Float[Tensor, "batch pos d_model"]
    wrapped: bool


@contextmanager
def bounded(layers: Sequence[nn.Module], start: LayerInput | None, last_layer: int | None) -> Iterator[None]:
    """Context manager in which a pass begins and ends at layers.

    Args:
        layers: All layers of the model.
        start: What the first layer that runs gets; those before it pass on what they get. None: all run.
        last_layer: The last layer that runs. None: all run.
    """
    hooks: list[Hook] = []

    def stop(*_: object) -> None:
        raise _Stop

    with ExitStack() as stack:
        if start is not None:
            owner = threading.get_ident()

            def passed_on(run: Any, *args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() != owner:
                    return run(*args, **kwargs)
                hidden = hidden_of(args, kwargs)
                return (hidden,) if start.wrapped else hidden

            hooks.append(on_hidden(layers[start.layer], "first", lambda _: start.hidden))  # edits there act on it
            for layer in layers[: start.layer]:
                attributes = vars(layer)  # not by setattr: a bridge hands what is set on it to the module inside
                stack.callback(_put_back, attributes, attributes.get("forward"))  # some libraries replace it as well
                attributes["forward"] = partial(passed_on, layer.forward)
        if last_layer is not None:
            hooks.append((layers[last_layer], "post", stop))
        with suppress(_Stop), hooked(*hooks):
            yield


def _put_back(attributes: dict[str, Any], forward: Any) -> None:
    """Give a module the forward back that it had of its own, or none."""
    del attributes["forward"]
    if forward is not None:
        attributes["forward"] = forward


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Target:
    """A model as every measurement and intervention of sinkscope sees it. The model is not changed.

    A model whose layers are numbered in two ways is refused, with an `UnsupportedError`.

    Whether the user holds a plain Hugging Face, TransformerBridge or nnsight object makes no difference. Until its
    adapter is known, a target has its first fields and its processes alone.

    Attributes:
        model: The object the user gave.
        hf: The plain Hugging Face module inside. Hooks go here and fire for all three kinds of object.
        kind: Which of the three kinds `model` is.
        adapter: Where the model's parts are.
        tokenizer: The tokenizer; None if the caller gave none and the model carries none.
        name: Short name, hub id or base name of the folder, for reports.
        store: Reads the weights of a layer when the layer is called (`models.checkpoints.stream`); None if they are in
            memory. Code that reads them outside such a call must be inside `with target.loaded(k):`.
        resident: Whether the model is in memory, and not read layer by layer.
        shards: The processes over which the model is split.
        processes: Their number.
        config: The text part of the configuration.
        base: The module from ids to the last hidden state; every way of calling the model goes through it.
        embedding: The token embedding.
        layers: The decoder layers.
        n_layers: Number of decoder layers.
        paths: Where each layer has its parts, by names of an adapter's fields; parts that it lacks are not there.
        attending: The layers that attend with a softmax; layers of hybrid models may keep a state instead.
        with_neurons: The layers that have an MLP, dense or a mixture.
        mixtures: The layers whose MLP is a mixture of experts (some models mix both kinds).
        d_model: Width of the residual stream.
        n_heads: Query heads of a layer.
        n_kv_heads: Key/value heads of a layer.
        max_positions: Longest context according to the configuration; None if it says nothing.
        unproved: Sites that could not be proved, such as "blocks.3.attn.hook_z", and why.
        skips_layers: Whether a pass may begin at a layer, with what entered it in another pass.
    """

    model: Any
    hf: Any
    kind: ModelKind
    adapter: Adapter
    tokenizer: Any = None
    name: str = "model"
    store: Any = None

    def __repr__(self) -> str:
        """Return what it is, without its modules."""
        return f"Target(name={self.name!r}, kind={self.kind!r}, hf={type(self.hf).__name__})"

    def __post_init__(self) -> None:
        self.resident = self.store is None
        self.shards = Shards(split_weight(self.hf))
        self.processes = self.shards.size
        if self.adapter is DRAFT:
            return
        adapter, config = self.adapter, self.hf.config.get_text_config()
        self.config: Any = config
        self.embedding: nn.Module = self.hf.get_input_embeddings()
        self.base: nn.Module = self.hf.get_submodule(adapter.base)
        self.layers: list[nn.Module] = [*self.hf.get_submodule(adapter.layers)]
        self.n_layers = len(self.layers)
        self.d_model = int(config.hidden_size)
        self.n_heads, self.n_kv_heads = heads_of(config)
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None) or None
        self.skips_layers = adapter.from_any_layer and adapter.adds
        self.unproved = dict(adapter.unproved)
        self.paths: list[dict[str, str]] = []
        self.attending, self.with_neurons, self.mixtures = list[int](), list[int](), list[int]()
        for number, layer in enumerate(self.layers):
            paths = parts_of(layer, adapter.parts[number] if adapter.parts else {"": ""})
            self.paths.append(paths)
            if "o" in paths:
                self.attending.append(number)
                own = getattr(layer.get_submodule(paths.get("attn", "")), "layer_idx", number)
                if own != number and layer not in self.layers[:number]:  # by which attention and caches are told apart
                    raise UnsupportedError(
                        f"the layer at place {number} of {self.name} calls itself layer {own} (layer_idx), so that "
                        "attention and caches would be those of another layer: set the layer_idx of its attention to "
                        "the place"
                    )
            if "experts" in paths:
                self.mixtures.append(number)
            if paths.keys() & {"experts", "down"} and f"blocks.{number}.mlp.hook_post" not in self.unproved:
                self.with_neurons.append(number)

    @cached_property
    def available_tokenizer(self) -> Any:
        """The tokenizer; without one, that of the checkpoint which a live model names; None without either."""
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
    def configs(self) -> list[Any]:
        """Every distinct configuration that the attention of the decoder, or what makes its mask, may read.

        A vision or audio tower beside the decoder attends in its own way.
        """
        configs = {id(self.hf.config): self.hf.config}
        for module in self.base.modules():
            config = getattr(module, "config", None)
            if hasattr(config, "model_type"):
                configs[id(config)] = config
        return list(configs.values())

    def n_experts(self, layer: int) -> int:
        """Return the number of routed experts in a layer; 0 if it is not a mixture."""
        return len(self.experts(layer).down) if layer in self.mixtures else 0

    def width(self, layer: int, expert: int | None = None) -> int:
        """Return the number of neurons of an expert; for None, of the layer's dense MLP or shared expert."""
        if expert is not None:
            return self.experts(layer).down.shape[1]
        return input_width(self.sub(layer, "down"))

    @cached_property
    def d_mlp(self) -> int:
        """Neurons of one MLP (of one expert in a mixture).

        Raises:
            UnsupportedError: The modules of no MLP run.
        """
        if not self.with_neurons:
            raise UnsupportedError(
                f"no layer of {self.name} has neurons that can be read, because the modules of its MLPs do not run "
                "(those of a folded TransformerBridge do not): give the plain Hugging Face model"
            )
        return self.width(self.mixtures[0], 0) if self.mixtures else self.width(self.with_neurons[0])

    def check_proved(self, layer: int, site: str, what: str) -> None:
        """Refuse neurons or heads of a layer that could not be proved, or neurons whose MLP may give something else.

        Raises:
            UnsupportedError: They are such ones.
        """
        reason = self.unproved.get(f"blocks.{layer}.{site}")
        for part in ("mlp", "experts"):
            if site == "mlp.hook_post" and part in self.paths[layer] and has_hooks(self.sub(layer, part)):
                reason = "a hook of yours is on its MLP, and may change what it gives; remove it while you measure"
        if reason is not None:
            raise UnsupportedError(f"the {what} of layer {layer} of {self.name} are not offered: {reason}")

    def check_head(self) -> None:
        """Refuse to read the logits of each token from a model without its unembedding, or with a head of another kind.

        Raises:
            UnsupportedError: It is such a model, or it is read layer by layer.
        """
        if not self.resident or self.hf.get_output_embeddings() is None:
            what = f"a {type(self.hf).__name__} without a language head" if self.resident else "read layer by layer"
            raise UnsupportedError(f"{self.name} is {what}, so that it has no logits: load it with sinkscope.load(...)")

    def keep_in_memory(self, n_layers: int) -> None:
        """Keep the first layers in memory if the model is read layer by layer: many passes will go through them."""
        if self.store is not None:
            self.store.resident = n_layers

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

    def sub(self, layer: int, *parts: str) -> nn.Module:
        """Return the first of some parts that a layer has, by names of an adapter's fields.

        Raises:
            UnsupportedError: The layer has none of them.
        """
        for part in parts:
            if part in self.paths[layer]:
                return self.layers[layer].get_submodule(self.paths[layer][part])
        raise UnsupportedError(
            f"layer {layer} of {self.name} has no part {parts[-1]!r}: the page `models` of the documentation says what "
            "is served"
        )

    def experts(self, layer: int) -> Experts:
        """Return the routed experts of a layer.

        Raises:
            UnsupportedError: Their weights are not plain tensors.
        """
        experts = experts_of(self.sub(layer, "experts"))
        if experts is None:
            raise UnsupportedError(
                f"the experts of {self.name} hold no plain weights here: load it dequantised, and in one process "
                "(device_map= spreads it over devices)"
            )
        return experts

    def is_gated(self, layer: int) -> bool:
        """Return whether the layer's dense MLP has a gate, and so an up factor."""
        return self.adapter.fused_gate_up or "gate" in self.paths[layer]

    def loaded(self, layer: int) -> AbstractContextManager[None]:
        """Context manager in which a layer's weights may be read and its parts called, outside a call of the layer.

        It has an effect on streamed models (`checkpoints.stream`) and on weights that accelerate keeps elsewhere.
        """
        if self.store is not None:
            self.store.load(layer)
            return nullcontext()
        return brought(self.layers[layer])

    @torch.no_grad()
    def forward(
        self,
        ids: Int[Tensor, "batch pos"],
        attention_mask: Int[Tensor, "batch pos"] | Float[Tensor, "batch 1 query key"] | None = None,
        *,
        unembed: bool = False,
        last_layer: int | None = None,
        start: LayerInput | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one pass without a cache, and without the unembedding unless requested.

        The pass ends after `last_layer`, if one is given; it then returns None. If there is a `start`, the layers
        before it are skipped, and its layer gets what `start` holds.

        Raises:
            SinkscopeError: A token has no row in the embedding.
            UnsupportedError: The unembedding is wanted of a model that has none, or is read layer by layer, without it.
        """
        if unembed:
            self.check_head()
        weight: Any = getattr(self.embedding, "weight", None)
        if is_plain(weight) and ids.device.type == "cpu" and int(ids.max()) >= len(weight):
            raise SinkscopeError(
                f"token {int(ids.max())} is not in the vocabulary of {self.name}, whose embedding has "
                f"{len(weight):,} rows: give the tokenizer that came with the weights"
            )
        kwargs.setdefault("use_cache", False)
        model = self.hf if unembed else self.base
        ids = ids.to(self.device)
        with bounded(self.layers, start, last_layer):
            return model(input_ids=ids, attention_mask=attention_mask, **kwargs)

    def logits_at(
        self, ids: Int[Tensor, "batch pos"], positions: Int[Tensor, " some"], start: LayerInput | None = None
    ) -> Float[Tensor, "batch some vocab"]:
        """Run a pass, and return the logits at some positions, which most models then compute alone."""
        if "logits_to_keep" in forward_parameters(type(self.hf)):
            return self.forward(ids, unembed=True, start=start, logits_to_keep=positions.to(self.device)).logits
        return self.forward(ids, unembed=True, start=start).logits[:, positions]

    hooks = staticmethod(hooked)


def tokenizer_of(target: Target) -> Any:
    """Return the tokenizer.

    Raises:
        SinkscopeError: There is none.
    """
    if target.available_tokenizer is None:
        raise SinkscopeError(
            f"{target.name} carries no tokenizer; pass tokenizer=AutoTokenizer.from_pretrained(...), or put the "
            "tokenizer's files beside the weights"
        )
    return target.available_tokenizer
