"""Generates text by a byte-level model and its state. The prompt is read once. Then each byte costs one step."""

import codecs
import math
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from flash_delta.models import FlashDeltaCache
from flash_delta.training.config import LARGEST_SEED

BYTES = 256
MOST_BYTES = 10**9
COLDEST, HOTTEST = 1e-3, 1e3  # below, softmax is all or nothing; above, all probabilities are nearly equal


def generate_text(
    model: PreTrainedModel,
    prompt: str,
    max_bytes: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[str]:
    """Yields the continuation of the prompt in pieces, as soon as bytes form whole characters.

    Arguments are checked when the function is called, as in `generate_bytes`. A prompt from the command line may have
    bytes that are not UTF-8. Python represents them by surrogates.
    """
    data = prompt.encode(errors="surrogateescape")
    return _decoded(generate_bytes(model, data, max_bytes, temperature=temperature, top_k=top_k, seed=seed))


def _decoded(text: Iterator[int]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for byte in text:
        if piece := decoder.decode(bytes([byte])):
            yield piece
    if piece := decoder.decode(b"", final=True):
        yield piece


def generate_bytes(
    model: PreTrainedModel,
    prompt: bytes,
    max_bytes: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Samples max_bytes bytes. Temperature 0 takes the most likely byte. top_k draws among the k most likely ones.

    Raises:
        ValueError: when it is called, if the prompt is empty, or if another argument is not in its range: max_bytes 0
            to a billion, temperature 0 or 0.001 to 1,000, top_k from 1 on, seed 0 to 2^63 - 1.
        FloatingPointError: while it runs, if the model's logits are not finite.
    """
    if not prompt:
        raise ValueError("prompt: expected at least one byte, got none")
    top_k = BYTES if top_k is None else top_k
    bounds = {"max_bytes": (max_bytes, 0, MOST_BYTES), "top_k": (top_k, 1, math.inf), "seed": (seed, 0, LARGEST_SEED)}
    for name, (value, least, most) in bounds.items():
        if not least <= value:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
        if value > most:
            raise ValueError(f"{name}: expected at most {most:,}, got {value}")
    if temperature != 0 and not COLDEST <= temperature <= HOTTEST:
        raise ValueError(f"temperature: expected 0, or {COLDEST:g} to {HOTTEST:,g}, got {temperature}")
    return _sampled(model, prompt, max_bytes, temperature, top_k, seed)


def _sampled(
    model: PreTrainedModel, prompt: bytes, max_bytes: int, temperature: float, top_k: int, seed: int
) -> Iterator[int]:
    model.eval()
    generator = torch.Generator(model.device).manual_seed(seed)
    tokens, cache = torch.tensor([list(prompt)], device=model.device), FlashDeltaCache(model.config)
    for _ in range(max_bytes):
        with torch.inference_mode():  # not around the yield, or it would also apply to the caller's code
            logits = model(input_ids=tokens, cache=cache, use_cache=True).logits
            tokens = _sample(logits[:, -1], temperature, top_k, generator)
        yield tokens.item()


def _sample(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """A token [1, 1], drawn from logits [1, 256]."""
    if not logits.isfinite().all():
        raise FloatingPointError("model: expected finite logits, got others; a run with a lower --lr may not get there")
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k < logits.shape[-1]:
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    return torch.multinomial((logits.float() / temperature).softmax(dim=-1), num_samples=1, generator=generator)
