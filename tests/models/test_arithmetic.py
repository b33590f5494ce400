"""Products of our own are not rounded by an autocast of the caller's."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from organisms import tiny_model
from ways.model_copies import bundled

import sinkscope as ss
from sinkscope import kv
from sinkscope.models.arithmetic import affine, product

PACKAGE = Path(ss.__file__).parent
PRODUCTS = {"matmul", "mm", "bmm", "addmm", "baddbmm", "linear", "einsum", "tensordot", "outer"}
ALLOWED = {
    "models/arithmetic.py": 2,
    "engine/attention.py": 1,  # half precision by tensor cores, into float32
    "sinks/repeat.py": 1,  # a sum over two dimensions, without autocast
    "measure/margin.py": 1,  # of numpy
}


def test_products_are_computed_in_one_place():
    """Products that are written out elsewhere, by file; those of kernels are not torch's."""
    found = dict[str, int]()
    for file in PACKAGE.rglob("*.py"):
        if file.name.startswith("triton"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            is_product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
            if isinstance(node, ast.Call):
                is_product = getattr(node.func, "attr", getattr(node.func, "id", "")) in PRODUCTS
            if is_product:
                name = file.relative_to(PACKAGE).as_posix()
                found[name] = found.get(name, 0) + 1
    assert found == ALLOWED


def test_products_keep_their_type_under_autocast():
    left, right, bias = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5)
    wanted = left @ right
    shifted = torch.nn.functional.linear(left, right.T, bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(product(left, right), wanted)
        assert product(left.bfloat16(), right).dtype == torch.float32
        assert torch.equal(affine(left, right.T, bias), shifted)


@pytest.mark.parametrize("policy", [kv.H2O(12), kv.SnapKV(12), kv.AdaKV(12)], ids=repr)
def test_policies_score_under_autocast(policy):
    """Rows that are padded, of which sums are products."""
    model = tiny_model("llama")[0]
    ids = torch.arange(48).view(2, 24) + 4
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    with torch.autocast("cpu", torch.bfloat16), policy.on(model):
        written = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert written.shape == (2, 28)


def test_experts_are_edited_under_autocast():
    model = tiny_model("qwen3_moe")[0]
    ids = torch.arange(24)[None] + 4
    edit = ss.Ablate([(1, expert, 3) for expert in range(4)], value=50.0)
    with edit.on(model):
        wanted = model(ids).logits
    plain = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16), edit.on(model):
        found = model(ids).logits.float()
    assert (found - wanted).norm() < 0.2 * (plain - wanted).norm()


@pytest.mark.few_texts
@pytest.mark.filterwarnings("ignore::sinkscope.errors.SinkscopeWarning")
def test_measurements_under_autocast():
    model = bundled()
    wanted = ss.repeat(model, max_repeats=32)
    with torch.autocast("cpu", torch.bfloat16):
        found = ss.repeat(model, max_repeats=32)
    assert found.conclusion()[:40] == wanted.conclusion()[:40]
