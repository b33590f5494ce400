"""Other libraries kept quiet while they load a model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator


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
