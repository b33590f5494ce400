"""Why an H100 read the last token of some rows of Gemma otherwise than a CPU: the same numbers on a CPU with its fault.

    python -m experiments.gpu.last_token GEMMA GPU [--out FILE]

GEMMA is the model, GPU the file that `sinkscope circuit GEMMA --json` wrote on the device. The share of each spike
that the last of 1,024 copies has is read on a CPU as it is, and with the fault of PyTorch's memory-efficient attention.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import sinkscope as ss
from experiments.record import Row, write_record
from experiments.script import run


@contextmanager
def faulty_attention() -> Iterator[None]:
    """Context manager in which SDPA does on a CPU what the memory-efficient one does on a GPU (pytorch/pytorch#191937).

    Where query heads share one head of keys, a mask is given, and a single query is left of blocks of 32, that query
    sees what the mask shows to the first one.
    """
    stock = functional.scaled_dot_product_attention

    def faulty(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **rest: Any) -> Tensor:
        right = stock(query, key, value, attn_mask, **rest)
        if attn_mask is None or query.shape[2] % 32 != 1 or key.stride(1) or value.stride(1):
            return right
        return torch.cat([right[:, :, :-1], stock(query[:, :, -1:], key, value, attn_mask[:, :, :1], **rest)], 2)

    functional.scaled_dot_product_attention = faulty  # pyright: ignore[reportPrivateImportUsage]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = stock  # pyright: ignore[reportPrivateImportUsage]


def shares(text: str) -> list[float]:
    """What the last copy of each token has of each spike, from the JSON of a circuit."""
    return [copies["last"] for spike in json.loads(text)["result"]["spikes"] for copies in spike["copies"]]


def main(gemma: Path, gpu: Path, *, out: Path = Path("experiments/gpu/measured/h100/last_token.json")) -> None:
    """Make what the module describes."""
    model = ss.load(gemma, device="cpu", dtype="float32")
    rows: Row = {"gpu": shares(gpu.read_text()), "cpu": shares(ss.circuit(model).to_json())}
    with faulty_attention():
        rows["cpu with the fault"] = shares(ss.circuit(model).to_json())
    for name in ("cpu", "cpu with the fault"):
        difference = torch.tensor(rows[name]) - torch.tensor(rows["gpu"])
        rows[f"largest difference, {name}"] = float(difference.abs().max())
    write_record(out, "gpu-last-token", rows, {"model": "gemma-3-270m"})


if __name__ == "__main__":
    run(main)
