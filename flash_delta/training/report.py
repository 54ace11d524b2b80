"""One self-contained HTML page about a run: numbers, curves, decays and states, and a sample of its text."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

import flash_delta
from flash_delta.models import FlashDeltaForCausalLM
from flash_delta.page import Picture, picture, render
from flash_delta.training.figures import (
    CLIPPED,
    MOST_STATES,
    channel_decay_figure,
    loss_figure,
    scalar_decay_figure,
    states_figure,
    step_ms,
    time_figure,
)
from flash_delta.training.generate import generate_text
from flash_delta.training.probe import probe
from flash_delta.training.run import Run

PROMPT_BYTES, SAMPLE_BYTES, TEMPERATURE = 160, 600, 0.7


def write_report(run: Run, model: FlashDeltaForCausalLM, path: str | Path, command: str | None = None) -> None:
    """Writes the page about a run and the model of its last checkpoint. The page loads nothing from elsewhere.

    Its numbers were measured by the run itself, so the text is not needed. ``command`` is the command that trains such
    a run, or None if there is none.
    """
    text = run.corpus.excerpt.encode("latin1")
    prompt = text[:PROMPT_BYTES].decode(errors="ignore") or "\n"
    page = render(
        "run.html.j2",
        title=f"flash_delta run: {Path(path).resolve().parent.name}",
        numbers=_numbers(run, model),
        facts=_facts(run, model),
        command=command,
        pictures=list(_pictures(run, model, torch.tensor(list(text)))),
        prompt=prompt,
        sample="".join(generate_text(model, prompt, SAMPLE_BYTES, temperature=TEMPERATURE)),
        temperature=TEMPERATURE,
    )
    Path(path).write_text(page, encoding="utf-8")


def _numbers(run: Run, model: FlashDeltaForCausalLM) -> list[tuple[str, str, str]]:
    """Rows (what, value, unit). The first row has the number by which the run is judged."""
    records, tokens = [asdict(record) for record in run.records], run.config.batch_size * run.config.seq_len
    ms, speed = median(step_ms(records, tokens)), median(record.tokens_per_second for record in run.records)
    bits = "not measured yet" if run.held_out is None else f"{run.held_out:.3f}"
    return [
        ("on held-out text", bits, "bits per byte"),
        ("order-0 entropy of that text", f"{run.corpus.entropy:.3f}", "bits per byte"),
        ("parameters", f"{model.num_parameters():,}", ""),
        ("trained for", f"{run.seconds:,.0f}", "s"),
        ("median time per step", f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}", "ms"),
        ("median training speed", f"{speed:,.0f}", "tokens/s"),
    ]


def _facts(run: Run, model: FlashDeltaForCausalLM) -> list[tuple[str, str]]:
    corpus, config, done = run.corpus, run.config, len(run.records)
    windows = min(config.eval_windows, corpus.held_out_bytes // config.seq_len)
    return [
        ("mixers, first to last layer", ", ".join(model.config.mixers)),
        ("corpus", f"{corpus.name}: {corpus.files:,} files, {corpus.train_bytes:,} bytes to train on"),
        ("held out", f"{corpus.held_out_bytes:,} bytes; measured on {windows} windows of {config.seq_len} bytes"),
        ("steps", f"{done:,} of {config.steps:,}, each {config.batch_size} windows of {config.seq_len} bytes"),
        ("training settings", ", ".join(f"{name} {value}" for name, value in asdict(config).items())),
        ("software", f"flash_delta {flash_delta.__version__}, torch {torch.__version__}, on {model.device}"),
    ]


def _pictures(run: Run, model: FlashDeltaForCausalLM, text: torch.Tensor) -> Iterator[Picture]:
    records, tokens = [asdict(record) for record in run.records], run.config.batch_size * run.config.seq_len
    memory = probe(model, text)
    scalar = [decay for decay in memory.decays if decay.half_life.dim() == 1]
    channel = [decay for decay in memory.decays if decay.half_life.dim() == 2]
    yield picture(
        "Learning",
        "How many bits the model needs per byte of text: lower is better, 8 is knowing nothing. The dashed line is the "
        "best that byte frequencies alone allow on the held-out text; what lies below it was learnt from context. "
        "The pale curve has the batch of each step, the strong one the mean of the last steps.",
        lambda: loss_figure(records, run.corpus.entropy),
    )
    yield picture(
        "Time per step",
        f"Each step reads {tokens:,} bytes, forward and backward, and updates the parameters. A peak is a step during "
        "which the machine did something else, or the first call of something. Evaluations are not counted.",
        lambda: time_figure(records, tokens),
    )
    if scalar:
        yield picture(
            "How fast the Gated DeltaNet heads forget",
            "A dot is a head: after its half-life, ln 2 / |mean log decay|, half of what its state held is left, if "
            "nothing erased it before. The bar spans the middle 80 % of the tokens of a held-out text: a long one "
            "belongs to a head that decides by the token, a short one to a head that is a plain clock.",
            lambda: scalar_decay_figure(scalar),
        )
    if channel:
        yield picture(
            "How fast the channels of the Kimi Delta Attention heads forget",
            "Each row is a head, each cell one of its key channels, sorted. A row of many colours keeps memories of "
            "many lengths side by side; a row of one colour would need only one decay per head. The colours reach from "
            "the shortest half-life to the longest, so that none is clipped.",
            lambda: channel_decay_figure(channel),
        )
    if memory.states:
        yield picture(
            "What the states hold",
            f"The recurrent state S [K, V] of each head after {len(text):,} bytes of held-out text: this matrix is "
            "all that a head remembers of them. A query reads a weighted sum of its rows. Few strong rows or stripes "
            f"alike mean that little of the room is used. A layer's colours clip: they end where {CLIPPED:.0%} of its "
            "entries do, and all that is stronger has the last colour. The strongest entry stands beside the scale. "
            f"At most {MOST_STATES[0]} layers and {MOST_STATES[1]} heads are shown.",
            lambda: states_figure(memory.states),
        )
