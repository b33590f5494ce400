"""Which tokens are real, and where they stand, read from who sees whom."""

from __future__ import annotations

import pytest
import torch
from organisms import tiny_model
from refusals import refused
from transformers import DynamicCache

import sinkscope as ss
from sinkscope.engine.tokens import TokenPositions

N = 12
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()
ITSELF = torch.eye(N, dtype=torch.bool)


def changed(*cells: tuple[slice | int, slice | int], to: bool = False) -> torch.Tensor:
    mask = CAUSAL.clone()
    for query, key in cells:
        mask[query, key] = to
    return mask


def real(*columns: int) -> torch.Tensor:
    """Which columns are no padding."""
    return ~torch.isin(torch.arange(N), torch.tensor(columns))


@pytest.mark.parametrize(
    ("mask", "pos", "document"),
    [
        (CAUSAL, [*range(12)], None),
        (changed((slice(5, None), slice(0, 5))), [*range(5), *range(7)], [0] * 5 + [1] * 7),
        (changed((slice(0, 5), slice(0, 5)), to=True), [*range(12)], None),
        (changed((9, 8)), [*range(12)], None),
        (CAUSAL & real(0, 1, 2), [-1, -1, -1, *range(9)], None),
        ((CAUSAL & real(0, 1, 2)) | ITSELF, [-1, -1, -1, *range(9)], None),
        (CAUSAL & real(9, 10, 11), [*range(9), -1, -1, -1], None),
        (CAUSAL & real(5), [*range(5), -1, *range(5, 11)], None),
        (CAUSAL & ~CAUSAL.tril(-3), [*range(12)], None),
        (
            changed((slice(6, None), slice(0, 6)), (slice(7, None), 6)),
            [*range(6), 0, *range(5)],
            [0] * 6 + [1] + [2] * 5,
        ),
    ],
    ids="causal documents prefix tree left left-itself right hole window single".split(),
)
def test_positions_and_documents_of_a_mask(mask, pos, document):
    tokens = TokenPositions.none(1, torch.device("cpu")).read_under(mask[None])
    assert tokens.pos.tolist() == [pos]
    assert (None if tokens.document is None else tokens.document[0].tolist()) == document


def test_a_later_token_goes_on_in_the_document_that_it_sees():
    first = TokenPositions.none(1, torch.device("cpu")).read_under(changed((slice(5, None), slice(0, 5)))[None])
    sees = torch.ones(1, 1, N + 1, dtype=torch.bool)
    sees[..., :5] = False
    later = first.read_under(sees)
    assert later.pos[0, -1] == 7 and later.documents[0, -1] == 1


def read_in(*sizes: int, mask: torch.Tensor) -> TokenPositions:
    """A row that is read in calls of these sizes."""
    tokens = TokenPositions.none(1, torch.device("cpu"))
    for size in sizes:
        tokens = tokens.read_under(mask[None, tokens.seen : tokens.seen + size, : tokens.seen + size])
    return tokens


def test_a_document_may_begin_at_the_end_of_a_later_call():
    documents = changed((slice(7, None), slice(0, 7)))
    for sizes in ((12,), (4, 4, 4), (4, 3, 5), (7, 1, 4)):
        tokens = read_in(*sizes, mask=documents)
        assert tokens.pos.tolist() == [[*range(7), *range(5)]] and tokens.documents.tolist() == [[0] * 7 + [1] * 5]


def test_a_token_that_the_first_call_took_for_padding_and_that_is_seen_later_is_refused():
    documents = changed((slice(3, None), slice(0, 3)))
    with refused("is seen that the first call took for padding.*or hold a token more"):
        read_in(4, 8, mask=documents)
    assert read_in(5, 7, mask=documents).pos.tolist() == [[*range(3), *range(9)]]


@pytest.mark.parametrize("positions", ["first", [0, 1]])
def test_an_edit_finds_the_first_tokens_behind_padding_that_sees_itself(positions):
    model = tiny_model("llama")[0]
    ids, shown = torch.arange(5, 5 + N)[None], real(0, 1, 2)
    where = (shown.long().cumsum(0) - 1).clamp(min=0)[None]
    edit = ss.Ablate(layer=1, neurons=[3], value=50.0, positions=positions)
    logits, seen = [], []
    for mask in (shown.long()[None], ((CAUSAL & shown) | ITSELF)[None, None]):
        with torch.no_grad(), edit.on(model) as run:
            logits.append(model(ids, attention_mask=mask, position_ids=where).logits[:, 3:])
            seen.append([event.position for event in run.events])
    torch.testing.assert_close(*logits)
    assert seen[0] == seen[1] != []


def test_of_a_token_between_others_that_no_query_sees_it_is_not_known_whether_it_is_padding():
    """In a cache that was filled before: a policy is refused, an edit of all positions acts."""
    model, ids = tiny_model("llama")[0], torch.arange(3, 13)[None]
    mask = torch.ones(1, 1, 10, 10).tril().bool()
    mask[..., 8:, 5] = False
    cache = DynamicCache()
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        with ss.kv.Full().on(model), refused("the token in column 5 was read before this run.*enter the run first"):
            model(ids[:, 8:9], attention_mask=mask[:, :, 8:9, :9], past_key_values=cache)
        with ss.Ablate(layer=1, neurons=0).on(model) as run:
            model(ids[:, 8:9], attention_mask=mask[:, :, 8:9, :9], past_key_values=cache)
    assert run.events
