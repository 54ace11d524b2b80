"""Small language models on text, by transformers' Trainer: the text, its windows, what a run keeps, and its trainer."""

from flash_delta.models import parameter_groups
from flash_delta.training.checkpoint import latest_checkpoint, load_model, read_history, require_checkpoint
from flash_delta.training.corpus import Corpus, Summary, order0_entropy
from flash_delta.training.generate import generate_text
from flash_delta.training.settings import Layout, Settings, read_run
from flash_delta.training.step_end import Diverged
from flash_delta.training.stopping import stop_signals
from flash_delta.training.tokenizer import byte_tokenizer, load_tokenizer
from flash_delta.training.trainer import RunTrainer

__all__ = [
    "Corpus",
    "Diverged",
    "Layout",
    "RunTrainer",
    "Settings",
    "Summary",
    "byte_tokenizer",
    "generate_text",
    "latest_checkpoint",
    "load_model",
    "load_tokenizer",
    "order0_entropy",
    "parameter_groups",
    "read_history",
    "read_run",
    "require_checkpoint",
    "stop_signals",
]
