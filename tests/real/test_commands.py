"""Commands, a guard and the notebooks on SmolLM2: what is written is what plain transformers writes."""

from __future__ import annotations

import pytest
import torch

import sinkscope as ss
from sinkscope.app.card import SinkCard
from sinkscope.app.view.explorer import Explorer
from sinkscope.app.view.page import view_page
from tools.notebooks import FOLDER, ran

NEURONS = ("L11.N1229", "L11.N1487")
LARGEST_PAGE = 3_400_000  # characters: seven passes, each with the attention of all heads


def test_generate_prints_what_plain_greedy_decoding_writes(typed, smollm2):
    prompt = "The capital of France is"
    said = typed(["generate", prompt, "--model", str(smollm2.folder), "--no-chat", "--max-new-tokens", "6"]).out
    ids = torch.tensor([smollm2.tokenizer(prompt).input_ids])
    plain = smollm2.model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert said.strip() == smollm2.tokenizer.decode(plain[0, ids.shape[1] :]).strip()


def loops(tokens: list[int]) -> bool:
    """Whether the last 64 tokens are those some tokens before."""
    return any(tokens[-64:] == tokens[-64 - period : -period] for period in range(1, 64))


def test_a_guard_acts_where_the_stock_model_loops(smollm2):
    sentence = smollm2.tokenizer(" The committee met on Monday and agreed to meet again on the next Monday.").input_ids
    ids, new = [1, *(3 * sentence)], 8 * len(sentence)
    stock = smollm2.model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0)
    assert loops(stock[0].tolist())
    (guarded,) = ss.generate(smollm2.model, [ids], guard=True, max_new_tokens=new)
    assert guarded.events and not loops([*ids, *guarded.tokens])


@pytest.mark.slow
def test_cards_reports_and_pages_name_the_neurons(typed, smollm2, tmp_path):
    card, report = tmp_path / "smollm2" / "card.json", tmp_path / "report.html"
    typed(["scan", str(smollm2.folder), "--quick", "--out", str(card.parent)])
    typed(["report", str(card.parent), "--out", str(report)])
    assert [part.name for part in SinkCard.load(card).parts if part.conclusion.startswith("not measured")] == []
    assert NEURONS[0] in card.read_text() and NEURONS[0] in report.read_text()
    view = Explorer.showing(None, smollm2.model, tokenizer=smollm2.tokenizer).view()
    assert view.neurons == NEURONS and len(view_page(view, "smollm2")) <= LARGEST_PAGE


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_with_smollm2(smollm2, path):
    ran(path, smollm2.path)  # a cell that fails raises
