"""Other libraries kept quiet while they load a model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from typing import Any

LONG_LOADING = 5.0  # seconds after which a bar of transformers appears


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
