"""The detector: online against brute force, on organisms, and its curves against scikit-learn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from attack_kit import mixed_clusters, planted_clusters, text_file, trials_of, words
from hypothesis import given, settings
from hypothesis import strategies as st
from intervention_kit import bridge_of, count_hooks, logits, nnsight_of
from organisms import Organism, organism
from sklearn.metrics import roc_auc_score

from experiments.harmless import SHIPPED, pieces
from sinkscope.app.cli import main
from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result
from sinkscope.files.store import lines
from sinkscope.interventions import SinkDetector
from sinkscope.models.target import Target
from sinkscope.models.text import honest_repetition, source_code
from sinkscope.sinks.attack.detect import AttackDetection, DetectRow, area, cut_at, detect_attack, neuron_values, peak
from sinkscope.sinks.attack.vocabulary import drawn_sequences
from sinkscope.sinks.first_token.layer_view import view_layer
from sinkscope.trace.run import trace


def _detect(o: Organism, folder: Path, **options: Any) -> AttackDetection:
    options = {
        "clusters": planted_clusters(o),
        "lengths": [16],
        "sequences": 40,
        "prefix": "",
        "harmless": {"text": words(o)},
        "rules": [(1, 1), (4, 8)],
        **options,
    }
    return detect_attack(o.model, tokenizer=o.tokenizer, text=text_file(o, folder), **options)


def _only(result: AttackDetection, context: str, attack: str, rule: tuple[int, int] = (4, 8)) -> DetectRow:
    (row,) = [d for d in result.detections if (d.context, d.attack, d.hits, d.window) == (context, attack, *rule)]
    return row


@pytest.mark.parametrize(("family", "seed"), [("llama", 1), ("qwen3_moe", 1), ("neox", 2)])
def test_attacks_on_organisms_stand_out(family: str, seed: int, tmp_path: Path) -> None:
    o = organism(family, seed, bos=False)
    found = _detect(o, tmp_path)
    for attack in ("cluster", "repeated"):
        row = _only(found, "no BOS", attack)
        assert row.attacks == 40 and row.auroc is not None and row.auroc > 0.98
        assert row.detected_here is not None and row.detected_here.share == 1 and row.false_alarms.share < 0.05
    # In natural text the second token can be of the first one's group: a single hit is no proof
    assert _only(found, "no BOS", "cluster", (1, 1)).false_alarms.share > row.false_alarms.share
    assert set(found.sites) == set(o.truth.neurons)


def test_wrong_clusters_give_little_to_detect(tmp_path: Path) -> None:
    o = organism("llama", 1, bos=False)
    wrong = _only(_detect(o, tmp_path, clusters=mixed_clusters(o)), "no BOS", "cluster")
    assert wrong.attacks < 20
    assert wrong.detected_here is None or wrong.detected_here.share < 0.5


def test_other_neurons_detect_nothing(tmp_path: Path) -> None:
    o = organism("llama", 1, bos=False)
    trials = trials_of(o, tmp_path)
    rows, _ = drawn_sequences(trials.pools, 16, 40, 0)
    layer = o.truth.sink_layer
    assert layer is not None
    width = Target.of(o.model).d_mlp
    others = [(layer, n) for n in range(width) if (layer, n) not in o.truth.neurons][:12]
    natural = torch.stack([row for row in o.natural(40, 16)])
    loud, quiet = (neuron_values(trials.setup.target, others, ids, 16)[:, 1:] for ids in (rows, natural))
    areas = [area(peak(loud[..., i], 4, 8), peak(quiet[..., i], 4, 8)) for i in range(len(others))]
    assert 0.1 < sum(areas) / len(areas) < 0.9  # some neurons lie on the far side of the sink, some on the near one
    ours = [neuron_values(trials.setup.target, [o.truth.neurons[0]], ids, 16)[:, 1:, 0] for ids in (rows, natural)]
    sign = ours[0].mean().sign()
    assert area(peak(ours[0] * sign, 4, 8), peak(ours[1] * sign, 4, 8)) == 1


def _brute(scores: list[float], threshold: float, hits: int, window: int) -> list[int]:
    """Positions at which the rule begins to hold; position 0 never counts."""
    holds = [
        sum(scores[j] >= threshold for j in range(max(1, i - window + 1), i + 1)) >= hits for i in range(len(scores))
    ]
    return [i for i, now in enumerate(holds) if now and not (i and holds[i - 1])]


def _calibrated(o: Organism, **options: Any) -> SinkDetector:
    levels = neuron_values(Target.of(o.model), o.truth.neurons, o.natural()[:, :1], 8)[:, 0].median(0).values
    return SinkDetector(sites=o.truth.neurons, levels=levels.tolist(), **options)


def _alarms(run: Any, rows: int) -> list[list[int]]:
    return [[e.position for e in run.events if e.row == row and e.kind == "alarm"] for row in range(rows)]


@pytest.mark.parametrize(
    ("family", "seed", "rule"),
    [
        ("llama", 0, (1, 1)),
        ("llama", 0, (2, 4)),
        ("mixtral", 1, (3, 5)),
        pytest.param("llama", 0, (3, 5), marks=pytest.mark.slow),
        pytest.param("mixtral", 1, (1, 1), marks=pytest.mark.slow),
        pytest.param("mixtral", 1, (2, 4), marks=pytest.mark.slow),
    ],
)
def test_online_in_pieces_and_padded_as_by_hand(family: str, seed: int, rule: tuple[int, int]) -> None:
    o = organism(family, seed, bos=False)
    hits, window = rule
    detector = _calibrated(o, hits=hits, window=window)
    first, second = o.tokens_of(0), o.tokens_of(1)
    rows = [  # sinks, ordinary tokens, sinks again where the group outweighs what came between
        [*first[:6], *second[:3], *first[:9]],
        [first[0], second[0], *first[1:5]],
        [*first[:2], *second[:9]],
    ]
    scores = [
        detector.scores(neuron_values(Target.of(o.model), o.truth.neurons, torch.tensor([row]), 1))[0].tolist()
        for row in rows
    ]
    wanted = [_brute(s, 0.5, hits, window) for s in scores]
    assert any(wanted)
    longest = max(map(len, rows))
    ids = torch.tensor([[3] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    with detector.on(o.model) as run, torch.no_grad():
        o.model(ids, attention_mask=mask)
    assert _alarms(run, len(rows)) == wanted
    right = torch.tensor([row + [3] * (longest - len(row)) for row in rows])
    with detector.on(o.model) as run, torch.no_grad():
        o.model(right, attention_mask=mask.flip(1))
    assert _alarms(run, len(rows)) == wanted

    with detector.on(o.model) as run, torch.no_grad():  # a prompt, then chunks of one and more tokens
        cache = None
        for start, end in ((0, 3), (3, 4), (4, 5), (5, 11), (11, longest)):
            out = o.model(torch.tensor(rows[:1])[:, start:end], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            kept = [t for s in run.tracker._sequences.values() for memory in s.memory.values() for t in memory.values()]
            assert sum(t.numel() for t in kept) <= window  # what is kept of a row does not grow
    assert _alarms(run, 1) == wanted[:1]


@given(
    scores=st.lists(st.integers(-3, 9), min_size=2, max_size=30),
    hits=st.integers(1, 4),
    more=st.integers(0, 4),
    threshold=st.integers(-3, 9),
)
def test_the_peak_is_the_largest_threshold_that_alarms(scores: list[int], hits: int, more: int, threshold: int) -> None:
    alarms = _brute([math.nan, *map(float, scores)], float(threshold), hits, hits + more)
    assert bool(alarms) == (peak(torch.tensor([scores]).float(), hits, hits + more).item() >= threshold)


@settings(max_examples=30)
@given(
    loud=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    quiet=st.lists(st.integers(0, 9), min_size=1),
    rate=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
)
def test_curves_agree_with_scikit_learn(loud: list[int], quiet: list[int], rate: float) -> None:
    a, b = torch.tensor(loud).float(), torch.tensor(quiet).float()
    truth = [1] * len(loud) + [0] * len(quiet)
    assert area(a, b) == pytest.approx(roc_auc_score(truth, loud + quiet))
    cut = cut_at(b, rate)
    assert sum(q > cut for q in quiet) <= rate * len(quiet) + 1e-9
    lower = max((q for q in quiet if q < cut), default=-math.inf)  # no lower cut would do
    assert rate == 1 or sum(q > lower for q in quiet) > rate * len(quiet)


def test_values_are_those_of_the_layer() -> None:
    o = organism("llama", 0)
    ids, site = o.natural(3, 12), o.truth.neurons[0]
    ours = neuron_values(Target.of(o.model), [site], ids, 2)[..., 0]
    traced = trace(o.model, ids, sites=[f"blocks.{site[0]}.mlp.hook_post"])
    torch.testing.assert_close(ours, traced[f"blocks.{site[0]}.mlp.hook_post"][..., site[1]])

    o = organism("mixtral", 1)
    site = o.truth.neurons[0]
    ids = o.natural(3, 12)
    view = view_layer(Target.of(o.model), site[0], ids, torch.ones_like(ids, dtype=torch.bool))
    assert view.routing is not None
    weight = view.routing[:, site[1]]
    post = view.post[:, site[1] * Target.of(o.model).d_mlp + site[2]]
    asked = weight > 0
    ours = neuron_values(Target.of(o.model), [site], ids, 2).flatten()
    assert asked.any()
    torch.testing.assert_close(ours[asked], (post / weight)[asked], rtol=1e-4, atol=1e-5)


def test_every_kind_of_model_is_watched_alike() -> None:
    o = organism("llama", 1, bos=False)
    ids = torch.tensor([[*o.tokens_of(0)[:6], *o.tokens_of(1)[:3]]])
    detector = _calibrated(o)
    seen = []
    for model in (o.model, bridge_of(o.model, o.tokenizer), nnsight_of(o.model, o.tokenizer)):
        with detector.on(model) as run:
            logits(model, ids)
        seen.append(_alarms(run, 1))
    assert seen[0][0] and seen == [seen[0]] * 3


def test_it_changes_nothing_and_leaves_nothing() -> None:
    o = organism("llama", 0)
    ids, hooks = o.repeated(100), count_hooks(o.model)
    with torch.no_grad():
        before = o.model(ids).logits
        with _calibrated(o).on(o.model) as run:
            assert torch.equal(o.model(ids).logits, before)
    assert run.counts["alarm"] >= 1 and count_hooks(o.model) == hooks


def test_generation_is_watched() -> None:
    o = organism("llama", 1, bos=False)
    prompt = torch.tensor([o.tokens_of(0)[:3]])
    detector = _calibrated(o, hits=1, window=1)
    with detector.on(o.model) as run:
        out = o.model.generate(prompt, max_new_tokens=8, do_sample=False)
    scores = detector.scores(neuron_values(Target.of(o.model), o.truth.neurons, out[:, :-1], 1))[0].tolist()
    assert _alarms(run, 1) == [_brute(scores, 0.5, 1, 1)]


def test_the_result_gives_the_detector_and_comes_back(tmp_path: Path) -> None:
    o = organism("llama", 1, bos=False)
    found = _detect(o, tmp_path)
    assert Result.from_dict(found.to_dict()) == found
    with found.detector(hits=2, window=4).on(o.model) as run, torch.no_grad():
        o.model(torch.tensor([o.tokens_of(0)[:8]]))
    assert [e.position for e in run.events] == [2]  # positions 1 and 2 are the first two that count


def test_no_sink_is_an_answer(tmp_path: Path) -> None:
    o = organism("llama", 3, kind="none")
    found = detect_attack(o.model, tokenizer=o.tokenizer, text=text_file(o, tmp_path))
    assert found.sink_layer is None and found.detections == () and "no sink" in found.summary()
    assert found.figure() is not None
    with pytest.raises(SinkscopeError, match="no sink"):
        found.detector()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": []}, "for 1 neurons"),
        ({"levels": [0.0]}, "not 0"),
        ({"levels": [1.0], "hits": 5}, "hits=5, window=4"),
        ({"levels": [1.0], "threshold": math.nan}, "threshold=nan"),
        ({"sites": [(1, 2), (2, 2)], "layer": None, "neurons": [], "levels": [1.0, 1.0]}, "neurons of one MLP"),
    ],
)
def test_bad_detectors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SinkscopeError, match=message):
        SinkDetector(**({"layer": 1, "neurons": [3]} | options))


def test_harmless_text_is_what_it_says() -> None:
    assert "def " in source_code() and len(source_code()) > 100_000
    assert SHIPPED.read_text() == lines(pieces()), "run python -m experiments.harmless"
    assert honest_repetition() == "\n\n".join(pieces()) + "\n"
    text = honest_repetition(seed=1)
    assert text == honest_repetition(seed=1) != honest_repetition(seed=2)
    rows = text.split("\n")
    assert len(set(rows)) < 0.7 * len(rows) and len(text) > 30_000


def test_the_command_and_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    o = organism("llama", 1, bos=False)
    folder, text, out = o.save(tmp_path / "model"), text_file(o, tmp_path), tmp_path / "found.json"
    words = ["--model", str(folder), "--text", str(text), "--length", "12", "--sequences", "20", "--prefix", ""]
    assert main(["attack", "--detect", *words, "--json", str(out)]) == 0
    assert "The rule watches L" in capsys.readouterr().out
    found = AttackDetection.load(out)
    # code is one unknown word over and over for this tokenizer: a repetition, and the alarm says so
    assert {d.harmless for d in found.detections} == {"text", "code", "repetition", "all"}
    drawn = [tuple(t.y) for t in found.figure().data]
    assert all(d.roc in drawn for d in found.detections if d.harmless == "all" and d.roc)
