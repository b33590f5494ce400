"""What is said of a model that cannot be loaded, and what to do."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Generator

from sinkscope.errors import SinkscopeError, is_out_of_memory
from sinkscope.models.checkpoints.locate import ModelSource
from sinkscope.models.loading.config import first_line


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
