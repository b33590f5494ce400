"""Values, settings and files of records are checked against types, and whatever does not fit is refused in one line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import pytest
from refusals import refused

from sinkscope.files.plain import check_encodable
from sinkscope.files.records import Finite, Natural, Share, build, check_fields, read_rows, read_setting


@dataclass(frozen=True)
class Settings:
    """Settings of a test."""

    share: Share = 0.5
    count: Natural = 3
    names: tuple[Literal["a", "b"], ...] = ("a",)
    value: Literal["second"] | Finite = "second"

    def __post_init__(self):
        check_fields(self)
        if self.count > 100:
            raise ValueError("count is above 100")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"share": 2}, "Settings: share=2: expected a number from 0 to 1"),
        ({"share": "0.5"}, "Settings: share='0.5': expected a number from 0 to 1"),
        ({"count": True}, "Settings: count=True: expected a whole number"),
        ({"names": ("a", "c")}, "Settings: names[1]='c': expected 'a' or 'b'"),
        ({"value": "third"}, "Settings: value='third': expected 'second' or a finite number"),
    ],
)
def test_a_field_that_does_not_fit_is_named_with_what_was_expected(given, said):
    with refused(words=[said]):
        Settings(**given)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("My/File.jsonl", str, "My/File.jsonl"),
        ("'My/File.jsonl'", str, "My/File.jsonl"),
        ("2024", str, "2024"),
        ("2024", int, 2024),
        ("True", bool, True),
        ("false", bool, False),
        ("none", str | None, None),
        ("None", Literal["None", "all"], "None"),
        ("1,0.5", tuple[int | float, ...], (1, 0.5)),
        ("a,B", tuple[str, ...], ("a", "B")),
    ],
)
def test_a_setting_is_read_as_its_type_and_keeps_its_letters(text, kind, value):
    found = read_setting(text, kind, "x")
    assert found == value and type(found) is type(value)


@dataclass(frozen=True)
class Sample:
    id: str
    parts: tuple[Settings, ...] = ()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "a.jsonl line 2 is not JSON: give samples"),
        ("[" * 100_000, "a.jsonl line 2 is not JSON: give samples"),
        ([1], "a.jsonl line 2: [1]: expected an object: give samples"),
        ({"size": 3}, "a.jsonl line 2: id is missing: give samples"),
        ({"id": "a", "parts": [{"count": "3"}]}, "a.jsonl line 2: parts[0].count='3': expected a whole number"),
        ({"id": "a", "parts": [{"count": 101}]}, "count is above 100: give samples"),
    ],
)
def test_damage_of_a_file_is_named_in_one_line(tmp_path, row, says):
    good = {"id": "a", "parts": [{"names": ["a", "b"]}]}
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in (good, row))
    (tmp_path / "a.jsonl").write_text(text)
    with refused(words=[says]):
        for where, one in read_rows(tmp_path / "a.jsonl", "samples"):
            build(Sample, one, where, "samples")


@pytest.mark.parametrize(("text", "says"), [("na\udcefve", "a byte that is not UTF-8"), ("na\ud83d", "half of a")])
def test_a_text_that_is_no_unicode_is_refused(text, says):
    with refused(words=[says, "character 3"]):
        check_encodable(text, "the prompt")
