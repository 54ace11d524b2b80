"""Says what a run computes (`Settings`, kept in `RUN/run.json`) and how ranks share the work (`Layout`)."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from flash_delta.training.corpus import Summary

FILE = "run.json"
DTYPES = ("float32", "bfloat16")
LARGEST_RATE = 1e3  # far above it AdamW's arithmetic overflows


@dataclass(frozen=True)
class Settings:
    """The options of `flash-delta train` that decide what a run computes."""

    paths: tuple[str, ...] = ()  # of the texts, absolute; empty for the default corpus
    tokenizer: str | None = None  # None: a token is a byte
    mixers: str = "gdn,kda,gdn,attention"
    layers: int = 4
    hidden_size: int = 128
    heads: int = 4
    head_dim: int = 32
    steps: int = 500
    batch_size: int = 8  # windows per step, on all ranks together
    seq_len: int = 256
    lr: float = 3e-3  # the peak; the cosine ends at a tenth of it
    seed: int = 0
    checkpoint_every: int = 100  # steps; each checkpoint comes with an evaluation
    dtype: str = "float32"  # of products, forward and backward; parameters and moments are always float32
    packed: bool = False  # whether each document (a file) in a window is a sequence of its own

    def __post_init__(self) -> None:
        if not 0 < self.lr <= LARGEST_RATE:  # also for NaN
            raise ValueError(f"lr: expected more than 0 and at most {LARGEST_RATE:,g}, got {self.lr}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {list(DTYPES)}, got {self.dtype!r}")


@dataclass(frozen=True)
class Layout:
    """How ranks share the work. A step's numbers do not depend on it, except for rounding."""

    context_parallel: int = 1  # ranks that share the tokens of a window; groups of such ranks share the windows
    shard: int = 1  # ranks that share one copy of the parameters and moments (FSDP2); 1: each has all (DDP)
    accumulate: int = 1  # passes per step, one after the other
    activation_checkpointing: bool = False  # save only a layer's input, and run the layer again for its gradients
    compile: bool = False  # blocks, by torch.compile
    head_tail: bool = False  # with context_parallel: a rank has two parts of the row, from its beginning and its end


def write_run(folder: str | Path, settings: Settings, corpus: Summary) -> None:
    content = {"settings": asdict(settings), "corpus": asdict(corpus)}
    Path(folder, FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")


def read_run(folder: str | Path) -> tuple[Settings, Summary]:
    """What a run computes, and the facts about its text.

    Raises:
        OSError: if the folder has no `run.json`.
        ValueError: if that is not what `flash-delta train` writes.
    """
    file = Path(folder, FILE)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        settings = content["settings"]
        return Settings(**settings | {"paths": tuple(settings["paths"])}), Summary(**content["corpus"])
    except FileNotFoundError as error:
        raise FileNotFoundError(f"run: expected a folder that `flash-delta train --out` wrote, got {folder}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file}: expected what `flash-delta train` wrote, got: {error!r}") from error
