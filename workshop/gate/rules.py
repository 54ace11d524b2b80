"""The rules: no spill, no serialised wgmma, no transposed accumulator, no barrier whose memory has another use, and no
more memory than a multiprocessor has."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from flash_delta.compiler.pool import Result
from flash_delta.compiler.targets import TARGETS

MODULES = (
    "workshop.gate.cases.rule",
    "workshop.gate.cases.serving",
    "workshop.gate.cases.elementwise",
    "workshop.gate.cases.prompts",
    "workshop.gate.cases.hopper",
)

TENSOR_COLUMNS = 512  # of Blackwell's tensor memory, which all programs on a multiprocessor share


class Allowed(NamedTuple):
    """A known fault. It has to occur on each of ``targets``. If it no longer does, the entry is stale."""

    kernel: str  # a pattern: module/launch/function
    targets: tuple[str, ...]
    fault: str  # "compile", "spill", "serialised", "lint", "barriers", "shared", "tensor"
    reason: str
    at_most: int | None = None  # the highest allowed count: bytes that are spilled, lines that lint finds
    triton: str = ""  # only for versions that start with this


HOPPER = ("sm_90a",)
HMMA = ("sm_80", "sm_89", "sm_120")  # chips whose products take all operands from registers
LIBRARY = "workshop.gate.cases.rule"
BY_HAND = "workshop.gate.cases.hopper"
SERVING = "workshop.gate.cases.serving"
ALLOWED = (
    Allowed(
        f"{BY_HAND}/*-back*/scan_gradients", HOPPER, "spill",
        "addresses of tiles, the same for all chunks, beside accumulators: a state group has 144 registers", 960,
    ),
    Allowed(
        f"{BY_HAND}/channel-back*/chunk_back", HOPPER, "spill",
        "eight warps hold three products of [128, 64] in float32 beside what they make of them", 400,
    ),
    Allowed(
        f"{LIBRARY}/kda-128-segments-back/scan_backward", HOPPER, "spill",
        "two scans in one kernel, each with 128 columns of a state", 40, "3.6",
    ),
    Allowed(f"{LIBRARY}/kda-128-segments-back/scan_backward", ("gfx942",), "spill", "the same", 10, "3.9"),
    Allowed(
        f"{LIBRARY}/*/factor", HOPPER, "spill",
        "with 168 registers three programs share a multiprocessor: 10 % faster on an H200 than without a spill", 80,
    ),
    Allowed(
        f"{LIBRARY}/*-128*/key_gradients", HOPPER, "spill",
        "four warps spill, and are faster on an H200 than eight, which do not", 900,
    ),
    Allowed(
        f"{LIBRARY}/comba-128-raw/key_gradients", ("sm_80", "sm_120"), "spill",
        "dk and dp are summed up at once: no tile is free of it", 110,
    ),
    Allowed(f"{LIBRARY}/comba-128-raw/key_gradients", ("sm_89",), "spill", "the same", 40, "3.6"),
    Allowed(
        f"{LIBRARY}/gdn-256/key_gradients", (*HMMA, "sm_100"), "spill",
        "rows of 256; on sm_100 fewer than 16 warps want more tensor memory than there is", 450,
    ),
    Allowed(f"{LIBRARY}/gdn-256*/key_gradients", HOPPER, "spill", "64 columns are faster than 16", 360),
    Allowed(f"{LIBRARY}/gdn-256*/scan_backward", HMMA, "spill", "rows of 256", 40, "3.9"),
    Allowed(f"{LIBRARY}/gdn-256-512/key_gradients", (*HMMA, "sm_100"), "spill", "rows of 256", 450),
    Allowed(
        f"{LIBRARY}/comba-256-512/key_gradients", ("sm_80", *HOPPER, "sm_100", "gfx942", "gfx950"), "spill",
        "dk and dp are summed up at once, in rows of 256", 910,
    ),
    Allowed(f"{LIBRARY}/comba-256-512/key_gradients", ("sm_100",), "spill", "the same", 1380, "3.9"),
    Allowed(
        f"{LIBRARY}/*-100-*/scan*", HOPPER, "spill", "rows come 8 bytes at a time: their addresses are registers", 1110,
    ),
    Allowed(f"{LIBRARY}/*-100/pairs", HOPPER, "spill", "the same", 60),
    Allowed(f"{LIBRARY}/gdn-100/key_gradients", HOPPER, "spill", "as at 128", 370),
    Allowed(f"{LIBRARY}/gdn-100/key_gradients", ("sm_80",), "spill", "the same", 10, "3.6"),
    Allowed(f"{LIBRARY}/kda-256-512/pairs", ("sm_80", "sm_89"), "spill", "products with states of 256 x 512", 20),
    Allowed(f"{LIBRARY}/kda-256-512/pairs", ("sm_100",), "spill", "the same", 10, "3.9"),
    Allowed(f"{LIBRARY}/kda-256-512/halved_gradients", ("sm_89", "sm_100", "sm_120"), "spill", "the same", 60),
    Allowed(f"{LIBRARY}/kda-100/halved_gradients", ("sm_89",), "spill", "half a chunk is in registers", 10, "3.6"),
    Allowed(f"{LIBRARY}/kda-*/channel", ("sm_89",), "spill", "16 tokens of two channels are a thread's", 20, "3.6"),
    Allowed(f"{LIBRARY}/kda-100/channel", HOPPER, "spill", "the same", 60),
    Allowed(f"{LIBRARY}/kda-100/channel", ("sm_100", "sm_120"), "spill", "the same", 70),
    Allowed(f"{LIBRARY}/kda-100/channel", ("sm_89",), "spill", "the same", 10, "3.9"),
    Allowed(f"{LIBRARY}/kda-256-512/channel", ("sm_100",), "spill", "the same", 40, "3.9"),
    Allowed(
        f"{LIBRARY}/kda-*/channel_gradients", (*HMMA, *HOPPER, "sm_100"), "spill",
        "what later rows give to a chunk's columns is in registers, and with fewer an H200 is slower", 240,
    ),
    Allowed(
        f"{LIBRARY}/kda-*/halved_gradients", HOPPER, "spill",
        "with 168 registers three programs share a multiprocessor", 340,
    ),
    Allowed(
        f"{LIBRARY}/kda-*/halved_gradients", ("gfx942",), "spill",
        "all scores of half a chunk are in registers at once", 340,
    ),
    Allowed(f"{LIBRARY}/kda-256-512/halved_gradients", ("gfx950",), "spill", "the same", 50, "3.9"),
    Allowed(f"{LIBRARY}/kda-*/halved_gradients", ("sm_80",), "spill", "the same", 20, "3.6"),
    Allowed(f"{LIBRARY}/kda-128-BV=128*", HOPPER, "spill", "A besides what other scans hold", 32, "3.6"),
    Allowed(f"{LIBRARY}/kda-128-BV=128-segments/scan", HOPPER, "spill", "bounds, before the loop", 20, "3.9"),
    Allowed(f"{LIBRARY}/gdn-64-BV=16/scan", HOPPER, "spill", "bounds, before the loop", 20, "3.9"),
    Allowed(f"{LIBRARY}/simple-gla-128-BV=32-segments/scan", ("sm_100",), "spill", "the same", 20, "3.9"),
    Allowed(f"{LIBRARY}/kda-128-BV=32*/scan", ("gfx950",), "spill", "A besides what other scans hold", 100, "3.9"),
    Allowed(
        f"{SERVING}/prefill-*/scan", (*HOPPER, "sm_100", "sm_120"), "spill",
        "in a loop of its own, which runs only if there are more sequences than expected (docs/notes)",
        460,
    ),
    Allowed(f"{SERVING}/prefill-*/scan", ("sm_89",), "spill", "the same", 40, "3.6"),
    Allowed(f"{LIBRARY}/kda-*/channel", ("sm_80",), "spill", "16 tokens of two channels are a thread's", 140),
    Allowed(f"{SERVING}/prefill-kda-128/channel", ("sm_89",), "spill", "the same", 20, "3.6"),
    Allowed(f"{LIBRARY}/kda-128*/channel", ("sm_90a", "sm_100", "sm_120"), "spill", "the same", 60, "3.9"),
    Allowed(f"{SERVING}/prefill-kda-128*/channel", ("sm_90a", "sm_100", "sm_120"), "spill", "the same", 60, "3.9"),
    Allowed(
        f"{LIBRARY}/gdn-64-float32*", tuple(TARGETS), "spill",
        "float32 is for comparisons; with tf32x3 an operand takes two registers", 1400,
    ),
    Allowed(f"{LIBRARY}/gdn-128-unaligned*", ("sm_100",), "spill", "tiles are made for the copy engine", 140),
    Allowed(f"{LIBRARY}/gdn-128-unaligned*", HOPPER, "spill", "the same", 140),
    Allowed(
        f"{BY_HAND}/*-wide/forward_loop", HOPPER, "spill",
        "88 registers for the role that factors: outside of products, and no wgmma waits for itself", 540,
    ),
    Allowed(f"{BY_HAND}/*-narrow/forward_loop", HOPPER, "spill", "the same, with 136", 230),
    Allowed(f"{BY_HAND}/saving-given-narrow/forward_loop", HOPPER, "spill", "the same, with 128", 270, "3.9"),
    Allowed(f"{BY_HAND}/batched-narrow/forward_loop", HOPPER, "spill", "addresses of `rate_role`", 200, "3.9"),
    Allowed(f"{BY_HAND}/*-slim/forward_loop", HOPPER, "spill", "the same, with 144", 100),
    Allowed(f"{BY_HAND}/pool-*wide/forward_loop", HOPPER, "spill", "the same, with a pool and a tape", 620, "3.9"),
    Allowed(f"{BY_HAND}/*-wide-tape/forward_loop", HOPPER, "spill", "the same, with states that are handed over", 510),
    Allowed(f"{BY_HAND}/*-narrow-tape/forward_loop", HOPPER, "spill", "the same", 230),
    Allowed(f"{BY_HAND}/*-slim-tape/forward_loop", HOPPER, "spill", "the same", 100),
    Allowed(f"{BY_HAND}/pool-64*/rates", HOPPER, "spill", "one number of the tape, in one program", 10, "3.6"),
    Allowed(f"{BY_HAND}/channel-pool*/list_prompts", HOPPER, "spill", "the same", 10, "3.6"),
    Allowed(f"{BY_HAND}/pool-64*slim/forward_loop", HOPPER, "spill", "the same", 140),
    Allowed(f"{BY_HAND}/listed-64-slim/forward_loop", HOPPER, "spill", "the same, without a pool", 160, "3.9"),
    Allowed(f"{BY_HAND}/channel*/channel_loop", HOPPER, "spill", "addresses, beside two halves of a state", 40),
    Allowed(f"{BY_HAND}/channel-loop/channel_loop", HOPPER, "spill", "the same", 60, "3.9"),
    Allowed(f"{BY_HAND}/channel-free*/channel_loop", HOPPER, "spill", "the same, beside the branch for pieces", 70),
    Allowed(f"{BY_HAND}/channel-logs*/channel_loop", HOPPER, "spill", "the same", 80),
    Allowed(f"{BY_HAND}/channel*-tape/channel_loop", HOPPER, "spill", "the same, with states handed over", 150),
    Allowed(f"{BY_HAND}/channel*-parts/channel_loop", HOPPER, "spill", "the same, and ends of parts", 100),
    Allowed(f"{BY_HAND}/channel-pool*/channel_prompts", HOPPER, "spill", "as in `channel_loop`", 40),
    Allowed(f"{BY_HAND}/channel-pool*-whole/channel_prompts", HOPPER, "spill", "the same, once a state", 140),
    Allowed(f"{BY_HAND}/channel-pool-free*/channel_prompts", HOPPER, "spill", "the same, with its branch", 170),
    Allowed(f"{BY_HAND}/channel-pool-logs*/channel_prompts", HOPPER, "spill", "the same", 170),
    Allowed(f"{BY_HAND}/channel-rows/prepare", HOPPER, "spill", "addresses, the same for all chunks", 60, "3.9"),
    Allowed(f"{BY_HAND}/channel-free/prepare", HOPPER, "spill", "mostly in the branch of steep chunks", 80, "3.6"),
    Allowed(f"{BY_HAND}/channel-logs*/prepare", HOPPER, "spill", "the same", 140),
    Allowed(f"{BY_HAND}/channel-pool-free*/prepare", HOPPER, "spill", "as in `channel-free`", 80, "3.6"),
    Allowed(f"{BY_HAND}/channel-pool-logs*/prepare", HOPPER, "spill", "as in `channel-logs`", 80, "3.6"),
    Allowed(f"{BY_HAND}/*-segments/scan_segments", HOPPER, "spill", "what comes before the loop", 110),
    Allowed(f"{BY_HAND}/saving*-segments/scan_segments", HOPPER, "spill", "what is saved beside it", 300, "3.9"),
    Allowed(f"{BY_HAND}/*-64*-segments/find_maps", HOPPER, "spill", "what comes before the loop", 10, "3.9"),
    Allowed(f"{BY_HAND}/*-whole/scan_segments", HOPPER, "spill", "what comes before the loop, some addresses", 100),
)  # fmt: skip


class Fault(NamedTuple):
    kind: str
    count: int
    text: str


def faults(result: Result) -> Iterator[Fault]:
    facts, limit = result.facts, TARGETS[result.target].shared_bytes
    if facts is None:
        yield Fault("compile", 1, f"does not compile: {result.error}")
        return
    if facts["spilled"]:
        yield Fault("spill", facts["spilled"], f"spills {facts['spilled']} bytes")
    if facts.get("serialised"):
        waits = f"{facts.get('HGMMA', 0)} HGMMA, {facts.get('WARPGROUP.DEPBAR', 0)} waits"
        yield Fault("serialised", 1, f"every wgmma waits for itself ({', '.join([waits, *facts['warnings']])})")
    if facts.get("lint"):
        yield Fault("lint", facts["lint"], f"a product is transposed and multiplied again ({facts['lint']} lines)")
    if sharing := facts.get("barriers"):
        yield Fault("barriers", len(sharing), f"a barrier's shared memory has another use ({'; '.join(sharing)})")
    if facts["shared"] > limit:
        yield Fault("shared", facts["shared"], f"needs {facts['shared']:,} bytes of shared memory of {limit:,}")
    columns = facts.get("tensor", 0)
    if columns > TENSOR_COLUMNS:
        yield Fault("tensor", columns, f"needs {columns:,} columns of tensor memory of {TENSOR_COLUMNS}")


def judge(
    results: Iterable[Result],
    modules: list[str],
    targets: list[str],
    triton: str,
    allowed: tuple[Allowed, ...] = ALLOWED,
) -> list[str]:
    """Everything that is wrong: faults that no entry allows, and entries whose fault no longer occurs."""
    open_entries = {
        (entry, target)
        for entry in allowed
        for target in entry.targets
        if triton.startswith(entry.triton) and target in targets and entry.kernel.split("/")[0] in modules
    }
    occurred, wrong = set(), []
    for result in results:
        for fault in faults(result):
            fitting = [
                (entry, target)
                for entry, target in open_entries
                if (target, entry.fault) == (result.target, fault.kind) and fnmatchcase(result.kernel, entry.kernel)
            ]
            occurred.update(fitting)
            limits = [entry.at_most for entry, _ in fitting]
            if not any(limit is None or fault.count <= limit for limit in limits):
                known = f"; {max(limits)} are allowed" if limits else ""
                wrong.append(f"{result.kernel}, {result.target}: {fault.text}{known}")
    stale = sorted(open_entries - occurred, key=str)
    return wrong + [f"{e.kernel}, {t}: allowed {e.fault!r} does not occur any more: remove it" for e, t in stale]
