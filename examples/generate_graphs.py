"""Greedy generation with a transformers Qwen3-Next model whose decoding step is one CUDA graph.

    python examples/generate_graphs.py --device cuda --dtype bfloat16 --hidden-size 1024 --layers 12
    python examples/generate_graphs.py                    on a CPU: the same loop without a graph

An eager step takes some 1 ms of host time per layer, most of it in transformers' Python. A graph is one launch.
All that it reads and writes has to stay where it was: transformers' `StaticCache` writes keys, values and both states
of linear attention in place, and the token, its position and the cache's length are tensors. The attention mask is made
from the position, so that no code of transformers reads a tensor on the host.

The model is random. Printed are tokens/s of `model.generate` as it is, of the same after `enable()`, and of this loop.
The tokens of all three are compared. In float32 they are the same, or the exit code is 1. In half precision other
rounding changes some.
"""

import time
from collections.abc import Callable
from inspect import signature
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM, StaticCache

from flash_delta.cli.environment import quiet_transformers, require_device
from flash_delta.integrations.transformers import enable

VOCABULARY = 512
DTYPES = ("float32", "bfloat16", "float16")
WARM = 3  # steps before the capture: they compile kernels and allocate the libraries' memory


class Loop:
    """A model with a static cache for ``rows`` rows of up to ``longest`` tokens."""

    def __init__(self, model: nn.Module, rows: int, longest: int) -> None:
        self.model, self.cache = model, StaticCache(config=model.config, max_cache_len=longest)
        self.name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"  # before 5.24
        self.token = torch.zeros(rows, 1, dtype=torch.long, device=model.device)
        self.position = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        self.places = torch.arange(longest, device=model.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def read(self, prompt: Tensor) -> None:
        """prompt [B, T]: the cache is of these rows from now on, and the first new token is chosen."""
        self.cache.reset()
        logits = self.model(prompt, **{self.name: self.cache}, use_cache=True, logits_to_keep=1).logits
        self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self.position.fill_(prompt.shape[1])

    def step(self) -> None:
        """One more token of every row, in place: nothing here asks for a value or moves a tensor."""
        masks = {"full_attention": (self.places <= self.position)[None, None], "linear_attention": None}
        inputs = {"position_ids": self.position, self.name: self.cache, "attention_mask": masks}
        logits = self.model(self.token, **inputs, use_cache=True).logits
        self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self.position.add_(1)

    def capture(self, prompt: Tensor) -> None:
        """Makes the graph. Steps before it run on another stream, as PyTorch asks for; `read` forgets them."""
        self.read(prompt)
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(WARM):
                self.step()
        here.wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    @torch.inference_mode()
    def generate(self, prompt: Tensor, new_tokens: int) -> Tensor:
        """prompt [B, T] -> the tokens after it [B, new_tokens]."""
        if self.token.is_cuda and self.graph is None:
            self.capture(prompt)
        self.read(prompt)
        chosen = [self.token.clone()]
        for _ in range(new_tokens - 1):
            self.step() if self.graph is None else self.graph.replay()
            chosen.append(self.token.clone())
        return torch.cat(chosen, dim=1)


def random_model(hidden_size: int, layers: int) -> Qwen3NextForCausalLM:
    """With heads of 64 and few experts. Of the ways to run experts this one asks nothing of the host."""
    torch.manual_seed(0)
    heads, wide = max(hidden_size // 128, 1), hidden_size // 2
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY, hidden_size=hidden_size, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=1, head_dim=64, linear_num_key_heads=heads, linear_num_value_heads=2 * heads,
        linear_key_head_dim=64, linear_value_head_dim=64, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=wide, shared_expert_intermediate_size=wide, experts_implementation="batched_mm",
        initializer_range=0.2, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config).eval()


def timed(generate: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Tokens [B, T], and how many a second, in the second call: the first one compiles."""
    generate()
    start = time.perf_counter()
    tokens = generate()
    tokens.tolist()  # waits for the device
    return tokens, tokens.numel() / (time.perf_counter() - start)


def main(
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float32",
    rows: Annotated[int, typer.Option(help="Prompts in a batch.")] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 32,
    new_tokens: Annotated[int, typer.Option(help="Tokens after it.")] = 64,
    hidden_size: Annotated[int, typer.Option(help="The model's width.")] = 64,
    layers: Annotated[int, typer.Option(help="Layers; every fourth one is softmax attention.")] = 4,
) -> None:
    """Compare tokens and tokens/s of a loop under a CUDA graph with those of model.generate."""
    quiet_transformers()
    where = require_device(device)
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected {', '.join(DTYPES)}, got {dtype!r}")
    model = random_model(hidden_size, layers).to(where, getattr(torch, dtype))
    prompt = torch.randint(1, VOCABULARY, (rows, tokens), device=where)
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": new_tokens}

    def theirs() -> Tensor:
        return model.generate(prompt, **options)[:, tokens:]

    loop = Loop(model, rows, tokens + max(new_tokens, WARM + 1))
    found = {"model.generate": timed(theirs)}
    with enable(model):
        found["model.generate, enable()"] = timed(theirs)
        found[f"this loop, {'a graph' if where.type == 'cuda' else 'no graph'}"] = timed(
            lambda: loop.generate(prompt, new_tokens)
        )
    want, _ = found["model.generate"]
    table = Table("by", Column("tokens/s", justify="right"), "tokens")
    for by, (got, rate) in found.items():
        table.add_row(by, f"{rate:,.0f}", f"{(got == want).sum()} of {want.numel()} as model.generate's")
    Console().print(table)
    if where.type != "cuda":
        print(f"on {where} there are no CUDA graphs: the loop ran eagerly")
    raise typer.Exit(dtype == "float32" and any(not torch.equal(got, want) for got, _ in found.values()))


if __name__ == "__main__":
    try:
        typer.run(main)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
