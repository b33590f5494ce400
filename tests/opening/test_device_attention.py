"""A kind of device whose SDPA may be wrong at the last token of a row: models that are opened attend eagerly there."""

from __future__ import annotations

import pytest
from organisms.tiny import tiny_model

from sinkscope.errors import SinkscopeWarning
from sinkscope.opening import load as opening
from sinkscope.opening.load import load, open_target, target_of


@pytest.mark.parametrize(("heads", "kind"), [(1, "eager"), (2, "sdpa")])
def test_what_is_opened_attends_eagerly_where_heads_share_one_head_of_keys(heads, kind, tmp_path, monkeypatch):
    model, tokenizer = tiny_model("gemma3_text", num_key_value_heads=heads)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    monkeypatch.setattr(opening, "_FAULTY", "cpu")
    for opened in (load(tmp_path), open_target(tmp_path)):
        assert opened.config._attn_implementation == kind
    if kind == "eager":
        with pytest.warns(SinkscopeWarning, match="SDPA attention, which PyTorch may get wrong on cpu"):
            target_of(model)
