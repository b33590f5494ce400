"""A page of outputs side by side: a real model alone, under the guard, and under DRY.

    python -m experiments.loopguard.side_by_side WORK [WORK ...] --model FOLDER [--out outputs.md]

It shows the first openings of each kind whose output under the guard has an alarm, from the half that was not used for
choosing: what each wrote from a little before the place where the guard's text goes on.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from experiments.loopguard.real import FULL, outputs_of
from experiments.loopguard.real_openings import KINDS, openings_of
from experiments.record import Row
from experiments.script import run
from sinkscope.files.output import write_atomic

EACH = 7  # of each kind
BEFORE, SHOWN = 12, 110  # tokens
ARMS = {FULL: "the model alone", "rewind": "`LoopGuard()`", "DRY, breakers": "DRY"}
HEAD = """# Outputs side by side

What {model} writes greedily, alone, under the guard and under DRY (multiplier 0.8, base 1.75, allowed
length 2, usual breakers). These are the openings on which the guard acted, at most {each} of each kind, of those that
were not used for choosing anything. Each excerpt begins {before} tokens before the place where the guard's text goes on
and has {shown} tokens.

```bash
python -m experiments.loopguard.side_by_side work --model smollm2-135m
```
"""


def excerpt(output: Row, place: int, tokenizer: Any) -> str:
    """The text of an output around a token, as a block of code; a line says whether it ends or goes on."""
    tokens = output["tokens"][max(0, place - BEFORE) : place + SHOWN]
    text = tokenizer.decode(tokens, skip_special_tokens=True).replace("```", "'''")
    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, 110, drop_whitespace=False) or [""]]
    if output["ended"] and place + SHOWN >= len(output["tokens"]):
        lines.append("(the end)")
    return "```text\n" + "\n".join(line.rstrip() for line in lines).strip("\n") + "\n```\n"


def main(works: Sequence[Path], *, model: Path, out: Path = Path("outputs.md")) -> None:
    """Make what the module describes.

    Args:
        works: Folders with a runs.jsonl.
        model: Folder of the model, named as in the outputs.
        out: The page.
    """
    made = outputs_of(works, model=model.name, half="report")
    outputs = {(one["arm"], one["number"]): one for one in made}
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    page = [HEAD.format(model=model.name, each=EACH, before=BEFORE, shown=SHOWN)]
    left = dict.fromkeys(KINDS, EACH)
    for number, (kind, opening) in enumerate(openings_of("report")):
        acts = outputs.get(("rewind", number), {"acts": []})["acts"]
        if not acts or not left[kind] or any((arm, number) not in outputs for arm in ARMS):
            continue
        left[kind] -= 1
        place = acts[0]["generated"] - acts[0]["taken_back"]
        page.append(f"## {kind.capitalize()}: {opening.splitlines()[0].strip('|#').strip()}\n")
        for arm, name in ARMS.items():
            page.append(f"**{name[0].upper()}{name[1:]}**\n\n{excerpt(outputs[arm, number], place, tokenizer)}")
    write_atomic(out, "\n".join(page))


if __name__ == "__main__":
    run(main)
