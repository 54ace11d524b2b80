"""README's tables: each one answers a question, and stands between its two marks."""

import re
from collections.abc import Callable

from workshop.bench import speed
from workshop.bench.cells import Table, in_markdown, number
from workshop.bench.contestants import OURS
from workshop.bench.page import of_gpus, read_groups
from workshop.numbers import vllm
from workshop.numbers.sources import H200, Results

PEERS = {"fla": "on fla", "transformers": "PyTorch code: the fallback"}
EAGER = {  # what a user waits for: the file, and the row
    "a training step of 1,024 tokens": ("step-transformers", "training 2048 wide, 16/32 1x1024, called"),
    "a training step of 8,192 tokens": ("step-transformers", "training 2048 wide, 16/32 1x8192, called"),
    "a prompt of 8,192 tokens": ("step-transformers", "forward 2048 wide, 16/32 1x8192, called"),
    "a token, 1 row": ("layer", "decode 2048 wide, 16/32 batch 1"),
    "a token, 32 rows": ("layer", "decode 2048 wide, 16/32 batch 32"),
}
ENGINES = {  # the file, and the numbers of rows
    "16/32 heads": ("vllm", (1, 32, 128)),
    "8/16 heads, two engines at a time": ("vllm-two-engines-8-16", (1, 32)),
    "4/8 heads, two engines at a time": ("vllm-two-engines-4-8", (1, 32)),
}
LAYERS = {
    "GDN layer training": "fla's GatedDeltaNet after `register()`",
    "KDA layer training": "fla's KimiDeltaAttention after `register()`",
    "GDN step training": "our GatedDeltaNet beside fla's, also compiled",
    "Layer step training": "Qwen3-Next's layer after `enable()`, also compiled",
}


def model(results: Results) -> Table:
    """Eager steps of a layer of Qwen3-Next in transformers: milliseconds, and their ratio to ours."""
    rows = []
    for name, (file, row) in EAGER.items():
        group = results.group(f"{H200}/{file}.json")
        found = {r.contestant: r.eager_ms.median for r in group.rows()[row]}
        ours = found[OURS]
        theirs = [f"{number(found[peer])} ({found[peer] / ours:.2f}x)" for peer in PEERS]
        rows.append([name, f"{speed.short(group)}, {group.versions[OURS]}", number(ours), *theirs])
    head = [f"a layer of Qwen3-Next in transformers {group.versions['transformers']}, eager, ms", "on, version"]
    return Table([*head, "after `enable()`", *PEERS.values()], rows)


def served(results: Results) -> Table:
    """vLLM with the plugin and without."""
    rows = []
    for name, (file, batches) in ENGINES.items():
        ours, theirs = vllm.pair(results, f"{H200}/{file}.json")
        for batch in batches:
            row = f"decode {batch}"
            both = (f"{vllm.median(run, f'{row}: tokens/s'):,.0f}" for run in (ours, theirs))
            speed_ups = vllm.users_speed_up(ours, theirs, row), vllm.gpus_speed_up(ours, theirs, row)
            rows.append([f"{name}, batch {batch}", ours["when"][:10], *both, *(f"{x:.2f}x" for x in speed_ups)])
    head = f"decoding in vLLM {ours['machine']['vllm']}, H200, CUDA graphs, tokens per second"
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
        lines = "\n".join([*in_markdown(table(results)), ""])
        begin, end = f"<!-- flash-delta-dev report: {name} -->\n", "<!-- end -->"
        new = f"{begin}{lines}{end}"
        text, found = re.subn(f"{begin}.*?{end}", lambda _, new=new: new, text, flags=re.DOTALL)
        if found != 1:
            raise ValueError(f"README.md: expected the marks of the table {name!r} once, found them {found} times")
    return text
