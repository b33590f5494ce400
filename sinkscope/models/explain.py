"""While other libraries load a model: nothing on stdout, and whatever goes wrong in one line."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Generator

from sinkscope.errors import SinkscopeError, is_out_of_memory
from sinkscope.models.source import Source, no_permission


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Nothing on stdout, no progress bars unless stderr is a terminal, no reports on unused tensors."""
    from huggingface_hub import utils as hub
    from transformers.utils import logging

    verbosity, hub_verbosity = logging.get_verbosity(), hub.logging.get_verbosity()
    bars = not sys.stderr.isatty()
    hf_bars, hub_bars = logging.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    logging.set_verbosity_error()
    if bars:
        hub.logging.set_verbosity_error()
    if bars and hf_bars:
        logging.disable_progress_bar()
    if bars and hub_bars:
        hub.disable_progress_bars()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub.logging.set_verbosity(hub_verbosity)
        if bars and hf_bars:
            logging.enable_progress_bar()
        if bars and hub_bars:
            hub.enable_progress_bars()


@contextlib.contextmanager
def explained(source: Source) -> Generator[None]:
    """Whatever goes wrong below, as a SinkscopeError."""
    try:
        yield
    except SinkscopeError:
        raise
    except Exception as error:
        first = _first_line(error)
        if is_out_of_memory(error):
            raise SinkscopeError(
                f"out of memory while loading {source.name}; try --dtype bfloat16 (in Python dtype=), layers=N, a "
                'quantization_config or device_map="auto"',
                page="out-of-memory",
            ) from error
        if isinstance(error, PermissionError):
            raise no_permission(error.filename or source.where) from error
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
            raise SinkscopeError(
                f"the pickled weights of {source.name} hold more than tensors, or are damaged, and are refused: "
                "loading them could run code; convert them to safetensors where you trust them",
                page="pickled-weights",
            ) from error
        if source.kind == "gguf":
            raise SinkscopeError(
                f"{source.name} could not be read: {first}; "
                + ("pip install gguf" if isinstance(error, ImportError) else "download it again, or give a folder"),
                page="bad-gguf",
            ) from error
        remedy = (
            "install what it asks for"
            if isinstance(error, ImportError)
            else "if the files are whole, check that config.json, weights and tokenizer belong together"
        )
        raise SinkscopeError(
            f"{source.name} could not be loaded: {type(error).__name__}: {first}; {remedy}", page="load-failed"
        ) from error


def _first_line(error: Exception) -> str:
    """What it says first; a line that ends in a colon says nothing without the next."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
