"""A sink appearing in training: a tiny Llama on Bigram-Backcopy, with BOS and without (Guo et al., arXiv 2410.13835).

    python -m experiments.emergence [--steps 600] [--seeds 3] [--out figures]

A sequence follows the character bigrams of the neutral text; after a trigger character it repeats the one before the
trigger instead. Heads that look for triggers have nothing to do elsewhere. Every 25 steps, on held-out sequences: loss
above the task's own entropy, attention to the first token where heads that look for triggers have nothing to do, sink
rate (Gu et al.), norm of the first token's values and residual against others'.

Writes emergence.json, .html and .png. What is trained so far lies in `emergence.part` in the same folder: a killed run
goes on from there with the same command and ends with the same numbers.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.drawn import save
from experiments.record import record
from experiments.script import run
from sinkscope.errors import SinkscopeError
from sinkscope.files.console import ProgressBar
from sinkscope.measure.style import BLUE, ORANGE, finished
from sinkscope.models.text import typical_text
from sinkscope.opening.live import target_of
from sinkscope.sinks.first_token.attention_received import attention_received
from sinkscope.tap.observers import attention_rows
from sinkscope.trace import trace

BOS, CHARACTERS, TRIGGERS = 0, 31, 3  # token 0 is BOS, the others are the most frequent characters; the first trigger
LENGTH, BATCH, EVERY, HELD_OUT, EPS = 64, 32, 25, 64, 0.3
# One head per layer and a narrow MLP: with four heads and 256 neurons no sink was seen within 600 steps.
SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 1}
RATE = 5e-3


def transitions(text: str) -> Tensor:
    """Bigram probabilities of the most frequent characters, `[token token]`; BOS is never a successor."""
    text = text.lower()
    common = sorted(set(text), key=lambda c: (-text.count(c), c))[:CHARACTERS]
    number = {c: i + 1 for i, c in enumerate(common)}
    ids = torch.tensor([number[c] for c in text if c in number])
    counts = torch.zeros(CHARACTERS + 1, CHARACTERS + 1).index_put_((ids[:-1], ids[1:]), torch.ones(()), True)
    counts[:, 1:] += 0.1
    counts[BOS, 1 : TRIGGERS + 1] = 0.0  # no trigger first: there would be nothing, or BOS, to repeat
    counts[BOS, TRIGGERS + 1 :] = ids.bincount(minlength=CHARACTERS + 1)[TRIGGERS + 1 :].float()
    return counts / counts.sum(-1, keepdim=True)


def sequences(table: Tensor, count: int, bos: bool, generator: torch.Generator) -> Tensor:
    """Sequences of `LENGTH` tokens, `[count LENGTH]`."""
    ids = torch.full((count, LENGTH + 1), BOS)
    for at in range(1, LENGTH + 1):
        before = ids[:, at - 1]
        drawn = torch.multinomial(table[before], 1, generator=generator)[:, 0]
        ids[:, at] = torch.where(is_trigger(before), ids[:, at - 2], drawn) if at > 1 else drawn
    return ids[:, :LENGTH] if bos else ids[:, 1:]


def is_trigger(ids: Tensor) -> Tensor:
    """The most frequent characters."""
    return (ids >= 1) & (ids <= TRIGGERS)


def entropy(table: Tensor, ids: Tensor) -> float:
    """Mean loss of a model that knows the task, over all positions with a successor."""
    drawn = ~is_trigger(ids[:, :-1])
    log = torch.where(table > 0, table, 1.0).log()
    return float((-(table * log).sum(-1)[ids[:, :-1]] * drawn).mean())


@torch.no_grad()
def measure(model: Any, ids: Tensor, floor: float) -> dict[str, float]:
    """One point of the curves."""
    sites = ["blocks.*.attn.hook_v", "blocks.*.hook_resid_post"]
    norms = trace(model, ids, sites, "norm")
    ratios = {name: float(n[:, 0].mean() / n[:, 1:].mean()) for name, n in norms.items()}
    idle, attention = ~is_trigger(ids), []
    idle[:, 0] = False

    def look(_layer: int, _first: int, rows: Tensor) -> None:
        attention.append((rows[..., 0] * idle[:, None]).sum((0, 2)) / idle.sum())

    with attention_rows(target_of(model), look):
        target_of(model).forward(ids)
    return {
        "idle_attention": float(torch.stack(attention).max()),  # of the head that attends to it most
        "excess_loss": float(model(ids, labels=ids).loss) - floor,
        "sink_rate": attention_received(target_of(model), ids, batch=HELD_OUT).rate,
        "value_ratio": min(v for k, v in ratios.items() if k.endswith("hook_v")),  # of the most drained layer
        "residual_ratio": max(v for k, v in ratios.items() if k.endswith("resid_post")),  # of the highest peak
    }


def train(bos: bool, seed: int, steps: int, part: Path, progress: Any) -> list[dict[str, float]]:
    """One run, from its checkpoint if there is one; a row per measurement."""
    table, name = transitions(typical_text()), f"{'bos' if bos else 'no-bos'} seed {seed}"
    held = sequences(table, HELD_OUT, bos, torch.Generator().manual_seed(10_000))
    floor = entropy(table, held)
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=CHARACTERS + 1, max_position_embeddings=LENGTH, bos_token_id=BOS, **SIZES)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    generator, rows = torch.Generator().manual_seed(seed), []
    file = part / f"{name.replace(' ', '-')}.pt"
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        generator.set_state(saved["generator"])
        rows = saved["rows"]
    for step in range(rows[-1]["step"] if rows else 0, steps + 1):
        if step % EVERY == 0 and not (rows and rows[-1]["step"] == step):
            rows.append({"step": step, **measure(model.eval(), held, floor)})
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rows": rows}
            torch.save({**saved, "generator": generator.get_state()}, file.with_suffix(".new"))
            os.replace(file.with_suffix(".new"), file)  # whole or not at all
            progress(name, step, steps)
        if step == steps:
            break
        ids = sequences(table, BATCH, bos, generator)
        loss = model.train()(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [row for row in rows if row["step"] <= steps]


def figure(data: dict[str, Any]) -> Any:
    """Five curves over steps: thin lines are seeds, thick ones their mean."""
    runs = data["result"]["runs"]
    from plotly.subplots import make_subplots

    panels = {
        "idle_attention": "attention to the first token<br>off triggers, largest of all heads",
        "sink_rate": "sink rate",
        "value_ratio": "first token's values<br>over others'",
        "residual_ratio": "first token's residual<br>over others'",
        "excess_loss": "loss above<br>the task's entropy",
    }
    fig = make_subplots(cols=5, subplot_titles=list(panels.values()), horizontal_spacing=0.05)
    for col, field in enumerate(panels, start=1):
        for bos, color in ((True, BLUE), (False, ORANGE)):
            curves = [run["rows"] for run in runs if run["bos"] is bos]
            x, name = [row["step"] for row in curves[0]], "with BOS" if bos else "without BOS"
            ys = [[row[field] for row in curve] for curve in curves]
            for y in ys:
                fig.add_scatter(
                    x=x, y=y, line={"color": color, "width": 1}, opacity=0.35, showlegend=False, col=col, row=1
                )
            mean = [sum(y) / len(y) for y in zip(*ys, strict=True)]
            fig.add_scatter(
                x=x, y=mean, name=name, line={"color": color, "width": 3}, showlegend=col == 1, col=col, row=1
            )
        fig.update_xaxes(title_text="training step", rangemode="tozero", col=col, row=1)
        fig.update_yaxes(rangemode="tozero", col=col, row=1)
    fig.update_yaxes(tickformat=".0%", col=2, row=1)
    fig.update_yaxes(type="log", rangemode="normal", dtick=1, exponentformat="power", col=5, row=1)
    ends = {bos: [run["rows"][-1]["sink_rate"] for run in runs if run["bos"] is bos] for bos in (True, False)}
    steps = data["settings"]["steps"]
    found = (
        f"After {steps} steps {fmean(ends[True]):.0%} of the heads attend to the first token with BOS, "
        f"{fmean(ends[False]):.0%} without (Bigram-Backcopy, {data['settings']['num_hidden_layers']} layers of width "
        f"{data['settings']['hidden_size']})"
    )
    return finished(fig, None, found, width=1700, height=470, top=120)


def main(*, steps: int = 600, seeds: int = 3, out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        out: Folder for the figure and what is not done.
    """
    if steps < 1 or seeds < 1:
        raise SinkscopeError("--steps and --seeds: give 1 or more")
    started, part = time.perf_counter(), out / "emergence.part"
    part.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    with ProgressBar() as progress:
        for seed in range(seeds):
            for bos in (True, False):
                runs.append({"bos": bos, "seed": seed, "rows": train(bos, seed, steps, part, progress)})
    settings = {
        "steps": steps,
        "seeds": seeds,
        "batch": BATCH,
        "length": LENGTH,
        "learning_rate": RATE,
        "vocabulary": CHARACTERS + 1,
        "triggers": TRIGGERS,
        "held_out": HELD_OUT,
        "eps": EPS,
        **SIZES,
    }
    save("emergence", record("emergence", {"runs": runs}, settings, started=started), figure, out)
    shutil.rmtree(part)
    for one in runs:
        print(json.dumps({"bos": one["bos"], "seed": one["seed"], **one["rows"][-1]}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(main)
