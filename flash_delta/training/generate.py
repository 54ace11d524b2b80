"""Text from a byte-level model through its decoding state: the prompt is read once, then one byte costs one step."""

import codecs
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel


def generate_text(
    model: PreTrainedModel,
    prompt: str,
    max_bytes: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[str]:
    """The continuation of the prompt in pieces, each as soon as its bytes make whole characters."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for byte in generate_bytes(model, prompt.encode(), max_bytes, temperature=temperature, top_k=top_k, seed=seed):
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
    """Samples max_bytes bytes; temperature 0 takes the likeliest one, top_k draws among the k likeliest."""
    if not prompt:
        raise ValueError("prompt: expected at least one byte, got none")
    for name, value, least in (("max_bytes", max_bytes, 0), ("temperature", temperature, 0), ("top_k", top_k, 1)):
        if value is not None and value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    model.eval()
    generator = torch.Generator(model.device).manual_seed(seed)
    tokens, cache = torch.tensor([list(prompt)], device=model.device), None
    for _ in range(max_bytes):
        with torch.inference_mode():  # not around the yield: it would hold in the caller's code as well
            out = model(input_ids=tokens, past_key_values=cache, use_cache=True)
            tokens, cache = _sample(out.logits[:, -1], temperature, top_k, generator), out.past_key_values
        yield tokens.item()


def _sample(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> torch.Tensor:
    """[1, 1] token drawn from logits [1, 256]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    return torch.multinomial((logits.float() / temperature).softmax(dim=-1), num_samples=1, generator=generator)
