"""What flash_delta.integrations.transformers brings: layers of transformers, their own code beside ours.

    python examples/transformers_layers.py --device cuda
    python examples/transformers_layers.py --tokens 512 --prompts 1 --width 512 --heads 4

A layer as of Qwen3-Next (2048 wide, 16 key and 32 value heads of 128) and one as of Kimi-Linear (2304 wide, 32 heads of
128), with random weights, in bfloat16: a forward pass, a training step (forward and backward), a prompt into a cache,
and one token after it for each of several rows. Timed are transformers' PyTorch code, what transformers runs by itself
where that is something else (fla, if it is installed), and our ops in the same layer. Before a time stands, the outputs
are compared with those of the PyTorch code: further off than 2 % is another function.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from statistics import median
from types import ModuleType
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn
from transformers import DynamicCache, KimiLinearConfig, PreTrainedConfig, Qwen3NextConfig
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.utils import logging

from flash_delta.cli.environment import require_device
from flash_delta.integrations.transformers import CONVOLUTIONS, RULES, enable
from flash_delta.testing import relative_error
from workshop.bench.timing import milliseconds

ANOTHER_FUNCTION = 2e-2  # relative L2 error of outputs in bfloat16
LAYERS = {
    "Qwen3-Next": (modeling_qwen3_next.Qwen3NextGatedDeltaNet, Qwen3NextConfig),
    "Kimi-Linear": (modeling_kimi_linear.KimiLinearDeltaAttention, KimiLinearConfig),
}
Step = Callable[[], Tensor]


@contextmanager
def plain(module: ModuleType) -> Iterator[None]:
    """transformers' PyTorch code, which a module's names stand for only where fla cannot be imported."""
    before = {name: vars(module)[name] for name in RULES | CONVOLUTIONS if name in vars(module)}
    vars(module).update({name: inspect.unwrap(old) for name, old in before.items()})
    try:
        yield
    finally:
        vars(module).update(before)


def contestants(module: ModuleType) -> dict[str, Callable[[], AbstractContextManager]]:
    installed = {"as installed": nullcontext} if find_spec("fla") or find_spec("causal_conv1d") else {}
    return {"PyTorch": lambda: plain(module)} | installed | {"flash_delta": enable}


def make_layer(cls: type[nn.Module], config: PreTrainedConfig, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layer = cls(config, 0).to(device)
    for name, parameter in layer.named_parameters():
        if name.endswith("A_log"):
            nn.init.uniform_(parameter, 0, 2.8)  # as both families begin: rates from 1 to 16
        elif name.endswith("dt_bias"):
            nn.init.uniform_(parameter, -7, -2.3)  # steps from 0.001 to 0.1
    return layer.to(torch.bfloat16).eval()


def steps(layer: nn.Module, config: PreTrainedConfig, tokens: int, prompts: int, rows: int) -> dict[str, Step]:
    """Each returns what is compared: outputs, or all gradients in one tensor. Every call returns the same."""
    torch.manual_seed(1)

    def random(*shape: int) -> Tensor:
        weight = next(layer.parameters())
        return torch.randn(*shape, config.hidden_size, dtype=weight.dtype, device=weight.device)

    x, token = random(prompts, tokens).requires_grad_(), random(rows, 1)
    dy, leaves = torch.randn_like(x), (x, *layer.parameters())
    begun = DynamicCache(config=config)
    with torch.no_grad():
        layer(random(rows, 8), begun)

    def training() -> Tensor:
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(layer(x), leaves, dy)])

    @torch.no_grad()
    def token_by_token() -> Tensor:
        return layer(token, begun)

    name = f"{prompts}x{tokens}"
    return {
        f"forward {name}": torch.no_grad()(lambda: layer(x)),
        f"training {name}": training,
        f"prompt {name}": torch.no_grad()(lambda: layer(x, DynamicCache(config=config))),
        f"token {rows}x1": token_by_token,
    }


def main(
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
    tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 4096,
    prompts: Annotated[int, typer.Option(help="Prompts in a batch.")] = 2,
    rows: Annotated[int, typer.Option(help="Rows that are decoded.")] = 32,
    repeats: Annotated[int, typer.Option(help="Calls that are timed; the median counts.")] = 10,
    width: Annotated[int | None, typer.Option(help="Of a smaller layer: its hidden size.")] = None,
    heads: Annotated[int | None, typer.Option(help="Of a smaller layer: its (key) heads.")] = None,
) -> None:
    """Time linear attention layers of transformers as they are, and on this library."""
    logging.set_verbosity_error()
    where, failed = require_device(device), False
    changes = {"hidden_size": width} if width else {}
    if heads:
        changes |= {"linear_num_key_heads": heads, "linear_num_value_heads": 2 * heads, "linear_num_heads": heads}
    table = Table("layer", "step", "by", Column("ms", justify="right"), Column("times", justify="right"), "error")
    for family, (cls, config_cls) in LAYERS.items():
        types = ["linear_attention", "full_attention"]  # of which only the first is made
        config = config_cls(num_hidden_layers=2, layer_types=types, **changes)
        layer = make_layer(cls, config, where)
        results: dict[str, dict[str, tuple[Tensor, float]]] = {}
        for by, scope in contestants(inspect.getmodule(cls)).items():
            with scope():
                for name, step in steps(layer, config, tokens, prompts, rows).items():
                    results.setdefault(name, {})[by] = step(), median(milliseconds(step, where, repeats))
        for name, result in results.items():
            want, base = result["PyTorch"]
            for by, (got, ms) in result.items():
                error = relative_error(got, want)
                right = error <= ANOTHER_FUNCTION
                failed |= not right
                times = (f"{ms:.2f}", f"{base / ms:.2f}x") if right else ("", "another function")
                table.add_row(family, name, by, *times, f"{error:.1e}")
    Console(width=110).print(table)
    raise typer.Exit(failed)


if __name__ == "__main__":
    try:
        typer.run(main)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
