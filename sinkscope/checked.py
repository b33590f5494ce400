"""Values checked against their annotated types by pydantic, with a one-line error for whatever does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from functools import cache, wraps
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from sinkscope.errors import SinkscopeError

T = TypeVar("T")
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Share = Annotated[float, Strict(), Field(ge=0, le=1, allow_inf_nan=False)]
Whole = Annotated[int, Strict(), Field(ge=0)]
Natural = Annotated[int, Strict(), Field(ge=1)]
_adapter: Callable[[Any], Any] = cache(TypeAdapter)


def conform(kind: Any, value: Any, name: str, *, page: str | None = None) -> Any:
    """`value`, if it is of the type `kind`.

    Args:
        kind: a type, such as `Whole` or `list[Share]`.
        value: any object.
        name: what the error calls it.
        page: of the documentation.

    Raises:
        SinkscopeError: it is not, with what was expected.
    """
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise SinkscopeError(_refusal(error, value, name), page=page) from None


@dataclass_transform(frozen_default=True)
def checked(cls: type[T]) -> type[T]:
    """Make a frozen dataclass whose fields are checked against their annotations; the error is a SinkscopeError."""
    made: Any = dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)
    build: Callable[..., None] = made.__init__
    usual = {name: field.default for name, field in made.__dataclass_fields__.items() if field.default is not MISSING}

    @wraps(build)
    def init(self: Any, *args: Any, **given: Any) -> None:
        try:
            build(self, *args, **given)
        except ValidationError as error:
            problem = error.errors()[0]
            if isinstance(cause := problem.get("ctx", {}).get("error"), SinkscopeError):
                raise cause from None  # what __post_init__ said
            field = str(problem["loc"][0])
            default = f"; the default is {usual[field]}" if field in usual else ""
            raise SinkscopeError(f"{_refusal(error, given, '')}{default}") from None

    made.__init__ = init
    return made


def _refusal(error: ValidationError, data: Any, name: str) -> str:
    """The first problem in one line: the place, what is there, what was expected."""
    problems = error.errors(include_url=False)
    missing = problems[0]["type"] == "missing"
    place, value = "", data
    for part in problems[0]["loc"]:  # names of members of a union stand in between
        if isinstance(value, Mapping) and (part in value or missing):
            place, value = f"{place}.{part}".removeprefix("."), value.get(part)
        elif isinstance(value, Sequence) and isinstance(part, int):
            place, value = f"{place}[{part}]", value[part]
    place = f"{name}: {place}" if name and place else name + place
    if missing:
        return f"{place} is missing"
    same = [p["msg"] for p in problems if p["input"] is problems[0]["input"]]
    expected = " or ".join(dict.fromkeys(m.removeprefix("Input should be ") for m in same))
    shown = repr(problems[0]["input"])
    return f"{place} is {shown if len(shown) <= 80 else f'{shown[:77]}...'}: expected {expected}"
