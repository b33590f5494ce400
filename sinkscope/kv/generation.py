"""What `generate` is doing in a run that owns the cache; only `generate` knows which calls read a prompt."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from sinkscope.errors import UnsupportedError
from sinkscope.models.call_cache import cache_in


class Generation(threading.local):
    """What `generate` is doing in the current thread.

    Attributes:
        prompting: Whether it is reading a prompt, so that even a single-token call is a part of it.
        resuming: Whether it goes on after tokens were taken back, so that it reads no prompt.
        settings: Settings of the latest `generate`; None without one.
    """

    prompting: bool = False
    resuming: bool = False
    settings: Any = None

    def __init__(self, acts: Sequence[Any]) -> None:
        self._acts = acts  # what acts on generated tokens

    def set_prompting(self, reads: bool) -> None:
        """Note that a prompt is going to be read, or was."""
        self.prompting = reads and not self.resuming

    def begin(self, method: str, options: Mapping[str, Any], settings: Any) -> None:
        """Note the settings of `generate`, and refuse kinds in which nothing could act on generated tokens.

        Args:
            method: The method of a model that `generate` calls: `_prefill`, or another for assisted generation.
            options: Arguments of the forward call.
            settings: The generation settings.

        Raises:
            UnsupportedError: Generation is assisted, or runs without a cache.
        """
        self.settings = settings
        if not self._acts:
            return
        if method != "_prefill":
            raise UnsupportedError(
                "assisted generation reads several tokens at a time and takes some back, and a cache policy acts on "
                "tokens that come one by one: generate without an assistant, or use Full"
            )
        if not options.get("use_cache") and cache_in(options) is None:
            raise UnsupportedError(
                "use_cache=False: there is no cache that a cache policy or a guard could act on: generate with "
                "use_cache=True, or without them"
            )
