"""`flash-delta train`: a byte-level language model on any text."""

import signal
from inspect import signature
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from flash_delta.cli.environment import calm_threads, quiet_transformers, require_device
from flash_delta.cli.files import PATH, PATHS
from flash_delta.cli.new_model import model_config, new_model, require_memory

if TYPE_CHECKING:
    from flash_delta.models import FlashDeltaConfig
    from flash_delta.training import Record, Run, TrainConfig, Trainer

# Options that are allowed beside --resume. They say how and where to compute, how far and how fast.
FREE_TO_CHANGE = {"out", "resume", "keep", "device", "context_parallel", "shard", "accumulate"}
FREE_TO_CHANGE |= {"activation_checkpointing", "steps", "lr"}
OF_A_FILE = {"dtype", "architectures", "_name_or_path", "transformers_version"}  # in a model's config: about its file


def train(
    ctx: typer.Context,
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Files, folders; none: Python's own library.", **PATHS)
    ] = None,
    out: Annotated[Path, typer.Option(help="The run's folder.", **PATH)] = Path("runs/train"),
    mixers: Annotated[str, typer.Option(help="gdn, kda, attention; layers repeat the list.")] = "gdn,kda,gdn,attention",
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 4,
    hidden_size: Annotated[int, typer.Option(help="Width of the model.")] = 128,
    heads: Annotated[int, typer.Option(help="Heads per layer.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Width of a head's keys and values.")] = 32,
    steps: Annotated[int, typer.Option(help="Training steps in all; beside --resume, to go on further.")] = 500,
    batch_size: Annotated[int, typer.Option(help="Windows per step.")] = 8,
    seq_len: Annotated[int, typer.Option(help="Bytes per window.")] = 256,
    lr: Annotated[float, typer.Option(help="Peak learning rate; beside --resume, of the steps to come.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="Of the initial parameters and of the batches.")] = 0,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between evaluations with a checkpoint.")] = 100,
    keep: Annotated[int, typer.Option(help="Checkpoints that stay, the newest ones.")] = 2,
    dtype: Annotated[str, typer.Option(help="Of products: float32, bfloat16.")] = "float32",
    packed: Annotated[bool, typer.Option("--packed", help="A file begins anew inside a window.")] = False,
    context_parallel: Annotated[int, typer.Option(help="Ranks that share every window's tokens.")] = 1,
    shard: Annotated[int | None, typer.Option(help="Ranks that share one copy of the parameters; none: all.")] = None,
    accumulate: Annotated[int, typer.Option(help="Passes per step, one after the other.")] = 1,
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Keep layers' inputs only; compute the rest twice.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, with its own settings.")] = False,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, ...")] = "cpu",
) -> None:
    """Train a byte-level language model, on all ranks of torchrun if it is there; --out gets checkpoints and curves.

    Ctrl-C and SIGTERM end it after the step that it is in, with a checkpoint. A small model takes one thread of the
    CPU, unless OMP_NUM_THREADS says otherwise.
    """
    from flash_delta.training import Corpus, Layout, Trainer, process_group

    quiet_transformers()
    layout = Layout(context_parallel, shard, accumulate, activation_checkpointing)
    given = _given(ctx)
    if resume:
        _refuse_settings(given)
    with process_group(require_device(device)) as own_device:
        if resume:
            changed = (steps if "steps" in given else None, lr if "lr" in given else None)
            trainer = Trainer.resume(out, own_device, layout, keep, *changed)
        else:
            config = _train_config(steps, batch_size, seq_len, lr, seed, checkpoint_every, dtype, packed)
            sizes = model_config(mixers, layers, hidden_size, heads, head_dim)
            require_memory(sizes, config, layout, own_device)
            corpus = Corpus.read(paths or ())
            trainer = Trainer.start(out, new_model(sizes, seed).to(own_device), corpus, config, layout, keep)
        calm_threads(own_device, trainer.model.config.hidden_size)
        console = Console(quiet=not trainer.ranks.first)
        _run(console, trainer)
        stopped_by = trainer.stopped_by
    if stopped_by:
        raise typer.Exit(128 + stopped_by)


def train_command(run: "Run", model: "FlashDeltaConfig", out: Path) -> str | None:
    """The command that trains such a run, with the options that differ from their defaults. None if there is none."""
    config, mixers = run.config, list(model.mixers)
    repeats = next(n for n in range(1, len(mixers) + 1) if all(m == mixers[i % n] for i, m in enumerate(mixers)))
    shape = {"mixers": ",".join(mixers[:repeats]), "layers": len(mixers), "hidden_size": model.hidden_size}
    shape |= {"heads": model.num_heads, "head_dim": model.head_dim}
    asked = {"steps": config.steps, "batch_size": config.batch_size, "seq_len": config.seq_len}
    asked |= {"lr": config.learning_rate, "seed": config.seed, "checkpoint_every": config.checkpoint_every}
    asked |= {"dtype": config.dtype, "packed": config.packed}
    if _train_config(**asked) != config or not _same_model(model_config(**shape), model):
        return None
    options = [f"--out {quote(str(out))}"]
    for name, value in (shape | asked).items():
        if value != signature(train).parameters[name].default:
            options.append(f"--{name.replace('_', '-')}" + (f" {value}" if value is not True else ""))
    return " ".join(["flash-delta train", *map(quote, run.paths), *options])


def _train_config(
    steps: int, batch_size: int, seq_len: int, lr: float, seed: int, checkpoint_every: int, dtype: str, packed: bool
) -> "TrainConfig":
    """The configuration of a run. Each checkpoint comes with an evaluation."""
    from flash_delta.training import TrainConfig

    computed = {"learning_rate": lr, "seed": seed, "dtype": dtype, "packed": packed}
    every = {"eval_every": checkpoint_every, "checkpoint_every": checkpoint_every}
    return TrainConfig(steps, batch_size, seq_len, **computed, **every)


def _same_model(one: "FlashDeltaConfig", other: "FlashDeltaConfig") -> bool:
    """Whether two models are the same, apart from fields that are about the file of a model."""
    one, other = ({n: v for n, v in config.to_dict().items() if n not in OF_A_FILE} for config in (one, other))
    return one == other


def _given(ctx: typer.Context) -> set[str]:
    """The options and arguments that are given on the command line."""
    names = (parameter.name for parameter in ctx.command.params)
    return {name for name in names if ctx.get_parameter_source(name).name == "COMMANDLINE"}


def _refuse_settings(given: set[str]) -> None:
    for name in sorted(given - FREE_TO_CHANGE):
        raise ValueError(f"{name}: expected no value with --resume, which keeps the run's own, got one")


def _description(trainer: "Trainer") -> Table:
    corpus, config = trainer.corpus, trainer.config
    table = Table(show_header=False)
    table.add_row("mixers", ", ".join(trainer.model.config.mixers))
    table.add_row("parameters", f"{trainer.model.num_parameters():,}")
    table.add_row("corpus", f"{corpus.name}: {corpus.files:,} files, {corpus.skipped:,} skipped")
    table.add_row("bytes", f"{len(corpus.train):,} to train on, {len(corpus.held_out):,} held out")
    table.add_row("steps", f"{trainer.step:,} done of {config.steps:,}, {config.batch_size} x {config.seq_len} bytes")
    table.add_row("device", str(trainer.model.device))
    if trainer.ranks.size > 1:
        _, shard = trainer.ranks.parameters.shape
        together = f"a window on {trainer.layout.context_parallel}, a copy of the parameters on {shard}"
        table.add_row("ranks", f"{trainer.ranks.size}: {together}")
    table.add_row("folder", str(trainer.folder))
    return table


def _run(console: Console, trainer: "Trainer") -> None:
    """Runs the training. Prints one line per evaluation, and on a terminal also shows a bar."""
    from flash_delta.training import latest_checkpoint, stop_signals

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with stop_signals() as stop:
        records = trainer.run(stop)
        console.print(_description(trainer))
        with progress:
            task = progress.add_task("starting", total=trainer.config.steps, completed=trainer.step)
            for record in records:
                progress.update(task, completed=record.step, description=f"{record.bits_per_byte:.2f} bits per byte")
                if record.held_out_bits_per_byte is not None:
                    console.print(_line(record), highlight=False, soft_wrap=True)
    if trainer.stopped_by:
        name, checkpoint = signal.Signals(trainer.stopped_by).name, latest_checkpoint(trainer.folder)
        line = f"stopped by {name} after step {trainer.step}, which {checkpoint} holds; continue with --resume"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(_result(trainer))


def _line(record: "Record") -> str:
    peak = "" if record.peak_gb is None else f"  peak {record.peak_gb:.2f} GB"
    return (
        f"step {record.step:6,}  bits per byte: training {record.bits_per_byte:.3f}, held out "
        f"{record.held_out_bits_per_byte:.3f}  {record.tokens_per_second:7,.0f} tokens/s{peak}"
    )


def _result(trainer: "Trainer") -> Table:
    bits = trainer.records[-1].held_out_bits_per_byte
    bits = trainer.evaluate() if bits is None else bits  # after a resume there may have been no step left
    table = Table("on held-out text", "bits per byte")
    table.add_row("this model", f"{bits:.3f}")
    table.add_row("byte frequencies alone (order-0 entropy)", f"{trainer.corpus.summary.entropy:.3f}")
    table.caption = f"{trainer.step:,} steps in {trainer.seconds:,.0f} s; report: flash-delta report {trainer.folder}"
    return table
