"""Finds transposed accumulators, for which Triton 3.4 to 3.7 emit wrong code in larger kernels on Hopper."""

import re

_VALUE = re.compile(r"%[\w#-]+")
_TRANSPOSED = re.compile(r"(%[\w-]+) = tt\.trans .*: tensor<[^>]*, #mma\d*> ->")


def transposed_accumulators(ttgir: str) -> list[str]:
    """Lines in which a transposed accumulator, or what was computed from one, becomes the operand of a product.

    The pattern is ``dot(trans(dot(a, b)), x)``: the result of a product, layout #mma, is transposed in registers and
    staged for the next one (flash-linear-attention issues 640, 826, 984). Compute the transposed product from its
    operands instead. Storing a transposed result is fine. The check applies only to kernels with wgmma
    (``warp_group_dot``).
    """
    if "warp_group_dot" not in ttgir:
        return []
    tainted: set[str] = set()
    found = []
    for line in (re.sub(r" loc\(.*", "", line.strip()) for line in ttgir.splitlines()):
        result, _, operation = line.partition(" = ")
        tainted.discard(result)  # another region has used the name for another value
        if _TRANSPOSED.match(line):
            tainted.add(result)
        elif tainted.intersection(_VALUE.findall(operation)):
            if "local_alloc" in operation or "warp_group_dot" in operation:
                found.append(line)
            elif "-> tensor" in operation or ": tensor" in operation:
                tainted.add(result)
    return found
