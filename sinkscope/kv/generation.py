"""What only `generate` knows: which calls read a prompt, and whether an assistant drafts tokens.

A prompt that comes in chunks may end with a chunk of one token, which looks like a generated one from below.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sinkscope.errors import UnsupportedError

if TYPE_CHECKING:
    from sinkscope.kv.session import Session


@contextmanager
def follow_generate(session: Session) -> Iterator[None]:
    """For the length of a `with`, `generate` tells the session when it reads a prompt; assistants are refused.

    Raises:
        UnsupportedError: inside, by `generate`: assisted generation, or none with a cache, beside a policy that acts on
            single tokens.
    """
    model: Any = session.target.hf

    def prefill(*args: Any, **kwargs: Any) -> Any:
        given = kwargs["model_kwargs"] if "model_kwargs" in kwargs else args[2]
        if session.acts_on_tokens and not given.get("use_cache") and given.get("past_key_values") is None:
            raise UnsupportedError(
                "use_cache=False: there is no cache that a cache policy or a guard could act on: generate with "
                "use_cache=True, or without them",
                page="kv-session",
            )
        session.prompting = True
        try:
            return type(model)._prefill(model, *args, **kwargs)
        finally:
            session.prompting = False

    def candidates(*args: Any, **kwargs: Any) -> Any:
        if session.acts_on_tokens:
            raise UnsupportedError(
                "assisted generation reads several tokens at a time and takes some back, and a cache policy acts on "
                "tokens that come one by one: generate without an assistant, or use Full",
                page="kv-session",
            )
        return type(model)._get_candidate_generator(model, *args, **kwargs)

    ours = {"_prefill": prefill, "_get_candidate_generator": candidates}
    ours = {name: fn for name, fn in ours.items() if hasattr(type(model), name)}
    for name, fn in ours.items():
        setattr(model, name, fn)
    try:
        yield
    finally:
        for name in ours:
            delattr(model, name)
