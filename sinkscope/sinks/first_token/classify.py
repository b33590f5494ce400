"""Telling two classes apart: AUROC and margin of any number of features at once, planes by scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Method = Literal["LDA", "logistic regression"]
_COLUMNS = 2048  # sorted at a time


def auroc(values: Float[Tensor, "n k"], first: Bool[Tensor, " n"]) -> Float[Tensor, " k"]:
    """Chance that a value of the first class is above one of the other, ties half; for every column."""
    areas = []
    for part in values.split(_COLUMNS, 1):
        ones, others = part[first].T.contiguous(), part[~first].T.contiguous().sort(1).values
        below = torch.searchsorted(others, ones) + torch.searchsorted(others, ones, right=True)
        areas.append(below.double().mean(1).div(2 * others.shape[1]).float())
    return torch.cat(areas)


def margin(values: Float[Tensor, "n k"], first: Bool[Tensor, " n"]) -> Float[Tensor, " k"]:
    """Lowest value of the first class less highest of the other, over the range of all; above 0 they do not overlap."""
    span = (values.max(0).values - values.min(0).values).clamp(min=1e-12)
    return (values[first].min(0).values - values[~first].max(0).values) / span


@dataclass(frozen=True)
class Plane:
    """A direction in the residual stream and what lies where along it.

    Attributes:
        scores: of all samples; above 0 is the first class.
        way: the direction, in the coordinates of the space.
    """

    scores: Float[Tensor, " n"]
    way: Float[Tensor, " k"]


@dataclass(frozen=True)
class Space:
    """Samples in coordinates that the training samples span: there may be fewer of these than residual dimensions.

    What lies outside that span has no influence on either method.
    """

    coordinates: Float[Tensor, "n k"]
    basis: Float[Tensor, "k d_model"]
    train: Bool[Tensor, " n"]

    @classmethod
    def of(cls, samples: Float[Tensor, "n d_model"], train: Bool[Tensor, " n"]) -> Space:
        """Each residual dimension is centred and scaled by its mean and deviation over the training samples."""
        data = samples.double()
        deviation, mean = torch.std_mean(data[train], 0, correction=0)
        scaled = (data - mean) / torch.where(deviation > 0, deviation, torch.ones_like(deviation))
        _, sizes, basis = torch.linalg.svd(scaled[train], full_matrices=False)
        basis = basis[sizes > 1e-6 * sizes[0]]
        return cls(scaled @ basis.T, basis, train)

    def plane(self, method: Method, first: Bool[Tensor, " n"]) -> Plane:
        """The plane that `method` puts between the classes of the training samples."""
        from threadpoolctl import threadpool_limits  # comes with scikit-learn

        with threadpool_limits(torch.get_num_threads()):  # problems of this size do not gain from more
            fitted = _model(method).fit(self.coordinates[self.train].numpy(), first[self.train].numpy())
            scores = fitted.decision_function(self.coordinates.numpy())
        way = torch.from_numpy(fitted.coef_[0]).double()
        return Plane(torch.from_numpy(scores).float(), way / way.norm())

    def weights(self, plane: Plane) -> Float[Tensor, " d_model"]:
        """What the plane gives each residual dimension, when each is scaled to unit variance."""
        return plane.way @ self.basis

    def across(self, plane: Plane) -> Float[Tensor, " n"]:
        """All samples along the direction of most variance across the plane's own."""
        rest = self.coordinates - (self.coordinates @ plane.way)[:, None] * plane.way
        return rest @ torch.linalg.svd(rest[self.train], full_matrices=False)[2][0]


def _model(method: Method) -> Any:
    if method == "LDA":
        from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

        return LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto", priors=[0.5, 0.5])
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(class_weight="balanced", max_iter=2000)
