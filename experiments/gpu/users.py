"""Everything that users do, once, on a GPU: right answers, seconds and peak memory.

    python -m experiments.gpu.users [--shape llama-2-7b] [--out figures/gpu_users.json] [--device cuda]

A checkpoint of 7B shape with a planted circuit, in bfloat16: find-sinks (streamed and in memory), the circuit, the
patch, and a guard that does not trigger. `overhead` measures policies, and `exactness` what caches promise.
Steps are written as each ends, and done ones are left out when the command is given again. Needs torch, transformers,
accelerate, jaxtyping; no network, TransformerLens, nnsight.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.gpu.steps import Steps, kept, loaded
from experiments.record import Row
from experiments.script import run
from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.hooks.trace.run import trace
from sinkscope.loops.guard import LoopGuard
from sinkscope.models.target import Target
from sinkscope.sinks.spikes.circuit import circuit
from sinkscope.sinks.spikes.find_sinks import find_sinks


def ids_of(target: Target, rows: int, length: int) -> Tensor:
    """Random tokens after BOS."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, int(target.config.vocab_size), (rows, length), generator=generator)
    ids[:, 0] = 1
    return ids.to(target.device)


def sinks(found: Any, truth: Row) -> Row:
    """Whether the planted neurons were found."""
    sites = sorted(neuron.site for neuron in found.needed)
    right = set(sites) == {(n["layer"], n["neuron"]) for n in truth["neurons"]}
    return {"neurons": sites, "right": right}


def patched(target: Target, truth: Row, repeats: int) -> Row:
    """The last repetition's norm with and without the patch, over the first token's; and a generation under it."""
    sites = []
    for n in truth["neurons"]:
        sites.append((n["layer"], n["neuron"]))
    patch = SinkPatch(sites=sites)
    ids = torch.full((1, repeats + 1), 200, device=target.device)
    ids[:, 0] = 1
    site = f"blocks.{truth['sink_layer']}.hook_resid_post"
    plain = trace(target, ids, [site], "norm")[site][0]
    with patch.on(target) as run:
        after = trace(target, ids, [site], "norm")[site][0]
        made = target.hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    shares = {"before": float(plain[-1] / plain[0]), "after": float(after[-1] / after[0])}
    right = shares["before"] > 0.5 > shares["after"] and made.shape[1] > ids.shape[1]
    return {**shares, "first_norm": float(plain[0]), "events": len(run.events), "right": right}


def untriggered(target: Target, prompt: int) -> Row:
    """A guard that does not trigger changes no logit of what is generated, bit for bit."""
    ids = ids_of(target, 1, prompt)
    options: Row = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    logits: list[Tensor] = []
    for edit in (None, LoopGuard()):
        with under(edit, target):
            found = target.hf.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
        logits.append(torch.stack(found.logits))
    return {"right": torch.equal(*logits)}


def circuits(target: Target, truth: Row) -> Row:
    """Whether the circuit has neurons of the planted layer."""
    layers = {neuron.layer for neuron in circuit(target.hf).needed}
    return {"right": truth["sink_layer"] in layers}


def main(
    *,
    shape: str = "llama-2-7b",
    folder: Path = Path("/tmp/sinkscope-planted"),
    prompt: int = 64,
    repeats: int = 512,
    device: str = "cuda",
    dtype: str = "bfloat16",
    out: Path = Path("figures/gpu_users.json"),
) -> None:
    """Make what the module describes.

    Args:
        folder: Where the checkpoint is made.
        prompt: Tokens that the untriggered guard reads.
        repeats: Copies of a token under the patch.
    """
    settings = {"shape": shape, "prompt": prompt, "repeats": repeats, "dtype": dtype}
    part = Steps("gpu-users", out, settings, device, dtype)
    checkpoint, truth = kept(shape, folder, dtype)
    part.do("find-sinks, streamed", lambda: sinks(find_sinks(checkpoint, device=device, dtype=dtype), truth))
    target = loaded(checkpoint, device, dtype)
    part.do("find-sinks, in memory", lambda: sinks(find_sinks(target.hf), truth))
    part.do("patch", partial(patched, target, truth, repeats))
    part.do("untriggered guard", partial(untriggered, target, prompt))
    part.do("circuit", partial(circuits, target, truth))
    part.end()


if __name__ == "__main__":
    run(main)
