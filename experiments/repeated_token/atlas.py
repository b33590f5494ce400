"""How often each token of a vocabulary must be repeated until it has half of the first token's spike (Yona, Fig. 6).

python -m experiments.repeated_token.atlas
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.record import write_record
from experiments.script import run
from sinkscope.measure import Setup
from sinkscope.sinks.repeat import copies_of
from sinkscope.sinks.spikes.find import sinks_of
from sinkscope.sinks.tokens import MAX_REPEATS, prefix_of


def main(*, out: Path = Path("figures"), tokens: Sequence[int] = ()) -> None:
    """Count the repetitions of tokens of the model in the package; null: it never gets there.

    Args:
        tokens: Token ids. By default all.
    """
    setup = Setup.open()
    ids = [*tokens] or list(range(setup.target.config.vocab_size))
    spikes = [circuit.spike for circuit in sinks_of(setup).at_first]
    repeats = copies_of(setup.target, spikes, ids, prefix_of(setup, ids), MAX_REPEATS)
    result = {"spikes": [spike.name for spike in spikes], "ids": ids, "repeats": repeats}
    write_record(out / "atlas.json", "atlas", result, {"max_repeats": MAX_REPEATS})


if __name__ == "__main__":
    run(main)
