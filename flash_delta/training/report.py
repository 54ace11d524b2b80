"""One self-contained HTML page about a run: numbers, curves, what its memory does, and a sample of its text."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

import flash_delta
from flash_delta.page import Picture, picture, render
from flash_delta.training.corpus import order0_entropy
from flash_delta.training.figures import channel_decay_figure, loss_figure, scalar_decay_figure, states_figure
from flash_delta.training.generate import generate_text
from flash_delta.training.probe import probe
from flash_delta.training.trainer import Trainer

PROMPT_BYTES, SAMPLE_BYTES, TEMPERATURE = 160, 600, 0.7
PROBE_BYTES = 2048


def write_report(trainer: Trainer, path: str | Path) -> float:
    """Writes the page, nothing of which is fetched from elsewhere; returns the held-out bits per byte it measured."""
    held_out = trainer.corpus.held_out
    bits, entropy = trainer.evaluate(), order0_entropy(held_out)
    prompt = held_out[:PROMPT_BYTES].numpy().tobytes().decode(errors="ignore")
    page = render(
        Path(__file__).parent / "report.html.j2",
        title=f"flash_delta run: {trainer.folder.name}",
        numbers=_numbers(trainer, bits, entropy),
        facts=_facts(trainer),
        pictures=list(_pictures(trainer, entropy)),
        prompt=prompt,
        sample="".join(generate_text(trainer.model, prompt, SAMPLE_BYTES, temperature=TEMPERATURE)),
        temperature=TEMPERATURE,
    )
    Path(path).write_text(page, encoding="utf-8")
    return bits


def _numbers(trainer: Trainer, bits: float, entropy: float) -> list[tuple[str, str, str]]:
    """(what, value, unit), the first one being what the run is judged by."""
    speed = median(record.tokens_per_second for record in trainer.records)
    return [
        ("on held-out text", f"{bits:.3f}", "bits per byte"),
        ("order-0 entropy of that text", f"{entropy:.3f}", "bits per byte"),
        ("parameters", f"{trainer.model.num_parameters():,}", ""),
        ("trained for", f"{trainer.seconds:,.0f}", "s"),
        ("median training speed", f"{speed:,.0f}", "tokens/s"),
    ]


def _facts(trainer: Trainer) -> list[tuple[str, str]]:
    corpus, config, model = trainer.corpus, trainer.config, trainer.model
    windows = min(config.eval_windows, len(corpus.held_out) // config.seq_len)
    return [
        ("mixers, first to last layer", ", ".join(model.config.mixers)),
        ("corpus", f"{corpus.name}: {corpus.files:,} files, {len(corpus.train):,} bytes to train on"),
        ("held out", f"{len(corpus.held_out):,} bytes; measured on {windows} windows of {config.seq_len} bytes"),
        ("steps", f"{trainer.step:,} of {config.steps:,}, each {config.batch_size} windows of {config.seq_len} bytes"),
        ("training settings", ", ".join(f"{name} {value}" for name, value in asdict(config).items())),
        ("software", f"flash_delta {flash_delta.__version__}, torch {torch.__version__}, on {model.device}"),
    ]


def _pictures(trainer: Trainer, entropy: float) -> Iterator[Picture]:
    records = [asdict(record) for record in trainer.records]
    text = trainer.corpus.held_out[:PROBE_BYTES]
    memory = probe(trainer.model, text)
    scalar = [decay for decay in memory.decays if decay.half_life.dim() == 1]
    channel = [decay for decay in memory.decays if decay.half_life.dim() == 2]
    yield picture(
        "Learning",
        "How many bits the model needs per byte of text: lower is better, 8 is knowing nothing. The dashed line is the "
        "best that byte frequencies alone allow on the held-out text; what lies below it was learnt from context.",
        lambda: loss_figure(records, entropy),
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
            "many lengths side by side; a row of one colour would need only one decay per head.",
            lambda: channel_decay_figure(channel),
        )
    if memory.states:
        yield picture(
            "What the states hold",
            f"The recurrent state S [K, V] of each head after {len(text):,} bytes of held-out text: this matrix is "
            "all that a head remembers of them. A query reads a weighted sum of its rows. Few strong rows or stripes "
            "alike mean that little of the room is used.",
            lambda: states_figure(memory.states),
        )
