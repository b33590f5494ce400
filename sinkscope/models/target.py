"""A uniform view of a model, whether the user holds a plain Hugging Face, TransformerBridge or nnsight object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sinkscope.display.notation import neuron_name
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import between, conform
from sinkscope.models.adapters import Adapter
from sinkscope.models.config import without_cache
from sinkscope.models.experts import Args, Experts, Kwargs, experts_of
from sinkscope.models.uncompiled import uncompiled

Kind = Literal["hf", "bridge", "nnsight"]
Hook = tuple[nn.Module, str, Any]
"""A module, "pre" or "post", and a function with the signature of torch's hooks with kwargs."""
LARGEST_ID = (1 << 63) - 1


class Stop(Exception):  # noqa: N818 - no error: it ends a pass
    """Raised inside a hook, by `Target.stop`, to end a forward pass or the call of a layer early."""


@dataclass(frozen=True, eq=False)
class LayerInput:
    """The residual stream of some texts where it enters a layer, at which a later pass over them may begin.

    Attributes:
        layer: The layer.
        hidden: What enters it.
        wrapped: Whether the layers of the model return a tuple.
    """

    layer: int
    hidden: Float[Tensor, "batch pos d_model"]
    wrapped: bool


@dataclass(frozen=True, eq=False)
class Target:
    """A model as every measurement and intervention of sinkscope sees it. The model is not changed.

    Attributes:
        model: The object the user gave.
        hf: The plain Hugging Face module inside. Hooks go here and fire for all three kinds of object.
        kind: Which of the three kinds `model` is.
        adapter: Where the model's parts are.
        tokenizer: The tokenizer; None if the caller gave none and the model carries none.
        name: Short name, hub id or base name of the folder, for reports.
        resident: False if layers are read from disk as they are called (see `models.open`).
    """

    model: Any
    hf: Any
    kind: Kind
    adapter: Adapter
    tokenizer: Any = None
    name: str = "model"
    resident: bool = True

    @cached_property
    def available_tokenizer(self) -> Any:
        """The tokenizer, or else that of the checkpoint from which a live model says it was loaded; None if neither."""
        origin = getattr(self.config, "_name_or_path", "") or getattr(self.hf.config, "_name_or_path", "")
        if self.tokenizer is not None or not origin:
            return self.tokenizer
        from transformers import AutoTokenizer

        with suppress(Exception):  # the origin may not exist any more
            tokenizer = without_cache(AutoTokenizer.from_pretrained(origin, trust_remote_code=False))
            if tokenizer("a text", add_special_tokens=False)["input_ids"]:  # else it was made of no files
                return tokenizer
        return None

    def need_tokenizer(self) -> Any:
        """The tokenizer.

        Raises:
            SinkscopeError: There is none.
        """
        if self.available_tokenizer is None:
            raise SinkscopeError(
                f"{self.name} carries no tokenizer; pass tokenizer=AutoTokenizer.from_pretrained(...), or put the "
                "tokenizer's files beside the weights",
                page="no-tokenizer",
            )
        return self.available_tokenizer

    @property
    def config(self) -> Any:
        """The text part of the configuration."""
        return self.hf.config.get_text_config()

    @cached_property
    def base(self) -> nn.Module:
        """The module from ids to the last hidden state; every way of calling the model goes through it."""
        return self.hf.get_submodule(self.adapter.base)

    @cached_property
    def layers(self) -> list[nn.Module]:
        """The decoder layers."""
        return list(self.hf.get_submodule(self.adapter.layers).children())

    def path(self, layer: int, part: str | None) -> str | None:
        """Where a layer has a part: the first alternative of an adapter path that is there; None if none is."""
        for alternative in (part or "").split("|"):
            condition, _, path = alternative.rpartition("?")
            with suppress(AttributeError):
                self.layers[layer].get_submodule(condition)
                self.layers[layer].get_submodule(path)
                if path:
                    return path
        return None

    def sub(self, layer: int, part: str) -> nn.Module:
        """A part of a layer, by an adapter path ("" is the layer itself).

        Raises:
            UnsupportedError: The layer has no such part.
        """
        path = self.path(layer, part)
        if path is None and part:
            raise UnsupportedError(
                f"layer {layer} of {self.name} has no part {part!r}; `sinkscope models --check MODEL` says what is "
                "served"
            )
        return self.layers[layer].get_submodule(path or "")

    def has_part(self, layer: int, part: str | None) -> bool:
        """Whether a layer has a part; layers of a model may be of several kinds."""
        return self.path(layer, part) is not None

    @property
    def n_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    def has_attention(self, layer: int) -> bool:
        """Whether a layer attends with a softmax; layers of hybrid models may keep a state instead."""
        return self.has_part(layer, self.adapter.o or self.adapter.attn)

    def output_projection(self, layer: int) -> nn.Module:
        """The module that reads the heads of a layer side by side.

        Raises:
            UnsupportedError: There is none.
        """
        if self.adapter.o is None:
            raise UnsupportedError(
                f"no module of {self.name} reads its heads side by side, so none can be edited alone"
            )
        return self.sub(layer, self.adapter.o)

    def head_columns(self, layer: int, head: int) -> list[int]:
        """The inputs of the output projection that hold a head; layers may have heads of different widths."""
        width = self._inputs(self.output_projection(layer)) // self.n_heads
        return list(range(head * width, (head + 1) * width))

    def has_neurons(self, layer: int) -> bool:
        """Whether a layer has an MLP, dense or a mixture."""
        return self.is_mixture(layer) or self.has_part(layer, self.adapter.down)

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return int(self.config.hidden_size)

    @property
    def n_heads(self) -> int:
        """Query heads of a layer.

        Raises:
            UnsupportedError: Layers have different numbers of them.
        """
        with suppress(RuntimeError):  # of transformers, for configurations with a number for each layer
            return int(self.config.num_attention_heads)
        raise UnsupportedError(f"the layers of {self.name} have different numbers of heads: use another model")

    @property
    def n_kv_heads(self) -> int:
        """Key/value heads of a layer."""
        is_grouped = getattr(self.config, "new_decoder_architecture", False)  # of Falcon
        if getattr(self.config, "multi_query", False) and not is_grouped:
            return 1
        if self.config.model_type == "falcon":
            return int(self.config.num_kv_heads)
        return int(getattr(self.config, "num_key_value_heads", None) or self.n_heads)

    @property
    def head_width(self) -> int:
        """Width of one head at the input of the output projection."""
        return int(getattr(self.config, "head_dim", None) or self.d_model // self.n_heads)

    def check_site(
        self, layer: int, neuron: int | None = None, expert: int | None = None, *, head: int | None = None
    ) -> None:
        """Refuse a layer, neuron, expert or query head that the model does not have.

        Raises:
            SinkscopeError: A number is out of range, an expert is missing, or the layer has no experts.
        """
        self._check_number("layer", layer, self.n_layers)
        self._check_number("head", head or 0, self.n_heads)
        if neuron is None:
            return
        if not self.has_mlp(layer, expert):
            is_like = "one MLP without experts; give (layer, neuron)"
            if self.is_mixture(layer):
                is_like = "a mixture of experts; give (layer, expert, neuron)"
            raise SinkscopeError(
                f"{neuron_name(layer, expert, neuron)}: layer {layer} of {self.name} is {is_like}", page="neuron-sites"
            )
        self._check_number("expert", expert or 0, self.n_experts(layer) or 1)
        self._check_number("neuron", neuron, self.width(layer, expert))

    def chosen_layers(self, layers: Sequence[int] | None) -> list[int]:
        """Layers that attend with a softmax, in order; None selects all of them.

        Raises:
            SinkscopeError: The list is empty, or names a layer that the model does not have or that does not attend.
        """
        attending = list(filter(self.has_attention, range(self.n_layers)))
        if layers is None:
            wanted = attending
        else:
            wanted = sorted(set(layers))
        if not wanted:
            raise SinkscopeError("no layer was given: expected at least one", page="neuron-sites")
        for layer in wanted:
            self.check_site(layer)
            if layer not in attending:
                raise SinkscopeError(f"layer {layer} of {self.name} has no softmax attention; these have: {attending}")
        return wanted

    def _check_number(self, what: str, value: int, count: int) -> None:
        if not 0 <= value < count:
            raise SinkscopeError(
                f"{what} {value} is not in {self.name}: give one from 0 to {count - 1}", page="neuron-sites"
            )

    @cached_property
    def d_mlp(self) -> int:
        """Neurons of one MLP (of one expert in a mixture)."""
        layers = [layer for layer in range(len(self.layers)) if self.has_neurons(layer)]
        mixtures = [layer for layer in layers if self.is_mixture(layer)]
        if mixtures:
            return self.width(mixtures[0], 0)
        return self.width(layers[0])

    @property
    def max_positions(self) -> int | None:
        """Longest context according to the configuration."""
        value = getattr(self.config, "max_position_embeddings", None) or getattr(self.config, "n_positions", None)
        if value:
            return int(value)
        return None

    def check_length(
        self, what: str, tokens: int, new: int = 0, remedy: str = "shorten it", page: str | None = None
    ) -> None:
        """Refuse a text that does not fit the context together with the tokens that are to follow it.

        Args:
            what: The text, as the message names it.
            tokens: Length of the text.
            new: Number of tokens that are to follow.
            remedy: What to do about a text that is too long.
            page: Documentation page to name in the error.

        Raises:
            SinkscopeError: It does not fit.
        """
        limit = self.max_positions
        if limit is None or tokens + new <= limit:
            return
        length = f"{tokens} tokens"
        if new > 0:
            length += f" and {new} more are to come"
            if tokens < limit:
                remedy += f", or ask for at most {limit - tokens} new tokens"
        raise SinkscopeError(
            f"{what} has {length}, but the context of {self.name} is {limit}: {remedy}",
            page=page,
        )

    @property
    def end_ids(self) -> list[int]:
        """Ids after which generation ends, as the model's generation configuration says."""
        ends = getattr(getattr(self.hf, "generation_config", None), "eos_token_id", None)
        if ends is None:
            return []
        if not isinstance(ends, list | tuple):
            ends = [ends]
        what = f"eos_token_id of the generation_config of {self.name}"
        return conform(list[between(int, -LARGEST_ID, LARGEST_ID)], list(ends), what, page="generate", strict=True)

    @property
    def embedding(self) -> nn.Module:
        """The token embedding."""
        return self.hf.get_submodule(self.adapter.embed)

    @property
    def device(self) -> torch.device:
        """Device on which token ids are expected."""
        return next(self.embedding.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the embedding, which is that of the residual stream."""
        return next(self.embedding.parameters()).dtype

    def is_mixture(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture of experts (some models mix both kinds)."""
        return self.has_part(layer, self.adapter.experts)

    def n_experts(self, layer: int) -> int:
        """Number of routed experts in a layer; 0 if it is not a mixture."""
        if self.is_mixture(layer):
            return self.experts(layer).count
        return 0

    def experts(self, layer: int) -> Experts:
        """The routed experts of a layer.

        Raises:
            UnsupportedError: Their weights are not plain tensors.
        """
        experts = experts_of(self.sub(layer, self.adapter.experts or ""))
        if experts is None:
            raise UnsupportedError(
                f"the experts of {self.name} hold no plain weights (quantised?): load the model dequantised to edit "
                "neurons of an expert",
                page="quantised-experts",
            )
        return experts

    def has_shared(self, layer: int) -> bool:
        """Whether the layer is a mixture with a shared expert, which processes every token beside the routed ones."""
        return self.is_mixture(layer) and self.has_part(layer, self.adapter.down)

    def has_mlp(self, layer: int, expert: int | None) -> bool:
        """Whether the layer has neurons of this expert; None: neurons of a dense MLP or a shared expert."""
        return self.is_mixture(layer) != (expert is None) or (expert is None and self.has_shared(layer))

    def mlp_part(self, layer: int, name: Literal["gate", "up", "down"]) -> nn.Module:
        """A projection of the layer's MLP, or of its shared expert if the layer is a mixture."""
        return self.sub(layer, getattr(self.adapter, name) or "")

    def mlp_writers(self, layer: int) -> list[nn.Module]:
        """The modules whose sum is what the MLP gives: one, or a mixture and a shared expert that stands beside it."""
        writers = [self.sub(layer, self.adapter.mlp)]
        mlp, down = self.path(layer, self.adapter.mlp), self.path(layer, self.adapter.down)
        if self.has_shared(layer) and not f"{down}.".startswith(f"{mlp}."):
            writers.append(self.mlp_part(layer, "down"))
        return writers

    def on_mlp(self, layer: int, see: Callable[[Tensor], None]) -> list[Hook]:
        """Hooks by which `see` gets what the MLP gives, before any norm behind it."""
        writers = self.mlp_writers(layer)
        given: list[Tensor] = []

        def keep(output: Any) -> None:
            given.append(first_tensor(output))
            if len(given) == len(writers):
                total = given[0]
                for other in given[1:]:
                    total = total + other.view_as(total)
                given.clear()
                see(total)

        return [(writer, "post", on_output(keep)) for writer in writers]

    def width(self, layer: int, expert: int | None = None) -> int:
        """Number of neurons of an expert; for None, of the layer's dense MLP or shared expert."""
        if expert is not None:
            return self.experts(layer).width
        return self._inputs(self.mlp_part(layer, "down"))

    def _inputs(self, projection: nn.Module) -> int:
        """Width of what a projection out of the layer reads."""
        linear: Any = getattr(projection, "base_layer", projection)  # inside an adapter
        weight = plain_weight(linear)
        if weight is None:  # quantised
            return int(linear.in_features)
        return int(weight.shape[0 if self.adapter.transposed_down else 1])

    def factor(self, layer: int, expert: int | None = None) -> float:
        """Constant between the column of a neuron and what the layer adds to the residual stream (or a norm reads)."""
        factor = self.adapter.down_factor
        if expert is not None:
            factor = self.adapter.expert_factor
        elif self.is_mixture(layer):
            factor = self.adapter.shared_factor
        return factor * self.adapter.write_factor

    def loaded(self, layer: int) -> AbstractContextManager[None]:
        """Context manager in which a layer's weights may be read and its parts called, outside a call of the layer.

        It only has an effect on streamed models (see `models.open`).
        """
        return nullcontext()

    @torch.no_grad()
    def w_out(self, layer: int, neurons: list[int], expert: int | None = None) -> Float[Tensor, "neuron d_model"]:
        """Columns of the down projection: what each neuron writes when its `hook_post` is 1.

        In a mixture, None means the shared expert. Routing weight and sigmoid gate are not included, constant factors
        up to the residual stream (or up to a norm behind the MLP) are.
        """
        with self.loaded(layer):
            if expert is not None:
                written = self.experts(layer).columns(expert, neurons)
            else:
                written = self.columns_of(self.mlp_part(layer, "down"), self.width(layer), neurons)
            factor = self.factor(layer, expert)
            if factor == 1:
                return written
            return written * factor

    @torch.no_grad()
    def columns_of(
        self, module: nn.Module, width: int, inputs: Sequence[int] | None = None
    ) -> Float[Tensor, "input output"]:
        """What a linear module of so many inputs gives when one of them is 1, without the bias.

        Args:
            module: The module.
            width: Number of its inputs.
            inputs: Inputs; None is all.
        """
        chosen = list(range(width) if inputs is None else inputs)
        weight = plain_weight(module)
        if weight is not None:
            if self.adapter.transposed_down:  # such an architecture stores all of them so
                return weight[chosen]
            return weight[:, chosen].T
        # Quantised or adapted weights: ask the module itself, but without its hooks; the last row gives its bias.
        device = next((parameter.device for parameter in module.parameters()), self.device)
        units = torch.zeros(len(chosen) + 1, width, device=device, dtype=self.dtype)
        units[range(len(chosen)), chosen] = 1
        given = module.forward(units)
        return given[:-1] - given[-1:]

    @torch.no_grad()
    def w_out_norms(self, layer: int, expert: int | None = None) -> Float[Tensor, " d_mlp"]:
        """L2 norm of every column of the down projection."""
        with self.loaded(layer):
            weight = None
            if expert is None:
                weight = plain_weight(self.mlp_part(layer, "down"))
            if weight is not None:
                return norms_of(weight, int(self.adapter.transposed_down)) * abs(self.factor(layer))
            parts = list[Tensor]()
            for neurons in torch.arange(self.width(layer, expert)).split(1024):
                parts.append(norms_of(self.w_out(layer, neurons.tolist(), expert), 1))
            return torch.cat(parts)

    @property
    def is_elsewhere(self) -> bool:
        """Whether weights that are not read layer by layer are on the meta device."""
        return self.resident and any(parameter.is_meta for parameter in self.hf.parameters())

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

    @torch.no_grad()
    def forward(
        self,
        ids: Int[Tensor, "batch pos"],
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        *,
        unembed: bool = False,
        upto: int | None = None,
        start: LayerInput | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one pass without a cache, and without the unembedding unless requested.

        The pass ends after layer `upto`, if one is given, or where a hook calls `stop`; it then returns None. If there
        is a `start`, the layers before it are skipped, and its layer gets what `start` holds.
        """
        self.check_loaded()
        kwargs.setdefault("use_cache", False)
        model = self.base
        if unembed:
            model = self.hf
        bounds: list[Any] = []
        skipping: AbstractContextManager[None] = nullcontext()
        if start is not None:
            hidden = start.hidden
            bounds.append((self.layers[start.layer], "pre", on_input(lambda _: hidden)))
            skipping = self.skipping(start.layer, start.wrapped)
        if upto is not None:
            bounds.append((self.layers[upto], "post", lambda *_: self.stop()))
        try:
            with skipping, self.hooks(*bounds):
                return model(input_ids=ids.to(self.device), attention_mask=attention_mask, **kwargs)
        except Stop:
            return None

    @property
    def skips_layers(self) -> bool:
        """Whether a pass may begin at a layer, with what entered it in another pass."""
        return self.adapter.from_any_layer and self.adapter.adds

    @contextmanager
    def skipping(self, count: int, wrapped: bool) -> Iterator[None]:
        """Context manager in which the first layers pass on what they get.

        Args:
            count: Number of these layers.
            wrapped: Whether the layers of the model return a tuple.
        """

        def passed_on(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
            if wrapped:
                return (hidden_states,)
            return hidden_states

        with ExitStack() as stack:
            for layer in self.layers[:count]:
                attributes = vars(layer)  # a bridge hands what is set on it to the module inside
                if "forward" in attributes:  # some libraries replace it as well
                    stack.callback(attributes.update, forward=attributes["forward"])
                else:
                    stack.callback(attributes.pop, "forward")
                attributes["forward"] = passed_on
            yield

    @staticmethod
    def stop() -> None:
        """End the running `forward`; to be called in a hook."""
        raise Stop

    @contextmanager
    def hooks(self, *hooks: Hook) -> Iterator[None]:
        """Context manager with hooks."""
        with uncompiled(), ExitStack() as stack:
            for module, when, fn in hooks:
                add = module.register_forward_hook
                if when == "pre":
                    add = module.register_forward_pre_hook
                stack.callback(add(fn, with_kwargs=True).remove)
            yield


def hidden_of(args: Args, kwargs: Kwargs) -> Tensor:
    """The hidden states among the arguments of a call."""
    if args:
        return args[0]
    return kwargs["hidden_states"]


def with_hidden(args: Args, kwargs: Kwargs, hidden: Tensor) -> tuple[Args, Kwargs]:
    """The arguments of a call, with other hidden states."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}


def on_input(fn: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
    """A forward pre-hook with kwargs: `fn` sees the hidden states that enter a module, and may return others."""

    def hook(_module: object, args: Args, kwargs: Kwargs) -> Any:
        new = fn(hidden_of(args, kwargs))
        if new is None:
            return None
        return with_hidden(args, kwargs, new)

    return hook


def on_output(fn: Callable[[Any], Any]) -> Callable[..., Any]:
    """A forward hook with kwargs: `fn` sees what a module returns, and may return something else."""
    return lambda _module, _args, _kwargs, output: fn(output)


def on_hidden(fn: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
    """A forward hook with kwargs: `fn` sees the hidden states that leave a module, and may return others."""

    def hook(_module: object, _args: object, _kwargs: object, output: Any) -> Any:
        new = fn(first_tensor(output))
        if new is None or not isinstance(output, tuple | list):
            return new
        return type(output)([new, *output[1:]])

    return hook


def kind_of(layer: nn.Module) -> str:
    """What layers with parameters of the same names and shapes have in common."""
    shapes = [(name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()]
    return f"{type(layer).__name__} {shapes}"


def plain_weight(module: Any) -> Tensor | None:
    """The floating-point weight matrix of a linear module, also below a bridge's wrapper; None if quantised."""
    if hasattr(module, "base_layer"):  # an adapter adds to what this weight says
        return None
    inner = getattr(module, "original_component", None)
    weight = getattr(inner if isinstance(inner, nn.Module) else module, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.ndim != 2:
        return None
    return weight.detach()


def first_tensor(output: Any) -> Tensor:
    """The hidden states in a layer's or attention module's output (a tensor, or a tuple that begins with one)."""
    if isinstance(output, tuple | list):
        return output[0]
    return output


def norm_of(resid: Float[Tensor, "... d_model"], without: Sequence[int] = ()) -> Float[Tensor, ...]:
    """L2 norm of a residual stream, in float32, without some of its dimensions."""
    resid = resid.contiguous()  # equal values in one layout have equal norms
    if without:
        is_kept = torch.ones(resid.shape[-1], dtype=torch.bool, device=resid.device)
        is_kept[list(without)] = False
        resid = resid[..., is_kept]
    return norms_of(resid)


def norms_of(tensor: Float[Tensor, ...], dim: int = -1) -> Float[Tensor, ...]:
    """L2 norms in float32; no smaller type is summed in itself."""
    return torch.linalg.vector_norm(tensor, dim=dim, dtype=torch.promote_types(tensor.dtype, torch.float32)).float()
