"""Completions of vLLM: ``python generate_vllm.py MODEL OUT OPTIONS``. Writes the tokens, their log-probabilities, how
many tokens came from the prefix cache, and how often each op ran."""

import json
import os
import sys
from collections import Counter
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}


def prompts() -> list[list[int]]:
    """Of 15 to 640 tokens; the last two begin alike."""
    import torch

    gen = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(2, 512, (count,), generator=gen).tolist()

    common = tokens(600)
    return [*(tokens(n) * 3 for n in (5, 20, 70)), *(common + tokens(n) for n in (9, 40))]


def count_calls() -> Counter:
    """How often each op is called from now on. A CUDA graph counts once, when it is captured."""
    from flash_delta.integrations import _vllm_calls as plugin

    counts, calls_of = Counter(), plugin.calls_of

    def counted(*args):
        calls = calls_of(*args)
        counts.update(op.__name__ for op, _ in calls)
        return calls

    plugin.calls_of = counted
    return counts


def complete(llm: Any) -> list[tuple[list[int], list[float], int]]:
    """Of each prompt the most likely 40 tokens, their log-probabilities, and the tokens from the prefix cache."""
    from vllm import SamplingParams

    sampling, found = SamplingParams(temperature=0, max_tokens=40, logprobs=1, detokenize=False, ignore_eos=True), []
    for answer in llm.generate([{"prompt_token_ids": p} for p in prompts()], sampling, use_tqdm=False):
        (completion,) = answer.outputs
        logprobs = [next(iter(token.values())).logprob for token in completion.logprobs]
        found.append((list(completion.token_ids), logprobs, answer.num_cached_tokens))
    return found


def main(model: str, out: str, options: str) -> None:
    from vllm import LLM

    counts = count_calls()
    settings = {"enforce_eager": True, "max_num_batched_tokens": 512} | json.loads(options)
    llm = LLM(
        model=model, skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=8, dtype="bfloat16", seed=0, **settings
    )
    found = complete(llm) + complete(llm)  # the second time prompts may be in the prefix cache
    with open(out, "w") as file:
        json.dump({"completions": found, "calls": counts}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
