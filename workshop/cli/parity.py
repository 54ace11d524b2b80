"""`flash-delta-dev parity`: the losses of training by this library, by PyTorch in float32 and by fla."""

import json
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flash_delta.cli.environment import calm_threads, quiet_transformers, require_device
from flash_delta.cli.files import PATH

COUNT = {"min": 1}


def parity(
    out: Annotated[
        Path, typer.Argument(help="A folder for the records; those that are there are not run again.", **PATH)
    ],
    contestants: Annotated[
        str, typer.Option(help="Separated by commas; the first is the truth.")
    ] = "torch,flash_delta,fla",
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0,1,2",
    mixers: Annotated[
        str, typer.Option(help="gdn or kda, also with attention (gdn,gdn,gdn,attention); layers repeat them.")
    ] = "gdn",
    steps: Annotated[int, typer.Option(help="Of each run.", min=20)] = 2000,
    layers: Annotated[int, typer.Option(help="Of the model.", **COUNT)] = 4,
    heads: Annotated[int, typer.Option(help="Per layer.", **COUNT)] = 4,
    head_dim: Annotated[int, typer.Option(help="Width of a head.", **COUNT)] = 128,
    batch_size: Annotated[int, typer.Option(help="Windows per step.", **COUNT)] = 8,
    seq_len: Annotated[int, typer.Option(help="Tokens per window.", min=2)] = 512,
    paths: Annotated[list[Path] | None, typer.Option(help="Texts; none: Python's own library.", **PATH)] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile blocks by torch.compile.")] = False,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda.")] = "cuda",
) -> None:
    """Train a small model once per contestant and seed, on the same windows, and compare the losses; exit code 1 if a
    pair differs by more than seeds do.

    Each run writes OUT/CONTESTANT-SEED.json. A call that was stopped continues with the runs that are missing. The
    verdict is in OUT/parity.json.
    """
    from flash_delta.training import Corpus, Settings
    from workshop.parity.runs import ATTENTION, CONTESTANTS, FLA, file_of, require_same, train
    from workshop.parity.verdict import verdict

    names, numbers, where = contestants.split(","), [int(seed) for seed in seeds.split(",")], require_device(device)
    kinds = mixers.split(",")
    for option, given, known in (("contestants", names, CONTESTANTS), ("mixers", kinds, (*FLA, ATTENTION))):
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"{option}: expected among {', '.join(known)}, got {', '.join(unknown)}")
    if len({*kinds} - {ATTENTION}) != 1:
        raise ValueError(f"mixers: expected {' or '.join(FLA)}, and nothing else but attention, got {mixers}")
    if layers < len(kinds):
        raise ValueError(f"layers: expected at least the {len(kinds)} that mixers lists, got {layers}")
    texts = tuple(str(path.absolute()) for path in paths or ())
    sizes = {"layers": layers, "hidden_size": heads * head_dim, "heads": heads, "head_dim": head_dim}
    shape = {"steps": steps, "checkpoint_every": steps, "batch_size": batch_size, "seq_len": seq_len, "lr": 1e-3}
    corpus = Corpus.read(texts)
    quiet_transformers()
    calm_threads(where, sizes["hidden_size"])
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        for seed in numbers:
            file, settings = file_of(out, name, seed), Settings(paths=texts, mixers=mixers, seed=seed, **sizes, **shape)
            if file.exists():
                require_same(file, name, settings, corpus, where, compile)
            else:
                file.write_text(json.dumps(train(name, settings, corpus, where, compile)))
    records = {name: [json.loads(file_of(out, name, seed).read_text()) for seed in numbers] for name in names}
    found = verdict(records)
    (out / "parity.json").write_text(json.dumps(found, indent=1))
    Console().print(_table(found))
    if not found["right"]:
        raise typer.Exit(1)


def _table(found: dict) -> Table:
    table = Table("nats per token", "training", "held out", "right")
    spread = found["spread"]
    table.add_row(
        f"spread of seeds, {found['spread_of']}", f"{spread['training']:.4f}", f"{spread['held_out']:.4f}", ""
    )
    for pair in found["pairs"]:
        apart, right = pair["difference"], "yes" if pair["right"] else "no"
        table.add_row(" and ".join(pair["contestants"]), f"{apart['training']:.4f}", f"{apart['held_out']:.4f}", right)
    speeds = (f"{name} {median(of_seeds):,.0f}" for name, of_seeds in found["tokens_per_second"].items())
    table.caption = f"tokens per second: {', '.join(speeds)}"
    return table
