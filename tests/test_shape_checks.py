"""The check of types and shapes that all tests run under refuses what it is for."""

from __future__ import annotations

import importlib

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from shape_checks import install

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
from jaxtyping import Float
from torch import Tensor

Rows = list[Float[Tensor, "row d"]]

def product(x: Float[Tensor, "a b"], y: Float[Tensor, "b c"]) -> Float[Tensor, "a c"]:
    return (x @ y) if len(x) < 5 else (x @ y).T

def first(rows: Rows) -> int:
    return len(rows[0])

def outer(x, y):
    def inner(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + y
    def free(x: int) -> int:
        return x
    return inner(x, y), free("of checks")

class Later:
    @classmethod
    def made(cls, x: Float[Tensor, "2 n"]) -> Later:
        return cls()

@dataclass(frozen=True)
class Pair:
    x: Float[Tensor, "n"]
    y: Float[Tensor, "n"]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    (folder / "with_shapes.py").write_text(SOURCE)
    install("with_shapes")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        return importlib.import_module("with_shapes")


def test_what_fits_passes(made):
    one = torch.ones
    assert made.product(one(2, 3), one(3, 4)).shape == (2, 4)
    assert made.first([one(3, 2)]) == 3
    assert made.outer(one(2), one(2))[1] == "of checks"
    assert made.Pair(one(2), one(2)).x.shape == (2,)
    assert isinstance(made.Later.made(one(2, 5)), made.Later)
    assert made.product.__wrapped__.__annotations__["x"].startswith("Float")  # what it was stays to be read


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.product(torch.ones(2, 3), torch.ones(4, 3)),
        lambda m: m.product(torch.ones(6, 3), torch.ones(3, 4)),  # its result is turned round
        lambda m: m.product(torch.ones(2, 3).long(), torch.ones(3, 4)),
        lambda m: m.first([torch.ones(3)]),
        lambda m: m.outer(torch.ones(2), torch.ones(3)),
        lambda m: m.Later.made(torch.ones(3, 5)),
        lambda m: m.Pair(torch.ones(2), torch.ones(3)),
    ],
)
def test_what_does_not_fit_is_refused(made, call):
    with pytest.raises(BeartypeCallHintViolation):
        call(made)
