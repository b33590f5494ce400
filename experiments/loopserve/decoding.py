"""What LoopServe and other methods cost a real model along answers of real texts, by settings and by turns.

    python -m experiments.loopserve.decoding settings MODEL ... --dialogue-files FILE ... [--page PAGE]
    python -m experiments.loopserve.decoding turns MODEL --dialogue-files question.jsonl reference_gpt4.jsonl

Each method reads a prompt and then the given answer token by token, and its distributions of the next token are
compared with those of the full cache (KL in nats).

- `settings` (Figs. 5 d, 10 b to d, 11): the answer is what follows a piece of a text of `experiments.loopserve.real`.
  Its first 16 tokens, at which LoopServe reads everything by default, are left out.
- `turns` (Fig. 12): dialogues of MT-bench, joined to nine turns, on one cache that grows. A token that a method evicts
  in one turn is missing in the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from experiments.drawn import draw, markdown, put_table
from experiments.gpu.steps import Steps
from experiments.loopserve.real import TEXTS, piece, talks, with_margin
from experiments.loopserve.runs import FIXED, LONGBENCH, specs
from experiments.record import Row
from experiments.script import run
from sinkscope.bench.methods import read_method
from sinkscope.generation.conversation import Conversation
from sinkscope.generation.decode import ForcedAnswer
from sinkscope.hooks.edit.base import Intervention
from sinkscope.measure.margin import margin_of
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load
from sinkscope.results.style import COLOURS, figure_of

ANSWER, LEFT_OUT, LONGEST = 112, 16, 96  # tokens of an answer, those at its beginning, those of a turn's answer
DIALOGUES, TURNS = 5, 9  # MT-bench's have two turns: five make nine
HALF = 256  # budget where another setting is changed
Asked = Sequence[tuple[list[int], list[int]]]
Curves = dict[str, tuple[str, tuple[int, ...]]]
BUDGETS = (128, 256, 512, 1024)
PANELS: dict[str, Curves] = {
    "budget (tokens)": {
        "LoopServe-D, first=0": ("loopserve-d:first=0:{}", BUDGETS),
        "LoopServe-D": ("loopserve-d:{}", (HALF,)),
        "SnapKV": (f"snapkv:{LONGBENCH}:{{}}", BUDGETS),
        "random part": ("random:window=32:{}", (HALF,)),
    },
    "interval (tokens)": {"LoopServe-D, first=0": (f"loopserve-d:first=0:{HALF}:interval={{}}", (8, 16, 32, 64))},
    "observation window (tokens)": {"SnapKV": (f"snapkv:{HALF}:kernel=7:pooling=max:window={{}}", (12, 32, 96))},
}
BY_TURN = {
    "LoopServe": f"loopserve:{FIXED}",
    "LoopServe-P": "loopserve-p",
    "LoopServe-D, first=0": f"loopserve-d:first=0:{FIXED}",
    "SnapKV": f"snapkv:{LONGBENCH}:{FIXED}",
    "AdaKV": f"adakv:{LONGBENCH}:{FIXED}",
    "MInference": "minference",
    "random part": f"random:window=32:{FIXED}",
}


def spec(text: str, value: int | str = "") -> str:
    """A method as its results are kept."""
    return specs([text.format(value)])[0]


def methods_of(name: str) -> list[str]:
    """All methods of a run, each once."""
    found: list[str] = []
    if name == "turns":
        found = [spec(text) for text in BY_TURN.values()]
    else:
        for curves in PANELS.values():
            for text, values in curves.values():
                found += [spec(text, value) for value in values]
    return list(dict.fromkeys(found))


def answered(target: Target, edit: Intervention | None, asked: Asked) -> Iterator[tuple[Tensor, float]]:
    """Logarithms of next-token probabilities along each turn's answer, and what a decoding step read."""
    talk = Conversation(target, edit, chat=False)
    for prompt, answer in asked:
        forced = ForcedAnswer([answer], len(talk.ids) + len(prompt))
        turn = talk.ask(
            prompt,
            max_new_tokens=len(answer),
            logits_processor=LogitsProcessorList([forced]),
            output_logits=True,
            return_dict_in_generate=True,
        )
        yield torch.cat(turn.output.logits).float().log_softmax(-1), turn.read or 0.0


def compared(target: Target, asked: Asked, methods: Sequence[str], since: int) -> Row:
    """By method: KL to the full cache, loss (nats a token), likeliest tokens kept and tokens read, turn by turn."""
    wanted = [found for found, _ in answered(target, None, asked)]
    rows: Row = {"tokens": [len(prompt) + len(answer) for prompt, answer in asked]}
    for method in methods:
        row: dict[str, list[float]] = {"kl": [], "nll": [], "dense_nll": [], "same": [], "read": []}
        said = answered(target, read_method(method).make(), asked)
        for (_, answer), full, (found, read) in zip(asked, wanted, said, strict=True):
            p, q, following = full[since:], found[since:], torch.tensor(answer[since:])[:, None]
            row["kl"].append(float((p.exp() * (p - q)).sum(1).mean()))
            row["nll"].append(float(-q.gather(1, following).mean()))
            row["dense_nll"].append(float(-p.gather(1, following).mean()))
            row["same"].append(float((p.argmax(1) == q.argmax(1)).float().mean()))
            row["read"].append(read)
        rows[method] = row
    return rows


def continued(target: Target, text: str, length: int, number: int) -> Asked:
    """A piece of a text, and what follows."""
    ids = piece(target, text, length + ANSWER, number)[0].tolist()
    return [(ids[:length], ids[length:])]


def dialogue(target: Target, files: Sequence[Path], number: int) -> Asked:
    """Dialogues of MT-bench one after another, as prompts and beginnings of answers."""
    asked: list[tuple[list[int], list[int]]] = []
    whole = [talk for talk in talks(files) if talk[0][1] is not None]
    for talk in whole[number * DIALOGUES : (number + 1) * DIALOGUES]:
        for question, answer in talk:
            prompt = f"\n\nUser: {question}\n\nAssistant:"
            ids = [target.tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, f" {answer}")]
            asked.append((ids[0], ids[1][:LONGEST]))
    return asked[:TURNS]


def values_of(rows: Row, place: str, method: str, key: str, turn: int = 0) -> list[float]:
    """A number of the texts whose step begins so."""
    return [row[method][key][turn] for name, row in rows.items() if name.startswith(place)]


def figure(data: Row) -> Any:
    """KL by turn."""
    fig: Any = go.Figure()
    for (label, text), colour in zip(BY_TURN.items(), COLOURS, strict=False):
        points = [values_of(data["result"], "", spec(text), "kl", turn) for turn in range(TURNS)]
        y, margins = list(map(fmean, points)), [margin_of(np.array(values)) for values in points]
        below = [min(value, margin or 0) for value, margin in zip(y, margins, strict=True)]  # it is never below 0
        error = {"array": margins, "arrayminus": below, "symmetric": False, "thickness": 1}
        fig.add_scatter(x=list(range(1, TURNS + 1)), y=y, error_y=error, line={"color": colour}, name=label)
    fig.update_xaxes(type="category", title_text="turn")
    fig.update_yaxes(rangemode="tozero", title_text="KL to the full cache, nats a token")
    title = f"What methods cost {models_of(data['result'])[0]} by turn, mean over {len(data['result'])} dialogues"
    return figure_of(fig, None, title, width=1000, height=600, legend=-0.2)


def models_of(rows: Row) -> list[str]:
    """The models that were measured."""
    return list(dict.fromkeys(name.partition(", ")[0] for name in rows))


def table(rows: Row) -> str:
    """KL of each method by kind of text, and over all texts with two standard errors."""
    lines: list[list[str]] = []
    for model, method in product(models_of(rows), methods_of("settings")):
        cells = [model, f"`{method}`", f"{fmean(values_of(rows, model, method, 'read')):,.0f}"]
        cells += [f"{fmean(values_of(rows, f'{model}, {kind},', method, 'kl')):.3f}" for kind in TEXTS]
        cells += [
            with_margin(values_of(rows, model, method, key), shown) for key, shown in (("kl", ".3f"), ("same", ".1%"))
        ]
        lines.append([cell.replace("experiments.loopserve.runs:RandomKeep", "random") for cell in cells])
    return markdown(("model", "method", "read", *TEXTS, "all", "top-1 same"), lines)


def main(
    name: Literal["settings", "turns"],
    models: Sequence[str],
    *,
    dialogue_files: Sequence[Path],
    pieces: Sequence[int] = (1, 2, 3),
    length: int = 2048,
    seconds: float = 7200.0,
    page: Path | None = None,
    out: Path = Path("figures"),
) -> None:
    """Make what the module describes.

    Args:
        models: Names, folders or files.
        dialogue_files: JSON lines of dialogues.
        pieces: Which pieces of each text, or which dialogues.
        length: Tokens of a prompt.
        seconds: No step begins after so many.
        page: Page whose table is replaced.
    """
    torch.set_num_threads(1)
    file = out / {"settings": "loopserve_decoding.json", "turns": "loopserve_dialogue.json"}[name]
    settings = {"name": name, "length": length, "answer": ANSWER}
    steps = Steps(f"loopserve-{name}", file, settings, "cpu", "float32", seconds)
    kinds = tuple(TEXTS) if name == "settings" else ("turns",)
    for model in models:
        target = target_of(load(model))
        for number, kind in product(pieces, kinds):
            if name == "turns":
                asked, since = dialogue(target, dialogue_files, number), 0
            else:
                asked, since = continued(target, TEXTS[kind](dialogue_files), length, number), LEFT_OUT
            steps.do(f"{Path(model).stem}, {kind}, {number}", partial(compared, target, asked, methods_of(name), since))
    if page is not None:
        put_table(page, "loopserve.decoding", table(steps.rows))
    if name == "turns":
        draw(file, figure)
    steps.end()


if __name__ == "__main__":
    run(main)
