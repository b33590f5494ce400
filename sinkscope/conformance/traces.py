"""What an author did: where an error was raised, and what was left on a model."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sinkscope.engine.stock import attention_name

_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def author_files(factory: Callable[..., Any], subject: Any) -> set[str]:
    """Return the files in which an author wrote the factory and the class of what it gives."""
    files: set[str] = set()
    for module in (getattr(factory, "__module__", ""), *(kind.__module__ for kind in type(subject).__mro__)):
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        if (
            file
            and module != "sinkscope.kv.policy"
            and not module.startswith(("sinkscope.hooks.", "sinkscope.engine."))
        ):
            files.add(file)
    return {file for file in files if not file.startswith(_LIBRARIES)}


def raised_in(error: BaseException, files: set[str]) -> str:
    """Return the method and the line of an author's files in which an error came up; empty if it came up elsewhere."""
    where, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename in files:
            where = f"{code.co_qualname} ({Path(code.co_filename).name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return where


@dataclass(frozen=True)
class ModelState:
    """What an intervention may change on a model: hooks, attributes, the attention, weights and flags."""

    parts: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, model: Any) -> ModelState:
        """Read a model."""
        parts: list[tuple[str, Any]] = [("the attention function", attention_name(model.config.get_text_config()))]
        for name, module in model.named_modules():
            attributes = vars(module)
            hooks = sum(len(value) for key, value in attributes.items() if key.endswith("_hooks") and value)
            parts.append((f"hooks on {name or 'the model'}", hooks))
            parts.append((f"attributes of {name or 'the model'}", frozenset(attributes)))
            parts.append((f"the mode of {name or 'the model'}", module.training))
        for name, weight in model.named_parameters():
            parts.append((f"the weight {name}", (weight.data_ptr(), weight._version, weight.requires_grad)))
        return cls(tuple(parts))

    def left(self, earlier: ModelState) -> str:
        """Return in words what is no longer as it was earlier; empty if all is."""
        before = dict(earlier.parts)
        return next((name for name, value in self.parts if before.get(name) != value), "")


def seeds_random_numbers(use: Callable[[], object]) -> bool:
    """Return whether a use gives the random numbers of torch a seed, so that the caller's are lost."""
    ends: list[Any] = []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2):
            torch.manual_seed(seed)
            use()
            ends.append(torch.get_rng_state())
    return torch.equal(*ends)
