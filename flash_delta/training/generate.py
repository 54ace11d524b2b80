"""Generates text by a model and its state. The prompt is read once. Then each token costs one step."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

COLDEST, HOTTEST = 1e-3, 1e3  # below, softmax is all or nothing; above, all probabilities are nearly equal


def generate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    streamer: TextStreamer | None = None,
) -> str:
    """The prompt's continuation. Temperature 0 takes the most likely token. top_k draws among the k most likely ones.

    A prompt from the command line may have bytes that are not UTF-8. Python represents them by surrogates, and they are
    replaced here.

    Args:
        streamer: also gets the prompt and each token as soon as there is one.

    Raises:
        ValueError: if the prompt is empty, or if the temperature is neither 0 nor between 0.001 and 1,000.
    """
    text = prompt.encode(errors="surrogateescape").decode(errors="replace")
    tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(model.device)
    if not tokens.input_ids.numel():
        raise ValueError("prompt: expected at least one token, got none")
    if temperature != 0 and not COLDEST <= temperature <= HOTTEST:
        raise ValueError(f"temperature: expected 0, or {COLDEST:g} to {HOTTEST:,g}, got {temperature}")
    if max_tokens == 0:
        return ""
    drawn = {"temperature": temperature, "top_k": top_k or 0} if temperature else {}
    with torch.random.fork_rng(range(torch.cuda.device_count())):  # it warns if it has to choose among several
        torch.manual_seed(seed)
        ids, mask = tokens.input_ids, tokens.attention_mask
        made = model.eval().generate(
            ids, attention_mask=mask, max_new_tokens=max_tokens, streamer=streamer, do_sample=bool(drawn), **drawn
        )
    return tokenizer.decode(made[0, ids.shape[1] :])
