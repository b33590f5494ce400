"""Sink rate, spike dimensions, typical text and token picking, each against an independent way or a known answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attack_kit import setup_of
from hypothesis import given, settings
from hypothesis import strategies as st
from organisms import organism, tiny_model
from raw_kit import attention

from sinkscope.errors import SinkscopeError
from sinkscope.models.text import resolve_bos, text_rows, typical_text
from sinkscope.opening.live import target_of
from sinkscope.sinks.spikes import survey
from sinkscope.sinks.tokens import pick_tokens, single_token


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "gpt_neox"])
def test_sink_rate_equals_the_definition_on_dense_attention(model_type, monkeypatch):
    model, tokenizer = tiny_model(model_type)
    ids = torch.randint(3, 90, (5, 24), generator=torch.Generator().manual_seed(0))
    received = []
    for probs in attention(model, ids)[..., 0]:  # layer batch head query key
        if float(probs[..., -1].max()) == 0:  # a window of 16 hides the first token, and is too narrow to be judged
            probs = 0 * probs
        received.append(probs.mean(-1))
    to_first = torch.stack(received)
    ranked = to_first.flatten().sort().values
    eps = float(ranked[len(ranked) // 2 - 1 :][:2].mean())  # between two values, half are above
    wanted = float((to_first > eps).float().mean())
    assert 0.3 < wanted < 0.7
    monkeypatch.setattr(survey, "READS", eps)
    rate = survey.read_survey(target_of(model, tokenizer), ids).sink_rate
    assert float(rate.mean()) == pytest.approx(wanted)


def test_a_text_that_is_too_short_for_a_piece_is_refused():
    with pytest.raises(SinkscopeError, match="are needed for one piece"):
        text_rows(tiny_model("llama")[1], "short", 1, 64, None)


def test_typical_text_is_long_enough_for_the_sink_rate_and_files_replace_it(tmp_path):
    assert len(typical_text()) > 100 * 64 * 6  # 100 pieces of 64 tokens of up to 6 characters
    (tmp_path / "a.txt").write_text("Prose of my own.")
    assert typical_text(tmp_path / "a.txt") == "Prose of my own."
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(SinkscopeError, match="is empty"):
        typical_text(tmp_path / "empty")


def test_drawn_words_are_distinct_ordinary_tokens_of_the_text():
    o = organism("llama", 0)
    setup = setup_of(o)
    ids = setup.ids

    @settings(max_examples=20, deadline=None)
    @given(st.integers(0, 2**31))
    def check(seed):
        words = pick_tokens(replace(setup, seed=seed))
        assert len(set(words)) == len(words) and set(words) <= set(ids[:, 1:].flatten().tolist())
        assert not set(words) & set(o.tokenizer.all_special_ids)

    check()


def test_a_word_the_tokenizer_does_not_know_is_refused():
    """Its one token is that of all unknown words."""
    tokenizer = organism("llama", 0).tokenizer
    assert tokenizer("zyzzyva", add_special_tokens=False)["input_ids"] == [tokenizer.unk_token_id]
    with pytest.raises(SinkscopeError, match=r"^'zyzzyva' is not one known token here, but \['<unk>'\]; give a"):
        single_token(tokenizer, "zyzzyva")


def test_bos_is_what_the_tokenizer_says():
    o = organism("qwen2", 0, bos=True)
    assert resolve_bos(o.tokenizer, o.model.config, None) == o.tokenizer.bos_token_id
    assert resolve_bos(o.tokenizer, o.model.config, False) is None
    bare = organism("qwen2", 0, bos=False)
    assert resolve_bos(bare.tokenizer, bare.model.config, None) is None
