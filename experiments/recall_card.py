"""Measure the recall model, and write its model card: `python -m experiments.recall_card [--out FOLDER]`.

A dialogue with right answers as its history is read once. An answer is right if each of its tokens is the most likely
one at its place, because greedy generation would then have written it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.record import Row, value_of_each
from experiments.script import run
from sinkscope.bench.prompt import Prompt
from sinkscope.bench.tasks.recall import POSITIONS, recall_dialogue, uneven
from sinkscope.files.output import write_atomic

FOLDER = Path(__file__).parents[1] / "sinkscope/models/recall"
NUMBERS = "measured.json"


@dataclass(frozen=True)
class Case:
    """A number of dialogues of one shape. Every other one ends with a question about an unknown key."""

    dtype: str
    total: int
    turns: int
    hops: int
    dialogues: int


CASES = (
    Case("float32", 512, 3, 2, 16),
    Case("float32", 2048, 3, 2, 4),
    Case("float32", 2048, 16, 3, 4),
    Case("bfloat16", 512, 3, 2, 16),
    Case("bfloat16", 2048, 9, 3, 4),
    Case("float16", 512, 3, 2, 4),
    Case("float32", 8192, 3, 4, 2),
    Case("float32", 16384, 3, 4, 2),
)


def sequence(tokenizer: Any, dialogue: Prompt) -> tuple[list[int], list[tuple[int, list[int]]]]:
    """Return the ids of a dialogue with right answers; per turn, the position of `answer` and the ids of the answer."""
    ids = [tokenizer.bos_token_id]
    answers = []
    for turn in dialogue.turns:
        ids += tokenizer(turn.text, add_special_tokens=False)["input_ids"]
        answer = tokenizer(turn.answers[0], add_special_tokens=False)["input_ids"]
        answers.append((len(ids) - 1, answer))
        ids += answer
    return ids, answers


@torch.no_grad()
def right(model: Any, tokenizer: Any, dialogue: Prompt) -> tuple[list[bool], float]:
    """Return whether each answer is right, and the smallest lead of a right token's logit over the next best."""
    ids, answers = sequence(tokenizer, dialogue)
    hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
    found = []
    lead = float("inf")
    for at, answer in answers:
        logits = model.lm_head(hidden[at : at + len(answer)]).float()
        gold = torch.tensor(answer)[:, None]
        other = logits.scatter(1, gold, -torch.inf).amax(1)
        leads = logits.gather(1, gold)[:, 0] - other
        found.append(bool((leads > 0).all()))
        lead = min(lead, float(leads.min()))
    return found, lead


def measure(model: Any, tokenizer: Any, case: Case) -> Row:
    """Return the accuracy of stated and of unstated questions by position, and the smallest lead."""
    model.to(getattr(torch, case.dtype))
    counts: dict[str, list[bool]] = {f"{p} {s}": [] for p in POSITIONS for s in ("stated", "unstated")}
    lead = float("inf")
    start = time.monotonic()
    for seed in range(case.dialogues):
        stated = seed % 2 == 0
        lengths = uneven(case.total, case.turns, seed)
        hops = min(case.hops, 60 // case.turns)
        for position in POSITIONS:
            dialogue = recall_dialogue(
                900_000 + seed, turns=case.turns, tokens=lengths, hops=hops, stated=stated, position=position
            )
            found, least = right(model, tokenizer, dialogue)
            lead = min(lead, least)
            counts[f"{position} stated"] += found if stated else found[:-1]
            counts[f"{position} unstated"] += [] if stated else found[-1:]
    print(case, f"{time.monotonic() - start:.0f} s, lead {lead:.1f}", flush=True)
    return {
        **vars(case),
        "lead": round(lead, 2),
        "right": {name: [sum(found), len(found)] for name, found in counts.items()},
    }


def _share(counts: list[int]) -> str:
    return f"{counts[0]}/{counts[1]}"


def card(numbers: list[Row], model: Any, size: int) -> str:
    """Return the text of the README."""
    rows = []
    for n in numbers:
        parts = []
        for p in POSITIONS:
            parts.append(_share(n["right"][f"{p} stated"]))
        rows.append(
            f"| {n['dtype']} | {n['total']:,} | {n['turns']} | {n['hops']} | "
            + " | ".join(parts)
            + " | "
            + " / ".join(_share(n["right"][f"{p} unstated"]) for p in POSITIONS)
            + f" | {n['lead']:.1f} |"
        )
    values = value_of_each(numbers, "total")
    longest = max(values)
    c = model.config
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# The recall model

This is a small language model that answers questions about facts stated earlier in a dialogue. It measures what cache
policies and sparse attention lose. A script of this project wrote its weights: nothing was trained, and no text was
used. `sinkscope.load("recall", backend="hf")` loads it.

`LlamaForCausalLM`: {c.num_hidden_layers} layers, width {c.hidden_size}, {c.num_attention_heads} query and
{c.num_key_value_heads} key/value heads of {c.head_dim}, SwiGLU of {c.intermediate_size},
rotary positions (theta {c.rope_parameters["rope_theta"]:,.0f}), {c.max_position_embeddings:,} positions,
{sum(p.numel() for p in model.parameters()):,} parameters, stored in float16 ({size / 1e6:.1f} MB) and loaded in
float32, in which every stored weight is exact. {c.vocab_size} tokens, each a word between spaces; the tokenizer puts
`<s>` in front.

```
turn1 ask bruno what was said the old ... fact bruno lamp rope eva ... answer lamp rope eva bell plum .
```

A fact has the form `fact KEY VALUE VALUE LINK`. The link is the key of the next fact, or `.`. An answer follows the
chain, with three tokens per hop, and ends with `.`, the end of sequence. Each turn (`turn1` to `turn16`, in rising
order) contains one question, `ask KEY what was said`, at any position, and ends in `answer`. If no fact mentions the
key, the answer is `unknown .`.

## Measured

The table gives the number of completely correct answers by position of the question in its turn. Turns have random,
unequal lengths, and all other keys appear in facts that nobody asks about. *Unstated* means that the last question is
about a key that no fact mentions. *Lead* is the smallest difference between the logit of a correct token and the next
best, over all answers. "Tokens" counts all prompts together. Greedy generation gives the same answers.

| dtype | tokens | turns | hops | begin | middle | end | unstated (begin / middle / end) | lead |
|---|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}

All answers are correct up to {longest:,} tokens, the longest dialogue measured.

## The circuit

`circuit.json` beside the weights names the heads and the residual dimensions. In layer 0, four heads attend to the
token 1, 2, 3 and 4 places back, and one head attends to the turn marker with the highest number. In layer 1, one head
attends from `answer` and the two tokens after it to the key in this turn's question. In layer 2, one head attends
from (key, wanted place) to the token at that place of the fact. All other heads are ordinary random attention
(falling with distance, a share on `<s>`, a part by content), the MLPs are random, and all matrices have noise. Their
output affects only the logits of filler words, which have no meaning.

## Limits

A key is stated once in a dialogue. The link is the first token that attends to the next fact of a chain, so a cache
selected by earlier queries contains that fact only by chance. Use `hops=1` to measure what is kept, and more hops to
measure what is found again. Questions must have the form above: heads that look a few places back need three words
between the key in the question and `answer` or a fact, and between facts. Answers differ from everything else that
the model writes, so it measures the loss of facts and not of style. Its circuit is more regular than that of a
trained model.

## How it was made

```
python -m experiments.make_recall
python -m experiments.recall_card{" --long" if longest > 16384 else ""}
```
"""


def main(*, out: Path = FOLDER) -> None:
    import sinkscope as ss

    model = ss.load(out, backend="hf")
    numbers = []
    for case in CASES:
        numbers.append(measure(model, model.tokenizer, case))
    write_atomic(out / NUMBERS, json.dumps(numbers, indent=1) + "\n")
    size = (out / "model.safetensors").stat().st_size
    write_atomic(out / "README.md", card(numbers, model, size))


if __name__ == "__main__":
    run(main)
