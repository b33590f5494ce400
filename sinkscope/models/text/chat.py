"""Texts in a tokenizer's chat template, a program in the checkpoint that is not trusted to terminate."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import visible

_SECONDS, _BYTES = 10, 1 << 30  # that a template may take
_TRIED: set[tuple[str, tuple[str, ...]]] = set()  # templates that ended, with the roles that they were given


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, str]], name: str = "", *, answer: bool = True) -> str:
    """Format the messages with the chat template.

    The first time a template is used with these roles, it runs in a child process with limits on time and memory (if
    the system supports such processes), so a template that does not terminate blocks nobody.

    Args:
        tokenizer: Tokenizer with the template.
        messages: Messages, each with role and content.
        name: Name of the model, for errors.
        answer: Whether to end with the beginning of the model's answer.

    Raises:
        SinkscopeError: There is no template, it rejects the messages, or it takes too much time or memory.
    """
    of = f" of {name}" if name else ""
    if not getattr(tokenizer, "chat_template", None):
        raise SinkscopeError(f"the tokenizer{of} has no chat template: leave out chat")
    tried = str(tokenizer.chat_template), tuple(message["role"] for message in messages)

    def write() -> str:
        return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=answer, tokenize=False))

    try:
        if tried not in _TRIED and hasattr(os, "fork"):
            _try(write)
            _TRIED.add(tried)
        return write()
    except Exception as error:  # it may fail in any way
        reason = visible((str(error).splitlines() or [type(error).__name__])[0])
        raise SinkscopeError(f"the chat template{of} failed ({reason}): leave out chat") from None


def _try(write: Any) -> None:
    """Run it in a child process first.

    Raises:
        TimeoutError: it does not end.
        RuntimeError: it raised something there, or took too much memory.
    """
    import resource

    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"it takes too much memory"
        with suppress(BaseException):
            with open("/proc/self/statm") as sizes:
                most = int(sizes.read().split()[0]) * resource.getpagesize() + _BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            try:
                said = b"it writes more than a conversation" if len(write()) > _BYTES >> 6 else b""
            except MemoryError:
                pass
            except Exception as error:
                said = (str(error) or type(error).__name__).encode(errors="replace")[:1000]
        os.write(theirs, said or b"\0")
        os._exit(0)
    os.close(theirs)
    try:
        if not select.select([ours], [], [], _SECONDS)[0]:
            raise TimeoutError(f"it has not ended after {_SECONDS} seconds")
        said = os.read(ours, 1000) or b"it takes too much memory"
        if said != b"\0":
            raise RuntimeError(said.decode(errors="replace"))
    finally:
        os.close(ours)
        with suppress(OSError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
