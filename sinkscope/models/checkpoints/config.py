"""Errors of loading, dtypes and devices by name, and checks of weights."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from sinkscope.errors import SinkscopeError, first_line, is_out_of_memory
from sinkscope.models.shards import local
from sinkscope.models.weights import is_plain

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@contextmanager
def loading_errors(name: str) -> Generator[None]:
    """Context manager that turns any error inside into a SinkscopeError, with what to do; `name` is the model's."""
    try:
        yield
    except SinkscopeError:
        raise
    except Exception as error:
        what = f"{name} could not be loaded: {type(error).__name__}: {first_line(error)}"
        remedy = (
            "check name, revision, access (`hf auth login`) and connection, that what it asks for is installed, and "
            "that the files are whole (`git lfs pull` fetches what Git LFS left) and belong together"
        )
        if "trust_remote_code" in str(error):
            what = f"{name} holds Python code of its own, which is never run here"
            remedy = "if you trust it, load the model or tokenizer with transformers and give that"
        if "Unrecognized configuration class" in str(error):
            what = f"{name} is of a type that AutoModelForCausalLM of transformers does not open"
            remedy = "load it with the class of its type, such as Emu3ForCausalLM.from_pretrained(...), and give that"
        if is_out_of_memory(error):
            what = f"out of memory while loading {name}"
            remedy = 'try --dtype bfloat16 (in Python dtype=), a quantization_config or device_map="auto"'
        raise SinkscopeError(f"{what}; {remedy}") from error


@contextmanager
def plain_by_default() -> Iterator[None]:
    """Context manager, and decorator, in which new tensors are float32 and on the CPU, whatever the caller set.

    Random numbers are drawn there, so that they are the same on every device. The settings are torch's own, of which
    all threads share the first; one that is so already is not set, because a device that is set takes time in every
    call of torch.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu") if torch.get_default_device().type != "cpu" else nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a torch dtype from its name ("float32", "torch.bfloat16", "half", ...); None and "auto" give None.

    Raises:
        SinkscopeError: This is not a floating-point type in which models compute.
    """
    if dtype is None or dtype == "auto":
        return None
    kind = getattr(torch, str(dtype).removeprefix("torch."), None)
    if kind not in _FLOATS:
        raise SinkscopeError(
            f"dtype {str(dtype)!r} is not one that models run in; expected float32, bfloat16, float16, float64 or auto"
        )
    return kind


def parse_device(device: torch.device | str | None) -> torch.device:
    """Return a device of this machine; None means the first cuda device if there is one, else the CPU.

    Raises:
        RuntimeError: This machine has no such device.
        AssertionError: This is torch without CUDA.
    """
    if device is None:
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    return torch.empty(0, device=device).device


def check_vocabulary(tokenizer: Any, embedding: Any) -> None:
    """Check that every token has a row in the embedding, except those that were added, other than BOS and EOS.

    Some models ship a tokenizer with special tokens for images that a text model never sees (Gemma 3 1B).

    Args:
        tokenizer: The tokenizer; None if there is none.
        embedding: The module that embeds tokens. One whose weight has another form is not checked.

    Raises:
        SinkscopeError: The tokenizer belongs to another model.
    """
    weight = getattr(embedding, "weight", None)
    if tokenizer is None or not is_plain(weight):
        return
    rows = len(weight)
    tokens = max(tokenizer.vocab_size, 1 + (tokenizer.bos_token_id or 0), 1 + (tokenizer.eos_token_id or 0))
    if tokens > rows:
        raise SinkscopeError(
            f"the tokenizer has {tokens:,} tokens and the embedding {rows:,} rows: they belong to different models; "
            "use the tokenizer that came with the weights"
        )


@torch.no_grad()
def check_finite(hf: torch.nn.Module, path: str = "") -> None:
    """Check that no parameter holds NaN or infinity. Quantised parameters and those on meta are skipped.

    Args:
        hf: Module with the parameters.
        path: What stands before the names of its parameters.

    Raises:
        SinkscopeError: A parameter does; the message names the first.
    """
    for name, each in hf.named_parameters():
        tensor = local(each)
        if tensor.is_meta or not is_plain(tensor) or tensor.itemsize < 2:
            continue
        # One number per tensor: NaN and infinity survive a sum. Cheaper than a boolean tensor of the same shape.
        if not torch.isfinite(tensor.sum(dtype=torch.float32)):
            raise SinkscopeError(
                f"tensor {path}{name} holds values that are NaN or infinite; download the checkpoint again, or try "
                "dtype=float32 if it is of half precision"
            )
