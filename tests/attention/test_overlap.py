"""Overlap of lines and of important tokens: planted lines, and every number against sets from dense attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from organisms import tiny_model
from organisms.lines import line_organism
from test_lines import _chosen, _dense
from torch import Tensor

from sinkscope.app.cli import main
from sinkscope.attention.lines import LineOverlap, covered, jaccard, line_overlap, token_overlap
from sinkscope.attention.texts import Question
from sinkscope.errors import SinkscopeError
from sinkscope.files.console import silent
from sinkscope.files.result import Result
from sinkscope.lines import HeadLines
from sinkscope.models.target import Target

Sets = tuple[set[int], set[int]]


@pytest.mark.parametrize("seed", [0, 1])
def test_offsets_agree_between_texts_and_columns_only_where_they_are_the_same(seed: int) -> None:
    o = line_organism(seed)
    n = 160

    def measured(*columns: tuple[int, ...], lines: int) -> dict[tuple[int, int], float]:
        texts = [o.text(n, c, i) for i, c in enumerate(columns)]
        found = line_overlap(o.model, texts, etas=[lines / (2 * n)], tokenizer=o.tokenizer)
        assert found.tokens is None  # texts have no questions
        return {(h.layer, h.head): h.inputs[0] for h in found.heads}

    apart = measured((20, 33, 70), (25, 40, 66), lines=3)
    same = measured((20, 33, 70), (20, 33, 70), lines=3)
    one = measured((20, 33, 70), (25, 40, 66), lines=1)
    for place in o.truth.vertical - o.truth.offsets.keys():
        assert apart[place] == 0 and same[place] == 1
    for place in o.truth.offsets:
        assert one[place] == 1


def test_segments_of_planted_lines() -> None:
    """Columns of the first half are seen from the second; within the halves only those at the same places agree."""
    o = line_organism(3)
    n, vertical = 160, o.truth.vertical - o.truth.offsets.keys()
    for columns, whole, inside in (((5, 10), 1, 0), ((5, 10, 85, 90), 1, 1), ((5, 10, 95, 99), 1, 0)):
        texts = [o.text(n, columns, i) for i in range(2)]
        found = line_overlap(o.model, texts, etas=[2 / n], tokenizer=o.tokenizer)  # two lines of each half
        for h in found.heads:
            if (h.layer, h.head) in vertical:
                assert (h.segments[0], h.segments_relative[0]) == (whole, inside), columns
    found = line_overlap(o.model, texts, etas=[1 / n], tokenizer=o.tokenizer)
    for h in found.heads:
        if (h.layer, h.head) in o.truth.offsets:
            assert (h.segments[0], h.segments_relative[0]) == (1, 1)


def _count(weights: Tensor, most: int) -> Sets:
    """The heaviest lines of rows [query, key] whose last query sees the last key."""
    queries, n = weights.shape
    back = torch.arange(n - queries, n)[:, None] - torch.arange(n)
    lines = [(-float(weights[:, b].sum()), "v", b) for b in range(n)]
    lines += [(-float(weights[back == o].sum()), "s", o) for o in range(n)]
    top = [line for line in sorted(lines)[:most] if line[0] < 0]
    return {at for _, kind, at in top if kind == "v"}, {at for _, kind, at in top if kind == "s"}


def _both(a: Sets, b: Sets) -> int:
    return len(a[0] & b[0]) + len(a[1] & b[1])


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_line_overlap_equals_its_definition(model_type: str) -> None:
    model, tokenizer = tiny_model(model_type)
    g = torch.Generator().manual_seed(3)
    texts = [torch.randint(4, 90, (n,), generator=g).tolist() for n in (40, 33, 51)]
    eta, layer = 0.15, 1
    found = line_overlap(model, texts, etas=[eta], layers=[layer], tokenizer=tokenizer)
    dense = [_dense(model, torch.tensor([ids]))[layer] for ids in texts]
    for h in found.heads:
        own = [_chosen(weights[h.head], eta) for weights in dense]
        pairs = [(i, j) for i in range(3) for j in range(3)]
        ratio = {
            (i, j): _both(own[i], own[j]) / (len(own[i][0] | own[j][0]) + len(own[i][1] | own[j][1])) for i, j in pairs
        }
        assert h.inputs[0] == pytest.approx(sum(ratio[i, j] for i, j in pairs if i != j) / 6, abs=1e-6)
        assert h.inputs_paper[0] == pytest.approx(sum(ratio.values()) / 9, abs=1e-6)
        whole, inside = [], []
        for weights in dense:
            a = weights[h.head]
            n, half = len(a), len(a) // 2
            most = int(eta * 2 * (n - half) + 1e-9)
            first = _chosen(a[:half, :half], eta)
            second, block = _count(a[half:], most), _count(a[half:, half:], most)
            whole.append(_both(first, second) / len([*second[0], *second[1]]))
            inside.append(_both(first, block) / len([*block[0], *block[1]]))
        assert h.segments[0] == pytest.approx(sum(whole) / 3, abs=1e-6)
        assert h.segments_relative[0] == pytest.approx(sum(inside) / 3, abs=1e-6)
    assert found.inputs == pytest.approx([sum(h.inputs[0] for h in found.heads) / 4])


def test_random_lines_share_what_chance_says() -> None:
    """Of k columns of n, and m offsets, two draws have k^2 / n + m^2 / n in common on average."""
    vertical, slash = torch.zeros(2, 1, 3000, 20, dtype=torch.bool)
    vertical[..., :10], slash[..., :4] = True, True
    own, g = HeadLines(vertical, slash, vertical.shape[-1]), torch.Generator().manual_seed(0)
    a, b = own.random(g, cells=False), own.random(g, cells=False)
    expected = (10 * 10 / 20 + 4 * 4 / 20) / 14
    assert float(covered(a, b).mean()) == pytest.approx(expected, abs=0.01)
    assert float(jaccard(a, a).min()) == 1
    columns = [torch.nn.functional.pad(kind, (5, 0)) for kind in (vertical, slash)]  # five columns further on
    wider = HeadLines(*columns, columns[0].shape[-1])
    both = 10 - 5 + 0  # columns 5 to 9 are in both, no offset is
    assert float(jaccard(own, wider)[0, 0]) == pytest.approx(both / (28 - both))


def test_all_lines_are_shared() -> None:
    o = line_organism(0)
    found = line_overlap(o.model, [o.text(60, (20,), i) for i in range(3)], etas=[1.0], tokenizer=o.tokenizer)
    assert found.inputs == found.inputs_random == found.inputs_paper == (1.0,)


def _importance(model: Any, ids: list[int], layers: list[int], start: int, stop: int, prompt: int) -> Tensor:
    dense = _dense(model, torch.tensor([ids]))
    return sum((dense[layer][:, start:stop, :prompt].sum((0, 1)) for layer in layers), torch.zeros(prompt).double())


def _top(importance: Tensor, budget: float) -> set[int]:
    return set(importance.argsort(descending=True)[: round(budget * len(importance))].tolist())


def test_important_tokens_equal_their_definition() -> None:
    model, tokenizer = tiny_model("llama")
    g = torch.Generator().manual_seed(5)
    asked = Question([1], torch.randint(4, 90, (31,), generator=g).tolist(), torch.randint(4, 90, (8,)).tolist())
    assert asked.placed("begin") == [1, *asked.question, *asked.context]
    assert asked.placed("middle") == [1, *asked.context[:15], *asked.question, *asked.context[15:]]
    assert asked.placed("end") == [1, *asked.context, *asked.question]
    layers, window, budgets, n, new = [0, 2], 4, (0.1, 0.3), 40, 12
    model.generation_config.eos_token_id = None
    found = token_overlap(Target.of(model, tokenizer), [asked], layers, new, budgets, window, silent)
    assert found is not None and found.answer_tokens == new and found.random == pytest.approx(budgets)
    for place in found.positions:
        ids = torch.tensor([asked.placed(place.position)])
        model.set_attn_implementation("sdpa")
        whole = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=3)[0].tolist()
        assert len(whole) == n + new
        last = _importance(model, whole, layers, n - window, n, n)
        output = _importance(model, whole, layers, n, n + new, n)
        for budget, value in zip(budgets, place.overlap, strict=True):
            truth = _top(output, budget)
            assert value == pytest.approx(len(_top(last, budget) & truth) / len(truth))
    parts = {b: _importance(model, whole, layers, n + b * window, n + (b + 1) * window, n) for b in range(-8, 3)}
    assert [b.block for b in found.blocks] == list(range(-8, 3))
    for b in found.blocks:
        for i, budget in enumerate(budgets):
            own, truth = _top(parts[b.block], budget), _top(output, budget)
            assert b.overlap[i] == pytest.approx(len(own & truth) / len(truth))
            rest = truth if b.block < 0 else _top(output - parts[b.block], budget)
            assert b.apart is not None and b.apart[i] == pytest.approx(len(own & rest) / len(rest))
    for d in found.distances:
        pairs = [(i, i + d.blocks) for i in range(3 - d.blocks)]
        shared = [len(_top(parts[i], 0.3) & _top(parts[j], 0.3)) / round(0.3 * n) for i, j in pairs]
        assert (d.pairs, d.overlap[1]) == (len(pairs), pytest.approx(sum(shared) / len(pairs)))
    assert [d.blocks for d in found.distances] == [1, 2]


def test_a_file_of_questions_the_command_and_the_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "5_topics.jsonl", tmp_path / "x.json"
    prompt = "Memorize each topic. USER: I would like to discuss {} \n ASSISTANT: Sure. " * 6 + "Now the record ends."
    rows = [{"test_id": i, "prompt": prompt + " What is the first topic?", "topics": ["a"]} for i in range(2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["overlap", "--data", str(file), "--length", "80", "--layer", "1", "--max-new-tokens", "9", "--window", "4"]
    assert main([*argv, "--eta", "0.1", "--budget", "0.2", "--json", str(out)]) == 0
    found = LineOverlap.load(out)
    assert Result.load(found.save(tmp_path / "y.json")) == found and str(tmp_path) not in out.read_text()
    assert found.tokens is not None and [p.position for p in found.tokens.positions] == ["begin", "middle", "end"]
    assert found.inputs == pytest.approx((1.0,))  # the two prompts are the same
    assert "question at its middle" in capsys.readouterr().out
    drawn = found.figure()
    bars = next(t for t in drawn.data if t.type == "bar")
    assert list(bars.y) == [p.overlap[0] for p in found.tokens.positions]
    none = line_overlap(None, data=file, length=80, layers=[1], max_new_tokens=0)
    assert none.tokens is None and len([t for t in none.figure().data if t.type == "bar"]) == 0
    file.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    capsys.readouterr()
    assert line_overlap(None, data=file, length=80, layers=[1], max_new_tokens=2).tokens is None
    assert "5_topics.jsonl does not separate questions from their context" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--eta", "-1"], "--eta -1.0: expected a share above 0"),
        (["--budget", "2"], "--budget 2.0: expected a share"),
        (["--count", "1"], "--count"),
        (["--length", "20"], "do not fit 20 tokens"),
        (["--data", "nowhere.jsonl"], "'nowhere.jsonl': no such file"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overlap", *argv]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and said in shown.err and shown.err.count("\n") == 1


def test_one_text_is_refused() -> None:
    with pytest.raises(SinkscopeError, match="one text cannot be compared"):
        line_overlap(None, ["Programs are made of statements, and statements of expressions, which have values."])
