"""`SinkCallback`: the sink of a model while `transformers.Trainer` trains it, among the numbers that the Trainer logs.

Measuring leaves the run as it is: no random number is drawn, no gradient is made, and no module keeps another mode.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from sinkscope.errors import UnsupportedError, warn
from sinkscope.files.records import Natural, check_values
from sinkscope.measure import Setup
from sinkscope.models.hooks import evaluating
from sinkscope.models.shards import split_weight
from sinkscope.models.text import typical_text
from sinkscope.sinks.metrics import metrics_of
from sinkscope.sinks.spikes.spike import find_spikes
from sinkscope.sinks.spikes.survey import survey_of
from sinkscope.sinks.spikes.writers import writers_of


class SinkCallback(TrainerCallback):
    """Log what the sink of a model is while `transformers.Trainer` trains it.

    The numbers go through `Trainer.log`, and so to TensorBoard, trackio, wandb and `trainer.state.log_history`, in a
    row of their own (`read_sinks` names them). A run with the callback is equal to one without bit for bit. Only the
    main process measures. What cannot be measured ends in one warning, and the training goes on without. The Trainer
    needs a tokenizer (its `processing_class`).

    Args:
        trainer: The Trainer, to which the callback is then added; a Trainer does not tell its callbacks who calls them.
        every: Steps between measurements; the first is made before the first step.
        bos: Whether texts begin with BOS, as in `find_sinks`: as the training data do.
        text: File of typical text, such as a part of the data. By default the neutral text in the package.

    Raises:
        SinkscopeError: An argument is invalid, or the text cannot be read.

    Example:
        trainer.add_callback(ss.SinkCallback(trainer, every=500))
    """

    def __init__(
        self,
        trainer: Trainer,
        every: int = 500,
        *,
        bos: bool | None = None,
        text: str | Path | None = None,
    ) -> None:
        check_values(Natural, every=every)
        typical_text(text)
        self.trainer: Any = trainer
        self.every = every
        self._opening: dict[str, Any] = {"bos": bos, "text": text}
        self._is_on = False

    def __repr__(self) -> str:
        """Return how often it measures."""
        return f"SinkCallback(every={self.every})"

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure the model before its first step."""
        self._is_on = state.is_world_process_zero
        if state.global_step == 0:
            self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure and log after every `every` steps; an error ends that."""
        trainer = self.trainer
        if not self._is_on or state.global_step % self.every:
            return
        try:
            if trainer.is_deepspeed_enabled or split_weight(trainer.model) is not None:
                # all processes would have to measure, and this one alone would wait for them
                raise UnsupportedError("the model is split over processes")
            with torch.no_grad(), evaluating(trainer.model):  # a pass without dropout draws no random number
                setup = Setup.open(trainer.model, tokenizer=trainer.processing_class, **self._opening)
                with trainer.accelerator.autocast():  # not while it is opened: places are proved in the weights' type
                    numbers = read_sinks(setup)
        except Exception as error:
            self._is_on = False
            warn(f"SinkCallback stopped at step {state.global_step}, and the training goes on without: {error!r}")
            return
        should_log = control.should_log  # logging ends it, but the log of this step is still to come
        trainer.log(numbers)
        control.should_log = should_log


def read_sinks(setup: Setup) -> dict[str, float]:
    """Measure what the sink of a model is, by the names under which it is logged.

    The neuron is not verified by ablation, as `find_sinks` does it.

    Args:
        setup: The model and its text.

    Returns:
        `sink_rate`, `norm_ratio`, `norm_layer` and `norm_position`: as `sink_metrics` has them, over the texts of the
            survey.
        `spike_ratio`: norm at the place of the largest spike over the typical one, after the layer where it is largest;
        if no norm stands out, the largest departure of first tokens.
        `spike_dim`: the residual dimension that carries most of the spike; left out if no norm stands out.
        `spike_layer`, `spike_neuron` (and `spike_expert`): the neuron that writes most of the spike; left out if no
            norm
        stands out, or no MLP writes it.
    """
    survey = survey_of(setup)
    spikes = find_spikes(survey, setup.tokenizer)
    numbers = metrics_of([survey])
    if not spikes:
        numbers["spike_ratio"] = float(survey.ratios[:, :, 0].mean(1).max())
        return numbers
    spike = max(spikes, key=lambda spike: spike.size)
    ratio = float(survey.norms[spike.highest, spike.place.mask].mean()) / survey.typical_norm[spike.highest]
    numbers |= {"spike_dim": int(spike.direction.abs().argmax()), "spike_ratio": ratio}
    shares, _ = writers_of(spike)
    if shares:
        neuron, *_ = max(shares, key=lambda unit: shares[unit])
        numbers |= {"spike_layer": neuron.layer, "spike_neuron": neuron.neuron}
        if neuron.expert is not None:
            numbers["spike_expert"] = neuron.expert
    return numbers
