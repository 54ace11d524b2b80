"""Small language models on bytes: text, training, checkpoints, generation and a report."""

from flash_delta.training.checkpoint import latest_checkpoint, require_checkpoint
from flash_delta.training.config import Layout, TrainConfig
from flash_delta.training.corpus import Corpus, order0_entropy
from flash_delta.training.generate import generate_bytes, generate_text
from flash_delta.training.loading import load_model
from flash_delta.training.parameter_groups import parameter_groups
from flash_delta.training.probe import Decay, Probe, probe
from flash_delta.training.ranks import process_group
from flash_delta.training.report import write_report
from flash_delta.training.run import Record, Run
from flash_delta.training.stopping import stop_signals
from flash_delta.training.trainer import Diverged, Trainer

__all__ = [
    "Corpus",
    "Decay",
    "Diverged",
    "Layout",
    "Probe",
    "Record",
    "Run",
    "TrainConfig",
    "Trainer",
    "generate_bytes",
    "generate_text",
    "latest_checkpoint",
    "load_model",
    "order0_entropy",
    "parameter_groups",
    "probe",
    "process_group",
    "require_checkpoint",
    "stop_signals",
    "write_report",
]
