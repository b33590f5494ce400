"""What is masked in texts of real models: variance, and vectors of length."""

from __future__ import annotations

import pytest
import torch
from sklearn.decomposition import PCA

from experiments.real.masks import LENGTH, first_component, steering


def test_the_share_of_the_first_component_is_that_of_scikit_learn():
    activations = torch.randn(200, 12, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 13)
    share = PCA(1).fit(activations.numpy()).explained_variance_ratio_[0]
    assert first_component(activations) == pytest.approx(share, rel=1e-4)


def test_a_difference_of_means_leaves_out_what_is_masked():
    resid = torch.zeros(4, LENGTH, 3)
    resid[:, 0, 1] = 64.0  # the sink, one of 16 tokens in the short texts, and one of 64 in the long ones
    resid[:2, :, 0] += 1.0
    keep = torch.ones(4, LENGTH, dtype=torch.bool)
    assert steering(resid, keep).tolist() == [1.0, 3.0, 0.0]
    keep[:, 0] = False
    assert steering(resid, keep).tolist() == [1.0, 0.0, 0.0]
