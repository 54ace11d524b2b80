"""The rules: no spill beyond what is recorded, no serialised wgmma, no transposed accumulator, no barrier whose memory
has another use, and no more memory than a multiprocessor has."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from flash_delta.compiler.pool import Result
from flash_delta.compiler.targets import TARGETS
from workshop.gate.record import Rows, key_of

MODULES = (
    "workshop.gate.cases.rule",
    "workshop.gate.cases.serving",
    "workshop.gate.cases.elementwise",
    "workshop.gate.cases.prompts",
    "workshop.gate.cases.hopper",
)

TENSOR_COLUMNS = 512  # of Blackwell's tensor memory, which all programs on a multiprocessor share


class Fault(NamedTuple):
    kind: str
    text: str


def faults(result: Result, recorded: Rows) -> Iterator[Fault]:
    """What is wrong with a kernel. A kernel that is not recorded must not spill at all."""
    facts, limit = result.facts, TARGETS[result.target].shared_bytes
    if facts is None:
        yield Fault("compile", f"does not compile: {result.error}")
        return
    spilled, known = facts["spilled"], recorded.get(key_of(result), {}).get("spilled", 0)
    if spilled > known:
        yield Fault("spill", f"spills {spilled} bytes, {known} are recorded (--update --spills records it)")
    if facts.get("serialised"):
        waits = f"{facts.get('HGMMA', 0)} HGMMA, {facts.get('WARPGROUP.DEPBAR', 0)} waits"
        yield Fault("serialised", f"every wgmma waits for itself ({', '.join([waits, *facts['warnings']])})")
    if facts.get("lint"):
        yield Fault("lint", f"a product is transposed and multiplied again ({facts['lint']} lines)")
    if sharing := facts.get("barriers"):
        yield Fault("barriers", f"a barrier's shared memory has another use ({'; '.join(sharing)})")
    if facts["shared"] > limit:
        yield Fault("shared", f"needs {facts['shared']:,} bytes of shared memory of {limit:,}")
    columns = facts.get("tensor", 0)
    if columns > TENSOR_COLUMNS:
        yield Fault("tensor", f"needs {columns:,} columns of tensor memory of {TENSOR_COLUMNS}")


def judge(results: Iterable[Result], recorded: Rows) -> list[str]:
    """Everything that is wrong, in sentences."""
    return [
        f"{result.kernel}, {result.target}: {fault.text}" for result in results for fault in faults(result, recorded)
    ]
