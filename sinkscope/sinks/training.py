"""`SinkCallback`: the sink of a model while `transformers.Trainer` trains it, among the numbers that the Trainer logs.

Measuring leaves the run as it is: no random number is drawn, no gradient is made, and no module keeps another mode.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback

from sinkscope.errors import SinkscopeError, UnsupportedError, warn
from sinkscope.files.records import Natural, Whole, check_values
from sinkscope.measure import Setup
from sinkscope.models.text import beginning, typical_text
from sinkscope.sinks.find.mask import dims_of
from sinkscope.sinks.find.neurons import largest_writer
from sinkscope.sinks.find.survey import Survey
from sinkscope.sinks.repetition.attention import late_attention
from sinkscope.sinks.tokens import pick_tokens

LATER = 4  # a quarter of each text stands after the copies; its attention is read


class SinkCallback(TrainerCallback):
    """Log what the sink of a model is while `transformers.Trainer` trains it.

    The numbers go through `Trainer.log`, and so to TensorBoard, trackio, wandb and `trainer.state.log_history`, in a
    row of their own (`read_sinks` names them). A run with the callback is equal to one without bit for bit. Only the
    main process measures. What cannot be measured ends in one warning, and the training goes on without.

    Args:
        every: Steps between measurements; the first is made before the first step.
        bos: Whether texts begin with BOS, as in `find_sinks`: as the training data do.
        text: File of typical text, such as a part of the data. By default the neutral text in the package.
        seed: Seed of the words that are repeated.
        tokenizer: The tokenizer. By default the one of the Trainer (its `processing_class`).

    Raises:
        SinkscopeError: An argument is invalid, or the text cannot be read.

    Example:
        >>> SinkCallback(every=500).every
        500
    """

    def __init__(
        self,
        every: int = 500,
        *,
        bos: bool | None = None,
        text: str | Path | None = None,
        seed: int = 0,
        tokenizer: Any = None,
    ) -> None:
        check_values(Natural, every=every)
        check_values(bool | None, bos=bos)
        check_values(Whole, seed=seed)
        typical_text(text)
        self.every = every
        self._opening: dict[str, Any] = {"bos": bos, "text": text, "seed": seed}
        self._tokenizer = tokenizer
        self._trainer: Any = None
        self._setup: Setup | None = None
        self._is_on = False

    def attach(self, trainer: Trainer) -> SinkCallback:
        """Add the callback to a Trainer, which it needs because a Trainer does not tell callbacks who calls them.

        Args:
            trainer: The Trainer, before `train`.

        Returns:
            The callback itself.

        Raises:
            SinkscopeError: It is no Trainer.
        """
        if not isinstance(trainer, Trainer):
            raise SinkscopeError(f"trainer={trainer!r}: expected a transformers.Trainer")
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Begin anew, and measure the model before its first step.

        Raises:
            SinkscopeError: The callback was given to a Trainer that it does not know.
        """
        if self._trainer is None:
            raise SinkscopeError(
                "this SinkCallback does not know its Trainer: leave it out of callbacks=[...], and call "
                "SinkCallback(...).attach(trainer)"
            )
        self._setup = None
        self._is_on = state.is_world_process_zero
        if state.global_step == 0:
            self._measure(control, **parts)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Measure after every `every` steps."""
        if state.global_step % self.every == 0:
            self._measure(control, **parts)

    def _measure(self, control: Any, *, model: nn.Module, processing_class: Any = None, **_: Any) -> None:
        trainer = self._trainer
        if not self._is_on:
            return
        try:
            if trainer.is_deepspeed_enabled:
                raise UnsupportedError("the model is split over processes by DeepSpeed")
            with undisturbed(model), trainer.accelerator.autocast():
                if self._setup is None:
                    tokenizer = self._tokenizer or processing_class
                    self._setup = Setup.open(model, **self._opening, tokenizer=tokenizer)
                numbers = read_sinks(replace(self._setup, memory={}))  # the memory is of an earlier step
        except Exception as error:
            self._is_on = False
            warn(f"SinkCallback stopped at step {trainer.state.global_step}, and the training goes on: {error}")
            return
        should_log = control.should_log  # logging ends it, but the log of this step is still to come
        trainer.log(numbers)
        control.should_log = should_log


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Context manager in which no dropout acts; afterwards modes and random numbers are as before.

    Args:
        model: The model.
    """
    training = [module for module in model.modules() if module.training]
    of_python, of_numpy = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count()))
    with torch.no_grad(), torch.random.fork_rng(devices):
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def read_sinks(setup: Setup) -> dict[str, float]:
    """What the sink of a model is now, by the names under which it is logged.

    Layers and neurons are the candidates of a scan. None of them is verified by ablation, as `find_sinks` does it.

    Args:
        setup: The model and its text.

    Returns:
        `sink_rate`: share of the heads that give position 0 more than 0.3 of their attention (Gu et al. 2024), over 100
        texts of 64 tokens; left out if the context is shorter.
        `spike_ratio`: norm at the place of the first spike over the typical one, after the layer where it is largest;
        of the first token, if no norm stands out.
        `spike_dim`, `spike_dims`: the residual dimension that carries most of the spike, and the number of them as in
        `sink_dims`; left out if no norm stands out, and so are the next two, also if no MLP makes it do so.
        `spike_layer`, `spike_neuron` (and `spike_expert`): the layer whose MLP adds most to the spike, and its neuron
        that writes most there.
        `repeat_attention`, `repeat_loss`: those of `read_copies`; `text_attention`, `text_loss`: their controls.
    """
    survey = Survey.of(setup)
    context = survey.first
    numbers: dict[str, float] = {}
    if survey.rate is not None:
        numbers["sink_rate"] = survey.rate.value
    if survey.spikes:
        context = survey.context(survey.spikes[0])
        dims = dims_of(context.scan)
        numbers |= {"spike_dim": dims[0], "spike_dims": len(dims)}
        if context.scan.sink_layer is not None:
            neuron = largest_writer(context, context.layer)
            numbers |= {"spike_layer": neuron.layer, "spike_neuron": neuron.neuron}
            if neuron.expert is not None:
                numbers["spike_expert"] = neuron.expert
    numbers["spike_ratio"] = float(context.scan.ratios.max())
    attention, loss = read_copies(setup).mean(2).tolist()
    for kind, name in enumerate(("repeat", "text")):
        numbers[f"{name}_attention"] = attention[kind]
        numbers[f"{name}_loss"] = loss[kind]
    return numbers


def read_copies(setup: Setup) -> Float[Tensor, "number text row"]:
    """Attention to copies of a token from the text after them, and the loss of the later half of the copies.

    In each text a word of its own, drawn with the seed, replaces everything but what stands first and the last quarter.

    Args:
        setup: The model and its text.

    Returns:
        Attention (share of all, mean over heads and layers) and loss (nats per token); with copies, and of the text
        that they replace; of each row.
    """
    target = setup.target
    words = pick_tokens(setup.tokenizer, setup.ids, None, setup.seed, setup.n_texts)
    text = setup.ids[: len(words)]
    begin = max(1, len(beginning(setup.tokenizer, setup.bos)))
    end = text.shape[1] - text.shape[1] // LATER
    copies = text.clone()
    copies[:, begin:end] = torch.tensor(words)[:, None]
    rows = torch.cat([copies, text])
    keys = torch.zeros(*rows.shape, 1)
    keys[:, begin:end] = 1
    with late_attention(target, keys, end) as total:
        logits = target.forward(rows, unembed=True).logits
    attending = [layer for layer in range(target.n_layers) if target.has_attention(layer)]
    attention = total[:, 0, attending].mean(1) / (rows.shape[1] - end)
    later = (begin + end) // 2
    predicted = logits[:, later - 1 : end - 1].float().cpu()
    loss = cross_entropy(predicted.transpose(1, 2), rows[:, later:end], reduction="none").mean(1)
    return torch.stack([attention, loss]).unflatten(1, (2, -1))
