"""The models that packs are made for."""

from typing import NamedTuple


class Model(NamedTuple):
    rule: str  # "gated_delta_rule", "kda" or "delta_rule"
    heads: tuple[tuple[int, int], ...]  # key and value heads of its sizes
    K: int
    V: int
    parts: tuple[int, ...] = (1,)  # among how many GPUs the heads may be divided
    family: str | None = None  # in transformers
    doubled: bool = False  # whether beta reaches 2
    served: bool = True  # by the plugins for engines


MODELS = {
    "Qwen3-Next": Model("gated_delta_rule", ((16, 32),), 128, 128, (1, 2, 4, 8), "qwen3_next"),
    "Qwen3.5": Model("gated_delta_rule", ((16, 32), (16, 48), (16, 64)), 128, 128, (1, 2, 4, 8), "qwen3_5"),
    "Kimi-Linear": Model("kda", ((32, 32),), 128, 128, (1, 2, 4, 8), "kimi_linear"),
    "OLMo-hybrid": Model("gated_delta_rule", ((30, 30),), 96, 192, (1, 2, 3), "olmo_hybrid", doubled=True),
    "fla-GatedDeltaNet": Model("gated_delta_rule", ((6, 6),), 256, 512, served=False),
    "fla-KimiDeltaAttention": Model("kda", ((16, 16),), 128, 128, served=False),
    "fla-DeltaNet": Model("delta_rule", ((4, 4),), 256, 256, served=False),
}
