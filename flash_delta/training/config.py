"""What a run computes (`TrainConfig`, kept in its checkpoints) and how ranks share that (`Layout`, free to change)."""

import math
from dataclasses import dataclass

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 500
    batch_size: int = 8  # windows per step, of all ranks together
    seq_len: int = 256
    learning_rate: float = 3e-3  # the peak; the cosine ends at a tenth of it
    warmup_steps: int = 20
    weight_decay: float = 0.1  # of matrices only
    grad_clip: float = 1.0
    seed: int = 0
    eval_every: int = 100
    eval_windows: int = 256  # of seq_len held-out bytes each
    checkpoint_every: int = 100
    dtype: str = "float32"  # of products, forward and backward; parameters and their moments are float32 always
    packed: bool = False  # whether a document (a file) begins anew inside a window: no state, no target across

    def __post_init__(self):
        at_least_1 = ("steps", "batch_size", "eval_every", "eval_windows", "checkpoint_every")
        least = dict.fromkeys(at_least_1, 1) | {"seq_len": 2, "warmup_steps": 0, "weight_decay": 0, "seed": 0}
        _require_at_least(self, least)
        for name in ("learning_rate", "grad_clip"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: expected more than 0, got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {list(DTYPES)}, got {self.dtype!r}")

    def learning_rate_at(self, step: int) -> float:
        """Of the step after `step` steps: linear warmup to the peak, then a cosine down to a tenth of it."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


@dataclass(frozen=True)
class Layout:
    """A step's numbers do not depend on it, but for rounding."""

    context_parallel: int = 1  # ranks that share every window's tokens; the others share windows
    shard: int | None = None  # ranks that share one copy of the parameters and moments (FSDP2); None: all, 1: none
    accumulate: int = 1  # passes, one after the other, per step
    activation_checkpointing: bool = False  # keep a layer's input only, and run it again for its gradients

    def __post_init__(self):
        _require_at_least(self, {"context_parallel": 1, "accumulate": 1} | ({} if self.shard is None else {"shard": 1}))


def _require_at_least(settings: TrainConfig | Layout, least: dict[str, float]) -> None:
    for name, bound in least.items():
        if getattr(settings, name) < bound:
            raise ValueError(f"{name}: expected at least {bound}, got {getattr(settings, name)}")
