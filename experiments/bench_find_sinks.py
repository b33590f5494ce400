"""How fast and how small `find_sinks` is, side by side with the way of a notebook, in one run.

    python -m experiments.bench_find_sinks --out figures/bench_find_sinks.json [--rounds 3] [--only NAME ...]

Rows:
- `shallow`, `deep`: an organism of 24 layers x 1,024 (d_mlp 2,816) with the sink in layer 1 or at two thirds of the
  depth; 1,000 repetitions, 8 candidates. Arm A loads the folder into TransformerLens, runs `run_with_cache` over
  everything, ranks all neurons by the norm of what they write, and ablates the candidates one by one in passes that
  keep one norm. Arm B is `find_sinks(folder)`. Arm C runs only the forward passes that its four steps cannot do
  without, and reads nothing, over the same twelve texts: with BOS and without it; the layers up to that of the sink
  once more, for what each neuron writes; from that layer on, without all writers, with a random set for each text, and
  without each neuron alone; and the copies up to it. The notebook's time over that of arm C, `bound`, is the most that
  any program with these steps can reach.
  What the notebook's way does not know: whether the neurons write along one direction, whether heads attend to the
  place and how many stay, the perplexity, controls, places other than the first token, and BOS.
  Each arm is a process of its own on one thread; time runs from load to result, imports are excluded; memory is the
  growth of resident memory from there.
- `seven_b`: peak resident memory on a 7B-shaped float16 checkpoint, all of whose layers are read.
- `cold_start`: `sinkscope find-sinks` on the bundled model, from a cold process to the printed table, against
  `python -c "import torch, transformers, transformer_lens"`.

Ratios are medians over interleaved rounds. Compare only ratios, because absolute times depend on the machine and its
load.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from experiments import make_shape
from experiments.record import Row, earlier, record, value_of_each
from experiments.script import run as run_script
from experiments.timing import child, memory, pairs_of
from sinkscope.files.output import write_atomic
from sinkscope.measure import PIECE

REPEATS, CANDIDATES, SHAPE = 1000, 8, "24x1024"
ROWS = ("shallow", "deep", "seven_b", "cold_start")
ARMS = ("notebook", "plain", "sinkscope")


def notebook_arm(folder: str) -> Row:
    """The whole model in TransformerLens, everything cached, candidates ablated one by one."""
    import torch
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401 - imports are not timed

    def run() -> Row:
        hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        bridge = TransformerBridge.boot_transformers(folder, hf_model=hf, tokenizer=tokenizer)
        token = tokenizer("a", add_special_tokens=False)["input_ids"][0]
        ids = torch.tensor([[tokenizer.bos_token_id] + [token] * REPEATS])
        n_layers = hf.config.num_hidden_layers
        with torch.no_grad():
            _, cache = bridge.run_with_cache(ids)
            norms = torch.stack([cache[f"blocks.{i}.hook_mlp_out"][0, 0].norm() for i in range(n_layers)])
            above = (norms > norms.mean() + 2 * norms.std(correction=0)).nonzero().flatten()
            if len(above):
                layer = int(above[0])
            else:
                layer = int(norms.argmax())
            written = []
            for i in range(n_layers):  # per-neuron norms of every layer, as the notebook looks at all of them
                columns = hf.get_submodule(f"model.layers.{i}.mlp.down_proj").weight.T
                written.append((cache[f"blocks.{i}.mlp.hook_post"][0, 0][:, None] * columns).norm(dim=1))
            top = written[layer].topk(CANDIDATES).indices.tolist()
            site = f"blocks.{layer}.hook_resid_post"
            intact = cache[site][0].norm(dim=-1)
            del cache, written
            drops = {}
            for neuron in top:
                norm: list[Any] = []

                def zero(post: Any, hook: Any, neuron: int = neuron) -> Any:
                    post[:, :, neuron] = 0
                    return post

                def read(resid: Any, hook: Any, norm: list[Any] = norm) -> None:
                    norm.append(resid[0].norm(dim=-1))

                bridge.run_with_hooks(ids, fwd_hooks=[(f"blocks.{layer}.mlp.hook_post", zero), (site, read)])
                drops[neuron] = (float(1 - norm[0][0] / intact[0]), float(1 - norm[0][-1] / intact[-1]))
        return {"layer": layer, "neurons": sorted(n for n, (first, _) in drops.items() if first >= 0.1)}

    return measured(run)


def sinkscope_arm(folder: str) -> Row:
    """`find_sinks` on the same folder, with the same repetitions, its layers read one by one."""
    import torch  # noqa: F401
    import transformers  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401 - imports are not timed

    from sinkscope.opening.open import open_target
    from sinkscope.sinks.spikes.find_sinks import find_sinks

    read: set[str] = set()

    def run() -> Row:
        target: Any = open_target(Path(folder))
        found = find_sinks(target, tokens=["a"], max_repeats=REPEATS)
        read.update(target.store.source.read)
        spike = found.spike
        return {
            "layer": found.needed[0].layer if found.needed else None,
            "neurons": sorted(neuron.neuron for neuron in found.needed),
            "layers_read": found.layers_read,
            "n_layers": found.model.n_layers,
            "set_drop": 1 - spike.needed.left if spike is not None and spike.needed is not None else None,
            "repeats": spike.copies[0].half if spike is not None and spike.copies else None,
        }

    out = measured(run)
    layers = set()
    for name in read:
        if "layers." in name:
            layers.add(int(name.split("layers.")[1].split(".")[0]))
    return out | {"deepest_tensor_read": max(layers, default=None), "tensors_read": len(read)}


def plain_arm(folder: str) -> Row:
    """Nothing but the forward passes that the steps need, through layers that are read as `find_sinks` reads them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401 - imports are not timed

    from sinkscope.models.target import LayerInput
    from sinkscope.opening.open import open_target
    from sinkscope.sinks.spikes.survey import SURVEYED

    truth = json.loads((Path(folder) / "truth.json").read_text())
    neurons = truth["neurons"]

    def run() -> Row:
        target: Any = open_target(Path(folder))

        def forward(rows: int, tokens: int, first: int, last: int) -> None:
            ids, start = torch.zeros(rows, tokens, dtype=torch.long), None
            if first:
                start = LayerInput(first, torch.ones(rows, tokens, target.d_model), wrapped=False)
            target.forward(ids, last_layer=last, start=start)

        sink, whole = int(neurons[0]["layer"]), target.n_layers - 1
        for _ in ("BOS", "no BOS"):
            forward(SURVEYED, PIECE, 0, whole)
        forward(SURVEYED, PIECE, 0, sink)
        forward(SURVEYED * (2 + len(neurons)), PIECE, sink, whole)
        forward(1, REPEATS + 1, 0, sink)
        return {"layers_read": target.n_layers}

    return measured(run)


def measured(run: Callable[[], Row]) -> Row:
    """Seconds, and growth and peak of resident memory, of `run`."""
    before = memory("VmRSS")
    start = time.perf_counter()
    out = run()
    seconds = time.perf_counter() - start
    peak = memory("VmHWM")
    return {**out, "seconds": seconds, "rss_growth_bytes": peak - before, "peak_rss_bytes": peak}


def arm_of(arm: str, folder: Path) -> Row:
    """Run an arm in a process of its own."""
    return child("bench_find_sinks", "--arm", arm, "--folder", str(folder))


def planted(folder: Path) -> list[int]:
    """The neurons of a checkpoint's truth."""
    truth = json.loads((folder / "truth.json").read_text())
    return sorted(value_of_each(truth["neurons"], "neuron"))


def pair(folder: Path, sink_layer: int, rounds: int) -> Row:
    """Both arms in turn; ratios round by round."""
    make_shape.main(shape=SHAPE, out=folder, sink_layer=sink_layer, dense_layers=24, dtype="float32", beta=2.7)
    right = (sink_layer, planted(folder))
    arms = ("notebook", "sinkscope", "plain")
    runs = []
    for _ in range(rounds):
        runs.append([arm_of(arm, folder) for arm in arms])
    answers = [(one["layer"], one["neurons"]) for run in runs for one in run[:2]]
    return {
        "sink_layer": sink_layer,
        "planted": right[1],
        "same_answer_and_right": all(answer == right for answer in answers),
        "time_ratio": statistics.median(a["seconds"] / b["seconds"] for a, b, _ in runs),
        "bound": statistics.median(a["seconds"] / c["seconds"] for a, _, c in runs),
        "over_plain_passes": statistics.median(b["seconds"] / c["seconds"] for _, b, c in runs),
        "rss_growth_ratio": statistics.median(b["rss_growth_bytes"] / a["rss_growth_bytes"] for a, b, _ in runs),
        **{arm: [run[i] for run in runs] for i, arm in enumerate(arms)},
    }


def seven_b(folder: Path) -> Row:
    """Memory on the full shape, and what was read."""
    make_shape.main(shape="llama-2-7b", out=folder)
    apparent = 0
    for f in folder.iterdir():
        apparent += f.stat().st_size
    return {
        "apparent_bytes": apparent,
        "planted": planted(folder),
        "default": arm_of("sinkscope", folder),
    }


def cold_start(rounds: int) -> Row:
    """The command against the imports alone."""

    def ran(*words: str) -> None:
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    command = partial(ran, "-m", "sinkscope", "find-sinks")
    imports = partial(ran, "-c", "import torch, transformers, transformer_lens")
    pairs = pairs_of(command, imports, rounds, time.perf_counter)
    return {"ratio": statistics.median(a / b for a, b in pairs), "seconds": pairs}


def main(
    *,
    rounds: int = 3,
    only: Sequence[Literal[*ROWS]] = ROWS,
    arm: Literal[*ARMS] | None = None,
    folder: Path | None = None,
    out: Path = Path("figures/bench_find_sinks.json"),
) -> None:
    """Make what the module describes.

    Args:
        arm: Only run this on the checkpoint in `folder`, as the script does itself in processes of their own.
    """
    if arm is not None:
        alone = {"notebook": notebook_arm, "plain": plain_arm, "sinkscope": sinkscope_arm}
        print(json.dumps(alone[arm](str(folder))))
        return
    rows: dict[str, Callable[[Path], Row]] = {
        "shallow": lambda f: pair(f, 1, rounds),
        "deep": lambda f: pair(f, 16, rounds),
        "seven_b": seven_b,
        "cold_start": lambda _f: cold_start(rounds),
    }
    results = earlier(out)
    started = time.perf_counter()
    for name in only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as temporary:
            results[name] = rows[name](Path(temporary) / "model")
    settings = {"rounds": rounds, "repeats": REPEATS, "candidates": CANDIDATES}
    write_atomic(out, record("bench-find-sinks", results, settings, started=started))


if __name__ == "__main__":
    run_script(main)
