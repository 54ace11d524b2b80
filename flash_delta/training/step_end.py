"""What happens at the end of a training step: its time is taken, and a run that diverged or was asked to stop ends."""

import math
import time

import torch
from transformers import Trainer, TrainerCallback

from flash_delta.training.checkpoint import first_not_finite, latest_checkpoint
from flash_delta.training.settings import write_run


class Diverged(FloatingPointError):
    """A step's gradients, parameters or evaluation are not finite. The last checkpoint has the state before."""


class StepEnd(TrainerCallback):
    """What happens at a step's end: a run that diverged or that a signal asked to stop ends here. ``trainer`` is the
    `RunTrainer` of the run."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.began = trainer, 0.0

    def on_train_begin(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs) -> None:
        """Writes what the run computes. A resumed run may have another peak of the rate or another number of steps."""
        if state.is_world_process_zero:
            write_run(args.output_dir, self.trainer.settings, self.trainer.corpus)
        if state.global_step > 0:
            for i, group in enumerate(optimizer.param_groups):
                group["initial_lr"] = lr_scheduler.base_lrs[i] = args.learning_rate
            lr_scheduler.last_epoch -= 1
            lr_scheduler.step()
        self.began = time.perf_counter()

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        self.began = time.perf_counter()

    def on_save(self, args, state, control, **kwargs) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        asked = torch.tensor([self.trainer.stop()], device=args.device)
        stopped_by = int(self.trainer.accelerator.gather(asked).max())  # waits for all devices: the step has ended
        now = time.perf_counter()
        self.trainer.seconds, self.began = now - self.began, now
        if stopped_by and not control.should_training_stop:
            self.trainer.stopped_by = stopped_by
            control.should_save = control.should_training_stop = True
        if control.should_save and (name := first_not_finite(model)):
            self._end(state.global_step, f"parameter {name}", math.nan)

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        for name in ("loss", "grad_norm", "eval_loss"):
            if not math.isfinite(logs.get(name, 0.0)):
                self._end(state.global_step, name, logs[name])

    def _end(self, step: int, what: str, value: float) -> None:
        newest = latest_checkpoint(self.trainer.args.output_dir)
        kept = f"{newest} is kept" if newest else "no checkpoint was written yet"
        lower = f"lower --lr, {self.trainer.settings.lr:g} now"
        raise Diverged(f"step {step}: {what}: {value}: the run diverged, {lower}; {kept}")
