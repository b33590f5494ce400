"""When the sink comes while the bundled model trains, and what comes without the planted circuit.

    python -m experiments.sink_emerges [--steps 150] [--every 15] [--out figures]

The recipe of `train_bundled` under `transformers.Trainer`, with `SinkCallback`. The run is shorter: fewer and smaller
steps, and of the text only Python, random cycles and facts. The planted circuit makes the spike before the first step;
which heads attend to it, training decides. The control is the same network on the same data with nothing planted.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import plotly.express as px
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

import sinkscope as ss
from experiments.bundled import corpus
from experiments.bundled.training import Settings, loss_on
from experiments.bundled.training import Trainer as Recipe
from experiments.drawn import save
from experiments.record import Row, record
from experiments.script import run

QUANTITIES = ("sink_rate", "spike_ratio", "repeat_attention", "repeat_loss")
CONTROLS = {"repeat_attention": "text_attention", "repeat_loss": "text_loss"}  # of the same run


class Steps(IterableDataset[Row]):
    """What each step of the recipe reads."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def __iter__(self) -> Iterator[Row]:
        settings, mixture = self.recipe.settings, self.recipe.mixture
        for step in range(settings.steps):
            if step < settings.copy_steps:
                ids, scored = mixture.copies(settings.seed, step, tokens=settings.tokens_per_step)
            else:
                rows = settings.tokens_per_step // settings.length
                ids, scored = mixture.text(settings.seed, step, rows=rows, length=settings.length)
            yield {"ids": torch.from_numpy(ids), "scored": torch.from_numpy(scored)}


class RecipeTrainer(Trainer):
    """The loss of the recipe, and its circuit, which training may not change."""

    def __init__(self, recipe: Recipe, arguments: TrainingArguments, **options: Any) -> None:
        self.recipe = recipe
        settings = recipe.settings
        rate = LambdaLR(recipe.optimizer, lambda step: settings.rate(step) / settings.learning_rate)
        options["optimizers"] = (recipe.optimizer, rate)
        options["data_collator"] = lambda steps: steps[0]
        super().__init__(recipe.model, arguments, train_dataset=Steps(recipe), **options)
        frozen = recipe.frozen
        if frozen is not None:  # weight decay must not move it either
            recipe.optimizer.register_step_post_hook(lambda *_: frozen.impose())

    def compute_loss(self, model: Any, inputs: Row, *_: Any, **__: Any) -> Any:
        """The loss of `train_bundled`, in bfloat16."""
        with torch.autocast(inputs["ids"].device.type, torch.bfloat16):
            return loss_on(model, inputs["ids"], inputs["scored"])

    def training_step(self, *args: Any, **options: Any) -> Any:
        """The circuit gets no gradient."""
        loss = super().training_step(*args, **options)
        if self.recipe.frozen:
            self.recipe.frozen.mask_gradients()
        return loss


def train(tokens: np.ndarray, tokenizer: Any, settings: Settings, every: int) -> list[Row]:
    """Train a model, and what its Trainer logged."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe(settings, {"python": tokens}, Path(folder))
        recipe.model.set_attn_implementation("sdpa")
        arguments = TrainingArguments(
            folder,
            max_steps=settings.steps,
            per_device_train_batch_size=1,
            logging_steps=every,
            remove_unused_columns=False,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        )
        trainer = RecipeTrainer(recipe, arguments, processing_class=tokenizer)
        ss.SinkCallback(every=every).attach(trainer)
        trainer.train()
    return trainer.state.log_history


def comes(rows: list[Row], least: float) -> int | None:
    """The first step from which on the sink rate is at least this; None if it is less at the end."""
    step = None
    for row in reversed(rows):
        if row["sink_rate"] < least:
            break
        step = row["step"]
    return step


def figure(data: Row) -> Any:
    """Every quantity over the steps, a line for each run and for the control in it."""
    rows: list[Row] = []
    for name in ("planted", "unplanted"):
        for one in data["result"][name]:
            for quantity in QUANTITIES:
                rows.append({"step": one["step"], "run": name, "quantity": quantity, "value": one[quantity]})
                if quantity in CONTROLS:
                    control = {"run": f"{name}, other text there", "value": one[CONTROLS[quantity]]}
                    rows.append({"step": one["step"], "quantity": quantity, **control})
    axes: dict[str, Any] = {"x": "step", "y": "value", "color": "run", "facet_col": "quantity"}
    fig = px.line(rows, **axes, facet_col_wrap=2, markers=True, render_mode="svg", width=1100, height=700)
    fig.update_yaxes(matches=None, showticklabels=True)
    return fig.update_layout(title="The sink while the bundled model trains, and with nothing planted")


def main(*, steps: int = 400, every: int = 20, tokens_per_step: int = 1024, out: Path = Path("figures")) -> None:
    """Make what the module describes."""
    started = time.perf_counter()
    tokenizer = ss.load().tokenizer
    texts = corpus.read_corpus().train
    tokens = corpus.encode(tokenizer.backend_tokenizer, texts)
    result: Row = {}
    for name in ("planted", "unplanted"):
        settings = Settings(
            steps=steps,
            planted=name == "planted",
            tokens_per_step=tokens_per_step,
            length=128,
            copy_steps=steps // 10,
            warmup=max(1, steps // 10),
        )
        logged = train(tokens, tokenizer, settings, every)
        result[name] = [row for row in logged if "sink_rate" in row]
        result[f"{name}_loss"] = [{"step": row["step"], "loss": row["loss"]} for row in logged if "loss" in row]
        result[f"{name}_comes"] = comes(result[name], result["planted"][-1]["sink_rate"] / 2)
    text = record("sink-emerges", result, {"steps": steps, "every": every, "tokens": tokens_per_step}, started=started)
    save("sink_emerges", text, figure, out)


if __name__ == "__main__":
    run(main)
