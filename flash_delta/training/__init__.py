"""Small language models on bytes, end to end: text, training, checkpoints, generation and a report."""

from flash_delta.training.checkpoint import latest_checkpoint, require_checkpoint
from flash_delta.training.config import Layout, TrainConfig
from flash_delta.training.corpus import Corpus, order0_entropy
from flash_delta.training.generate import generate_bytes, generate_text
from flash_delta.training.parameter_groups import parameter_groups
from flash_delta.training.probe import Decay, Probe, probe
from flash_delta.training.ranks import process_group
from flash_delta.training.report import write_report
from flash_delta.training.trainer import Record, Trainer

__all__ = [
    "Corpus",
    "Decay",
    "Layout",
    "Probe",
    "Record",
    "TrainConfig",
    "Trainer",
    "generate_bytes",
    "generate_text",
    "latest_checkpoint",
    "order0_entropy",
    "parameter_groups",
    "probe",
    "process_group",
    "require_checkpoint",
    "write_report",
]
