"""FlexAttention on lines: which blocks it gets, what its mask lets through, and what happens without it."""

from __future__ import annotations

import importlib.util
import shutil
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loopserve_sparse import drawn, inputs, masked
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.kv.loopserve.serve import SparsePrompts
from sinkscope.lines import flex
from sinkscope.lines.choice import HeadLines
from sinkscope.lines.sparse import check_kernel, sparse_attention
from sinkscope.trace.attention import Attention, View


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What is known of this machine is forgotten before and after."""
    for _ in range(2):
        flex._unavailable.cache_clear()
        flex._compiled.cache_clear()
        flex._failed.clear()
        if _ == 0:
            yield


def uncompiled(query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, scale: float, enable_gqa: bool) -> Tensor:
    """What FlexAttention is documented to do: full blocks whole, partial ones by the mask, no others."""
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    assert block_mask.BLOCK_SIZE == (flex.BLOCK, flex.BLOCK) and block_mask.seq_lengths == (queries, keys)
    assert enable_gqa == (heads > key.shape[1])  # keys and values are not copied for every query head
    key, value = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (key, value))
    number, slot = torch.arange(queries)[:, None], torch.arange(keys)
    lists = [
        (block_mask.kv_num_blocks, block_mask.kv_indices),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ]
    seen = torch.zeros(heads, queries, keys, dtype=torch.bool)
    for head in range(heads):
        kinds = []
        for counts, numbers in lists:
            blocks = torch.zeros(counts.shape[2], numbers.shape[3], dtype=torch.bool)
            for row, count in enumerate(counts[0, head].tolist()):
                blocks[row, numbers[0, head, row, :count].long()] = True
            kinds.append(blocks[number // flex.BLOCK, slot // flex.BLOCK])
        partial, full = kinds
        assert not (partial & full).any()
        seen[head] = full | partial & block_mask.mask_mod(torch.tensor(0), torch.tensor(head), number, slot)
        assert (partial & seen[head]).any() == partial.any()
    scores = (query[0] @ key[0].mT * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ value[0])[None]  # zeros where nothing is seen


@settings(max_examples=15, deadline=None)
@given(
    queries=st.integers(128, 300),
    past=st.sampled_from([0, 1, 100, 128, 200]),
    vertical=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    slash=st.sampled_from([0.0, 0.01, 0.2]),
    near=st.sampled_from([1, 40, 270]),
    seed=st.integers(0, 99),
)
def test_blocks_and_masks_are_the_lines(
    queries: int, past: int, vertical: float, slash: float, near: int, seed: int
) -> None:
    query, key, value = inputs(4, 2, queries, queries + past, seed)
    lines = drawn(4, queries + past, queries, vertical, slash, seed)
    lines.slash[1::2, :near] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_compiled", lambda dynamic: uncompiled)
        out, what = sparse_attention(query, key, value, lines, dense_above=1e9, kernel="flex")
    assert what.kernel == "flex" and what.dense == (False,) * 4
    torch.testing.assert_close(out.double(), masked(query, key, value, lines), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(what.cells), lines.density())
    assert all(done >= cells - 1e-6 for done, cells in zip(what.computed, what.cells, strict=True))


def test_full_blocks_need_no_mask_and_few_blocks_are_computed() -> None:
    n = 8 * flex.BLOCK
    lines = drawn(2, n, n, 0.0, 0.0)
    lines.slash[0, : 4 * flex.BLOCK] = True
    lines.slash[1, 600] = lines.vertical[1, 5] = True
    blocks = flex.blocks_of(lines)
    own = blocks.full[:, :, 1:]  # without the gathered columns
    rows, columns = own[0].nonzero().T
    assert set((rows - columns).tolist()) == {1, 2, 3}  # four blocks back is cut, the diagonal is masked
    assert not own[1].any() and blocks.full[1, 1:, 0].sum() == 0  # padded columns are masked
    touched = {int(r - c) for r, c in blocks.some[1, :, 1:].nonzero()}
    assert touched == {0, 4, 5}  # an offset of 600 crosses two
    assert int(blocks.cells()[1]) == flex.BLOCK**2 * (8 + 4 + 3 + 8)  # and the gathered column


def test_dense_heads_beside_it() -> None:
    query, key, value = inputs(2, 1, 1024, 1024)
    lines = drawn(2, 1024, 1024, 0.01, 0.0)
    lines.slash[1] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_compiled", lambda dynamic: uncompiled)
        out, what = sparse_attention(query, key, value, lines, dense_above=0.9, kernel="flex")
    assert what.dense == (False, True) and what.computed[1] == 1.0 > what.computed[0]
    torch.testing.assert_close(out.double(), masked(query, key, value, lines), atol=1e-5, rtol=0)


def imports(patch: pytest.MonkeyPatch, name: str, made: Any) -> None:
    """Importing this module gives something else, or raises it."""
    real = flex.importlib.import_module

    def import_module(wanted: str, *package: Any) -> Any:
        if wanted != name:
            return real(wanted, *package)
        if isinstance(made, Exception):
            raise made
        return made

    patch.setattr(flex.importlib, "import_module", import_module)


def no_module(patch: pytest.MonkeyPatch) -> None:
    missing = ImportError("No module named 'flex_attention'\nand more")
    imports(patch, "torch.nn.attention.flex_attention", missing)


def no_compiler(patch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("InvalidCxxCompiler: no working C++ compiler found\nsecond line")

    patch.setattr(torch, "compile", lambda *_, **__: broken)


def switched_off(patch: pytest.MonkeyPatch) -> None:
    imports(patch, "torch._dynamo.config", SimpleNamespace(disable=True))


def nothing_compiled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "compile", lambda fn, **_: fn)  # as under TORCHDYNAMO_DISABLE=1


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (no_module, "this PyTorch has none: No module named 'flex_attention'$"),
        (no_compiler, "could not be compiled: InvalidCxxCompiler: no working C.. compiler found$"),
        (switched_off, "torch.compile is switched off$"),
        (nothing_compiled, "torch.compile is switched off$"),
    ],
)
def test_without_it_lines_are_computed_in_blocks_and_it_is_said_once(
    missing: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = inputs(2, 1, 200, 200)
    lines = drawn(2, 200, 200, 0.05, 0.02)
    missing(monkeypatch)
    with pytest.warns(UserWarning, match=words) as said:
        out, what = sparse_attention(query, key, value, lines, dense_above=1e9, kernel="flex")
        sparse_attention(query, key, value, lines, dense_above=1e9, kernel="flex")
    assert len(said) == 1 and what.kernel.startswith("blocks")
    assert flex.why_not(query, value) is not None
    torch.testing.assert_close(out.double(), masked(query, key, value, lines), atol=1e-5, rtol=0)


def test_a_lack_of_memory_is_not_remembered_as_a_lack_of_a_compiler() -> None:
    query, key, value = inputs(1, 1, 130, 130)

    def full(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_compiled", lambda dynamic: full)
        with pytest.raises(torch.OutOfMemoryError):
            sparse_attention(query, key, value, drawn(1, 130, 130, 0.0, 0.0), dense_above=1e9, kernel="flex")
    assert flex.why_not(query, value) is None


def test_it_is_never_run_uncompiled() -> None:
    """What torch.compile gets may not be called outside of it, and has to be one graph."""
    asked: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda fn, **how: asked.append(how) or uncompiled)
        query, key, value = inputs(1, 1, 130, 130)
        sparse_attention(query, key, value, drawn(1, 130, 130, 0.0, 0.0), dense_above=1e9, kernel="flex")
    assert asked and all(how["fullgraph"] for how in asked)


def test_few_queries_and_other_devices_do_without_a_word() -> None:
    query, key, value = inputs(2, 1, flex.BLOCK - 1, 400)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert flex.why_not(query, value) == "fewer than 128 queries"
        what = sparse_attention(query, key, value, drawn(2, 400, 127, 0.02, 0.0), kernel="flex")[1]
        assert what.kernel.startswith("blocks")
        assert flex.why_not(query.new_empty(2, 200, 16, device="meta"), value) == "it is not used on meta"
    with pytest.raises(SinkscopeError, match="kernel='gpu'"):
        check_kernel("gpu")


def test_prompts_on_a_device_without_it_are_left_to_the_model() -> None:
    """Unless blocks are asked for by a limit of one's own."""
    many, one = torch.empty(1, 2, 200, 16, device="meta"), torch.empty(1, 1, 200, 16, device="meta")
    pos = torch.arange(200)[None]
    view = View(pos[None], pos)
    prompt = Attention(
        SimpleNamespace(layer_idx=0, config=SimpleNamespace(_attn_implementation="sdpa")),
        many,
        one,
        one,
        None,
        {},
        view=view,
    )

    def lines(*_: Any) -> HeadLines:
        raise NotImplementedError

    def why(in_blocks: bool, kernel: Any = "auto") -> str | None:
        return SparsePrompts("LoopServe", lines, in_blocks=in_blocks, kernel=kernel)._why_dense(prompt, view, None)

    assert why(False) == "on meta without FlexAttention: it is not used on meta"
    assert why(False, "blocks") == "on meta without FlexAttention: not asked for"
    assert why(True) is None


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(("queries", "past"), [(512, 0), (300, 211)])
def test_compiled_it_equals_dense_attention_under_the_same_mask(queries: int, past: int) -> None:
    query, key, value = inputs(4, 2, queries, queries + past)
    lines = drawn(4, queries + past, queries, 0.05, 0.01)
    lines.slash[1, :200] = True
    out, what = sparse_attention(query, key, value[..., :8], lines, dense_above=1e9, kernel="flex")
    assert what.kernel == "flex"
    torch.testing.assert_close(out.double(), masked(query, key, value[..., :8], lines), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_it_is_what_is_used(dtype: torch.dtype) -> None:
    assert importlib.util.find_spec("triton")
    for queries, past in ((512, 0), (300, 211), (1000, 0)):  # one compilation for all lengths
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(4, queries, 64, generator=generator)
        key, value = (torch.randn(2, queries + past, 64, generator=generator) for _ in range(2))
        lines = drawn(4, queries + past, queries, 0.05, 0.01)
        there = HeadLines(lines.vertical.cuda(), lines.slash.cuda(), queries)
        on_gpu = [tensor.to("cuda", dtype) for tensor in (query, key, value)]
        out, what = sparse_attention(*on_gpu, there, scaling=0.25, dense_above=1e9, kernel="flex")
        assert what.kernel == "flex"
        atol = 1e-2 if dtype == torch.float32 else 5e-2  # TF32
        torch.testing.assert_close(out.cpu().double(), masked(query, key, value, lines), atol=atol, rtol=0)
