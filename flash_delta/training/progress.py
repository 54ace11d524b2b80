"""What `flash-delta train` shows while Trainer trains: its bar on a terminal, and a line per evaluation."""

from tqdm import tqdm
from transformers import ProgressCallback, TrainerCallback


class Lines(TrainerCallback):
    """Prints a line per evaluation."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if state.is_world_process_zero and "eval_loss" in logs:
            step = next(log for log in reversed(state.log_history) if "bits_per_byte" in log)
            share = f", {step['mfu']:.1%} of peak arithmetic" if "mfu" in step else ""
            peak = f"  peak {logs['eval_peak_gb']:.2f} GB" if "eval_peak_gb" in logs else ""
            tqdm.write(
                f"step {state.global_step:6,}  bits per byte: training {step['bits_per_byte']:.3f}, held out "
                f"{logs['eval_bits_per_byte']:.3f}  {step['tokens_per_second']:7,.0f} tokens/s{share}{peak}"
            )


class Bar(ProgressCallback):
    """Trainer's progress bar with the bits per byte of the last step, and `Lines` above it."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        Lines().on_log(args, state, control, logs)
        if self.training_bar is not None and "bits_per_byte" in logs:
            self.training_bar.set_postfix_str(f"{logs['bits_per_byte']:.2f} bits per byte")
