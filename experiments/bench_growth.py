"""How the cost of work grows when its size doubles.

    python -m experiments.bench_growth [--out FILE]

Each row measures work at a size, at twice and at four times that size, in processor time of the thread, the least of
several rounds. Where the cost grows as the work does, doubling takes at most twice as long; a fixed part makes it less.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sinkscope as ss
from experiments.drawn import markdown
from experiments.record import Row, write_record
from experiments.script import run
from experiments.timing import seconds_of
from sinkscope.loops.guard.steer import Steering
from sinkscope.models.text import plain_ids
from sinkscope.models.text.chat import chat_ids
from sinkscope.opening.load import target_of
from sinkscope.results.notation import Neuron
from sinkscope.sinks.spikes.controls import other_neurons
from sinkscope.sinks.spikes.survey import read_survey

Work = Callable[[], object]


@dataclass(frozen=True)
class Growth:
    """Work whose size can be doubled.

    Attributes:
        name: What is done, and what its size counts.
        size: The smallest size.
        prepare: Makes the work of a size, whose time is measured.
    """

    name: str
    size: int
    prepare: Callable[[int], Work]


def goes_on(words: int) -> Work:
    """Finds where a chat template goes on after a conversation."""
    tokenizer = copy.deepcopy(ss.load().tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
    asked = "what is the time and the place " * (words // 7)
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": " the c at"}]
    messages.append({"role": "user", "content": "go on"})
    before = plain_ids(tokenizer, f"user:{asked}\nassistant:")
    before += tokenizer.convert_tokens_to_ids(["Ġ", "t", "h", "e", "Ġ", "c", "Ġat"])
    return lambda: chat_ids(tokenizer, messages, "bundled", before)


def losses(tokens: int) -> Work:
    """Reads eight more tokens of a row that repeats one token."""

    def work() -> None:
        for more in range(8):
            steering.losses([7] * (tokens + more))

    steering = Steering(1.0, tokens, 0)
    steering.losses([7] * (tokens - 1))
    return work


def embedding(layers: int) -> Work:
    """Traces the embedding of a model of some layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=layers, vocab_size=64, hidden_size=64, intermediate_size=128, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.arange(64)[None]
    ss.trace(model, ids, "hook_embed")
    return lambda: ss.trace(model, ids, "hook_embed")


def mask(tokens: int) -> Work:
    """Marks the sinks of a long text; its attention itself grows with the square."""
    model = ss.load()
    ids = torch.arange(tokens)[None] % 200 + 5
    return lambda: ss.sink_mask(model, ids)


def controls(neurons: int) -> Work:
    """Chooses other neurons beside many."""
    model = ss.load()
    ids = torch.arange(16)[None] + 5
    chosen = [Neuron(1, None, number) for number in range(neurons)]
    survey = read_survey(target_of(model), ids)
    return lambda: other_neurons(survey, chosen, (), 0)


GROWTHS = (
    Growth("where a chat template goes on, words", 2000, goes_on),
    Growth("losses of a stuck row, tokens", 1000, losses),
    Growth("trace of hook_embed, layers", 8, embedding),
    Growth("other neurons, neurons", 32, controls),
    Growth("sink_mask, tokens", 128, mask),
)


def doubled(growth: Growth, rounds: int) -> Row:
    """Seconds at three sizes, and by how much each doubling multiplies them."""
    sizes = [growth.size, 2 * growth.size, 4 * growth.size]
    seconds: list[float] = []
    for size in sizes:
        times: list[float] = []
        for _ in range(rounds):
            times.append(seconds_of(growth.prepare(size))[0])
        seconds.append(min(times))
    ratios = [seconds[1] / seconds[0], seconds[2] / seconds[1]]
    return {"name": growth.name, "sizes": sizes, "seconds": seconds, "ratios": ratios}


def table(rows: list[Row]) -> str:
    """One row for each work."""
    cells: list[list[Any]] = []
    for row in rows:
        milliseconds = [f"{1000 * seconds:.2f}" for seconds in row["seconds"]]
        ratios = [f"{ratio:.2f}" for ratio in row["ratios"]]
        cells.append([row["name"], " ".join(map(str, row["sizes"])), " ".join(milliseconds), " ".join(ratios)])
    return markdown(["work, and what its size counts", "sizes", "milliseconds", "times as long when doubled"], cells)


def main(*, rounds: int = 5, out: Path | None = None) -> None:
    """Make what the module describes, and print it.

    Args:
        out: File for the numbers.
    """
    torch.set_num_threads(1)
    rows = [doubled(growth, rounds) for growth in GROWTHS]
    print(table(rows))
    if out is not None:
        write_record(out, "bench-growth", {"rows": rows}, {"rounds": rounds})


if __name__ == "__main__":
    run(main)
