"""Completions of vLLM beside transformers in float32: ``python judge_vllm.py MODEL OUT ...`` adds to what
measure_vllm.py or generate_vllm.py wrote, for each run, how many tokens are the most likely ones and how far
log-probabilities are off at the most."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from generate_vllm import prompts


def load(model: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval().to(device)


def complete_in_bfloat16(model: str) -> list[tuple[list[int], list[float], int]]:
    """What transformers gives in vLLM's place, in vLLM's dtype."""
    bfloat16, found = load(model, torch.bfloat16), []
    for prompt in prompts():
        given = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        ids = torch.tensor([prompt], device=bfloat16.device)
        answer = bfloat16.generate(ids, **given, return_dict_in_generate=True, output_logits=True)
        tokens = answer.sequences[0, len(prompt) :].tolist()
        logprobs = torch.stack(answer.logits, 1)[0].float().log_softmax(-1)
        found.append((tokens, logprobs[range(len(tokens)), tokens].tolist(), 0))
    return found


def judge(reference: Any, completions: Sequence[tuple[list[int], list[float], int]]) -> tuple[int, float]:
    """How many tokens are the most likely ones in float32, and how far log-probabilities are off at the most."""
    right, off = 0, 0.0
    asked = prompts() * (len(completions) // len(prompts()))
    for prompt, (tokens, logprobs, _) in zip(asked, completions, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens], device=reference.device)).logits[0]
        expected, got = logits[len(prompt) - 1 : -1].log_softmax(-1).cpu(), torch.tensor(tokens)
        right += int((expected.argmax(-1) == got).sum())
        off = max(off, float((expected.gather(1, got[:, None])[:, 0] - torch.tensor(logprobs)).abs().max()))
    return right, off


def main(model: str, *outs: str) -> None:
    reference = load(model)
    for out in map(Path, outs):
        written = json.loads(out.read_text())
        for run in written.get("runs", [written]):
            if "completions" in run:
                right, off = judge(reference, run["completions"])
                tokens = sum(len(c[0]) for c in run["completions"])
                run["judged"] = {"tokens": tokens, "right": right, "off": round(off, 4)}
                shown = {name: run[name] for name in ("plugin", "graphs", "drafts", "counted", "calls") if name in run}
                print(out.stem, shown | run["judged"], flush=True)
        out.write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
