"""Whether this device's attention misreads the last token of a row, and whether `sinkscope.load` then avoids it.

    python -m experiments.gpu.fault [--device cuda] [--out FILE]

PyTorch's memory-efficient attention is wrong there where all query heads share one head of keys, under a mask
(pytorch/pytorch#191937). A model with the sizes of Gemma 3 270M, its small vocabulary and weights apart, which are
random, reads rows of 1,024 and 1,025 tokens: as transformers runs it, and as `load` opens its folder.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import sinkscope as ss
from experiments.gpu.steps import Steps
from experiments.record import Row
from experiments.script import run
from sinkscope.opening.live import misreads_last_query

PACKAGED = Path(ss.__file__).parent / "models/bundled"
SIZES = {"hidden_size": 640, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 1}
VOCAB = 2048


def made(layers: int) -> Gemma3ForCausalLM:
    """A random model whose query heads share one head of keys."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **SIZES, num_hidden_layers=layers, head_dim=256, sliding_window=512, vocab_size=VOCAB, initializer_range=0.1
    )
    return Gemma3ForCausalLM(config).eval()


def last_logits(model: Any, length: int, device: str) -> torch.Tensor:
    """Logits of the last token of a row, in float32 on a CPU."""
    ids = torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    return model(input_ids=ids, use_cache=False).logits[0, -1].float().cpu()


@torch.no_grad()
def read(layers: int, device: str, dtype: str) -> Row:
    """How far the last token is from that of eager attention, as the model runs and as it is opened."""
    model = made(layers)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for file in PACKAGED.glob("tokenizer*"):
            shutil.copy(file, folder)
        opened: Any = ss.load(folder, device=device, dtype=dtype)
        model = model.to(device, getattr(torch, dtype))
        row: Row = {"misreads": misreads_last_query(torch.device(device))}
        row["chosen"] = opened.config._attn_implementation
        for length in (1024, 1025):
            model.set_attn_implementation("eager")
            eager = last_logits(model, length, device)
            model.set_attn_implementation("sdpa")
            for name, one in (("sdpa", model), ("opened", opened)):
                off = (last_logits(one, length, device) - eager).norm() / eager.norm()
                row[f"{name}, {length} tokens"] = float(off)
    tolerated = 1e-3 if dtype == "float32" else 0.1
    row["right"] = (row["chosen"] == "eager") == row["misreads"] and row["opened, 1025 tokens"] < tolerated
    return row


def main(
    *, layers: int = 18, device: str = "cuda", dtype: str = "float32", out: Path = Path("figures/gpu_fault.json")
) -> None:
    """Make what the module describes."""
    steps = Steps("gpu-fault", out, {"layers": layers, "dtype": dtype}, device, dtype)
    steps.do("last token", partial(read, layers, device, dtype))
    steps.end()


if __name__ == "__main__":
    run(main)
