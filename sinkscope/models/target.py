"""A model as sinkscope sees it: its parts, its sizes, and a pass over it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sinkscope.errors import UnsupportedError
from sinkscope.models.call_cache import parameters_of
from sinkscope.models.hooks import Hook, first_tensor, hidden_of, on_input, on_output
from sinkscope.models.modules.parts import Parts

_COMPILER = threading.Lock()
_SKIPPING = threading.RLock()  # while layers of some model are skipped, in one thread
_FORCED: list[AbstractContextManager[None]] = []  # a stance of the compiler for each that asks; all threads share it


@contextmanager
def without_compiler() -> Iterator[None]:
    """Context manager in which everything that `torch.compile` made, in the whole process, runs uncompiled."""
    with _COMPILER:
        _FORCED.append(torch.compiler.set_stance("force_eager"))
        _FORCED[-1].__enter__()
    try:
        yield
    finally:
        with _COMPILER:
            _FORCED.pop().__exit__(None, None, None)  # the first one's, which sets back what was before, comes last


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


def _of_this_thread(fn: Callable[..., Any], arguments: int) -> Callable[..., Any]:
    """A hook that acts in calls of this thread alone."""
    owner = threading.get_ident()

    def hook(*given: Any) -> Any:
        # PyTorch adds a hook before it notes that the hook takes keywords: a call that runs meanwhile gives none.
        if threading.get_ident() != owner or len(given) != arguments:
            return None
        return fn(*given)

    return hook


class Target(Parts):
    """A model as every measurement and intervention of sinkscope sees it. The model is not changed.

    Whether the user holds a plain Hugging Face, TransformerBridge or nnsight object makes no difference.
    """

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
        bounds: list[Any] = []
        skipping: AbstractContextManager[None] = nullcontext()
        if start is not None:
            hidden = start.hidden
            bounds.append((self.layers[start.layer], "first", on_input(lambda _: hidden)))  # edits there act on it
            skipping = self.skipping(start.layer, start.wrapped)
        if last_layer is not None:
            bounds.append((self.layers[last_layer], "post", lambda *_: self.stop()))
        try:
            with skipping, self.hooks(*bounds):
                return model(input_ids=ids.to(self.device), attention_mask=attention_mask, **kwargs)
        except Stop:
            return None

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

    @property
    def skips_layers(self) -> bool:
        """Whether a pass may begin at a layer, with what entered it in another pass."""
        return self.adapter.from_any_layer and self.adapter.adds

    @contextmanager
    def skipping(self, count: int, wrapped: bool) -> Iterator[None]:
        """Context manager in which the first layers pass on what they get in this thread; no other enters it meanwhile.

        Args:
            count: Number of these layers.
            wrapped: Whether the layers of the model return a tuple.
        """
        owner = threading.get_ident()

        def passing_on(run: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() != owner:
                    return run(*args, **kwargs)
                hidden = hidden_of(args, kwargs)
                return (hidden,) if wrapped else hidden

            return forward

        with _SKIPPING, ExitStack() as stack:
            for layer in self.layers[:count]:
                attributes = vars(layer)  # a bridge hands what is set on it to the module inside
                run = layer.forward
                if "forward" in attributes:  # some libraries replace it as well
                    stack.callback(attributes.update, forward=attributes["forward"])
                else:
                    stack.callback(attributes.pop, "forward")
                attributes["forward"] = passing_on(run)
            if self.store is not None:  # they are not read either
                self.store.skipped = count
                stack.callback(setattr, self.store, "skipped", 0)
            yield

    @staticmethod
    def stop() -> None:
        """End the running `forward`; to be called in a hook."""
        raise Stop

    @contextmanager
    def hooks(self, *hooks: Hook, owned: bool = True) -> Iterator[None]:
        """Context manager with hooks.

        Args:
            hooks: The hooks.
            owned: Whether they see the calls of this thread alone, whatever other threads do with the model meanwhile.
        """
        with without_compiler(), ExitStack() as stack:
            for module, when, fn in hooks:
                if owned:
                    fn = _of_this_thread(fn, 3 if when in ("first", "pre") else 4)
                if when in ("first", "pre"):
                    handle = module.register_forward_pre_hook(fn, with_kwargs=True, prepend=when == "first")
                else:
                    handle = module.register_forward_hook(fn, with_kwargs=True, always_call=when == "always")
                stack.callback(handle.remove)
            yield

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
