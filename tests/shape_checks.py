"""The check of types and shapes under which all tests run: jaxtyping's import hook with beartype.

It wraps only what names a shape in its annotations. Other types are basedpyright's, and a wrapper of every function
would take a third of the time of the tests.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import jaxtyping

jaxtyped = jaxtyping.jaxtyped


def install(package: str) -> None:
    """Check shapes in the functions of `package`, and in the fields of its dataclasses, from its import on."""
    jaxtyping.jaxtyped = checked  # the hook writes `@jaxtyping.jaxtyped(typechecker=...)` above each of them
    jaxtyping.install_import_hook(package, "beartype.beartype")


def checked(thing: Any = None, *, typechecker: Any = None) -> Any:
    """Do what `jaxtyping.jaxtyped` does, to what names a shape."""
    if thing is None:
        return lambda thing: checked(thing, typechecker=typechecker)
    names = vars(sys.modules[thing.__module__])
    for word in re.findall(r"[A-Za-z_]\w*", str(getattr(thing, "__annotations__", ""))):
        if "jaxtyping" in str(names.get(word)):
            return jaxtyped(thing, typechecker=typechecker)
    return thing
