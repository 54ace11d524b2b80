"""The plugin beside the Python files of vLLM, which may be a version that cannot run here. Nothing is computed.

`make engines` runs these tests beside the installed version, and beside the files of a newer one.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from engine_tables import missing

from flash_delta.integrations.vllm import calls, pauses, plugin

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

VLLM = Path(find_spec("vllm").origin).parent
METADATA = VLLM / "v1/attention/backends/gdn_attn.py"
LOG = "from vllm.config.logging import LoggingConfig as C; import vllm.logger; vllm.logger.configure_logging(C());"
UNTESTED = """from flash_delta.integrations.vllm import plugin
from vllm.plugins import load_general_plugins
plugin._version = lambda package: "0.33.0"
load_general_plugins()
plugin.register()"""
ACTIVE = """from flash_delta.integrations.vllm import plugin
from vllm.plugins import load_general_plugins
load_general_plugins()
print(*plugin._active)"""


def output(code, **environment):
    """Returns the lines that a process prints. The process has no other wish about the plugin than ``environment``."""
    given = {name: value for name, value in os.environ.items() if name != calls.VARIABLE} | environment
    ran = subprocess.run([sys.executable, "-c", code], check=True, env=given, capture_output=True, text=True)
    return (ran.stderr + ran.stdout).splitlines()


@pytest.mark.parametrize("before", ["", LOG])
def test_a_version_that_is_not_tested_is_one_warning_in_vllms_log(before):
    """Before vLLM sets up its log, as in `vllm serve`, and after, as in vLLM's workers."""
    (line,) = (line for line in output(before + UNTESTED) if "vLLM 0.33.0 is not tested" in line)
    assert "WARNING" in line
    assert ("pid=" in line) == bool(before)  # vLLM's format


def test_the_hooks_fit():
    *lines, active = output(ACTIVE, FLASH_DELTA_VLLM="1")
    assert [line for line in lines if "vLLM's own code runs" in line] == []
    assert active.split() == [
        "QwenGatedDeltaNetAttention", "OlmoHybridGatedDeltaNetAttention", "KimiGatedDeltaNetAttention",
        "BailingMoeV3KimiDeltaAttention",
    ]  # fmt: skip


def test_the_metadata_have_what_the_plugin_reads():
    ours = Path(calls.__file__).read_text()
    read = {*re.findall(r"\bm\.(\w+)", ours), *re.findall(r'getattr\(m, "(\w+)"', ours)}
    _, fields = METADATA.read_text().split("class GDNAttentionMetadata:\n")
    assert len(read) > 12
    assert read <= {*re.findall(r"^    (\w+):", fields, re.MULTILINE)}
    checkpoint = (VLLM / "model_executor/layers/mamba/checkpoint.py").read_text()
    assert {*re.findall(r"checkpoint\.(\w+)", ours)} <= {*re.findall(r"^    (\w+):", checkpoint, re.MULTILINE)}


def test_rows_without_drafts_are_counted():
    """By vLLM itself since `pauses.RIGHT`, or by the plugin, from what the runner has. Then numbers of draft tokens
    are compared with 0, and nothing else."""
    version = next(filter(None, map(plugin._version, plugin.PACKAGES)))
    runner = (VLLM / "v1/worker/gpu_model_runner.py").read_text()
    of_itself = "use_spec_decode = self.speculative_config is not None" in runner
    assert of_itself == (tuple(map(int, version.split(".")[:2])) >= pauses.RIGHT)
    if not of_itself:
        read = {*re.findall(r"\b(?:runner|batch)\.(\w+)", Path(pauses.__file__).read_text().split("def _count")[1])}
        assert len(read) == 5
        assert all(re.search(rf"\bself\.(input_batch\.)?{name}\b", runner) for name in read)
        build = METADATA.read_text().split("def build(")[1].split("def build_for")[0]
        uses = re.findall(r"num_decode_draft_tokens_cpu(:| is None| >= 0|.*)", build)
        assert sorted(uses) == [" >= 0", " is None", ":", "[num_decode_draft_tokens_cpu >= 0]"]


def test_replay_is_refused_by_vllm_or_declined():
    """With --use-replayssm a layer has no memory for the states of draft tokens. vLLM refuses it for most models."""
    config = VLLM / "config/cache.py"
    if "use_replayssm" in config.read_text():
        assert "use_kda_recoverssm" in config.read_text()  # what `calls.unfit` asks for
        architectures = re.findall(r"kda_architectures = \((.*?)\)", (VLLM / "config/vllm.py").read_text(), re.DOTALL)
        assert "KimiLinearForCausalLM" in architectures[0]
    for name in ("qwen3_next", "qwen3_5", "olmo_hybrid", "bailing_moe_v3"):
        assert "ReplaySSM" not in (VLLM / f"model_executor/models/{name}.py").read_text()


def test_the_guide_names_what_vllm_has():
    """In the files that say how its layers are called."""
    mamba = VLLM / "model_executor/layers/mamba"
    files = [mamba / "mamba_utils.py", mamba / "checkpoint.py", mamba / "gdn/qwen_gdn_linear_attn.py"]
    assert not missing("vLLM", [VLLM / "envs.py", METADATA, *files])
