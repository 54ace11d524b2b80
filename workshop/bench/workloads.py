"""The workloads that are timed: the rows of the tables in ``docs/benchmarks.md``."""

import random
from collections.abc import Iterator

from flash_delta.testing import Workload

BATCHES = (1, 8, 32, 64, 128, 256)
IN_OP = {"l2norm": True, "raw": True}  # norms, gates and sigmoid run in the op, as engines and layers call it


def _unequal(member: str, H: int, HV: int, *lengths: int, group: str, kind: str = "prefill", **options) -> Workload:
    return Workload(group, kind, member, H, HV, len(lengths), max(lengths), lengths=lengths, **options)


def documents(count: int, tokens: int, seed: int = 1) -> tuple[int, ...]:
    """The lengths of a packed batch, in random order: lognormal shares of ``tokens``."""
    draw = random.Random(seed)
    sizes = [draw.lognormvariate(0, 1.1) for _ in range(count)]
    lengths = [max(1, int(size / sum(sizes) * tokens)) for size in sizes]
    return (lengths[0] + tokens - sum(lengths), *lengths[1:])


def _gdn_prefill() -> Iterator[Workload]:
    for H, HV in ((16, 32), (16, 64), (4, 16), (2, 8)):
        for N, T in ((1, 32768), (1, 8192), (4, 8192), (8, 1024)):
            yield Workload("gdn-prefill", "forward", "gdn", H, HV, N, T)


def _gdn_long() -> Iterator[Workload]:
    for H, HV in ((2, 8), (4, 16), (16, 64)):
        for T in (131072, 524288):
            yield Workload("gdn-long", "forward", "gdn", H, HV, 1, T)


def _gdn_mixed() -> Iterator[Workload]:
    """One long sequence among short ones, and the same sequence alone."""
    for H, HV in ((2, 8), (4, 16), (16, 32)):
        for lengths in ((131072,), (131072, *(64,) * 31)):
            yield _unequal("gdn", H, HV, *lengths, group="gdn-mixed", kind="forward")


def _packed() -> Iterator[Workload]:
    """Documents of unequal length in random order, numbers of states (sequences times value heads) that fill no whole
    rounds of the chip, and one long sequence among short ones. Lengths that only the device knows, and training."""
    random_documents, one_long = documents(37, 20000), (32768, *(64,) * 100)
    equal = {
        "gdn": {(16, 32, 4096): (5, 6), (24, 24, 4096): (3, 6, 8)},
        "kda": {(16, 16, 2048): (9, 10)},
    }
    for member, heads, few in (("gdn", ((16, 32), (24, 24)), (4, 8)), ("kda", ((32, 32),), (4, 4))):
        common = {"group": f"{member}-packed", "kind": "forward", **IN_OP}
        for (H, HV, T), counts in equal[member].items():
            yield from (_unequal(member, H, HV, *(T,) * N, **common) for N in counts)
        for H, HV in heads:
            yield from (_unequal(member, H, HV, *random_documents, **common, on_device=d) for d in (False, True))
        for H, HV in (heads[0], few):
            yield _unequal(member, H, HV, *one_long, **common, on_device=True)
        yield _unequal(member, *heads[0], *random_documents, **common | {"kind": "training", "states": False})


def _pools() -> Iterator[Workload]:
    """The heads that one of 2, 4 or 8 ranks has, of 16/32: prompts alone, beside others and beside decoding rows, and
    decoding. Prompts with gates of Kimi Delta Attention that have no bound."""
    for H, HV in ((8, 16), (4, 8), (2, 4)):
        for lengths in ((8192,), (32768,), (1000,) * 16, (32768, *(64,) * 100), (*(1,) * 64, 8192)):
            yield _unequal("gdn", H, HV, *lengths, group="gdn-pools", **IN_OP)
    for H, HV in ((4, 8), (2, 4)):
        for N in (32, 64, 128, 256):
            yield Workload("gdn-pools", "decode", "gdn", H, HV, N, 1, packed=False, **IN_OP)
    for lengths in ((1024,) * 8, (1000,) * 20):
        yield _unequal("kda", 32, 32, *lengths, group="kda-pools", gates="unbounded", **IN_OP)


def _gdn_training() -> Iterator[Workload]:
    for H, HV, N, T in ((16, 32, 1, 8192), (16, 32, 1, 32768), (4, 8, 1, 8192), (4, 8, 1, 32768), (16, 32, 8, 1024)):
        yield Workload("gdn-training", "training", "gdn", H, HV, N, T, packed=N > 1, states=False)
    for T in (8192, 32768):
        yield Workload(
            "gdn-training", "training", "gdn", 16, 32, 1, T, packed=False, states=False, disable_recompute=True
        )


def _kda() -> Iterator[Workload]:
    for H in (32, 64, 96):
        for N, T in ((1, 8192), (8, 1024)):
            yield Workload("kda-forward", "forward", "kda", H, H, N, T, **IN_OP)
    for N, T in ((1, 8192), (8, 1024)):
        for H in (32, 64, 96):
            yield Workload("kda-training", "training", "kda", H, H, N, T, states=False)


def _kda_gates() -> Iterator[Workload]:
    """Three kinds of gates: gates with which every channel soon forgets, gates without a bound, and given log decays
    without a promise that they are bounded."""

    def row(gates: str, H: int, N: int, T: int) -> Workload:
        raw = gates != "log decays"
        return Workload("kda-gates", "forward", "kda", H, H, N, T, l2norm=True, raw=raw, gates=gates)

    yield from (row("dt_bias = 0", H, N, T) for H, N, T in ((32, 1, 8192), (64, 1, 8192), (64, 8, 1024)))
    for gates in ("unbounded", "log decays"):
        yield from (row(gates, H, N, T) for H in (32, 64) for N, T in ((1, 8192), (8, 1024)))


def _models() -> Iterator[Workload]:
    """Rules as layers call them, with norms and raw gates in the op. Simple GLA has none of these."""
    for N, T in ((1, 8192), (1, 32768), (8, 1024)):
        for kind in ("forward", "training"):
            common = {"packed": N > 1, "states": False}
            for H, HV in ((16, 32), (4, 8)):
                yield Workload("gdn-models", kind, "gdn", H, HV, N, T, **common, **IN_OP)
            for member in ("comba", "delta-rule"):
                yield Workload(member, kind, member, 16, 16, N, T, **common, **IN_OP)
            yield Workload("simple-gla", kind, "simple-gla", 16, 16, N, T, **common)
        yield Workload("kda-models", "training", "kda", 32, 32, N, T, **common, **IN_OP)


def _family() -> Iterator[Workload]:
    """Members of the family beside the ones whose kernels they share. Gated DeltaProduct's are those of one update."""
    for kind in ("forward", "training"):
        for H in (16, 32):
            for N, T in ((1, 8192), (8, 1024), (4, 8192)):
                common = {"packed": T == 1024, "states": False, "l2norm": True}
                for member in ("kda", "gdn2"):
                    yield Workload(f"family-{member}", kind, member, H, H, N, T, **common, raw=True)
                for updates in (1, 2):
                    yield Workload("family-gdp", kind, "gdp", H, H, N, T, **common, updates=updates)


def _widths() -> Iterator[Workload]:
    """Heads of other widths than 128: 100 as in fla's tests, 256 and 512 as in fla's default layers, and the shapes of
    its pull request 823. KDA also has a call that saves everything for the backward pass."""
    common = {"packed": False, "states": False}
    for kind in ("forward", "training"):
        for K, V in ((128, 128), (100, 100), (256, 256), (256, 512)):
            yield Workload("gdn-widths", kind, "gdn", 6, 6, 1, 8192, **common, K=K, V=V)
    for kind in ("forward", "training"):
        yield Workload("gdn-widths", kind, "gdn", 16, 32, 1, 8192, **common, K=64, V=64)
    for T in (256, 512, 1024, 2048, 4096, 8192, 16384):
        yield Workload("gdn-widths", "training", "gdn", 8, 8, 16, T, "float16", **common, K=256, V=256)
    for K, V in ((128, 128), (100, 100), (256, 256), (256, 512)):
        yield Workload("kda-widths", "training", "kda", 32, 32, 1, 8192, **common, K=K, V=V)
    yield Workload("kda-widths", "training", "kda", 32, 32, 1, 8192, **common, disable_recompute=True)


def _decode() -> Iterator[Workload]:
    common = {"T": 1, "packed": False, **IN_OP}
    for state_dtype in ("float32", "bfloat16"):
        for N in BATCHES:
            yield Workload("decode", "decode", "gdn", 16, 32, N, **common, state_dtype=state_dtype)
    for N in BATCHES:
        yield Workload("kda-decode", "decode", "kda", 32, 32, N, **common)


def _serving() -> Iterator[Workload]:
    def prefill(*lengths: int, **options: bool | int) -> Workload:
        return _unequal("gdn", 16, 32, *lengths, group="serving", **IN_OP, **options)

    for lengths in ((8192,), (1024,) * 8, (500, 1500, 2500, 3692)):
        yield prefill(*lengths, batch_invariant=True)
    for lengths in ((32768,), (4096,) * 8):
        yield prefill(*lengths, checkpoint_every=1024)
    for rows, *prompts in ((8, 2048), (64, 2048), (64, 4096, 4096)):
        yield prefill(*[1] * rows, *prompts)
    for N in (32, 64):
        for T in (2, 4, 8, 16):
            yield Workload("serving", "decode", "gdn", 16, 32, N, T, packed=False, **IN_OP)
        lengths = (1, 3, 5, 7) * (N // 4)  # as many tokens as drafts of 4
        yield _unequal("gdn", 16, 32, *lengths, group="serving", kind="decode", **IN_OP)
        for T in (4, 8):
            yield Workload("serving", "decode", "gdn", 16, 32, N, T, packed=False, tree=True, **IN_OP)


def _drafts() -> Iterator[Workload]:
    """Drafts, and single tokens beside them."""
    for N in (8, 32, 64):
        for T in (1, 2, 4, 8):
            yield Workload("drafts", "decode", "gdn", 16, 32, N, T, packed=False, **IN_OP)
            yield Workload("kda-drafts", "decode", "kda", 32, 32, N, T, packed=False, **IN_OP)


def _prompts() -> Iterator[Workload]:
    """Prompts with convolution and output norm. Other contestants call each step, and gather and scatter windows."""
    for lengths in ((8192,), (1024,) * 8, (*(1,) * 64, 2048)):
        yield _unequal("gdn", 16, 32, *lengths, group="prompts", l2norm=True, around=True)


def _steps() -> Iterator[Workload]:
    """Decoding with convolution and output norm. Other contestants run as in `_prompts`."""
    common = {"T": 1, "packed": False, "around": True, **IN_OP}
    for N in (1, 32, 128):
        yield Workload("steps", "decode", "gdn", 16, 32, N, **common)
    for N in (1, 32, 128):
        yield Workload("kda-steps", "decode", "kda", 32, 32, N, **common)


def _layer() -> Iterator[Workload]:
    common = {"packed": False, "states": False, "hidden": 2048}
    yield Workload("layer", "prefill", "gdn", 16, 32, 1, 8192, **common)
    for N, T in ((1, 8192), (4, 2048)):
        yield Workload("layer", "training", "gdn", 16, 32, N, T, **common)
    for N in (1, 32):
        yield Workload("layer", "decode", "gdn", 16, 32, N, 1, **common)


def _layers_of_fla() -> Iterator[Workload]:
    """Layers of fla with their default widths, and with those of Qwen3-Next and Kimi-Linear."""
    widths = {
        "gdn": ((2048, 6, 6, 256, 512), (2048, 16, 32, 128, 128)),
        "kda": ((2048, 16, 16, 128, 128), (2304, 32, 32, 128, 128)),
    }
    for member, layers in widths.items():
        for kind in ("forward", "training"):
            for hidden, H, HV, K, V in layers:
                for N, T in ((8, 1024), (1, 8192)):
                    layer = {"hidden": hidden, "of_fla": True, "K": K, "V": V, "states": False, "packed": N > 1}
                    yield Workload(f"fla-{member}-{kind}", kind, member, H, HV, N, T, **layer)


def _step(group: str, of_fla: bool) -> Iterator[Workload]:
    """Whole steps of layers in every form. Graphed callables are for training."""
    lengths = (2048, 1536, 1024, 512)
    layer = {"hidden": 2048, "of_fla": of_fla, "packed": False, "states": False}
    for kind in ("training", "forward"):
        shapes = [(1, 1024, {}), (1, 8192, {}), (8, 1024, {"packed": True}), (4, 2048, {"lengths": lengths})]
        shapes += [(1, 1024, {"layers": 4})]
        shapes += [(1, 8192, {"frozen": True})] if kind == "training" else []
        for N, T, more in shapes:
            for form in ("called", "compiled", "reduce-overhead", *(("graphed",) if kind == "training" else ())):
                yield Workload(group, kind, "gdn", 16, 32, N, T, **layer | more, form=form)


def _cpu() -> Iterator[Workload]:
    for dtype in ("float32", "bfloat16"):
        common = {"dtype": dtype, "packed": False, "l2norm": True}
        for N in (1, 32):
            yield Workload("cpu", "decode", "gdn", 4, 8, N, 1, **common)
        for T in (512, 2048, 8192):
            yield Workload("cpu", "forward", "gdn", 4, 8, 1, T, **common)
            yield Workload("cpu", "training", "gdn", 4, 8, 1, T, **common)


WORKLOADS = (
    *_gdn_prefill(), *_gdn_long(), *_gdn_mixed(), *_packed(), *_gdn_training(), *_kda(), *_kda_gates(), *_family(),
    *_widths(), *_models(), *_decode(), *_pools(), *_serving(), *_drafts(), *_prompts(), *_steps(), *_layer(),
    *_layers_of_fla(), *_step("step", of_fla=True), *_step("step-transformers", of_fla=False), *_cpu(),
)  # fmt: skip
GROUPS = tuple(dict.fromkeys(workload.group for workload in WORKLOADS))
