"""Arguments from Python are checked before any work begins: each public parameter gets wrong values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest
from refusals import refused

import sinkscope
from sinkscope.files.arguments import Parameter, parameters_of
from sinkscope.hooks.edit.base import Intervention
from sinkscope.measure import Measurement

ELSEWHERE = ("list_models", "sink_mask", "sink_dims")  # no parameter of one type; test_mask has what they refuse
FUNCTIONS = [name for name in sinkscope.__all__ if callable(getattr(sinkscope, name)) and name not in ELSEWHERE]
FUNCTIONS = [name for name in FUNCTIONS if not inspect.isclass(getattr(sinkscope, name))]


class Stranger:
    """Something that no function takes."""

    def __repr__(self) -> str:
        return "a stranger"


def parameters(name: str) -> list[Parameter]:
    function = getattr(sinkscope, name)
    if isinstance(function, Measurement):
        return list(function.all_parameters)
    return [one for one in parameters_of(function) if inspect.signature(function).parameters[one.name].kind != 4]


def takes_anything(one: Parameter) -> bool:
    return one.type in (Any, object)


def wrong_values(one: Parameter) -> Iterator[Any]:
    """A stranger; for words another word, for switches a number, for numbers NaN, a switch and a huge one."""
    yield Stranger()
    shown = str(one.type)
    if one.type is bool:
        yield from (1, "yes", math.nan)
    elif "Literal" in shown and " | str" not in shown:
        yield "smell"
    elif one.type in (int, float):
        yield from (math.nan, math.inf, True, "3", 10**400, "x")
    elif one.type is str:
        yield from (3, math.nan)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_of_a_public_function_refuses_wrong_values_at_once(name, monkeypatch):
    monkeypatch.setattr("sinkscope.measure.setup.open_target", lambda *_, **__: pytest.fail("a model was opened"))
    function = getattr(sinkscope, name)
    tried = 0
    for one in parameters(name):
        if takes_anything(one):
            continue
        for value in wrong_values(one):
            given = [value]
            if one.many and not isinstance(value, Stranger):
                given.append([value])
            for each in given:
                arguments: dict[str, Any] = {one.name: each}
                for other in parameters(name):
                    if other.default is inspect.Parameter.empty and other.name != one.name:
                        arguments[other.name] = ["x"] if other.many else "x"
                with refused(words=[one.name]) as caught:
                    function(**arguments)
                assert repr(value)[:70] in str(caught.value), (one.name, value)
                tried += 1
    assert tried >= 2 or all(map(takes_anything, parameters(name)))


CLASSES: dict[str, Any] = {}
for each_room in (sinkscope, sinkscope.kv):
    for each_name in each_room.__all__:
        each_class = getattr(each_room, each_name)
        if inspect.isclass(each_class) and issubclass(each_class, Intervention) and not inspect.isabstract(each_class):
            CLASSES[each_name] = each_class
NEEDED = {
    "Add": {"vector": [1.0], "site": "blocks.0.hook_resid_post"},
    "Observe": {"fn": print},
    "Ablate": {"sites": [(0, 1)]},
    "SinkPatch": {"sites": [(0, 1)]},
    "Knockout": {"keys": "first"},
}


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_of_a_policy_or_intervention_refuses_wrong_values(name):
    made = CLASSES[name]
    tried = 0
    for field, one in list(inspect.signature(made.__init__).parameters.items())[1:]:
        values: list[Any] = [Stranger(), math.nan]
        if "bool" in str(one.annotation):
            values += [1, "yes"]
        elif "Literal" in str(one.annotation) or one.annotation in ("Where", "Variant"):
            values.append("smell")
        elif any(word in str(one.annotation) for word in ("Whole", "Natural", "Budget", "Part")) and field != "layers":
            values += [-1, True, 1.5, "x"]
        for value in values:
            with refused(words=[field] if field == "vector" else [field, repr(value)]):
                made(**{**NEEDED.get(name, {}), field: value})
            tried += 1
    assert tried


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: sinkscope.lines(lenght=9), r"lines\(\) got .*'lenght'; did you mean length\?"),
        (lambda: sinkscope.repeat.on(None, bos=True), r"repeat\.on\(\) got .*'bos'; it takes quantity, tokens, prefix"),
        (lambda: sinkscope.scan(tokens=2), r"scan\(\) got .*'tokens'; did you mean tokenizer\?"),
    ],
)
def test_an_argument_that_a_function_does_not_take_is_named_beside_what_was_meant(call, said):
    with pytest.raises(TypeError, match=said):
        call()
