"""Tells which launches have to be compiled again, without compiling any."""

from flash_delta.compiler.pool import Job, Result, compile_all
from workshop.gate.facts import key
from workshop.gate.record import Rows, key_of


def divide(jobs: list[Job], recorded: Rows) -> tuple[list[Job], list[Result]]:
    """The launches that are stale, and what is recorded of the others.

    A launch is stale if one of its kernels is not recorded, or is recorded with another key.
    """
    found = [result for results in compile_all(jobs, key, compiles=False) for result in results]
    stale = {_job_of(result) for result in found if not _holds(result, recorded)}
    held = [result._replace(facts=recorded[key_of(result)]) for result in found if _job_of(result) not in stale]
    return [job for job in jobs if job in stale], held


def _holds(result: Result, recorded: Rows) -> bool:
    row = recorded.get(key_of(result), {})
    return result.facts is not None and row.get("key") == result.facts["key"]


def _job_of(result: Result) -> Job:
    module, launch, *_ = result.kernel.split("/")
    return Job(module, launch, result.target)
