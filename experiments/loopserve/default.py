"""What LoopServe's defaults should be: alpha by dense rows by length, and what the printed choice loses.

    python -m experiments.loopserve.default [--out figures]

The recall model answers the third turn of dialogues (prompts of 1,800 tokens), single turns of 900 and of 3,600 tokens;
all answers are one fact, for which the prompt's last token searches. On the text model, the next tokens of ordinary
text are compared with those of full attention (KL in nats). Only prompts are sparse; cells are the share of the causal
cells that attention covers, and `held` is what the lines hold for queries that were not sampled.

What each part of the default keeps is measured by leaving it out: on the third turns, on questions over two hops, whose
answer hangs on a row in the middle of the prompt (recall-2hop), and on facts in ordinary text (the model in the
package), at five depths each, as `sinkscope bench --task needle` asks them.

Beside the grid: the choice as printed; exact weights on the printed sample; and, for single turns, a sample of all
queries, which misses no row and shows what an alpha over the sum of all rows loses. Those that draw a sample are run
with several seeds; `low` and `high` are the smallest and the largest share over draws. About 15 minutes of a free core.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from experiments.drawn import save
from experiments.record import Row, record, value_of_each
from experiments.script import run
from sinkscope.bench.tasks.needle import needle_prompt, wording_of
from sinkscope.bench.tasks.recall import POSITIONS, recall_dialogue
from sinkscope.bench.tasks.text import TextFidelity
from sinkscope.display.style import BLUE, GREEN, RED, figure_of
from sinkscope.interventions.decode import greedy
from sinkscope.kv.loopserve import LoopServe
from sinkscope.models.names import BUNDLED
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load

ALPHAS, ROWS, SEEDS, FIRST = (0.75, 0.9, 0.955), (0, 16, 64), (0, 1, 2), 300
THIRD, SINGLE, LONGER = "third turn, 1,800 tokens", "one turn, 900 tokens", "one turn, 3,600 tokens"
SIZES = {THIRD: (6, 3, 600), SINGLE: (8, 1, 900), LONGER: (2, 1, 3600)}
"""Number of dialogues, their turns, and the tokens of each turn; a question at each of three positions."""
LENGTHS, TEXTS, ANSWER = (512, 1536), 3, 64
HALF: Row = {"decode": False, "shortest": 0}
HOPS, FACTS = "two hops, 1,200 tokens", "facts in text, 1,024 tokens"
NEEDLES = {HOPS: ("recall-2hop", "tracking", 1200, 3), FACTS: (None, "needle", 1024, 4)}
"""Model, task, tokens, and prompts at each depth."""
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
WITHOUT: dict[str, Row] = {
    "nothing": {},
    "first tokens and local band": {"begin": 1, "local": 1},
    "dense lines": {"sharp": None},
    "checked queries": {"checked": 0},
    "all three": {"begin": 1, "local": 1, "sharp": None, "checked": 0},
}
"""Parts that are left out of the default."""
ALL = "exact weights, all rows"
CHOICES: dict[str, tuple[LoopServe, ...]] = {
    "default": tuple(LoopServe(**HALF, seed=seed) for seed in SEEDS),
    "as printed": tuple(LoopServe.paper(**HALF, seed=seed) for seed in SEEDS[:1]),
    "exact weights, rows drawn": tuple(LoopServe.paper(**HALF, variant="exact", seed=seed) for seed in SEEDS[:2]),
    ALL: (LoopServe.paper(**HALF, variant="exact", sample=1 << 20),),
}
OWN = LoopServe()
COLOURS = dict(zip(ROWS, (RED, BLUE, GREEN), strict=True))


def grid(rows: Sequence[int] = ROWS) -> dict[tuple[float, int], LoopServe]:
    """The prompt's half by alpha and dense rows, all on one draw."""
    return {(alpha, many): LoopServe(**HALF, alpha=alpha, dense_rows=many) for alpha in ALPHAS for many in rows}


def asked(where: str) -> list[tuple[str, str]]:
    """Prompts, with right answers to earlier questions in them, and the right answer to the last question."""
    count, turns, tokens = SIZES[where]
    found: list[tuple[str, str]] = []
    for seed in range(FIRST, FIRST + count):
        for place in POSITIONS:
            *before, last = recall_dialogue(seed, turns=turns, tokens=tokens, hops=1, position=place).turns
            parts = []
            for turn in before:
                parts.append(f"{turn.text} {turn.answers[0]} ")
            history = "".join(parts)
            found.append((history + last.text, last.answers[0]))
    return found


def answered(target: Target, serve: LoopServe, questions: Sequence[tuple[str, str]]) -> Row:
    """How many questions are answered right, on how many of the cells."""
    right = 0
    data = list[Any]()
    for prompt, answer in questions:
        ids = target.tokenizer(prompt, return_tensors="pt").input_ids
        with serve.on(target) as run:
            said = greedy(target, ids, len(answer.split()))[0]
        right += target.tokenizer.decode(said).split()[:2] == answer.split()[:2]
        for event in run.events:
            data.append(event.data)
    return {"right": right, "questions": len(questions), "score": right / len(questions), **costs(data)}


def needles(where: str) -> tuple[Target, list[tuple[str, str]]]:
    """The model and the prompts of a kind of `sinkscope bench --task needle`, with the string that is asked for."""
    name, task, tokens, count = NEEDLES[where]
    target = target_of(load(name, backend="hf"))
    wording = wording_of(name or BUNDLED)
    made = [
        needle_prompt(target.tokenizer, wording, task, tokens, depth, FIRST, number)
        for depth in DEPTHS
        for number in range(count)
    ]
    return target, [(prompt.turns[0].text, prompt.turns[0].answers[0]) for prompt in made]


def sought(target: Target, serve: LoopServe | None, questions: Sequence[tuple[str, str]]) -> Row:
    """How many answers hold the string that was asked for, on how many of the cells."""
    right = 0
    data = list[Any]()
    for prompt, answer in questions:
        ids = target.tokenizer(prompt, return_tensors="pt").input_ids
        with nullcontext() if serve is None else serve.on(target) as run:
            said = greedy(
                target, ids, len(target.tokenizer(f" was in the {answer}", add_special_tokens=False).input_ids)
            )[0]
        right += answer in target.tokenizer.decode(said)
        data += [] if run is None else [event.data for event in run.events]
    counted = {"right": right, "questions": len(questions), "score": right / len(questions)}
    return counted | (costs(data) if data else {"cells": 1.0, "held": 1.0})


def costs(data: Sequence[Any]) -> dict[str, float]:
    """Mean over prompts, layers and heads: cells, and what the lines hold outside of the sample."""
    values = value_of_each(data, "attended")
    return {"cells": fmean(values), "held": fmean(fmean(d["recovered"]) for d in data)}


@torch.no_grad()
def followed(model: Any, ids: torch.Tensor, serve: LoopServe | None) -> tuple[torch.Tensor, list[Any]]:
    """Log-probabilities of the tokens after a prompt that is read along lines; what follows attends to everything."""
    prompt = ids[:, :-ANSWER]
    rest = ids[:, -ANSWER:]
    if serve is None:
        out = model(prompt, use_cache=True)
        data = []
    else:
        with serve.on(model) as run:
            out = model(prompt, use_cache=True)
        data = []
        for event in run.events:
            data.append(event.data)
    later = model(rest[:, :-1], past_key_values=out.past_key_values).logits
    return torch.cat([out.logits[:, -1:], later], 1).log_softmax(-1), data


def measured() -> dict[str, list[Row]]:
    """All numbers."""
    target = target_of(load("recall", backend="hf"))
    points = list[Row]()
    choices = list[Row]()
    text = list[Row]()
    parts = list[Row]()
    asked_of = {THIRD: (target, asked(THIRD)), **{where: needles(where) for where in NEEDLES}}
    for where, (who, questions) in asked_of.items():
        for name, options in WITHOUT.items():
            row = (answered if where == THIRD else sought)(who, LoopServe(**HALF, **options), questions)
            parts.append({"where": where, "without": name, **row})
            print(parts[-1], flush=True)
        if where != THIRD:
            parts.append({"where": where, "without": "any sparsity", **sought(who, None, questions)})
            print(parts[-1], flush=True)
    for where in SIZES:
        questions = asked(where)
        for (alpha, rows), serve in grid(ROWS if where != LONGER else (16,)).items():
            row = answered(target, serve, questions)
            points.append({"where": where, "alpha": alpha, "dense_rows": rows, **row})
            print(points[-1], flush=True)
        for name, draws in CHOICES.items() if where != LONGER else ():
            if where == THIRD and name == ALL:  # 1,800 rows take minutes a prompt
                continue
            rows = []
            for one in draws:
                rows.append(answered(target, one, questions))
            scores = value_of_each(rows, "score")
            means = {}
            for key in ("score", "cells", "held"):
                values = []
                for one in rows:
                    values.append(one[key])
                means[key] = fmean(values)
            made = {"where": where, "choice": name, "draws": rows, "low": min(scores), "high": max(scores), **means}
            choices.append(made)
            print(made, flush=True)
    model = load(None, backend="hf")
    tok: Any = model.tokenizer
    for length in LENGTHS:
        texts = TextFidelity(count=TEXTS, prompt=length, answer=ANSWER).prompts(target_of(model))
        rows = []
        for t in texts:
            rows.append(tok(t.turns[0].text).input_ids)
        more = []
        for t in texts:
            more.append(tok(t.turns[0].answers[0], add_special_tokens=False).input_ids[:ANSWER])
        ids = []
        for a, b in zip(rows, more, strict=True):
            ids.append(torch.tensor([[*a, *b]]))
        full = []
        for each in ids:
            full.append(followed(model, each, None)[0])
        for (alpha, many), serve in grid().items():
            made = []
            for each in ids:
                made.append(followed(model, each, serve))
            kl = [float((f.exp() * (f - own)).sum(-1).mean()) for f, (own, _) in zip(full, made, strict=True)]
            own = {"kl": fmean(kl), "kl_by_text": kl, **costs([d for _, data in made for d in data])}
            text.append({"where": f"text, {length:,} tokens", "alpha": alpha, "dense_rows": many, **own})
            print(text[-1], flush=True)
    return {"grid": points, "choices": choices, "parts": parts, "text": text}


def concluded(found: Row) -> str:
    """What the numbers say of the default, of the default without its dense rows, and of the printed choice."""
    third = {}
    for point in found["choices"]:
        if point["where"] == THIRD:
            third[point["choice"]] = point
    grid = {}
    for p in found["grid"] + found["text"]:
        grid[(p["where"], p["alpha"], p["dense_rows"])] = p
    said = {}
    for name, point in third.items():
        said[name] = f"{fewest(point)} of {point['draws'][0]['questions']}"
    own = third["default"]
    none = grid[THIRD, OWN.alpha, 0]
    most = max(p["kl"] for (_, *at), p in grid.items() if at == [OWN.alpha, OWN.dense_rows] and "kl" in p)
    return (
        f"{THIRD.capitalize()}: the default (alpha {OWN.alpha}, last {OWN.dense_rows} rows dense) answers "
        f"{said['default']} on {own['cells']:.0%} of the cells, without dense rows {none['right']} of "
        f"{none['questions']}; the printed choice answers {said['as printed']} on {third['as printed']['cells']:.0%}. "
        f"On text the default's KL is at most {most:.1g} nats"
    )


def fewest(point: Row) -> int:
    """Right answers of the worst draw."""
    values = value_of_each(point["draws"], "right")
    return min(values)


def figure(data: Row) -> Any:
    """Right answers, and the divergence on text, over the cells: a curve per number of dense rows."""
    found = data["result"]
    from plotly.subplots import make_subplots

    titles = [*SIZES, *(f"text, {length:,} tokens" for length in LENGTHS)]
    fig: Any = make_subplots(rows=2, cols=3, subplot_titles=titles, horizontal_spacing=0.06, vertical_spacing=0.16)
    for number, title in enumerate(titles):
        at = {"row": number // 3 + 1, "col": number % 3 + 1}
        key = "kl"
        if title in SIZES:
            key = "score"
        for rows, colour in COLOURS.items():
            mine = []
            for p in found["grid"] + found["text"]:
                if (p["where"], p["dense_rows"]) == (title, rows):
                    mine.append(p)
            mode = "lines+markers"
            if rows == OWN.dense_rows:
                mode = "lines+markers+text"
            x = value_of_each(mine, "cells")
            y = []
            for each in mine:
                y.append(each[key])
            fig.add_scatter(
                x=x,
                y=y,
                text=[f"{point['alpha']}" for point in mine],
                mode=mode,
                textposition=["bottom center", "top center", "bottom center"],
                name=f"last {rows} rows dense{', with alpha' * (rows == OWN.dense_rows)}" if rows else "no row dense",
                legendgroup=str(rows),
                showlegend=not number,
                line_color=colour,
                **at,
            )
        for name, symbol in zip(CHOICES, ("star", "x", "cross", "diamond"), strict=True):
            mine = []
            for point in found["choices"]:
                if (point["where"], point["choice"]) == (title, name):
                    mine.append(point)
            x = value_of_each(mine, "cells")
            y = value_of_each(mine, "score")
            array = []
            for each in mine:
                array.append(each["high"] - each["score"])
            arrayminus = []
            for each in mine:
                arrayminus.append(each["score"] - each["low"])
            fig.add_scatter(
                x=x,
                y=y,
                error_y={
                    "array": array,
                    "arrayminus": arrayminus,
                },
                mode="markers",
                marker={"symbol": symbol, "size": 12, "color": "#000000"},
                name=f"{name}; bar: draws",
                legendgroup=name,
                showlegend=title == next(point["where"] for point in found["choices"] if point["choice"] == name),
                **at,
            )
    fig.update_xaxes(tickformat=".0%", range=[0, 1.03], title="cells")
    fig.update_yaxes(tickformat=".0%", range=[-0.06, 1.08], row=1)
    fig.update_yaxes(type="log", exponentformat="power", dtick=1, row=2)
    fig.update_yaxes(title="right answers", row=1, col=1)
    fig.update_yaxes(title="KL to full attention, nats", row=2, col=1)
    legend = {"orientation": "v", "x": 0.72, "y": 0.36, "xanchor": "left"}
    return figure_of(
        fig,
        None,
        concluded(found).partition(";")[0],
        width=1500,
        height=900,
        legend=legend,
        bottom=60,
    )


def main(*, out: Path = Path("figures")) -> None:
    started = time.perf_counter()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="outside of the sample")  # what is held is in the table
    found = measured()
    settings = {
        "model": "recall",
        "text_model": "bundled",
        "needles": NEEDLES,
        "sizes": SIZES,
        "first_seed": FIRST,
        "seeds": SEEDS,
    }
    save("loopserve_default", record("loopserve-default", found, settings, started=started), figure, out)


if __name__ == "__main__":
    run(main)
