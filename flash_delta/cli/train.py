"""`flash-delta train`: a byte-level language model on any text."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from flash_delta.cli.environment import quiet_transformers, require_device

if TYPE_CHECKING:
    from flash_delta.training import Record, Trainer


def train(
    ctx: typer.Context,
    paths: Annotated[list[Path] | None, typer.Argument(help="Files, folders; none: Python's own library.")] = None,
    out: Annotated[Path, typer.Option(help="The run's folder.")] = Path("runs/train"),
    mixers: Annotated[str, typer.Option(help="gdn, kda, attention; layers repeat the list.")] = "gdn,kda,gdn,attention",
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 4,
    hidden_size: Annotated[int, typer.Option(help="Width of the model.")] = 128,
    heads: Annotated[int, typer.Option(help="Heads per layer.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Width of a head's keys and values.")] = 32,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 500,
    batch_size: Annotated[int, typer.Option(help="Windows per step.")] = 8,
    seq_len: Annotated[int, typer.Option(help="Bytes per window.")] = 256,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="Of the initial parameters and of the batches.")] = 0,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between evaluations with a checkpoint.")] = 100,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, with its own settings.")] = False,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, ...")] = "cpu",
) -> None:
    """Train a byte-level language model; checkpoints, history and loss curve go to --out."""
    from flash_delta.training import Corpus, TrainConfig, Trainer

    quiet_transformers()
    if resume:
        _refuse_settings(ctx)
        trainer = Trainer.resume(out, require_device(device))
    else:
        every = {"eval_every": checkpoint_every, "checkpoint_every": checkpoint_every}
        config = TrainConfig(steps, batch_size, seq_len, learning_rate=lr, seed=seed, **every)
        model = _new_model(_pattern(mixers, layers), hidden_size, heads, head_dim, seed)
        trainer = Trainer.start(out, model.to(require_device(device)), Corpus.read(paths or ()), config)
    console = Console()
    console.print(_description(trainer))
    _run(console, trainer)
    console.print(_result(trainer))


def _refuse_settings(ctx: typer.Context) -> None:
    for parameter in ctx.command.params:
        given = ctx.get_parameter_source(parameter.name).name == "COMMANDLINE"
        if given and parameter.name not in ("out", "resume", "device"):
            raise ValueError(f"{parameter.name}: expected no value beside --resume, which keeps the run's own, got one")


def _pattern(mixers: str, layers: int) -> list[str]:
    names = [name.strip() for name in mixers.split(",")]
    if layers < len(names):
        raise ValueError(f"layers: expected at least the {len(names)} that mixers lists, got {layers}")
    return [names[i % len(names)] for i in range(layers)]


def _new_model(pattern: list[str], hidden_size: int, heads: int, head_dim: int, seed: int):
    import torch

    from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM

    torch.manual_seed(seed)
    config = FlashDeltaConfig(
        vocab_size=256,
        hidden_size=hidden_size,
        num_hidden_layers=len(pattern),
        mixers=pattern,
        num_heads=heads,
        head_dim=head_dim,
        num_attention_heads=heads,
    )
    return FlashDeltaForCausalLM(config)


def _description(trainer: "Trainer") -> Table:
    corpus, config = trainer.corpus, trainer.config
    table = Table(show_header=False)
    table.add_row("mixers", ", ".join(trainer.model.config.mixers))
    table.add_row("parameters", f"{trainer.model.num_parameters():,}")
    table.add_row("corpus", f"{corpus.name}: {corpus.files:,} files, {corpus.skipped:,} skipped")
    table.add_row("bytes", f"{len(corpus.train):,} to train on, {len(corpus.held_out):,} held out")
    table.add_row("steps", f"{trainer.step:,} done of {config.steps:,}, {config.batch_size} x {config.seq_len} bytes")
    table.add_row("device", str(trainer.model.device))
    table.add_row("folder", str(trainer.folder))
    return table


def _run(console: Console, trainer: "Trainer") -> None:
    """A bar on a terminal, and everywhere one line per evaluation."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    try:
        with progress:
            task = progress.add_task("starting", total=trainer.config.steps, completed=trainer.step)
            for record in trainer.run():
                progress.update(task, completed=record.step, description=f"{record.bits_per_byte:.2f} bits per byte")
                if record.held_out_bits_per_byte is not None:
                    console.print(_line(record), highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        from flash_delta.training import latest_checkpoint

        checkpoint = latest_checkpoint(trainer.folder)
        kept = f"{checkpoint} is kept; continue with --resume" if checkpoint else "no checkpoint was written yet"
        console.print(f"stopped after step {trainer.step}: {kept}", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None


def _line(record: "Record") -> str:
    return (
        f"step {record.step:6,}  bits per byte: training {record.bits_per_byte:.3f}, held out "
        f"{record.held_out_bits_per_byte:.3f}  {record.tokens_per_second:7,.0f} tokens/s"
    )


def _result(trainer: "Trainer") -> Table:
    from flash_delta.training import order0_entropy

    table = Table("on held-out text", "bits per byte")
    table.add_row("this model", f"{trainer.records[-1].held_out_bits_per_byte:.3f}")
    table.add_row("byte frequencies alone (order-0 entropy)", f"{order0_entropy(trainer.corpus.held_out):.3f}")
    table.caption = f"{trainer.step:,} steps in {trainer.seconds:,.0f} s; report: flash-delta report {trainer.folder}"
    return table
