"""Table 1 of Yona et al. 2025: repetitions, sink layer and sink neurons, the paper's beside what is measured here.

    python -m experiments.repeated_token.table1 [--models NAME[=FOLDER] ...]

Without options nothing is run and the measured columns say so. `--models llama-2-7b` measures the published weights,
which are downloaded if they are not there; `--models llama-2-7b=./weights` takes them from a folder. Models that are
not in the paper (`--models bundled mine=./mine`) get a row of their own. Repetitions are tried up to twice the
paper's number; "repeats" is the median over `--token` words, or five words of the text, of the first repetition
that reaches half of the first token's projection on a spike. The paper states no criterion. Where the first token has
several spikes that need neurons, each cell says it of all of them, the one that most heads read first.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from experiments.drawn import markdown
from experiments.repeated_token.weights import ABSENT, measured
from experiments.script import run as run_script
from sinkscope.models.checkpoints.names import BUNDLED
from sinkscope.sinks.spikes.find_sinks import find_sinks
from sinkscope.sinks.spikes.records import SpikeResult
from sinkscope.sinks.spikes.result import FindSinks
from sinkscope.sinks.tokens import MAX_REPEATS

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
    spikes = [one for one in found.first_spikes if one.needed is not None and one.needed.neurons]
    if not spikes:
        return "-", "no sink", "-"
    repeats, layers, neurons = zip(*map(_of_spike, spikes), strict=True)
    return " / ".join(repeats), " / ".join(layers), " / ".join(neurons)


def _of_spike(spike: SpikeResult) -> tuple[str, str, str]:
    """The repetitions that a spike takes, and the layers and neurons that it needs."""
    halves = [one.half for one in spike.copies if one.half is not None]
    count, never = max((one.count for one in spike.copies), default=0), len(spike.copies) - len(halves)
    repeats = f"{median(halves):.0f}" if halves else f"over {count}"
    if halves and never:
        repeats += f" ({never} of {len(spike.copies)} never within {count})"
    assert spike.needed is not None
    layers = sorted({neuron.layer for neuron in spike.needed.neurons})
    names = [n.neuron if n.expert is None else f"{n.expert}.{n.neuron}" for n in spike.needed.neurons]
    return repeats, _numbers(layers), _numbers(names)


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
        longest = MAX_REPEATS if known is None else 2 * known[1]
        weights = None if model == BUNDLED else model
        return find_sinks(weights, max_repeats=longest, tokens=list(token) or None, device=device, dtype=dtype)

    print(table(measured(models, find)))


if __name__ == "__main__":
    run_script(main)
