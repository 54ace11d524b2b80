"""Small language models on bytes, end to end: text, training, checkpoints, generation and a report."""

from flash_delta.training.checkpoint import latest_checkpoint, require_checkpoint
from flash_delta.training.corpus import Corpus, order0_entropy
from flash_delta.training.generate import generate_bytes, generate_text
from flash_delta.training.probe import Decay, Probe, probe
from flash_delta.training.report import write_report
from flash_delta.training.trainer import Record, TrainConfig, Trainer

__all__ = [
    "Corpus",
    "Decay",
    "Probe",
    "Record",
    "TrainConfig",
    "Trainer",
    "generate_bytes",
    "generate_text",
    "latest_checkpoint",
    "order0_entropy",
    "probe",
    "require_checkpoint",
    "write_report",
]
