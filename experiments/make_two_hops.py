"""`recall-2hop`: the recall model with a circuit that follows a fact's link in the middle of the prompt.

    python -m experiments.make_two_hops [--out FOLDER]

This writes the model into a folder, by default `recall-2hop`, which is then its name.

Facts and questions are written as for the recall model. The answer to a question about A is the two values of the fact
that A's fact links to, if that fact was stated before; if A's fact ends in ".", it is A's own values:

    turn1 ... fact bruno bell glass . ... fact lotte carpet pipe bruno ... ask lotte what was said ... answer

is continued by "bell glass .". This is variable tracking over two hops, and three rows in two layers take part:

- Layer 1, heads 4 and 5, at the last token of each fact (`bruno` in lotte's): they read the first and the second value
  of the fact that it names, or of its own fact. No other row of the prompt reads them.
- Layer 1, head 0, at `answer`: the key in the question, as in the recall model.
- Layer 2, heads 0 and 1, at `answer` and at the first value said: the last token of the fact with that key, for what
  layer 1 has brought there.

So the right answer needs one row in the middle of the prompt to see two tokens far before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import sinkscope as ss
from experiments.make_recall import CONST, CONST_SIZE, DIM, Terms, one, write_head
from experiments.script import run

NAME = "recall-2hop"

# Scores, in nats. Layer 1: key and place of a linked fact beat BOS, and those of the own fact only where it ends; two
# keys that share a dimension with opposite signs take _OWN from _LINKED.
_LINKED, _OWN, _PLACE, _SINK, _LAST, _END = 40.0, 10.0, 8.0, 60.0, 32.0, 20.0
# Layer 2: key and place together beat BOS; one of them alone does not, nor does anything where nothing is wanted.
_KEY, _AT, _REST, _WANTED = 24.0, 20.0, 60.0, 26.0
_SAID = 30.0  # logit of "."


@torch.no_grad()
def plant_two_hops(hf: Any) -> None:
    """Write the circuit into a recall model that has just been loaded."""
    bos, end, last = (one(name) for name in ("is_bos", "is_end", "slot_3"))
    # Where layer 1 leaves the two values, at the last token of a fact: in dimensions that the recall model does not
    # use, and in those of keys that it says, which this model never does.
    places = list(range(CONST + 1, CONST + 1 + len(DIM["value"]))), DIM["out_key"]
    middle, last_layer = (layer.self_attn for layer in hf.model.layers[1:3])
    for i, place in enumerate(places):
        rows = zip(DIM["prev_key"], DIM["key"], DIM["third_key"], strict=True)
        terms: Terms = [
            ([bos], [(CONST, _SINK / CONST_SIZE), (last, -_LAST), (end, -_END)]),
            *((DIM[f"slot_{j + 1}"], [(CONST, _PLACE / CONST_SIZE * (i == j))]) for j in range(2)),
            *(([stated], [(link, _LINKED), (own, _OWN)]) for stated, link, own in rows),
        ]
        write_head(middle, 4 + i, terms, DIM["value"], place)
        rows = zip(DIM["prev_key"], DIM["third_key"], DIM["asked"], strict=True)
        terms = [
            ([bos], [(CONST, _REST / CONST_SIZE), (one(f"want_{i + 1}"), -_WANTED)]),
            ([last], [(CONST, _AT / CONST_SIZE)]),
            *(([*stated], [(asked, _KEY)]) for *stated, asked in rows),
        ]
        write_head(last_layer, i, terms, place, DIM["out_value"], i * len(place))
    hf.lm_head.weight[:, DIM["out_key"]] = 0.0
    hf.lm_head.weight[hf.config.eos_token_id, DIM["want_3"]] = _SAID


def main(*, out: Path = Path(NAME)) -> None:
    """Write the model, with its tokenizer."""
    hf = ss.load("recall", device="cpu")
    plant_two_hops(hf)
    hf.config.circuit = NAME
    hf.save_pretrained(out)
    hf.tokenizer.save_pretrained(out)


if __name__ == "__main__":
    run(main)
