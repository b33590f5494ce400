"""Records which tokens kvpress keeps, in its own environment, for tests that compare our policies with it.

    python -m venv KVPRESS && KVPRESS/bin/pip install kvpress==0.5.5 torch==2.13.0
    KVPRESS/bin/python tools/kvpress_fixture.py --out tests/fixtures/kvpress.json

kvpress needs a different release of transformers, so the two never share a process: this script imports
neither sinkscope nor its tests. It builds a small Llama whose weights come from an explicit generator
(`tiny_llama`, the same numbers under any release), runs the presses on fixed prompts, and records the positions
that each layer and kv head kept, by searching the kept keys among the original ones.

Where kvpress's definitions differ from the papers' (version 0.5.5):
- StreamingLLMPress: in decoding the slots come back from `topk` in no order and the next compression counts slots, so
  the sink tokens are lost; recorded as `decoding` of "streaming_llm".
- SnapKVPress: as the paper's code, but the mean over the window instead of the sum (same order), the mean over the
  query heads of a kv head (the paper has one key per query head), and only average pooling.
- TOVAPress: the mean over all heads of the layer, as in the paper; the newest token always stays, which the paper does
  not ask for. The newest token does not compete for the largest score.
- ObservedAttentionPress: attention received *divided by the number of queries that could give it*, at prefill, and no
  recent tokens are set aside. H2O's score is the sum, it keeps half of the budget for recent tokens, and goes on
  summing in decoding: only the sums can be compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
PROMPTS = (48, 97, 200)  # tokens
RATIOS = (0.25, 0.5, 0.75)  # share that kvpress throws away
STEPS = 40  # tokens decoded
DECODING = {"prompt": 40, "ratio": 0.6, "target": 16}  # 40 * (1 - 0.6) = 16: the same budget before and while decoding


def tiny_llama(seed: int = 0) -> Any:
    """A random LlamaForCausalLM with attention sharp enough to rank by; the same under every release."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else 0.25 * noise)
    return model


def prompt(length: int, seed: int) -> Tensor:
    """`[1 length]`."""
    return torch.randint(SIZES["vocab_size"], (1, length), generator=torch.Generator().manual_seed(seed))


def checksum(model: Any) -> list[float]:
    """Some logits: two environments have the same model if these agree."""
    with torch.no_grad():
        return model(prompt(32, 7)).logits[0, -1, :8].tolist()


class Kept:
    """Listens to `compress` of a press: which true positions each layer still holds, after each compression."""

    def __init__(self, press: Any) -> None:
        self.pos: dict[int, Tensor] = {}  # layer -> [kv_head slot]
        self.history: dict[int, list[list[list[int]]]] = {}
        self.seen = 0
        self._compress: Callable[..., tuple[Tensor, Tensor]] = press.compress
        press.compress = self

    def __call__(self, module: Any, hidden: Tensor, keys: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        """The press's own `compress`, listened to."""
        out = self._compress(module, hidden, keys, *args)
        layer = module.layer_idx
        pos = self.pos.get(layer, torch.empty(keys.shape[1], 0, dtype=torch.long))
        new = keys.shape[2] - pos.shape[1]  # came in since the last compression
        pos = torch.cat([pos, torch.arange(self.seen - new, self.seen).expand(keys.shape[1], new)], 1)
        same = (out[0][0][:, :, None] == keys[0][:, None]).all(-1)  # [kv_head kept slot]
        if not bool((same.sum(-1) == 1).all()):
            raise SystemExit("two slots hold the same key: use other prompts")
        self.pos[layer] = pos.gather(1, same.int().argmax(-1))
        self.history.setdefault(layer, []).append([sorted(head) for head in self.pos[layer].tolist()])
        return out


@torch.no_grad()
def at_prefill(model: Any, make: Callable[[float], Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Kept positions `[layer][kv_head]` for every prompt and ratio."""
    from transformers import DynamicCache

    cases = []
    for length in PROMPTS:
        for ratio in RATIOS:
            press = make(ratio)
            kept = Kept(press)
            kept.seen = length
            with press(model):
                model(prompt(length, length), past_key_values=DynamicCache())
            layers = [kept.history[i][0] for i in range(SIZES["num_hidden_layers"])]
            cases.append({"length": length, "kept": len(layers[0][0]), "positions": layers, **options})
    return cases


@torch.no_grad()
def in_decoding(model: Any, make: Callable[[float], Any]) -> dict[str, Any]:
    """Kept positions `[layer][compression][kv_head]`: once after the prompt, then after every token fed."""
    from kvpress import DecodingPress, PrefillDecodingPress
    from transformers import DynamicCache

    length, target = int(DECODING["prompt"]), int(DECODING["target"])
    base = make(float(DECODING["ratio"]))
    kept = Kept(base)
    press = PrefillDecodingPress(base, DecodingPress(base, compression_interval=1, target_size=target))
    ids = prompt(length + STEPS, 11)
    cache = DynamicCache()
    with press(model):
        kept.seen = length
        model(ids[:, :length], past_key_values=cache)
        for i in range(length, length + STEPS):
            kept.seen = i + 1
            model(ids[:, i : i + 1], past_key_values=cache, position_ids=torch.tensor([[i]]))
    return {"length": length, "kept": target, "positions": [kept.history[i] for i in sorted(kept.history)]}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON file to write.")
def main(out: Path) -> None:
    """Record which tokens kvpress keeps."""
    from importlib.metadata import version

    from kvpress import ObservedAttentionPress, SnapKVPress, StreamingLLMPress, TOVAPress

    torch.set_num_threads(1)
    model = tiny_llama()
    small = {"window": 16, "kernel": 5}
    wide = {"window": 32, "kernel": 7}
    presses: dict[str, list[tuple[Callable[[float], Any], dict[str, Any]]]] = {
        "streaming_llm": [(lambda r: StreamingLLMPress(r, n_sink=4), {"sinks": 4})],
        "snapkv": [
            (lambda r, o=o: SnapKVPress(r, window_size=o["window"], kernel_size=o["kernel"]), o) for o in (small, wide)
        ],
        "tova": [(lambda r: TOVAPress(r), {})],
        "observed_attention": [(lambda r: ObservedAttentionPress(r), {})],
    }
    kept: dict[str, Any] = {
        "versions": {name: version(name) for name in ("kvpress", "transformers", "torch")},
        "python": ".".join(map(str, sys.version_info[:2])),
        "model": SIZES,
        "logits": checksum(model),
        "prefill": {
            name: [case for make, options in kinds for case in at_prefill(model, make, options)]
            for name, kinds in presses.items()
        },
        "decoding": {name: in_decoding(model, presses[name][0][0]) for name in ("streaming_llm", "tova")},
    }
    out.write_text(json.dumps(kept, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
