"""What a run computes (`TrainConfig`, saved in checkpoints), and how ranks share the work (`Layout`, which may
change)."""

import math
from dataclasses import dataclass, fields

DTYPES = ("float32", "bfloat16")
LARGEST_STEP = 99_999_999  # a checkpoint's name has eight digits
LARGEST_RATE = 1e3  # of learning_rate, weight_decay and grad_clip; far above it AdamW's arithmetic overflows
LARGEST_SEED = 2**63 - 1  # of torch.manual_seed


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 500
    batch_size: int = 8  # windows per step, on all ranks together
    seq_len: int = 256
    learning_rate: float = 3e-3  # the peak; the cosine ends at a tenth of it
    warmup_steps: int = 20
    weight_decay: float = 0.1  # of matrices only
    grad_clip: float = 1.0
    seed: int = 0
    eval_every: int = 100
    eval_windows: int = 256  # of seq_len held-out bytes each
    checkpoint_every: int = 100
    dtype: str = "float32"  # of products, forward and backward; parameters and moments are always float32
    packed: bool = False  # whether each document (a file) in a window is a sequence of its own

    def __post_init__(self):
        whole = ("steps", "batch_size", "checkpoint_every", "eval_every", "eval_windows")
        bounds = dict.fromkeys(whole, (1, LARGEST_STEP))
        bounds |= {"seq_len": (2, LARGEST_STEP), "warmup_steps": (0, LARGEST_STEP), "seed": (0, LARGEST_SEED)}
        bounds |= dict.fromkeys(("learning_rate", "weight_decay", "grad_clip"), (0, LARGEST_RATE))
        _require_within(self, bounds)
        for name in ("learning_rate", "grad_clip"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name}: expected more than 0, got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {list(DTYPES)}, got {self.dtype!r}")

    def learning_rate_at(self, step: int) -> float:
        """The rate of the step after `step` steps: a linear warmup to the peak, then a cosine down to a tenth of it.

        It depends on the total number of steps. If a run continues for more steps, it changes to the longer cosine, and
        the rate rises at that point. There is no second warmup.
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


@dataclass(frozen=True)
class Layout:
    """How ranks share the work. A step's numbers do not depend on it, except for rounding."""

    context_parallel: int = 1  # ranks that share the tokens of a window; groups of such ranks share the windows
    shard: int | None = None  # ranks that share one copy of the parameters and moments (FSDP2); None: all, 1: none
    accumulate: int = 1  # passes per step, one after the other
    activation_checkpointing: bool = False  # save only a layer's input, and run the layer again for its gradients

    def __post_init__(self):
        ranks = ("context_parallel", "accumulate", *(() if self.shard is None else ("shard",)))
        _require_within(self, dict.fromkeys(ranks, (1, LARGEST_STEP)))


def _require_within(settings: TrainConfig | Layout, bounds: dict[str, tuple[float, float]]) -> None:
    """Checks that each setting is a number between its bounds, and an integer if that is its type."""
    whole = {field.name for field in fields(settings) if field.type is not float}
    for name, (least, most) in bounds.items():
        value = getattr(settings, name)
        kind = int if name in whole else (int, float)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{name}: expected a {'whole ' * (name in whole)}number, got {value!r}")
        if not value >= least:  # also for NaN
            raise ValueError(f"{name}: expected at least {least}, got {value}")
        if value > most:
            raise ValueError(f"{name}: expected at most {most:,}, got {value}")
