"""README's tables: each one answers a question, and stands between its two marks."""

from collections.abc import Callable

from workshop.bench import speed
from workshop.bench.cells import Table, between_marks, in_markdown, number
from workshop.bench.contestants import OURS
from workshop.bench.page import of_gpus, read_groups
from workshop.numbers import vllm
from workshop.numbers.sources import H200, Results

PEERS = {"fla": "on fla {}", "transformers": "fallback of transformers {}"}
EAGER = {  # what a user waits for: the file, and the row
    "a training step of 1,024 tokens": ("step-transformers", "training 2048 wide, 16/32 1x1024, called"),
    "a training step of 8,192 tokens": ("step-transformers", "training 2048 wide, 16/32 1x8192, called"),
    "a prompt of 8,192 tokens": ("step-transformers", "forward 2048 wide, 16/32 1x8192, called"),
    "a token, 1 row": ("layer", "decode 2048 wide, 16/32 batch 1"),
    "a token, 32 rows": ("layer", "decode 2048 wide, 16/32 batch 32"),
}
LAYERS = {
    "GDN layer training": "fla's GatedDeltaNet after `register()`",
    "KDA layer training": "fla's KimiDeltaAttention after `register()`",
    "GDN step training": "our GatedDeltaNet beside fla's, also compiled",
    "Layer step training": "Qwen3-Next's layer after `enable()`, also compiled",
}


def model(results: Results) -> Table:
    """Eager steps of a layer of Qwen3-Next in transformers: milliseconds, and their ratio to ours."""
    rows, versions = [], {peer: set() for peer in PEERS}
    for name, (file, row) in EAGER.items():
        group = results.group(f"{H200}/{file}.json")
        ms = {r.contestant: r.eager_ms.median for r in group.rows()[row]}
        theirs = [f"{number(ms[peer])} ({ms[peer] / ms[OURS]:.2f}x)" for peer in PEERS]
        rows.append([name, f"{speed.short(group)}, {group.versions[OURS]}", number(ms[OURS]), *theirs])
        for peer in PEERS:
            versions[peer].add(group.versions[peer])
    heads = [head.format(" and ".join(sorted(versions[peer]))) for peer, head in PEERS.items()]
    return Table(["a layer of Qwen3-Next, eager, ms", "on, version", "after `enable()`", *heads], rows)


def served(results: Results) -> Table:
    """vLLM with the plugin and without."""
    rows, versions = [], set()
    for name, row, ours, theirs in vllm.decoding(results):
        both = (f"{vllm.median(run, f'{row}: tokens/s'):,.0f}" for run in (ours, theirs))
        speed_ups = vllm.users_speed_up(ours, theirs, row), vllm.gpus_speed_up(ours, theirs, row)
        rows.append([name, ours["when"][:10], *both, *(f"{x:.2f}x" for x in speed_ups)])
        versions |= {run["machine"]["vllm"] for run in (ours, theirs)}
    head = f"decoding in vLLM {' and '.join(sorted(versions))}, H200, CUDA graphs, tokens per second"
    return Table([head, "measured", "plugin", "vLLM's own code", "plugin over vLLM", "by the GPU's time"], rows)


def _of_kinds(results: Results, names: dict[str, str]) -> Table:
    found = speed.kinds(of_gpus(read_groups(results.folder)))
    return speed.summary(kind._replace(name=names[kind.name]) for kind in found if kind.name in names)


TABLES: dict[str, Callable[[Results], Table]] = {
    "my model": model,
    "vLLM": served,
    "my training": lambda results: _of_kinds(results, LAYERS),
    "my kernels": lambda results: _of_kinds(results, dict(zip(speed.CHART, speed.CHART, strict=True))),
}


def with_tables(text: str, results: Results) -> str:
    """README with new tables between their marks."""
    for name, table in TABLES.items():
        text = between_marks(text, name, in_markdown(table(results)))
    return text
