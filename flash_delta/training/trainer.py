"""Trains a byte-level language model on one device: AdamW, warmup and cosine, held-out bits per byte, checkpoints.

    trainer = Trainer.start("runs/mine", model, Corpus.read(["texts"]), TrainConfig(steps=500))
    for record in trainer.run():
        print(record.step, record.bits_per_byte, record.held_out_bits_per_byte)

A step depends on the parameters, the optimizer's moments and (seed, step), all of which a checkpoint holds, so a
resumed run (`Trainer.resume("runs/mine")`) computes what the uninterrupted one would have: on the CPU, bit for bit.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from flash_delta.models import FlashDeltaForCausalLM
from flash_delta.training.checkpoint import (
    latest_checkpoint,
    load_optimizer,
    load_progress,
    require_checkpoint,
    save_checkpoint,
)
from flash_delta.training.corpus import Corpus, evaluation_windows, order0_entropy, training_batch
from flash_delta.training.figures import loss_figure

NATS_PER_BIT = math.log(2)


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 500
    batch_size: int = 8
    seq_len: int = 256
    learning_rate: float = 3e-3  # the peak; the cosine ends at a tenth of it
    warmup_steps: int = 20
    weight_decay: float = 0.1  # of matrices only
    grad_clip: float = 1.0
    seed: int = 0
    eval_every: int = 100
    eval_windows: int = 256  # of seq_len held-out bytes each
    checkpoint_every: int = 100

    def __post_init__(self):
        at_least_1 = ("steps", "batch_size", "eval_every", "eval_windows", "checkpoint_every")
        least = dict.fromkeys(at_least_1, 1) | {"seq_len": 2, "warmup_steps": 0, "weight_decay": 0, "seed": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name}: expected at least {bound}, got {getattr(self, name)}")
        for name in ("learning_rate", "grad_clip"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: expected more than 0, got {getattr(self, name)}")

    def learning_rate_at(self, step: int) -> float:
        """Of the step after `step` steps: linear warmup to the peak, then a cosine down to a tenth of it."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


@dataclass(frozen=True)
class Record:
    """One training step. Its bits per byte are those of its own batch, before its update."""

    step: int  # counted from 1
    bits_per_byte: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    held_out_bits_per_byte: float | None = None  # None where the step did not end with an evaluation


@dataclass
class Trainer:
    """One run: a model, its optimizer, and how far they are. Make it with `start` or `resume`."""

    folder: Path
    model: PreTrainedModel
    corpus: Corpus
    config: TrainConfig
    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0  # spent training and evaluating

    def __post_init__(self):
        self.optimizer = _adamw(self.model, self.config)
        self._held_out = evaluation_windows(self.corpus.held_out, self.config.eval_windows, self.config.seq_len)
        self._next_batch()  # refuses a corpus that is too short before the first step

    @classmethod
    def start(cls, folder: str | Path, model: PreTrainedModel, corpus: Corpus, config: TrainConfig) -> "Trainer":
        if checkpoint := latest_checkpoint(folder):
            raise ValueError(f"folder: expected one without a run, got {folder} with {checkpoint.name}: resume it")
        return cls(Path(folder), model, corpus, config)

    @classmethod
    def resume(cls, folder: str | Path, device: str | torch.device = "cpu") -> "Trainer":
        checkpoint = require_checkpoint(folder)
        progress = load_progress(checkpoint)
        corpus = Corpus.read(progress["paths"])
        if corpus.digest != progress["corpus_digest"]:
            raise ValueError(f"corpus: expected the bytes that {folder} started with, got others from {corpus.name}")
        model = FlashDeltaForCausalLM.from_pretrained(checkpoint).to(device)
        records = [Record(**record) for record in progress["records"]]
        trainer = cls(Path(folder), model, corpus, TrainConfig(**progress["config"]), records, progress["seconds"])
        load_optimizer(checkpoint, trainer.optimizer)
        return trainer

    @property
    def step(self) -> int:
        return len(self.records)

    def run(self) -> Iterator[Record]:
        """Trains to the last step, yielding each step's record after its evaluation and checkpoint."""
        while self.step < self.config.steps:
            began = time.perf_counter()
            record = self._train_step()
            last = record.step == self.config.steps
            if last or record.step % self.config.eval_every == 0:
                record = replace(record, held_out_bits_per_byte=self.evaluate())
            self.records.append(record)
            self.seconds += time.perf_counter() - began
            if last or record.step % self.config.checkpoint_every == 0:
                self._save()
            yield record

    @torch.no_grad()
    def evaluate(self) -> float:
        """Bits per byte over the held-out windows; a window's first byte is read, not predicted."""
        self.model.eval()
        batches = self._held_out.split(self.config.batch_size)
        return sum(self._loss(batch).item() * len(batch) for batch in batches) / len(self._held_out) / NATS_PER_BIT

    def _train_step(self) -> Record:
        began = time.perf_counter()
        learning_rate = self.config.learning_rate_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        batch = self._next_batch()
        self.model.train()
        loss = self._loss(batch)
        loss.backward()
        # A gradient that is not finite ends the run here, before it reaches the parameters and the checkpoint.
        norm = clip_grad_norm_(self.model.parameters(), self.config.grad_clip, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        bits, norm = loss.item() / NATS_PER_BIT, norm.item()
        return Record(self.step + 1, bits, learning_rate, norm, batch.numel() / (time.perf_counter() - began))

    def _next_batch(self) -> torch.Tensor:
        config = self.config
        return training_batch(self.corpus.train, config.batch_size, config.seq_len, seed=config.seed, step=self.step)

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.to(self.model.device)
        return self.model(input_ids=batch, labels=batch).loss

    def _save(self) -> None:
        records = [asdict(record) for record in self.records]
        progress = {
            "step": self.step,
            "seconds": self.seconds,
            "config": asdict(self.config),
            "paths": self.corpus.paths,
            "corpus_digest": self.corpus.digest,
            "records": records,
        }
        save_checkpoint(self.folder, self.step, self.model, self.optimizer, progress)
        (self.folder / "history.json").write_text(json.dumps(records, indent=1))
        loss_figure(records, order0_entropy(self.corpus.held_out)).savefig(self.folder / "loss.png", dpi=150)


def _adamw(model: PreTrainedModel, config: TrainConfig) -> torch.optim.AdamW:
    """Decays matrices; not norms, biases and gate parameters (A_log, dt_bias), which all have one dimension."""
    parameters = list(model.named_parameters())
    matrices = [(name, p) for name, p in parameters if p.dim() > 1]
    vectors = [(name, p) for name, p in parameters if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))
