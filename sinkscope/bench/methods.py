"""The methods that benchmarks compare, as data: what is applied to the model, and what is added to its sampler.

A method is written `name`, or `name:key=value:key=value`, or `package.module:Class` for a policy from another package.
`name:paper` selects the algorithm and settings that a paper prints, if they differ from the default; it calls the class
method `paper` of the method's class. Settings may follow.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import Field

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Budget, Part, check_values, read_setting, said

Block = Literal["cache", "guard", "sampler", "stopper"]
BLOCKS: tuple[Block, ...] = get_args(Block)
Settings = Literal["paper", "equal"]
SHARE = 0.125
"""Of the context, where methods are compared at an equal share."""


@dataclass(frozen=True)
class MethodKind:
    """Definition of a method name.

    Attributes:
        home: Module of the class.
        made: Name of the class whose instances are applied to the model; empty for samplers and stoppers.
        about: One-line description.
        fixed: Fields that the name determines.
        without: Fields that cannot be set.
        sized: Whether it reads only part of the cache, limited to `budget` tokens.
        shaped: Whether it is a sparse pattern for prompts, which `kv.shapes.ShapeShare` builds at a share of the
            context.
        paper: Whether it always uses the paper's printed settings.
        block: "cache" and "guard" appear in LoopBench's tables; "sampler" and "stopper" in blocks of their own.
    """

    home: str
    made: str
    about: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    sized: bool = True
    shaped: bool = False
    paper: bool = False
    block: Block = "cache"

    @property
    def cls(self) -> Any:
        """The class; importing it imports torch."""
        return getattr(import_module(self.home), self.made)

    @property
    def printed(self) -> bool:
        """Whether the class also has the version that a paper prints."""
        return self.block not in ("sampler", "stopper") and hasattr(self.cls, _PRINTED)

    def settable(self) -> dict[str, Any]:
        """Fields that may be set, with their types."""
        if self.block in ("sampler", "stopper"):
            return {}
        hints = get_type_hints(self.cls, include_extras=True)
        closed = {*self.fixed, *self.without}
        found = {f.name: hints[f.name] for f in fields(self.cls) if f.name not in closed}
        return {"budget": Part, **found} if self.shaped else found


_PRINTED = "paper"
_KV, _GUARD, _SERVE = "sinkscope.kv", "sinkscope.kv.loopguard", "sinkscope.kv.loopserve"
_DECODING = ("budget", "interval", "first", "per_head")
_PROMPTS = tuple("alpha sample recent dense_rows begin local sharp checked seed variant shortest dense_above".split())


def _guard(about: str, paper: bool = True, **fixed: Any) -> MethodKind:
    return MethodKind(_GUARD, "LoopGuard", about, fixed, ("window", "rewind"), paper=paper, block="guard")


def _rule(block: Block, about: str) -> MethodKind:
    return MethodKind("", "", about, sized=False, block=block)


METHODS: dict[str, MethodKind] = {
    "full": MethodKind(
        _KV,
        "Full",
        "the whole cache",
        without=tuple("budget first last every mode positions reduce".split()),
        sized=False,
    ),
    "streaming": MethodKind(_KV, "StreamingLLM", "first tokens and a window"),
    "h2o": MethodKind(_KV, "H2O", "heavy hitters and a window"),
    "snapkv": MethodKind(_KV, "SnapKV", "chosen at the end of the prompt"),
    "tova": MethodKind(_KV, "TOVA", "what the newest query attends to"),
    "adakv": MethodKind(_KV, "AdaKV", "SnapKV with budgets of each head's own"),
    "progressive": MethodKind(_KV, "Progressive", "chosen anew while decoding"),
    "progressive-0": MethodKind(_KV, "Progressive", "the same from the first step on", {"after": 0}),
    "a-shape": MethodKind(_KV, "AShape", "prompts: first tokens and a window", sized=False, shaped=True),
    "tri-shape": MethodKind(_KV, "TriShape", "the same, and the last queries see all", sized=False, shaped=True),
    "minference": MethodKind(_KV, "MInference", "prompts: fixed numbers of lines", sized=False, shaped=True),
    "loopserve": MethodKind(_SERVE, "LoopServe", "prompts along lines, chosen anew while decoding"),
    "loopserve-0": MethodKind(_SERVE, "LoopServe", "the same, chosen from the first step on", {"first": 0}),
    "loopserve-p": MethodKind(
        _SERVE, "LoopServe", "prompts alone", {"decode": False}, ("prefill", *_DECODING), sized=False
    ),
    "loopserve-d": MethodKind(_SERVE, "LoopServe", "decoding alone", {"prefill": False}, ("decode", *_PROMPTS)),
    "loopguard": _guard("LoopGuard: early alarms; a ban and drawn tokens if a loop comes back", paper=False),
    "loopguard-window": _guard("the paper's LoopGuard, its cache within the budget at all times", between="window"),
    "loopguard-repeats": _guard("the paper's LoopGuard, which takes out older copies too", clean="repeats"),
    "loopguard-always": _guard("pruning every 200 tokens", variant="always"),
    "loopguard-p1": _guard("pruning on the top-1 streak alone", variant="p1"),
    "loopguard-ttr": _guard("pruning on the type-token ratio alone", variant="ttr"),
    "loopguard-cr": _guard("pruning on the compression ratio alone", variant="cr"),
    "loopguard-stall": _guard("pruning on stalled novelty alone", variant="stall"),
    "loopguard-tail": _guard("pruning on a repeating tail alone", variant="tail"),
    "repetition-penalty": _rule("sampler", "repetition penalty 1.1, prompt included"),
    "presence-penalty": _rule("sampler", "presence penalty 1.5 on generated tokens"),
    "no-repeat-4-gram": _rule("sampler", "no four tokens twice, prompt included"),
    "dry": _rule("sampler", "DRY, multiplier 0.8, base 1.75, allowed length 2"),
    "stop-pattern": _rule("stopper", "stops at a pattern of <= 64 tokens, 4 times and >= 64 tokens"),
    "stop-llama.cpp": _rule("stopper", "stops at a pattern of 16 to 1,024 tokens, 4 times, as llama.cpp"),
    "stop-vllm-mlx": _rule("stopper", "stops at a pattern of <= 128 tokens, 3 times and >= 48 tokens, as vllm-mlx"),
    "stop-monitor": _rule("stopper", "stops where LoopGuard would prune, by its default monitor"),
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
    "loopserve": {"budget": 1024, "interval": 16, "shortest": 0},
    "loopserve:paper": {},
}
"""LoopServe's table 7 (Li et al. 2025); of MInference, which it leaves open, the numbers of lines of its code.

LoopServe is there twice: by default, at the table's sizes, and as printed, with the table's alpha, too."""


def kind_of(name: str) -> MethodKind:
    """Definition of a name: a method of the table, a registered policy, or `package.module:Class`.

    Raises:
        SinkscopeError: There is no such policy.
    """
    if name in METHODS:
        return METHODS[name]
    from sinkscope.kv.policy import policy_named

    cls = type(policy_named(name))
    names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    return MethodKind(cls.__module__, cls.__qualname__, "", sized="budget" in names)


def name_of(method: str) -> str:
    """The method's name without its settings."""
    name, _, rest = (part.strip() for part in method.partition(":"))
    known = name in METHODS or not rest.partition(":")[0].isidentifier()
    return name if known else f"{name}:{rest.partition(':')[0]}"


def block_of(method: str) -> Block:
    """The block of a method in tables; policies from other packages are in the cache block."""
    kind = METHODS.get(name_of(method))
    return "cache" if kind is None else kind.block


def order_of(method: str) -> tuple[int, str]:
    """Sort key that follows the order of this module's table; other methods come last."""
    names = list(METHODS)
    name = name_of(method)
    return (names.index(name) if name in METHODS else len(names)), method


@dataclass(frozen=True)
class Method:
    """One way of generating, with its settings.

    Attributes:
        name: Name in `METHODS`, or of another policy.
        options: Fields that were given, in the order of the class.
        paper: Whether fields that were not given take the paper's values.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    paper: bool = False

    @property
    def spec(self) -> str:
        """The method as it is written; records are stored under this text."""
        name = f"{self.name}:{_PRINTED}" if self.paper else self.name
        written = (f"{key}={str(v).lower() if v is None or v is True or v is False else v}" for key, v in self.options)
        return ":".join([name, *written])

    @property
    def kind(self) -> MethodKind:
        """Definition of the method's name."""
        return kind_of(self.name)

    def make(self, budget: Budget, window: int | None = None) -> Any:
        """The intervention to apply to the model, or None if there is none.

        Args:
            budget: Used if the method has no budget of its own.
            window: For a guard, the tokens W over which signals are computed; None keeps its own.

        Raises:
            SinkscopeError: The settings are invalid.
        """
        kind, options = self.kind, dict(self.options)
        if kind.block in ("sampler", "stopper"):
            return None
        if kind.shaped and "budget" in options:
            if len(options) > 1:
                raise SinkscopeError(
                    f"{self.spec}: a share of the context as budget decides the other sizes: give budget alone, or "
                    "the sizes without it"
                )
            from sinkscope.kv.shapes import ShapeShare

            return ShapeShare(kind.made, options["budget"])
        if kind.sized:
            options.setdefault("budget", budget)
        if kind.block == "guard" and window is not None:
            options["window"] = window
        make = kind.cls.paper if self.paper or kind.paper else kind.cls
        return make(**kind.fixed, **options)


def read_method(text: str, blocks: Sequence[str] = BLOCKS) -> Method:
    """Parse a text such as `loopserve:alpha=0.98:first=0` into a method; its class does not yet check them together.

    Args:
        text: The method as the user writes it.
        blocks: Allowed blocks; methods of other blocks are rejected.

    Raises:
        SinkscopeError: A name or setting is unknown, a setting occurs twice, or a value has the wrong type.
    """
    from sinkscope.kv.policy import policies

    name = name_of(text.strip()).strip()
    usual = [each for each, kind in METHODS.items() if kind.block in blocks]
    if name not in usual and ":" not in name and (name in METHODS or name not in policies()):
        near = get_close_matches(name, usual, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise SinkscopeError(
            f"method {name!r} is unknown: {hint}expected some of {', '.join(usual)}, or package.module:Class"
        )
    given = [part.strip() for part in text.strip().removeprefix(name).split(":")[1:]]
    if not given:
        return Method(name)
    kind, found = kind_of(name), dict[str, Any]()
    known, paper = kind.settable(), given[0] == _PRINTED and kind.printed
    for part in given[paper:]:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise SinkscopeError(f"method {text!r}: {name} has no setting {part!r}: {has}; write key=value")
        if key in found:
            raise SinkscopeError(f"method {text!r}: {key} is given twice: give it once")
        found[key] = read_setting(value, known[key], f"method {text!r}: {key}=")
    return Method(name, tuple((key, found[key]) for key in known if key in found), paper)


def check_methods(specs: Sequence[str], blocks: Sequence[str] = BLOCKS) -> tuple[Method, ...]:
    """The methods without duplicates.

    Raises:
        SinkscopeError: There are none, and as for `read_method`.
    """
    if not specs:
        names = [name for name, kind in METHODS.items() if kind.block in blocks]
        raise SinkscopeError(f"no method is given: choose from {', '.join(names)}")
    return tuple(dict.fromkeys(read_method(spec, blocks) for spec in specs))


def at_settings(specs: Sequence[str], settings: Settings, share: Budget = SHARE) -> list[str]:
    """Methods with the settings of a comparison; settings in a method's own text take precedence.

    Args:
        specs: As for `check_methods`; if empty, the methods of the paper's table 1.
        settings: "paper": LoopServe's table 7; methods not listed there get the budget that it gives to all, 1024.
            "equal": every method with a size gets the same share of the context.
        share: The share for "equal".

    Returns:
        The methods written out in full, so that a run with them needs no further budget.

    Raises:
        SinkscopeError: The comparison is unknown or the share is outside (0, 1), and as for `check_methods`.
    """
    check_values(Settings, settings=settings)
    check_values(Annotated[float, Field(gt=0, lt=1), said("a share of the context between 0.0 and 1.0")], share=share)
    found: list[str] = []
    for method in check_methods(specs or list(PAPER), ["cache"]):
        kind, given = method.kind, dict(method.options)
        options = (_at_paper(method, kind, given) if settings == "paper" else _at_share(kind, given, share)) | given
        order = [key for key in kind.settable() if key in options] if options else []
        found.append(Method(method.name, tuple((key, options[key]) for key in order), method.paper).spec)
    return list(dict.fromkeys(found))


def _at_paper(method: Method, kind: MethodKind, given: dict[str, Any]) -> dict[str, Any]:
    if "budget" in given and kind.shaped:
        return {}
    # An ablation or "-0" has what its method has, as far as it goes.
    paper = PAPER.get(method.name) or PAPER.get(method.name.rpartition("-")[0], {})
    closed = {*kind.fixed, *kind.without}
    budget = {"budget": 1024} if kind.sized else {}
    return _always(kind) | budget | {key: value for key, value in paper.items() if key not in closed}


def _at_share(kind: MethodKind, given: dict[str, Any], share: Budget) -> dict[str, Any]:
    own = kind.sized or (kind.shaped and not given)
    return _always(kind) | ({"budget": share} if own else {})


def _always(kind: MethodKind) -> dict[str, Any]:
    """LoopServe takes short prompts, too: quality is compared, not speed."""
    return {"shortest": 0} if kind.made == "LoopServe" and "shortest" not in kind.without else {}


def split_spec(spec: str) -> tuple[str, Budget | None]:
    """Split a written method into its text without the budget and the budget, if it has one. Imports no torch."""
    parts = spec.split(":")
    budgets = [part.removeprefix("budget=") for part in parts if part.startswith("budget=")]
    text = ":".join(part for part in parts if not part.startswith("budget="))
    return text, literal_eval(budgets[0]) if budgets else None
