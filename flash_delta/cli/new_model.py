"""Makes the model that `flash-delta train` asks for, and checks that its training may fit into memory."""

import math
import os
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM
    from flash_delta.training import Layout, Settings

MOST = {"layers": 10_000, "hidden_size": 2**20, "heads": 2**16, "head_dim": 2**16}


def model_config(
    vocab_size: int, mixers: str, layers: int, hidden_size: int, heads: int, head_dim: int
) -> "FlashDeltaConfig":
    """The configuration of a model with so many layers, which repeat the list of mixers."""
    names = [name.strip() for name in mixers.split(",")]
    sizes = {"layers": layers, "hidden_size": hidden_size, "heads": heads, "head_dim": head_dim}
    for name, size in sizes.items():
        least = len(names) if name == "layers" else 1
        if size < least:
            why = " that mixers lists" if name == "layers" else ""
            raise ValueError(f"{name}: expected at least {'the ' * bool(why)}{least}{why}, got {size}")
        if size > MOST[name]:
            raise ValueError(f"{name}: expected at most {MOST[name]:,}, got {size}")
    return _config(vocab_size, [names[i % len(names)] for i in range(layers)], hidden_size, heads, head_dim)


def new_model(config: "FlashDeltaConfig", seed: int) -> "FlashDeltaForCausalLM":
    """A new model on the CPU."""
    import torch

    from flash_delta.models import FlashDeltaForCausalLM

    torch.manual_seed(seed)
    return FlashDeltaForCausalLM(config)


def require_memory(model: "FlashDeltaConfig", settings: "Settings", layout: "Layout", device: "torch.device") -> None:
    """Raises ValueError if training needs more memory than there is, by a lower bound and not by an estimate.

    The bound counts parameters, gradients and two moments in float32. If ranks share these, it counts one rank's part,
    but at least all parameters. It also counts one pass: logits with their gradients, and the input of every layer.
    """
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    parameters, tokens = _parameters(model), settings.batch_size * settings.seq_len
    held = 4 * parameters * max(1, 4 / layout.shard)
    passed = (
        4 * tokens / (ranks * layout.accumulate) * (2 * model.vocab_size + model.hidden_size * model.num_hidden_layers)
    )
    room = _memory(device)
    for names, needed in (
        ("hidden_size, layers, heads, head_dim", held),
        ("batch_size, seq_len", max(passed, 16 * tokens)),  # the batch itself is on the host
    ):
        if needed > room:
            has = f"the {room / 1e9:,.0f} GB of {device}"
            raise ValueError(
                f"{names}: expected sizes that fit into {has}, got sizes that need at least {needed / 1e9:,.0f} GB"
            )


def _config(vocab_size: int, pattern: list[str], hidden_size: int, heads: int, head_dim: int) -> "FlashDeltaConfig":
    from flash_delta.models import FlashDeltaConfig

    return FlashDeltaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=len(pattern),
        mixers=pattern,
        num_heads=heads,
        head_dim=head_dim,
        num_attention_heads=heads,
    )


def _parameters(config: "FlashDeltaConfig") -> int:
    """The number of parameters, from one layer of each kind and without memory for them."""
    import torch

    from flash_delta.models import FlashDeltaForCausalLM

    layers = Counter(config.mixers)
    with torch.device("meta"):
        sizes = config.vocab_size, list(layers), config.hidden_size, config.num_heads, config.head_dim
        model = FlashDeltaForCausalLM(_config(*sizes))
    repeated = zip(layers.values(), model.model.layers, strict=True)
    more = sum((count - 1) * sum(p.numel() for p in layer.parameters()) for count, layer in repeated)
    return model.num_parameters() + more


def _memory(device: "torch.device") -> float:
    """The total bytes of memory, or infinity if the system does not say."""
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # on Windows
        return math.inf
