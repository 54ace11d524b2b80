"""Continuous batching: prompts arrive in a stream, and a small engine keeps a model busy with as many as it has slots.

    python examples/continuous_batching.py --device cuda       with a small fresh model
    python examples/continuous_batching.py --run runs/train    with one that `flash-delta train --mixers gdn,kda` made

A layer of Gated DeltaNet or Kimi Delta Attention remembers a request in a state of a fixed size, so a slot of a pool is
all the memory that it ever needs: nothing grows, is paged or moved. Every step takes one token of each request that is
being continued, fills up with pieces of prompts, and runs them through the model as one packed row: with `prefill_*`
while there are prompts to read, else with `decode_*`.

Unless told otherwise it compares every completion with `model.generate` on that prompt alone, token by token. The two
differ in rounding only: in other batches, in pieces of prompts, in chunks or token by token. In float32 that
moves a logit in its sixth digit or so, and changes a greedy choice only where the two best tokens are that near to each
other: with wide weights, as a fresh model has here, hardly ever. In half precision it would happen often.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from flash_delta import decode_gated_delta_rule, decode_kda, prefill_gated_delta_rule, prefill_kda
from flash_delta.cli.environment import quiet_transformers, require_device
from flash_delta.layers import GatedDeltaNet, KimiDeltaAttention
from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM
from flash_delta.training import require_checkpoint

TEXT = Path(__file__).read_bytes()  # prompts are pieces of this file; the model's tokens are bytes


@dataclass
class Request:
    """A prompt, what the model made of it so far, and how much of both its states have seen."""

    prompt: list[int]
    arrival: float  # the engine's step from which on it is there
    completion: list[int] = field(default_factory=list)
    seen: int = 0
    slot: int = -1

    def ahead(self) -> list[int]:
        """Tokens that the model has not read: what is left of the prompt, or the last token chosen."""
        return (self.prompt + self.completion)[self.seen :]


@dataclass
class Batch:
    """Tokens of N requests in one packed row."""

    tokens: Tensor  # [1, T]
    bounds: Tensor  # [N + 1]
    slots: Tensor  # [N]
    begun: Tensor  # [N], bool: the slot holds a state of this request, not what another one left there
    decoding: bool  # one token of each, and all have begun


class Pool:
    """The states of one layer for all slots, and the layer run on them."""

    def __init__(self, layer: GatedDeltaNet | KimiDeltaAttention, slots: int) -> None:
        self.layer = layer
        is_kda = isinstance(layer, KimiDeltaAttention)
        self.decode = decode_kda if is_kda else decode_gated_delta_rule
        self.prefill = prefill_kda if is_kda else prefill_gated_delta_rule
        new = partial(torch.zeros, device=layer.o_proj.weight.device)
        self.states = new(slots, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim)
        convolutions = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d) if layer.use_short_conv else ()
        self.conv = [new(slots, c.hidden_size, c.kernel_size, dtype=c.weight.dtype) for c in convolutions]

    def mix(self, x: Tensor, batch: Batch) -> Tensor:
        """x [1, T, D] -> the layer's output [1, T, D]; the states of the batch's slots move on."""
        slots = batch.slots
        past = [conv[slots].where(batch.begun[:, None, None], 0) for conv in self.conv]
        inputs, last = self.layer.tokens(x, tuple(past) or None, True, batch.bounds)
        for conv, state in zip(self.conv, last or (), strict=True):
            conv[slots] = state
        where = {"state_pool": self.states, "read_indices": slots, "write_indices": slots, "state_v_first": True}
        if batch.decoding:  # N rows of one token
            rows = {name: tensor.transpose(0, 1) for name, tensor in inputs.items()}
            o = self.decode(**rows, **where, **self.layer.options()).transpose(0, 1)
        else:
            ragged = {"cu_seqlens": batch.bounds, "has_initial_state": batch.begun}
            o = self.prefill(**inputs, **where, **ragged, **self.layer.options())
        return self.layer.output(o, x)


class Engine:
    """Serves requests with a model, greedily.

    Args:
        model: of delta-rule layers only; an attention layer would need memory that grows with the text.
        slots: requests at a time.
        step_tokens: tokens of one step at most, not fewer than slots; long prompts are read in pieces.
        max_new_tokens: length of every completion.

    Raises:
        ValueError: if an argument is not as above.
    """

    def __init__(self, model: FlashDeltaForCausalLM, slots: int, step_tokens: int, max_new_tokens: int) -> None:
        if "attention" in model.config.mixers:
            raise ValueError(f"model: expected mixers 'gdn' and 'kda' only, got {model.config.mixers}")
        limits = (("slots", slots, 1), ("step_tokens", step_tokens, slots), ("max_new_tokens", max_new_tokens, 1))
        for name, value, least in limits:
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        self.model, self.step_tokens, self.max_new_tokens = model, step_tokens, max_new_tokens
        self.pools = [Pool(block.mixer, slots) for block in model.model.layers]
        self.free, self.active = list(range(slots)), []

    def admit(self, request: Request) -> None:
        """Gives the request a slot; whoever had it before left a state there, which is not read."""
        request.slot = self.free.pop()
        self.active.append(request)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One pass of the model for all requests; returns those that are complete now."""
        chosen = self.schedule()
        batch = self.pack(chosen)
        ends = self.run(batch)[0, batch.bounds[1:] - 1].argmax(-1).tolist()  # the step's only wait for the device
        for (request, count), token in zip(chosen, ends, strict=True):
            request.seen += count
            if not request.ahead():  # the prompt is read: the token after its last one is the next
                request.completion.append(token)
        done = [request for request in self.active if len(request.completion) == self.max_new_tokens]
        self.active = [request for request in self.active if request not in done]
        self.free += [request.slot for request in done]
        return done

    def schedule(self) -> list[tuple[Request, int]]:
        """Who takes part with how many tokens: those that are being continued first, prompts with what is left."""
        left, chosen = self.step_tokens, []
        for request in sorted(self.active, key=lambda request: not request.completion):
            count = min(len(request.ahead()), left)
            if count:
                chosen.append((request, count))
                left -= count
        return chosen

    def pack(self, chosen: list[tuple[Request, int]]) -> Batch:
        tensor = partial(torch.tensor, device=self.model.device)
        return Batch(
            tokens=tensor([[token for request, count in chosen for token in request.ahead()[:count]]]),
            bounds=tensor([0, *accumulate(count for _, count in chosen)]),
            slots=tensor([request.slot for request, _ in chosen]),
            begun=tensor([request.seen > 0 for request, _ in chosen]),
            decoding=all(request.completion for request, _ in chosen),
        )

    def run(self, batch: Batch) -> Tensor:
        """The logits of the batch's tokens [1, T, vocab_size]."""
        model = self.model.model
        hidden_states = model.embed_tokens(batch.tokens)
        for block, pool in zip(model.layers, self.pools, strict=True):
            hidden_states = hidden_states + pool.mix(block.mixer_norm(hidden_states), batch)
            hidden_states = hidden_states + block.mlp(block.mlp_norm(hidden_states))
        return self.model.lm_head(model.norm(hidden_states))


def serve(engine: Engine, requests: list[Request]) -> Iterator[Request]:
    """Requests in the order of their completion; none is admitted before it arrives."""
    waiting, steps = sorted(requests, key=lambda request: request.arrival), 0
    while waiting or engine.active:
        while waiting and waiting[0].arrival <= steps and engine.free:
            engine.admit(waiting.pop(0))
        if engine.active:
            yield from engine.step()
        steps += 1


def stream(prompts: int, longest: int, per_step: float, seed: int) -> list[Request]:
    """Prompts of 1 to `longest` bytes, at random times, `per_step` of them in a step on average."""
    draw, arrival, requests = random.Random(seed), 0.0, []
    for _ in range(prompts):
        arrival += draw.expovariate(per_step)
        start, length = draw.randrange(len(TEXT) - longest), draw.randint(1, longest)
        requests.append(Request(list(TEXT[start : start + length]), arrival))
    return requests


def fresh_model(hidden_size: int, layers: int, seed: int) -> FlashDeltaForCausalLM:
    """Weights ten times as wide as in training: its completions are no repetitions of one token."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 256, "hidden_size": hidden_size, "num_heads": 4, "head_dim": hidden_size // 4}
    mixers = [("gdn", "kda")[layer % 2] for layer in range(layers)]
    config = FlashDeltaConfig(**sizes, num_hidden_layers=layers, mixers=mixers, initializer_range=0.2)
    return FlashDeltaForCausalLM(config)


def generate_alone(model: FlashDeltaForCausalLM, request: Request) -> list[int]:
    """What `generate` makes of the request's prompt."""
    prompt = torch.tensor([request.prompt], device=model.device)
    options = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "do_sample": False}
    return model.generate(prompt, max_new_tokens=len(request.completion), **options)[0, prompt.shape[1] :].tolist()


def main(
    run: Annotated[Path | None, typer.Option(help="A folder of `flash-delta train`; none: a fresh model.")] = None,
    hidden_size: Annotated[int, typer.Option(help="Width of a fresh model.")] = 128,
    layers: Annotated[int, typer.Option(help="Of a fresh model: gdn, kda, gdn, ...")] = 4,
    prompts: Annotated[int, typer.Option(help="Prompts in the stream.")] = 32,
    longest: Annotated[int, typer.Option(help="Bytes of a prompt, at most.")] = 300,
    max_new_tokens: Annotated[int, typer.Option(help="Bytes of a completion.")] = 32,
    per_step: Annotated[float, typer.Option(help="Prompts that arrive in a step, on average.")] = 0.5,
    slots: Annotated[int, typer.Option(help="Requests that are served at a time.")] = 8,
    step_tokens: Annotated[int, typer.Option(help="Tokens that a step takes, at most.")] = 256,
    seed: Annotated[int, typer.Option(help="Of the stream and of a fresh model.")] = 0,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
    verify: Annotated[bool, typer.Option(help="Compare with `generate` on each prompt alone.")] = True,
) -> None:
    """Serve a stream of prompts by continuous batching."""
    quiet_transformers()
    console = Console(soft_wrap=True, highlight=False)
    fresh = partial(fresh_model, hidden_size, layers, seed)
    model = FlashDeltaForCausalLM.from_pretrained(require_checkpoint(run)) if run else fresh()
    model = model.to(require_device(device)).eval()
    engine, requests = Engine(model, slots, step_tokens, max_new_tokens), stream(prompts, longest, per_step, seed)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        start = time.perf_counter()
        done = list(progress.track(serve(engine, requests), prompts, description="serving"))
        seconds = time.perf_counter() - start
        read, written = (sum(map(len, of)) for of in zip(*((r.prompt, r.completion) for r in done), strict=True))
        console.print(
            f"{len(done)} prompts in {seconds:.2f} s: {read:,} tokens read, {written:,} written, "
            f"{(read + written) / seconds:,.0f} tokens/s"
        )
        if verify:
            alone = [generate_alone(model, request) for request in progress.track(done, description="verifying")]
            equal = sum(request.completion == other for request, other in zip(done, alone, strict=True))
            console.print(f"{equal} of {len(done)} completions are what model.generate makes of the prompt alone")
            raise typer.Exit(equal != len(done))


if __name__ == "__main__":
    try:
        typer.run(main)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error
