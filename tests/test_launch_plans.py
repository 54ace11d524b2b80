"""What calls launch on Hopper, on a GPU that is none (pretended_gpu.py).

All that a call of other sizes launches has been compiled by the first one, each form of a kernel under a name of its
own.
"""

import shutil
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

SCAN, LOOP = ("prepare", "scan_channels"), ("channel_loop",)
TAPED = ("lay_tape", *LOOP)
PARTS = ("find_forgetting", "channel_loop", *SCAN)


@contextmanager
def watched(place):
    """Yields the plans that calls launch, one after the other, and how many kernels are compiled, each time that any
    are."""
    from flash_delta.compiler.pretended_gpu import pretended_gpu
    from flash_delta.kernels.runtime import run
    from flash_delta.ops import _known_calls

    plans, compiled, compile_all = [], [], run.compile_all

    class Launched(run.Launched):
        def __init__(self, plan, *more):
            super().__init__(plan, *more)
            self.plan = plan

        def __call__(self, *call):
            plans.append(self.plan)
            return super().__call__(*call)

    def noting(wanted):
        compiled.append(len(wanted))
        return compile_all(wanted)

    _known_calls.calls.clear()
    with (
        pretended_gpu(place),
        patch.object(run, "Launched", Launched),
        patch.object(run, "compile_all", noting),
        patch.object(run, "compiled", {}),
    ):
        yield plans, compiled


def kernels_of(plan):
    return tuple(step.kernel.__name__ for step in plan.steps if 0 not in step.grid)


def launched(place, heads, calls):
    """The kernels of the forward passes of ``calls``: lengths of packed sequences, one after the other."""
    import flash_delta

    with watched(place) as (plans, _), torch.no_grad():
        for count, length in calls:
            rows = [torch.zeros(1, count * length, heads, 128, dtype=torch.bfloat16) for _ in range(4)]
            bounds = torch.arange(count + 1, dtype=torch.int32) * length
            beta = torch.zeros(1, count * length, heads, dtype=torch.bfloat16)
            flash_delta.chunk_kda(*rows, beta, cu_seqlens=bounds, backend="hopper")
    return tuple(map(kernels_of, plans))


def prompts(count, length, heads=32, kept=None, channel=True, **options):
    """A prefill by name, with a decay per channel or per head. ``kept``: checkpoints at a "stride" or at an
    "offset"."""
    import flash_delta

    rows = [torch.zeros(1, count * length, heads, 128, dtype=torch.bfloat16) for _ in range(4)]
    op = flash_delta.prefill_kda
    if not channel:
        rows[3], op = rows[3][..., 0], flash_delta.prefill_gated_delta_rule
    bounds, numbers = torch.arange(count + 1, dtype=torch.int32) * length, torch.arange(count)
    if kept is not None:
        options |= {"checkpoint_indices": numbers[:, None] if kept == "stride" else numbers}
        options |= {"checkpoint_every": 64} if kept == "stride" else {"checkpoint_offsets": numbers}
    beta, pool = torch.zeros(1, count * length, heads, dtype=torch.bfloat16), torch.zeros(16, heads, 128, 128)
    return op(*rows, beta, pool, bounds, numbers, numbers, state_v_first=True, backend="hopper", **options)


def packed(count, length, heads=8):
    """A forward pass by name of sequences whose lengths only the device knows, without gradients."""
    import flash_delta

    q, k, v = (torch.zeros(1, count * length, heads, 128, dtype=torch.bfloat16) for _ in range(3))
    bounds = torch.arange(count + 1, dtype=torch.int32) * length
    flash_delta.chunk_gated_delta_rule(q, k, v, v[..., 0], v[..., 0], cu_seqlens=bounds, backend="hopper")


def launched_for_prompts(place, calls, call=prompts):
    """The kernels of prefills, each called twice; and how often something was compiled."""
    with watched(place) as (plans, compiled), torch.no_grad():
        for count, length, options in calls:
            for _ in range(2):
                call(count, length, **options)
    return list(map(kernels_of, plans)), len(compiled)


def loops(place, batches):
    """The grids of the loop for packed batches whose lengths the host knows, one after the other; and for each the
    first one with the same launches."""
    import flash_delta

    with watched(place) as (plans, _), torch.no_grad():
        for lengths in batches:
            rows = [torch.zeros(1, sum(lengths), 32, 128, dtype=torch.bfloat16) for _ in range(3)]
            gates = [torch.zeros(1, sum(lengths), 32) for _ in range(2)]
            bounds = torch.tensor([0, *lengths]).cumsum(0)
            flash_delta.chunk_gated_delta_rule(*rows, *gates, cu_seqlens=bounds, cu_seqlens_cpu=bounds.tolist())
    grids = [step.grid[:2] for plan in plans for step in plan.steps if step.kernel.__name__ == "forward_loop"]
    same = [id(plan) for plan in plans]
    return grids, list(map(same.index, same))


def named_twice(place, kind):
    """Kernels of which two forms have one name, among all that a first call compiles."""
    from new_lengths import Calls

    import flash_delta
    from flash_delta.kernels.runtime import run

    forms, twice, name_of = {}, [], run.name_of

    def noting(step):
        name, absent = name_of(step), tuple(value is None for value in step.arguments)
        if forms.setdefault(name, absent) != absent:
            twice.append(step.kernel.__name__)
        return name

    def kda(grad, heads):
        rows = [torch.zeros(1, 2048, heads, 128, dtype=torch.bfloat16).requires_grad_(grad) for _ in range(4)]
        return lambda: flash_delta.chunk_kda(*rows, torch.zeros(1, 2048, heads, dtype=torch.bfloat16))

    def call(kind):
        if kind == "kda prefill":
            return partial(prompts, 3, 700)
        if kind.startswith("kda"):
            return kda("training" in kind, 2 if kind.endswith("2 heads") else 32)
        return getattr(Calls(), kind)(300)

    with watched(place) as (_, compiled), patch.object(run, "name_of", noting):
        call(kind)()
    assert 0 < sum(compiled) <= len(forms)
    return twice


# With 2 heads sequences may be split, so that kernels for segments are compiled, too.
KDA = ["kda forward", "kda training", "kda training, 2 heads", "kda prefill"]


@pytest.mark.parametrize("kind", ["forward", "training", "prefill", "decode", *KDA])
def test_forms_have_names_of_their_own(process, place, kind):
    assert process.submit(named_twice, place, kind).result() == []


@pytest.mark.parametrize(
    ("heads", "calls", "kernels"),
    [
        (32, ((1, 8192), (8, 1024), (1, 300), (1, 1000), (1, 8192)), (PARTS, TAPED, LOOP, SCAN, PARTS)),
        (32, ((8, 1024), (1, 8192)), (TAPED, PARTS)),
        (64, ((1, 2048), (8, 256)), (LOOP, TAPED)),
        (19, ((7, 1024), (7, 2048), (8, 1024), (4, 1024)), (TAPED, TAPED, TAPED, LOOP)),  # 133, 152 and 76 states
    ],
)
def test_kernels(process, place, heads, calls, kernels):
    assert tuple(process.submit(launched, place, heads, calls).result()) == kernels


def test_known_lengths_choose_the_loop(process, place):
    """Calls of the same sizes with other lengths have launches of their own, unless the host chooses the same."""
    equal, nearly, one_long = (512,) * 9, (500, 524, *(512,) * 7), (4096, *(64,) * 8)
    grids, same = process.submit(loops, place, (equal, equal, one_long, nearly)).result()
    assert grids == [(132, 1), (132, 1), (66, 2), (132, 1)]
    assert same[1:] == [same[1], 2, same[1]]  # a process's first call may be known by a key of Python


def launched_back(place, calls):
    """The kernels of backward passes of packed sequences, one after the other: their lengths, and whether the host
    knows them; and how often something is compiled."""
    import flash_delta

    with watched(place) as (plans, compiled):
        for lengths, known in calls:
            T = sum(lengths)
            q, k, v = (torch.zeros(1, T, 32, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
            g, bounds = torch.zeros(1, T, 32), torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
            packed = {"cu_seqlens": bounds, "cu_seqlens_cpu": bounds.tolist() if known else None}
            o, _ = flash_delta.chunk_gated_delta_rule(q, k, v, g, g, **packed, backend="hopper")
            torch.autograd.grad(o, (q, k, v), o)
    return list(map(kernels_of, plans[1::2])), len(compiled)


def test_tapes_of_backward_passes(process, place):
    """128, 160 and 256 states. With 256 of equal length, which the host knows, programs scan whole sequences."""
    equal, unequal = (1024,) * 8, (512, 1536) * 4
    calls = ((1024,) * 4, False), ((1024,) * 5, False), (equal, False), (equal, True), (unequal, True), (equal, True)
    names, compilations = process.submit(launched_back, place, calls).result()
    tapes = [("lay_tape",) * 2 if taped else () for taped in (False, True, True, False, True, False)]
    assert names == [("rates", *laid, "scan_segments", "scan_gradients", "finish", "sum_heads") for laid in tapes]
    assert compilations == 1


def longest_axis(place, op, count, K, dtype, long, training):
    """The longest second or third axis of a grid, in a call for packed sequences. The last one has ``long`` tokens and
    may be split, the others have one."""
    import flash_delta

    T, per = count - 1 + long, (K,) if op == "chunk_kda" else ()
    bounds = [*range(count), T]
    packed = {"cu_seqlens": torch.tensor(bounds), "cu_seqlens_cpu": bounds}
    with watched(place) as (plans, _):
        q, k, v = (torch.empty(1, T, 1, K, dtype=dtype).requires_grad_(training) for _ in range(3))
        g, beta = torch.empty(1, T, 1, *per, dtype=dtype), torch.empty(1, T, 1, dtype=dtype)
        o, _ = getattr(flash_delta, op)(q, k, v, g, beta, **packed, backend="hopper")
        if training:
            torch.autograd.grad(o, (q, k, v), o)
    return max(max(step.grid[1:]) for plan in plans for step in plan.steps)


GATED, CHANNEL = "chunk_gated_delta_rule", "chunk_kda"


@pytest.mark.parametrize(
    ("op", "count", "K", "dtype", "training", "longest"),
    [
        (GATED, 70_000, 64, torch.bfloat16, True, 2),
        (GATED, 32_767, 64, torch.float16, True, 65_534),
        (CHANNEL, 70_000, 128, torch.bfloat16, False, 2),
        (CHANNEL, 32_767, 128, torch.bfloat16, True, 65_534),
    ],
)
def test_grids_have_room_for_all_sequences(process, place, op, count, K, dtype, training, longest):
    """A grid has room for as many sequences as the backend takes, also if one of them is long enough to be split. (For
    'triton' see test_plans.py.)"""
    assert process.submit(longest_axis, place, op, count, K, dtype, 2**17, training).result() == longest


FEW, POOL_LOOP = SCAN, ("channel_prompts",)
EITHER = FEW + POOL_LOOP


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        ({"heads": 64}, (2 * POOL_LOOP, 2 * POOL_LOOP, POOL_LOOP, POOL_LOOP)),
        ({"heads": 64, "batch_invariant": True}, 3 * (POOL_LOOP,)),
        ({}, (EITHER, EITHER, FEW, POOL_LOOP)),
        ({"batch_invariant": True}, 3 * (FEW,)),
        ({"kept": "stride"}, (EITHER, EITHER, FEW, POOL_LOOP)),
        ({"kept": "offset"}, (EITHER, EITHER, FEW, POOL_LOOP)),
    ],
)
def test_prompts_with_a_decay_per_channel(process, place, options, ways):
    """Other lengths and numbers of prompts compile nothing. With many heads the loop is launched for halves of states
    and for whole ones, with few heads `prepare` and a scan or the loop. There is only one of them if it is known which
    one is wanted."""
    calls = (3, 700, options), (7, 64, options), (1, 33, options), (3, 701, options | {"max_prompts": 3})
    names, compilations = process.submit(launched_for_prompts, place, calls[: len(ways)]).result()
    beside = ["decode"] * ("batch_invariant" not in options)
    around = ["scan_to_offset"] * (options.get("kept") == "offset")
    wanted = [(*around, "list_prompts", *way, *beside, *around) for way in ways]
    assert names == [of for of in wanted for _ in range(2)]
    assert compilations == 1


IN_PARTS = ("factor_chunks", "find_maps", "compose_starts")
IN_SEGMENTS = ("factor_chunks", "find_maps", "compose_maps", "scan_segments")


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}, {"kept": "stride"}, {"kept": "offset"}], ids=str)
def test_prompts_in_parts(process, place, options):
    """What finds the states that parts start from is launched if a prompt may be long enough. No length compiles."""
    beside, twice = ("decode",) * ("batch_invariant" not in options), 2 * ("forward_loop",)
    around = ("scan_to_offset",) * (options.get("kept") == "offset")
    calls = [(count, length, {"heads": heads, "channel": False} | options) for heads, count, length in LONG]
    names, compilations = process.submit(launched_for_prompts, place, calls).result()
    found = [tuple(name for name in of if name not in (*beside, *around, "rates")) for of in names[::2]]
    assert found == [twice[1:], IN_PARTS + twice, twice, twice[1:], twice]
    assert names[::2] == names[1::2]
    assert compilations == 2, "one for each number of heads"


@pytest.mark.parametrize("one_first", [False, True], ids=["several-first", "one-first"])
def test_packed_sequences_whose_lengths_only_the_device_knows(process, place, one_first):
    """The host plans for one sequence. The device lists several, and cuts long ones. No number of sequences or tokens
    compiles anything."""
    one = {700: ("forward_loop",), 9000: ("rates", *IN_SEGMENTS)}
    several = {700: ("rates", "forward_loop"), 2000: ("rates", *IN_PARTS, "forward_loop")}
    calls = [(1, length, names) for length, names in one.items()]
    calls += [(3, length, names) for length, names in several.items()]
    calls = calls if one_first else calls[::-1]
    given = [(count, length, {}) for count, length, _ in calls]
    names, compilations = process.submit(launched_for_prompts, place, given, packed).result()
    assert names == [of for _, _, of in calls for _ in range(2)]
    assert compilations == 1


def forms_for(place, kind, every_heads):
    """For each of several (H, HV) the kernels that a first call with so many heads compiles, with their names."""
    import flash_delta
    from flash_delta.kernels.runtime import run

    rule, what, backend = kind.split()
    found, training = [], what == "training"
    for H, HV in every_heads:
        shape = {"decode": (4, 1), "prefill": (1, 512)}.get(what, (2, 512))
        q, v = torch.zeros(*shape, H, 128, dtype=torch.bfloat16), torch.zeros(*shape, HV, 128, dtype=torch.bfloat16)
        g, beta, options = v if rule == "kda" else v[..., 0].float(), torch.zeros(v.shape[:3], dtype=torch.bfloat16), {}
        if what in ("decode", "prefill"):
            rows = torch.arange(4, dtype=torch.int32)
            options = {"state_pool": torch.zeros(4, HV, 128, 128), "read_indices": rows, "write_indices": rows}
            options |= {"state_v_first": True, "use_gate_in_kernel": True, "A_log": torch.zeros(HV)}
        if what == "prefill":
            options["cu_seqlens"] = torch.arange(5, dtype=torch.int32) * 128
        name = f"{what if options else 'chunk'}_{'kda' if rule == 'kda' else 'gated_delta_rule'}"
        with watched(place), torch.set_grad_enabled(training):
            x = [q.requires_grad_(training), q.detach(), v, g, beta]
            o = getattr(flash_delta, name)(*x, use_qk_l2norm_in_kernel=True, backend=backend, **options)
            if training:
                torch.autograd.grad(o[0], q, o[0])
            found.append({(compiled.name, *form[1:]) for form, compiled in run.compiled.items()})
    return found


SERVED = [f"{rule} {what} triton" for rule in ("gdn", "kda") for what in ("decode", "prefill")]
KINDS = [
    f"{rule} {what} {by}" for rule in ("gdn", "kda") for what in ("forward", "training") for by in ("triton", "hopper")
]


EXCEPTED = {  # kernels that are slower with numbers of heads that are no constants (docs/notes)
    "gdn forward hopper": {"rates"},
    "gdn training hopper": {"rates"},
    "gdn decode triton": {"decode"},
    "kda decode triton": {"decode"},
    "gdn prefill triton": {"decode", "scan"},
    "kda prefill triton": {"decode", "scan"},
    "gdn prefill hopper": {"decode", "rates"},
    "kda prefill hopper": {"decode"},
}


@pytest.mark.parametrize("kind", [*KINDS, *SERVED, "gdn prefill hopper", "kda prefill hopper"])
def test_no_number_of_heads_compiles_anything(process, place, kind):
    """If there are as many value heads per key head, and except for `decode`, `rates`, and the scan on a pool. (With
    few heads there may be other launches.)"""
    heads = ((6, 6), (5, 5)) if kind.startswith("kda") else ((8, 16), (5, 10))
    first, second = process.submit(forms_for, place, kind, heads).result()
    assert {name for name, *_ in first ^ second} == EXCEPTED.get(kind, set())


def convolved(place, lengths):
    """How often training steps of a convolution compile something, whose rows are 100 numbers apart."""
    from flash_delta.modules import causal_conv1d

    weight = torch.zeros(96, 4, dtype=torch.bfloat16, requires_grad=True)
    with watched(place) as (_, compiled):
        for T in lengths:
            x = torch.zeros(2, T, 100, dtype=torch.bfloat16, requires_grad=True)
            causal_conv1d(x[..., :96], weight)[0].sum().backward()
    return len(compiled)


def test_no_batch_stride_of_a_convolution_compiles_anything(process, place):
    assert process.submit(convolved, place, (33, 16, 64)).result() == 2, "one for each direction"


LONG = ((8, 1, 1000), (8, 2, 4224), (8, 12, 250), (64, 1, 8192), (64, 2, 8192))
