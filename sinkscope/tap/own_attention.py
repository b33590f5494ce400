"""Attention that a module outside of transformers' attention interface computes itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.models.grouped_heads import per_query_head
from sinkscope.tap.call import Attention, Output
from sinkscope.tap.rows import Rows
from sinkscope.tap.view import View


@dataclass(eq=False)
class OwnAttention(Attention):
    """Attention that a module outside transformers' attention interface computes itself.

    Attributes:
        output: What the module computed.
        scores: The module's own scores, before the softmax.
        lacks_bias: Whether the scores lack the bias, because the module was called with zeros in its place.
    """

    output: Float[Tensor, "batch query head d_value"] = field(kw_only=True)
    scores: Float[Tensor, "batch head query key"] = field(kw_only=True)
    lacks_bias: bool = field(kw_only=True)

    @property
    def scaling(self) -> float:
        """Factor on the scores, as the scores of the last query say."""
        return self._fit[0]

    @property
    def is_biased(self) -> bool:
        """Whether the scores are more than products of queries and keys."""
        return self.bias is not None or not self._is_fitted

    def shown_to_last(self) -> Bool[Tensor, "batch 1 1 key"]:
        """Return the keys that the module shows to the last query."""
        return self.visible(slice(self.queries - 1, self.queries))

    def visible(self, part: slice) -> Bool[Tensor, "batch 1 query key"]:
        """Return the keys that the module shows to some of the queries."""
        return self.scores[:, :1, part] > self._hidden_below

    @property
    def _hidden_below(self) -> float:
        """Scores below this are those of hidden keys; some modules divide their mask by the root of the width, too."""
        return torch.finfo(self.value.dtype).min / (2 * self.query.shape[-1] ** 0.5)

    def _key_bias(self) -> Float[Tensor, "batch head 1 key"] | None:
        """The bias of each key."""
        if self.bias is None:
            return None
        assert self.view is not None
        return self.view.of_keys(self.bias)

    @cached_property
    def _fit(self) -> tuple[float, float]:
        """The factor between products and scores of the last query, and how far these are from it, relatively."""
        scores = self.scores[:, :, -1:].float()
        seen = scores > self._hidden_below
        bias = self._key_bias()
        if bias is not None and not self.lacks_bias:
            scores = scores - bias
        key = per_query_head(self.key.float(), self.query.shape[1])
        products = (self.query[:, :, -1:].float() @ key.mT)[seen]
        scores = scores[seen]
        factor = float((scores * products).sum() / (products * products).sum())
        return factor, float((scores - factor * products).abs().max() / scores.abs().max())

    @property
    def _is_fitted(self) -> bool:
        return self._fit[1] <= 1e-4 + 16 * torch.finfo(self.value.dtype).eps

    def stock(self, mask: Tensor | None) -> Output:
        """Return the module's own attention."""
        if self.lacks_bias:
            return self.under_view(), None
        return self.output, None

    def under_view(self) -> Float[Tensor, "batch query head d_value"]:
        """Return the module's own attention over what `view` shows."""
        return self._weighted(self._rows(slice(None), False))

    def row_function(self) -> Callable[[Tensor, Tensor, View | None], Tensor]:
        """As for other attention, where the scores are products of queries and keys, and a bias."""
        if not self._is_fitted:
            raise UnsupportedError(
                f"the scores of layer {self.layer} are more than products of queries and keys, so those of earlier "
                "queries are not known: use a policy that scores by attention received (H2O), or by position"
            )
        return super().row_function()

    def _rows(self, part: slice, needs_mask: bool) -> Rows:
        scores = self.scores[:, :, part].float()
        if self.lacks_bias:
            bias = self._key_bias()
            assert bias is not None
            scores = scores + bias
        if not needs_mask:
            assert self.view is not None
            sees = per_query_head(self.view.section(part, slice(None)).sees(), scores.shape[1])
            scores = scores.masked_fill(~sees, torch.finfo(torch.float32).min)
        return torch.softmax(scores, -1)
