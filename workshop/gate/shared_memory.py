"""Finds barriers whose shared memory Triton also gives to something else.

The hardware keeps a copy of a barrier (mbarrier) until it is invalidated. When another process gets the GPU in the
middle of a kernel, the hardware writes that copy to the barrier's memory. Whatever else lies there is damaged then.
Triton frees memory after its last use, so it may give a barrier's memory to a tile, to the scratch memory of an
operation, or to the values that a role reads when it starts. If the last use is the invalidation, that does no harm:
so it is with the barriers of loops that Triton pipelines itself.
"""

import re
import tempfile
from collections import Counter
from math import prod
from typing import NamedTuple

from triton._C.libtriton import ir, nvidia, passes

BYTES = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}
ADDRESS = 8  # bytes of a pointer, or of a descriptor's address
LEAST = 16  # bytes of scratch memory, whose size Triton 3.6 does not say: there the rest is not looked at
PTX_VERSION = 80  # of any kernel for Hopper: the allocation does not depend on it

_FUNCTION = re.compile(r"^(?=  tt\.func)", re.MULTILINE)
_PART = re.compile(r"(%[\w#]+) = ttg\.memdesc_\w+ (%[\w#]+)")
_BEGUN, _ENDED = (re.compile(rf"ttng\.{name}_barrier (%[\w#]+)") for name in ("init", "inval"))
_OFFSET, _SIZE = re.compile(r"allocation\.offset = (\d+)"), re.compile(r"allocation\.size = (\d+)")
_ARRAY = re.compile(r"(?:tensor|memdesc)<((?:\d+x)*)(\w+)")
_CAPTURE = re.compile(r"!ttg\.memdesc<((?:\d+x)+)[^>]*>|!tt\.(?:ptr|tensordesc)<[^>]*>|\b([if]\d+)\b")


class Use(NamedTuple):
    name: str
    first: int  # byte
    end: int
    is_barrier: bool


def shared_barriers(ttgir: str, capability: int) -> list[str]:
    """``barrier: other use`` for every two uses of the same bytes of which one is a barrier that is not invalidated."""
    if "ttng.init_barrier" not in ttgir:
        return []
    uses = []
    for function in _FUNCTION.split(_allocated(ttgir, capability)):
        ended = _invalidated(function)
        for use in map(_use, _allocating(function)):
            uses.append(use._replace(is_barrier=use.is_barrier and use.name.split(" = ")[0] not in ended))
    return [
        f"{barrier.name}: {use.name}"
        for barrier in uses
        for use in uses
        if barrier.is_barrier and use is not barrier and use.first < barrier.end and barrier.first < use.end
    ]


def _allocated(ttgir: str, capability: int) -> str:
    """The code after the passes that end with the allocation of shared memory, in Triton's own order."""
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, PTX_VERSION)
    manager.run(module, "allocation")
    return str(module)


def _invalidated(function: str) -> set[str]:
    """The arrays of barriers of which as many are invalidated as are initialised."""
    whole = dict(_PART.findall(function))
    begun, ended = (Counter(whole.get(part, part) for part in found.findall(function)) for found in (_BEGUN, _ENDED))
    return {array for array, count in begun.items() if ended[array] >= count}


def _allocating(code: str) -> list[str]:
    """The operations that have memory, each with its types. Those of `warp_specialize` follow its regions."""
    found, waiting = [], []
    for line in code.splitlines():
        indent = len(line) - len(line.lstrip())
        if "ttg.warp_specialize(" in line:
            waiting.append((indent, line))
        elif _OFFSET.search(line):
            found.append(line)
        elif waiting and indent == waiting[-1][0] and line.lstrip().startswith("} : ("):
            found.append(waiting.pop()[1] + line)
    return found


def _use(operation: str) -> Use:
    first, size = int(_OFFSET.search(operation)[1]), _SIZE.search(operation)
    name = operation.strip().split(" loc(")[0][:80]
    types = operation[operation.rfind(" : (") if " : (" in operation else operation.rfind(" : ") :]
    if "ttg.local_alloc" in operation:
        (array,) = _ARRAY.findall(types)[-1:]
        return Use(name, first, first + _bytes(array), array[1] == "i64")
    if size:
        return Use(name, first, first + int(size[1]), False)
    if "ttg.warp_specialize" in operation:
        return Use(name, first, first + sum(map(_captured, _CAPTURE.findall(types.split(") -> ")[0]))), False)
    return Use(name, first, first + LEAST, False)


def _captured(value: tuple[str, str]) -> int:
    """The bytes of a value that roles read when they start. An array is an address, an offset for each axis, and one
    number more, in 32 bits each."""
    shape, dtype = value
    return 4 * (shape.count("x") + 2) if shape else BYTES[dtype] if dtype else ADDRESS


def _bytes(array: tuple[str, str]) -> int:
    shape, dtype = array
    return prod(map(int, shape.split("x")[:-1])) * BYTES[dtype]
