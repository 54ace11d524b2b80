"""The page about a run: numbers, curves, decays and states of its model, and a sample of its text."""

from flash_delta.report.page import Run, write_report
from flash_delta.report.probe import Decay, Probe, probe

__all__ = ["Decay", "Probe", "Run", "probe", "write_report"]
