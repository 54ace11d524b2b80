"""transformers' Trainer for runs of `flash-delta train`: its arguments, its data, and what happens at a step's end.

    settings = Settings(steps=500)
    tokenizer = load_tokenizer(settings.tokenizer)
    trainer = RunTrainer("runs/mine", model, tokenizer, Corpus.read(["texts"]), settings, Layout())
    trainer.train()

A step depends on the parameters, the optimizer's moments and (seed, step). So a resumed run computes the same as an
uninterrupted one, in one CPU process bit for bit. Under torchrun all ranks make the same calls. Together they compute
the same as one process, up to rounding.
"""

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from flash_delta.models import parameter_groups
from flash_delta.training.batches import Collator, Windows, mean_of_nats, sum_of_nats
from flash_delta.training.card import write_card
from flash_delta.training.corpus import Corpus, evaluation_starts, require_length, training_starts
from flash_delta.training.flops import share_of_peak
from flash_delta.training.settings import Layout, Settings
from flash_delta.training.step_end import StepEnd

NATS_PER_BIT = math.log(2)
WARMUP_STEPS, EVAL_WINDOWS, EVAL_TOKENS = 20, 256, 2**22  # the last two: at most
BLOCK_FORMS = 64  # more than kinds of mixers, times training and evaluation, times forms of a row's bounds
# transformers renamed it, and warns of the old name where it has the new one
FIELDS = {field.name for field in dataclasses.fields(TrainingArguments)}
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in FIELDS else "gradient_checkpointing"


class RunTrainer(Trainer):
    """transformers' Trainer with this library's windows of text, groups of parameters and bits per byte.

    Args:
        stop: called after each step. If it returns another number than 0 on any rank, that step is saved, the run ends,
            and ``stopped_by`` is the number.
        options: more arguments of `TrainingArguments`.
    """

    def __init__(
        self,
        folder: str | Path,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        corpus: Corpus,
        settings: Settings,
        layout: Layout,
        stop: Callable[[], int] = lambda: 0,
        **options: Any,
    ) -> None:
        require_length(corpus, settings.seq_len)
        if layout.compile and layout.context_parallel > 1:
            raise ValueError("compile: expected False with context_parallel > 1, as no compiler sees splits, got True")
        if layout.head_tail and layout.context_parallel == 1:
            raise ValueError("head_tail: expected False with context_parallel = 1, which has one part, got True")
        size = int(os.environ.get("WORLD_SIZE", 1))  # of torchrun
        _require_divisors(size, context_parallel=layout.context_parallel, shard=layout.shard)
        ranks = size // layout.context_parallel  # those that have rows of their own
        if settings.batch_size % (ranks * layout.accumulate):
            expected = f"a multiple of {ranks * layout.accumulate} ({ranks} ranks with rows of their own, {layout})"
            raise ValueError(f"batch_size: expected {expected}, got {settings.batch_size}")
        rows = settings.batch_size // (ranks * layout.accumulate)
        args = _arguments(folder, settings, layout, rows, size, options)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"folder: expected one that can be made, got {folder} ({error.strerror})") from error
        sharers, held_out = None, corpus.held_out_begins if settings.packed else None
        if layout.context_parallel > 1:
            shape = (ranks, layout.context_parallel)
            sharers = init_device_mesh(args.device.type, shape, mesh_dim_names=("rows", "sharers"))["sharers"]
        training, evaluation = _starts(corpus, settings, rows * ranks)
        text = corpus.train, corpus.train_begins if settings.packed else None
        place = {"seq_len": settings.seq_len, "rows": rows, "sharers": layout.context_parallel}
        super().__init__(
            model,
            args,
            Collator(settings.packed, sharers, layout.head_tail),
            Windows(*text, start=training, count=settings.steps * settings.batch_size, **place),
            Windows(corpus.held_out, held_out, start=evaluation.__getitem__, count=len(evaluation), **place),
            tokenizer,
            compute_loss_func=mean_of_nats,
            compute_metrics=self._measure,
        )
        if len(set(gather_object([corpus.summary.digest]))) > 1:
            raise ValueError(f"paths: expected the same texts on all {size} ranks, got others")
        self.corpus, self.settings, self.stop, self.stopped_by = corpus.summary, settings, stop, 0
        self.seconds = 0.0  # of the last step, with its batch, without evaluations and checkpoints
        if layout.compile:
            compile_blocks(model)
        counts = settings.dtype == "bfloat16" and not settings.packed  # documents need fewer products
        self.share = share_of_peak(model, settings.seq_len, args.device, size) if counts else None
        self.add_callback(StepEnd(self))

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return parameter_groups(model, self.args.weight_decay)[0]["param_names"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds bits per byte and speed to a step's log, and the peak of the first rank's memory to an evaluation's.
        Where a device's peak is known, a step's log also has ``mfu``, the model's share of it."""
        if "loss" in logs:
            tokens = self.settings.batch_size * self.settings.seq_len
            per_byte = self.corpus.train_tokens / self.corpus.train_bytes
            logs["bits_per_byte"] = logs["loss"] / NATS_PER_BIT * per_byte
            logs["tokens_per_second"] = tokens / self.seconds
            if self.share is not None:
                logs["mfu"] = self.share * logs["tokens_per_second"]
        elif "eval_loss" in logs and self.args.device.type == "cuda":
            logs["eval_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        super().log(logs, start_time)

    def create_model_card(self, model_name: str | None = None, **facts: Any) -> None:
        """Writes the run's card on the first rank; `push_to_hub` uploads it. It takes no other facts than the run's."""
        if facts:
            raise ValueError(f"{', '.join(facts)}: expected nothing, as a run's card has facts of the run, got values")
        if self.is_world_process_zero():
            write_card(self.args.output_dir, self.model, self.settings, self.corpus, self.state, model_name)

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> tuple:
        """The sum of nats and the number of targets, in place of logits and labels, for a mean over all targets."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs.pop("labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            nats = sum_of_nats(model(**inputs, use_cache=False), labels)
        return None, nats[None], (labels[:, 1:] >= 0).sum()[None]

    def _measure(self, found: EvalPrediction) -> dict[str, float]:
        loss = found.predictions.sum() / found.label_ids.sum()
        per_byte = self.corpus.held_out_tokens / self.corpus.held_out_bytes
        return {"loss": loss, "bits_per_byte": loss / NATS_PER_BIT * per_byte}


def compile_blocks(model: PreTrainedModel) -> None:
    """Lets torch.compile compile each block when it first runs. Blocks of a kind share what is compiled. All share one
    limit of compilations: a kind needs one for training and one for evaluation, and again when lengths have changed."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, BLOCK_FORMS)
    for block in model.model.layers:
        block.compile()


def _starts(corpus: Corpus, settings: Settings, ranks_rows: int) -> tuple[Callable[[int], int], list[int | None]]:
    """Where the n-th window of training begins, and where those of evaluation do, filled up to whole passes."""
    batch = {"batch_size": settings.batch_size, "seq_len": settings.seq_len, "seed": settings.seed}

    def training(n: int) -> int:
        step, row = divmod(n, settings.batch_size)
        return int(training_starts(len(corpus.train), step=step, **batch)[row])

    windows = max(1, min(EVAL_WINDOWS, EVAL_TOKENS // settings.seq_len))
    evaluation = evaluation_starts(len(corpus.held_out), windows, settings.seq_len).tolist()
    return training, [*evaluation, *[None] * (-len(evaluation) % ranks_rows)]


def _require_divisors(size: int, **options: int) -> None:
    for name, value in options.items():
        if size % value:
            raise ValueError(f"{name}: expected a divisor of the number of ranks, {size}, got {value}")


def _arguments(
    folder: str | Path, settings: Settings, layout: Layout, rows: int, size: int, options: dict[str, Any]
) -> TrainingArguments:
    """The arguments of transformers' Trainer. Each step is logged, and each checkpoint comes with an evaluation."""
    sharded: dict[str, Any] = {CHECKPOINTING: layout.activation_checkpointing}
    if layout.shard > 1:
        sharded = {"fsdp": True, "fsdp_config": {"activation_checkpointing": layout.activation_checkpointing}}
        if layout.shard < size:
            sizes = {"dp_replicate_size": size // layout.shard, "dp_shard_size": layout.shard}
            sharded["parallelism_config"] = ParallelismConfig(**sizes)
    return TrainingArguments(
        str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        gradient_accumulation_steps=layout.accumulate,
        learning_rate=settings.lr,
        lr_scheduler_type="cosine_warmup_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=WARMUP_STEPS,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        seed=settings.seed,
        bf16=settings.dtype == "bfloat16",
        train_sampling_strategy="sequential",
        logging_steps=1,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=settings.checkpoint_every,
        save_strategy="steps",
        save_steps=settings.checkpoint_every,
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        use_cache=True,
        disable_tqdm=True,
        **sharded,
        **{"report_to": [], **options},
    )
