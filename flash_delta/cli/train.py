"""`flash-delta train`: a language model on any text, by transformers' Trainer."""

import signal
from dataclasses import fields, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flash_delta.cli.environment import calm_threads, quiet_transformers, require_device
from flash_delta.cli.files import PATH, PATHS
from flash_delta.cli.new_model import model_config, new_model, require_memory

if TYPE_CHECKING:
    from flash_delta.training import RunTrainer, Settings

# Options that are allowed beside --resume. They say how and where to compute, how far and how fast.
FREE_TO_CHANGE = {"out", "resume", "keep", "device", "context_parallel", "shard", "accumulate"}
FREE_TO_CHANGE |= {"activation_checkpointing", "compile", "head_tail", "report_to", "steps", "lr"}
COUNT = {"min": 1, "max": 99_999_999}


def train(
    ctx: typer.Context,
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Files, folders; none: Python's own library.", **PATHS)
    ] = None,
    out: Annotated[Path, typer.Option(help="The run's folder.", **PATH)] = Path("runs/train"),
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer's name or folder for transformers; none: bytes.")
    ] = None,
    mixers: Annotated[
        str, typer.Option(help="gdn, kda, gdn2, gdp, delta_net, attention; layers repeat them.")
    ] = "gdn,kda,gdn,attention",
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 4,
    hidden_size: Annotated[int, typer.Option(help="Width of the model.")] = 128,
    heads: Annotated[int, typer.Option(help="Heads per layer.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Width of a head's keys and values.")] = 32,
    steps: Annotated[int, typer.Option(help="Steps in all; beside --resume, to go on further.", **COUNT)] = 500,
    batch_size: Annotated[int, typer.Option(help="Windows per step.", **COUNT)] = 8,
    seq_len: Annotated[int, typer.Option(help="Tokens per window.", **COUNT | {"min": 2})] = 256,
    lr: Annotated[float, typer.Option(help="Peak learning rate; beside --resume, of the steps to come.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="Of the initial parameters and of the batches.", min=0, max=2**32 - 1)] = 0,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between evaluations with a checkpoint.", **COUNT)] = 100,
    keep: Annotated[int, typer.Option(help="Checkpoints that stay, the newest ones.", **COUNT)] = 2,
    dtype: Annotated[str, typer.Option(help="Of products: float32, bfloat16.")] = "float32",
    packed: Annotated[bool, typer.Option("--packed", help="A file begins anew inside a window.")] = False,
    context_parallel: Annotated[int, typer.Option(help="Ranks that share every window's tokens.", **COUNT)] = 1,
    head_tail: Annotated[
        bool, typer.Option("--head-tail", help="Ranks that share windows have parts of their row's start and end.")
    ] = False,
    shard: Annotated[int, typer.Option(help="GPUs that share one copy of the parameters (FSDP2).", **COUNT)] = 1,
    accumulate: Annotated[int, typer.Option(help="Passes per step, one after the other.", **COUNT)] = 1,
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Keep layers' inputs only; compute the rest twice.")
    ] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Compile blocks by torch.compile.")] = False,
    report_to: Annotated[
        str | None, typer.Option(help="Where Trainer also logs: tensorboard, wandb, ..., separated by commas.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, with its own settings.")] = False,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda.")] = "cpu",
) -> None:
    """Train a language model, on all ranks of torchrun if it is there; --out gets checkpoints and a model card.

    transformers' Trainer does it. Ctrl-C and SIGTERM end it after the step that it is in, with a checkpoint. A small
    model takes one thread of the CPU, unless OMP_NUM_THREADS says otherwise.
    """
    from flash_delta.training import Layout, stop_signals

    quiet_transformers()
    where = require_device(device)
    options = {"use_cpu": where.type == "cpu", "save_total_limit": keep, "report_to": _loggers(report_to)}
    if ":" in device:
        raise ValueError(f"device: expected cpu or cuda (CUDA_VISIBLE_DEVICES chooses one), got {device!r}")
    given = _given(ctx)
    layout = Layout(context_parallel, shard, accumulate, activation_checkpointing, compile, head_tail)
    if shard > 1 and where.type == "cpu":
        raise ValueError(f"shard: expected 1 on {where}, where accelerate has no FSDP2, got {shard}")
    settings = _settings(ctx.params, given, out if resume else None)
    calm_threads(where, settings.hidden_size)
    with stop_signals() as stop:
        trainer = _trainer(out, settings, layout, resume, where, stop=stop, **options)
        _run(trainer, out, resume)
    if trainer.stopped_by:
        raise typer.Exit(128 + trainer.stopped_by)


def train_command(settings: "Settings", out: Path) -> str:
    """The command that trains such a run, with the options that differ from their defaults."""
    options = [f"--out {quote(str(out))}"]
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name != "paths" and value != field.default:
            option = f"--{field.name.replace('_', '-')}"
            options.append(option if value is True else f"{option} {quote(str(value))}")
    return " ".join(["flash-delta train", *map(quote, settings.paths), *options])


def _given(ctx: typer.Context) -> set[str]:
    """The options and arguments that are given on the command line."""
    names = (parameter.name for parameter in ctx.command.params)
    return {name for name in names if ctx.get_parameter_source(name).name == "COMMANDLINE"}


def _loggers(report_to: str | None) -> list[str]:
    from transformers.integrations import get_available_reporting_integrations

    names, known = report_to.split(",") if report_to else [], get_available_reporting_integrations()
    for name in names:
        if name not in known:
            raise ValueError(f"report_to: expected names of installed loggers, {known or 'none'}, got {name!r}")
    return names


def _settings(options: dict[str, Any], given: set[str], resumed: Path | None) -> "Settings":
    from flash_delta.training import Settings, read_run, require_checkpoint

    if resumed is None:
        named = {field.name: options[field.name] for field in fields(Settings)}
        return Settings(**named | {"paths": tuple(str(path.absolute()) for path in options["paths"] or ())})
    for name in sorted(given - FREE_TO_CHANGE):
        raise ValueError(f"{name}: expected no value with --resume, which keeps the run's own, got one")
    done = int(require_checkpoint(resumed).name.rpartition("-")[2])
    settings = replace(read_run(resumed)[0], **{name: options[name] for name in given & {"steps", "lr"}})
    if settings.steps < done:
        raise ValueError(f"steps: expected at least the {done} that are done, got {settings.steps}")
    return settings


def _trainer(out: Path, settings: "Settings", layout, resume: bool, device, **options) -> "RunTrainer":
    from flash_delta.training import Corpus, RunTrainer, latest_checkpoint, load_model, load_tokenizer, read_run
    from flash_delta.training.card import require_no_other_page

    require_no_other_page(out)
    checkpoint = latest_checkpoint(out)
    if checkpoint and not resume:
        raise ValueError(f"out: expected a folder without a run, got {out} with {checkpoint.name}: resume it")
    if resume and (checkpoint / "optimizer.bin").exists() != (layout.shard > 1):  # FSDP2 has a format of its own
        expected = "1, as every rank had all parameters" if layout.shard > 1 else "more than 1, as the run had it"
        raise ValueError(f"shard: expected {expected}, got {layout.shard}")
    tokenizer = load_tokenizer(str(checkpoint) if resume else settings.tokenizer)
    if not resume:
        shape = settings.mixers, settings.layers, settings.hidden_size, settings.heads, settings.head_dim
        sizes = model_config(len(tokenizer), *shape)
        require_memory(sizes, settings, layout, device)
    corpus = Corpus.read(settings.paths, tokenizer if settings.tokenizer else None)
    if resume and corpus.summary.digest != read_run(out)[1].digest:
        raise ValueError(f"paths: expected the bytes that {out} started with, got others")
    model = load_model(checkpoint) if resume else new_model(sizes, settings.seed)
    return RunTrainer(out, model, tokenizer, corpus, settings, layout, **options)


def _run(trainer: "RunTrainer", out: Path, resume: bool) -> None:
    """Runs the training. Prints one line per evaluation, and on a terminal also shows Trainer's bar."""
    from transformers import PrinterCallback

    from flash_delta.training import latest_checkpoint
    from flash_delta.training.progress import Bar, Lines

    console = Console(quiet=not trainer.is_world_process_zero())
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Bar if console.is_terminal else Lines)
    checkpoint = latest_checkpoint(out) if resume else None
    console.print(_description(trainer, out, checkpoint))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.save_model()
    if trainer.stopped_by:
        name, step = signal.Signals(trainer.stopped_by).name, trainer.state.global_step
        line = f"stopped by {name} after step {step}, which {latest_checkpoint(out)} holds; continue with --resume"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(_result(trainer, out))
    trainer.create_model_card()
    trainer.accelerator.end_training()


def _description(trainer: "RunTrainer", out: Path, checkpoint: Path | None) -> Table:
    text, settings, model, args = trainer.corpus, trainer.settings, trainer.model, trainer.args
    done = int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0
    table = Table(show_header=False)
    table.add_row("mixers", ", ".join(model.config.mixers))
    table.add_row("parameters", f"{model.num_parameters():,}")
    table.add_row("corpus", f"{text.name}: {text.files:,} files, {text.skipped:,} skipped")
    table.add_row("bytes", f"{text.train_bytes:,} to train on, {text.held_out_bytes:,} held out")
    if settings.tokenizer:
        table.add_row("tokens", f"{text.train_tokens:,} to train on, {text.held_out_tokens:,} held out")
    table.add_row("steps", f"{done:,} done of {settings.steps:,}, {settings.batch_size} x {settings.seq_len} tokens")
    table.add_row("device", str(args.device))
    if args.world_size > 1:
        table.add_row("ranks", f"{args.world_size}")
    table.add_row("folder", str(out))
    return table


def _result(trainer: "RunTrainer", out: Path) -> Table:
    evaluations = [log for log in trainer.state.log_history if "eval_loss" in log]
    evaluated = evaluations and evaluations[-1]["step"] == trainer.state.global_step
    bits = (evaluations[-1] if evaluated else trainer.evaluate())["eval_bits_per_byte"]
    table = Table("on held-out text", "bits per byte")
    table.add_row("this model", f"{bits:.3f}")
    table.add_row("byte frequencies alone (order-0 entropy)", f"{trainer.corpus.entropy:.3f}")
    table.caption = f"{trainer.state.global_step:,} steps; report: flash-delta report {out}"
    return table
