"""FlexAttention's form of a choice: its mask and its listed blocks are the cells of columns and bands."""

from __future__ import annotations

import pytest
import torch
from lines_kit import dense, per_head
from test_bands import random_bands
from test_sparse_attention import inputs
from torch.nn.attention.flex_attention import flex_attention
from torch.testing import assert_close

from experiments.gpu.flex import flex_bands


@pytest.mark.parametrize(("queries", "dense_rows"), [(320, 16), (192, 0), (64, 1)])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_it_gives_the_attention_of_the_choice(queries, dense_rows):
    scores, value = inputs(4, 2, queries, queries, 0)
    chosen = random_bands(4, queries, queries, 3, dense_rows)
    found = flex_bands(scores, value, chosen, flex_attention)
    wanted = dense(scores, chosen.rows(torch.arange(queries))) @ per_head(value, 4)
    assert_close(found.double(), wanted, atol=1e-5, rtol=0)
