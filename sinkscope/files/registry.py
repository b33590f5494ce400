"""All measurements and commands, read from the source without importing it, so that `--help` does not load torch.

Every function under `@measurement(...)` or `@command(...)` in any file of the package is an entry, and so is each entry
point of the group `sinkscope.measurements` in an installed package. The public names of `sinkscope`, the command line,
the help, the API page and the tests that every measurement must pass are all built from these entries.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from sinkscope.errors import SinkscopeError

F = TypeVar("F", bound=Callable[..., Any])
ENTRY_POINTS = "sinkscope.measurements"
_ROOT = Path(__file__).parents[1]
_MARK = re.compile(r"^@(?:measurement|command)\b", re.MULTILINE)
_KIND = re.compile(r"^    kind: ClassVar\[str\] = \"([\w-]+)\"", re.MULTILINE)


@dataclass(frozen=True)
class Option:
    """How a parameter appears on the command line, if its name and type do not determine it; used in `Annotated`.

    Attributes:
        name: Name of the option, such as "--prompt-file". None: the parameter's name, in the singular if the option may
            be repeated.
        metavar: Placeholder for its value in the help.
        min: Smallest value, also for callers from Python.
        max: Largest value, also for callers from Python.
        reads: How the value is parsed: "text" reads a file or standard input, "head" reads L0.H4, "commas" splits at
            commas.
        argument: Whether it is a positional argument.
        hidden: Whether only Python callers can give it.
        required: Whether the command line requires it although it has a default in Python.
        own: Whether it belongs to the measurement alone although an option that opens the model has the same name.
        writes: Whether it names a file or folder to write. The command line refuses a path whose replacement would lose
            other data.
        many: Whether it takes several values although its type does not say so.
    """

    name: str | None = None
    metavar: str | None = None
    min: int | float | None = None
    max: int | float | None = None
    reads: Literal["text", "head", "commas"] | None = None
    argument: bool = False
    hidden: bool = False
    required: bool = False
    own: bool = False
    writes: bool = False
    many: bool = False


Positive = Annotated[int, Option(min=1)]
"""A whole number of at least 1."""
Count = Annotated[int, Option(min=0)]
"""A whole number of at least 0."""
Hidden = Annotated[Any, Option(hidden=True)]
"""Anything; only callers from Python can give it."""
_NAMES: dict[str, Any] = {
    "Annotated": Annotated,
    "Any": Any,
    "Callable": Callable,
    "Count": Count,
    "Hidden": Hidden,
    "Literal": Literal,
    "Option": Option,
    "Path": Path,
    "Positive": Positive,
    "Sequence": Sequence,
    "object": Any,
    "torch": SimpleNamespace(device=str, dtype=str),  # the command line gives them by name
}


def command(
    *,
    group: str,
    command: str | None = None,
    outputs: Sequence[Any] = (),
    several: bool = False,
    flag: str | None = None,
) -> Callable[[F], F]:
    """Give a plain function a command, built from its signature and docstring. Its return value is printed.

    Args:
        group: The help lists commands of one group together.
        command: Words of the command. None: the function's name with dashes.
        outputs: Additional files that the command writes from the result (`sinkscope.measure.Output`).
        several: The function shares its command with a measurement. It runs instead of the measurement if an option
            that takes one value there and many here (`revision` and `revisions`) is given several times.
        flag: The function shares its command with another one and runs when this option is given.
    """

    def wrap(function: F) -> F:
        function.outputs = tuple(outputs)  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return wrap


@dataclass(frozen=True)
class Parameter:
    """One parameter of an entry.

    Attributes:
        name: Name in Python.
        type: Its annotation without `Annotated` and without None.
        option: How it appears on the command line.
        default: Its default; `inspect.Parameter.empty` if it has none.
        help: Its description, from the docstring.
        many: Whether it takes several values.
        keyword: Whether Python callers must pass it by name.
    """

    name: str
    type: Any
    option: Option
    default: Any
    help: str
    many: bool
    keyword: bool

    @property
    def required(self) -> bool:
        """Whether the command line requires it."""
        return self.option.required or self.default is inspect.Parameter.empty

    @property
    def flag(self) -> str:
        """The option's name on the command line."""
        stem = self.name.removesuffix("s") if self.many else self.name
        return self.option.name or "--" + stem.replace("_", "-")

    def check(self, value: Any) -> None:
        """Refuse a value outside the option's range.

        Raises:
            SinkscopeError: The value is too small, too large, or not a number.
        """
        if value is None or self.type not in (int, float):
            return
        from sinkscope.files.records import between, conform

        low, high = self.option.min, self.option.max
        declared = low is not None or high is not None
        if high is None:
            high = 1e300 if self.type is float else (1 << 63 if self.name == "seed" else 1 << 31) - 1
        kind = between(self.type if declared else float, low, high)
        for one in value if self.many else (value,):
            if declared or isinstance(one, int | float):
                conform(kind, one, f"{self.flag} ", strict=declared, then=f" ({self.name}=... in Python)")


@dataclass(frozen=True, kw_only=True)
class ScanMark:
    """How a measurement takes part in `sinkscope scan`: the literal `scan={...}` of its decorator.

    Paths lead from the result to a value: attribute names and item indices, separated by dots. `*` stands for all
    items; the median over those that are not None is used.

    Attributes:
        order: Position in the run and on the card; lower numbers come first.
        seconds: Seconds with --quick and without it, on a small model; used as weights of the remaining time.
        quick: Arguments with --quick. None: it is then left out.
        full: Arguments without --quick.
        streams: Whether --quick runs it on a model that is read layer by layer. False if it reads the layers many
            times.
        numbers: Label -> paths of the value, of its control and, if known, of the margin within which it varies by
            chance; "a - b" is the distance of two paths.
        facts: Label -> path of a word or a list by which two models can be compared.
    """

    order: int = 100
    seconds: Sequence[float] = (5.0, 30.0)
    quick: dict[str, Any] | None = field(default_factory=dict)
    full: dict[str, Any] = field(default_factory=dict)
    streams: bool = True
    numbers: dict[str, Sequence[str]] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """A function under `@measurement` or `@command`, as its source declares it.

    Attributes:
        module: Module that defines it.
        name: Name of the function, which is also its public name.
        decorator: "measurement" or "command".
        node: Syntax tree of its definition.
        marks: Arguments of the decorator that are literals. For `outputs`, a list of (name, help, required).
        text: Source of its module.
    """

    module: str
    name: str
    decorator: str
    node: ast.FunctionDef
    marks: dict[str, Any]
    text: str = ""

    @property
    def command(self) -> str:
        """Words of its command, such as "find-sinks" or "patch make"."""
        return self.marks.get("command") or self.name.replace("_", "-")

    @property
    def command_line(self) -> str:
        """The words to type for it: its command, and its flag if it shares the command."""
        return self.command + (f" --{self.marks['flag'].replace('_', '-')}" if "flag" in self.marks else "")

    @property
    def group(self) -> str:
        """Group under which the help lists the command."""
        return self.marks.get("group", "Other")

    @cached_property
    def scan(self) -> ScanMark | None:
        """How it takes part in `sinkscope scan`; None if it does not."""
        return ScanMark(**self.marks["scan"]) if "scan" in self.marks else None

    @property
    def doc(self) -> str:
        """Its docstring."""
        return ast.get_docstring(self.node) or ""

    @property
    def summary(self) -> str:
        """First paragraph of its docstring, on one line."""
        return " ".join(self.doc.split("\n\n")[0].split())

    @property
    def help(self) -> str:
        """Its docstring without the sections, as the help of its command."""
        return re.split(r"\n\n(?:Args|Example|Raises|Returns):\n", self.doc)[0]

    @property
    def examples(self) -> tuple[str, ...]:
        """The lines of the "Example" section of its docstring: commands to type."""
        section = re.search(r"^Example:\n((?:    .+\n?)*)", self.doc, re.MULTILINE)
        return tuple(line.strip() for line in (section[1] if section else "").splitlines())

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Its parameters, without the `Setup` of a measurement."""
        args = self.node.args
        helps = described(self.doc, "Args")
        first = 1 if self.decorator == "measurement" else 0
        positional = args.args[first:]
        padding = [None] * (len(positional) - len(args.defaults))
        pairs = [(a, d, False) for a, d in zip(positional, [*padding, *args.defaults], strict=True)]
        pairs += [(a, d, True) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
        return tuple(
            parameter(
                arg.arg,
                Any if arg.annotation is None else self._value(arg.annotation),
                inspect.Parameter.empty if default is None else self._value(default),
                help=helps.get(arg.arg, ""),
                keyword=keyword,
            )
            for arg, default, keyword in pairs
        )

    def kinds(self) -> tuple[str, ...]:
        """Kinds of the results that it returns. This imports their modules."""
        classes = None if self.node.returns is None else self._value(self.node.returns)
        self.load()  # a measurement assigns the kind to the class of its result
        return tuple(kind for cls in get_args(classes) or [classes] if (kind := getattr(cls, "kind", None)))

    def load(self) -> Any:
        """The function itself. This imports its module."""
        return getattr(import_module(self.module), self.name)

    def _value(self, node: ast.expr) -> Any:
        """The value of an annotation or a default; a name's module is imported only if the name is unknown here."""
        code = compile(ast.Expression(node), self.module, "eval")
        try:
            return eval(code, {**_NAMES, **self._known})
        except NameError as error:
            name = str(error.name)
            self._known[name] = self._look_up(name)
            return self._value(node)

    @cached_property
    def _known(self) -> dict[str, Any]:
        """Names that have been looked up."""
        return {}

    def _look_up(self, name: str) -> Any:
        """A constant of the module, or the object it imports under this name."""
        home = self.module
        line = re.search(rf"^{name} = (.+)$", self.text, re.MULTILINE)
        for value in _literal(line[1]) if line else []:  # much faster than parsing the whole file
            return value
        for node in ast.walk(ast.parse(self.text)):
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
                for value in _literal(node.value):
                    return value
            if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
                home = node.module or home
        return getattr(import_module(home), name)


@cache
def entries() -> dict[str, Entry]:
    """Every entry by its public name: those of the package, then those of entry points.

    Raises:
        SinkscopeError: Two entries share a name or a command.
    """
    found: dict[str, Entry] = {}
    for file in sorted(_ROOT.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "\n@measurement" in text or "\n@command" in text:
            module = ".".join(file.relative_to(_ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
            for entry in read_entries(module, text):
                _add(found, entry)
    for point in entry_points(group=ENTRY_POINTS):
        for entry in external_entries(point.module):
            if entry.name == (point.attr or entry.name):
                _add(found, entry)
    return found


@cache
def shared_parameters(function: str) -> tuple[Parameter, ...]:
    """Parameters of `Setup.open` or `edit_of`, shared by all measurements or by all measurements with edits."""
    decorator = "measurement" if function == "open" else "command"  # the first argument of a method is the class
    file = "measure/__init__.py" if function == "open" else "kv/edit_of.py"
    tree = ast.parse((_ROOT / file).read_text(encoding="utf-8"))
    defined = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return Entry("sinkscope.measure", function, decorator, defined[function], {}).parameters


def external_entries(module: str) -> list[Entry]:
    """The entries of a module outside the package, which is located but not imported."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise SinkscopeError(f"entry point {module!r} of {ENTRY_POINTS} has no source: reinstall its package")
    return read_entries(module, Path(spec.origin).read_text(encoding="utf-8"))


def _add(found: dict[str, Entry], entry: Entry) -> None:
    for other in found.values():
        same = all(other.marks.get(m) == entry.marks.get(m) for m in ("flag", "several"))
        same = same and other.command == entry.command
        if other.name == entry.name or same:
            raise SinkscopeError(
                f"{entry.module}.{entry.name} and {other.module}.{other.name} are registered under one name: "
                "give one of them another name or command"
            )
    found[entry.name] = entry


def read_entries(module: str, text: str) -> list[Entry]:
    """The entries of one source file.

    Args:
        module: Name of the module.
        text: Its source.
    """
    found: list[Entry] = []
    for node in _marked(text):
        for mark in node.decorator_list:
            decorator = getattr(getattr(mark, "func", None), "id", None)
            if decorator in ("measurement", "command") and isinstance(mark, ast.Call):
                marks = {k.arg: v for k in mark.keywords if k.arg for v in _literal(k.value)}
                marks |= {k.arg: _outputs(k.value) for k in mark.keywords if k.arg == "outputs"}
                found.append(Entry(module, node.name, decorator, node, marks, text))
    return found


def _marked(text: str) -> list[ast.FunctionDef]:
    """Functions under a decorator. In formatted source only the functions are parsed, because that is faster."""
    starts = [m.start() for m in _MARK.finditer(text)]
    try:
        trees = [ast.parse(text[start:].partition("\n\n\n")[0]) for start in starts]
    except SyntaxError:
        trees = [ast.parse(text)]
    return [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]


@cache
def kinds() -> dict[str, str]:
    """Each kind of result, with the module that defines it."""
    found: dict[str, str] = {}
    for file in sorted(_ROOT.rglob("*.py")):
        module = ".".join(file.relative_to(_ROOT.parent).with_suffix("").parts)
        found |= dict.fromkeys(_KIND.findall(file.read_text(encoding="utf-8")), module)
    found.pop("result", None)  # the base class of all results
    for entry in entries().values():
        if entry.decorator == "measurement" and entry.module not in found.values():
            found[entry.name.replace("_", "-")] = entry.module
    return found


def _literal(node: ast.expr | str) -> list[Any]:
    """The value of a literal, in a list; an empty list for anything else."""
    try:
        return [ast.literal_eval(node)]
    except (ValueError, TypeError, SyntaxError):
        return []


def _outputs(node: ast.expr) -> list[tuple[str, str, bool]]:
    """Name, help and whether it is required, of each `Output(...)` in a list."""
    found: list[tuple[str, str, bool]] = []
    for call in getattr(node, "elts", []):
        given = [v for arg in call.args for v in _literal(arg)]
        named = {k.arg: v for k in call.keywords for v in _literal(k.value)}
        found.append((given[0], given[1], bool(named.get("required", False))))
    return found


def described(doc: str, title: str) -> dict[str, str]:
    """The description of each name in a section of a docstring, such as "Args" or "Attributes"."""
    section = re.search(rf"^{title}:\n((?:    .*\n?|\n)*)", doc, re.MULTILINE)
    found: dict[str, list[str]] = {}
    for line in (section[1] if section else "").splitlines():
        if entry := re.match(r"    (\w+): (.*)", line):
            found[entry[1]] = [entry[2]]
        elif found and line.startswith("        "):
            found[next(reversed(found))].append(line.strip())
    return {name: " ".join(lines) for name, lines in found.items()}


def parameter(name: str, hint: Any, default: Any, *, help: str = "", keyword: bool = False) -> Parameter:
    """Build a parameter from its annotation.

    Args:
        name: Name in Python.
        hint: Its annotation, evaluated.
        default: Its default; `inspect.Parameter.empty` if it has none.
        help: Its description, from the docstring.
        keyword: Whether Python callers must pass it by name.
    """
    option = Option()
    many = False
    while True:
        origin, args = get_origin(hint), get_args(hint)
        if origin is Annotated:
            option = next((a for a in args[1:] if isinstance(a, Option)), option)
            hint = args[0]
        elif type(None) in args:  # a union with None: the None is only the default
            inner = [a for a in args if a is not type(None)]
            hint = Union[tuple(inner)]  # noqa: UP007 - made of a tuple
        elif isinstance(origin, type) and issubclass(origin, Sequence) and args[1:] in ((), (...,)) and not many:
            many, hint = True, args[0]
        elif len(args) == 2 and args[1] == Sequence[args[0]]:  # one value, or several
            hint = args[1]
        else:
            return Parameter(name, hint, option, default, help, many or option.many, keyword)
