"""Sample stories from a story model: simple English for the bundled model to learn from.

`python -m experiments.bundled.stories --teacher FOLDER|NAME --out FILE --tokens N [--seed 0]`

Stories are appended to FILE, each followed by a line `<|end|>`. A story that the teacher does not end within its own
context is left out. Run the command again to resume after an interruption, or with a larger N for more stories.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from experiments.script import run

MARK = "\n<|end|>\n"
ROWS = 64  # of a batch
TEMPERATURE = 0.8  # of sampling, without top-k or top-p


def read_stories(file: Path) -> list[str]:
    """The finished stories of a file; text after the last mark belongs to a story that was never finished."""
    if not file.exists():
        return []
    return [story.strip() for story in file.read_bytes().decode().split(MARK)[:-1]]


def marked(stories: list[str]) -> str:
    """Stories as they stand in the file."""
    return "".join(story + MARK for story in stories)


@torch.no_grad()
def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, rows: int, seed: int) -> list[str]:
    """Sample one batch and keep the stories that the model ended itself.

    Args:
        model: any causal language model whose text starts after BOS (or after EOS where it has no BOS).
        tokenizer: its tokenizer.
        rows: size of the batch.
        seed: of this batch.

    Returns:
        The stories, without special tokens. A story ends at EOS or at the BOS of a next story.
    """
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id} - {None}
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ids = torch.full((rows, 1), start, device=model.device)
    torch.manual_seed(seed)
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        eos_token_id=sorted(special),
        pad_token_id=start,
        max_length=model.config.max_position_embeddings,
    )
    texts: list[str] = []
    for row in made[:, 1:].tolist():
        ends = [place for place, token in enumerate(row) if token in special]
        text = tokenizer.decode(row[: min(ends, default=0)]).strip()
        if text and MARK.strip() not in text:
            texts.append(text)
    return texts


def main(
    *,
    teacher: str,
    out: Path,
    tokens: int,
    seed: int = 0,
) -> None:
    """Make what the module describes.

    Args:
        teacher: Folder or hub id of a model that writes stories.
        out: File to which stories are appended.
        tokens: Size of the file, in tokens of the teacher.
    """
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()

    def size(stories: list[str]) -> int:
        return sum(len(tokenizer(story, add_special_tokens=False)["input_ids"]) for story in stories)

    kept = read_stories(out)
    count = len(kept)
    written = size(kept)
    out.write_text(marked(kept), encoding="utf-8")
    with out.open("a", encoding="utf-8") as file:
        while written < tokens:
            # The number of stories so far names the batch, so a run that was interrupted goes on with the same ones.
            drawn = int(np.random.SeedSequence([seed, count]).generate_state(1)[0])
            stories = sample(model, tokenizer, rows=ROWS, seed=drawn)
            if not stories:
                raise SystemExit("error: no sampled story ended; the teacher does not write whole stories")
            file.write(marked(stories))
            file.flush()
            count, written = count + len(stories), written + size(stories)


if __name__ == "__main__":
    run(main)
