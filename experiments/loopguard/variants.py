"""What LoopGuard does when a loop comes back: the options of `escalate`, rewinding, the paper's guard, and controls.

    python -m experiments.loopguard.variants [--model M] [--prompts 24] [--openings FILE] [--only NAME ...] [--out DIR]

A model continues prompts greedily. By default, the model in the package continues those of LoopBench's small set, up to
2,500 tokens with a budget of 256. You can give any other model that loops, such as a story model, with `--openings` (a
file with a prompt in each line), `--max-new-tokens 490` and `--no-end`, if the end of a story is not the end of the
text. For each variant the table has:

- `loop`: share of runs that are a loop by Eq. 7 of the paper, length included; `tail_loop`: by that rule on the last
  256 tokens; `copies`: share of runs that end in at least 3 copies and 32 tokens of one cycle of up to 64 tokens.
- `ended`: share of runs that reached the end of sequence; mean length; interventions.
- `perplexity`: that of the text after the first intervention (without one, of the same steps), read once more by the
  same model with a clean cache that holds the last 64 tokens before it. It is low for a loop and high for a broken
  text. `temperature` shows the result of sampling at 0.7.
- `new_sentences`: share of the sentences or lines of a text that differ from all earlier ones.

`sample` draws 64 tokens, `ban` bans n-grams of the loop, and `LoopGuard`, the default, does both.
`rewind` processes one prompt at a time, so it uses only the first `--alone` prompts.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import NoRepeatNGramLogitsProcessor

from experiments.drawn import save
from experiments.record import record
from sinkscope.bench.prompt import read_prompts
from sinkscope.bench.tasks.loops import DATA
from sinkscope.interventions import Event
from sinkscope.kv.loopguard import LoopGuard
from sinkscope.loops import compression_ratio, ends_in_loop, is_loop, tail_period, type_token_ratio
from sinkscope.measure.style import BLUE, GREEN, ORANGE, finished
from sinkscope.models.load import load
from sinkscope.serving.generate import generate, padded

GUARDS: dict[str, Any] = {
    "no guard": None,
    "paper": LoopGuard.paper,
    "cut alone": lambda **fields: LoopGuard(escalate="none", **fields),
    "repeats": lambda **fields: LoopGuard(escalate="repeats", **fields),
    "sample": lambda **fields: LoopGuard(escalate="sample", **fields),
    "ban": lambda **fields: LoopGuard(escalate="ban", **fields),
    "LoopGuard": LoopGuard,
    "rewind": lambda **fields: LoopGuard(rewind=True, **fields),
    "no-repeat-4-gram": None,
    "temperature": None,
}
BEFORE = 64  # tokens that a continuation is read after


@torch.no_grad()
def run(
    model: Any, rows: list[list[int]], new: int, name: str, fields: dict[str, Any]
) -> tuple[list[list[int]], list[Event]]:
    """New tokens of every row by one variant, up to the end of sequence, and the interventions."""
    ids, mask = padded(rows, 0, model.device)
    ends = set(fields["ends"])
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": name == "temperature", "pad_token_id": 0}
    options |= {"temperature": 0.7, "top_k": 0} if name == "temperature" else {}
    options |= {"logits_processor": [NoRepeatNGramLogitsProcessor(4)]} if name == "no-repeat-4-gram" else {}
    torch.manual_seed(0)
    make = GUARDS[name]
    session: Any
    with make(**fields).on(model) if make is not None else nullcontext() as session:
        out = model.generate(input_ids=ids, attention_mask=mask, eos_token_id=sorted(ends) or None, **options)
    made = [
        row[: next((i + 1 for i, token in enumerate(row) if token in ends), new)]
        for row in out[:, ids.shape[1] :].tolist()
    ]
    return made, [] if session is None else session.events


def perplexity(model: Any, rows: Sequence[Sequence[int]], firsts: Sequence[int]) -> float | None:
    """Of the tokens from `firsts` on, each row read once after its last `BEFORE` tokens before them."""
    losses: list[float] = []
    for row, first in zip(rows, firsts, strict=True):
        part = row[max(0, first - BEFORE) : first + 256]
        skip = min(first, BEFORE)
        if len(part) - skip < 16:
            continue
        ids = torch.tensor([part])
        with torch.no_grad():
            logp = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        losses.append(-float(logp.gather(1, ids[0, 1:, None])[max(skip, 1) - 1 :].mean()))
    return math.exp(fmean(losses)) if losses else None


def new_sentences(text: str) -> float:
    """Share of sentences and lines that differ from all before."""
    parts = [part.strip() for part in re.split(r"[.!?\n]+", text) if part.strip()]
    return len(set(parts)) / len(parts) if parts else 1.0


def row_of(
    name: str, model: Any, made: Sequence[Sequence[int]], events: Sequence[Event], new: int, ends: set[int]
) -> dict[str, Any]:
    """Means over the outputs of a variant."""
    firsts = [
        min([e.data["generated"] - e.data["taken_back"] for e in events if e.row == i], default=min(128, len(one) // 2))
        for i, one in enumerate(made)
    ]
    return {
        "name": name,
        "runs": len(made),
        "loop": fmean(is_loop(one, new) for one in made),
        "tail_loop": fmean(map(ends_in_loop, made)),
        "copies": fmean(tail_period(one, repeats=3, shortest=32, longest=64) is not None for one in made),
        "ended": fmean(bool(ends & set(one)) for one in made),
        "length": fmean(map(len, made)),
        "ttr": fmean(map(type_token_ratio, made)),
        "cr": fmean(map(compression_ratio, made)),
        "interventions": len(events) / len(made),
        "escalated": sum(e.data["escalated"] is not None for e in events) / len(made),
        "perplexity": perplexity(model, made, firsts),
        "new_sentences": fmean(new_sentences(model.tokenizer.decode(one)) for one in made),
    }


def figure(data: dict[str, Any]) -> Any:
    """Diversity, compressibility and loop rates, a group of bars per variant."""
    rows = data["result"]["rows"]
    from plotly.subplots import make_subplots

    fig: Any = make_subplots(
        rows=1, cols=2, horizontal_spacing=0.08, subplot_titles=["type-token and compression ratio", "runs in a loop"]
    )
    names = [row["name"] for row in rows]
    for key, label, colour, col in (
        ("ttr", "type-token ratio", BLUE, 1),
        ("cr", "compression ratio", GREEN, 1),
        ("loop", "whole output", BLUE, 2),
        ("tail_loop", "last 256 tokens", ORANGE, 2),
    ):
        fig.add_bar(x=names, y=[row[key] for row in rows], name=label, marker_color=colour, row=1, col=col)
    fig.update_yaxes(range=[0, 1.03], tickformat=".0%", row=1, col=2)
    least = min(rows, key=lambda row: row["tail_loop"])
    found = (
        f"At the end {least['tail_loop']:.0%} of the runs loop with {least['name']}, and "
        f"{rows[0]['tail_loop']:.0%} with {rows[0]['name']}"
    )
    return finished(fig, None, found, width=1400, height=560, barmode="group", bottom=130)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.loopguard.variants", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", help="a name, hub id or folder; by default the model in the package")
    parser.add_argument("--name", default="", help="ending of the names of the files")
    parser.add_argument("--openings", type=Path, help="a file with a prompt in each line")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--alone", type=int, default=8)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=2500)
    parser.add_argument("--no-end", action="store_true")
    parser.add_argument("--only", nargs="*", choices=list(GUARDS), default=list(GUARDS))
    parser.add_argument("--out", type=Path, default=Path("figures"))
    args = parser.parse_args(argv)
    started = time.perf_counter()
    model: Any = load(args.model, backend="hf")
    if args.openings is not None:
        prompts = [line for line in args.openings.read_text().splitlines() if line.strip()]
    else:
        rows = [*read_prompts(DATA / "small-dc.jsonl"), *read_prompts(DATA / "small-ri.jsonl")]
        prompts = [prompt.turns[0].text for prompt in rows]
    prompts = prompts[:: max(1, len(prompts) // args.prompts)][: args.prompts]
    read = [model.tokenizer(prompt, verbose=False)["input_ids"] for prompt in prompts]
    eos = model.generation_config.eos_token_id
    ends = set() if args.no_end else {eos} if isinstance(eos, int) else set(eos)
    model.generation_config.eos_token_id = sorted(ends) or None
    fields, rows = {"budget": args.budget, "ends": tuple(sorted(ends))}, list[dict[str, Any]]()
    for name in args.only:
        if name == "rewind":
            guard, asked = GUARDS[name](**fields), prompts[: args.alone]
            written = [generate(model, one, guard=guard, max_new_tokens=args.max_new_tokens)[0] for one in asked]
            made, events = [one.tokens for one in written], [e for one in written for e in one.events]
        else:
            made, events = run(model, read, args.max_new_tokens, name, fields)
        rows.append(row_of(name, model, made, events, args.max_new_tokens, ends))
        rows[-1]["example"] = model.tokenizer.decode(made[0])[:600]
        print(rows[-1], flush=True)
    settings = {"prompts": len(prompts), "max_new_tokens": args.max_new_tokens, "budget": args.budget}
    text = record("loopguard-variants", {"rows": rows}, settings, started=started)
    save(f"loopguard_variants{args.name}", text, figure, args.out)


if __name__ == "__main__":
    main()
