"""`load`: turn a name, folder, file or live model into the requested kind of model object."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import sys
from collections.abc import Generator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from sinkscope.display.console import note
from sinkscope.errors import SinkscopeError, UnsupportedError, is_out_of_memory
from sinkscope.models.checkpoint import LocalFiles, local_files, weight_files
from sinkscope.models.config import (
    causal_class,
    check_finite,
    check_vocabulary,
    first_line,
    float32_by_default,
    parse_device,
    parse_dtype,
    read_config,
    read_tokenizer,
    reads_images,
)
from sinkscope.models.finding import adapter_of, prove
from sinkscope.models.fingerprint import fingerprint
from sinkscope.models.locate import ModelSource, locate, no_permission
from sinkscope.models.stack import DRAFT
from sinkscope.models.stored import check_pickled, check_unexpected, is_quantised
from sinkscope.models.target import Target
from sinkscope.models.wrapped import target_of, unwrap

Backend = Literal["bridge", "hf", "nnsight"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
LONG_LOADING = 5.0  # seconds after which a bar of transformers appears


@float32_by_default()
def load(
    x: Any = None,
    *,
    backend: Backend | str | None = None,
    revision: str | None = None,
    layers: int | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    device_map: Any = None,
    quantization_config: Any = None,
    tokenizer: Any = None,
    trust_remote_code: bool = False,
    probe: bool = True,
) -> Any:
    """Load a model.

    Args:
        x: Short name (`sinkscope.models()` lists them), hub id `org/name`, folder, `.gguf` file, or a live model.
            None loads the model inside this package. A live Hugging Face model, TransformerBridge or nnsight model is
            returned unchanged.
        backend: "bridge" (TransformerBridge, the default), "hf" (plain Hugging Face), or "nnsight". If given
            explicitly, a live Hugging Face model is copied and the copy wrapped, since wrapping changes it in place.
        revision: Branch, tag or commit of a hub id.
        layers: Load only the first `layers` decoder layers; tensors of the others are not read.
        dtype: torch dtype or its name ("float32", "bf16", ...). None uses the checkpoint's.
        device: "cpu", "cuda", "cuda:1" or "mps". None uses the first cuda device if there is one, else the CPU.
        device_map: Passed on to transformers instead of `device`.
        quantization_config: Passed on to transformers.
        tokenizer: Tokenizer to use instead of the one stored with the weights.
        trust_remote_code: Run Python code that comes with the checkpoint.
        probe: Check on a few tokens that edits reach the logits and that attention is recomputed correctly
            (`sinkscope.inference.probe`). Live models are not probed.

    Returns:
        TransformerBridge, Hugging Face model or nnsight model, in eval mode. Its tokenizer is kept on the Hugging
        Face module as `tokenizer`, its name as `sinkscope_name`.

    Raises:
        SinkscopeError: The model cannot be loaded; one line says what is wrong and what to do.
        UnsupportedError: The architecture has no adapter, or `backend` cannot wrap it.
    """
    if backend is not None and backend not in BACKENDS:
        raise SinkscopeError(f"backend {backend!r} is unknown; expected one of {', '.join(BACKENDS)}")
    if not (x is None or isinstance(x, str | os.PathLike)):
        options = {"revision": revision, "layers": layers, "dtype": dtype, "device": device, "device_map": device_map}
        return _live(x, backend, tokenizer, options | {"quantization_config": quantization_config})
    if device_map is not None and device is not None:
        raise SinkscopeError(f"device {str(device)!r} and device_map exclude each other; give one of them")
    if device_map is None:
        place = parse_device(device)
        if place.type != "cpu":
            device_map = {"": place}
    options = {
        "dtype": parse_dtype(dtype) or "auto",
        "device_map": device_map,
        "quantization_config": quantization_config,
        "trust_remote_code": trust_remote_code,
    }
    source = locate(x, revision)
    with quiet(), explained(source):
        files = local_files(source, code=trust_remote_code)
        content: dict[str, Any] = {"gguf": files.gguf, "trust_remote_code": trust_remote_code}
        config = read_config(source.name, files.folder, layers=layers, **content)
        if tokenizer is None:
            tokenizer = read_tokenizer(source.name, files.folder, **content)
        hf = _weights(source, files, config, options, is_cut=layers is not None)
        origin = files.commit or fingerprint(files.folder / (files.gguf or ""))
        if source.kind == "hub":
            hf.config._name_or_path = str(source.where)
            hf.config._commit_hash = files.commit
        if source.planted:
            _plant(hf, Path(source.where) / source.planted)
            hf.config.circuit = source.name
            origin = fingerprint(hf)  # not that of the model it was made from
        hf.sinkscope_name = source.name
        hf.tokenizer = tokenizer
        check_vocabulary(tokenizer, hf)
        check_finite(hf)
        with _in_first(layers, source.name):
            adapter_of(Target(hf, hf, "hf", DRAFT), proves=False)  # before it is wrapped: inferred from plain modules
            model = wrap(hf, tokenizer, backend or "bridge")
            if probe:
                prove(target_of(model))
        if quantization_config is None:
            hf.sinkscope_origin = origin, fingerprint(hf)
    return model


@contextlib.contextmanager
def _in_first(layers: int | None, name: str) -> Generator[None]:
    """Context manager in which refusals say that only the first layers were looked at."""
    try:
        yield
    except UnsupportedError as error:
        if layers is None or error.page != "unsupported-model":
            raise
        raise UnsupportedError(
            f"the first {layers} layers of {name} cannot be measured alone: {error}", page=error.page
        ) from error


@torch.no_grad()
def _plant(hf: Any, file: Path) -> None:
    """Overwrite weights of a freshly loaded model with the numbers in a file, except where these are NaN."""
    weights = hf.state_dict()  # of a model that was cut to its first layers only their tensors
    with np.load(file) as planted:
        for name in weights.keys() & planted.keys():
            new = torch.from_numpy(planted[name]).to(weights[name])
            weights[name].copy_(new.where(~new.isnan(), weights[name]))


def _live(model: Any, backend: Backend | None, tokenizer: Any, settings: dict[str, Any]) -> Any:
    hf, kind = unwrap(model)
    if backend is None or backend == kind:
        settings = {**settings, "tokenizer": tokenizer}
    for name, value in settings.items():
        if value is not None:
            raise SinkscopeError(
                f"{name}= is for names, folders and files, and this {type(model).__name__} is loaded already; leave it "
                "out, or give the name of the model"
            )
    if backend is None or backend == kind:
        return model
    if kind != "hf":
        raise UnsupportedError(
            f"a live {type(model).__name__} cannot become backend={backend!r}: it changed the Hugging Face model "
            f"inside; load that again with sinkscope.load(name, backend={backend!r})"
        )
    if tokenizer is None:
        tokenizer = getattr(model, "tokenizer", None)
    return wrap(copy.deepcopy(hf).eval(), tokenizer, backend)


def _weights(source: ModelSource, files: LocalFiles, config: Any, options: dict[str, Any], *, is_cut: bool) -> Any:
    from transformers import AutoModelForImageTextToText

    auto = causal_class(config)
    if reads_images(config.model_type):
        auto = AutoModelForImageTextToText
    if files.gguf is not None:
        options = {**options, "gguf_file": files.gguf}
    is_pickled = files.gguf is None and not any(files.folder.glob("*.safetensors*"))
    if is_pickled:
        options = {**options, "weights_only": True}
        check_pickled(source.name, config, weight_files(files.folder))
    hides_bar = files.gguf is not None and not sys.stderr.isatty()  # the bar of GGUF files knows no switch
    with contextlib.redirect_stderr(io.StringIO()) if hides_bar else contextlib.nullcontext():
        loaded: Any = auto.from_pretrained(
            files.folder,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with names
            **{name: value for name, value in options.items() if value is not None},
        )
    model, info = loaded
    mismatched, missing = sorted(info["mismatched_keys"]), sorted(info["missing_keys"])
    problem = None
    if mismatched:
        name, shape, expected = mismatched[0]
        problem = (
            f"tensor {name} of {source.name} has shape {tuple(shape)}, its configuration asks for {tuple(expected)}"
        )
    elif missing:
        problem = f"{source.name} lacks {len(missing)} tensors that its configuration asks for, such as {missing[0]}"
    if problem is not None:
        remedy = "the weights belong to another config.json: download both from one revision"
        if is_cut:
            remedy = (
                f"unless a file is damaged, {config.model_type} cannot be cut to its first layers: leave out layers="
            )
        raise SinkscopeError(
            f"{problem}; {remedy}",
            page="missing-tensors",
        )
    if not is_quantised(config):  # else factors belong there
        check_unexpected(model, info["unexpected_keys"], source.name)
    if is_pickled:  # only now: a checkpoint that is refused says one line, and that is why
        note(
            f"note: {source.name} has pickled weights (.bin), read with weights_only so that no code in them runs; "
            "safetensors load faster"
        )
    return model.eval()


def wrap(hf: Any, tokenizer: Any, backend: Backend) -> Any:
    """Wrap `hf` as the requested kind of object. Bridge and nnsight change `hf` in place, so do not use it elsewhere.

    The tokenizer is copied first, because both set padding and special tokens on theirs. TransformerLens and nnsight
    are imported here.

    Raises:
        UnsupportedError: TransformerLens or nnsight is not installed, or cannot wrap this architecture.
        SinkscopeError: There is no tokenizer.
    """
    if backend == "hf":
        return hf
    if tokenizer is None:
        raise SinkscopeError(
            f"backend={backend!r} needs a tokenizer and the model came without one; give tokenizer=..., or use "
            'backend="hf"',
            page="no-tokenizer",
        )
    library, package = "nnsight", "nnsight"
    if backend == "bridge":
        library, package = "TransformerLens", "transformer-lens"
    try:
        if backend == "bridge":
            cls: Any = import_module("transformer_lens.model_bridge").TransformerBridge
        else:
            cls = import_module("nnsight").TransformersModel
    except ImportError as error:
        raise UnsupportedError(
            f"backend={backend!r} needs {package}, which cannot be imported ({error}): pip install {package}, or use "
            'backend="hf"',
            page="backend-cannot",
        ) from None
    tokenizer = copy.deepcopy(tokenizer)
    try:
        if backend == "bridge":
            return _bridge(cls, hf, tokenizer)
        return cls(hf, tokenizer=tokenizer, task="text-generation")
    except Exception as error:
        raise UnsupportedError(
            f'{library} cannot wrap this {hf.config.model_type} model ({first_line(error)}); backend="hf" can',
            page="backend-cannot",
        ) from error


def _bridge(cls: Any, hf: Any, tokenizer: Any) -> Any:
    config = hf.config
    if config.model_type == "falcon" and config.new_decoder_architecture:
        raise ValueError("its fused query, key and value are interleaved by group")
    if getattr(config, "vision_config", None) is not None:
        try:
            import_module("torchvision")
        except Exception:  # a broken one counts as missing for TransformerLens, too
            # Booting would run `pip install torchvision`, which may replace torch in the user's environment.
            raise ValueError("it needs torchvision for models with images: pip install torchvision") from None
    if not config.architectures:
        config.architectures = [type(hf).__name__]
    # The bridge makes a second tokenizer from the path of this one, which may be on a hub, unless it is told that
    # this one adds BOS; whether it really does is found out by encoding a text.
    tokenizer.init_kwargs.setdefault("name_or_path", "")
    tokenizer.init_kwargs["add_bos_token"] = True
    name = getattr(config, "_name_or_path", "")
    if "/" not in name:  # it may be an alias of TransformerLens, which warns of those
        name = type(hf).__name__
    return cls.boot_transformers(name, hf_model=hf, tokenizer=tokenizer, dtype=hf.dtype)


@contextlib.contextmanager
def quiet(*, bars: bool | None = None) -> Generator[None]:
    """Context manager that silences stdout and other libraries' reports on unused tensors.

    Args:
        bars: Whether these libraries may draw progress bars. None means only on a terminal. Those of transformers
            appear when they have run for some seconds.
    """
    from huggingface_hub import utils as hub
    from transformers.utils import logging

    with contextlib.ExitStack() as undo:
        for library in (logging, hub.logging):
            undo.callback(library.set_verbosity, library.get_verbosity())
            library.set_verbosity_error()
        undo.callback(logging.set_tqdm_hook, logging.set_tqdm_hook(_late_bar))
        if not (sys.stderr.isatty() if bars is None else bars):
            if logging.is_progress_bar_enabled():
                undo.callback(logging.enable_progress_bar)
                logging.disable_progress_bar()
            if not hub.are_progress_bars_disabled():
                undo.callback(hub.enable_progress_bars)
                hub.disable_progress_bars()
        undo.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def _late_bar(bar: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return bar(*args, **{**options, "delay": LONG_LOADING})


@contextlib.contextmanager
def explained(source: ModelSource) -> Generator[None]:
    """Context manager that turns any error inside into a SinkscopeError."""
    try:
        yield
    except SinkscopeError:
        raise
    except PermissionError as error:
        raise no_permission(error.filename or source.where) from error
    except Exception as error:
        raise _refusal(error, source) from error


def _refusal(error: Exception, source: ModelSource) -> SinkscopeError:
    """What went wrong, and what to do."""
    name, first = source.name, first_line(error)
    lacks_library = isinstance(error, ImportError)
    if is_out_of_memory(error):
        return SinkscopeError(
            f"out of memory while loading {name}; try --dtype bfloat16 (in Python dtype=), layers=N, a "
            'quantization_config or device_map="auto"',
            page="out-of-memory",
        )
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
        return SinkscopeError(
            f"the pickled weights of {name} hold more than tensors, or are damaged, and are refused: loading them "
            "could run code; convert them to safetensors where you trust them",
            page="pickled-weights",
        )
    if source.kind == "gguf":
        remedy = "download it again, or give a folder"
        if lacks_library:
            remedy = "pip install gguf"
        return SinkscopeError(f"{name} could not be read: {first}; {remedy}", page="bad-gguf")
    remedy = "if the files are whole, check that config.json, weights and tokenizer belong together"
    if lacks_library:
        remedy = "install what it asks for"
    return SinkscopeError(f"{name} could not be loaded: {type(error).__name__}: {first}; {remedy}", page="load-failed")
