"""Trains a byte-level language model, on one process or on many: AdamW, warmup and cosine, held-out bits per byte.

    trainer = Trainer.start("runs/mine", model, Corpus.read(["texts"]), TrainConfig(steps=500))
    for record in trainer.run():
        print(record.step, record.bits_per_byte, record.held_out_bits_per_byte)

A step depends on the parameters, the optimizer's moments and (seed, step), all of which a checkpoint holds, so a
resumed run (`Trainer.resume("runs/mine")`) computes what the uninterrupted one would have: on one CPU process, bit for
bit. Under torchrun (`process_group`) all ranks do the same calls, and together compute what one process would, up to
rounding: a run may be resumed on any number of them.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from flash_delta.models import FlashDeltaForCausalLM
from flash_delta.parallel import ContextParallel
from flash_delta.training.batches import IGNORED, Batch
from flash_delta.training.checkpoint import (
    latest_checkpoint,
    load_optimizer,
    load_progress,
    require_checkpoint,
    save_checkpoint,
)
from flash_delta.training.config import Layout, TrainConfig
from flash_delta.training.corpus import Corpus, evaluation_windows, order0_entropy, training_batch
from flash_delta.training.figures import loss_figure
from flash_delta.training.parameter_groups import parameter_groups
from flash_delta.training.ranks import Ranks

NATS_PER_BIT = math.log(2)


@dataclass(frozen=True)
class Record:
    """One training step. Its bits per byte are those of its own batch, before its update."""

    step: int  # counted from 1
    bits_per_byte: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    held_out_bits_per_byte: float | None = None  # None where the step did not end with an evaluation
    peak_gb: float | None = None  # of the run so far, on the GPU that took most; with an evaluation, None without GPUs


@dataclass
class Trainer:
    """One run: a model, its optimizer, and how far they are. Make it with `start` or `resume`, on every rank."""

    folder: Path
    model: PreTrainedModel
    corpus: Corpus
    config: TrainConfig
    layout: Layout = field(default_factory=Layout)
    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0  # spent training and evaluating

    def __post_init__(self):
        self.ranks = Ranks.of(self.layout, self.model.device)
        self.ranks.require_same("paths", self.corpus.digest)
        passes = self.ranks.rows * self.layout.accumulate
        if self.config.batch_size % passes:
            expected = f"a multiple of {passes} ({self.ranks.rows} ranks with rows of their own, {self.layout})"
            raise ValueError(f"batch_size: expected {expected}, got {self.config.batch_size}")
        self._rows_per_pass = self.config.batch_size // passes
        evaluation = partial(evaluation_windows, count=self.config.eval_windows, seq_len=self.config.seq_len)
        self._held_out = self._batch(evaluation(self.corpus.held_out), evaluation(self.corpus.held_out_begins))
        self._next_batch()  # refuses a corpus that is too short before the first step
        self._dtype = getattr(torch, self.config.dtype)
        self.ranks.distribute(self.model, self._dtype)
        if self.layout.activation_checkpointing:
            # transformers renamed it, and warns of the old name where it has the new one
            name = "activation_checkpointing_enable"
            getattr(self.model, name if hasattr(self.model, name) else "gradient_checkpointing_enable")()
        self.optimizer = _adamw(self.model, self.config)

    @classmethod
    def start(
        cls,
        folder: str | Path,
        model: PreTrainedModel,
        corpus: Corpus,
        config: TrainConfig,
        layout: Layout | None = None,
    ) -> "Trainer":
        if checkpoint := latest_checkpoint(folder):
            raise ValueError(f"folder: expected one without a run, got {folder} with {checkpoint.name}: resume it")
        return cls(Path(folder), model, corpus, config, layout or Layout())

    @classmethod
    def resume(cls, folder: str | Path, device: str | torch.device = "cpu", layout: Layout | None = None) -> "Trainer":
        checkpoint = require_checkpoint(folder)
        progress = load_progress(checkpoint)
        corpus = Corpus.read(progress["paths"])
        if corpus.digest != progress["corpus_digest"]:
            raise ValueError(f"corpus: expected the bytes that {folder} started with, got others from {corpus.name}")
        model = FlashDeltaForCausalLM.from_pretrained(checkpoint).to(device)
        records = [Record(**record) for record in progress["records"]]
        config = TrainConfig(**progress["config"])
        trainer = cls(Path(folder), model, corpus, config, layout or Layout(), records, progress["seconds"])
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
                record = replace(record, held_out_bits_per_byte=self.evaluate(), peak_gb=self._peak_gb())
            self.records.append(record)
            self.seconds += time.perf_counter() - began
            if last or record.step % self.config.checkpoint_every == 0:
                self._save()
            yield record

    @torch.no_grad()
    def evaluate(self) -> float:
        """Bits per byte over the held-out windows; a sequence's first byte is read, not predicted."""
        self.model.eval()
        parts = self.ranks.own(self._held_out).split(self._rows_per_pass)
        return self.ranks.sum(sum(map(self._nats, parts))) / self._held_out.count / NATS_PER_BIT

    def _train_step(self) -> Record:
        began = time.perf_counter()
        learning_rate = self.config.learning_rate_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        batch = self._next_batch()
        self.model.train()
        nats = torch.zeros((), dtype=torch.float64, device=self.model.device)
        for part in self.ranks.own(batch).split(self._rows_per_pass):
            loss = self._nats(part) / batch.count
            (loss * self.ranks.size).backward()  # the gradients' mean over all ranks is their losses' sum's
            nats += loss.detach()
        norm = self._clip_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        bits = self.ranks.sum(nats) / NATS_PER_BIT
        return Record(self.step + 1, bits, learning_rate, norm, batch.tokens.numel() / (time.perf_counter() - began))

    def _next_batch(self) -> Batch:
        config = self.config
        draw = partial(
            training_batch, batch_size=config.batch_size, seq_len=config.seq_len, seed=config.seed, step=self.step
        )
        return self._batch(draw(self.corpus.train), draw(self.corpus.train_begins))

    def _batch(self, windows: Tensor, begins: Tensor) -> Batch:
        return Batch.of(windows, begins if self.config.packed else None)

    def _nats(self, batch: Batch) -> Tensor:
        """The sum of -ln p over a batch's targets, over those of this rank's tokens if ranks share them."""
        tokens, targets, device, where = batch.tokens, batch.targets, self.model.device, {}
        if self.ranks.cp is not None:
            where["cp_context"] = context = ContextParallel(self.ranks.cp, batch.bounds)
            tokens, targets = (context.shard(x.reshape(1, -1)) for x in (tokens, targets))
        elif self.config.packed:
            where["cu_seqlens"] = torch.tensor(batch.bounds).to(device)
            tokens, targets = tokens.reshape(1, -1), targets.reshape(1, -1)
        with torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32):
            logits = self.model(input_ids=tokens.to(device), use_cache=False, **where).logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        return F.cross_entropy(logits, targets.to(device).flatten(), ignore_index=IGNORED, reduction="sum")

    def _clip_gradients(self) -> float:
        """Of all ranks, to the configured norm; returns what it was.

        A gradient that is not finite ends the run here, before it reaches the parameters and the checkpoint.
        """
        parameters = list(self.model.parameters())
        norm = get_total_norm(p.grad for p in parameters if p.grad is not None)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not norm.isfinite():
            raise RuntimeError(f"step {self.step + 1}: expected gradients of a finite norm, got {norm.item()}")
        clip_grads_with_norm_(parameters, self.config.grad_clip, norm)
        return norm.item()

    def _peak_gb(self) -> float | None:
        device = self.model.device
        if device.type != "cuda":
            return None
        return self.ranks.max(torch.tensor(torch.cuda.max_memory_allocated(device), device=device)) / 1e9

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
        if self.ranks.first:
            (self.folder / "history.json").write_text(json.dumps(records, indent=1))
            loss_figure(records, order0_entropy(self.corpus.held_out)).savefig(self.folder / "loss.png", dpi=150)


def _adamw(model: PreTrainedModel, config: TrainConfig) -> torch.optim.AdamW:
    groups = parameter_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))
