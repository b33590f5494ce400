"""What a command takes, read from the text of its module: torch need not be imported to know its options."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, get_type_hints

from sinkscope.files.catalog import PACKAGE, sources
from sinkscope.results.options import Output, Parameter, descriptions_of, parameter, parameters_of

SETUP = ("sinkscope.measure.setup", "open")
EDIT = ("sinkscope.measure.edit_options", "edit_from_options")
"""Functions whose parameters measurements share; the second: those that can run under interventions."""
LIGHT = (
    "sinkscope.results.",
    "sinkscope.files.",
    "sinkscope.loops.text.",
    "collections",
    "pathlib",
    "pydantic",
    "typing",
)
"""Modules that are imported for what their names mean; of others, only the text is read."""


@dataclass(frozen=True)
class Outline:
    """What the command line knows of a function before it runs.

    Attributes:
        doc: Its docstring.
        parameters: What it takes.
        outputs: Additional files that it writes; of a function that is not imported, without the functions that write.
        measures: Whether it is a measurement, which opens a model.
        returns_result: Whether it returns a result, rather than printing what it finds.
    """

    doc: str
    parameters: tuple[Parameter, ...]
    outputs: tuple[Output, ...] = ()
    measures: bool = True
    returns_result: bool = True

    @classmethod
    def of(cls, function: Any) -> Outline:
        """The outline of a function that is imported."""
        doc = inspect.getdoc(function) or ""
        parameters = getattr(function, "all_parameters", None)
        if parameters is not None:
            return cls(doc, parameters, tuple(function.outputs))
        returns = get_type_hints(function).get("return")
        return cls(doc, parameters_of(function), (), False, returns is not type(None))

    @classmethod
    def read(cls, module: str, name: str) -> Outline | None:
        """The outline of a command of sinkscope, whose module is not imported; None of one of another package."""
        if module not in sources():
            return None
        names = Names(module)
        function = names.function(name)
        doc = ast.get_docstring(function) or ""
        own = names.parameters(function)
        mark = function.decorator_list[0]
        if not isinstance(mark, ast.Call) or ast.unparse(mark.func) != "measurement":
            return cls(doc, tuple(own), (), False, ast.unparse(function.returns or mark) != "None")
        settings = {one.arg: one.value for one in mark.keywords}
        parameters = own[1:]  # without the setup
        taken = ["cls", *(one.name for one in own)]
        for place, shared in (SETUP, EDIT)[: 1 + ("edits" in settings)]:
            others = Names(place)
            for one in others.parameters(others.function(shared)):
                if one.name not in taken:
                    parameters.append(one)
        outputs: list[Output] = []
        if "outputs" in settings:
            outputs = names.value(settings["outputs"])
        return cls(doc, tuple(parameters), tuple(outputs))


class Names(dict[str, Any]):
    """What the names of a module mean, as far as that is known without importing it."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self._tree = ast.parse(sources()[module])

    def function(self, name: str) -> ast.FunctionDef:
        """A function or method of the module."""
        functions = [node for node in ast.walk(self._tree) if isinstance(node, ast.FunctionDef)]
        return next(node for node in functions if node.name == name)

    def parameters(self, function: ast.FunctionDef) -> list[Parameter]:
        """The parameters of a function; a type that is not known is `Any`."""
        arguments = function.args
        descriptions = descriptions_of(ast.get_docstring(function) or "", "Args")
        names = [*arguments.args, *arguments.kwonlyargs]
        defaults = [None] * (len(arguments.args) - len(arguments.defaults))
        parameters: list[Parameter] = []
        for one, default in zip(names, [*defaults, *arguments.defaults, *arguments.kw_defaults], strict=True):
            value = self.value(default) if default else inspect.Parameter.empty
            hint = self.value(one.annotation) if one.annotation else Any
            parameters.append(parameter(one.arg, hint, value, help=descriptions.get(one.arg, "")))
        return parameters

    def value(self, expression: ast.expr) -> Any:
        """What an expression means; `Any` if that depends on names that are not known."""
        code = compile(ast.Expression(expression), PACKAGE, "eval")
        try:
            return eval(code, {}, self)
        except NameError:
            return Any

    def __missing__(self, name: str) -> Any:
        """What a name means that the module imports, assigns or defines."""
        for node in self._tree.body:
            if isinstance(node, ast.ImportFrom):
                for one in node.names:
                    if name == (one.asname or one.name):
                        return _imported(str(node.module), one.name)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return self.value(node.value)
            elif isinstance(node, ast.FunctionDef) and node.name == name:
                return None  # nobody calls it
        raise KeyError(name)


def _imported(module: str, name: str) -> Any:
    """What a name means that is imported from a module."""
    if module.startswith(LIGHT):
        return resolve_name(f"{module}:{name}")
    if module in sources():
        return Names(module)[name]
    raise KeyError(name)
