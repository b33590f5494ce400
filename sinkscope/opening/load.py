"""Open a model as a `Target`: one that a user holds, or one by name, of which as little is read as possible."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sinkscope.engine.attention import set_attention, stock_of
from sinkscope.errors import SinkscopeError, UnsupportedError, warn
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.plain import pathless
from sinkscope.files.progress import world_size
from sinkscope.models.adapters import DRAFT
from sinkscope.models.checkpoints.checkpoint import (
    BUNDLED,
    Files,
    fingerprint_of,
    model_with_weights,
    quiet,
)
from sinkscope.models.checkpoints.config import (
    check_finite,
    check_vocabulary,
    loading_errors,
    parse_device,
    parse_dtype,
)
from sinkscope.models.checkpoints.gguf_file import forget_vocabulary, parsed_once
from sinkscope.models.checkpoints.stream import LayerStore
from sinkscope.models.describe import as_page
from sinkscope.models.shards import split_weight
from sinkscope.models.target import ModelKind, Target, check_divides
from sinkscope.opening.memory import free_memory
from sinkscope.opening.parts import adapter_of

_SPLITTING = ("FSDPModule", "FullyShardedDataParallel", "PipelineIdentityLayer")
"""Classes of modules that show that a model is split in an unserved way."""
_FAULTY = "cuda"
"""Kind of device on which SDPA may show the last query only the first key, where query heads share one head of keys.

PyTorch's memory-efficient attention takes the first row of the mask if a single query is left for a program
(pytorch/pytorch#191937; seen with 2.11 on an H100).
"""
SHARE = 0.5  # of the free memory that weights may take: the rest is for what is computed


# -- a model that a user holds -----------------------------------------------------------------------------------------


def _is_served(hf: Any, kind: ModelKind) -> bool:
    """Whether a model is whole, or a plain one that transformers has split by tensor parallelism alone."""
    if any(cls.__name__ in _SPLITTING for module in hf.modules() for cls in type(module).__mro__):
        return False
    if split_weight(hf) is None:
        return (getattr(hf, "tp_size", None) or 1) == 1
    settings = getattr(hf.config, "distributed_config", None)
    return kind == "hf" and settings is not None and max(settings.dp_size, settings.ep_size) <= 1


def _inside(model: Any) -> tuple[Any, ModelKind]:
    """The plain Hugging Face module inside `model`, and the kind of object that `model` is.

    Weights of a model of nnsight that was made by name are loaded.

    Raises:
        SinkscopeError: `model` is none of the three kinds.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return _inside(model.module)
    if hasattr(model, "_orig_mod"):  # compiled
        return _inside(model._orig_mod)
    if hasattr(model, "original_model"):
        return model.original_model, "bridge"
    if any(cls.__module__.startswith("nnsight.") for cls in type(model).__mro__):
        if hasattr(model, "dispatch"):
            model.dispatch()  # one made by name has none before its first trace; this does nothing afterwards
        return getattr(model, "_module", None) or model._model, "nnsight"
    if hasattr(model, "get_base_model"):  # of PEFT
        if any(config.is_prompt_learning for config in model.peft_config.values()):
            raise UnsupportedError(
                f"this {type(model).__name__} puts learned tokens before the text, which sinkscope does not see: "
                "measure the model without it, or an adapter in the weights, such as LoRA"
            )
        return _inside(model.get_base_model())
    if isinstance(model, nn.Module) and hasattr(model, "config"):
        return model, "hf"
    raise SinkscopeError(
        f"{type(model).__name__} is not a model: expected a Hugging Face causal language model, a TransformerBridge "
        "or a model of nnsight (TransformersModel); load names and folders with sinkscope.load(...)"
    )


def target_of(model: Any, tokenizer: Any = None, store: LayerStore | None = None) -> Target:
    """View `model` as a Target (a Target is returned unchanged).

    Weights of a model of nnsight that was made by name are loaded. If the attention of a model may be wrong on its
    device, one that sinkscope has loaded attends eagerly, and of others a warning says so.

    Args:
        model: The model.
        tokenizer: The tokenizer, if the model carries none.
        store: Reads its layers when they are called, if it is not in memory.

    Raises:
        SinkscopeError: `model` is no model, or holds no weights, or the tokenizer belongs to another model.
        UnsupportedError: It is split over processes in an unserved way, or of an architecture that is not known.
    """
    if isinstance(model, Target):
        return model
    hf, kind = _inside(model)
    if not _is_served(hf, kind):
        raise UnsupportedError(
            f"this {type(model).__name__} is split over processes in a way that is not served (FSDP, a pipeline, "
            "experts, DTensors of one's own, transformers before 5.19): load it in one process (device_map= spreads it "
            "over devices), or let transformers split a plain model by tensor parallelism alone"
        )
    if tokenizer is None:  # a bridge and nnsight change theirs, `load` keeps the original on the module
        tokenizer = getattr(hf, "tokenizer", None) or getattr(model, "tokenizer", None)
    if tokenizer is not None and not callable(tokenizer):
        raise SinkscopeError(f"tokenizer={tokenizer!r}: expected a tokenizer of transformers")
    own_name = getattr(hf, "sinkscope_name", None)
    name = Path(own_name or getattr(hf.config, "_name_or_path", "") or type(hf).__name__).name
    embedding = hf.get_input_embeddings()
    if hasattr(tokenizer, "vocab_size"):
        check_vocabulary(tokenizer, embedding)
    if next(embedding.parameters()).is_meta and not hasattr(embedding, "_hf_hook"):
        raise UnsupportedError(
            f"{name} holds no weights yet (they are on the meta device): load it with sinkscope.load(...), or "
            "make it with dispatch=True (nnsight)"
        )
    draft = Target(model, hf, kind, DRAFT, tokenizer, name, store)
    target = replace(draft, adapter=adapter_of(draft))
    shares_one = target.n_heads > 1 and target.n_kv_heads <= target.processes
    if shares_one and target.device.type == _FAULTY and stock_of(target.config).kind == "sdpa":
        if own_name is None:
            warn(
                f"{name} runs with SDPA attention, which PyTorch may get wrong on {target.device} at the last token "
                "of rows of 1 + 32 n tokens; load it with attn_implementation='eager' or sinkscope.load"
            )
        else:
            for config in target.configs:
                set_attention(config, "eager")
    return target


# -- a model by name ---------------------------------------------------------------------------------------------------


@checks_arguments
@torch.inference_mode(False)
def load(
    x: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    device_map: Any = None,
    quantization_config: Any = None,
    tokenizer: Any = None,
) -> Any:
    """Load a model.

    Args:
        x: Short name (`sinkscope.list_models()` lists them), hub id `org/name`, folder or `.gguf` file. None loads the
            model inside this package.
        revision: Branch, tag or commit of a hub id.
        dtype: torch dtype or its name ("float32", "bfloat16", ...). None uses the checkpoint's.
        device: "cpu", "cuda", "cuda:1" or "mps". None uses the first cuda device if there is one, else the CPU; under
            torchrun, transformers splits the model over the processes by tensor parallelism.
        device_map: Passed on to transformers instead of `device`.
        quantization_config: Passed on to transformers.
        tokenizer: Tokenizer to use instead of the one stored with the weights.

    Returns:
        Hugging Face model, in eval mode. Its tokenizer is kept on it as `tokenizer`, its name as `sinkscope_name`.
        TransformerLens and nnsight wrap it (`docs/other_libraries.md`).

    Raises:
        SinkscopeError: The model cannot be loaded; one line says what is wrong and what to do.
        UnsupportedError: The architecture has no adapter.
    """
    if device_map is not None and device is not None:
        raise SinkscopeError(f"device {str(device)!r} and device_map exclude each other; give one of them")
    options = {"dtype": parse_dtype(dtype) or "auto", "quantization_config": quantization_config}
    is_split = world_size() > 1 and device_map is None and device is None
    name = os.fspath(x or BUNDLED)
    with quiet(), loading_errors(pathless(name)), ExitStack() as stack:
        place = parse_device(device)
        if device_map is None and not is_split and place.type != "cpu":
            device_map = {"": place}
        files = Files(x, revision)
        if files.gguf is not None:
            stack.enter_context(parsed_once())
        config = files.read_config()
        if is_split:
            from transformers.distributed import DistributedConfig  # from 5.19 on

            check_divides(config, files.name, world_size())
            options["distributed_config"] = DistributedConfig(tp_size=world_size())
        if files.gguf is not None:
            tokenizer = tokenizer or files.read_tokenizer()
            forget_vocabulary(files.folder / files.gguf)
        hf = model_with_weights(files, config, {**options, "device_map": device_map})
        check_finite(hf)
        target = _ours(hf, files, tokenizer)
        if files.commit is not None:
            _note_origin(target, files, is_quantised=quantization_config is not None)
    _show_in_notebooks()
    return hf


def _note_origin(target: Target, files: Files, *, is_quantised: bool) -> None:
    """Note on a model from which commit of the hub it is; one that was quantised is no longer that."""
    target.hf.config._name_or_path = files.repo
    target.hf.config._commit_hash = files.commit
    if not is_quantised:
        target.hf.sinkscope_origin = files.commit, fingerprint_of(target)


def _show_in_notebooks() -> None:
    """Let IPython, where it runs, show models that were loaded here as a tree of what was proved."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        shell.display_formatter.formatters["text/html"].for_type(PreTrainedModel, page_of)


def page_of(hf: PreTrainedModel) -> str | None:
    """Return the tree of a model that was loaded here; None of another one, which IPython then shows as ever."""
    return as_page(target_of(hf)) if hasattr(hf, "sinkscope_name") else None


def _ours(hf: Any, files: Files, tokenizer: Any, store: LayerStore | None = None) -> Target:
    """A model that was just opened, which gets its tokenizer and its name."""
    hf.sinkscope_name, hf.tokenizer = files.name, tokenizer or files.read_tokenizer()
    check_vocabulary(hf.tokenizer, hf.get_input_embeddings())
    return target_of(hf, hf.tokenizer, store)


def _stream(files: Files, dtype: Any, device: Any, tokenizer: Any) -> Target:
    """Open a checkpoint as a model whose layers are read when they are called and freed afterwards.

    Raises:
        SinkscopeError: The checkpoint is damaged.
        UnsupportedError: It has to be loaded whole.
    """
    if files.gguf is not None:
        raise UnsupportedError(f"{files.name} is a GGUF file, which is loaded whole")
    place, config = parse_device(device), files.read_config()
    if not files.weight_map or getattr(config, "quantization_config", None) or config is not config.get_text_config():
        raise UnsupportedError(f"{files.name} is quantised, no safetensors, or has more than a text model")
    dtype_of_checkpoint = config.dtype if place.type != "cpu" else None  # half is slow there
    kind = parse_dtype(dtype) or dtype_of_checkpoint or torch.float32
    store = LayerStore(files, config, device=place, dtype=kind)
    return _ours(store.causal, files, tokenizer, store)


def open_target(
    model: Any,
    tokenizer: Any = None,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    *,
    in_memory: bool = False,
) -> Target:
    """Open a live model, the bundled model (in memory), or a named model (streamed from disk if possible).

    With `in_memory`, a named model is loaded into memory, too.

    Raises:
        SinkscopeError: `model` is not a model, or cannot be read.
    """
    if model is None or isinstance(model, str | os.PathLike):
        name = os.fspath(model or BUNDLED)
        options: dict[str, Any] = {"dtype": dtype, "device": device, "tokenizer": tokenizer}
        if not (in_memory or world_size() > 1 or name == BUNDLED or name.endswith(".gguf")):
            with quiet(), loading_errors(pathless(name)), suppress(UnsupportedError):
                model = _stream(Files(name, revision), **options)
        if not isinstance(model, Target):
            model = load(model, revision=revision, **options)
    target = target_of(model, tokenizer)
    check_vocabulary(target.available_tokenizer, target.embedding)
    return replace(target, tokenizer=target.available_tokenizer)


def fits(target: Target, dtype: torch.dtype | str | None = None) -> bool:
    """Return whether the weights of a model leave enough memory free; they pass through the host to a device.

    A limit on the container counts.

    Args:
        target: The model.
        dtype: In which type the weights would be loaded. None: that of the checkpoint.
    """
    kind = parse_dtype(dtype) or target.config.dtype or target.dtype
    free = free_memory()
    if target.device.type == "cuda":
        free = min(free, torch.cuda.mem_get_info(target.device)[0])
    return kind.itemsize * target.hf.num_parameters() <= SHARE * free
