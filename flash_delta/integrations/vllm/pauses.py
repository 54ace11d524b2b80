"""Rows that pause between drafts, in versions of vLLM before 0.32.

A draft leaves a state for each of its tokens, in the columns of a row's block table. The row goes on from the state of
the last accepted token. vLLM looks for this state in rows that it counts among the drafts of a step. In other rows it
takes the first column. These versions count a decoding row without a draft among the others, so such a row loses the
tokens that were accepted before. N-grams often draft nothing.

Here vLLM's runner counts every decoding row among the drafts. A row without a draft is then a draft of no tokens.
vLLM's own number of accepted tokens says where its state is, also after its prefix cache has moved states.
"""

import inspect
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from flash_delta.integrations.vllm.calls import VARIABLE, logger

RIGHT = (0, 32)  # the first version that is known to count these rows
RUNNER = "vllm.v1.worker.gpu_model_runner"
KNOWN = {"num_reqs", "use_spec_decode", "num_scheduled_tokens"}  # arguments of the method that we wrap
SOME = 1  # vLLM asks only whether a row's number of draft tokens is negative, and whether all numbers are 0


@cache
def count_rows_without_drafts(version: str) -> None:
    """Wraps what gives a step's numbers to the layers. A process calls this when the first layer runs: then its runner
    is imported."""
    if tuple(map(int, version.split(".")[:2])) >= RIGHT:
        return
    runner = getattr(sys.modules.get(RUNNER), "GPUModelRunner", None)
    build = getattr(runner, "_build_attention_metadata", None)
    if build is None or not inspect.signature(build).parameters.keys() >= KNOWN:
        wrong = "a row without a draft, as n-grams often leave it, loses tokens that were accepted before"
        logger.warning("%s: drafts are wrong in vLLM %s, and here this cannot be mended: %s", VARIABLE, version, wrong)
    else:
        runner._build_attention_metadata = _with_all_rows(build)


def _with_all_rows(build: Callable) -> Callable:
    @wraps(build)
    def method(self: Any, *args: Any, **given: Any) -> Any:
        # A trial of vLLM's has no requests.
        if self.speculative_config is not None and given.get("num_scheduled_tokens") is not None:
            _count(self, given["num_reqs"], given["use_spec_decode"])
            given["use_spec_decode"] = True
        return build(self, *args, **given)

    return method


def _count(runner: Any, rows: int, has_drafts: bool) -> None:
    """Counts decoding rows among drafts: those of one token after the prompt. A row that reads its own answer again,
    because it was preempted, may be one of them: its one state is in the first column."""
    numbers, batch, starts = runner.num_decode_draft_tokens.np, runner.input_batch, runner.query_start_loc.np
    if not has_drafts:
        numbers.fill(-1)  # they are of an earlier step
    is_answer = batch.num_computed_tokens_cpu[:rows] >= batch.num_prompt_tokens[:rows]
    numbers[:rows][is_answer & (starts[1 : rows + 1] - starts[:rows] == 1)] = SOME
