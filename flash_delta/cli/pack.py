"""`flash-delta pack`: kernels compiled for a model's calls, in a file that servers read instead of compiling."""

from pathlib import Path
from typing import Annotated

import typer

from flash_delta.cli.tables import Table, show


def pack(
    model: Annotated[list[str], typer.Option(help="Whose calls; repeat for several. `all`: every model.")],
    out: Annotated[Path, typer.Option(help="Folder, for FLASH_DELTA_KERNELS.")],
    target: Annotated[str, typer.Option(help="The chip: sm_80, sm_89, sm_90a, sm_100 or sm_120.")] = "sm_90a",
    tp: Annotated[
        list[int] | None,
        typer.Option(help="GPUs among which heads are divided; repeat for several. Default: every possible number."),
    ] = None,
) -> None:
    """Compile the kernels of a model's calls, without a GPU, for processes that then compile nothing; some minutes.

    It needs a C compiler and the installed version of Triton, which has to be that of the servers.
    """
    from flash_delta.compiler.packing import GPUS, make_pack
    from flash_delta.packs.model import MODELS
    from flash_delta.packs.models import calls_of_model

    names = list(MODELS) if model == ["all"] else model
    for name in names:
        if name not in MODELS:
            raise ValueError(f"model: expected one of {', '.join(MODELS)} or all, got {name!r}")
        unknown = [part for part in tp or () if part not in MODELS[name].parts]
        if unknown:
            allowed = ", ".join(map(str, MODELS[name].parts))
            raise ValueError(f"tp: expected some of {allowed} for {name}, got {unknown[0]}")
    if target not in GPUS:
        raise ValueError(f"target: expected one of {', '.join(GPUS)}, got {target!r}")
    label = "-".join([*(name.lower() for name in model), *(f"tp{part}" for part in tp or ())])
    calls = (call for name in names for call in calls_of_model(name, tuple(tp or MODELS[name].parts)))
    path, count = make_pack(out, target, label, calls)
    show([Table(("pack", "kernels", "bytes"), [(str(path), str(count), f"{path.stat().st_size:,}")])])
