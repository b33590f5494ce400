"""The decorators `@measurement` and `@command`, and what they add to a function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from sinkscope.interventions.decode import noted_decoding
from sinkscope.measure.setup import Loading, Setup, edit_of
from sinkscope.registry import Parameter, command, parameter, shared_parameters
from sinkscope.results import Result

if TYPE_CHECKING:
    import plotly.graph_objects as go

P = ParamSpec("P")
R = TypeVar("R", bound=Result)
_OPEN = inspect.signature(Setup.open).parameters
_EDIT = inspect.signature(edit_of).parameters


@dataclass(frozen=True)
class Output:
    """A file that a command writes beside JSON, HTML and PNG.

    Attributes:
        name: of the option, without dashes.
        help: one sentence for the help.
        save: called with the result and the path; it writes the file whole or not at all. Text that it returns is a
            note for standard error.
        required: whether the option must be given.
        kind: mark of the earlier outputs that the file may replace: "json sink-patch", or one of `sinkscope.output`;
            None: any file of sinkscope. Files in a format that carries no mark are never replaced.
    """

    name: str
    help: str
    save: Callable[[Any, str], object]
    required: bool = False
    kind: str | None = None


class Measurement(Generic[P, R]):
    """A measurement that can be called with a model; made by `@measurement`.

    Calling it opens the model, runs the function on the `Setup`, and fills in the result's model, settings and
    provenance. `on(setup, ...)` runs it on a model that is open already.
    """

    def __init__(
        self,
        function: Callable[Concatenate[Setup, P], R],
        *,
        loading: Loading,
        edits: bool,
        quick: dict[str, Any],
        outputs: Sequence[Output],
        check: Callable[..., object] | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.__name__ = function.__name__
        self.function = function
        self.loading: Loading = loading
        self.edits = edits
        self.quick = quick
        self.outputs = tuple(outputs)
        self.check = check
        own = list(inspect.signature(function).parameters.values())[1:]
        mine = {p.name for p in own}
        common = [p for name, p in _OPEN.items() if name not in (*mine, "loading")]
        common += list(_EDIT.values()) if edits else []
        merged = [common[0], *own, *common[1:]]
        self.__signature__ = inspect.Signature(sorted(merged, key=lambda p: p.kind))
        self._own = [p.name for p in own]

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The function's own parameters, without the `Setup`."""
        hints = inspect.get_annotations(self.function, eval_str=True)
        own = list(inspect.signature(self.function).parameters.values())[1:]
        return tuple(
            parameter(p.name, hints.get(p.name, Any), p.default, keyword=p.kind is p.KEYWORD_ONLY) for p in own
        )

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Open the model and measure; the arguments are those of the signature."""
        given = self.__signature__.bind(*args, **kwargs).arguments
        self.refuse(given)
        edit = edit_of(**{k: given[k] for k in _EDIT if k in given}) if self.edits else None
        alone = {"texts", *(p.name for p in self.parameters if p.option.own)}
        opening = {k: given[k] for k in _OPEN if k in given and k not in alone}
        pieces = given.get("texts", self.__signature__.parameters["texts"].default)
        if isinstance(pieces, int):  # a measurement may also take texts by this name
            opening["texts"] = pieces
        elif pieces is not None and not any(isinstance(piece, str) for piece in pieces):
            opening["texts"] = 0  # ids are all that is read
        setup = replace(Setup.open(**opening, loading=self.loading if edit is None else "whole"), edit=edit)
        return self._measured(setup, {k: given[k] for k in self._own if k in given}, given)

    def on(self, setup: Setup, **kwargs: Any) -> R:
        """Measure on an open model; the arguments are the measurement's own."""
        self.refuse(kwargs)
        return self._measured(setup, kwargs, {})

    def refuse(self, given: dict[str, Any]) -> None:
        """Check arguments before a model is opened.

        Raises:
            SinkscopeError: one of them is outside its range, or the measurement cannot use them.
        """
        shared = [one for one in shared_parameters("open") if one.name not in self._own]
        for one in (*self.parameters, *shared):
            if one.name in given:
                one.check(given[one.name])
        if self.check is not None:
            self.check(**{name: given.get(name, self.__signature__.parameters[name].default) for name in self._own})

    def _measured(self, setup: Setup, own: dict[str, Any], given: dict[str, Any]) -> R:
        with noted_decoding() as used:
            result = self.function(setup, **own)  # pyright: ignore[reportCallIssue]
        text = given.get("text")
        hidden = {p.name for p in self.parameters if p.option.hidden}
        defaults = {name: self.__signature__.parameters[name].default for name in self._own}
        settings = {
            "bos": setup.bos is not None,
            "text": None if text is None else Path(text).name,
            "texts": len(setup.ids),
            "revision": given.get("revision"),
            "seed": setup.seed,
            **{name: own.get(name, defaults[name]) for name in self._own if name not in hidden},
            **{name: str(given[name]) for name in _EDIT if self.edits and given.get(name)},
            **setup.settings,
            **({"decoding": used} if used else {}),
        }
        filled = replace(result, model=setup.info(), settings=settings, provenance=setup.provenance())
        vars(filled).update({k: v for k, v in vars(result).items() if k not in vars(filled)})  # arrays not in the JSON
        return filled

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (self.__module__, self.__name__)


def _named(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def measurement(
    *,
    group: str,
    figure: Callable[[Any], go.Figure] | str | None = None,
    command: str | None = None,
    flag: str | None = None,
    adds: str | None = None,
    loading: Loading = "stream",
    edits: bool = False,
    quick: dict[str, Any] | None = None,
    outputs: Sequence[Output] = (),
    sets: dict[str, Any] | None = None,
    check: Callable[..., object] | None = None,
    scan: dict[str, Any] | None = None,
) -> Callable[[Callable[Concatenate[Setup, P], R]], Measurement[P, R]]:
    """Make a measurement of a function that takes a `Setup` and returns a `Result`.

    The public function takes a model and the options of `Setup.open` besides its own. Its command, help, JSON, page,
    documentation and the tests of the matrix are built from its signature and docstring; arguments of the decorator
    other than functions must be literals, because the registry reads them without importing the file.

    Args:
        group: The help and the documentation show measurements of one group together.
        figure: Draws the result; "module:function" is imported when it is drawn.
        command: Words of the command; None: the function's name with dashes.
        flag: The measurement shares the command with another one and runs when this option is given.
        adds: With `flag`: it runs after the other one, and its result stands under this key of the JSON.
        loading: As in `Setup.open`.
        edits: Whether it runs under a patch, a policy or a guard; `setup.edit` is what was asked for.
        quick: Arguments with which it takes about a second on a small model; the tests of the matrix use them.
        outputs: Further files that its command writes.
        sets: With `flag`: arguments that the option gives to the other measurement, too.
        check: Called with the measurement's own arguments, by name, before a model is opened; it raises
            `SinkscopeError` for what their types and ranges do not tell.
        scan: Makes it a part of `sinkscope scan`; the registry reads it (`sinkscope.registry.ScanMark`).
    """

    def wrap(function: Callable[Concatenate[Setup, P], R]) -> Measurement[P, R]:
        cls = inspect.get_annotations(function, eval_str=True)["return"]
        if "kind" not in vars(cls):
            cls.claim(function.__name__.replace("_", "-"))
        cls.drawing = figure
        return Measurement(
            function,
            loading=loading,
            edits=edits,
            quick=quick or {},
            outputs=outputs,
            check=check,
        )

    return wrap


__all__ = ["Measurement", "Output", "command", "measurement"]
