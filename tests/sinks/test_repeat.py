"""Repetition: norms, ablation and attention, against planted truth and against the long way."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from organisms import Organism, organism

from experiments.repeated_token import table1
from sinkscope.app.cli import main
from sinkscope.errors import SinkscopeError
from sinkscope.files.notation import neuron_names
from sinkscope.files.result import Result
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.layer_view import columns, norm_without, view_layer
from sinkscope.sinks.repetition import repeat as module
from sinkscope.sinks.repetition.repeat import RepeatNorms, repeat_norms
from sinkscope.sinks.repetition.repeat_attention import TAIL, RepeatAttention, _edges, repeat_attention
from sinkscope.trace.run import trace


def _norms(o: Organism, ids: Any) -> torch.Tensor:
    site = f"blocks.{o.truth.sink_layer}.hook_resid_post"
    return trace(o.model, ids if isinstance(ids, torch.Tensor) else torch.tensor([ids]), [site], "norm")[site][0]


def _word(o: Organism, group: int, which: int = 0) -> str:
    return str(o.tokenizer.decode([o.tokens_of(group)[which]]))


def _ids(o: Organism, text: str) -> list[int]:
    return list(o.tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def llama() -> Organism:
    """One sink neuron."""
    return organism("llama", 2)


@pytest.fixture(scope="module")
def two() -> Organism:
    """Two sink neurons, which write along different dimensions."""
    return organism("qwen3", next(s for s in range(9) if len(organism("qwen3", s).truth.neurons) > 1))


# --- norms ---------------------------------------------------------------------------------------------------------


def test_each_number_is_that_of_a_pass_of_its_own(llama: Organism) -> None:
    """One causal pass of full length gives what n repetitions alone give; half of BOS's is crossed at `repeats`."""
    expected = llama.truth.repeats_expected
    assert expected is not None
    grouped, free = _word(llama, 0), _word(llama, -1)
    result = repeat_norms(llama.model, tokenizer=llama.tokenizer, tokens=[grouped, free], max_repeats=2 * expected)
    marked, unmarked = result.sequences
    assert result.sink_layer == llama.truth.sink_layer and (marked.label, unmarked.label) == (grouped, free)
    assert unmarked.repeats is None and marked.repeats is not None
    assert 0.6 * expected <= marked.repeats <= 1.5 * expected
    assert result.counts == tuple(range(1, 2 * expected + 1))
    for n in (1, marked.repeats - 1, marked.repeats, 2 * expected):
        alone = _norms(llama, llama.repeated(n, marked.ids[0]))
        assert marked.curves[0].norms[n - 1] == pytest.approx(float(alone[-1]), rel=1e-3)
        assert marked.curves[0].first_norm == pytest.approx(float(alone[0]), rel=1e-4)
        assert (alone[-1] >= alone[0] / 2) == (n >= marked.repeats)
        assert max(unmarked.curves[0].norms) < 0.1 * float(alone[0])
    assert [row["repeats"] for row in result.rows()] == [marked.repeats, None]
    assert "1 of 2 tokens never reach half of the first token's norm" in result.summary()


def test_typical_lines_are_quantiles_of_later_positions(llama: Organism) -> None:
    result = repeat_norms(llama.model, tokenizer=llama.tokenizer, max_repeats=8, texts=3)
    from sinkscope.models.text import text_rows, typical_text

    ids = text_rows(llama.tokenizer, typical_text(), 3, 64, llama.tokenizer.bos_token_id)
    site = f"blocks.{llama.truth.sink_layer}.hook_resid_post"
    norms = trace(llama.model, ids, [site], "norm")[site]
    wanted = norms[:, 1:].flatten().quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    assert [result.typical_low, result.typical_norm, result.typical_high] == pytest.approx(wanted, rel=1e-4)
    assert result.first_norm == pytest.approx(float(norms[0, 0]), rel=1e-4)
    assert result.neurons == () and all(len(s.curves) == 1 for s in result.sequences)


def test_a_prefix_stands_between_bos_and_the_repetitions(llama: Organism) -> None:
    before, word = f"{_word(llama, 1)} {_word(llama, -1)}", _word(llama, 0)
    result = repeat_norms(llama.model, tokenizer=llama.tokenizer, tokens=[word], prefix=before, max_repeats=40)
    ids = [llama.tokenizer.bos_token_id, *_ids(llama, before), *_ids(llama, word) * 40]
    assert result.sequences[0].curves[0].norms == pytest.approx(_norms(llama, ids)[3:].tolist(), rel=1e-3)
    assert result.before == ("<s>", *before.split())


def test_without_bos_another_word_is_first() -> None:
    o = organism("llama", 2, bos=False)
    word = _word(o, 0)
    result = repeat_norms(o.model, tokenizer=o.tokenizer, tokens=[word], max_repeats=4)
    assert len(result.before) == 1 and result.before[0] != word
    (sequence,) = result.sequences
    ids = [*_ids(o, result.before[0]), *sequence.ids * 4]
    assert sequence.curves[0].norms == pytest.approx(_norms(o, ids)[1:].tolist(), rel=1e-3)


def test_thinning_keeps_ends_and_repeats(llama: Organism, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"tokenizer": llama.tokenizer, "tokens": [_word(llama, 0)], "max_repeats": 200}
    whole = repeat_norms(llama.model, **options)
    monkeypatch.setattr(module, "POINTS", 7)
    thin = repeat_norms(llama.model, **options)
    assert thin.sequences[0].repeats == whole.sequences[0].repeats is not None
    assert len(thin.counts) == 7 and (thin.counts[0], thin.counts[-1]) == (1, 200)
    assert [whole.sequences[0].curves[0].norms[n - 1] for n in thin.counts] == pytest.approx(
        thin.sequences[0].curves[0].norms, rel=1e-5
    )


# --- ablation ------------------------------------------------------------------------------------------------------


def test_ablation_takes_the_planted_neurons_and_equals_taking_columns_away(two: Organism) -> None:
    """Real ablated passes against the linear shortcut, for every condition and at every position."""
    words, layer = [_word(two, 0), _word(two, 1)], two.truth.sink_layer
    count = 2 * (two.truth.repeats_expected or 0)
    result = repeat_norms(two.model, tokenizer=two.tokenizer, tokens=words, max_repeats=count, ablate=True)
    assert layer is not None and set(result.neurons) == set(two.truth.neurons)
    assert result.neurons[0] == two.truth.neurons[0]
    *singles, cycle = result.sequences
    assert cycle.ids == tuple(s.ids[0] for s in singles)
    target = Target.of(two.model, two.tokenizer)
    for sequence in result.sequences:
        row = [two.tokenizer.bos_token_id, *(sequence.ids * count)[:count]]
        view = view_layer(target, layer, torch.tensor([row]), torch.ones(1, len(row), dtype=torch.bool))
        at = [0, *result.counts]
        for curve in sequence.curves:
            picks = torch.tensor([[site[-1] for site in curve.sites]], dtype=torch.long)
            cols = columns(target, layer, picks.flatten())[None]
            wanted = norm_without(target, view, picks, cols)[0][at].tolist()
            assert [curve.first_norm, *curve.norms] == pytest.approx(wanted, rel=2e-3)
    intact, one, every, control = singles[0].curves
    assert [c.condition for c in singles[0].curves] == ["intact", "one", "set", "control"]
    assert (len(one.sites), len(every.sites), len(control.sites)) == (1, len(result.neurons), len(result.neurons))
    assert not set(control.sites) & set(two.truth.neurons)
    assert every.first_drop is not None and every.last_drop is not None and control.last_drop is not None
    assert one.first_drop is not None and 0.1 < one.first_drop < every.first_drop
    assert every.first_drop > 0.8 and every.last_drop > 0.8 and abs(control.last_drop) < 0.05
    assert every.last_drop == pytest.approx(1 - every.norms[-1] / intact.norms[-1], abs=1e-4)
    lost = [median(s.curves[i].last_drop or 0.0 for s in result.sequences if s.repeats is not None) for i in (2, 3)]
    proof = (
        f"Zeroing {neuron_names(every.sites)} takes away {lost[0]:.1%} of the norm at the last repetition; zeroing as"
    )
    assert result.conclusion().endswith(f"{proof} many random neurons takes away {abs(lost[1]):.1%}.")


def test_one_causal_neuron_is_the_whole_set(llama: Organism) -> None:
    result = repeat_norms(llama.model, tokenizer=llama.tokenizer, tokens=[_word(llama, 0)], max_repeats=9, ablate=True)
    (sequence,) = result.sequences  # no cycle of one word
    assert [c.condition for c in sequence.curves] == ["intact", "one", "control"]
    assert "Zeroing" not in result.conclusion(), "no repetition reached the norm, so there is nothing to take away"
    assert sequence.curves[1].sites == llama.truth.neurons


def test_words_of_the_paper_that_are_no_token_are_replaced_and_said(llama: Organism, tmp_path: Path) -> None:
    words = [_word(llama, 0, i) for i in range(3)] + [_word(llama, 1, i) for i in range(3)]
    (tmp_path / "text.txt").write_text(" ".join(words * 80))
    options: dict[str, Any] = {"tokenizer": llama.tokenizer, "max_repeats": 8, "ablate": True}
    result = repeat_norms(llama.model, text=tmp_path / "text.txt", **options)
    known = {"one", "bit", "the", "dust"}  # of this tokenizer
    assert [wanted for wanted, _ in result.replaced] == ["Another", "es"]
    labels = [s.label for s in result.sequences[:-1]]
    assert len(set(labels)) == 6 and known < set(labels)
    assert [labels[0], labels[3]] == [used for _, used in result.replaced]
    assert {labels[0], labels[3]} <= set(words) - known
    assert result.sequences[-1].ids == tuple(s.ids[0] for s in result.sequences[:-1])
    assert f"'Another' by {labels[0]!r}, 'es' by {labels[3]!r}" in str(result)
    inside = repeat_norms(llama.model, text=tmp_path / "text.txt", prefix=" ".join(labels[::3]), **options)
    assert not {used for _, used in inside.replaced} & {labels[0], labels[3]}  # drawn words are none of the prefix
    (tmp_path / "text.txt").write_text("the one " * 200)
    with pytest.raises(SinkscopeError, match=r"'Another', 'es': not one token each.*give --token"):
        repeat_norms(llama.model, text=tmp_path / "text.txt", **options)


def test_a_mixture_names_its_expert() -> None:
    o = organism("mixtral", 1)
    result = repeat_norms(o.model, tokenizer=o.tokenizer, tokens=[_word(o, 0)], max_repeats=120, ablate=True)
    assert set(result.neurons) == set(o.truth.neurons)
    drops = {c.condition: c.last_drop for c in result.sequences[0].curves}
    assert drops["set"] is not None and drops["set"] > 0.8 and abs(drops["control"] or 0) < 0.05


# --- attention -----------------------------------------------------------------------------------------------------


def _text(o: Organism, folder: Path) -> Path:
    """Words of the organism's own; the text that ships is mostly unknown words to it."""
    words = o.tokenizer.decode(o.natural(1, 900)[0, 1:])
    path = folder / "words.txt"
    path.write_text(words)
    return path


def _dense(o: Organism, ids: list[int]) -> torch.Tensor:
    """Every attention matrix by the model itself: [layer head query key]."""
    before = o.model.config._attn_implementation
    o.model.config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            return torch.cat(o.model(torch.tensor([ids]), output_attentions=True).attentions)
    finally:
        o.model.config._attn_implementation = before


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_attention_is_that_of_whole_matrices(llama: Organism, batch_size: int, tmp_path: Path) -> None:
    from sinkscope.models.text import text_rows

    word, n, text = _word(llama, 0), 170, _text(llama, tmp_path)
    result = repeat_attention(
        llama.model, tokenizer=llama.tokenizer, tokens=[word], max_repeats=n, text=text, batch_size=batch_size
    )
    bos = llama.tokenizer.bos_token_id
    natural = text_rows(llama.tokenizer, text.read_text(), 1, n + 1 + TAIL, bos)[0].tolist()
    rows = [natural, [bos, *_ids(llama, word) * n, *natural[-TAIL:]]]
    assert result.length == len(natural) and len(result.edges) == len({*result.edges})
    at = text_rows(llama.tokenizer, text.read_text(), 4, 64, bos)
    usual = torch.cat([_norms(llama, at[i : i + 1])[1:] for i in range(len(at))])
    norms = [_norms(llama, ids) for ids in rows]
    late = torch.arange(len(natural)) >= len(natural) - TAIL
    for got, ids, norm in zip(result.sequences, rows, norms, strict=True):
        every = _dense(llama, ids)
        high, ordinary = (norm > 3 * usual.median()).float(), norm <= usual.quantile(0.95)
        tail = late & ordinary
        assert got.high == int(high.sum()) and got.tail == int(tail.sum()) > 1
        first, mass = every[..., 0], every @ high  # layer head query
        assert got.mass is not None and got.mass_rate is not None and got.tail_mass is not None
        assert got.first == pytest.approx(first.mean((1, 2)).tolist(), abs=1e-4)
        assert got.mass == pytest.approx(mass.mean((1, 2)).tolist(), abs=1e-4)
        assert got.first_rate == pytest.approx((first.mean(2) > 0.3).float().mean(1).tolist(), abs=1e-4)
        assert got.mass_rate == pytest.approx((mass.mean(2) > 0.3).float().mean(1).tolist(), abs=1e-4)
        assert got.tail_first == pytest.approx(first[..., tail].mean((1, 2)).tolist(), abs=1e-4)
        assert got.tail_mass == pytest.approx(mass[..., tail].mean((1, 2)).tolist(), abs=1e-4)
        behind = every[:, :, tail].mean((1, 2))  # layer key
        ratio = behind[:, (high > 0) & ~late].mean(1) / behind[:, ordinary & ~late].mean(1)
        assert got.tail_ratio == pytest.approx(ratio.tolist(), rel=1e-3)
        even = torch.ones(len(ids), len(ids)).tril()
        fair = (even / even.sum(1, keepdim=True)) @ high
        assert got.uniform == pytest.approx(float(fair.mean()), abs=1e-5)
        assert got.tail_uniform == pytest.approx(float(fair[tail].mean()), abs=1e-5)
        for picture in got.pictures:
            mean = every[picture.layer].mean(0)
            spans = [slice(a, b) for a, b in pairwise(result.edges)]
            wanted = [[float(mean[q, k].sum(1).mean()) for k in spans] for q in spans]
            torch.testing.assert_close(torch.tensor(picture.cells), torch.tensor(wanted), atol=1e-4, rtol=1e-3)
            assert torch.tensor(picture.cells).sum(1) == pytest.approx(torch.ones(len(spans)), abs=1e-3)


def test_repetition_shares_the_sink_out(llama: Organism, tmp_path: Path) -> None:
    """Planted heads attend to whatever has the spike: position 0 alone in text, all repetitions after repetition."""
    expected = llama.truth.repeats_expected
    assert expected is not None and llama.truth.reading_heads
    marked, free = _word(llama, 0), _word(llama, -1)
    result = repeat_attention(
        llama.model,
        tokenizer=llama.tokenizer,
        tokens=[marked, free],
        max_repeats=3 * expected,
        text=_text(llama, tmp_path),
        layers=[layer for layer, _ in llama.truth.reading_heads],
    )
    natural, repeated, unmarked = result.sequences
    assert [p.layer for p in natural.pictures] == sorted({layer for layer, _ in llama.truth.reading_heads})
    assert (natural.high, unmarked.high) == (1, 1) and (repeated.high or 0) > expected
    assert natural.repeats is None and unmarked.repeats is None
    norms = repeat_norms(llama.model, tokenizer=llama.tokenizer, tokens=[marked], max_repeats=3 * expected)
    assert repeated.repeats == norms.sequences[0].repeats
    assert natural.tail_mass and repeated.tail_mass and natural.mass == natural.first
    for layer, _ in llama.truth.reading_heads:
        assert natural.tail_first[layer] > 10 * repeated.tail_first[layer]
        assert repeated.tail_mass[layer] > natural.tail_mass[layer] > 20 * (natural.tail_uniform or 1)
        assert unmarked.tail_first[layer] == pytest.approx(natural.tail_first[layer], rel=0.5)
    before = range(llama.truth.sink_layer or 0)
    assert all(natural.tail_first[layer] < 0.1 for layer in before)


def test_default_layers_are_the_papers() -> None:
    from sinkscope.sinks.repetition.repeat_attention import _shown

    assert _shown(1, 32) == [2, 3, 17, 31]  # Fig. 1
    assert _shown(2, 4) == [3] and _shown(None, 2) == [0, 1]


@given(st.integers(TAIL + 2, 5000))
def test_bins_cover_every_position_once(length: int) -> None:
    edges = _edges(length)
    assert edges[:2] == (0, 1) and edges[-2:] == (length - TAIL, length)
    sizes = [b - a for a, b in pairwise(edges)]
    assert min(sizes) >= 1 and len(sizes) <= 34
    assert max(sizes[1:-1]) - min(sizes[1:-1]) <= 1


@given(st.integers(1, 20000))
def test_counts_rise_from_one_to_all(most: int) -> None:
    counts = module._counts(most)
    assert counts[0] == 1 and counts[-1] == most and len(counts) == min(most, module.POINTS)
    assert list(counts) == sorted(set(counts))


# --- answers, errors, files ----------------------------------------------------------------------------------------


def test_a_model_without_a_sink_is_an_answer() -> None:
    o = organism("llama", 0, kind="none")
    norms = repeat_norms(o.model, tokenizer=o.tokenizer, max_repeats=8, ablate=True)
    assert norms.sink_layer is None and norms.sequences == () and "no attention sink" in str(norms)
    assert "no attention sink" in norms.figure().layout.title.text
    attention = repeat_attention(o.model, tokenizer=o.tokenizer, max_repeats=8)
    assert attention.sink_layer is None and "no attention sink" in str(attention)
    natural = attention.sequences[0]
    assert (natural.high, natural.mass, natural.tail_mass) == (None, None, None) and len(natural.first) == len(
        attention.sequences[1].first
    )
    assert "no attention sink" in attention.figure().layout.title.text


@pytest.mark.parametrize("measure", [repeat_norms, repeat_attention])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": ["poem book"]}, r"'poem book' is 2 tokens \('poem', 'book'\); give a string that is one token"),
        ({"tokens": ["poem"], "prefix": "a poem of"}, r"--prefix 'a poem of' contains the repeated token 'poem'"),
        (
            {"max_repeats": 2048},
            r"--max-repeats 2048 and .* the context of .* is 2048: the largest is \d+$",
        ),
        (
            {"prefix": "of " * 2048, "tokens": ["poem"]},
            r"2\d\d\d tokens around them has 2\d\d\d tokens, but the context .*: give a shorter --prefix",
        ),
        ({"max_repeats": 0}, "--max-repeats 0: expected a whole number from 1"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"seed": -1}, "--seed -1: expected a whole number from 0"),
        ({"texts": 0}, "--texts 0"),
    ],
)
def test_bad_input_is_refused_in_one_line(llama: Organism, measure: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SinkscopeError, match=message) as caught:
        measure(llama.model, tokenizer=llama.tokenizer, **options)
    assert "\n" not in str(caught.value)


def test_the_largest_number_of_repetitions_runs(llama: Organism) -> None:
    with pytest.raises(SinkscopeError, match=r"the largest is 2046$"):  # BOS and the prefix take two
        repeat_norms(llama.model, tokenizer=llama.tokenizer, tokens=["poem"], prefix="of", max_repeats=2047)
    result = repeat_norms(llama.model, tokenizer=llama.tokenizer, tokens=["poem"], prefix="of", max_repeats=2046)
    assert result.counts[-1] == 2046
    with pytest.raises(SinkscopeError, match=r"layer 99 is not in .*: give one from 0 to"):
        repeat_attention(llama.model, tokenizer=llama.tokenizer, layers=[99], max_repeats=4)


@pytest.fixture(scope="module")
def measured(two: Organism) -> tuple[RepeatNorms, RepeatAttention]:
    """Of 40 repetitions of one word. No test alters them."""
    options: dict[str, Any] = {"tokenizer": two.tokenizer, "tokens": [_word(two, 0)], "max_repeats": 40}
    return repeat_norms(two.model, ablate=True, **options), repeat_attention(two.model, **options)


def test_commands_give_what_the_functions_give_also_streamed(
    two: Organism, measured: tuple[RepeatNorms, RepeatAttention], tmp_path: Path
) -> None:
    folder, word = two.save(tmp_path / "model"), _word(two, 0)
    for option, live in zip(("--ablate", "--attention"), measured, strict=True):
        kind = type(live)
        out, html = tmp_path / f"{kind.kind}.json", tmp_path / f"{kind.kind}.html"
        arguments = ["repeat", option, "--model", str(folder), "--token", word, "--max-repeats", "40"]
        assert main([*arguments, "--json", str(out), "--html", str(html)]) == 0
        got = Result.load(out)
        assert isinstance(got, kind) and type(got).from_dict(got.to_dict()) == got
        assert _close(json.loads(out.read_text())["result"], live.to_dict()["result"])
        page = html.read_text()
        assert 'class="plot"' in page and word in page


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_close(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_close, a, b))
    return a == pytest.approx(b, rel=1e-3, abs=1e-4) if isinstance(a, float) else a == b


def test_commands_refuse_what_does_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repeat", "--attention", "--ablate"]) == 2
    assert capsys.readouterr().err == "error: --ablate: this run has no use for it; leave it out\n"
    assert main(["repeat", "--layer", "2"]) == 2
    assert "--layer 2: this run has no use for it; give --attention, too" in capsys.readouterr().err


def test_figures_show_the_numbers(two: Organism, measured: tuple[RepeatNorms, RepeatAttention]) -> None:
    word, (norms, attention) = _word(two, 0), measured
    drawn = norms.figure()
    lines = [t for t in drawn.data if t.name == word]
    assert [list(t.y) for t in lines] == [list(c.norms) for c in norms.sequences[0].curves]
    assert len({t.xaxis for t in lines}) == len(lines)  # a panel per condition
    traces = {(t.name, t.xaxis): t for t in attention.figure().data if t.name}
    assert list(traces[f"40 x {word}: position 0", "x"].y) == list(attention.sequences[1].first)
    assert list(traces["natural text: high-norm positions", "x"].y) == list(attention.sequences[0].mass or ())
    assert list(traces["natural text: ratio", "x2"].y) == list(attention.sequences[0].tail_ratio or ())
    maps = [t for t in attention.figure().data if t.type == "heatmap"]
    cells = [p.cells for s in attention.sequences for p in s.pictures]
    assert len(maps) == len(cells)
    for drawn_map, wanted in zip(maps, cells, strict=True):
        assert 10 ** drawn_map.z[2][0] == pytest.approx(wanted[2][0], rel=1e-4) and drawn_map.z[0][1] is None


# --- Table 1 -------------------------------------------------------------------------------------------------------


def _table(text: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()]
    assert len({len(row) for row in rows}) == 1
    return {row[0]: row[1:] for row in rows[2:]}


def test_table1_claims_nothing_that_was_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert table1.main([]) == 0
    rows = _table(capsys.readouterr().out)
    absent = "no weights at hand"
    assert rows["LLaMa-2-7b-HF"] == ["1000", absent, "1", absent, "7890, 10411", absent]
    assert len(rows) == 4 and all(row[1] == row[3] == row[5] == absent for row in rows.values())
    assert table1.main(["--models", "llama-1-7b"]) == 0  # the hub is out of reach in tests
    shown = capsys.readouterr()
    assert _table(shown.out) == rows and shown.err.startswith("llama-1-7b: ")


def test_table1_measures_the_weights_it_is_given(
    two: Organism, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sinkscope.sinks.first_token.attention_received.RATE_TEXTS", 4)
    marked = [_word(two, 0), _word(two, 1)]
    folder = two.save(tmp_path / "weights")
    words = [part for word in marked for part in ("--token", word)]
    assert table1.main(["--run", f"llama-1-7b={folder}", "--run", f"mine={folder}", *words]) == 0
    rows = _table(capsys.readouterr().out)
    for name, paper in (("LLaMa-1-7b-HF", ["450", "2", "7003"]), ("mine", ["-", "-", "-"])):
        assert rows[name][::2] == paper
        repeats, layer, neurons = rows[name][1::2]
        assert int(layer) == two.truth.sink_layer
        assert {int(n) for n in neurons.split(", ")} == {site[-1] for site in two.truth.neurons}
        assert 0.6 <= float(repeats) / (two.truth.repeats_expected or 1) <= 1.5
    assert rows["LLaMa-2-7b-HF"][1] == "no weights at hand"
    sinkless = organism("llama", 0, kind="none").save(tmp_path / "none")
    assert table1.main(["--run", f"plain={sinkless}"]) == 0
    assert _table(capsys.readouterr().out)["plain"][3] == "no sink"
    for bad in ("plain", "plain=", f"plain={tmp_path / 'nowhere'}"):
        assert table1.main(["--run", bad]) == 2
        assert "expected NAME=FOLDER" in capsys.readouterr().err
