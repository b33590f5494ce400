"""GGUF files as sinkscope reads them, beside a llama.cpp server, which is independent of transformers.

    python -m experiments.gguf_truth FILE ... --server PROGRAM [--out figures/gguf_truth.json]

Of each file, and of float32 copies of it to which each scaling of rope was added (none, linear, yarn, factors of a
tensor): the log probabilities of the five likeliest next tokens behind texts of several lengths.
`docs/what_to_try.md` says how to get the server. A row says how far ours are from the server's, in nats, and how often
the likeliest token is the same; and both for what transformers makes of the file alone. The server computes in the
arithmetic of the file: with 4 bits, equal models are .1 to .3 nats apart.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import torch

from experiments.record import Row, record
from experiments.script import run
from sinkscope.files.output import write_atomic
from sinkscope.models.text import typical_text
from sinkscope.opening.load import load

LENGTHS = (16, 64, 256, 700)
TEXTS, LIKELIEST = 1, 5
FACTOR, TRAINED = 4.0, 256


def linear(writer: Any, arch: str, half: int) -> None:
    """Add linear scaling."""
    writer.add_string(f"{arch}.rope.scaling.type", "linear")
    writer.add_float32(f"{arch}.rope.scaling.factor", FACTOR)


def yarn(writer: Any, arch: str, half: int) -> None:
    """Add yarn."""
    writer.add_string(f"{arch}.rope.scaling.type", "yarn")
    writer.add_float32(f"{arch}.rope.scaling.factor", FACTOR)
    writer.add_uint32(f"{arch}.rope.scaling.original_context_length", TRAINED)


def frequencies(writer: Any, arch: str, half: int) -> None:
    """Add a factor for each rotary pair."""
    writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, half, dtype=np.float32))


def nothing(writer: Any, arch: str, half: int) -> None:
    """Add nothing."""


SCALINGS: dict[str, Callable[[Any, str, int], None] | None] = {
    "as it is": None,
    "float32": nothing,
    "linear": linear,
    "yarn": yarn,
    "factors": frequencies,
}


def copy(file: Path, out: Path, change: Callable[[Any, str, int], None]) -> None:
    """Copy a GGUF file in float32, with fields and tensors added."""
    reader = gguf.GGUFReader(str(file))
    arch = reader.fields["general.architecture"].contents()
    heads = reader.fields[f"{arch}.attention.head_count"].contents()
    width = reader.fields.get(f"{arch}.attention.key_length")
    size = width.contents() if width else reader.fields[f"{arch}.embedding_length"].contents() // heads
    writer = gguf.GGUFWriter(str(out), arch)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, inner)
    change(writer, arch, size // 2)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextmanager
def serving(program: Path, file: Path) -> Iterator[str]:
    """The address of a llama.cpp server of a file."""
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    words = [str(program), "-m", str(file), "--port", str(port), "-c", "1024", "-np", "1", "-t", "1"]
    words += ["-fa", "off", "-ctk", "f32", "-ctv", "f32"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(program.parent)}
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise ChildProcessError(f"the server ends with status {process.returncode} on {file.name}")
            with suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                    break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def likeliest(address: str, ids: Sequence[int]) -> dict[int, float]:
    """The log probabilities of the likeliest tokens behind ids, as the server says."""
    body = {"prompt": list(ids), "n_predict": 1, "n_probs": LIKELIEST, "temperature": 0, "cache_prompt": False}
    answer = httpx.post(f"{address}/completion", json=body, timeout=600, trust_env=False).json()
    return {one["id"]: one["logprob"] for one in answer["completion_probabilities"][0]["top_logprobs"]}


@torch.no_grad()
def distance(model: Any, prompts: Sequence[Sequence[int]], truth: Sequence[dict[int, float]]) -> Row:
    """How far a model is from what the server says."""
    nats: list[float] = []
    same: list[bool] = []
    for ids, said in zip(prompts, truth, strict=True):
        logits = model(torch.tensor([list(ids)])).logits[0, -1].float().log_softmax(-1)
        nats += [abs(float(logits[token]) - value) for token, value in said.items()]
        same.append(int(logits.argmax()) == max(said, key=lambda token: said[token]))
    return {"nats": round(statistics.fmean(nats), 4), "most": round(max(nats), 4), "same": statistics.fmean(same)}


def of_file(file: Path, program: Path) -> Row:
    """What the server says of a file beside our reading of it, and transformers'."""
    from transformers import AutoModelForCausalLM

    model = load(str(file), dtype="float32", device="cpu")
    text = model.tokenizer(typical_text(), verbose=False)["input_ids"]
    prompts = [text[:1] + text[1 + place * 800 :][: length - 1] for length in LENGTHS for place in range(TEXTS)]
    with serving(program, file) as address:
        truth = [likeliest(address, ids) for ids in prompts]
    plain = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return {"prompts": len(prompts), "read": distance(model, prompts, truth), "alone": distance(plain, prompts, truth)}


def main(files: Sequence[Path], *, server: Path, out: Path = Path("figures/gguf_truth.json")) -> None:
    """Make what the module describes.

    Args:
        files: GGUF files.
        server: The program llama-server.
        out: The JSON.
    """
    result: Row = {}
    for file in files:
        for name, change in SCALINGS.items():
            with tempfile.TemporaryDirectory() as folder:
                made = file
                if change is not None:
                    made = Path(folder, file.name)
                    copy(file, made, change)
                try:
                    result[f"{file.stem}, {name}"] = of_file(made, server)
                except ChildProcessError as error:  # llama.cpp has no such tensor for Gemma
                    result[f"{file.stem}, {name}"] = {"refused": str(error)}
            print(f"{file.stem}, {name}", result[f"{file.stem}, {name}"], flush=True)
            write_atomic(out, record("gguf-truth", result, {"factor": FACTOR, "trained": TRAINED}))


if __name__ == "__main__":
    run(main)
