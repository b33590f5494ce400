"""The decorator that makes a measurement of a function: opening, checking, settings and provenance around its work."""

from __future__ import annotations

import functools
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, get_type_hints

from sinkscope.engine.run import held
from sinkscope.files.arguments import NO_SETTINGS, Parameter, parameters_of
from sinkscope.files.plain import named_file
from sinkscope.files.progress import watched_by
from sinkscope.generation.edit_options import edit_from_options
from sinkscope.measure.setup import Setup
from sinkscope.models.checkpoints.config import plain_by_default
from sinkscope.models.hooks import evaluating
from sinkscope.results.console import ProgressBar
from sinkscope.results.result import Result

EVERY = "Every measurement takes the model, and what `help(sinkscope.measure.Setup.open)` explains."
P = ParamSpec("P")
R = TypeVar("R", bound=Result)
Loading = Literal["stream", "whole", "fits"]

TEXT_READ = "text_read"
"""The setting that two results share if they read the same texts."""
_EDITING = inspect.signature(edit_from_options).parameters.keys()
"""The interventions that a measurement may take."""


@dataclass(eq=False, repr=False)
class Measurement(Generic[P, R]):
    """A measurement that can be called with a model; made by `@measurement`.

    Calling it opens the model, runs the function on the `Setup`, and fills in the result's model, settings and
    provenance. `on(setup, ...)` runs it on a model that is already open.
    """

    function: Callable[Concatenate[Setup, P], R]
    result: type[R]
    loading: Loading
    edits: tuple[str, ...]
    check: Callable[..., object] | None

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.function)
        setup, *self.parameters = parameters_of(self.function)
        self.all_parameters: dict[str, Parameter] = {}  # and those of all measurements
        every: dict[str, inspect.Parameter] = {}
        sources: list[Callable[..., Any]] = [Setup.open]
        if self.edits:
            sources.append(edit_from_options)
        sources.append(self.function)
        for source in sources:
            every |= inspect.signature(source).parameters
            self.all_parameters |= {parameter.name: parameter for parameter in parameters_of(source)}
        if self.edits:
            for name in _EDITING - {*self.edits}:
                del self.all_parameters[name], every[name]
        del self.all_parameters[setup.name], every[setup.name], every["loading"]
        of_function = [every.pop(parameter.name) for parameter in self.parameters]
        model, *common = every.values()
        self.__signature__ = inspect.Signature(
            sorted([model, *of_function, *common], key=lambda parameter: parameter.kind)
        )
        self.__doc__ = f"{inspect.getdoc(self.function) or ''}\n\n{EVERY}"

    def __repr__(self) -> str:
        """Return what `help` puts above the documentation."""
        return f"<measurement {self.function.__name__}>"

    @plain_by_default()
    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Open the model and measure. `help` shows the arguments."""
        opening = dict(self.__signature__.bind(*args, **kwargs).arguments)
        self.refuse(opening)
        of_function = {
            parameter.name: opening.pop(parameter.name) for parameter in self.parameters if parameter.name in opening
        }
        editing = {name: opening.pop(name) for name in self.edits if name in opening}
        of_data = None
        if of_function.get("data") is not None and opening.get("text") is None:
            of_data = opening.pop("field", None)
        with ProgressBar() as bar:
            if opening.get("progress") is None:
                bar(f"{self.function.__name__}: loading the model", 0, 0)
                opening["progress"] = bar
            edit = edit_from_options(**editing) if editing else None
            setup = replace(Setup.open(**opening, loading=self.loading), edit=edit, data_field=of_data)
            for name, value in editing.items():
                if value:
                    setup.settings[name] = str(named_file(value) if self.all_parameters[name].names_file else value)
            return self._measured(setup, of_function)

    @plain_by_default()
    def on(self, setup: Setup, **kwargs: Any) -> R:
        """Measure on an open model, and leave the `Setup` as it was. The arguments are the measurement's own."""
        self.refuse(kwargs)
        return self._measured(replace(setup, settings=dict(setup.settings), started=time.perf_counter()), kwargs)

    def refuse(self, arguments: Mapping[str, Any]) -> None:
        """Check arguments before a model is opened.

        Raises:
            SinkscopeError: An argument is outside its range, or the measurement cannot use the arguments.
        """
        for name in self.all_parameters.keys() & arguments.keys():
            self.all_parameters[name].check(arguments[name])
        if self.check is not None:
            checked = {
                parameter.name: arguments.get(parameter.name, parameter.default) for parameter in self.parameters
            }
            if checked.get("data") is not None:  # records, whose field is named as that of a text
                checked["field"] = None if arguments.get("text") is not None else arguments.get("field")
            self.check(**checked)

    def _measured(self, setup: Setup, arguments: Mapping[str, Any]) -> R:
        plan = json.dumps(dict(arguments), default=lambda value: type(value).__name__)  # objects have no text
        config = {**setup.target.config.to_dict(), "_name_or_path": ""}  # each process may have a folder of its own
        measured = self.function.__name__, plan, config, setup.text, setup.ids.tolist(), setup.seed
        setup.target.shards.agree("model, text, seed or setting", *measured)
        with held(setup.target), watched_by(setup.progress), evaluating(setup.target.hf):
            result = self.function(setup, **arguments)  # pyright: ignore[reportCallIssue]
        settings: dict[str, Any] = {
            "bos": setup.bos is not None,
            "texts": len(setup.ids),
            "seed": setup.seed,
            TEXT_READ: setup.text_read,
        }
        for parameter in self.parameters:
            if parameter.name not in NO_SETTINGS:
                value = arguments.get(parameter.name, parameter.default)
                settings[parameter.name] = named_file(value) if parameter.names_file else value
        settings |= setup.settings
        return replace(result, model=setup.info(), settings=settings, provenance=setup.provenance())


def measurement(
    *,
    loading: Loading = "stream",
    edits: bool | Sequence[str] = False,
    check: Callable[..., object] | None = None,
) -> Callable[[Callable[Concatenate[Setup, P], R]], Measurement[P, R]]:
    """Turn a function that takes a `Setup` and returns a `Result` into a measurement.

    The public function takes a model and the options of `Setup.open` in addition to its own parameters. Its JSON, page
    and documentation are built from its signature and docstring, and so is its command if it belongs to another
    package than sinkscope.

    Args:
        loading: As in `Setup.open`.
        edits: Whether it can run under a patch, a policy or a guard, or the names of those under which it can; it can
            then also run under `interventions`. `setup.edit` holds what was requested.
        check: Called with the measurement's own arguments, by name, before a model is opened. It raises
            `SinkscopeError` for errors that types and ranges do not exclude.
    """

    def wrap(function: Callable[Concatenate[Setup, P], R]) -> Measurement[P, R]:
        result = get_type_hints(function)["return"]
        if "kind" not in vars(result):
            result.kind = function.__name__.replace("_", "-")
        if isinstance(edits, bool):
            names = tuple(_EDITING) if edits else ()
        else:
            names = (*edits, "interventions")
        return Measurement(function, result, loading, names, check)

    return wrap
