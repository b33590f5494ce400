"""The entry conditions of the bundled model, each on a model whose answer is known."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from organisms import loop_organism
from organisms.tokens import BOS
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from experiments.bundled import card, entry, passages, stories
from sinkscope.bench.prompt import read_prompts
from sinkscope.bench.tasks.loops import DATA

BUNDLED = Path(__file__).resolve().parents[2] / "sinkscope" / "models" / "bundled"
SENTENCES = [f"The dog number {n} ran over the green hill to see his friends." for n in range(40)]


class Copier:
    """Predicts, with probability `sure`, what followed the longest earlier match of the text; else all tokens evenly.

    `match` is the least length of a match.
    """

    device = torch.device("cpu")

    def __init__(self, vocab_size: int, sure: float = 0.9, match: int = 1) -> None:
        self.config = SimpleNamespace(vocab_size=vocab_size)
        self.sure, self.match = sure, match

    def __call__(self, ids: torch.Tensor, *, use_cache: bool = False, logits_to_keep: int = 0) -> SimpleNamespace:
        assert not use_cache
        even = torch.full((*ids.shape, self.config.vocab_size), 1 / self.config.vocab_size)
        for row, probabilities in zip(ids.tolist(), even, strict=True):
            for end in range(len(row)):
                follows = self.follows(row[: end + 1])
                if follows is not None:
                    probabilities[end] = (1 - self.sure) / (self.config.vocab_size - 1)
                    probabilities[end, follows] = self.sure
        return SimpleNamespace(logits=even.log()[:, -logits_to_keep if logits_to_keep else 0 :])

    def follows(self, seen: list[int]) -> int | None:
        best, found = self.match - 1, None
        for at in range(len(seen) - 1):
            length = 0
            while length <= at and seen[at - length] == seen[-1 - length]:
                length += 1
            if length > best:
                best, found = length, seen[at + 1]
        return found


def test_the_curve_of_a_copier_is_the_probability_with_which_it_copies() -> None:
    units = torch.tensor([[5, 9, 12, 7], [30, 31, 8, 4]])
    curve = entry.copy_curve(Copier(50, sure=0.8), units, copies=(0, 1, 2, 4))  # type: ignore[arg-type]
    assert curve["0"] == pytest.approx(1 / 50, abs=1e-3)
    # The first token of the second copy follows one that has no earlier match.
    assert curve["1"] == pytest.approx((0.8 * 3 + 1 / 50) / 4, abs=1e-3)
    assert curve["2"] == curve["4"] == pytest.approx(0.8, abs=1e-3)
    # What needs a match of six tokens begins to copy one and a half copies later.
    late = entry.copy_curve(Copier(50, sure=0.8, match=6), units, copies=(1, 2, 3))  # type: ignore[arg-type]
    assert late["1"] == pytest.approx(1 / 50, abs=1e-3)
    assert late["2"] == pytest.approx((0.8 * 3 + 1 / 50) / 4, abs=0.21)
    assert late["3"] == pytest.approx(0.8, abs=1e-3)


def test_the_curve_of_planted_induction_heads_rises_where_copying_wins() -> None:
    with_heads, without = (loop_organism(0, induction=i, vocab_size=1028) for i in (True, False))
    cycle = torch.tensor([with_heads.truth.ring[3:400:40]])
    curve = entry.copy_curve(with_heads.model, cycle, copies=(1, 2, 4, 8), bos_id=BOS)
    assert curve["1"] < 0.2 and min(curve["4"], curve["8"]) > 0.8
    flat = entry.copy_curve(without.model, cycle, copies=(1, 2, 4, 8), bos_id=BOS)
    assert max(flat.values()) < 0.1


def test_sentences_are_repeated_whole() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    curve = entry.sentence_ditto(Copier(len(tokenizer), match=4), tokenizer, SENTENCES[:2])  # type: ignore[arg-type]
    assert list(curve) == ["0", "1", "2", "4", "8", "16"]
    assert curve["0"] < 0.01
    assert 0.5 < curve["1"] < 0.9
    assert curve["2"] == curve["16"] == pytest.approx(0.9, abs=1e-3)


def test_the_planted_heads_have_the_scores() -> None:
    organism = loop_organism(1)
    scores = entry.head_scores(organism.model, bos_id=BOS)
    assert scores["previous_token"].shape == (4, 6)
    named = {"previous_token": organism.truth.previous_heads, "induction": organism.truth.locking_heads}
    for name, heads in named.items():
        found = {(int(layer), int(head)) for layer, head in np.argwhere(scores[name] > 0.3)}
        assert found == set(heads), name
        best = entry.best_head(scores[name])
        assert (best["layer"], best["head"]) in heads
    # One visible match holds 1 / (1 + hold - 1/2) of the attention of a locking head.
    expected = 1 / (0.5 + organism.truth.hold)
    assert entry.best_head(scores["induction"])["score"] == pytest.approx(expected, abs=0.06)


def test_openings_are_the_starts_of_stories() -> None:
    valid = np.array([5, 6, 7, 8, 1, 9, 1, 10, 11, 12, 1, 13, 14, 15])
    rows = entry.openings(valid, count=9, length=3, bos_id=0, eos_id=1)
    assert rows.tolist() == [[0, 5, 6, 7], [0, 10, 11, 12], [0, 13, 14, 15]]


class Teller:
    """Ends a row that began with token 5 after seven tokens, repeats three tokens if it began with 6, else counts."""

    def __call__(self, ids: torch.Tensor, *, past_key_values: Any, **_: Any) -> SimpleNamespace:
        seen = ids if past_key_values is None else torch.cat([past_key_values, ids], 1)
        logits = torch.full((len(ids), 1, 400), -1e4)
        for row, last in zip(seen.tolist(), logits, strict=True):
            new = len(row) - 2
            token = {5: 1 if new == 7 else 30 + new, 6: 20 + new % 3}.get(row[1], 40 + new)
            last[0, token] = 0.0
        return SimpleNamespace(past_key_values=seen, logits=logits)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_endings_are_counted(temperature: float) -> None:
    prompts = np.array([[0, 5], [0, 5], [0, 6], [0, 7]])
    found = entry.story_endings(Teller(), prompts, temperature=temperature, eos_id=1, count=100)  # type: ignore[arg-type]
    assert found == {"ended": 0.5, "looped": 0.25, "median_tokens": (7 + 100) / 2}


def test_retrieval_is_whole_with_copying_and_chance_without() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    settings: dict[str, Any] = {"between": 0, "documents": 30, "facts": 3}
    copier: Any = Copier(len(tokenizer), match=5)
    copies = entry.retrieval(copier, tokenizer, SENTENCES, **settings)
    assert copies["right"] == 1.0 and copies["chance"] == pytest.approx(1 / 3)
    far = entry.retrieval(copier, tokenizer, SENTENCES, between=2, documents=1, facts=3)
    assert far["median_distance"] > copies["median_distance"]
    blind: Any = Copier(len(tokenizer), match=10_000)
    assert entry.retrieval(blind, tokenizer, SENTENCES, **settings)["right"] < 0.7


def test_the_score_of_an_answer_is_the_sum_of_its_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    answer = " kitchen."
    count = len(tokenizer(answer, add_special_tokens=False)["input_ids"])
    blind: Any = Copier(len(tokenizer), match=10_000)
    found = entry.answer_score(blind, tokenizer, "It was in the", answer)
    assert count > 1 and found == pytest.approx(-count * math.log(len(tokenizer)), rel=1e-4)


@pytest.mark.parametrize(("token", "loop", "eos"), [(50, 1.0, 0.0), (1, 0.0, 1.0)])
def test_loopbench_counts_loops_and_ends(token: int, loop: float, eos: float) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    model.config.architectures = ["LlamaForCausalLM"]
    with torch.no_grad():
        # A constant residual stream, and an unembedding that gives one token the largest logit whatever comes.
        model.model.embed_tokens.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[token] = 1.0
    prompts = [*read_prompts(DATA / "small-dc.jsonl"), *read_prompts(DATA / "small-ri.jsonl")][::4]
    found = entry.loopbench(model, tokenizer, cap=260, prompts=prompts)
    assert set(found) == {"dc", "ri"}
    for row in found.values():
        assert (row["runs"], row["loop"], row["eos"]) == (3, loop, eos)


def test_passages_ask_for_what_they_said() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        told, *asked = passages.retrieval(rng, SENTENCES).split("\n")
        assert len(asked) >= 2
        for line in asked:
            fact = line.split("? ")[1]
            assert told.count(fact) == 1 and line.count(fact.split(" was")[0].removeprefix("The ")) == 2


def test_passages_bring_their_lines_again() -> None:
    made = [(kind, kind(np.random.default_rng(seed), SENTENCES)) for kind in passages.KINDS for seed in range(8)]
    for kind, text in made:
        lines = text.split("\n")
        if kind is passages.listing:
            rows = [line for line in lines if line.startswith("- ") or line[:1].isdigit()]
            assert rows[: len(rows) // 2] == rows[len(rows) // 2 :] and len(rows) >= 6
        elif kind is passages.table:
            rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
            told = {re.fullmatch(r"(\w+) is (\d+) years old and has a (\w+) (\w+)\.", line) for line in lines} - {None}
            found = {match.group(1, 4, 2, 3) for match in told if match}
            assert len(rows) >= 3 and {(name, animal, age, color) for name, age, animal, color in rows} == found
        elif kind is passages.lookup:
            scope: dict[str, Any] = {}
            source, _, asked = text.partition("}\n")
            exec(source + "}", scope)
            pairs = asked.split("\n")
            for question, answer in zip(pairs[::2], pairs[1::2], strict=True):
                assert eval(question.removeprefix(">>> "), scope) == json.loads(answer)
        elif kind is passages.refrain:
            assert max(map(lines.count, lines)) >= 2 and any("stopped" in line for line in lines)
        elif kind is passages.echo:
            said = {part.split('"')[1] for part in text.split(" said, ")[1:]}
            assert all(text.count(f'"{line}"') >= 2 for line in said)


def test_the_same_seed_makes_the_same_passages() -> None:
    tales = [" ".join(SENTENCES[:20]), " ".join(SENTENCES[20:])]
    assert passages.passages(0, 30, tales) == passages.passages(0, 30, tales)
    assert passages.passages(0, 30, tales) != passages.passages(1, 30, tales)
    assert passages.sentences(["Too short. " + SENTENCES[0] + ' "not one," he said. ' + SENTENCES[1]]) == SENTENCES[:2]


def test_a_card_names_what_falls_short() -> None:
    at = {n: 0.9 for n in ("1", "2", "4", "8", "16")}
    one: dict[str, Any] = {
        "ditto": {"4": at, "16": at | {"8": 0.31}},
        "ditto_sentences": {"0": 0.2, **at},
        "heads": {name: {"layer": 2, "head": 3, "score": 0.7} for name in ("previous_token", "induction")},
        "story_loss": {"per_token": 2.0, "per_character": 0.5},
        "sampled": {"ended": 0.61, "looped": 0.0, "median_tokens": 200.0, "openings": 98},
        "greedy": {"ended": 0.4, "looped": 0.3, "median_tokens": 300.0, "openings": 98},
        "retrieval": {"4": {"right": 0.5, "chance": 0.25, "median_distance": 123.0}},
        "loopbench": {"dc": {"runs": 12, "loop": 1.0}, "ri": {"runs": 12, "loop": 0.5}},
    }
    table = {str(row[0]): row[1:] for row in card._required(one, one)}
    assert table["random cycles after 8 copies, smallest of the periods"] == (">= 0.5", "0.31", "0.31")
    assert table["98 story openings, temperature 0.8: end by themselves"] == (">= 50 %", "61 %", "61 %")
    assert table["retrieval, about 123 tokens back"] == ("> 25 %", "50 %", "50 %")
    assert table["LoopBench small, greedy: loop"] == (">= 50 %", "75 %", "75 %")
    assert "(L2.H3)" in str(table["induction score, best head"])


def small_teacher(folder: Path) -> LlamaForCausalLM:
    """A random model that ends stories by BOS, with the tokenizer of the bundled model beside it."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=48,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 3.0  # the same in every token: a bias of the unembedding's first column
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[0, 0] = 1.0
        model.lm_head.weight[1] = -1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def test_stories_are_sampled_whole_and_sampling_goes_on_where_it_stopped(tmp_path: Path) -> None:
    small_teacher(tmp_path / "teacher")

    def told(name: str, tokens: int) -> bytes:
        file = tmp_path / name
        words = ["--teacher", str(tmp_path / "teacher"), "--out", str(file), "--tokens", str(tokens), "--rows", "8"]
        stories.main(words)
        return file.read_bytes()

    whole = told("whole.txt", 600)
    part = told("part.txt", 200)
    assert whole.startswith(part) and len(part) < len(whole)
    with (tmp_path / "part.txt").open("a") as file:
        file.write("a story that was cut by a ki")
    assert told("part.txt", 600) == whole
    kept = stories.read_stories(tmp_path / "whole.txt")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "teacher")
    counts = [len(ids) for ids in tokenizer(kept, add_special_tokens=False)["input_ids"]]
    assert 600 <= sum(counts) < 600 + 8 * 48 and max(counts) < 60
    assert not any("<" in story and "s>" in story for story in kept)
