from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from refusals import refused

from sinkscope.files.plain import plain
from sinkscope.files.provenance import CHECKOUT, ModelInfo, Provenance, documented_at, provenance
from sinkscope.results.result import Result


@dataclass(frozen=True)
class Part:
    layer: int
    expert: int | None
    label: str


@dataclass(frozen=True, kw_only=True)
class Sample(Result):
    kind: ClassVar[str] = "test-sample"

    where: int | None = 1
    parts: tuple[Part, ...] = (Part(1, None, "one"), Part(2, None, "two"))
    best: Part | None = None
    pair: tuple[int, str] = (1, "x")
    values: list[float]
    bands: dict[str, tuple[float, ...]]
    mode: Literal["a", "b"] = "a"


@dataclass(frozen=True, kw_only=True)
class Bare(Result):
    kind: ClassVar[str] = "test-bare"

    value: Any


EXAMPLE = Sample(
    model=ModelInfo("tiny", "llama", 4, 64, 128, "abc"),
    settings={"top_k": 8},
    provenance=Provenance(("sinkscope",), {"python": "3"}, "cpu", "float32", "sdpa", True, 0, 1.5),
    values=[math.nan, 2.0],
    bands={"median": (1.0, 2.0)},
)
WHOLE = json.loads(EXAMPLE.to_json())


def test_a_saved_result_is_loaded_as_its_own_class_and_equal(tmp_path):
    EXAMPLE.save(tmp_path / "x.json")
    again = Sample.load(tmp_path / "x.json")
    assert isinstance(again, Sample) and again == EXAMPLE and hash(again) == hash(EXAMPLE)
    assert math.isnan(again.values[0]) and again != replace(again, where=2)
    with refused("find_sinks.json holds 'find-sinks', expected 'test-bare'"):
        Bare.load("figures/find_sinks.json")


def test_envelope_is_the_contract():
    assert list(WHOLE) == ["schema", "kind", "model", "result", "settings", "provenance"]
    assert (WHOLE["schema"], WHOLE["kind"]) == (6, "test-sample")
    assert list(WHOLE["model"]) == ["name", "family", "n_layers", "d_model", "d_mlp", "fingerprint"]
    own = "argv versions device dtype attention bos seed seconds commit first_ids bos_added"
    assert list(WHOLE["provenance"]) == own.split()
    assert WHOLE["result"]["parts"][1] == {"layer": 2, "expert": None, "label": "two"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, None),
        ({"a": (1, math.inf)}, {"a": [1, None]}),
        (torch.tensor([[1.0, math.nan]]), [[1.0, None]]),
        (np.arange(2), [0, 1]),
        (torch.float16, "float16"),
        ({3, 1, 2}, [1, 2, 3]),
        (Part(1, None, "x"), {"layer": 1, "expert": None, "label": "x"}),
    ],
)
def test_values_become_those_of_json(value, expected):
    assert json.loads(Bare(value=value).to_json())["result"]["value"] == expected
    with refused("function cannot be written"):
        plain(lambda: value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "f.json is not a JSON file"),
        ("[" * 100_000, "f.json is not a JSON file"),
        (b"\xff\xfe", "f.json is not UTF-8 text"),
        ("{}", "f.json is not a result of sinkscope"),
        (json.dumps(WHOLE | {"schema": 1}), "f.json has schema 1, and this version reads 6: run the command again"),
        (json.dumps(WHOLE | {"kind": "magic"}), "f.json holds the unknown kind 'magic'"),
        (json.dumps(WHOLE | {"result": WHOLE["result"] | {"where": "1"}}), "where='1': expected a valid integer"),
        (json.dumps(WHOLE | {"result": WHOLE["result"] | {"pair": [1]}}), r"pair\[1\] is missing"),
    ],
)
def test_a_file_that_is_no_result_is_refused_in_one_line(tmp_path, content, says):
    path = tmp_path / "f.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(says):
        Sample.load(path)


def test_pages_are_those_of_the_checkout_or_of_the_installed_package(monkeypatch, tmp_path):
    assert (CHECKOUT / documented_at("cli.md")).is_file()
    monkeypatch.setattr("sinkscope.files.provenance.CHECKOUT", tmp_path)
    said = documented_at("cli.md#exit-codes")
    assert said.endswith("sinkscope/docs/cli.md#exit-codes") and str(Path.home()) not in said


@pytest.mark.parametrize(
    ("word", "back"), [("f\udcff/x.json", "f?/x.json"), ("\ud800", "?"), ("\\udcff", "\\udcff"), ("😀\udcff", "😀?")]
)
def test_a_result_can_be_read_back_whatever_bytes_a_name_holds(word, back, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["sinkscope", word])
    made = replace(EXAMPLE, provenance=provenance(0.0))
    assert Sample.load(made.save(tmp_path / "x.json")).provenance.argv[1] == back
