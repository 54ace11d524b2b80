"""Proof by learning: tasks with a known answer, models that have to learn them, controls that have to fail."""

from flash_delta.proof.needle import LONG_NEEDLES, NEEDLES
from flash_delta.proof.recall import RECALL, RETOLD
from flash_delta.proof.words import A5, PARITY, S3, S5, SUMS

TASKS = [PARITY, SUMS, S3, RECALL, RETOLD, NEEDLES, A5, S5, LONG_NEEDLES]
