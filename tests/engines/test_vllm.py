"""vLLM's own engine on this library: completions of a tiny model, judged by transformers in float32.

`make engines` runs it; elsewhere there is no vLLM, and it is skipped.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
HERE = Path(__file__).parent
SPECULATION = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
RUNS = {
    "plain": {"enable_prefix_caching": False},
    "prefix-cache": {"enable_prefix_caching": True, "mamba_cache_mode": "align"},
    "drafts": SPECULATION | {"enable_prefix_caching": False},
    "compiled": {"enable_prefix_caching": False, "enforce_eager": False},
}
CLOSE = 0.3  # of a log-probability: bfloat16 beside float32; vLLM's own code is up to 0.22 off


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_next")
    subprocess.run([sys.executable, HERE / "tiny_models.py", "qwen3_next", folder], check=True)
    return folder


def completions(model, out, options, active=True):
    environment = os.environ | {"FLASH_DELTA_VLLM": str(int(active))}
    command = [sys.executable, HERE / "generate_vllm.py", model, out, json.dumps(options)]
    subprocess.run(command, check=True, env=environment, timeout=600)
    return json.loads(out.read_text())


def judge(model, found):
    """How many tokens are the most likely ones in float32, and how far log-probabilities are off at the most."""
    from generate_vllm import prompts
    from transformers import AutoModelForCausalLM

    reference, right, off = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), 0, 0.0
    for prompt, (tokens, logprobs, _) in zip(prompts() * 2, found["completions"], strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        right += int((logits.argmax(-1) == torch.tensor(tokens)).sum())
        of_tokens = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        off = max(off, float((of_tokens - torch.tensor(logprobs)).abs().max()))
    return right, off


@pytest.fixture(scope="module")
def own(model, tmp_path_factory):
    """What vLLM's own code gives."""
    found = completions(model, tmp_path_factory.mktemp("own") / "out.json", RUNS["plain"], active=False)
    assert not found["calls"]
    return judge(model, found)


@pytest.mark.parametrize("name", RUNS)
def test_completions(model, own, name, tmp_path):
    found = completions(model, tmp_path / "out.json", RUNS[name])
    right, off = judge(model, found)
    print(name, right, off, own, found["calls"])
    assert right >= own[0] - 8  # of 400: where two tokens are nearly as likely, either is right
    assert off <= CLOSE
    assert set(found["calls"]) == {"decode_gated_delta_rule", "prefill_gated_delta_rule"}
    cached = sum(tokens for *_, tokens in found["completions"])
    assert (cached > 0) == (name == "prefix-cache")
