"""How fast vLLM is on a model that `qwen3_5.py` made: ``python measure_vllm.py MODEL OUT [ENGINES [OPTIONS]]``.

Each engine is a process on the same GPU. They start together, and take turns then: only one of them works at a time, so
a host or a GPU that becomes slower does so for all. Tokens per second are what a client sees, and have the host in
them. Beside them stands the time in which the GPU works.

OUT is written after each part, so that a run that is cut off leaves what it has.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from timed_vllm import serve, settings

ENGINES = [{"plugin": plugin, "graphs": graphs} for graphs in (True, False) for plugin in (True, False)]
OPTIONS = {  # those of an engine come before these
    "batches": [1, 32, 128],  # rows that decode together
    "prompts": [[1, 1024], [1, 8192], [8, 1024]],  # prompts at once, and tokens of each
    "steps": 128,  # of decoding
    "repeats": 9,
    "gpu_repeats": 3,  # of the rows of the GPU's time
    "cache_gib": 4,
    "engine": {},  # more arguments of vLLM's LLM
    "path": [],  # folders to import from first
}
UNCOUNTED = 2  # calls before: they compile
GPU_STEPS = 16  # of decoding, for the GPU's time


class Engine:
    def __init__(self, model: str, options: dict[str, Any], cache: str) -> None:
        context = get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, model, options, cache))
        self.process.start()
        other.close()
        self.options = options
        self.run = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"), "plugin": options["plugin"],
            "graphs": options["graphs"], "settings": settings(options),
            "drafts": options["engine"].get("speculative_config", {}).get("method"),
        }  # fmt: skip

    def ask(self, name: str, *arguments: Any) -> Any:
        """None if its process has ended."""
        try:
            self.pipe.send((name, arguments))
            return self.pipe.recv()
        except (EOFError, BrokenPipeError):
            return None

    def is_ready(self) -> bool:
        """Waits for it."""
        try:
            found = self.pipe.recv()
        except EOFError:
            return False
        self.run |= {"machine": found["machine"], "start": {"seconds": found["seconds"]}}
        return True


def summary(found: Sequence[float]) -> dict[str, Any]:
    low, median, high = (round(f(found), 3) for f in (min, statistics.median, max))
    return {"median": median, "low": low, "high": high, "all": [round(x, 3) for x in found]}


def result(name: str, answers: list[Any]) -> dict[str, Any]:
    """What is written. Beside the GPU's time come the kernels of the last answer, beside tokens per second those of a
    row in a step, of which drafts can be several."""
    if answers and isinstance(answers[0], tuple):
        values, others = zip(*answers, strict=True)
        if "GPU ms" in name:
            return {name: summary(values), name.replace("GPU ms", "kernels"): others[-1]}
        return {name: summary(values), name.replace("tokens/s", "tokens of a row in a step"): summary(others)}
    return {name: summary(answers)} if answers else {}


def in_turns(engines: list[Engine], repeats: int, name: str, *arguments: int) -> Iterator[tuple[Engine, Any]]:
    """Answers of each engine, in the order in which they came. Every other round is the other way round."""
    for number in range(0 if "GPU" in name else -UNCOUNTED, repeats):
        for engine in engines if number % 2 else engines[::-1]:
            answer = engine.ask(name, *arguments)
            if number >= 0 and answer is not None:
                yield engine, answer


def parts(options: dict[str, Any], gpu: bool) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """What to measure, in this order: how it is called in OUT, what an engine is asked for, and how often."""
    for rows in options["batches"]:
        yield f"decode {rows}: tokens/s", "decode", (rows, options["steps"]), options["repeats"]
    for rows in options["batches"] if gpu else ():
        yield f"decode {rows}: GPU ms", "decode, GPU", (rows, GPU_STEPS), options["gpu_repeats"]
    for rows, tokens in options["prompts"]:
        yield f"prompts {rows}x{tokens}: ms", "prompts", (rows, tokens), options["repeats"]
    for rows, tokens in options["prompts"] if gpu else ():
        yield f"prompts {rows}x{tokens}: GPU ms", "prompts, GPU", (rows, tokens), options["gpu_repeats"]


def main(model: str, out: str, engines: str = "", given: str = "{}") -> None:
    began, options, file = time.perf_counter(), OPTIONS | json.loads(given), Path(out)
    before = json.loads(file.read_text())["runs"] if file.exists() else []
    caches = tempfile.mkdtemp()
    started = [
        Engine(model, options | engine, f"{caches}/{number}")
        for number, engine in enumerate(json.loads(engines) if engines else ENGINES)
    ]

    def done(name: str) -> None:
        file.write_text(json.dumps({"runs": [*before, *(engine.run for engine in ready)]}, indent=1))
        found = [run.get(name) for run in (engine.run for engine in ready)]
        shown = [f"{x['median']} ({x['low']} to {x['high']})" if x and "low" in x else x for x in found]
        print(f"[{time.perf_counter() - began:6.1f} s] {name}: {', '.join(map(str, shown))}", flush=True)

    ready = [engine for engine in started if engine.is_ready()]
    if not ready:
        raise SystemExit("no engine has started")
    done("start")
    gpu = all(engine.run["machine"]["device"] != "cpu" for engine in ready)
    for _, same in groupby(ready, lambda engine: engine.run["graphs"]):
        group = list(same)
        for engine in group:
            engine.run["completions"] = engine.ask("complete")
        for name, what, arguments, repeats in parts(group[0].options, gpu):
            found = list(in_turns(group, repeats, what, *arguments))
            for engine in group:
                engine.run |= result(name, [answer for asked, answer in found if asked is engine])
            done(name)
        for engine in group:
            engine.run["calls"] = engine.ask("calls")
        done("calls")
    for engine in started:
        engine.pipe.close()
        engine.process.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
