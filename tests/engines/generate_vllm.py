"""Completions of vLLM: ``python generate_vllm.py MODEL OUT OPTIONS [TOKENS]``. Writes the tokens, their
log-probabilities, how many tokens came from the prefix cache, how often each worker ran each op, and what vLLM counted
itself."""

import json
import os
import sys
from collections import Counter
from itertools import count as numbers
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # functions for its workers
os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # or vLLM 0.26 wants FlashInfer even where nothing is sampled
COUNTED = {  # vLLM's names
    "vllm:spec_decode_num_draft_tokens": "drafted", "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:num_preemptions": "preempted",
}  # fmt: skip


def prompts() -> list[list[int]]:
    """Makes prompts of 15 to 640 tokens. The last two begin alike."""
    import torch

    gen = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(2, 512, (count,), generator=gen).tolist()

    common = tokens(600)
    return [*(tokens(n) * 3 for n in (5, 20, 70)), *(common + tokens(n) for n in (9, 40))]


def count_calls(_: Any = None) -> Counter:
    """How often this process calls each op from now on, how many drafted tokens these calls had, how many batches had
    both drafts and other rows, and for how many of these tokens were gathered. A CUDA graph counts once, when it is
    captured."""
    from flash_delta.integrations.vllm import calls as plugin

    counts, calls_of = Counter(), plugin.calls_of

    def counted(*args):
        calls, places = calls_of(*args)
        counts["mixed batches"] += len(calls) > 1
        counts["gathered batches"] += bool(places)
        counts.update(op.__name__ for op, _ in calls)
        for arguments in (given for _, given in calls if "num_accepted_tokens" in given):
            counts["drafted tokens"] += arguments["q"].shape[1] - len(arguments["read_indices"])
        return calls, places

    plugin.calls_of, plugin.counts = counted, counts
    return counts


def count_pauses(_: Any = None) -> None:
    """Counts rows of this process without a draft after a draft of which tokens were accepted: their states are not
    where those of other rows are."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from flash_delta.integrations.vllm import calls as plugin

    prepare = GPUModelRunner._prepare_inputs

    def counted(self, scheduled, *args):
        prepared = prepare(self, scheduled, *args)
        accepted, drafts = self.num_accepted_tokens.np, scheduled.scheduled_spec_decode_tokens
        paused = [accepted[row] > 1 and name not in drafts for row, name in enumerate(self.input_batch.req_ids)]
        plugin.counts["pauses"] += sum(map(int, paused))
        return prepared

    GPUModelRunner._prepare_inputs = counted


def let_drafts_pause() -> None:
    """Leaves out drafts of n-grams, as if nothing had come before: those of each row in every other step, those of all
    rows in every third."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    propose, steps = NgramProposer.propose, numbers()

    def paused(*args, **kwargs):
        step = next(steps)
        return [[] if (step + row) % 2 or step % 3 == 0 else d for row, d in enumerate(propose(*args, **kwargs))]

    NgramProposer.propose = paused


def counted_calls(_: Any) -> dict[str, int]:
    """What a worker of vLLM's has counted, and how many kinds of layers it had run before, while vLLM profiled."""
    from flash_delta.integrations.vllm import calls as plugin
    from flash_delta.integrations.vllm import warmup

    return plugin.counts | {"warm": len(warmup._warm)}


def complete(llm: Any, count: int = 40) -> list[tuple[list[int], list[float], int]]:
    """Returns for each prompt the most likely ``count`` tokens, their log-probabilities, and how many tokens came from
    the prefix cache."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=count, logprobs=1, detokenize=False, ignore_eos=True)
    found = []
    for answer in llm.generate([{"prompt_token_ids": p} for p in prompts()], sampling, use_tqdm=False):
        (completion,) = answer.outputs
        logprobs = [next(iter(token.values())).logprob for token in completion.logprobs]
        found.append((list(completion.token_ids), logprobs, answer.num_cached_tokens))
    return found


def counted_by_vllm(llm: Any) -> dict[str, int]:
    """How many tokens were drafted, how many of them were accepted, and how often a request lost its memory and began
    again."""
    return {COUNTED[m.name]: int(m.value) for m in llm.get_metrics() if m.name in COUNTED}


def allow_olmo() -> None:
    """vLLM 0.32.0 cannot run OLMo-hybrid on a CPU: its layer tells Triton where memory comes from. Nor does it load
    a checkpoint anywhere: its loader of convolutions is not told which of the three comes."""
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as olmo

    make = olmo._make_fused_conv1d_weight_loader

    def loader_of(*sizes):
        load = make(*sizes)
        return lambda parameter, loaded: load(parameter, loaded, loaded.shard_id)

    olmo.set_triton_allocator, olmo._make_fused_conv1d_weight_loader = lambda device: None, loader_of


def allow_kimi() -> None:
    """vLLM's model for NVIDIA GPUs does not run on a CPU. That for AMD GPUs has the same layers of Kimi Delta
    Attention. It imports numba, and vLLM's start on a CPU fails over what that leaves in sys.modules. Beside states
    vLLM wants pages of 128 latents, and its attention for any CPU (CPU_MLA) takes pages of 16 alone. On CPUs with AMX
    vLLM would choose another one, which does not take them."""
    sys.modules["numba"] = None
    from vllm import ModelRegistry
    from vllm.platforms.cpu import CpuPlatform

    def align(config: Any, _: Any) -> None:
        config.cache_config.mamba_page_size_padded = 16 * 576 * 2  # of 16 latents in bfloat16

    CpuPlatform._align_hybrid_block_size = staticmethod(align)
    ModelRegistry.register_model("KimiLinearForCausalLM", "vllm.models.kimi_k3.amd.linear:KimiLinearForCausalLM")


def main(model: str, out: str, options: str, count: str = "40") -> None:
    from qwen3_5 import register
    from vllm import LLM

    if "olmo" in model:
        allow_olmo()
    if "kimi" in model:
        allow_kimi()
    if "qwen3_5" in model:
        register()
    settings = {"enforce_eager": True, "max_num_batched_tokens": 512} | json.loads(options)
    pauses = settings.pop("pauses", False)
    if pauses:
        let_drafts_pause()
    llm = LLM(
        model=model, skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=8, dtype="bfloat16", seed=0,
        disable_log_stats=False, **settings,
    )  # fmt: skip
    llm.collective_rpc(count_calls)
    if pauses:
        llm.collective_rpc(count_pauses)
    found = complete(llm, int(count)) + complete(llm, int(count))  # the second time prompts may be in the prefix cache
    result = {"completions": found, "calls": llm.collective_rpc(counted_calls), "counted": counted_by_vllm(llm)}
    with open(out, "w") as file:
        json.dump(result | {"options": settings, "plugin": os.environ.get("FLASH_DELTA_VLLM")}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
