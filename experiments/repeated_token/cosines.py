"""Cosines of queries and keys in the first layers: nearly orthogonal, as Yona et al. 2025, section 4.3, says?

    python -m experiments.repeated_token.cosines [--model NAME|FOLDER] [--layers 2]

Prints for each head the mean cosine of query and key at one position (rotary does not change it), and of a query and
the earlier keys of its text, before and after rotary.
"""

from __future__ import annotations

import torch
from einops import einsum, repeat
from torch import Tensor

from experiments.queries_and_keys import queries_and_keys
from experiments.script import run
from sinkscope.measure import Setup
from sinkscope.models.target import Target


@torch.no_grad()
def cosines(target: Target, ids: Tensor, layers: list[int]) -> Tensor:
    """Mean cosines [layer quantity head]: at one position, with earlier keys before rotary, with them after rotary."""
    means = torch.full((len(layers), 3, target.n_heads), torch.nan)
    length = ids.shape[1] - 1  # the first token is left out
    earlier = torch.ones(length, length, dtype=torch.bool).tril(-1)

    def see(layer: int, rotated: bool, query: Tensor, key: Tensor) -> None:
        unit_query = torch.nn.functional.normalize(query[:, :, 1:].float(), dim=-1)
        unit_key = torch.nn.functional.normalize(key[:, :, 1:].float(), dim=-1)
        group = query.shape[1] // key.shape[1]
        unit_key = repeat(unit_key, "row kv_head key d -> row (kv_head group) key d", group=group)
        cosine = einsum(unit_query, unit_key, "row head query d, row head key d -> head row query key").cpu()
        number = layers.index(layer)
        means[number, 0] = cosine.diagonal(dim1=-2, dim2=-1).mean((1, 2))
        means[number, 1 + int(rotated)] = cosine[:, :, earlier].mean((1, 2))

    with queries_and_keys(target, see, layers):
        target.forward(ids, upto=layers[-1])
    return means


def main(*, model: str | None = None, layers: int = 2) -> None:
    setup = Setup.open(model)
    chosen = list(range(layers))
    print("head     one position  earlier keys  after rotary")
    for layer, of_layer in zip(chosen, cosines(setup.target, setup.ids, chosen), strict=True):
        for head, (own, before, after) in enumerate(of_layer.T.tolist()):
            print(f"L{layer}.H{head:<5} {own:12.2f}  {before:12.2f}  {after:12.2f}")


if __name__ == "__main__":
    run(main)
