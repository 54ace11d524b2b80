"""Compiles launches in processes, so a launch that crashes the compiler loses only its own result."""

import importlib
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Job(NamedTuple):
    module: str
    launch: str
    target: str


Facts = dict[str, Any]
Look = Callable[[Any, str], Facts]  # takes what `offline` compiled, and its target


class Result(NamedTuple):
    """The result for one kernel of a launch, ``module/launch/function``, or for a launch that failed."""

    kernel: str
    target: str
    facts: Facts | None  # what was asked about the kernel
    error: str | None = None


@contextmanager
def clean_processes(count: int) -> Iterator[tuple[ProcessPoolExecutor, Path]]:
    """Processes in which Triton compiles, with an empty cache and no interpreter; and the file with their output."""
    with tempfile.TemporaryDirectory(prefix="flash-delta-") as folder:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(count, spawn, initializer=_prepare, initargs=(folder,)) as pool:
            yield pool, Path(folder) / "log"


def _prepare(folder: str) -> None:
    """Runs before Triton is imported. Sends the compiler's output to a file, where it is found after a crash."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = folder
    log = os.open(Path(folder) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


def find_jobs(modules: list[str], targets: list[str]) -> tuple[str, list[Job]]:
    """Triton's version, and every launch of the modules."""
    with clean_processes(1) as (pool, _):
        return pool.submit(_find_jobs, modules, targets).result()


def _find_jobs(modules: list[str], targets: list[str]) -> tuple[str, list[Job]]:
    import triton

    jobs = []
    for name in modules:
        module = importlib.import_module(name)
        if not hasattr(module, "launches"):
            raise ValueError(f"modules: expected a module that has launches(target), got {name!r}")
        for target in targets:
            launches = [launch.name for launch in module.launches(target)]
            if len(set(launches)) < len(launches):
                raise ValueError(
                    f"{name}.launches({target!r}): expected a different name for each, got {', '.join(launches)}"
                )
            jobs += [Job(name, launch, target) for launch in launches]
    return triton.__version__, jobs


def compile_all(jobs: list[Job], look: Look, compiles: bool = True) -> Iterator[list[Result]]:
    """Yields one list per job, with what ``look`` finds in each compiled kernel. It is a function of a module, since it
    is called in other processes. ``compiles``: as of `offline`. A crash loses all jobs that still wait. Then a single
    process runs these in order, which shows which one crashed."""
    waiting, workers = jobs, os.cpu_count() or 1
    while waiting:
        lost = []
        with clean_processes(workers) as (pool, log):
            for job, future in [(job, pool.submit(compile_launch, job, look, compiles)) for job in waiting]:
                try:
                    yield future.result()
                except BrokenProcessPool:
                    lost.append(job)
            if lost and workers == 1:
                said = log.read_text(errors="replace").strip().splitlines()
                yield [_failed(lost.pop(0), f"the compiler crashed: {said[-1] if said else 'it printed nothing'}")]
        waiting, workers = lost, 1


def compile_launch(job: Job, look: Look, compiles: bool) -> list[Result]:
    from flash_delta.compiler.offline import offline

    launch = next(x for x in importlib.import_module(job.module).launches(job.target) if x.name == job.launch)
    try:
        with offline(job.target, compiles) as compiled, warnings.catch_warnings():
            warnings.simplefilter("error")  # a user would see a launch's warnings
            launch.call()
        found = {kernel.name: look(kernel, job.target) for kernel in compiled}
    except Exception as error:
        return [_failed(job, _reason(error))]
    if len(found) < max(len(compiled), 1):
        return [_failed(job, f"expected kernels of different names, got {[kernel.name for kernel in compiled]}")]
    return [Result(f"{job.module}/{job.launch}/{name}", job.target, numbers) for name, numbers in found.items()]


def _failed(job: Job, error: str) -> Result:
    return Result(f"{job.module}/{job.launch}", job.target, None, error)


def _reason(error: BaseException) -> str:
    """An error's reason, in one line. Triton wraps an error once for each function that led to it, and a
    `CompilationError` shows the source first and the reason last."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1 if type(error).__name__ == 'CompilationError' else 0].strip()}"
