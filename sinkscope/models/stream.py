"""Models whose decoder layers are read from disk as they are called, so that memory does not grow with depth."""

from __future__ import annotations

import copy
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.adapters import Adapter, adapter_for
from sinkscope.models.checkpoint import SafetensorsSource
from sinkscope.models.config import check_finite, read_config
from sinkscope.models.load import quiet
from sinkscope.models.target import Target

_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.")  # unembeddings are not read: `Target.forward` ends before them
_LANGUAGE = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?")  # the text part of a vision-language checkpoint


@dataclass(frozen=True, eq=False)
class StreamTarget(Target):
    """A Target that holds the weights of a few layers at a time.

    `forward` and calls of `layers[k]` read layer k when they come to it. Whoever reads weights of a layer, or calls a
    part of it, outside such a call does so in `with target.loaded(k):`. There are no logits: `forward` ends at the last
    hidden state.

    Attributes:
        store: reads and frees the layers; `store.source.read` names the tensors read so far.
    """

    store: Any = None

    @contextmanager
    def loaded(self, layer: int) -> Iterator[None]:
        """Layer `layer` holds its weights inside the `with`."""
        with self.store.pinned(layer):
            yield


class _Store:
    """Moves the weights of layers in when they are called and out when others need the room."""

    def __init__(self, source: SafetensorsSource, loader: _Loader, layers: list[nn.Module], resident: int) -> None:
        self.source = source
        self._loader = loader
        self._layers = layers
        self._resident = resident
        self._empty = [layer.state_dict() for layer in layers]  # on meta: costs nothing
        self._held: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._pins: Counter[int] = Counter()
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._before, index))

    def _before(self, index: int, _module: nn.Module, _args: Any) -> None:
        self.load(index)

    def load(self, index: int) -> None:
        """Layer `index` holds its weights from here on, until `resident` others were called."""
        if index in self._held:
            self._held.move_to_end(index)
            return
        for other in [i for i in self._held if not self._pins[i]]:
            if len(self._held) < self._resident:
                break
            self._layers[other].load_state_dict(self._empty[other], assign=True)
            del self._held[other]
        self._layers[index].load_state_dict(self._loader.layer(index), assign=True)
        self._held[index] = None

    def hold(self, resident: int) -> None:
        """Hold up to `resident` layers from here on."""
        self._resident = resident

    @contextmanager
    def pinned(self, index: int) -> Iterator[None]:
        self.load(index)
        self._pins[index] += 1
        try:
            yield
        finally:
            self._pins[index] -= 1


class _Loader:
    """Makes modules from parts of a checkpoint, through transformers' own loading (its renames, fusions and dtypes)."""

    def __init__(self, source: SafetensorsSource, config: Any, adapter: Adapter, **options: Any) -> None:
        self._source, self._config, self._adapter = source, config, adapter
        self._device, self._dtype = options["device"], options["dtype"]
        with torch.device("meta"):
            from transformers import AutoModelForCausalLM

            made = AutoModelForCausalLM.from_config(config, dtype=self._dtype, trust_remote_code=False)
            self.causal = made.eval().requires_grad_(False)
        prefix = self.causal.base_model_prefix
        self._base_class = type(getattr(self.causal, prefix))
        self._path = adapter.layers.removeprefix(f"{prefix}.")  # of the layers, below an object of that class
        self._split()

    def _split(self) -> None:
        """Sort the tensors of the checkpoint: those of layer k, those of none; the unembedding is left out."""
        stack = self._adapter.layers.rsplit(".", 1)[-1]
        pattern = re.compile(rf"^((?:.*?\.)?{stack}\.)(\d+)(\..*)$")
        nested = any(_LANGUAGE.match(name) for name in self._source.weight_map)
        self._outside: dict[str, str] = {}  # name in the checkpoint -> name to load it by
        self._inside: dict[int, dict[str, str]] = {}
        for name in self._source.weight_map:
            if _HEAD.search(name) or (nested and not _LANGUAGE.match(name)):
                continue
            key = _LANGUAGE.sub("model.", name) if nested else name
            if found := pattern.match(key):
                head, layer, tail = found.groups()
                self._inside.setdefault(int(layer), {})[name] = f"{head}0{tail}"
            else:
                self._outside[name] = key

    def base(self) -> nn.Module:
        """The base of the model, whole but for the weights of its layers, which are on meta."""
        shallow = copy.deepcopy(self._config)
        shallow.num_hidden_layers = 0
        base = self._make(shallow, self._outside, "the part around the layers")
        for module in base.modules():
            if hasattr(module, "config"):
                module.config = self._config  # the passes below read depth and layer types from it
        parent, _, leaf = self._path.rpartition(".")
        layers = self.causal.get_submodule(self._adapter.layers)
        setattr(base.get_submodule(parent), leaf, layers)
        return base

    def layer(self, index: int) -> dict[str, Tensor]:
        """The weights of one decoder layer, by the names of its module."""
        names = self._inside.get(index)
        if not names:
            raise SinkscopeError(
                f"{self._source.name} has no tensors of layer {index}, but its config.json says "
                f"{self._config.num_hidden_layers} layers; get the whole checkpoint",
                page="missing-tensors",
            )
        single = copy.deepcopy(self._config)
        single.num_hidden_layers, single.vocab_size, single.pad_token_id = 1, 1, None
        if getattr(single, "layer_types", None):
            single.layer_types = [self._config.layer_types[index]]
        if hasattr(single, "mlp_only_layers"):
            # The one layer has to be dense or a mixture as it is in the whole model, whose rule counts positions.
            whole = Target(self.causal, self.causal, "hf", self._adapter)
            single.mlp_only_layers = [] if whole.is_mixture(index) else [0]
            single.decoder_sparse_step = 1
        made = self._make(single, names, f"layer {index}", f"{self._path}.0", f"{self._path}.{index}")
        return made.get_submodule(f"{self._path}.0").state_dict()

    def _make(self, config: Any, names: dict[str, str], what: str, part: str = "", truly: str = "") -> nn.Module:
        """An object of the base class from these tensors; of its tensors, those below `part` must all be there.

        `truly` is what `part` is called in the whole model.
        """
        state = {names[name]: tensor for name, tensor in self._source.tensors(names).items()}
        try:
            with (
                quiet(bars=False),
                torch.random.fork_rng(devices=[]),
            ):
                module, info = self._base_class.from_pretrained(
                    None, config=config, state_dict=state, dtype=self._dtype, output_loading_info=True
                )
        except RuntimeError as error:
            if "size" not in str(error) and "shape" not in str(error):
                raise
            raise SinkscopeError(
                f"the shapes of {what} in {self._source.name} are not those of its config.json: config and weights are "
                "of different models; download both from one revision",
                page="missing-tensors",
            ) from error
        if absent := sorted(k.removeprefix(f"{part}.") for k in info["missing_keys"] if k.startswith(part)):
            raise SinkscopeError(
                f"{self._source.name} lacks tensors of {what}, the first is {absent[0]}; get the whole checkpoint",
                page="missing-tensors",
            )
        prefix = f"{self.causal.base_model_prefix}.{truly}"  # what lies outside `part` was drawn at random
        check_finite(module, self._source.name, lambda n: prefix + n.removeprefix(part) if n.startswith(part) else "")
        return module.eval().requires_grad_(False).to(self._device)


def open_stream(
    source: SafetensorsSource | str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    resident: int = 2,
    tokenizer: Any = None,
    name: str | None = None,
) -> StreamTarget:
    """View a checkpoint as a model whose layers are read as they are called and freed afterwards.

    Args:
        source: a folder (a Path), a hub id (a str), or an opened source, as in
            ``SafetensorsSource("org/name", revision="v2")``.
        dtype: of the weights in memory, whatever they are on disk.
        device: where layers are computed.
        resident: layers held in memory at a time.
        tokenizer: goes into the Target as it is.
        name: goes into the Target; by default the source's.

    Raises:
        SinkscopeError: the checkpoint is incomplete.
        UnsupportedError: no safetensors, a quantised checkpoint, or an architecture without an adapter; load those
            whole.
    """
    if resident < 1:
        raise SinkscopeError(f"resident={resident}: at least 1 layer has to be in memory")
    if not isinstance(source, SafetensorsSource):
        source = SafetensorsSource(source)
    whole = read_config(name or source.name, source.folder)
    config = whole.get_text_config()
    adapter = adapter_for(config.model_type)
    if getattr(whole, "quantization_config", None):
        raise UnsupportedError(
            f"{source.name} is quantised, so its layers cannot be read one by one; load it whole with "
            "sinkscope.load(...)",
            page="not-streamable",
        )
    loader = _Loader(source, config, adapter, device=device, dtype=dtype)
    causal = loader.causal
    setattr(causal, causal.base_model_prefix, loader.base())
    if (head := causal.get_output_embeddings()) is not None:
        head.register_forward_pre_hook(_no_logits)
    layers = list(causal.get_submodule(adapter.layers).children())
    store = _Store(source, loader, layers, resident)
    return StreamTarget(causal, causal, "hf", adapter, tokenizer, name or source.name, resident=False, store=store)


def _no_logits(_module: nn.Module, _args: Any) -> None:
    raise UnsupportedError(
        "this model is read layer by layer and computes no logits; load it whole with sinkscope.load(...)",
        page="not-streamable",
    )
