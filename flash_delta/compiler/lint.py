"""The transposed-accumulator pattern, for which Triton 3.4 to 3.7 emit wrong code in larger kernels on Hopper."""

import re


def transposed_accumulators(ttgir: str) -> list[str]:
    """Lines in which a tile of a ``#linear`` layout is transposed, converted or staged for a product.

    The pattern is ``dot(trans(dot(a, b)), x)``: the result of a product, layout #mma, is transposed in registers, which
    gives it a #linear layout, and becomes an operand of the next one (flash-linear-attention issues 640, 826, 984).
    Compute the transposed product from its operands instead. Means something only where wgmma is (``warp_group_dot``).
    """
    if "warp_group_dot" not in ttgir:
        return []
    linear = "|".join(map(re.escape, re.findall(r"^(#linear\d*) = #ttg\.linear", ttgir, re.M)))
    tile = re.compile(rf"tensor<\d+x\d+x(bf16|f16|f32), ({linear})>")
    moves = ("tt.trans", "local_alloc", "convert_layout")
    lines = (line for line in ttgir.splitlines() if not line.startswith("#") and any(move in line for move in moves))
    return [re.sub(r" loc\(.*", "", line.strip()) for line in lines if linear and tile.search(line)]
