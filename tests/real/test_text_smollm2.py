"""What caches keep, what is generated, and what lines carry, in SmolLM2, beside plain hooks and plain loops."""

from __future__ import annotations

import kv_reference
import plain
import pytest
import torch
from texts import KINDS, prose
from transformers import DynamicCache

import sinkscope as ss
from sinkscope.bench.answer import conversation_ids
from sinkscope.bench.benchmark import bench
from sinkscope.bench.tasks.text import TextFidelity
from sinkscope.kv import H2O, TOVA, SnapKV, StreamingLLM
from sinkscope.loops.barcode import SUFFIX, barcode
from sinkscope.loops.why import why_loop
from sinkscope.opening.live import target_of

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
    "streaming": StreamingLLM(budget=BUDGET),
    "h2o": H2O(budget=BUDGET),
    "tova": TOVA(budget=BUDGET),
    "snapkv": SnapKV(budget=BUDGET, window=32),
}


@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_a_policy_keeps_the_positions_that_attention_says(smollm2, prompt, maps, name):
    """In all 90 kv heads; nearly equal scores may swap a position in a few, in TOVA in the three of a layer at once."""
    policy, choose = POLICIES[name], kv_reference.REFERENCES[name]
    model, n_kv = smollm2.model, smollm2.model.config.num_key_value_heads
    cache, same, heads = DynamicCache(), 0, 0
    with policy.on(model):
        model(prompt[:, :PROMPT], past_key_values=cache)
        model(prompt[:, PROMPT:], past_key_values=cache)
    everything = torch.ones(1, n_kv, PROMPT, dtype=torch.bool)
    for number, (layer, probs) in enumerate(zip(cache.layers, maps, strict=True)):
        grouped = probs.unflatten(0, (n_kv, -1))[None]
        real, no_keys = everything[:, 0], everything[..., None][..., :0]  # which none of these policies scores
        seen = kv_reference.Seen(grouped, no_keys, everything, real, [BUDGET], [PROMPT], number, len(maps))
        keep = choose(policy, seen)[0]
        for held, chosen in zip(layer.pos[0].tolist(), keep, strict=True):
            kept = [position for position in held if 0 <= position < PROMPT]
            right = chosen.nonzero().flatten().tolist()
            assert len(kept) == BUDGET and len({*kept} - {*right}) <= 1
            same += kept == right
            heads += 1
    assert heads == 90 and same >= 87


def test_a_guard_leaves_text_without_loops_alone(smollm2, prompt):
    (guarded,) = ss.generate(smollm2.model, prompt[:, :40], guard=True, max_new_tokens=12)
    assert guarded.events == []
    assert guarded.tokens == plain.greedy(smollm2.model, prompt[:, :40], 12)[: len(guarded.tokens)]


@torch.no_grad()
def test_a_guard_acts_exactly_where_the_stock_model_loops(smollm2):
    """The model goes on with the copies, until they cover the 64 tokens beyond two copies that the default asks for."""
    sentence = smollm2.tokenizer(" The committee met on Monday and agreed to meet again on the next Monday.").input_ids
    ids = torch.tensor([[1, *(3 * sentence)]])
    stock = smollm2.model.generate(ids, max_new_tokens=8 * len(sentence), do_sample=False, pad_token_id=0)
    looping = plain.covered_at_end(stock[0].tolist())
    assert looping >= 2 * len(sentence) + 64
    (guarded,) = ss.generate(smollm2.model, ids, guard=True, max_new_tokens=8 * len(sentence))
    assert guarded.events and plain.covered_at_end([*ids[0].tolist(), *guarded.tokens]) < looping


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


@torch.no_grad()
def test_bench_measures_the_divergence_of_a_pass_under_the_mask_of_a_cut_cache(smollm2, tmp_path):
    """StreamingLLM: after the prompt, a query sees the first four tokens, the latest, and itself."""
    task = TextFidelity(count=1, prompt=96, answer=6)
    words = "text:count=1:prompt=96:answer=6"
    table = bench(model=str(smollm2.folder), task=words, methods=["full", "streaming:0.5"], out=tmp_path / "runs")
    score = {row["method"]: row["kl"] for row in table.rows()}
    target = target_of(smollm2.model)
    (prompt,) = task.prompts(target)
    begun = conversation_ids(target, prompt, 0, task.chat)
    ids = torch.tensor([[*begun, *smollm2.tokenizer(prompt.turns[0].answers[0], add_special_tokens=False).input_ids]])
    budget, length = len(begun) // 2, ids.shape[1]
    sees = torch.ones(length, length).tril().bool()
    for query in range(len(begun), length):
        sees[query, 4 : query - (budget - 4)] = False
    mask = torch.zeros(1, 1, length, length).masked_fill(~sees, torch.finfo(torch.float32).min)
    full = plain.log_probs(smollm2.model, ids)
    cut = smollm2.model(ids, attention_mask=mask, use_cache=False).logits.log_softmax(-1)
    kl = plain.divergence(full, cut)[0, len(begun) : len(begun) + 5].mean().item()
    (streaming,) = [value for method, value in score.items() if method.startswith("streaming")]
    assert score["full"] == pytest.approx(0, abs=1e-6) and kl > 0.01
    assert streaming == pytest.approx(kl, rel=1e-2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_why_agrees_with_a_plain_search_about_the_loop(smollm2):
    text = "I like tea. I like tea. I like tea. I like"
    ids = [1, *smollm2.tokenizer(text).input_ids]
    made = why_loop(smollm2.model, ids, max_new_tokens=48, cuts=3)
    stock = plain.greedy(smollm2.model, torch.tensor([ids]), 48)
    assert made.period == plain.period_at_end(stock)
    assert list(made.ids[len(ids) :]) == stock[: len(made.ids) - len(ids)]
