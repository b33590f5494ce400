"""What the bundled model must be able to do before it enters the package: copy, tell stories, end them, and remember.

Everything is measured in float32 on the model alone; `conditions` collects it for the card.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from experiments.bundled import corpus, measure, passages
from experiments.record import Row
from sinkscope.bench.run import run_bench
from sinkscope.bench.tasks.loops import Loops
from sinkscope.hooks.trace import attention_rows
from sinkscope.loops.text.signals import tail_period
from sinkscope.measure.rate import mean_known
from sinkscope.opening.live import target_of

PERIODS, COPIES, ROWS = (4, 16, 48), (1, 2, 4, 8, 16), 8
PIECE = 64  # tokens that come twice
OPENINGS, OPENING, STORY = 100, 12, 1000
TEMPERATURE = 0.8
DOCUMENTS, FACTS = 60, 4  # things in a document, each in another place


def repeated(units: Int[Tensor, "unit token"], times: int, bos_id: int) -> Int[Tensor, "unit pos"]:
    """Units in a row, after BOS."""
    ids = units.repeat(1, times)
    return torch.nn.functional.pad(ids, (1, 0), value=bos_id)


@torch.no_grad()
def copy_curve(
    model: LlamaForCausalLM,
    units: Int[Tensor, "row pos"],
    bos_id: int,
) -> dict[str, float]:
    """Measure how probable the next copy of a unit gets, the more copies there are (DITTO; Xu et al. 2022).

    Args:
        model: the model.
        units: token ids that are repeated, without BOS.
        bos_id: the token in front.

    Returns:
        Per number of whole copies in `COPIES` (as text, as in JSON) the mean probability of the next copy's tokens,
        over tokens and rows.
    """
    ids = repeated(units.to(model.device), max(COPIES) + 1, bos_id)
    logits = model(ids, use_cache=False).logits[:, :-1].float()
    probabilities = logits.softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    by_copy = rearrange(probabilities, "row (copy token) -> copy row token", copy=max(COPIES) + 1).mean((1, 2)).tolist()
    curve: dict[str, float] = {}
    for count in COPIES:
        curve[str(count)] = round(by_copy[count], 4)
    return curve


def ditto(model: LlamaForCausalLM, bos_id: int) -> dict[str, dict[str, float]]:
    """The curve of `copy_curve` on cycles of evenly drawn tokens, per period."""
    generator = torch.Generator().manual_seed(1)
    vocab = model.config.vocab_size
    values = {}
    for p in PERIODS:
        values[str(p)] = copy_curve(model, torch.randint(3, vocab, (ROWS, p), generator=generator), bos_id)
    return values


@torch.no_grad()
def head_scores(model: LlamaForCausalLM, bos_id: int) -> dict[str, Float[np.ndarray, "layer head"]]:
    """Score all heads on random tokens that come twice, as Olsson et al. (2022) do.

    Args:
        model: the model.
        bos_id: the token in front.

    Returns:
        "induction": the mean attention from a position of the second copy to the one after its counterpart in the
        first. "previous_token": the mean attention from a position to the one before it.
    """
    units = torch.randint(3, model.config.vocab_size, (ROWS, PIECE), generator=torch.Generator().manual_seed(2))
    target = target_of(model)
    ids = repeated(units, 2, bos_id)
    # How many positions back a head looks, and the first query that is scored.
    offsets = {"induction": (PIECE - 1, PIECE + 1), "previous_token": (1, 2)}
    scores: dict[str, np.ndarray] = {}
    for kind in offsets:
        scores[kind] = np.zeros((target.n_layers, target.n_heads), np.float32)

    def see(layer: int, _first: int, probs: Tensor) -> None:
        for kind, (back, query) in offsets.items():
            diagonal = probs.diagonal(-back, -2, -1)[..., query - back :]
            scores[kind][layer] = diagonal.mean((0, -1)).cpu().numpy()

    with attention_rows(target, see, rows_per_chunk=ids.shape[1]):
        target.forward(ids)
    return scores


def best_head(scores: Float[np.ndarray, "layer head"]) -> Row:
    layer, head = np.unravel_index(scores.argmax(), scores.shape)
    return {"layer": int(layer), "head": int(head), "score": round(float(scores.max()), 4)}


def openings(valid: np.ndarray, *, count: int, length: int, bos_id: int, eos_id: int) -> np.ndarray:
    """BOS and the first tokens of different stories, as rows."""
    starts = np.concatenate([[0], np.flatnonzero(valid[:-1] == eos_id) + 1])
    whole = [s for s in starts if s + length <= len(valid) and eos_id not in valid[s : s + length]][:count]
    rows = []
    for s in whole:
        rows.append(np.concatenate([[bos_id], valid[s : s + length]]))
    return np.stack(rows).astype(np.int64)


def story_endings(model: LlamaForCausalLM, prompts: np.ndarray, *, temperature: float, eos_id: int) -> dict[str, float]:
    """Continue story openings, and see how the runs end.

    Args:
        model: the model.
        prompts: rows of one length, see `openings`.
        temperature: of sampling; 0 is greedy.
        eos_id: the token that ends a story.

    Returns:
        "ended": share that ends by itself; "looped": share whose end repeats itself, at least 3 copies and 32 tokens of
        a period of at most 64.
    """
    answers: list[list[int]] = []
    for part in np.array_split(prompts, max(1, len(prompts) // 25)):
        answers += measure.generate(model, part, STORY, eos_id, temperature=temperature, seed=len(answers))
    ended = []
    for answer in answers:
        ended.append(len(answer) < STORY)
    looped = []
    for end, answer in zip(ended, answers, strict=True):
        looped.append(not end and tail_period(answer, repeats=3, shortest=32, longest=64) is not None)
    return {"ended": float(np.mean(ended)), "looped": float(np.mean(looped))}


@torch.no_grad()
def retrieval(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    filler: Sequence[str],
    *,
    between: int,
    documents: int,
) -> dict[str, float]:
    """Ask where a thing was, among other things and far back.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        filler: sentences that stand between the facts.
        between: sentences after each fact.
        documents: number of questions, each in a document of its own.

    Returns:
        "right": share of questions where the right place has the largest probability of all places of its document;
        "chance": 1 / `FACTS`; "median_distance": tokens between the fact and the question.
    """
    rng = np.random.default_rng(4)
    right = 0
    distances = []
    for _ in range(documents):
        known = passages.located(rng, FACTS)
        asked = int(rng.integers(FACTS))
        runs = []
        for _ in known:
            runs.append(rng.integers(len(filler), size=between))
        parts = []
        for (thing, place), run in zip(known, runs, strict=True):
            parts.append(" ".join([f"The {thing} was in the {place}.", *(filler[i] for i in run)]))
        prompt = " ".join(parts) + "\n" + passages.question(known[asked][0])
        scores = [answer_score(model, tokenizer, prompt, f" {place}.") for _, place in known]
        right += int(np.argmax(scores)) == asked
        distances.append(len(tokenizer(" ".join(parts[asked:]))["input_ids"]))
    return {"right": right / documents, "chance": 1 / FACTS, "median_distance": float(np.median(distances))}


def answer_score(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> float:
    """Log-probability of an answer after a prompt, in nats."""
    front = tokenizer(prompt)["input_ids"]
    back = tokenizer(answer, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([front + back])
    logits = model(ids, use_cache=False, logits_to_keep=len(back) + 1).logits[0, :-1].float()
    return float(logits.log_softmax(-1).gather(-1, torch.tensor(back)[:, None]).sum())


def loopbench(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> Row:
    """Greedy on LoopBench's small set with the whole cache: per set, the share of runs that loop."""
    records = run_bench(model, Loops(), ["full"], tokenizer=tokenizer, max_new_tokens=2500, batch_size=12)
    groups: Row = {}
    for name in dict.fromkeys(record.settings["set"] for record in records):
        mine = []
        for record in records:
            if record.settings["set"] == name:
                mine.append(record.metrics["loop_paper"])
        groups[name] = {"runs": len(mine), "loop": mean_known(mine)}
    return groups


def conditions(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    stories: np.ndarray,
    *,
    loops: bool = True,
) -> Row:
    """Measure everything in this file.

    Args:
        model: the model, in float32.
        tokenizer: its tokenizer.
        stories: token ids of the validation stories, EOS after each.
        loops: also generate 2,500 tokens for the prompts of LoopBench.
    """
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    texts = []
    for part in np.split(stories, np.flatnonzero(stories == eos) + 1):
        texts.append(tokenizer.decode(part))
    filler = passages.sentences([text.replace(corpus.EOS, "") for text in texts])
    loss = measure.validation_loss(model, corpus.windows(stories, length=512, bos_id=bos))
    scores = head_scores(model, bos)
    prompts = openings(stories, count=OPENINGS, length=OPENING, bos_id=bos, eos_id=eos)
    heads = {}
    for name, score in scores.items():
        heads[name] = best_head(score)
    found: Row = {
        "ditto": ditto(model, bos),
        "heads": heads,
        "story_loss": {"per_token": loss},
        "sampled": story_endings(model, prompts, temperature=TEMPERATURE, eos_id=eos),
        "greedy": story_endings(model, prompts, temperature=0.0, eos_id=eos),
        "retrieval": {str(n): retrieval(model, tokenizer, filler, between=n, documents=DOCUMENTS) for n in (0, 4, 16)},
    }
    return found | ({"loopbench": loopbench(model, tokenizer)} if loops else {})
