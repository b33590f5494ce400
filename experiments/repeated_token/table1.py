"""Table 1 of Yona et al. 2025: repetitions, sink layer and sink neurons, the paper's beside what is measured here.

    python -m experiments.repeated_token.table1 [--models NAME[=FOLDER] ...]

Without options nothing is run and the measured columns say so. `--models llama-2-7b` measures the published weights,
which are downloaded if they are not there; `--models llama-2-7b=./weights` takes them from a folder. Models that are
not in the paper (`--models bundled mine=./mine`) get a row of their own. Repetitions are tried up to twice the
paper's number; "repeats" is the median over `--token` words, or five words of the text, of the first repetition
whose norm reaches half of BOS's. The paper states no criterion.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from experiments.drawn import markdown
from experiments.repeated_token.weights import ABSENT, measured
from experiments.script import run as run_script
from sinkscope.models.checkpoints.names import BUNDLED
from sinkscope.sinks.spikes.find_sinks import find_sinks
from sinkscope.sinks.spikes.result import FindSinks

PAPER = {  # short name here -> name, repeats, sink layer, neurons, as printed in Table 1
    "llama-1-7b": ("LLaMa-1-7b-HF", 450, 2, (7003,)),
    "llama-2-7b": ("LLaMa-2-7b-HF", 1000, 1, (7890, 10411)),
    "llama-3-8b-instruct": ("Meta-Llama-3-8B-Instruct", 4000, 1, (198, 2427)),
    "mistral-7b-instruct-v0.1": ("Mistral-7B-Instruct-v0.1", 1200, 1, (7310, 8572)),
}
HEAD = ("model", "repeats, paper", "repeats, here", "layer, paper", "layer, here", "neurons, paper", "neurons, here")


def table(found: dict[str, FindSinks]) -> str:
    """The table in Markdown."""
    names = [*PAPER, *(name for name in found if name not in PAPER)]
    return markdown(HEAD, [_row(name, found.get(name)) for name in names])


def _row(name: str, found: FindSinks | None) -> tuple[str, ...]:
    label, repeats, layer, neurons = PAPER.get(name, (name, None, None, ()))
    here = _measured(found)
    paper = ("-" if repeats is None else str(repeats), "-" if layer is None else str(layer), _numbers(neurons) or "-")
    return (label, paper[0], here[0], paper[1], here[1], paper[2], here[2])


def _measured(found: FindSinks | None) -> tuple[str, str, str]:
    if found is None:
        return ABSENT, ABSENT, ABSENT
    spikes = [spike for spike in found.first_spikes if spike.needed is not None and spike.needed.neurons]
    if not spikes:
        return "-", "no sink", "-"
    (spike, *_), reached = spikes, list[int]()
    for one in spike.copies:
        if one.half is not None:
            reached.append(one.half)
    middle = f"{median(reached):.0f}" if reached else f"over {spike.copies[0].count}"
    never, unreached = "", len(spike.copies) - len(reached)
    if reached and unreached:
        never = f" ({unreached} of {len(spike.copies)} never within {max(one.count for one in spike.copies)})"
    neurons = spike.needed.neurons if spike.needed is not None else ()
    layers = dict.fromkeys(neuron.layer for neuron in neurons)
    names = _numbers([n.neuron if n.expert is None else f"{n.expert}.{n.neuron}" for n in neurons])
    return middle + never, _numbers(list(layers)), names


def _numbers(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def main(
    *,
    models: Sequence[str] = (),
    token: Sequence[str] = (),
    device: str | None = None,
    dtype: str | None = None,
) -> None:
    """Make what the module describes.

    Args:
        models: Short names or hub ids to measure, or NAME=FOLDER for weights in a folder.
        token: Words to repeat.
    """

    def find(name: str, model: str) -> FindSinks:
        """With repetitions up to twice what the paper has for this model."""
        known = PAPER.get(name)
        longest = None if known is None else 2 * known[1]
        weights = None if model == BUNDLED else model
        return find_sinks(weights, max_repeats=longest, tokens=list(token) or None, device=device, dtype=dtype)

    print(table(measured(models, find)))


if __name__ == "__main__":
    run_script(main)
