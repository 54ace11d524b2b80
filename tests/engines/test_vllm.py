"""vLLM's own engine on this library: completions of a tiny model, judged by transformers in float32.

`make engines` runs it; elsewhere there is no vLLM, and it is skipped.
"""

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from judge_vllm import complete_in_bfloat16, judge, load

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
HERE = Path(__file__).parent
SPECULATION = {  # a token that came before is enough for a draft, so some drafts are wrong
    "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
    }
}  # fmt: skip
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
PLAIN = {"enable_prefix_caching": False}
RUNS = {  # the model, and what vLLM is asked for
    "plain": ("qwen3_next", PLAIN),
    "prefix-cache": ("qwen3_next", {"enable_prefix_caching": True, "mamba_cache_mode": "align"}),
    "drafts": ("qwen3_next_mtp", SPECULATION | PLAIN),
    "mtp": ("qwen3_next_mtp", MTP | PLAIN),
    "compiled": ("qwen3_next", PLAIN | {"enforce_eager": False}),
    "two-ranks": ("qwen3_next", PLAIN | {"tensor_parallel_size": 2}),
    "olmo": ("olmo_hybrid", PLAIN),
    "olmo-drafts": ("olmo_hybrid", SPECULATION | PLAIN),
    "kimi": ("kimi_linear", PLAIN | {"block_size": 16, "attention_backend": "CPU_MLA"}),  # for CPUs with AMX or without
}
CLOSE = 0.3  # of a log-probability: bfloat16 beside float32; vLLM's own code is up to 0.22 off
RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # of a CPU with one memory; each has a core


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a tiny model, by its name."""

    @cache
    def made(name):
        folder = tmp_path_factory.mktemp("models") / name
        subprocess.run([sys.executable, HERE / "tiny_models.py", name, folder], check=True)
        return folder

    return made


def completions(model, out, options, active=True, tokens=40):
    environment = os.environ | {"FLASH_DELTA_VLLM": str(int(active))}
    environment |= RANKS if options.get("tensor_parallel_size") else {}
    command = [sys.executable, HERE / "generate_vllm.py", model, out, json.dumps(options), str(tokens)]
    subprocess.run(command, check=True, env=environment, timeout=600)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def own(model, tmp_path_factory):
    """How many of 400 tokens are right without the plugin, by the model's name: vLLM's own code runs Qwen3-Next alone
    on a CPU. Of the others it is transformers in vLLM's dtype, for half as many tokens."""

    @cache
    def right(name):
        folder = model(name)
        if not name.startswith("qwen3_next"):
            return 2 * judge(load(folder), complete_in_bfloat16(folder))[0]
        found = completions(folder, tmp_path_factory.mktemp("own") / "out.json", PLAIN, active=False)
        assert found["calls"] == [{"warm": 0}]
        return judge(load(folder), found["completions"])[0]

    return right


@pytest.mark.parametrize("name", RUNS)
def test_completions(model, own, name, tmp_path):
    (name_of_model, options), rule = RUNS[name], "kda" if name == "kimi" else "gated_delta_rule"
    folder = model(name_of_model)
    found = completions(folder, tmp_path / "out.json", options)
    right, off = judge(load(folder), found["completions"])
    print(name, right, off, own(name_of_model), found["calls"])
    assert right >= own(name_of_model) - 8  # of 400: where two tokens are nearly as likely, either is right
    assert off <= CLOSE
    assert len(found["calls"]) == options.get("tensor_parallel_size", 1)
    drafts = "speculative_config" in options
    assert found["counted"].get("accepted", 0) >= found["counted"].get("drafted", 0) / 5
    assert (found["counted"].get("accepted", 0) > 0) == drafts
    for calls in found["calls"]:
        assert (calls.pop("drafted tokens", 0) > 0) == drafts
        assert (calls.pop("mixed batches") > 0) == drafts
        assert calls.pop("gathered batches") == 0  # vLLM puts drafts before other rows
        assert calls.pop("warm") == int(name == "compiled")  # otherwise vLLM does not profile on a CPU
        assert set(calls) == {f"decode_{rule}", f"prefill_{rule}"}
    cached = sum(tokens for *_, tokens in found["completions"])
    assert (cached > 0) == (name == "prefix-cache")


@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's Qwen3.5 imports torchvision")
def test_drafts_that_pause(tmp_path):
    """Rows have no draft after accepted ones. If their states lack the accepted tokens, they are 3.7 times as far off
    as without drafts."""
    model, runs = tmp_path / "qwen3_5", {"plain": PLAIN, "pauses": SPECULATION | PLAIN | {"pauses": True}}
    subprocess.run([sys.executable, HERE / "qwen3_5.py", model, "512", "1", "1", "0.35"], check=True)
    reference, judged = load(model), {}
    for name, options in runs.items():
        options = options | {"mamba_ssm_cache_dtype": "float32"}
        found = completions(model, tmp_path / f"{name}.json", options, tokens=100)
        judged[name] = judge(reference, found["completions"])
        print(name, judged[name], found["counted"], found["calls"])
    assert found["calls"][0]["pauses"] > 50
    assert judged["pauses"][0] >= judged["plain"][0] - 8  # of 1,000
    assert judged["pauses"][1] <= 2 * judged["plain"][1]


@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's Qwen3.5 imports torchvision")
def test_measurements(tmp_path):
    """Two engines that take turns on a Qwen3.5 text model, with the plugin and without, are measured and judged."""
    model, out = tmp_path / "qwen3_5", tmp_path / "out.json"
    subprocess.run([sys.executable, HERE / "qwen3_5.py", model, "512", "1"], check=True)
    engines = json.dumps([{"plugin": plugin, "graphs": False} for plugin in (True, False)])
    options = json.dumps({"batches": [1, 3], "prompts": [[2, 40]], "steps": 6, "repeats": 1, "cache_gib": 1})
    subprocess.run([sys.executable, HERE / "measure_vllm.py", model, out, engines, options], check=True, timeout=600)
    subprocess.run([sys.executable, HERE / "judge_vllm.py", model, out], check=True)
    ours, theirs = json.loads(out.read_text())["runs"]
    assert ours["plugin"]
    ran = {name for name, count in ours["calls"].items() if count and "_gated_delta_rule" in name}
    assert ran == {"decode_gated_delta_rule", "prefill_gated_delta_rule"}
    assert not theirs["plugin"]
    assert not theirs["calls"]
    for run in (ours, theirs):
        assert all(run[f"decode {rows}: tokens/s"]["median"] > 0 for rows in (1, 3))
        assert run["prompts 2x40: ms"]["median"] > 0
        assert run["judged"]["right"] >= run["judged"]["tokens"] - 8
        assert run["judged"]["off"] <= CLOSE
