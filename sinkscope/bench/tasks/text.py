"""Fidelity on text: how close a method stays to full attention along the same tokens.

Every method reads the same prompt and is then fed the text's own continuation token by token, whatever it would have
generated itself.

- kl: sum of p (log p - log q) over the vocabulary, in nats; p of full attention, q of the method, at every token. The
  first one depends on the prompt alone: it is 0 if a method does not change prompts.
- agree: both have the same top prediction at that token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.bench.answer import Batch, Logits, answer_rows, conversation_ids
from sinkscope.bench.methods import make_method
from sinkscope.bench.record import Answer, BenchRecord, Metrics, Prompt, Turn, read_prompts
from sinkscope.bench.task import Size, Task
from sinkscope.errors import SinkscopeError
from sinkscope.generation.decode import to_end
from sinkscope.kv import Full
from sinkscope.models.inputs import end_ids
from sinkscope.models.target import Target, tokenizer_of
from sinkscope.models.text import typical_text


@dataclass(frozen=True, kw_only=True)
class TextFidelity(Task):
    """Divergence from full attention along a text.

    Attributes:
        count: Number of consecutive pieces of the typical text.
        prompt: Tokens of each prompt; fewer if the context or the text is shorter.
        answer: Tokens that follow and are compared.
        source: File of prompts with answers to read instead of the typical text.
    """

    name = "text"
    main = "kl"
    low_is_good = True
    unit = "KL to full, nats"
    share = False
    control = "random"
    columns = ("agree", "first")
    together = True

    count: Size = 4
    prompt: Size = 768
    answer: Size = 32
    source: str = ""

    def prompts_of_file(self) -> list[Prompt] | None:
        """Return the prompts of the source."""
        return read_prompts(self.source) if self.source else None

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts of several turns, and those without a text to compare along.

        Raises:
            SinkscopeError: The first such prompt is named.
        """
        super().check(prompts)
        for prompt in prompts:
            count = len(prompt.turns)
            if count > 1:
                raise SinkscopeError(
                    f"prompt {prompt.id!r} has {count} turns, and --task text compares along one answer: give prompts "
                    "of one turn"
                )
            if not "".join(prompt.turns[0].answers[:1]).strip():
                raise SinkscopeError(f"prompt {prompt.id!r} has no answer to compare along: give a text")

    def prompts(self, target: Target) -> list[Prompt]:
        """Return consecutive pieces of the text."""
        if self.source:
            return read_prompts(self.source)
        tokenizer = tokenizer_of(target)
        ids = tokenizer(typical_text(), add_special_tokens=False, verbose=False)["input_ids"]
        n_tokens = min(target.max_positions or len(ids), len(ids) // self.count + 2)
        length = min(self.prompt, n_tokens - 2 - self.answer)
        if length < 1:
            raise SinkscopeError(f"count={self.count}: the text has {len(ids)} tokens; give fewer or shorter pieces")
        prompts: list[Prompt] = []
        for number in range(self.count):
            piece = ids[number * (length + self.answer) :]
            answer = tokenizer.decode(piece[length : length + self.answer])
            turn = Turn(tokenizer.decode(piece[:length]), (answer,))
            prompts.append(Prompt(f"text-{number}", (turn,), "text"))
        return prompts

    def new_tokens(self, target: Target) -> int:
        """Return the length of the continuation."""
        return self.answer

    def answers(self, target: Target, batch: Batch) -> list[BenchRecord]:
        """Run full attention, and every method along its answers."""
        rows = [conversation_ids(target, prompt, 0, self.chat) for prompt in batch.prompts]
        along: list[list[int]] = []  # the text after each prompt
        for prompt in batch.prompts:
            text = "".join(prompt.turns[0].answers[:1])
            ids = target.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if not ids:
                raise SinkscopeError(f"prompt {prompt.id!r} has no answer to compare along: give a text")
            along.append(to_end(list(ids[: batch.new]), end_ids(target)))
        full: list[Logits] = []
        answer_rows(target, rows, batch.new, Full(), along=along, logits=full)
        records: list[BenchRecord] = []
        for method in batch.methods:
            of_method: list[Logits] = []
            answers = answer_rows(target, rows, batch.new, make_method(method) or Full(), along=along, logits=of_method)
            steps = torch.stack([comparison(*both) for both in zip(full, of_method, strict=True)]).round(decimals=6)
            for row, (prompt, answer) in enumerate(zip(batch.prompts, answers, strict=True)):
                kl, agree = steps[: len(answer.tokens), :, row].T.tolist()
                answer = replace(answer, steps={"kl": tuple(kl), "agree": tuple(agree)})
                records.append(batch.record(method, prompt, 0, answer, mean_metrics(answer)))
        return records


def mean_metrics(answer: Answer) -> Metrics:
    """Return means over the steps from the first on that left something out; over all, if none did.

    The first token comes from the prompt, and some policies then read everything for a while. Those steps lose nothing,
    unless the prompt itself was read along lines.
    """
    begin = 0
    if answer.metrics["cells"] is None:
        begin = int(answer.metrics["first_lossy"] or 0)
    metrics: Metrics = {"first": answer.steps["kl"][0]}
    for name, values in answer.steps.items():
        metrics[name] = fmean(values[begin:])
    return metrics


def comparison(full: Logits, other: Logits) -> Float[Tensor, "2 row"]:
    """Return KL(full || other) between two rows of logits, in nats, and whether both have the same top prediction."""
    p, q = full.cpu().double().log_softmax(-1), other.cpu().double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).clamp(min=0)
    return torch.stack([kl, (full.argmax(-1) == other.argmax(-1)).cpu().double()])
