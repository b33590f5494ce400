"""Masks of sinks at one site of real models, beside norms that plain hooks read."""

from __future__ import annotations

import plain
import pytest
import texts
import torch

import sinkscope as ss


@pytest.mark.parametrize(("name", "layer"), [("smollm2", 14), ("gemma3", 9)])
def test_a_mask_of_a_site_has_no_position_with_an_ordinary_norm(name, layer, request):
    model = request.getfixturevalue(name).model
    kinds = [kind() for kind in texts.KINDS.values()]
    rows = torch.cat([plain.ids_of(model.tokenizer, text, 64, bos=True) for text in kinds])
    with torch.no_grad(), plain.reading([plain.blocks(model)[layer]], "output") as seen:
        model(rows)
    norms = seen[0].norm(dim=-1)
    stands_out = norms > 3 * norms[:, 1:].median(1, keepdim=True).values
    mask = ss.sink_mask(model, rows, site=f"blocks.{layer}.hook_resid_post")
    assert torch.equal(mask, stands_out)
    anywhere = ss.sink_mask(model, rows)
    assert int((anywhere & ~stands_out).sum()) > 0 and bool((anywhere | ~mask).all())
