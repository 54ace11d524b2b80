"""The record of a run in its newest checkpoint. It suffices for a report without the text, and for continuing the
run."""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flash_delta.training.checkpoint import require_checkpoint
from flash_delta.training.config import TrainConfig
from flash_delta.training.corpus import Corpus, Summary


@dataclass(frozen=True)
class Record:
    """One training step. Its bits per byte are those of its own batch, before its update."""

    step: int  # counted from 1
    bits_per_byte: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    held_out_bits_per_byte: float | None = None  # None if the step did not end with an evaluation
    peak_gb: float | None = None  # of the run so far, on the GPU that took most; with an evaluation, None without GPUs


class Diverged(FloatingPointError):
    """A step's gradients, parameters or evaluation are not finite. The last checkpoint has the state before."""


@dataclass(frozen=True)
class Run:
    """A run as saved in `trainer.json` of a checkpoint."""

    config: TrainConfig
    records: list[Record]  # of all steps so far
    seconds: float  # spent training and evaluating
    paths: tuple[str, ...]  # of the corpus, absolute; empty for the default corpus
    corpus_digest: str
    corpus: Summary

    @classmethod
    def read(cls, folder: str | Path) -> "Run":
        """The run of the newest checkpoint in a run's folder.

        Raises:
            OSError: if there is none, or if it cannot be read.
            ValueError: if `trainer.json` is not what `flash-delta train` writes.
        """
        file = require_checkpoint(folder) / "trainer.json"
        content = read_json(file)
        summary = _summary(content)
        try:
            config, records = TrainConfig(**content["config"]), [Record(**record) for record in content["records"]]
            paths, digest, seconds = tuple(content["paths"]), str(content["corpus_digest"]), float(content["seconds"])
            corpus = Summary(**summary)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{file}: expected what `flash-delta train` wrote, got: {reason}") from error
        if not all(_is_number(value) for record in records for value in vars(record).values()):
            raise ValueError(f"{file}: expected records of numbers, got other values")
        if [record.step for record in records] != list(range(1, len(records) + 1)):
            raise ValueError(f"{file}: expected records of steps 1 to {len(records)}, got other steps")
        return cls(config, records, seconds, paths, digest, corpus)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"step": len(self.records)}

    def going_on(self, steps: int | None, learning_rate: float | None) -> "Run":
        """The run with another total number of steps, at least those already done, or another peak rate. None: as
        before."""
        changes = {"steps": steps, "learning_rate": learning_rate}
        config = replace(self.config, **{name: value for name, value in changes.items() if value is not None})
        if config.steps < len(self.records):
            raise ValueError(f"steps: expected at least the {len(self.records)} that are done, got {config.steps}")
        return replace(self, config=config)

    @property
    def held_out(self) -> float | None:
        """The last measured bits per byte of held-out text, or None if there was no evaluation yet."""
        measured = (record.held_out_bits_per_byte for record in reversed(self.records))
        return next((bits for bits in measured if bits is not None), None)


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises ValueError with the file's name if the file has none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: expected JSON that `flash-delta train` wrote, got: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def _summary(content: dict[str, Any]) -> dict[str, Any]:
    """The summary of the corpus. Version 0.1.0 saved none, so its runs need their text."""
    return content["corpus"] if "corpus" in content else asdict(Corpus.read(content.get("paths", ())).summary)


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and math.isfinite(value))
