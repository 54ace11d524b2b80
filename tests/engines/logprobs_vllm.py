"""Log-probabilities of vLLM beside those of a trainer that runs the same weights under `enable()`, as for RL:

    FLASH_DELTA_VLLM=1 python logprobs_vllm.py sample MODEL OURS     answers, all prompts at once and then one by one
    FLASH_DELTA_VLLM=0 python logprobs_vllm.py sample MODEL THEIRS   the same by vLLM's own kernels
    python logprobs_vllm.py compare MODEL OURS THEIRS OUT            mean distances of a token's log-probability

MODEL is a folder of qwen3_5.py. Answers are drawn with temperature 1. Those that are drawn one by one have the same
seeds, so they are the same until rounding changes a token. What comes after that is not compared.
"""

import json
import os
import sys
from itertools import takewhile
from pathlib import Path
from statistics import mean
from typing import Any

import torch

PROMPTS, TOKENS, NEW = 32, 64, 128
CHUNK = 8  # answers that the trainer reads at once

Answers = list[tuple[list[int], list[float]]]  # of each prompt the tokens and their log-probabilities


def prompts(vocabulary: int) -> list[list[int]]:
    return torch.randint(2, vocabulary, (PROMPTS, TOKENS), generator=torch.Generator().manual_seed(0)).tolist()


def vocabulary_of(model: str) -> int:
    return json.loads(Path(model, "config.json").read_text())["vocab_size"]


def sample(model: str, out: str, options: str = "{}") -> None:
    from generate_vllm import count_calls, counted_calls  # it sets vLLM's environment
    from qwen3_5 import register
    from vllm import LLM, SamplingParams

    register()
    settings = {"enforce_eager": True, "enable_prefix_caching": False, "gpu_memory_utilization": 0.3}
    llm = LLM(
        model=model, skip_tokenizer_init=True, max_model_len=512, max_num_seqs=PROMPTS, dtype="bfloat16", seed=0,
        **settings | json.loads(options),
    )  # fmt: skip

    def answer(asked: list[tuple[int, list[int]]]) -> Answers:
        drawn = [
            SamplingParams(temperature=1, seed=seed, max_tokens=NEW, logprobs=0, detokenize=False, ignore_eos=True)
            for seed, _ in asked
        ]
        found = [a.outputs[0] for a in llm.generate([{"prompt_token_ids": p} for _, p in asked], drawn, use_tqdm=False)]
        return [
            (list(o.token_ids), [lp[t].logprob for t, lp in zip(o.token_ids, o.logprobs, strict=True)]) for o in found
        ]

    llm.collective_rpc(count_calls)
    asked = list(enumerate(prompts(vocabulary_of(model))))
    result = {"at once": answer(asked), "one by one": [answer([one])[0] for one in asked]}
    result |= {"calls": llm.collective_rpc(counted_calls), "plugin": os.environ.get("FLASH_DELTA_VLLM")}
    Path(out).write_text(json.dumps(result))


def of_trainer(model: str, answers: Answers, dtype: torch.dtype, active: bool = True) -> list[float]:
    """The log-probabilities of the answers' tokens in a pass over whole texts, as a training step has them."""
    from transformers import AutoModelForCausalLM

    from flash_delta.integrations.transformers import enable

    device = "cuda" if torch.cuda.is_available() else "cpu"
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).train()
    if active:
        enable(trained)
    texts = torch.tensor([p + a for p, (a, _) in zip(prompts(vocabulary_of(model)), answers, strict=True)])
    found = []
    for ids in texts.to(device).split(CHUNK):
        with torch.no_grad():
            logits = trained(input_ids=ids, use_cache=False).logits[:, TOKENS - 1 : -1].float()
        found += logits.log_softmax(-1).gather(-1, ids[:, TOKENS:, None]).flatten().tolist()
    return found


def distance(a: list[float], b: list[float]) -> float:
    return mean(abs(x - y) for x, y in zip(a, b, strict=True))


def flat(answers: Answers) -> list[float]:
    return [x for _, logprobs in answers for x in logprobs]


def in_common(a: Answers, b: Answers) -> tuple[list[float], list[float]]:
    """The log-probabilities of both up to the first token that differs."""
    left, right = [], []
    for (tokens, x), (others, y) in zip(a, b, strict=True):
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=True)))
        left, right = left + x[:same], right + y[:same]
    return left, right


def compare(model: str, ours: str, theirs: str, out: str) -> None:
    found = {name: json.loads(Path(path).read_text()) for name, path in (("plugin", ours), ("vLLM", theirs))}
    result: dict[str, Any] = {"tokens": PROMPTS * NEW, "calls of the plugin": found["plugin"]["calls"]}
    for name, run in found.items():
        batches = in_common(run["at once"], run["one by one"])
        result[f"{name}: two batch sizes"] = distance(*batches)
        result[f"{name}: tokens that both have"] = len(batches[0])
        drawn = run["at once"]
        result[f"{name}: and the trainer in bfloat16"] = distance(flat(drawn), of_trainer(model, drawn, torch.bfloat16))
        exact = of_trainer(model, drawn, torch.float32, active=False)
        result[f"{name}: and transformers in float32"] = distance(flat(drawn), exact)
    result["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    Path(out).write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    {"sample": sample, "compare": compare}[sys.argv[1]](*sys.argv[2:])
