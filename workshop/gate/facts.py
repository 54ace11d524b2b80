"""Numbers about a compiled kernel. They depend only on the kernel and the compiler."""

import re
import subprocess
import tempfile
from collections import Counter
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from triton import knobs

from flash_delta.compiler import offline
from flash_delta.compiler.offline import Compiled
from flash_delta.compiler.targets import TARGETS, Target
from workshop.gate import lint, shared_memory
from workshop.gate.lint import transposed_accumulators
from workshop.gate.shared_memory import shared_barriers

Facts = dict[str, int | str | list[str]]

OPCODES = (
    "HGMMA",  # wgmma
    "WARPGROUP.DEPBAR",  # and its waits
    "UTCHMMA",  # tcgen05
    "HMMA",
    "UTMALDG",  # TMA
    "UTMASTG",
    "LDGSTS",  # cp.async
    "LDSM",
    "STSM",
    "SHFL",
    "MUFU.EX2",
)


def key(compiled: Compiled, target: str) -> Facts:
    """The key of one kernel. While it stays the same, so do all facts: it follows from what is compiled and from the
    code that finds facts."""
    return {"key": sha256(f"{compiled.key} {_hash_of_finders()}".encode()).hexdigest()[:16]}


@cache
def _hash_of_finders() -> str:
    paths = __file__, lint.__file__, shared_memory.__file__, offline.__file__
    return sha256(b"".join(Path(path).read_bytes() for path in paths)).hexdigest()


def facts(compiled: Compiled, target: str) -> Facts:
    """What is known about one kernel, with its key.

    Per thread: registers (on AMD also accumulation registers), bytes that are spilled, bytes of stack.
    Per program: bytes of shared memory, columns of tensor memory, warps, stages.
    Of the code: the number of instructions, and how often those of OPCODES occur, if they do.
    """
    metadata, chip = compiled.kernel.metadata, TARGETS[target]
    launch = {"shared": metadata.shared, "warps": metadata.num_warps, "stages": metadata.num_stages}
    if columns := getattr(metadata, "tmem_size", 0):  # Blackwell's tensor memory
        launch["tensor"] = columns
    asm = compiled.kernel.asm
    return key(compiled, target) | launch | (_amd(asm) if chip.backend == "hip" else _nvidia(asm, compiled.log, chip))


def _nvidia(asm: Any, log: str, chip: Target) -> Facts:
    opcodes = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", _sass(asm["cubin"]), re.M))
    counts = {name: sum(n for op, n in opcodes.items() if op.startswith(name)) for name in OPCODES}
    waits, products = counts["WARPGROUP.DEPBAR"], counts["HGMMA"]
    # Either sign is enough: ptxas warns (C7510 to C7512), or there is a wait for every wgmma.
    serialised = "wgmma.mma_async instructions are serialized" in log or 0 < products <= waits
    sharing = shared_barriers(asm["ttgir"], chip.arch)
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", log))),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill stores", log))),
        "stack": max(map(int, re.findall(r"(\d+) bytes stack frame", log))),
        "instructions": opcodes.total(),
        **{name: n for name, n in counts.items() if n},
        "warnings": sorted(set(re.findall(r"\((C\d+)\)", log))),
        "serialised": int(serialised),
        "lint": len(transposed_accumulators(asm["ttgir"])),
        **({"barriers": sharing} if sharing else {}),
    }


def _amd(asm: Any) -> Facts:
    text = asm["amdgcn"]

    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])

    return {
        "registers": number("vgpr_count"),
        "agpr": number("agpr_count"),
        "spilled": 4 * number("vgpr_spill_count"),
        "stack": number("private_segment_fixed_size"),
        "instructions": len(re.findall(r"^\t[a-z]\w+", text, re.M)),
        "mfma": text.count("v_mfma"),
    }


def _sass(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
