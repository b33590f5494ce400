"""Training with checkpoints. The same seed and number of steps give the same weights, also after a kill."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from experiments.bundled.circuit import Frozen, Plan, make_plan, plant
from experiments.bundled.mixture import Mixture

IGNORED = -100
BLOCK = 128
BOS_ID = 0
SAVED_EVERY = 240  # seconds


def blocked(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention, one block of queries after another over the keys that they may see.

    On a CPU, forward and backward in bfloat16 take 0.4 of what `scaled_dot_product_attention` takes on rows of 512
    tokens: its backward is slow there. Used for training only.

    Args:
        module: of the layer; says how many query heads share a key head.
        query: [row head pos dim], as transformers passes them.
        key: [row kv_head pos dim].
        value: [row kv_head pos dim].
        mask: must be None; rows have no padding.
        scaling: of the scores.

    Returns:
        The output, [row pos head dim], and no pattern.
    """
    assert mask is None
    shared = query.shape[1] // key.shape[1]
    query, key, value = query * scaling, key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=query.device).triu(1)
    parts: list[Tensor] = []
    for start in range(0, query.shape[2], BLOCK):
        end = min(start + BLOCK, query.shape[2])
        scores = query[:, :, start:end] @ key[:, :, :end].mT
        scores[..., start:].masked_fill_(later[: end - start, : end - start], -math.inf)
        parts.append(scores.softmax(-1).to(value.dtype) @ value[:, :, :end])
    return torch.cat(parts, 2).transpose(1, 2), None


AttentionInterface.register("blocked", blocked)


@dataclass(frozen=True)
class Settings:
    """Size of the model and of the training; the defaults are the model that ships."""

    vocab_size: int = 2048
    d_model: int = 192
    n_layers: int = 6
    d_mlp: int = 512
    n_heads: int = 8
    n_kv_heads: int = 4
    head_dim: int = 32
    context: int = 4096
    rope_theta: float = 5e5
    embedding_std: float = 0.5
    weight_std: float = 0.05
    steps: int = 5000
    seed: int = 0
    planted: bool = True
    tokens_per_step: int = 4096
    length: int = 512
    long_length: int = 2048
    long_every: int = 12
    longest_every: int = 48
    bos_share: float = 0.9
    # First nothing but random cycles: mixed into text from the start, copying does not begin. Cycles stay in the
    # mixture afterwards, since copying is lost again on text alone.
    copy_steps: int = 450
    stories: float = 0.47
    python: float = 0.13
    passages: float = 0.22
    cycles: float = 0.12
    facts: float = 0.06
    copy_share: float = 0.1
    learning_rate: float = 3e-3
    # The rate of the first steps made training on text diverge.
    text_rate: float = 1.5e-3
    warmup: int = 100
    decay_share: float = 0.5
    weight_decay: float = 0.1
    bfloat16: bool = True

    def crop(self, step: int) -> int:
        """Mostly short crops of text, some long, a few of the full context, so that late positions are trained too."""
        if step % self.longest_every == self.longest_every - 1:
            return self.context
        if step % self.long_every == self.long_every - 1:
            return self.long_length
        return self.length

    def rate(self, step: int) -> float:
        """Warm-up, constant, lower once text is read, then linear decay to zero over the last part."""
        decay = max(1, round(self.steps * self.decay_share))
        rate = self.text_rate
        if step < self.copy_steps:
            rate = self.learning_rate
        return rate * min(1.0, (step + 1) / self.warmup, (self.steps - step) / decay)

    def shares(self) -> dict[str, float]:
        """How often a row of the mixture is of which kind."""
        return {kind: getattr(self, kind) for kind in ("stories", "python", "passages", "cycles", "facts")}


def _scaled(width: int, rate: float) -> dict[str, float]:
    """What a wider model needs so that copying begins, and so that the planted circuit is the same in it."""
    factor = (Settings.d_model / width) ** 0.5
    scales = {"embedding_std": factor * Settings.embedding_std, "weight_std": factor * Settings.weight_std}
    return {**scales, "learning_rate": rate, "text_rate": rate / 2}


# The family of the model that ships: the same text, tokenizer, seed, planted circuit, heads and number of steps, fewer
# and narrower layers. Three layers is the least at which a head can still read the sink that layer 1 makes.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 64, "n_layers": 3, "d_mlp": 176},
    "small": {"d_model": 128, "n_layers": 4, "d_mlp": 344},
    "base": {},
    "13m": {"d_model": 384, "n_layers": 8, "d_mlp": 1024, **_scaled(384, 1e-3)},
    "48m": {"d_model": 640, "n_layers": 12, "d_mlp": 1728, **_scaled(640, 6e-4)},
    "120m": {"d_model": 960, "n_layers": 16, "d_mlp": 2304, **_scaled(960, 4e-4)},
}


def build(settings: Settings, counts: np.ndarray) -> tuple[LlamaForCausalLM, Plan | None, Frozen | None]:
    """A freshly initialised model; with the circuit planted unless the settings say no."""
    config = LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.d_model,
        intermediate_size=settings.d_mlp,
        num_hidden_layers=settings.n_layers,
        num_attention_heads=settings.n_heads,
        num_key_value_heads=settings.n_kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.context,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        initializer_range=settings.weight_std,
        tie_word_embeddings=False,
        bos_token_id=BOS_ID,
        eos_token_id=BOS_ID + 1,
        pad_token_id=None,
    )
    torch.manual_seed(settings.seed)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0.0, settings.embedding_std)
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.mul_(1 / math.sqrt(2 * settings.n_layers))
    if not settings.planted:
        return model, None, None
    plan = make_plan(
        counts,
        bos_id=BOS_ID,
        d_model=settings.d_model,
        d_mlp=settings.d_mlp,
        n_layers=settings.n_layers,
        seed=settings.seed,
    )
    return model, plan, plant(model, plan, Frozen(model))


def loss_on(model: LlamaForCausalLM, ids: Tensor, scored: Tensor | None = None) -> Tensor:
    """Mean next-token loss, without what the first position predicts (there the sink itself would have to answer).

    Args:
        model: the model.
        ids: token ids, [row pos].
        scored: which tokens count, [row pos]; all by default.

    Returns:
        The loss in nats per token.
    """
    hidden = model.model(ids, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[:, 1:-1]).float()
    if scored is None:
        targets = ids[:, 2:]
    else:
        targets = ids[:, 2:].masked_fill(~scored[:, 2:], IGNORED)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


class Trainer:
    """One training run: model, optimiser, position in it, and the folder of its checkpoint."""

    def __init__(
        self,
        settings: Settings,
        texts: Mapping[str, np.ndarray],
        out: Path,
        device: str = "cpu",
    ) -> None:
        self.settings = settings
        self.out = out
        self.device = torch.device(device)
        self.mixture = Mixture(
            texts,
            settings.shares(),
            vocab_size=settings.vocab_size,
            bos_id=BOS_ID,
            bos_share=settings.bos_share,
            copy_share=settings.copy_share,
        )
        counts = sum(np.bincount(tokens, minlength=settings.vocab_size) for tokens in texts.values())
        self.model, self.plan, self.frozen = build(settings, np.asarray(counts))
        self.model.to(self.device)
        if self.device.type == "cpu":
            self.model.set_attn_implementation("blocked")
        if self.frozen:
            self.frozen.to(self.device)
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.model.parameters() if parameter.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            lr=settings.learning_rate,
        )
        self.step = 0

    def train_step(self) -> float:
        """One optimiser step; returns its loss."""
        settings = self.settings
        step = self.step
        if step < settings.copy_steps:
            ids, scored = self.mixture.copies(settings.seed, step, tokens=settings.tokens_per_step)
        else:
            length = settings.crop(step)
            rows = max(1, settings.tokens_per_step // length)
            ids, scored = self.mixture.text(settings.seed, step, rows=rows, length=length)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.rate(step)
        self.optimizer.zero_grad(set_to_none=True)
        crops = torch.from_numpy(ids).to(self.device)
        counted = torch.from_numpy(scored).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=settings.bfloat16):
            loss = loss_on(self.model, crops, counted)
        loss.backward()
        if self.frozen:
            self.frozen.mask_gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.frozen:
            self.frozen.impose()
        self.step += 1
        return loss.item()

    def save(self) -> None:
        """Written beside and renamed: a kill never leaves half a checkpoint."""
        beside = self.out / "checkpoint.pt.new"
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "settings": self._identity(),
        }
        torch.save(state, beside)
        os.replace(beside, self.out / "checkpoint.pt")

    def load(self) -> None:
        """Go on from the checkpoint, which must have been made with the same settings."""
        state = torch.load(self.out / "checkpoint.pt", weights_only=True, map_location=self.device)
        if state["settings"] != self._identity():
            raise SystemExit(
                "error: the checkpoint was made with other settings; choose another --out or drop --resume"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def _identity(self) -> str:
        # The number of steps may grow while the rate is still constant, so it is not part of what must agree.
        return json.dumps({k: v for k, v in asdict(self.settings).items() if k != "steps"}, sort_keys=True)

    def run(self, each: Callable[[int, float], None]) -> None:
        """Train to the end, with a call of `each(step, loss)` after each step; an interruption keeps what was done."""
        saved = time.monotonic()
        self.model.train()
        try:
            while self.step < self.settings.steps:
                loss = self.train_step()
                each(self.step, loss)
                if time.monotonic() - saved > SAVED_EVERY:
                    self.save()
                    saved = time.monotonic()
        finally:
            self.save()
