"""What README and guide say about measurements, and how each number follows from the results."""

from collections.abc import Callable
from typing import NamedTuple

from flash_delta.cli.prove import QUICK
from workshop.bench import speed
from workshop.bench.floor import floor
from workshop.bench.page import of_gpus, read_groups
from workshop.numbers import scale, vllm
from workshop.numbers.sources import H100, H200, Results, at_most, ends, two_digits

README, TRAINING = "README.md", "docs/guide/training.md"
STEP, TRAINED = f"{H200}/step.json", f"{H200}/gdn-training.json"


class Claim(NamedTuple):
    """A part of a sentence with measured numbers."""

    page: str
    words: str  # as they stand in the page, with {} for each number
    numbers: Callable[[Results], tuple[str, ...]]


def on_a_cpu(results: Results, row: str) -> tuple[str, str]:
    """The ends of float32 and bfloat16."""
    pairs = [
        [results.row("cpu/cpu.json", f"{row}{dtype}", name) for name in ("transformers", "flash_delta")]
        for dtype in (" float32", "")
    ]
    return ends([theirs.over(ours) for theirs, ours in pairs])


def forward_and_training_on_a_cpu(results: Results, tokens: int) -> tuple[str, ...]:
    return *on_a_cpu(results, f"forward 4/8 1x{tokens}"), *on_a_cpu(results, f"training 4/8 1x{tokens}")


def decoding_on_a_cpu(results: Results) -> tuple[str, ...]:
    return *on_a_cpu(results, "decode 4/8 batch 1"), *on_a_cpu(results, "decode 4/8 batch 32")


def peers_ahead(results: Results) -> tuple[str, ...]:
    """How many rows, of how many: of GDN drafts, of prompts on pools, and of what the table does not have."""
    kinds = speed.kinds(of_gpus(read_groups(results.folder)))
    drafts, pools = ([kind for kind in kinds if kind.name == name] for name in ("GDN drafts", "GDN pools prefill"))
    others = [kind for kind in kinds if kind.name not in speed.CHART]
    found = ([speed_up.ratio for kind in some for speed_up in kind.fastest] for some in (drafts, pools, others))
    counts = ((sum(ratio < 1 for ratio in ratios), len(ratios)) for ratios in found)
    return tuple(str(count) for pair in counts for count in pair)


def copy_rate(results: Results) -> tuple[str, str]:
    """The bytes of at least 64 rows that have to move, over the time and the measured rate of copies."""
    shares = []
    for group in (results.group(f"{H200}/{name}.json") for name in ("decode", "kda-decode")):
        for r in group.results:
            w = r.workload
            if r.contestant == "flash_delta" and w.N >= 64 and w.state_dtype == "float32":
                shares.append(1e5 * floor(w).bytes / group.ceilings.measured_bytes_per_s / r.ms.median)
    return ends(shares, 0)


def short_step(results: Results) -> tuple[str, str]:
    step = results.row(STEP, "training 2048 wide, 16/32 1x1024, called")
    return two_digits(step.graph_ms.median), f"{step.eager_ms.median:.1f}"


def over_the_gpus_time(results: Results, form: str) -> tuple[str]:
    called, other = (results.row(STEP, f"training 4 layers, 2048 wide, 16/32 1x1024, {f}") for f in ("called", form))
    return (two_digits(other.eager_ms.median / called.graph_ms.median),)


def without_recompute(results: Results) -> tuple[str, ...]:
    rows = [f"training 16/32 1x{tokens}" for tokens in (8192, 32768)]
    plain, keeping = ([results.row(TRAINED, f"{row}{more}") for row in rows] for more in ("", " disable_recompute"))
    gains = [100 * (p.ms.median / k.ms.median - 1) for p, k in zip(plain, keeping, strict=True)]
    return (*ends(gains, 0), f"{keeping[0].costs.saved_mb:.0f}", f"{plain[0].costs.saved_mb:.0f}")


def kept_of_kda(results: Results) -> tuple[str, str]:
    keeping = results.row(f"{H100}/kda-widths.json", "training 32/32 1x8192 disable_recompute")
    plain = results.row(f"{H100}/kda-training.json", "training 32/32 1x8192")
    return f"{keeping.costs.saved_mb:.0f}", f"{plain.costs.saved_mb:.0f}"


def proven(results: Results) -> tuple[str, str]:
    """Seconds of `--quick`, and minutes of all tasks."""
    trained = results.json("cpu/prove.json")["results"]
    quick = sum(r["seconds"] for r in trained if r["task"] in QUICK and r["seed"] == 0)
    return f"{quick:.0f}", f"{sum(r['seconds'] for r in trained) / 60:.0f}"


def states(results: Results) -> tuple[str, str, str]:
    layers = results.json("cpu/states.json")["layers"]
    over = {name: max(x["errors"][name] / x["errors"]["bfloat16"] for x in layers) for name in layers[0]["errors"]}
    largest = max(layer["largest"] for layer in layers)
    return at_most(largest, 1), at_most(over["float16"], 2), at_most(over["int8 at rest"], 2)


CLAIMS = [
    Claim(README, "float32 states at {} to {} % of the rate of a copy", copy_rate),
    Claim(README, "vLLM's own code is ahead in {} of {} rows, and repeats of both overlap in {}", vllm.ahead),
    Claim(
        README,
        "is {}x to {}x (forward) and {}x to {}x (training) as fast as transformers' PyTorch code with 512 tokens",
        lambda results: forward_and_training_on_a_cpu(results, 512),
    ),
    Claim(
        README,
        "and {}x to {}x and {}x to {}x with 8,192",
        lambda results: forward_and_training_on_a_cpu(results, 8192),
    ),
    Claim(README, "Decoding is {}x to {}x as fast for one row, and {}x to {}x for 32", decoding_on_a_cpu),
    Claim(README, "trains at {} % of an H200's peak arithmetic, {} tokens per second", scale.trained_350m),
    Claim(
        README,
        "in {} of {} rows of GDN drafts and {} of {} rows of prompts on pools, and in {} of {} rows of the groups",
        peers_ahead,
    ),
    Claim(
        README, "{} % of twice one card with data parallelism, {} % with FSDP2 and {} % with rows", scale.on_two_cards
    ),
    Claim(TRAINING, "reached {} % on one H200, {} tokens per second", scale.trained_350m),
    Claim(
        TRAINING,
        "Data parallelism does {} % of this, and FSDP2 {} %. Context parallelism with rows of 131,072 tokens does {} %",
        scale.on_two_cards,
    ),
    Claim(TRAINING, "then took {} minutes: {} tokens per second, {} bits per byte", scale.trained_on_300m_tokens),
    Claim(TRAINING, "takes {} ms of GPU time, and {} ms eager", short_step),
    Claim(
        TRAINING,
        'mode="reduce-overhead")`, which takes {} of the GPU\'s',
        lambda r: over_the_gpus_time(r, "reduce-overhead"),
    ),
    Claim(TRAINING, "make_graphed_callables`, which takes {}", lambda r: over_the_gpus_time(r, "graphed")),
    Claim(TRAINING, "was {} to {} % faster with it, and saved {} MB instead of {} MB", without_recompute),
    Claim(TRAINING, "version 0.2.0 on an H100 saved {} MB instead of {} MB", kept_of_kda),
    Claim(
        "docs/guide/proof.md",
        "took {} seconds on one thread of a CPU, and all tasks that suit a CPU, from three seeds, {} minutes",
        proven,
    ),
    Claim(
        "docs/guide/serving.md",
        "exceeds {}. In each layer the error of a float16 pool is at most {} times that of a bfloat16 pool, and the "
        "error after a rest in int8 at most {} times",
        states,
    ),
    *(Claim("docs/guide/engines.md", words, numbers) for words, numbers in vllm.SENTENCES),
]
