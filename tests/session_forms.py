"""Real forms of sessions, each as its program writes neutral turns (`fixtures/session_forms.json`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

FIXTURES = Path(__file__).with_name("fixtures")


class Turn(NamedTuple):
    """A neutral turn: what a user or an assistant says, or a call and its result."""

    role: str
    text: str = ""
    tool: str = ""
    arguments: dict[str, Any] | None = None
    result: str = ""


def called(tool: str, result: str, **arguments: Any) -> Turn:
    return Turn("called", "", tool, arguments, result)


def filled(template: Any, values: dict[str, Any]) -> Any:
    """A template of JSON: a text "<name>" becomes the value, and a "<name>" within a text its words."""
    text = json.dumps(template)
    for name, value in values.items():
        text = text.replace(f'"<{name}>"', json.dumps(value))
        if isinstance(value, str):
            text = text.replace(f"<{name}>", json.dumps(value)[1:-1])
    return json.loads(text)


def _written(form: dict[str, Any], turns: list[Turn]) -> str:
    entries: list[str] = []
    for place, turn in enumerate(turns):
        values = {**turn._asdict(), "arguments as text": json.dumps(turn.arguments)}
        values |= {"number": place, "key": f"{place:08d}", "second": f"{place % 60:02d}"}
        entries += map(json.dumps, filled(form[turn.role], values))
    whole = json.dumps(form["whole"]).replace('"<turns>"', ", ".join(entries))
    if form["file"].endswith(".json"):
        return whole
    return "".join(f"{json.dumps(entry)}\n" for entry in json.loads(whole))


_TEMPLATES = json.loads((FIXTURES / "session_forms.json").read_text())
FORMS: dict[str, tuple[str, Callable[[list[Turn]], str]]] = {}
for _name, _form in _TEMPLATES.items():
    FORMS[_name] = (_form["file"], partial(_written, {**_TEMPLATES.get(_form.get("like"), {}), **_form}))
