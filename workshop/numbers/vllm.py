"""What the guide says about vLLM, from the JSON that ``tests/engines/measure_vllm.py`` wrote."""

from collections.abc import Iterator
from statistics import geometric_mean

from workshop.numbers.sources import H100, H200, Results, ends, two_digits

ROWS = ("decode 1", "decode 32", "decode 128", "prompts 1x1024", "prompts 1x8192", "prompts 8x1024")
FEWER_HEADS = ("8-16", "4-8")
ENGINES = {  # README's: the file, and the numbers of rows
    "16/32 heads": ("vllm", (1, 32, 128)),
    "8/16 heads, two engines at a time": ("vllm-two-engines-8-16", (1, 32)),
    "4/8 heads, two engines at a time": ("vllm-two-engines-4-8", (1, 32)),
}


def median(run: dict, what: str) -> float:
    return run[what]["median"]


def users_speed_up(ours: dict, theirs: dict, row: str) -> float:
    """How much faster the plugin is for users: in tokens per second, or until the first token of prompts."""
    if row.startswith("decode"):
        return median(ours, f"{row}: tokens/s") / median(theirs, f"{row}: tokens/s")
    return median(theirs, f"{row}: ms") / median(ours, f"{row}: ms")


def gpus_speed_up(ours: dict, theirs: dict, row: str) -> float:
    """vLLM's time on the GPU over the plugin's."""
    return median(theirs, f"{row}: GPU ms") / median(ours, f"{row}: GPU ms")


def pair(
    results: Results, file: str, graphs: bool = True, kernels: str = "triton", drafts: str | None = None
) -> tuple[dict, dict]:
    """The engine with the plugin, and vLLM with its own kernels or FlashInfer's."""
    runs = [r for r in results.json(file)["runs"] if r["graphs"] == graphs and r.get("drafts") == drafts]
    (ours,) = (r for r in runs if r["plugin"])
    (theirs,) = (r for r in runs if not r["plugin"] and r["settings"]["gdn_prefill_backend"] == kernels)
    return ours, theirs


def means(results: Results) -> tuple[str, ...]:
    """The means of the six rows on an H100 and on an H200, and the ends of all."""
    h100, h200 = ([users_speed_up(*pair(results, f"{gpu}/vllm.json"), row) for row in ROWS] for gpu in (H100, H200))
    return two_digits(geometric_mean(h100)), two_digits(geometric_mean(h200)), *ends(h100 + h200)


def on_the_gpu(results: Results) -> tuple[str, ...]:
    both = [pair(results, f"{gpu}/vllm.json") for gpu in (H100, H200)]
    decoding, prompts = ([gpus_speed_up(*two, row) for two in both for row in rows] for rows in (ROWS[:3], ROWS[3:]))
    return f"{min(decoding):.3f}", two_digits(max(decoding)), *ends(prompts)


def beside_flashinfer(results: Results) -> tuple[str, ...]:
    two = pair(results, f"{H200}/vllm.json", kernels="flashinfer")
    return ends([gpus_speed_up(*two, row) for row in ROWS[3:]])


def behind(results: Results) -> tuple[str, ...]:
    both = [pair(results, f"{gpu}/vllm.json") for gpu in (H200, H100)]
    flashinfer = pair(results, f"{H200}/vllm.json", kernels="flashinfer")
    eager = pair(results, f"{H200}/vllm.json", graphs=False)
    found = [users_speed_up(*two, "decode 128") for two in (*both, flashinfer)]
    found += [users_speed_up(*flashinfer, "prompts 8x1024"), users_speed_up(*eager, "decode 1")]
    return tuple(map(two_digits, found))


def of_fewer_heads(results: Results) -> Iterator[tuple[dict, dict]]:
    for heads in FEWER_HEADS:
        for drafts in (None, "ngram", "mtp"):
            yield pair(results, f"{H200}/vllm-heads-{heads}.json", drafts=drafts)


def gpu_of_fewer_heads(results: Results) -> tuple[str, ...]:
    rows = ("decode 1", "decode 32", "prompts 1x1024")
    return ends([gpus_speed_up(*two, row) for two in of_fewer_heads(results) for row in rows])


def single_rows(results: Results) -> tuple[str, ...]:
    found = [users_speed_up(*two, "decode 1") for two in of_fewer_heads(results)]
    slower = [speed_up for speed_up in found if speed_up < 1]
    return (*ends(slower), str(len(slower)), str(len(found)))


def decoding(results: Results) -> Iterator[tuple[str, str, dict, dict]]:
    """README's rows: a name, what the file calls it, and the two engines."""
    for name, (file, batches) in ENGINES.items():
        for batch in batches:
            yield f"{name}, batch {batch}", f"decode {batch}", *pair(results, f"{H200}/{file}.json")


def ahead(results: Results) -> tuple[str, ...]:
    """In how many of README's rows vLLM's own code is ahead, and in how many the repeats of both overlap."""
    rows = [(ours[f"{row}: tokens/s"], theirs[f"{row}: tokens/s"]) for _, row, ours, theirs in decoding(results)]
    slower = sum(ours["median"] < theirs["median"] for ours, theirs in rows)
    overlap = sum(ours["low"] <= theirs["high"] and theirs["low"] <= ours["high"] for ours, theirs in rows)
    return str(slower), str(len(rows)), str(overlap)


def two_engines(results: Results) -> list[float]:
    both = [pair(results, f"{H200}/vllm-two-engines-{heads}.json") for heads in FEWER_HEADS]
    return [users_speed_up(*two, row) for two in both for row in ROWS[:2]]


SENTENCES = [
    (
        "the plugin was {}x as fast as vLLM's own code on an H100 and {}x on an H200, in the geometric mean of six "
        "rows ({}x to {}x)",
        means,
    ),
    ("decoding is as fast as vLLM's own ({}x to {}x), and prompts are {}x to {}x as fast", on_the_gpu),
    ("FlashInfer's kernel for prompts, prompts are {}x to {}x as fast", beside_flashinfer),
    (
        "decoding of 128 rows was {}x and {}x of vLLM's own and {}x of vLLM with FlashInfer, eight prompts of 1,024 "
        "tokens were {}x of the latter, and without graphs one row on the H200 was {}x",
        behind,
    ),
    ("vLLM's own code takes {}x to {}x as much of an H200's time as the plugin", gpu_of_fewer_heads),
    ("decoding of a single row was {}x to {}x of vLLM's own in {} of {} cases", single_rows),
    ("with two engines at a time {}x to {}x", lambda results: ends(two_engines(results))),
]
