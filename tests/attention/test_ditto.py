"""Copying and the heads that carry it, on models whose copying heads are planted."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from intervention_kit import logits
from organisms import LoopOrganism, loop_organism, tiny_model

from sinkscope.app.cli import main
from sinkscope.attention.ditto import COPIES, Ditto, copy_probabilities, ditto, head_scores
from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result
from sinkscope.models.target import Target

QUICK: dict[str, Any] = {"periods": (5, 12), "units": 2, "draws": 3}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words that the organism knows, without a full stop."""
    words = loop_organism(0, vocab_size=1028).tokenizer.convert_ids_to_tokens(list(range(40, 1028)))
    path = tmp_path_factory.mktemp("ditto") / "words.txt"
    path.write_text(" ".join(words))
    return path


def measured(organism: LoopOrganism, text: Path, **options: Any) -> Ditto:
    return ditto(organism.model, tokenizer=organism.tokenizer, text=text, **{**QUICK, **options})


@functools.cache
def of_the_bundled_model() -> Ditto:
    return ditto(None, periods=[4, 5], units=2, heads=1, draws=1)


@pytest.mark.parametrize("seed", [0, 3])
def test_the_planted_heads_are_found_and_without_them_nothing_is_copied(seed: int, text: Path) -> None:
    organism = loop_organism(seed, vocab_size=1028)
    planted = set(organism.truth.locking_heads)
    found = measured(organism, text, heads=len(planted))
    assert {(h.layer, h.head) for h in found.heads if h.ablated} == planted
    assert {(h.layer, h.head) for h in found.heads if h.previous_token > 0.9} == set(organism.truth.previous_heads)
    assert {(h.layer, h.head) for h in found.heads[: len(planted)]} == planted
    # One visible match holds 1 / (1 + hold - 1/2) of the attention of a planted head.
    assert found.heads[0].induction == pytest.approx(1 / (organism.truth.hold + 0.5), abs=0.06)
    assert min(h.locking or 0 for h in found.heads[: len(planted)]) > 0.5
    assert found.ablated is not None and found.control is not None
    assert found.first < 0.05 and found.copied > 0.8 and found.control > 0.8 and found.ablated < 0.05
    for curve in found.curves:
        assert curve.copies == COPIES
        # Copying wins from `hold` visible copies on: the curve is low after one, and high from then on.
        assert curve.probability[1] < 0.5 < 0.8 < min(curve.probability[3:])
        assert curve.likeliest[0] < 0.2 and min(curve.likeliest[3:]) == min(curve.increased[3:]) == 1
        assert max(curve.ablated) < 0.05 and min(curve.control[3:]) > 0.8
        assert all(low <= mid for low, mid in zip(curve.control_low, curve.control, strict=True))
    told = found.conclusion()
    many = "1 head" if len(planted) == 1 else f"{len(planted)} heads"
    assert told.startswith(f"After 8 copies the next token of a repeated cycle has probability {found.copied:.2f}")
    assert f"without the {many} of largest induction score it has 0.0" in told


def test_as_few_heads_as_take_away_half_are_ablated(text: Path) -> None:
    organism = loop_organism(0, vocab_size=1028)
    planted = set(organism.truth.locking_heads)
    small = {"periods": (5,), "units": 1, "draws": 1}
    found = measured(organism, text, **small)
    ablated = [(h.layer, h.head) for h in found.heads if h.ablated]
    assert 1 <= len(ablated) <= len(planted) and set(ablated) <= planted
    middle = (found.first + found.copied) / 2
    assert found.ablated is not None and found.ablated <= middle
    if len(ablated) > 1:  # one less leaves more than half
        fewer = measured(organism, text, heads=len(ablated) - 1, **small)
        assert fewer.ablated is not None and fewer.ablated > middle


def test_without_copying_heads_the_curve_is_flat(text: Path) -> None:
    found = measured(loop_organism(0, induction=False, vocab_size=1028), text)
    assert found.ablated is None and found.control is None and not any(h.ablated for h in found.heads)
    for curve in found.curves:
        assert max(curve.probability) < 0.05 and curve.ablated == curve.control == ()
    assert max(h.induction for h in found.heads) < 0.3
    assert found.conclusion().startswith(
        "The model does not copy: after 8 copies the next token of a repeated cycle has"
    )
    assert set(found.rows()[0]) == {"unit", "copies", "probability", "increased", "likeliest"}
    assert found.figure().data


@torch.no_grad()
def test_ablation_is_the_mean_over_later_positions_of_text(text: Path) -> None:
    """By hand: the output projection's input is replaced, in a copy of the model, and the pass is made once more."""
    organism = loop_organism(2, vocab_size=1028)
    heads = list(organism.truth.locking_heads)
    found = measured(organism, text, heads=len(heads), periods=(7,), units=1)
    model = copy.deepcopy(organism.model)
    rows = organism.tokenizer(text.read_text(), add_special_tokens=False)["input_ids"][: 4 * 63]
    pieces = torch.tensor(rows).view(4, 63)
    pieces = torch.cat([torch.full((4, 1), organism.tokenizer.bos_token_id), pieces], 1)
    kept: dict[int, torch.Tensor] = {}
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _m, args, i=i: kept.__setitem__(i, args[0]))
    model(pieces)
    means = {i: z[:, 1:].mean((0, 1)) for i, z in kept.items()}

    def replace(i: int, z: torch.Tensor) -> torch.Tensor:
        z = z.clone()
        for layer, head in heads:
            if layer == i:
                z[:, 1:, head * 96 : (head + 1) * 96] = means[i][head * 96 : (head + 1) * 96]
        return z

    for i, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _m, args, i=i: (replace(i, args[0]),))
    unit = torch.randint(4, 1028, (1, 7), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([torch.tensor([[organism.tokenizer.bos_token_id]]), unit.repeat(1, 17)], 1)
    said = model(ids).logits[0, :-1].softmax(-1)[range(119), ids[0, 1:]].view(17, 7).mean(1)
    assert found.curves[0].ablated == pytest.approx([float(said[n]) for n in COPIES], rel=1e-3, abs=1e-6)
    whole = organism.model(ids).logits[0, :-1].softmax(-1)
    own = whole[range(119), ids[0, 1:]].view(17, 7)
    assert found.curves[0].probability == pytest.approx([float(own[n].mean()) for n in COPIES], rel=1e-3, abs=1e-6)
    assert found.curves[0].increased == pytest.approx([float((own[n] > own[0]).float().mean()) for n in COPIES])
    best = (whole.argmax(-1) == ids[0, 1:]).view(17, 7).float()
    assert found.curves[0].likeliest == pytest.approx([float(best[n].mean()) for n in COPIES])


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "falcon", "qwen3"])
@torch.no_grad()
def test_without_a_first_token_its_prediction_is_missing(family: str) -> None:
    model, tokenizer = tiny_model(family)
    units = torch.randint(4, 96, (2, 6), generator=torch.Generator().manual_seed(1))
    found = copy_probabilities(lambda ids: logits(model, ids), units, 2, None)
    ids = units.repeat(1, 3)
    p = logits(model, ids).softmax(-1)
    for row in range(2):
        for at in range(1, 18):
            assert float(found[0, row].flatten()[at]) == pytest.approx(float(p[row, at - 1, ids[row, at]]), rel=1e-4)
    assert (
        found[:2, :, 0, 0].isnan().all() and found[1, :, :, 0].isnan().all() and not found[:, :, 1:, 1:].isnan().any()
    )
    whole = ditto(model, tokenizer=tokenizer, bos=False, **{**QUICK, "periods": [6]})
    assert whole.model.family == family and (whole.heads[0].locking is None) == (family == "falcon")


@torch.no_grad()
def test_scores_are_those_of_the_definition() -> None:
    model, _ = tiny_model("llama")
    units = torch.randint(4, 96, (3, 10), generator=torch.Generator().manual_seed(1))
    scores = head_scores(Target.of(model), units, 1)
    model.set_attn_implementation("eager")
    ids = torch.cat([torch.ones(3, 1, dtype=torch.long), units.repeat(1, 2)], 1)
    for layer, a in enumerate(model(ids, output_attentions=True).attentions):
        for head in range(4):
            induction = [float(a[row, head, q, q - 9]) for row in range(3) for q in range(11, 21)]
            before = [float(a[row, head, q, q - 1]) for row in range(3) for q in range(2, 21)]
            for mine, values in zip(scores[:, layer, head], (induction, before), strict=True):
                assert float(mine) == pytest.approx(sum(values) / len(values), rel=1e-4)


def test_sentences_of_the_text_are_repeated_where_the_tokenizer_knows_them(tmp_path: Path) -> None:
    organism = loop_organism(0, vocab_size=1028)
    words = organism.tokenizer.convert_ids_to_tokens(list(range(40, 1028)))
    text = tmp_path / "text.txt"
    text.write_text(" ".join(" ".join(words[i : i + 9]) + (" nowhere." if i < 891 else "") for i in range(0, 900, 9)))
    assert [c.name for c in measured(organism, text, periods=[4], draws=1).curves] == ["period 4", "sentences"]
    found = of_the_bundled_model()
    assert [(c.name, c.units, c.copies) for c in found.curves] == [
        (name, 2, COPIES) for name in ("period 4", "period 5", "sentences")
    ]
    assert found.curves[2].probability[-1] > found.curves[2].probability[0]


def test_the_command_gives_what_the_function_gives(capsys: pytest.CaptureFixture[str]) -> None:
    words = "ditto --period 4 --period 5 --units 2 --heads 1 --draws 1 --json -"
    assert main(words.split()) == 0
    told = Result.from_dict(json.loads(capsys.readouterr().out))
    assert told.to_dict()["result"] == of_the_bundled_model().to_dict()["result"]


def test_bad_input() -> None:
    model, tokenizer = tiny_model("llama", max_position_embeddings=200)
    for options, message in (
        ({"heads": 7}, "--heads 7: expected at most 6, half of the 12 heads"),
        ({"periods": [100]}, "context of .* is 200: expected room for two copies"),
        ({"periods": []}, "no period was given"),
        ({"periods": [1]}, "--period 1"),
    ):
        with pytest.raises(SinkscopeError, match=message):
            ditto(model, tokenizer=tokenizer, **options)
    short = ditto(model, tokenizer=tokenizer, periods=[4, 30], units=1, draws=1)
    assert [c.copies for c in short.curves[:2]] == [COPIES, (0, 1, 2, 4)] and short.after == 4
