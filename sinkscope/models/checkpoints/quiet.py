"""Keep other libraries quiet while they load a model, and turn their errors into one line."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Generator

from sinkscope.errors import SinkscopeError, is_out_of_memory
from sinkscope.models.checkpoints.config import first_line
from sinkscope.models.checkpoints.locate import ModelSource


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Context manager that silences stdout and other libraries' reports; downloads have progress bars on a terminal."""
    from huggingface_hub import utils as hub
    from transformers.utils import logging

    with contextlib.ExitStack() as undo:
        for library in (logging, hub.logging):
            undo.callback(library.set_verbosity, library.get_verbosity())
            library.set_verbosity_error()
        if logging.is_progress_bar_enabled():
            undo.callback(logging.enable_progress_bar)
            logging.disable_progress_bar()
        undo.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


@contextlib.contextmanager
def loading_errors(source: ModelSource) -> Generator[None]:
    """Context manager that turns any error inside into a SinkscopeError."""
    try:
        yield
    except SinkscopeError:
        raise
    except Exception as error:
        raise _refusal(error, source) from error


def _refusal(error: Exception, source: ModelSource) -> SinkscopeError:
    """What went wrong, and what to do."""
    name, first = source.name, first_line(error)
    if is_out_of_memory(error):
        return SinkscopeError(
            f"out of memory while loading {name}; try --dtype bfloat16 (in Python dtype=), layers=N, a "
            'quantization_config or device_map="auto"'
        )
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
        return SinkscopeError(
            f"the pickled weights of {name} hold more than tensors, or are damaged, and are refused: loading them "
            "could run code; convert them to safetensors where you trust them"
        )
    remedy = "if the files are whole, check that config.json, weights and tokenizer belong together"
    if isinstance(error, ImportError):
        remedy = "install what it asks for"
    return SinkscopeError(f"{name} could not be loaded: {type(error).__name__}: {first}; {remedy}")
