"""A plugin of pytest for the tests in `upstream/`: what the machines of those repositories have and this one may lack.
``PATCHED`` names the repository."""

import os

import pytest


def transformers():
    """transformers 5.24.0 asks for kernels 0.18.2. If that cannot be had, kernels 0.17.2 has what the tests call."""
    from transformers.utils import import_utils

    question = import_utils.is_kernels_available
    question.__wrapped__.__defaults__ = ("0.17.2", import_utils.KERNELS_MAX_VERSION)
    question.cache_clear()


def sglang():
    """SGLang imports torchvision and others, and does not call them here."""
    import sglang_stubs

    sglang_stubs.NAMES["datasets"] = ("",)
    sglang_stubs.put_stubs()


def vllm():
    """The Python files of vLLM say nothing of a device, and its platforms ask for a package that is built for one."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()


@pytest.fixture
def dist_init(tmp_path):
    """The fixture of vLLM's own tests with this name: a group of one process."""
    from vllm import distributed
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        distributed.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{tmp_path}/group", backend="gloo"
        )
        distributed.initialize_model_parallel()
        yield
    distributed.cleanup_dist_env_and_memory()


{"transformers": transformers, "sglang": sglang, "vllm": vllm}[os.environ["PATCHED"]]()
