"""Ways of holding the cache that dialogues are answered by: `name`, or `name:key=value:key=value`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib import import_module
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from sinkscope.errors import SinkscopeError

Budget = int | float
Settings = Literal["paper", "equal"]
SHARE = 0.125
"""Of the context, where methods are compared at an equal share."""


@dataclass(frozen=True)
class Kind:
    """What a name stands for.

    Attributes:
        home: module of the class.
        made: name of the class.
        about: one line on what it does.
        fixed: fields that the name decides.
        without: fields that mean nothing here.
        sized: it reads a part of the cache, of `budget` tokens.
        share: function of a module beside this one that makes it at a share of the context, for shapes of prompts.
    """

    home: str
    made: str
    about: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    sized: bool = True
    share: str | None = None

    @property
    def cls(self) -> type[Any]:
        """The class; importing it imports torch."""
        return getattr(import_module(self.home), self.made)

    def settable(self) -> dict[str, tuple[Any, ...]]:
        """Fields that may be given, with what their values may be: types, None and single words."""
        hints = get_type_hints(self.cls)
        closed = {*self.fixed, *self.without}
        names = [f.name for f in fields(self.cls) if f.name not in closed]
        found = {name: _choices(hints[name]) for name in names}
        return found if self.share is None else {"budget": (float,), **found}


_KV, _SERVE = "sinkscope.kv", "sinkscope.kv.loopserve"
_DECODING = ("budget", "interval", "first")
_PROMPTS = ("alpha", "sample", "recent", "variant", "shortest", "dense_above", "kernel")
METHODS: dict[str, Kind] = {
    "full": Kind(
        _KV,
        "Full",
        "the whole cache",
        without=tuple("budget first last every mode positions reduce".split()),
        sized=False,
    ),
    "streaming": Kind(_KV, "StreamingLLM", "first tokens and a window"),
    "h2o": Kind(_KV, "H2O", "heavy hitters and a window"),
    "snapkv": Kind(_KV, "SnapKV", "chosen at the end of the prompt"),
    "tova": Kind(_KV, "TOVA", "what the newest query attends to"),
    "adakv": Kind(_KV, "AdaKV", "SnapKV with budgets of each head's own"),
    "progressive": Kind(_KV, "Progressive", "chosen anew while decoding"),
    "progressive-0": Kind(_KV, "Progressive", "the same from the first step on", {"after": 0}),
    "a-shape": Kind(_KV, "AShape", "prompts: first tokens and a window", sized=False, share="a_shape_share"),
    "tri-shape": Kind(_KV, "TriShape", "the same, and the last queries see all", sized=False, share="tri_shape_share"),
    "minference": Kind(_KV, "MInference", "prompts: fixed numbers of lines", sized=False, share="minference_share"),
    "loopserve": Kind(_SERVE, "LoopServe", "prompts along lines, chosen anew while decoding"),
    "loopserve-0": Kind(_SERVE, "LoopServe", "the same, chosen from the first step on", {"first": 0}),
    "loopserve-p": Kind(_SERVE, "LoopServe", "prompts alone", {"decode": False}, ("prefill", *_DECODING), sized=False),
    "loopserve-d": Kind(_SERVE, "LoopServe", "decoding alone", {"prefill": False}, ("decode", *_PROMPTS)),
}
"""By the name that commands use. "-0": without steps that read everything first; "-p", "-d": one half alone."""

PAPER: dict[str, dict[str, Any]] = {
    "full": {},
    "h2o": {"budget": 1024, "recent": 0.5},
    "snapkv": {"budget": 1024},
    "adakv": {"budget": 1024},
    "streaming": {"budget": 4096},
    "a-shape": {"first": 128, "local": 4096},
    "tri-shape": {"first": 128, "local": 4096, "dense_rows": 128},
    "minference": {"vertical": 1000, "slash": 6096},
    "loopserve": {"alpha": 0.955, "budget": 1024, "interval": 16, "shortest": 0},
}
"""LoopServe's table 7 (Li et al. 2025); of MInference, which it leaves open, the numbers of lines of its code."""


@dataclass(frozen=True)
class Method:
    """One way of holding the cache, with its settings.

    Attributes:
        name: in `METHODS`.
        options: fields that were given, in the order of the class.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def spec(self) -> str:
        """As it is written: what records are kept under."""
        return ":".join([self.name, *(f"{key}={_written(value)}" for key, value in self.options)])

    def make(self, budget: Budget) -> Any:
        """What is entered on the model; `budget` is used where the method has none of its own.

        Raises:
            SinkscopeError: settings that make no sense.
        """
        kind, options = METHODS[self.name], dict(self.options)
        if kind.share is not None and "budget" in options:
            if len(options) > 1:
                raise SinkscopeError(
                    f"{self.spec}: a share of the context as budget decides the other sizes: give budget alone, or "
                    "the sizes without it"
                )
            return getattr(import_module("sinkscope.bench.dialogues.equal"), kind.share)(options["budget"])
        if kind.sized:
            options.setdefault("budget", budget)
        return kind.cls(**kind.fixed, **options)


def read_method(text: str) -> Method:
    """The method that a text such as `loopserve:alpha=0.98:first=0` names, its values not yet checked by its class.

    Raises:
        SinkscopeError: an unknown name or setting, a setting twice, or a value of the wrong kind.
    """
    name, *given = (part.strip() for part in text.split(":"))
    if name not in METHODS:
        near = get_close_matches(name, METHODS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise SinkscopeError(f"method {name!r} is unknown: {hint}expected some of {', '.join(METHODS)}")
    if not given:
        return Method(name)
    known, found = METHODS[name].settable(), dict[str, Any]()
    for part in given:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise SinkscopeError(f"method {text!r}: {name} has no setting {part!r}: {has}; write key=value")
        if key in found:
            raise SinkscopeError(f"method {text!r}: {key} is given twice: give it once")
        found[key] = _read(value, known[key], f"method {text!r}: {key}")
    return Method(name, tuple((key, found[key]) for key in known if key in found))


def check_methods(specs: Sequence[str]) -> tuple[Method, ...]:
    """The methods, each once.

    Raises:
        SinkscopeError: none, or as for `read_method`.
    """
    if not specs:
        raise SinkscopeError(f"no method is given: choose from {', '.join(METHODS)}")
    return tuple(dict.fromkeys(read_method(spec) for spec in specs))


def at_settings(specs: Sequence[str], settings: Settings, share: Budget = SHARE) -> list[str]:
    """Methods with the settings of a comparison; what a text says itself counts more.

    Args:
        specs: as for `check_methods`; none: those of the paper's table 1.
        settings: "paper": LoopServe's table 7, and for methods that it has not, the budget that it gives to all, 1024.
            "equal": every method with a size at the same share of the context.
        share: for "equal".

    Returns:
        The methods written out, so that a run with them needs no further budget.

    Raises:
        SinkscopeError: an unknown comparison, a share outside (0, 1), and as for `check_methods`.
    """
    if settings not in get_args(Settings):
        raise SinkscopeError(f"settings {settings!r} are unknown: expected one of {', '.join(get_args(Settings))}")
    if isinstance(share, int) or not 0 < share < 1:
        raise SinkscopeError(f"a share of {share!r}: expected a share of the context between 0.0 and 1.0")
    found: list[str] = []
    for method in check_methods(specs or list(PAPER)):
        kind, given = METHODS[method.name], dict(method.options)
        usual: dict[str, Any] = {}
        if kind.made == "LoopServe" and "shortest" not in kind.without:
            usual["shortest"] = 0  # short prompts too: quality is compared, not speed
        if settings == "equal":
            own = kind.sized or (kind.share is not None and not given)
            usual |= {"budget": share} if own else {}
        else:
            # An ablation or "-0" has what its method has, as far as it goes.
            paper = PAPER.get(method.name) or PAPER.get(method.name.rpartition("-")[0], {})
            closed = {*kind.fixed, *kind.without}
            usual |= {key: value for key, value in paper.items() if key not in closed}
            usual |= {"budget": 1024} if kind.sized and "budget" not in usual else {}
            if "budget" in given and kind.share is not None:
                usual = {}
        options = usual | given
        order = [key for key in kind.settable() if key in options] if options else []
        found.append(Method(method.name, tuple((key, options[key]) for key in order)).spec)
    return list(dict.fromkeys(found))


def split_spec(spec: str) -> tuple[str, Budget | None]:
    """Of a written method: the text without its budget, and the budget if it has one of its own. Imports no torch."""
    parts = spec.split(":")
    budgets = [part.removeprefix("budget=") for part in parts if part.startswith("budget=")]
    text = ":".join(part for part in parts if not part.startswith("budget="))
    if not budgets:
        return text, None
    return text, float(budgets[0]) if set(budgets[0]) & set(".e") else int(budgets[0])


def _choices(hint: Any) -> tuple[Any, ...]:
    """Types, None and words that a field takes, of its annotation."""
    if hint is NoneType:
        return (None,)
    if isinstance(hint, type):
        return (hint,)
    args = get_args(hint)
    return tuple(choice for arg in args for choice in (_choices(arg) if not isinstance(arg, str) else (arg,)))


def _read(text: str, choices: tuple[Any, ...], where: str) -> Any:
    words: dict[str, Any] = {str(choice): choice for choice in choices if isinstance(choice, str)}
    words |= {"none": None} if None in choices else {}
    words |= {"true": True, "false": False} if bool in choices else {}
    if text in words:
        return words[text]
    readers: list[Callable[[str], Any]] = [kind for kind in (int, float) if kind in choices]
    for reader in readers:
        try:
            value = reader(text)
        except ValueError:
            continue
        if not math.isnan(value):
            return value
    names = {int: "a whole number", float: "a number"}
    expected = [*(names[kind] for kind in (int, float) if kind in choices), *words]
    raise SinkscopeError(f"{where}={text!r}: expected {' or '.join(expected)}")


def _written(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
