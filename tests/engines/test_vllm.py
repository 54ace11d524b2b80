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
from judge_vllm import judge, load

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


@pytest.fixture(scope="module")
def own(model, tmp_path_factory):
    """What vLLM's own code gives."""
    found = completions(model, tmp_path_factory.mktemp("own") / "out.json", RUNS["plain"], active=False)
    assert not found["calls"]
    return judge(load(model), found["completions"])


@pytest.mark.parametrize("name", RUNS)
def test_completions(model, own, name, tmp_path):
    found = completions(model, tmp_path / "out.json", RUNS[name])
    right, off = judge(load(model), found["completions"])
    print(name, right, off, own, found["calls"])
    assert right >= own[0] - 8  # of 400: where two tokens are nearly as likely, either is right
    assert off <= CLOSE
    assert set(found["calls"]) == {"decode_gated_delta_rule", "prefill_gated_delta_rule"}
    cached = sum(tokens for *_, tokens in found["completions"])
    assert (cached > 0) == (name == "prefix-cache")


@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's Qwen3.5 imports torchvision")
def test_measurements(tmp_path):
    """Two engines, one after the other, on a Qwen3.5 text model: each adds its run, and both are judged."""
    model, out = tmp_path / "qwen3_5", tmp_path / "out.json"
    subprocess.run([sys.executable, HERE / "qwen3_5.py", model, "512", "1"], check=True)
    options = json.dumps({"batches": [1, 3], "prompts": [[2, 40]], "steps": 6, "repeats": 1})
    for active in (True, False):
        environment = os.environ | {"FLASH_DELTA_VLLM": str(int(active))}
        command = [sys.executable, HERE / "measure_vllm.py", model, out, options]
        subprocess.run(command, check=True, env=environment, timeout=600)
    subprocess.run([sys.executable, HERE / "judge_vllm.py", model, out], check=True)
    ours, theirs = json.loads(out.read_text())["runs"]
    assert ours["plugin"]
    assert set(ours["calls"]) == {"decode_gated_delta_rule", "prefill_gated_delta_rule"}
    assert not theirs["plugin"]
    assert not theirs["calls"]
    for run in (ours, theirs):
        assert all(run[f"decode {rows}: tokens/s"]["median"] > 0 for rows in (1, 3))
        assert run["prompts 2x40: ms"]["median"] > 0
        assert run["judged"]["right"] >= run["judged"]["tokens"] - 8
        assert run["judged"]["off"] <= CLOSE
