"""The check of types and shapes under which all tests run: what `jaxtyping.jaxtyped` checks, at a third of its cost.

jaxtyping's own decorator makes two stubs of each function with beartype, and on every call it binds the arguments to
the signature, calls one stub, the function, and the other stub. That was a third of the time of the tests. Here
beartype checks the function itself, and only functions whose annotations name a shape; other types are basedpyright's.
Each function is checked in its first `MANY` calls of a test: what a loop calls a thousand times is called alike. A
function whose annotations certainly name no shape is left as it is: a wrapper that does nothing took a twentieth.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable
from types import FunctionType
from typing import Any

import jaxtyping
from beartype import beartype

MANY = 4  # the two layers of a small model, with a prompt and with a token
_left: dict[int, list[int]] = {}  # how often each function is still checked in this test, by the id of its code
_started: list[list[int]] = []  # ... of those that it has called
_context = functools.partial(jaxtyping.jaxtyped, "context")
_SHAPED = {}  # does a function name shapes?
_WORD = re.compile(r"[A-Za-z_]\w*")
_NOTHING = object()


def install(package: str) -> None:
    """Check all functions of `package`, and the fields of its dataclasses, from its import on."""
    jaxtyping.jaxtyped = _checked  # the import hook writes `@jaxtyping.jaxtyped(typechecker=...)` above each of them
    jaxtyping.install_import_hook(package, "beartype.beartype")


def begin_test() -> None:
    """Check every function again from its first call on."""
    for left in _started:
        left[0] = MANY
    _started.clear()


def _checked(thing: Any = None, *, typechecker: Any = None) -> Any:
    if thing is None:
        return _checked
    if isinstance(thing, FunctionType):
        return _function(thing)
    if inspect.isclass(thing) and dataclasses.is_dataclass(thing) and "__init__" in vars(thing):
        if not hasattr(thing.__init__, "__wrapped__"):
            thing.__init__ = _function(thing.__init__)
    return thing


def _function(real: FunctionType) -> Callable[..., Any]:
    if not _may_name_a_shape(real) or ("<locals>" in real.__qualname__ and not _shaped(real)):
        return real
    checks = []
    left = _left.setdefault(id(real.__code__), [MANY])  # one inside of another is made anew on each call of that

    @functools.wraps(real)
    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if not left[0] or jaxtyping.config.jaxtyping_disable:
            return real(*args, **kwargs)
        if not _shaped(real):
            left[0] = 0
            return real(*args, **kwargs)
        if left[0] == MANY:
            _started.append(left)
        left[0] -= 1
        if not checks:  # made by the first call: beartype takes long, and most files call few functions
            checks.append(_typed(real))
        with _context():
            return checks[0](*args, **kwargs)

    return checked


def _may_name_a_shape(real: FunctionType) -> bool:
    """Whether a word of an annotation is a shape, or nothing yet."""
    for hint in real.__annotations__.values():
        if not isinstance(hint, str):
            if _names_a_shape(hint):
                return True
            continue
        for word in _WORD.findall(hint):
            value = real.__globals__.get(word, getattr(builtins, word, _NOTHING))
            if value is _NOTHING or _names_a_shape(value) or getattr(value, "__module__", None) == "jaxtyping":
                return True
    return False


def _shaped(real: FunctionType) -> bool:
    """Whether a function names shapes; one inside of another is made anew on each call of the outer one."""
    code = id(real.__code__)
    if code not in _SHAPED:
        _SHAPED[code] = any(map(_names_a_shape, _hints(real).values()))
    return _SHAPED[code]


def _typed(real: FunctionType) -> Callable[..., Any]:
    """The function with its types checked."""
    copy = FunctionType(real.__code__, real.__globals__, real.__name__, real.__defaults__, real.__closure__)
    copy.__kwdefaults__, copy.__annotations__ = real.__kwdefaults__, _hints(real)
    copy.__qualname__, copy.__module__ = real.__qualname__, real.__module__
    return beartype(copy)


def _hints(real: FunctionType) -> dict[str, Any]:
    return {name: _resolved(hint, real.__globals__) for name, hint in real.__annotations__.items()}


def _resolved(hint: Any, names: dict[str, Any]) -> Any:
    """The hint itself; Any where it names what is imported for type checkers alone, as jaxtyping takes it."""

    def taker(value: Any) -> None: ...

    taker.__annotations__ = {"value": hint}
    try:
        return typing.get_type_hints(taker, names, include_extras=True)["value"]
    except Exception:
        return Any


def _names_a_shape(hint: Any) -> bool:
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_names_a_shape, typing.get_args(hint)))
