"""One self-contained HTML page about a run: numbers, curves, decays and states, and a sample of its text."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

import flash_delta
from flash_delta.models import FlashDeltaForCausalLM
from flash_delta.page import Picture, picture, render
from flash_delta.report.figures import (
    CLIPPED,
    MOST_STATES,
    channel_decay_figure,
    loss_figure,
    scalar_decay_figure,
    states_figure,
    step_ms,
    time_figure,
)
from flash_delta.report.probe import probe
from flash_delta.training import Settings, Summary, generate_text, read_history, read_run

PROMPT_BYTES, SAMPLE_TOKENS, TEMPERATURE = 160, 600, 0.7


@dataclass(frozen=True)
class Run:
    """What the files of a run say: its settings, the facts about its text, and what Trainer logged."""

    settings: Settings
    corpus: Summary
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: str | Path) -> "Run":
        """The run up to its newest checkpoint.

        Raises:
            OSError: if there is none.
            ValueError: if a file is not what `flash-delta train` writes.
        """
        history = read_history(folder)
        steps, evaluations = ([log for log in history if name in log] for name in ("loss", "eval_loss"))
        return cls(*read_run(folder), steps, evaluations)

    @property
    def held_out(self) -> str:
        """The last measured bits per byte of held-out text."""
        return f"{self.evaluations[-1]['eval_bits_per_byte']:.3f}" if self.evaluations else "not measured yet"

    @property
    def tokens_per_step(self) -> int:
        return self.settings.batch_size * self.settings.seq_len


def write_report(
    run: Run, model: FlashDeltaForCausalLM, tokenizer: PreTrainedTokenizerBase, path: str | Path, command: str
) -> None:
    """Writes the page about a run and the model of its last checkpoint. The page loads nothing from elsewhere.

    Its numbers were measured by the run itself, so the text is not needed. ``command`` is the command that trains such
    a run.
    """
    text = run.corpus.excerpt.encode("latin1").decode(errors="ignore")
    prompt = text.encode()[:PROMPT_BYTES].decode(errors="ignore") or "\n"
    tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
    page = render(
        "run.html.j2",
        title=f"flash_delta run: {Path(path).resolve().parent.name}",
        numbers=_numbers(run, model),
        facts=_facts(run, model),
        command=command,
        pictures=list(_pictures(run, model, tokens)),
        prompt=prompt,
        sample=generate_text(model, tokenizer, prompt, SAMPLE_TOKENS, temperature=TEMPERATURE),
        temperature=TEMPERATURE,
    )
    Path(path).write_text(page, encoding="utf-8")


def _numbers(run: Run, model: FlashDeltaForCausalLM) -> list[tuple[str, str, str]]:
    """Rows (what, value, unit). The first row has the number by which the run is judged."""
    times = step_ms(run.steps, run.tokens_per_step)
    ms, speed = median(times), median(log["tokens_per_second"] for log in run.steps)
    return [
        ("on held-out text", run.held_out, "bits per byte"),
        ("order-0 entropy of that text", f"{run.corpus.entropy:.3f}", "bits per byte"),
        ("parameters", f"{model.num_parameters():,}", ""),
        ("trained for", f"{sum(times) / 1e3:,.0f}", "s"),
        ("median time per step", f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}", "ms"),
        ("median training speed", f"{speed:,.0f}", "tokens/s"),
    ]


def _facts(run: Run, model: FlashDeltaForCausalLM) -> list[tuple[str, str]]:
    corpus, settings = run.corpus, run.settings
    chosen = ", ".join(f"{name} {value}" for name, value in asdict(settings).items() if name != "paths")
    return [
        ("mixers, first to last layer", ", ".join(model.config.mixers)),
        ("corpus", f"{corpus.name}: {corpus.files:,} files, {corpus.train_bytes:,} bytes to train on"),
        ("held out", f"{corpus.held_out_bytes:,} bytes"),
        ("steps", f"{len(run.steps):,} of {settings.steps:,}, each {settings.batch_size} x {settings.seq_len} tokens"),
        ("training settings", chosen),
        ("software", f"flash_delta {flash_delta.__version__}, torch {torch.__version__}, on {model.device}"),
    ]


def _pictures(run: Run, model: FlashDeltaForCausalLM, text: torch.Tensor) -> Iterator[Picture]:
    memory = probe(model, text)
    scalar = [decay for decay in memory.decays if decay.half_life.dim() == 1]
    channel = [decay for decay in memory.decays if decay.half_life.dim() == 2]
    yield picture(
        "Learning",
        "How many bits the model needs per byte of text: lower is better, 8 is knowing nothing. The dashed line is the "
        "best that byte frequencies alone allow on the held-out text; what lies below it was learnt from context. "
        "The pale curve has the batch of each step, the strong one the mean of the last steps.",
        lambda: loss_figure(run.steps, run.evaluations, run.corpus.entropy),
    )
    yield picture(
        "Time per step",
        f"Each step reads {run.tokens_per_step:,} tokens, forward and backward, and updates the parameters. A peak is "
        "a step during which the machine did something else, or the first call of something. Evaluations are not "
        "counted.",
        lambda: time_figure(run.steps, run.tokens_per_step),
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
            "How fast the channels of the Kimi Delta Attention and GDN-2 heads forget",
            "Each row is a head, each cell one of its key channels, sorted. A row of many colours keeps memories of "
            "many lengths side by side; a row of one colour would need only one decay per head. The colours reach from "
            "the shortest half-life to the longest, so that none is clipped.",
            lambda: channel_decay_figure(channel),
        )
    if memory.states:
        yield picture(
            "What the states hold",
            f"The recurrent state S [K, V] of each head after {len(text):,} tokens of held-out text: this matrix is "
            "all that a head remembers of them. A query reads a weighted sum of its rows. Few strong rows or stripes "
            f"alike mean that little of the room is used. A layer's colours clip: they end where {CLIPPED:.0%} of its "
            "entries do, and all that is stronger has the last colour. The strongest entry stands beside the scale. "
            f"At most {MOST_STATES[0]} layers and {MOST_STATES[1]} heads are shown.",
            lambda: states_figure(memory.states),
        )
