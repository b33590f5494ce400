"""Two real models side by side: what `compare` says of heads and neurons is what plain transformers and numpy say."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from scipy import stats

import sinkscope as ss
from sinkscope.measure.merge import CHANGED
from sinkscope.models.text import kind_rows
from sinkscope.results.notation import Neuron

NEURON = (11, 1487)


def heads_by_text(model, rows) -> np.ndarray:
    """Heads that give the first token more than 0.3 of the attention of later queries, in each text."""
    counts = []
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for row in rows:
            given = torch.stack(model(row[None], output_attentions=True).attentions)[:, 0, :, 1:, 0]
            counts.append(int((given.mean(-1) > 0.3).sum()))
    model.set_attn_implementation(attention)
    return np.array(counts)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_model_whose_sink_neuron_is_weaker_is_told_from_its_base(smollm2):
    """The column of the second sink neuron is halved: it writes half, heads look elsewhere."""
    base, weaker = smollm2.model, deepcopy(smollm2.model)
    with torch.no_grad():
        weaker.model.layers[NEURON[0]].mlp.down_proj.weight[:, NEURON[1]] *= 0.25
    found = ss.compare(base, weaker)
    rows = kind_rows(smollm2.tokenizer, "report", 16, 64, smollm2.tokenizer.bos_token_id)
    differences = heads_by_text(weaker, rows) - heads_by_text(base, rows)
    half = stats.t.ppf(0.975, 15) * differences.std(ddof=1) / 4
    rows = {(row.about, row.name): row for row in found.results[0].rows}
    heads = rows["", "the first token: heads"]
    assert (heads.get("change"), heads.margin("change")) == pytest.approx((differences.mean(), half), abs=0.1)
    late = "Spike at the first token, layers 11-29"
    share = rows[late, f"{Neuron.of(NEURON)}: share"]
    assert share.table == CHANGED and share.get("change") < -0.1
    norm = rows[late, "norm: norm after"]
    assert norm.get("after") == pytest.approx(norm.get("before") * (0.72 + 0.28 * 0.25), rel=0.05)
