"""Open a model as a `Target` and read as little of a checkpoint as possible.

Decoder layers of a named model are read from disk when they are called, so that memory does not grow with depth.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.beside import TOKENIZER_FILES
from sinkscope.models.checkpoint import SafetensorsSource, check_depth
from sinkscope.models.config import (
    check_finite,
    check_vocabulary,
    new_model,
    parse_device,
    parse_dtype,
    read_checkpoint_json,
    read_config,
    read_tokenizer,
)
from sinkscope.models.finding import adapter_of
from sinkscope.models.fingerprint import fingerprint
from sinkscope.models.hub import hub_folder
from sinkscope.models.load import explained, load, quiet
from sinkscope.models.locate import ModelSource, locate
from sinkscope.models.names import BUNDLED
from sinkscope.models.stack import DRAFT, first_of_kinds, stack_of
from sinkscope.models.stored import check_unexpected, is_quantised
from sinkscope.models.target import Target, kind_of
from sinkscope.models.wrapped import target_of

_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.")  # unembeddings are not read; `Target.forward` ends before them
_LANGUAGE = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?")  # the text part of a vision-language checkpoint
_FIRST_LAYERS = 8  # layers of a GGUF file to begin with; they cannot be read one by one, and are doubled as needed
LAYER_BYTES = 1 << 30
"""Layers of a streamed model stay in memory up to this size, so small models are read once."""


@dataclass(frozen=True, eq=False)
class StreamTarget(Target):
    """A Target that holds the weights of only a few layers at a time.

    `forward` and calls of `layers[k]` read layer k when they reach it. Outside such calls, code that reads the weights
    of layer k or calls one of its parts must be inside `with target.loaded(k):`. There are no logits: `forward` ends
    at the last hidden state.

    Attributes:
        store: Reads and frees the layers; `store.source.read` lists the tensors read so far.
    """

    store: Any = None

    @contextlib.contextmanager
    def loaded(self, layer: int) -> Iterator[None]:
        """Keep the weights of layer `layer` in memory inside the `with`."""
        with self.store.pinned(layer):
            yield

    @contextlib.contextmanager
    def skipping(self, count: int, wrapped: bool) -> Iterator[None]:
        """The layers that are passed by are not read either."""
        with super().skipping(count, wrapped):
            self.store.skipped = count
            try:
                yield
            finally:
                self.store.skipped = 0


class _Store:
    """Reads the weights of a layer when the layer is called, and frees them when other layers need the room.

    Attributes:
        source: The checkpoint.
        resident: The number of layers that it holds in memory.
        skipped: The number of first layers that are called without being computed.
        reads: How often each layer was read.
    """

    def __init__(self, source: SafetensorsSource, loader: _Loader, layers: list[nn.Module], resident: int) -> None:
        self.source = source
        self._loader = loader
        self._layers = layers
        self.resident = resident
        self.skipped = 0
        self.reads: Counter[int] = Counter()
        self._empty = [layer.state_dict() for layer in layers]  # on meta: costs nothing
        self._in_memory: set[int] = set()
        self._pins: Counter[int] = Counter()
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._before, index))

    def _before(self, index: int, _module: nn.Module, _args: Any) -> None:
        if index >= self.skipped:
            self.load(index)

    def load(self, index: int) -> None:
        """Read the weights of layer `index`, unless they are in memory; other layers may have to leave it.

        A walk goes upward and the next one begins below, so the layer just below is needed last: it leaves first.
        """
        if index in self._in_memory:
            return
        for other in sorted(self._in_memory, key=lambda held: (held >= index, -held)):
            if len(self._in_memory) >= self.resident and not self._pins[other]:
                self._layers[other].load_state_dict(self._empty[other], assign=True)
                self._in_memory.remove(other)
        self._layers[index].load_state_dict(self._loader.layer(index), assign=True)
        self._in_memory.add(index)
        self.reads[index] += 1

    @contextlib.contextmanager
    def pinned(self, index: int) -> Iterator[None]:
        self.load(index)
        self._pins[index] += 1
        try:
            yield
        finally:
            self._pins[index] -= 1


class _Loader:
    """Makes modules from parts of a checkpoint. transformers loads them, so its renames, fusions and dtypes apply."""

    def __init__(
        self, source: SafetensorsSource, config: Any, *, device: str | torch.device, dtype: torch.dtype
    ) -> None:
        self._source, self._config, self._device, self._dtype = source, config, device, dtype
        with torch.device("meta"):
            self.causal = new_model(config, self._dtype).eval().requires_grad_(False)
        prefix = self.causal.base_model_prefix
        self._base_class = type(getattr(self.causal, prefix))
        self.stack = stack_of(self.causal)
        self._path = self.stack.removeprefix(f"{prefix}.")  # of the layers, below an object of that class
        self._split()

    def _split(self) -> None:
        """Sort the tensors of the checkpoint by layer, and leave out the unembedding."""
        stack = self.stack.rsplit(".", 1)[-1]
        pattern = re.compile(rf"^((?:.*?\.)?{stack}\.)(\d+)(\..*)$")
        nested = any(_LANGUAGE.match(name) for name in self._source.weight_map)
        self._outside: dict[str, str] = {}  # name in the checkpoint -> name to load it by
        self._inside: dict[int, dict[str, str]] = {}
        for name in self._source.weight_map:
            if _HEAD.search(name) or (nested and not _LANGUAGE.match(name)):
                continue
            key = name
            if nested:
                key = _LANGUAGE.sub("model.", name)
            match = pattern.match(key)
            if match is None:
                self._outside[name] = key
            else:
                head, layer, tail = match.groups()
                self._inside.setdefault(int(layer), {})[name] = f"{head}0{tail}"

    def base(self) -> nn.Module:
        """The base of the model. It is whole except for the weights of its layers, which are on the meta device."""
        shallow = copy.deepcopy(self._config)
        shallow.num_hidden_layers = 0
        base = self._make(shallow, self._outside, "the part around the layers")
        for module in base.modules():
            if hasattr(module, "config"):
                module.config = self._config  # forward passes read the depth and the layer types from it
        parent, _, leaf = self._path.rpartition(".")
        layers = self.causal.get_submodule(self.stack)
        setattr(base.get_submodule(parent), leaf, layers)
        return base

    def layer(self, index: int) -> dict[str, Tensor]:
        """The weights of one decoder layer, by the names of its module."""
        names = self._inside.get(index, {})
        single = copy.deepcopy(self._config)
        single.num_hidden_layers, single.vocab_size, single.pad_token_id = 1, 1, 0
        if getattr(single, "layer_types", None):
            single.layer_types = [self._config.layer_types[index]]
        if hasattr(single, "mlp_only_layers"):
            # The rule of the whole model goes by the number of a layer, so the single layer is told what it is there.
            single.mlp_only_layers = []
            if not any(parameter.ndim == 3 for parameter in self._empty(index).parameters()):
                single.mlp_only_layers = [0]
            single.decoder_sparse_step = 1
        if hasattr(single, "first_k_dense_replace"):
            single.first_k_dense_replace = int(index < single.first_k_dense_replace)
        alone = f"{self._path}.0"
        with torch.device("meta"):
            made = self._base_class(single).get_submodule(alone)
        if kind_of(made) != kind_of(self._empty(index)):
            raise UnsupportedError(
                f"layer {index} of {self._source.name} alone is of another kind than in the whole model; load it whole "
                "with sinkscope.load(...)",
                page="not-streamable",
            )
        module = self._make(single, names, f"layer {index}", alone, f"{self._path}.{index}")
        return module.get_submodule(alone).state_dict()

    def _empty(self, index: int) -> Any:
        """A layer of the whole model, on meta."""
        return self.causal.get_submodule(f"{self.stack}.{index}")

    def _make(self, config: Any, names: dict[str, str], what: str, part: str = "", truly: str = "") -> nn.Module:
        """Make an object of the base class from these tensors, which must include every tensor below `part`.

        In the whole model, `part` is called `truly`.
        """
        state = {names[name]: tensor for name, tensor in self._source.tensors(names).items()}
        try:
            with quiet(bars=False), torch.random.fork_rng(devices=[]):
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
        absent = [name for name in sorted(info["missing_keys"]) if name.startswith(part)]
        if absent:
            first = absent[0].removeprefix(f"{part}.")
            raise SinkscopeError(
                f"{self._source.name} lacks tensors of {what}, the first is {first}; get the whole checkpoint",
                page="missing-tensors",
            )
        origins = {new: stored for stored, new in names.items()}
        check_unexpected(module, info["unexpected_keys"], self._source.name, origins)
        path = f"{self.causal.base_model_prefix}.{truly}".rstrip(".")
        check_finite(module.get_submodule(part), self._source.name, f"{path}.")  # what is outside holds random numbers
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
    """Open a checkpoint as a model whose layers are read when they are called and freed afterwards.

    Args:
        source: A folder (a Path), a hub id (a str), or an opened source, as in
            ``SafetensorsSource("org/name", revision="v2")``.
        dtype: Dtype of the weights in memory, whatever it is on disk.
        device: Device on which layers are computed.
        resident: Number of layers in memory at a time.
        tokenizer: Tokenizer of the Target.
        name: Name of the Target; by default the name of the source.

    Raises:
        SinkscopeError: The checkpoint is incomplete.
        UnsupportedError: The checkpoint is quantised or has no safetensors, or its architecture has no adapter; such
            models must be loaded whole.
    """
    if not isinstance(source, SafetensorsSource):
        source = SafetensorsSource(source)
    check_depth(source.name, read_checkpoint_json(source.folder / "config.json"), source.weight_map)
    config = read_config(name or source.name, source.folder)
    try:
        if is_quantised(config):
            raise UnsupportedError("it is quantised", page="unsupported-model")
        loader = _Loader(source, config.get_text_config(), device=device, dtype=dtype)
        causal = loader.causal
        setattr(causal, causal.base_model_prefix, loader.base())
        unembedding = causal.get_output_embeddings()
        if unembedding is not None:
            unembedding.register_forward_pre_hook(_no_logits)
        layers = list(causal.get_submodule(loader.stack).children())
        store = _Store(source, loader, layers, max(resident, 2))  # two, while the adapter is inferred and proved
        target = StreamTarget(causal, causal, "hf", DRAFT, tokenizer, name or source.name, resident=False, store=store)
        target = replace(target, adapter=adapter_of(target))
        target.forward(torch.zeros(1, 4, dtype=torch.long), upto=max(first_of_kinds(target)))  # or it is loaded whole
        store.resident = resident
        return target
    except (MemoryError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, SinkscopeError) and error.page not in ("unsupported-model", "missing-tensors"):
            raise
        raise UnsupportedError(  # its layers, or the part around them, may be such that they cannot be made alone
            f"{source.name} cannot be read layer by layer ({error}); load it whole with sinkscope.load(...)",
            page="not-streamable",
        ) from error


def _no_logits(_module: nn.Module, _args: Any) -> None:
    raise UnsupportedError(
        "this model is read layer by layer and computes no logits; load it whole with sinkscope.load(...)",
        page="not-streamable",
    )


@dataclass(frozen=True, eq=False)
class PartTarget(Target):
    """The first layers of a deeper model.

    Attributes:
        depth: Number of decoder layers of the whole model.
        reopen: Function that opens the model again with a given number of layers.
    """

    depth: int = 0
    reopen: Callable[[int], Target] | None = None

    @property
    def n_layers(self) -> int:
        """Number of decoder layers of the whole model."""
        return self.depth

    def more(self) -> Target:
        """The same model with twice as many layers, up to the whole model."""
        assert self.reopen is not None
        return self.reopen(2 * len(self.layers))


def open_target(
    model: object,
    tokenizer: Any,
    revision: str | None,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    trust_remote_code: bool,
    needed: bool = True,
) -> Target:
    """Open a live model, the bundled model (in memory), or a named model (streamed from disk if possible).

    Raises:
        SinkscopeError: `model` is not a model, cannot be read, or has no tokenizer although it is `needed`.
    """
    options: dict[str, Any] = {
        "revision": revision,
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
    }
    is_bundled = model is None or model == BUNDLED
    if not (model is None or isinstance(model, str | os.PathLike)):
        return _with_tokenizer(target_of(model, tokenizer), needed)
    source = locate(model, revision)
    if not (is_bundled or source.kind == "gguf" or source.planted or trust_remote_code):
        try:
            with quiet(), explained(source):
                return _stream(source, tokenizer, dtype, device)
        except UnsupportedError as error:
            if error.page != "not-streamable":
                raise

    def opened(layers: int | None) -> Target:
        # The bundled model needs no probe at every start, because the tests check its circuit.
        hf = load(model, backend="hf", tokenizer=tokenizer, layers=layers, probe=not is_bundled, **options)
        return _with_tokenizer(target_of(hf))

    if source.kind != "gguf":
        return opened(None)
    return _first_layers(opened, _gguf_depth(Path(source.where)), _FIRST_LAYERS)


def _first_layers(opened: Callable[[int | None], Target], depth: int, layers: int) -> Target:
    if layers >= depth:
        return opened(None)
    part = opened(layers)
    return PartTarget(
        part.model,
        part.hf,
        part.kind,
        part.adapter,
        part.tokenizer,
        part.name,
        resident=False,
        depth=depth,
        reopen=lambda more: _first_layers(opened, depth, more),
    )


def _gguf_depth(file: Path) -> int:
    """Number of layers of the whole model; 0 if the file does not state it, which `load` then explains."""
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(file.parent, gguf_file=file.name).get_text_config().num_hidden_layers)
    except Exception:  # a damaged file may fail in any way
        return 0


def streamed_dtype(place: torch.device) -> torch.dtype:
    """The type in which layers are read one by one on a device, if none is asked for.

    On a CPU half precision is slow, and only a few layers are in memory at a time.
    """
    return torch.float32 if place.type == "cpu" else torch.bfloat16


def _stream(
    source: ModelSource, tokenizer: Any, dtype: torch.dtype | str | None, device: torch.device | str | None
) -> Target:
    place = parse_device(device)
    kind = parse_dtype(dtype) or streamed_dtype(place)
    tensors = SafetensorsSource(source.where, revision=source.revision)
    target = open_stream(tensors, dtype=kind, device=place, resident=1, tokenizer=tokenizer, name=source.name)
    per_layer = sum(p.numel() for p in target.layers[-1].parameters()) * kind.itemsize
    target.store.resident = max(1, LAYER_BYTES // max(per_layer, 1))
    target = _with_tokenizer(target)
    check_vocabulary(target.tokenizer, target.hf)
    return target


def _with_tokenizer(target: Target, needed: bool = True) -> Target:
    if target.tokenizer is not None:
        return target
    if isinstance(target, StreamTarget):
        source = target.store.source
        if source.commit is not None:
            hub_folder(source.name, source.commit, TOKENIZER_FILES)
        tokenizer = read_tokenizer(target.name, source.folder)
    else:
        tokenizer = target.available_tokenizer
    target = replace(target, tokenizer=tokenizer)
    if needed:
        target.need_tokenizer()
    return target


def fingerprint_of(target: Target) -> str:
    """Fingerprint of the checkpoint being read or loaded by `load`, or of the live model.

    A model whose weights have changed since it was loaded gets a fingerprint of its own.
    """
    if isinstance(target, StreamTarget):
        return fingerprint(target.store.source)
    here = fingerprint(target.hf)
    files, loaded = getattr(target.hf, "sinkscope_origin", ("", ""))
    if here == loaded:
        return files
    return here


def is_checkpoint(target: Target, wanted: str) -> bool:
    """Whether the model, or the checkpoint from which transformers says it was loaded, has this fingerprint."""
    where = Path(getattr(target.hf.config, "_name_or_path", "") or "/dev/null")
    if wanted in (fingerprint_of(target), getattr(target.hf.config, "_commit_hash", None)):
        return True
    with contextlib.suppress(SinkscopeError, OSError):
        return not hasattr(target.hf, "sinkscope_origin") and where.is_dir() and fingerprint(where) == wanted
    return False
