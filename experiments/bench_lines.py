"""What it costs to weigh all vertical and slash lines, compared with eager attention and with the forward pass alone.

    python -m experiments.bench_lines --out figures/bench_lines.json [--shape lines-512] [--length 8192] [--rounds 3]

The model has random weights and planted lines (in each layer half of the heads attend to one offset, the other half to
marked tokens), so that attention is as sparse as it is in trained models. Arms, with the same threads:

- `eager`: a forward pass with `output_attentions=True`; the time to add up lines afterwards is not counted;
- `lines`: a forward pass during which the lines are weighed, as `lines` does before it chooses any;
- `mass`: `lines`, and then the attention on the heaviest and on random lines at six etas, which is all of
  `lines`;
- `sdpa`: the forward pass alone.

Times are medians of ratios over interleaved rounds. Compare only ratios, because absolute times depend on the machine.
`eager_over_lines_added` divides the time that `eager` adds to the forward pass by the time that `lines` adds.
Memory is the rise of a fresh process's peak during the arm. `same` states that `lines` and `eager` agree at a short
length. `--long N` adds a row at a length for which `eager` is left out.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from experiments.record import Row, record
from experiments.script import run as run_script
from experiments.timing import memory_growth, seconds_of
from sinkscope.files.output import write_atomic
from sinkscope.lines.lines import ETAS, weighed
from sinkscope.lines.sums import Scores, line_sums, scores_of
from sinkscope.lines.votes import top_lines
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of

SHAPES = {  # hidden size, MLP, layers, query heads, kv heads
    "lines-512": (512, 1408, 2, 8, 4),
    "lines-1024": (1024, 2816, 2, 16, 8),
    "lines-128": (128, 256, 2, 4, 2),
    "lines-4096": (4096, 11008, 2, 32, 8),
    "lines-7b": (4096, 11008, 32, 32, 32),
}
VOCAB, MARKED, THETA, WIDTH, FAST = 512, 8, 1e8, 64, 12
ARMS = ("eager", "lines", "mass", "sdpa")


def made(shape: str, seed: int) -> Target:
    """The model; residual dimension 0 is a constant, 1 marks tokens below `MARKED`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    d, mlp, layers, heads, kv = SHAPES[shape]
    width = d // heads
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=d,
            intermediate_size=mlp,
            num_hidden_layers=layers,
            head_dim=width,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            max_position_embeddings=1 << 17,
            rope_parameters={"rope_type": "default", "rope_theta": THETA},
        )
    ).eval()
    half = width // 2
    body = model.model
    angles = THETA ** (-torch.arange(FAST) / half)
    with torch.no_grad():
        body.embed_tokens.weight[:, :2] = 0.0
        body.embed_tokens.weight[:, 0] = 1.0  # RMSNorm makes it about sqrt(d), the rest is noise
        body.embed_tokens.weight[:MARKED, 1] = 0.5
        for layer in body.layers:
            for proj in (layer.self_attn.o_proj, layer.mlp.down_proj):
                proj.weight[:2] = 0.0  # what is planted stays as it is
            key = layer.self_attn.k_proj.weight.view(kv, width, d)
            query = layer.self_attn.q_proj.weight.view(heads, width, d)
            key[:, :FAST, 0] = 1.0
            key[:, half - 1, 1] = 4.0
            force = 40.0 * math.sqrt(width) / (FAST * d)
            for head in range(heads):
                if head % 2:
                    query[head, half - 1, 0] = 6.0 * math.sqrt(width) / d
                else:
                    query[head, :FAST, 0] = force * torch.cos(angles * (head + 1))
                    query[head, half : half + FAST, 0] = -force * torch.sin(angles * (head + 1))
    return target_of(model, name=shape)


def ids_of(length: int, seed: int) -> Tensor:
    """One token in fifty is marked."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(MARKED, VOCAB, (1, length), generator=generator)
    ids[:, torch.rand(length, generator=generator) < 0.02] = 3
    return ids


@torch.no_grad()
def run(arm: str, target: Target, ids: Tensor, *, dense: bool = False) -> dict[int, tuple[Tensor, Tensor]]:
    """One pass; the sums that the arm found by layer, those of `eager` only with `dense`."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    layers = list(range(target.n_layers))
    if arm == "sdpa":
        target.forward(ids)
    elif arm == "eager":
        target.hf.set_attn_implementation("eager")
        matrices = target.base(input_ids=ids, output_attentions=True, use_cache=False).attentions
        target.hf.set_attn_implementation("sdpa")
        for layer, probs in enumerate(matrices if dense else ()):
            rows = []
            for o in range(ids.shape[1]):
                rows.append(probs[0].diagonal(-o, 1, 2).sum(-1))
            slash = torch.stack(rows, 1)
            found[layer] = probs[0].sum(1), slash
    else:
        generator = torch.Generator().manual_seed(0)

        def see(layer: int, scores: Scores) -> None:
            if arm == "mass":
                vertical, slash = line_sums(scores)
                weighed(scores, vertical, slash, top_lines(vertical, slash, ETAS), generator)
            else:
                found[layer] = line_sums(scores)

        with scores_of(target, see, layers):
            target.forward(ids)
    return found


def peak_of(arm: str, shape: str, length: int, seed: int, threads: int) -> int:
    """Bytes that the peak of a fresh process rises by during one arm."""
    argv = [
        sys.executable,
        "-m",
        "experiments.bench_lines",
        "--arm",
        arm,
        "--shape",
        shape,
        "--length",
        str(length),
        "--seed",
        str(seed),
        "--threads",
        str(threads),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout)["peak"])


def row(arms: tuple[str, ...], target: Target, length: int, settings: Row) -> Row:
    """Interleaved rounds of some arms at one length."""
    ids = ids_of(length, settings["seed"])
    run("sdpa", target, ids)
    rounds = [
        {arm: seconds_of(lambda arm=arm: run(arm, target, ids), time.perf_counter)[0] for arm in arms}
        for _ in range(settings["rounds"])
    ]
    memory = {}
    for each in arms:
        memory[each] = peak_of(each, settings["shape"], length, settings["seed"], settings["threads"])

    def ratio(over: str, under: str) -> float | None:
        if {over, under} <= set(arms):
            values = []
            for r in rounds:
                values.append(r[over] / r[under])
            return statistics.median(values)
        return None

    eager_over_lines_memory = None
    if "eager" in arms:
        eager_over_lines_memory = memory["eager"] / memory["lines"]
    eager_over_lines_added = None
    if "eager" in arms:
        eager_over_lines_added = statistics.median((r["eager"] - r["sdpa"]) / (r["lines"] - r["sdpa"]) for r in rounds)
    return {
        "length": length,
        "eager_over_lines": ratio("eager", "lines"),
        "lines_over_sdpa": ratio("lines", "sdpa"),
        "eager_over_mass": ratio("eager", "mass"),
        "mass_over_sdpa": ratio("mass", "sdpa"),
        "seconds": rounds,
        "peak_bytes": memory,
        "eager_over_lines_memory": eager_over_lines_memory,
        "eager_over_lines_added": eager_over_lines_added,
    }


def main(
    *,
    shape: Literal[*SHAPES] = "lines-512",
    length: int = 8192,
    long: int | None = None,
    rounds: int = 3,
    seed: int = 0,
    threads: int = 1,
    arm: Literal[*ARMS] | None = None,
    out: Path | None = None,
) -> None:
    """Make what the module describes.

    Args:
        long: Another length, of the arms that read it in a reasonable time.
        arm: Only run this once and print how far the peak of memory rose.
    """
    started = time.perf_counter()
    torch.set_num_threads(threads)
    target = made(shape, seed)
    if arm is not None:
        run(arm, target, ids_of(64, seed))  # libraries are loaded
        grown, _ = memory_growth(lambda: run(arm, target, ids_of(length, seed)))
        print(json.dumps({"peak": max(1, grown or 0)}))
        return
    short = ids_of(512, seed)
    pairs = []
    for i in range(target.n_layers):
        pairs.append((run("eager", target, short, dense=True)[i], run("lines", target, short)[i]))
    same = all(torch.allclose(a, b, atol=1e-3, rtol=1e-3) for one in pairs for a, b in zip(*one, strict=True))
    heaviest = []
    for sums in pairs[0][1]:
        heaviest.append(float(sums.max() / 512))
    settings = {"shape": shape, "length": length, "long": long, "rounds": rounds, "seed": seed, "threads": threads}
    rows = [row(ARMS, target, length, settings)]
    if long is not None:
        rows.append(row(("lines", "sdpa"), target, long, settings))
    result = {"same": same, "heaviest_line": {"vertical": heaviest[0], "slash": heaviest[1]}, "rows": rows}
    text = record("bench-lines", result, settings, started=started, seed=seed)
    if out is not None:
        write_atomic(out, text)
    print(text, end="")


if __name__ == "__main__":
    run_script(main)
