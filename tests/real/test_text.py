"""What caches keep, what is generated, and what lines carry, in SmolLM2, beside plain hooks and plain loops."""

from __future__ import annotations

import plain
import pytest
import torch
from texts import KINDS, prose
from transformers import DynamicCache

import sinkscope as ss
from sinkscope.bench.run import bench
from sinkscope.kv import H2O, TOVA, SnapKV, StreamingLLM
from sinkscope.loops.barcode import SUFFIX, barcode
from sinkscope.loops.why import why

PROMPT, BUDGET = 160, 80


def ids_of(real, text: str, length: int) -> torch.Tensor:
    return plain.ids_of(real.tokenizer, text, length, bos=True)


@pytest.fixture(scope="module")
def prompt(smollm2) -> torch.Tensor:
    return ids_of(smollm2, prose(), PROMPT + 1)


@pytest.fixture(scope="module")
def maps(smollm2, prompt) -> list[torch.Tensor]:
    """Attention over the prompt, as the intact model pays it: [head, query, key] of each layer."""
    return [probs[0] for probs in plain.attentions(smollm2.model, prompt[:, :PROMPT])]


POLICIES = {
    "streaming": (StreamingLLM(budget=BUDGET), lambda probs, n_kv: n_kv * [plain.streaming_kept(PROMPT, BUDGET)]),
    "h2o": (H2O(budget=BUDGET), lambda probs, n_kv: plain.h2o_kept(probs, n_kv, BUDGET)),
    "tova": (TOVA(budget=BUDGET), lambda probs, n_kv: n_kv * [plain.tova_kept(probs, BUDGET)]),
    "snapkv": (SnapKV(budget=BUDGET, window=32), lambda probs, n_kv: plain.snapkv_kept(probs, n_kv, BUDGET, 32)),
}


@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_a_policy_keeps_the_positions_that_attention_says(smollm2, prompt, maps, name):
    """In all 90 kv heads; nearly equal scores may swap a position in a few of them."""
    policy, keeps = POLICIES[name]
    model, n_kv = smollm2.model, smollm2.model.config.num_key_value_heads
    cache, same, heads = DynamicCache(), 0, 0
    with policy.on(model):
        model(prompt[:, :PROMPT], past_key_values=cache)
        model(prompt[:, PROMPT:], past_key_values=cache)
    for layer, probs in zip(cache.layers, maps, strict=True):
        for held, right in zip(layer.pos[0].tolist(), keeps(probs, n_kv), strict=True):
            kept = [position for position in held if 0 <= position < PROMPT]
            assert len(kept) == BUDGET and len({*kept} - {*right}) <= 1
            same += kept == right
            heads += 1
    assert heads == 90 and same >= 88


def test_generate_writes_what_stock_transformers_write(smollm2, prompt):
    (written,) = ss.generate(smollm2.model, prompt[:, :40], max_new_tokens=12)
    assert written.tokens == plain.greedy(smollm2.model, prompt[:, :40], 12)[: len(written.tokens)]
    assert written.prompt_tokens == 40


def test_a_guard_changes_nothing_before_it_acts(smollm2):
    """A loop of exact copies: until the first intervention, the tokens are those without a guard."""
    text = "I like tea. I like tea. I like tea. I like tea. I like tea. I like"
    ids = torch.tensor([[1, *smollm2.tokenizer(text).input_ids]])
    stock = plain.greedy(smollm2.model, ids, 40)
    assert plain.period_at_end(stock) is not None
    (guarded,) = ss.generate(smollm2.model, ids, guard=ss.LoopGuard(), max_new_tokens=40)
    acted = [event.step for event in guarded.events]
    same = min([*acted, len(guarded.tokens)]) // 2  # what it takes back lies before the step at which it acts
    assert guarded.tokens[: min(same, 4)] == stock[: min(same, 4)]
    assert guarded.tokens != stock or not acted


def test_loops_finds_the_period_that_a_plain_search_finds(smollm2):
    ids = smollm2.tokenizer(prose()).input_ids[:200]
    looped = ids + 12 * ids[40:57]
    assert plain.period_at_end(looped) == 17 and plain.period_at_end(ids) is None
    (found,) = ss.loops.check([looped]).outputs
    assert found.status in ("loops", "looped") and found.period == 17
    assert ss.loops.check([ids]).outputs[0].status == "clean"


def test_lines_carry_what_a_plain_sum_over_their_cells_says(smollm2):
    """Every fifth layer, texts of four kinds, all heads."""
    rows = [ids_of(smollm2, text(), 96)[0].tolist() for text in KINDS.values()]
    chosen = list(range(0, 30, 5))
    made = ss.lines(smollm2.model, rows, etas=[0.1], layers=chosen)
    mass, cells = torch.zeros(2, len(chosen), 9)
    for row in rows:
        maps = plain.attentions(smollm2.model, torch.tensor([row]))
        for number, layer in enumerate(chosen):
            for head, probs in enumerate(maps[layer][0]):
                carried, covered = plain.lines_mass(probs, 0.1)
                mass[number, head] += carried / len(rows)
                cells[number, head] += covered / len(rows)
    assert made.mass[0].mean() == pytest.approx(mass.mean().item(), rel=1e-4)
    assert abs(made.mass[0] - mass.numpy()).max() < 1e-3
    assert made.cells[0].mean() == pytest.approx(cells.mean().item(), rel=1e-3)


def test_barcode_scores_the_attention_at_the_same_distances(smollm2):
    ids = smollm2.tokenizer(prose()).input_ids
    looped = [1, *ids[:20], *(8 * ids[20:29])]
    made = barcode(smollm2.model, ids=looped, heads=["L5.H2", "L20.H7"])
    assert made.period == 9 == plain.period_at_end(looped)
    maps = plain.attentions(smollm2.model, torch.tensor([looped[:-1]]))
    late = (made.onset + len(looped) - 1) // 2
    for row, (layer, head) in enumerate([(5, 2), (20, 7)]):
        share = plain.same_offsets(maps[layer][0, head], 9, max(SUFFIX, 27), late)
        assert made.score[row, head] == pytest.approx(share, rel=1e-3)


def test_bench_reads_the_divergence_of_a_cut_cache(smollm2, tmp_path):
    """Full attention is no loss; a cache of the latest tokens loses what a pass under its mask loses."""
    runs = bench(
        smollm2.folder, task="text:count=1:prompt=96:answer=6", methods=["full", "streaming:0.5"], out=tmp_path / "runs"
    )
    of_method = {record.method: record.metrics for record in runs.records}
    assert of_method["full"]["kl"] < 1e-6
    kl = [metrics["kl"] for method, metrics in of_method.items() if method.startswith("streaming")]
    assert kl[0] > 0.01


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_why_agrees_with_a_plain_search_about_the_loop(smollm2):
    text = "I like tea. I like tea. I like tea. I like"
    ids = [1, *smollm2.tokenizer(text).input_ids]
    made = why(smollm2.model, ids, max_new_tokens=48, cuts=2)
    stock = plain.greedy(smollm2.model, torch.tensor([ids]), 48)
    assert made.period == plain.period_at_end(stock)
    assert list(made.ids[len(ids) :]) == stock[: len(made.ids) - len(ids)]
