"""`load`: a model from its name, folder or file, or a live one, as the kind of object asked for."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import sys
from typing import Any

import torch

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.checks import check_finite, check_vocabulary, parse_device, parse_dtype
from sinkscope.models.config import read_config, read_tokenizer
from sinkscope.models.explain import explained, quiet
from sinkscope.models.source import Local, Source, local_files, locate
from sinkscope.models.target import unwrap
from sinkscope.models.wrap import BACKENDS, Backend, wrap


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
        x: short name (`sinkscope.models()` lists them), hub id `org/name`, folder, `.gguf` file, or a live model;
            None: the model inside this package. A live Hugging Face model, TransformerBridge or nnsight model comes
            back as it is.
        backend: "bridge" (TransformerBridge, the default), "hf" (plain Hugging Face), or "nnsight". Asked for
            explicitly, a live Hugging Face model is copied and the copy wrapped, since wrapping changes it in place.
        revision: branch, tag or commit of a hub id.
        layers: load only the first `layers` decoder layers; tensors of the others are not read, and shards that hold
            nothing else are not downloaded.
        dtype: torch dtype or its name ("float32", "bf16", ...); None: that of the checkpoint.
        device: "cpu", "cuda", "cuda:1", "mps"; None: the first cuda device if there is one, else the CPU.
        device_map: passed through to transformers, instead of `device`.
        quantization_config: passed through to transformers.
        tokenizer: instead of the one beside the weights.
        trust_remote_code: run Python code that comes with the checkpoint.
        probe: check on a few tokens that edits reach the logits and that attention is recomputed rightly
            (`sinkscope.models.probe`). Live models are not probed.

    Returns:
        TransformerBridge, Hugging Face model or nnsight model, in eval mode. Its tokenizer is kept on the Hugging
        Face module as `tokenizer`, its name as `sinkscope_name`.

    Raises:
        SinkscopeError: one line that says what was wrong and what to do.
        UnsupportedError: no adapter for the architecture, or `backend` cannot wrap it.
    """
    if backend is not None and backend not in BACKENDS:
        raise SinkscopeError(f"backend {backend!r} is unknown; expected one of {', '.join(BACKENDS)}")
    if not (x is None or isinstance(x, str | os.PathLike)):
        settings = {
            "revision": revision,
            "layers": layers,
            "dtype": dtype,
            "device": device,
            "device_map": device_map,
            "quantization_config": quantization_config,
        }
        return _live(x, backend, tokenizer, settings)
    if layers is not None and layers < 1:
        raise SinkscopeError(
            f"layers={layers!r}: zero layers make no model; expected a number of at least 1, or None",
            page="zero-layers",
        )
    place = _placement(device, device_map)
    wanted_dtype = parse_dtype(dtype)
    source = locate(x, revision)
    with quiet(), explained(source):
        with local_files(source, layers, code=trust_remote_code) as local:
            files: dict[str, Any] = {"gguf": local.gguf, "trust_remote_code": trust_remote_code}
            config = read_config(source.name, local.folder, layers=layers, **files)
            tok = tokenizer if tokenizer is not None else read_tokenizer(source.name, local.folder, **files)
            hf = _weights(source, local, config, wanted_dtype, place, quantization_config, trust_remote_code)
        if source.kind == "hub":
            hf.config._name_or_path = str(source.where)
            hf.config._commit_hash = local.commit
        hf.sinkscope_name = source.name
        hf.tokenizer = tok
        check_vocabulary(tok, hf)
        check_finite(hf)
        model = wrap(hf, tok, backend or "bridge")
        if probe:
            from sinkscope.models.probe import prove

            prove(model)
    return model


def _live(model: Any, backend: Backend | None, tokenizer: Any, settings: dict[str, Any]) -> Any:
    hf, kind = unwrap(model)
    if given := [name for name, value in settings.items() if value is not None]:
        raise SinkscopeError(
            f"{given[0]}= is for names, folders and files, and this {type(model).__name__} is loaded already; leave it "
            "out, or give the name of the model"
        )
    if backend is None or backend == kind:
        if tokenizer is not None:
            raise SinkscopeError(
                f"this {type(model).__name__} comes back as it is, so it cannot be given a tokenizer; pass tokenizer= "
                "to the measurement instead"
            )
        return model
    if kind != "hf":
        raise UnsupportedError(
            f"a live {type(model).__name__} cannot become backend={backend!r}: it changed the Hugging Face model "
            f"inside; load that again with sinkscope.load(name, backend={backend!r})"
        )
    copied = copy.deepcopy(hf).eval()
    tok = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
    return wrap(copied, tok, backend)


def _placement(device: Any, device_map: Any) -> Any:
    """What transformers is given as `device_map`; None: the CPU."""
    if device_map is not None:
        if device is not None:
            raise SinkscopeError(f"device {str(device)!r} and device_map exclude each other; give one of them")
        return device_map
    found = parse_device(device)
    return None if found.type == "cpu" else {"": found}


def _weights(
    source: Source, local: Local, config: Any, dtype: Any, place: Any, quantization_config: Any, trust_remote_code: bool
) -> Any:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"gguf_file": local.gguf, "device_map": place, "quantization_config": quantization_config}
    if local.pickled:
        options["weights_only"] = True
    # The bar of GGUF files knows no switch.
    silent = local.gguf is not None and not sys.stderr.isatty()
    with contextlib.redirect_stderr(io.StringIO()) if silent else contextlib.nullcontext():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            local.folder,
            config=config,
            dtype=dtype or "auto",
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with names
            **{name: value for name, value in options.items() if value is not None},
        )
    model, info = loaded
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, wanted = mismatched[0]
        raise SinkscopeError(
            f"tensor {name} of {source.name} has shape {tuple(found)}, its configuration asks for {tuple(wanted)}; the "
            "weights belong to another config.json: download both from one revision",
            page="missing-tensors",
        )
    if missing := sorted(info["missing_keys"]):
        raise SinkscopeError(
            f"{source.name} lacks {len(missing)} tensors that its configuration asks for, such as {missing[0]}; the "
            "weights belong to another config.json: download both from one revision",
            page="missing-tensors",
        )
    if local.pickled:  # only now: a checkpoint that is refused says one line, and that is why
        print(
            f"note: {source.name} has pickled weights (.bin), read with weights_only so that no code in them runs; "
            "safetensors load faster",
            file=sys.stderr,
        )
    return model.eval()
