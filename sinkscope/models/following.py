"""Follow calls of modules: one generator for what happens before a call and for what happens after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import nn

from sinkscope.models.hooks import Args, Kwargs

AroundCall = Generator[tuple[Args, Kwargs], Any]
"""Yields once: gives the arguments with which a module is to run, and takes its output."""
Follow = Callable[[nn.Module, Args, Kwargs], AroundCall]
"""Called with a module and the arguments of its call."""


class _Follower:
    """Follows calls with one generator for each; a copy of the model would copy what follows it, which may refuse."""

    def __init__(self, follow: Follow) -> None:
        self.follow = follow
        self.now = threading.local()

    def leave(self) -> None:
        """Close the generator of a call that has ended or broken off."""
        generator = getattr(self.now, "generator", None)
        self.now.generator = None
        if generator is not None:
            generator.close()

    def begin(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Run a generator up to its `yield`; the arguments for the module, or None if the call is not followed."""
        self.leave()
        generator = self.follow(module, args, kwargs)
        given = next(generator, None)
        if given is not None:
            self.now.generator = generator
        return given

    def end(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        """Let the generator go on with the output, if there is one."""
        generator = getattr(self.now, "generator", None)
        if output is not None and generator is not None:
            with suppress(StopIteration):
                generator.send(output)
        self.leave()


@contextmanager
def following(modules: Iterable[nn.Module], follow: Follow) -> Iterator[None]:
    """Context manager in which a generator follows each call of some modules, of which none runs inside another.

    It runs up to its `yield` before the call, and goes on when the call has ended. After an error or an interruption it
    is closed instead: at once, or where torch runs no hook, as after Ctrl-C, before the next call or at the end. If it
    ends without a `yield`, the call is not followed.
    """
    follower = _Follower(follow)
    with ExitStack() as stack:
        stack.callback(follower.leave)
        for module in modules:
            before = module.register_forward_pre_hook(follower.begin, with_kwargs=True)
            after = module.register_forward_hook(follower.end, with_kwargs=True, always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield
