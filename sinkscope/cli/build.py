"""Commands made of the registry's entries: one typer function each, from signature and docstring."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_origin

import typer
from typer.core import TyperGroup

from sinkscope._console import note
from sinkscope.cli.common import Backend, check_outputs, deliver, layer_head, read_prompt
from sinkscope.errors import SinkscopeError
from sinkscope.progress import ProgressBar
from sinkscope.registry import Entry, Option, Parameter, entries, shared_parameters

_READS: dict[str | None, Callable[[Any], Any]] = {
    "text": read_prompt,
    "head": layer_head,
    "commas": lambda text: [word.strip() for word in text.split(",") if word.strip()],
}
_FILES = {
    "json": ("--json", "FILE|-", "Write the result as JSON; - is standard output."),
    "html": ("--html", "FILE", "Write conclusion, tables and figures into one HTML file."),
    "png": ("--png", "FILE", "Write the figure; this needs kaleido and a browser."),
}


class Groups(TyperGroup):
    """Commands in the help, one section for each group."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the sections in the order in which groups first appear."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            found = self.get_command(ctx, name)
            if found is not None and not found.hidden:
                panel = getattr(found, "rich_help_panel", None) or "Other"
                sections.setdefault(str(panel), []).append((name, found.get_short_help_str(formatter.width - 24)))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def add_commands(app: typer.Typer) -> None:
    """Hang a command on the app for every entry of the registry.

    Args:
        app: of the whole command line; an entry such as "patch make" goes to a group below it.
    """
    together: dict[str, list[Entry]] = {}
    for entry in entries().values():
        together.setdefault(entry.command, []).append(entry)
    groups = {str(g.typer_instance.info.name): g.typer_instance for g in app.registered_groups if g.typer_instance}
    for words, parts in together.items():
        parts.sort(key=lambda entry: entry.marks.get("flag") is not None)
        home, _, name = words.rpartition(" ")
        if home and home not in groups:
            groups[home] = typer.Typer(name=home, cls=Groups, rich_markup_mode=None)
            app.add_typer(groups[home], rich_help_panel=parts[0].group, help=f"The commands of {home}.")
        place = groups[home] if home else app
        place.command(name, help=parts[0].doc.split("\n\nArgs:")[0], rich_help_panel=parts[0].group)(_function(parts))


def _function(parts: list[Entry]) -> Callable[..., None]:
    """What typer calls: it reads the options, runs the function, and delivers the result."""
    parameters = _parameters(parts)
    measures = parts[0].decorator == "measurement"
    delivers = measures or not (isinstance(returned := parts[0].node.returns, type(None)) or _is_none(returned))
    outputs = [output for part in parts for output in part.marks.get("outputs", [])]
    signature = [_typed(p) for p in parameters.values() if not p.option.hidden]
    if measures:
        text = "Load the model as this kind of object. By default a model is read as the command needs it."
        signature.append(_plain("backend", Backend | None, None, help=text))
    flags = {part.marks["flag"]: part for part in parts if "flag" in part.marks}
    for flag, part in flags.items():
        signature.append(_plain(flag, bool, False, f"--{flag.replace('_', '-')}", help=part.summary))
    for name, text, required in outputs:
        default = inspect.Parameter.empty if required else None
        signature.append(_plain(name, str if required else str | None, default, metavar="FILE", help=text))
    for name, (option, metavar, text) in _FILES.items() if delivers else ():
        signature.append(_plain(name, str | None, None, option, metavar=metavar, help=text))

    def run(**values: Any) -> None:
        files = {name: values.pop(name, None) for name in _FILES}
        written = {name: values.pop(name) for name, _, _ in outputs}
        check_outputs(**files, **written)
        chosen = [part for flag, part in flags.items() if values.pop(flag)]
        alone = [part for part in chosen if "adds" not in part.marks]
        if len(alone) > 1:
            names = " and ".join(f"--{part.marks['flag']}" for part in alone)
            raise SinkscopeError(f"{names} are two measurements: give one of them at a time")
        main = alone[0] if alone else parts[0]
        backend = values.pop("backend", None) if measures else None
        given = _given(values, parameters)
        for part in chosen:
            given |= part.marks.get("sets") or {}
        _refuse_foreign(main, [p for p in parts if p not in chosen], given)
        for name in given:
            if read := _READS.get(parameters[name].option.reads):
                given[name] = _read(read, parameters[name], given[name])
        result, also = _measured(main, [p for p in chosen if p is not main], given, backend, measures)
        if delivers:
            deliver(result, **files, also=also)
        saves = {o.name: o.save for part in parts for o in getattr(part.load(), "outputs", ())} if outputs else {}
        for name, path in written.items():
            if path is not None and isinstance(said := saves[name](result, path), str):
                note(said)

    run.__signature__ = inspect.Signature(signature)  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {p.name: p.annotation for p in signature}
    run.__name__ = parts[0].name
    return run


def _read(read: Callable[[Any], Any], parameter: Parameter, words: Any) -> Any:
    """What the words mean; lists with commas that are given several times become one list."""
    if not parameter.many:
        return read(words)
    values = [read(word) for word in words]
    return [one for part in values for one in part] if parameter.option.reads == "commas" else values


def _measured(main: Entry, also: list[Entry], given: dict[str, Any], backend: Any, measures: bool) -> tuple[Any, Any]:
    """The result of a function, and those of the measurements that go with it."""
    takes_progress = measures or any(p.name == "progress" for p in main.parameters)
    function = main.load()
    if callable(refuse := getattr(function, "refuse", None)):
        refuse(given)  # before a model is opened
    if any(p.name in given for p in shared_parameters("edit_of")) and getattr(function, "edits", False):
        from sinkscope.measure.setup import edit_of  # a patch or policy is refused before a model is opened

        names = [p.name for p in shared_parameters("edit_of") if p.name in given]
        given["interventions"] = edit_of(**{name: given.pop(name) for name in names})
    if backend is not None:
        from sinkscope.models.load import load

        options = {name: given[name] for name in ("revision", "device", "dtype") if name in given}
        given["model"] = load(given.get("model"), backend=backend.value, **options)
    with ProgressBar() if takes_progress else nullcontext() as progress:
        more = {"progress": progress} if takes_progress else {}
        result = function(**given, **more)
        shared = {p.name for p in shared_parameters("open")}
        common = {name: value for name, value in given.items() if name in shared}
        return result, {part.marks["adds"]: part.load()(**common, **more) for part in also}


def _parameters(parts: list[Entry]) -> dict[str, Parameter]:
    """Every parameter of a command: the functions' own, then those that all measurements share."""
    found: dict[str, Parameter] = {}
    measures = parts[0].decorator == "measurement"
    shared = {p.name: p for p in shared_parameters("open")} if measures else {}
    for part in parts:
        for parameter in part.parameters:  # what all share is described as for all, unless the first one differs
            found.setdefault(parameter.name, parameter if part is parts[0] else shared.get(parameter.name, parameter))
    found = {**found, **{name: parameter for name, parameter in shared.items() if name not in found}}
    if measures:
        for parameter in shared_parameters("edit_of") if any(p.marks.get("edits") for p in parts) else ():
            found.setdefault(parameter.name, parameter)
    return found


def _given(values: dict[str, Any], parameters: dict[str, Parameter]) -> dict[str, Any]:
    """What differs from the defaults, by the names that the function knows."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        empty = value in (None, [], ()) and parameters[name].default is not inspect.Parameter.empty
        if not empty and value != parameters[name].default:
            found[name] = value.value if isinstance(value, StrEnum) else value
    return found


def _refuse_foreign(main: Entry, others: list[Entry], given: dict[str, Any]) -> None:
    """An option of a measurement that does not run would say nothing.

    Raises:
        SinkscopeError: one was given.
    """
    mine = {p.name for p in main.parameters} | {p.name for p in shared_parameters("open")}
    for other in others:
        for parameter in other.parameters:
            if parameter.name in given and parameter.name not in mine:
                flag = other.marks.get("flag")
                remedy = f"give --{flag}, too, or leave it out" if flag else "leave it out"
                value = given[parameter.name]
                shown = value if parameter.many else [] if value is True else [value]
                words = " ".join([parameter.flag, *map(str, shown)])
                raise SinkscopeError(f"{words}: this run has no use for it; {remedy}")


def _typed(parameter: Parameter) -> inspect.Parameter:
    """A parameter as typer reads it."""
    option, kind = parameter.option, bool if isinstance(parameter.default, bool) else parameter.type
    if option.reads == "head" or option.reads == "commas" or kind not in (int, float, str, bool, Path):
        kind = kind if get_origin(kind) is Literal and option.reads is None else str
    empty = parameter.required
    default = inspect.Parameter.empty if empty else None if parameter.many else parameter.default
    many = parameter.many
    hint = list[kind] if many else kind  # pyright: ignore[reportInvalidTypeForm]
    text = parameter.help + (" It may be given several times." if many and not option.argument else "")
    more: dict[str, Any] = {"help": text, "metavar": option.metavar, "min": option.min, "max": option.max}
    if option.max is not None and option.max > 1 << 32:  # in the help it would only be noise
        more["max"] = None
    if kind is int:
        more |= {key: None if more[key] is None else int(more[key]) for key in ("min", "max")}
    if many and not empty and parameter.default:
        more["show_default"] = ", ".join(map(str, cast("list[Any]", parameter.default)))
    if option.argument:
        info: Any = typer.Argument(**more)
    elif kind is bool:
        both = parameter.default is not False
        info = typer.Option(f"{parameter.flag}/--no-{parameter.flag[2:]}" if both else parameter.flag, help=text)
    else:
        info = typer.Option(parameter.flag, **more)
    whole = Annotated[hint if default is not None else hint | None, info]
    return inspect.Parameter(parameter.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=whole)


def _plain(name: str, hint: Any, default: Any, *flags: str, **more: Any) -> inspect.Parameter:
    info = typer.Option(*(flags or [f"--{name.replace('_', '-')}"]), **more)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info])


def _is_none(node: Any) -> bool:
    return getattr(node, "value", "") is None


__all__ = ["Groups", "Option", "add_commands"]
