"""The training of a hybrid of 350 million parameters, by the records that transformers' Trainer kept of each run."""

from statistics import median
from typing import Any

from workshop.numbers.sources import H200, Results

RUN = f"{H200}/train-350m"


def trained_350m(results: Results) -> tuple[str, str]:
    """The share of one card's peak, and tokens per second."""
    steps = _steps(results, f"{RUN}.json")
    return f"{100 * median(step['mfu'] for step in steps):.1f}", f"{round(_speed(steps), -3):,.0f}"


def on_two_cards(results: Results) -> tuple[str, ...]:
    """Tokens per second over twice those of one card in the same run: two data-parallel layouts, then long rows."""
    runs = (("-x1", "-x2"), ("-x1", "-x2-fsdp2"), ("-131072-x1", "-131072-x2"))
    speeds = [[_speed(_steps(results, f"{RUN}{name}.json")) for name in pair] for pair in runs]
    return tuple(f"{100 * two / (2 * one):.1f}" for one, two in speeds)


def trained_on_300m_tokens(results: Results) -> tuple[str, str, str]:
    """Minutes of all steps, the median of tokens per second, and bits per byte of held-out text at the end."""
    file = f"{RUN}-300m-tokens.json"
    speeds = [step["tokens_per_second"] for step in _steps(results, file, skipped=0)]
    minutes = sum(64 * 2048 / speed for speed in speeds) / 60
    last = [log for log in results.json(file)["log_history"] if "eval_bits_per_byte" in log][-1]
    return f"{minutes:.0f}", f"{round(median(speeds), -3):,.0f}", f"{last['eval_bits_per_byte']:.3f}"


def _steps(results: Results, file: str, skipped: int = 3) -> list[dict[str, Any]]:
    """The steps from the fourth on: the first compiles. The last entry is a summary of the run."""
    return [step for step in results.json(file)["log_history"] if step.get("mfu")][skipped:]


def _speed(steps: list[dict[str, Any]]) -> float:
    return median(step["tokens_per_second"] for step in steps)
