"""All tests run under a check of types and shapes."""

import pytest
import torch
from jaxtyping import TypeCheckError

from sinkscope.sinks.removal.effects import Effects
from sinkscope.tap.rows import attention_probs


def test_a_wrong_shape_is_refused_in_functions_and_in_records():
    query, key = torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 4)
    with pytest.raises(TypeCheckError):
        attention_probs(query, key, None, scaling=1.0, first_query=0)
    norms = torch.ones(3, 2, 4)
    with pytest.raises(TypeCheckError):
        Effects(norms, norms[0], torch.zeros(2, 2, 2, 1))
