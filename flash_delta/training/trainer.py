"""Trains a byte-level language model in one process or in many, by AdamW with warmup and cosine.

    trainer = Trainer.start("runs/mine", model, Corpus.read(["texts"]), TrainConfig(steps=500))
    for record in trainer.run():
        print(record.step, record.bits_per_byte, record.held_out_bits_per_byte)

A step depends on the parameters, the optimizer's moments and (seed, step). A checkpoint has all of these. So a resumed
run (`Trainer.resume("runs/mine")`) computes the same as an uninterrupted run, in one CPU process bit for bit. Under
torchrun (`process_group`) all ranks make the same calls. Together they compute the same as one process, up to rounding.
So a run may be resumed on any number of ranks.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from flash_delta.parallel import ContextParallel
from flash_delta.training.batches import IGNORED, Batch
from flash_delta.training.checkpoint import checkpoint_folder, latest_checkpoint, require_checkpoint
from flash_delta.training.claim import claim_folder
from flash_delta.training.config import Layout, TrainConfig
from flash_delta.training.corpus import Corpus, evaluation_windows, training_batch
from flash_delta.training.loading import first_not_finite, load_model, load_optimizer
from flash_delta.training.parameter_groups import parameter_groups
from flash_delta.training.ranks import Ranks
from flash_delta.training.run import Diverged, Record, Run
from flash_delta.training.saving import moments_of, save_run

NATS_PER_BIT = math.log(2)


@dataclass
class Trainer:
    """One run: a model, its optimizer, and the steps so far. Make it with `start` or `resume`, on every rank."""

    folder: Path
    model: PreTrainedModel
    corpus: Corpus
    config: TrainConfig
    layout: Layout = field(default_factory=Layout)
    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0  # spent training and evaluating
    keep: int = 2  # how many checkpoints are kept, the newest ones

    def __post_init__(self):
        if self.keep < 1:
            raise ValueError(f"keep: expected at least 1, got {self.keep}")
        self.stopped_by = 0  # the signal that ended `run` before its last step
        self._newest = checkpoint_folder(self.folder, self.step) if self.records else None
        self.ranks = Ranks.of(self.layout, self.model.device)
        self.ranks.require_same("paths", self.corpus.digest)
        passes = self.ranks.rows * self.layout.accumulate
        if self.config.batch_size % passes:
            expected = f"a multiple of {passes} ({self.ranks.rows} ranks with rows of their own, {self.layout})"
            raise ValueError(f"batch_size: expected {expected}, got {self.config.batch_size}")
        self._rows_per_pass = self.config.batch_size // passes
        evaluation = partial(evaluation_windows, count=self.config.eval_windows, seq_len=self.config.seq_len)
        self._held_out = self._batch(evaluation(self.corpus.held_out), evaluation(self.corpus.held_out_begins))
        self._next_batch()  # raises an error now if the corpus is too short
        self._dtype = getattr(torch, self.config.dtype)
        self.ranks.distribute(self.model, self._dtype)
        if self.layout.activation_checkpointing:
            # transformers renamed this method; new versions warn about the old name
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
        keep: int = 2,
    ) -> "Trainer":
        if checkpoint := latest_checkpoint(folder):
            raise ValueError(f"folder: expected a folder without a run, got {folder} with {checkpoint.name}: resume it")
        return cls(Path(folder), model, corpus, config, layout or Layout(), keep=keep)

    @classmethod
    def resume(
        cls,
        folder: str | Path,
        device: str | torch.device = "cpu",
        layout: Layout | None = None,
        keep: int = 2,
        steps: int | None = None,
        learning_rate: float | None = None,
    ) -> "Trainer":
        """Continues from the newest checkpoint, on the text that the run started with.

        Args:
            steps: the new total number of steps, at least those already done. None: as before.
            learning_rate: another peak for the following steps. None: as before. See `TrainConfig.learning_rate_at`.
        """
        checkpoint, run = require_checkpoint(folder), Run.read(folder).going_on(steps, learning_rate)
        corpus = Corpus.read(run.paths)
        if corpus.digest != run.corpus_digest:
            raise ValueError(
                f"corpus: expected the bytes that {folder} started with, got other bytes from {corpus.name}"
            )
        model = load_model(checkpoint).to(device)
        trainer = cls(Path(folder), model, corpus, run.config, layout or Layout(), run.records, run.seconds, keep)
        load_optimizer(checkpoint, trainer.optimizer)
        return trainer

    @property
    def step(self) -> int:
        return len(self.records)

    def run(self, stop: Callable[[], int] = lambda: 0) -> Iterator[Record]:
        """Locks the folder and trains to the last step, yielding each record after its evaluation and checkpoint.

        Args:
            stop: called after each step, for instance the function that `stop_signals` yields. If it returns another
                number than 0 on any rank, the step is saved, the run ends, and `stopped_by` is the number.

        Raises:
            ValueError: if another process trains, or has trained, in the folder, or if it cannot be written to.
            OSError: if a checkpoint cannot be written.
            Diverged: if a step's gradients or evaluation, or parameters to be saved, are not finite.
        """
        self.stopped_by = 0
        self.ranks.largest(0)  # wait, so that no folder is made before every rank got here
        size = 12 * self.model.num_parameters()  # bytes: float32, with two moments
        lock = self.ranks.first_does(lambda: claim_folder(self.folder, self._newest, size))
        return self._steps(lock, stop)

    def _steps(self, lock: FileLock | None, stop: Callable[[], int]) -> Iterator[Record]:
        try:
            while self.step < self.config.steps and not self.stopped_by:
                began = time.perf_counter()
                record = self._train_step()
                last = record.step == self.config.steps
                if last or record.step % self.config.eval_every == 0:
                    record = replace(record, held_out_bits_per_byte=self.evaluate(), peak_gb=self._peak_gb())
                    self._require_finite(record.step, "held-out bits per byte", record.held_out_bits_per_byte)
                self.records.append(record)
                self.seconds += time.perf_counter() - began
                self.stopped_by = 0 if last else self.ranks.largest(stop())
                if last or self.stopped_by or record.step % self.config.checkpoint_every == 0:
                    self._save()
                yield record
        finally:
            if lock is not None:
                lock.release()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Bits per byte over the held-out windows. A sequence's first byte is read but not predicted."""
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
            (loss * self.ranks.size).backward()  # FSDP2 takes the mean over ranks, and we need the sum
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
        """The sum of -ln p over a batch's targets. If ranks share the tokens, only over this rank's targets."""
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
        """Clips the gradients of all ranks to the configured norm. Returns the norm before.

        A gradient that is not finite ends the run here, before it changes the parameters.
        """
        parameters = list(self.model.parameters())
        norm = get_total_norm(p.grad for p in parameters if p.grad is not None)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self._require_finite(self.step + 1, "norm of the gradients", norm.item())
        clip_grads_with_norm_(parameters, self.config.grad_clip, norm)
        return norm.item()

    def _peak_gb(self) -> float | None:
        device = self.model.device
        if device.type != "cuda":
            return None
        return self.ranks.max(torch.tensor(torch.cuda.max_memory_allocated(device), device=device)) / 1e9

    def _save(self) -> None:
        numbers = (*self.model.named_parameters(), *moments_of(self.optimizer).items())
        wrong = self.ranks.largest(first_not_finite(numbers) is not None)
        self._require_finite(self.step, "parameters", math.nan if wrong else 0)
        text = self.corpus.paths, self.corpus.digest, self.corpus.summary
        run = Run(self.config, self.records, self.seconds, *text)
        save_run(self.folder, run, self.model, self.optimizer, self.keep, self.ranks)
        self._newest = checkpoint_folder(self.folder, self.step)

    def _require_finite(self, step: int, what: str, value: float) -> None:
        if not math.isfinite(value):
            kept = f"{self._newest} is kept" if self._newest else "no checkpoint was written yet"
            lower = f"lower --lr, {self.config.learning_rate:g} now"
            raise Diverged(f"step {step}: {what}: {value}: the run diverged, {lower}; {kept}")


def _adamw(model: PreTrainedModel, config: TrainConfig) -> torch.optim.AdamW:
    groups = parameter_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))
