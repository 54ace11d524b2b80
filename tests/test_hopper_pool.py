"""The Hopper backend's prefill: on a GPU of that kind, or `rates` and `decode` in Triton's interpreter and the loop
emulated."""

import os
import random
from functools import partial
from inspect import signature

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from example_calls import example
from hostile_bounds import HOSTILE, T, hostile, leave_unread
from prefill_truth import OPS, TOKENS, bounds, check, make_prefill, run, sequence
from prompt_truth import check_prompts, make_prompts
from serving_truth import slots

from flash_delta import chunk_gated_delta_rule
from flash_delta.kernels.hopper import backend
from flash_delta.kernels.hopper.plans import prompt_list
from flash_delta.kernels.hopper.plans.tiles import NARROW, SLIM, WIDE, pool_loops
from flash_delta.kernels.hopper.scalar import choices, plan
from flash_delta.kernels.hopper.scalar.forward import loop
from flash_delta.kernels.hopper.scalar.prefill import plan_prefill
from flash_delta.kernels.hopper.scalar.segments import factor, maps, memory
from flash_delta.kernels.hopper.scalar.segments.cut import Cut, count_starts, cut_prompts, part_length
from flash_delta.kernels.runtime import run as runner
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.cuda_driver import Replay
from flash_delta.kernels.runtime.plan import layouts_of
from flash_delta.kernels.runtime.pool_launches import ANY, PoolLaunch
from flash_delta.ops import _known_calls
from flash_delta.ops._backend import Explain
from flash_delta.ops.serving import _run
from flash_delta.problem import Gate, Pools, Problem
from tests.changed import changed
from tests.gluon_emulator import Kernel, emulated, take_every_call

DEVICE = "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 else "cpu"
runs = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="asks a Hopper GPU or the interpreter"
)
LENGTHS = (70, 1, 0, 130, 17, 16, 64)
TINY = {"H": 1, "HV": 2, "K": 64, "V": 64, "dtype": torch.bfloat16, "device": DEVICE}


@pytest.fixture
def launched(monkeypatch):
    """Without a GPU backend "hopper" with its loop emulated, on three multiprocessors. A function that says in which
    forms it was launched since it was asked before."""
    noted = []
    _known_calls.calls.clear()
    if DEVICE == "cpu":
        for module, name in ((loop, "forward_loop"), (factor, "factor_chunks"), (maps, "find_maps")):
            package, path = "flash_delta.kernels.hopper", module.__name__.removeprefix("flash_delta.kernels.hopper.")
            function = getattr(emulated(package, path), name)
            monkeypatch.setattr(module, name, Kernel(function, lambda own: noted.append(own.get("GROUPS"))))
        monkeypatch.setattr(runner, "chip_of", lambda device: Chip("interpreter", 3))
        allow_by_name(monkeypatch)
    yield partial(take, noted) if DEVICE == "cpu" else lambda: None
    _known_calls.calls.clear()


def allow_by_name(monkeypatch):
    """Lets calls name the backend "hopper" where there is no such GPU."""
    load, choose = _run.load_backend, _run.choose_backend
    monkeypatch.setattr(_run, "load_backend", lambda name: backend if name == "hopper" else load(name))
    monkeypatch.setattr(_run, "choose_backend", lambda p, wish: wish if wish == "hopper" else choose(p, wish))


def take(noted):
    """What was noted since it was asked before."""
    found = noted[:]
    noted.clear()
    return found


def cut_prompts_at(monkeypatch, *numbers):
    """Prompts are cut into parts, by the numbers of a `Cut`."""
    _known_calls.calls.clear()
    for module in (memory, choices):
        monkeypatch.setattr(module, "cut_prompts", lambda p, processors: Cut(*numbers))
    monkeypatch.setattr(factor, "FACTOR_PROGRAMS", 1)  # so that each factors several chunks


def mixed(**changes):
    """Prompts beside decoding rows and rows that are none, with checkpoints, and NaN behind all."""
    x = make_prefill("gdn-raw", LENGTHS, behind=9, slots=40, **(TINY | changes))
    table = [[16 + 3 * n, 17 + 3 * n, 18 + 3 * n] for n in range(len(LENGTHS))]
    table[3][1] = -1
    x |= {"checkpoint_indices": slots(table, x, torch.int32), "checkpoint_every": 64}
    x["has_initial_state"] = slots([1, 1, 0, 0, 1, 0, 1], x).bool()
    for name in TOKENS:
        x[name][:, sum(LENGTHS) :] = float("nan")
    return x


@runs
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("v_first", [False, True], ids=["k-first", "v-first"])
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_against_the_recurrence(launched, pool, v_first, batch_invariant):
    check("gdn-raw", mixed(pool=pool, v_first=v_first) | {"batch_invariant": batch_invariant}, "hopper")
    assert launched() in (None, [1])


def at_offsets(x, *offsets):
    """Returns the call with one checkpoint of each sequence. The first sequence goes on in its own slot."""
    write = x["write_indices"].clone()
    write[0] = x["read_indices"][0]
    x = x | {"write_indices": write, "checkpoint_indices": x["checkpoint_indices"][:, 0], "checkpoint_every": None}
    return x | {"checkpoint_offsets": slots(offsets, x)}


@runs
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("pool", "v_first"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
def test_checkpoints_at_offsets(launched, pool, v_first, batch_invariant):
    """A stride's bits at multiples of 64, the final state's at the end; outputs are those without them."""
    x = mixed(pool=pool, v_first=v_first) | {"batch_invariant": batch_invariant}
    o, strided = run("gdn-raw", x, "hopper")
    kept = x["checkpoint_indices"][:, 0]
    same, found = check("gdn-raw", at_offsets(x, 65, 1, 0, 64, 17, 3, 64), "hopper")
    again, ends = check("gdn-raw", at_offsets(x, 0, 2**31, -1, 130, 16, 16, 63), "hopper")
    assert launched() in (None, [1] * 3)
    assert torch.equal(same, o)
    assert torch.equal(again, o)
    assert torch.equal(found[kept[3]], strided[kept[3]])
    assert torch.equal(found[kept[[1, 4, 6]]], strided[[8, 11, 13]])
    assert torch.equal(ends[kept[[0, 3, 5]]], torch.stack([x["state_pool"][0], strided[10], strided[12]]))


@runs
@pytest.mark.parametrize("parted", [False, True], ids=["whole", "in-parts"])
def test_convolution_and_norm(launched, monkeypatch, parted):
    """From slices of a projection that no descriptor describes."""
    if parted:
        cut_prompts_at(monkeypatch, 2, 1, 16)
    x = make_prompts("gdn-raw", (70, 1, 140, 0), behind=3, slots=20, **TINY)
    x["q"], x["k"] = torch.cat([x["q"], x["k"], x["q"][..., :1]], 3)[..., :128].split(64, 3)
    check_prompts("gdn-raw", x | {"null_slot": 1}, "hopper")
    assert launched() in (None, [None, None, 1] if parted else [1])


@runs
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("parted", [False, True], ids=["whole", "in-parts"])
def test_wrong_bounds_write_to_no_other_slot(launched, monkeypatch, name, parted):
    leave_unread(monkeypatch)
    bounds = hostile(name, DEVICE)
    if parted:
        cut_prompts_at(monkeypatch, 2, 1, 16)
    lengths = (T, *(0 for _ in bounds[2:]))
    x = make_prefill("gdn-raw", lengths, slots=20, **(TINY | {"HV": 1}))
    _, pool = run("gdn-raw", x | {"cu_seqlens": bounds}, "hopper")
    N = len(lengths)
    untouched = [*range(N), *range(2 * N, 20)]
    assert torch.equal(pool[untouched], x["state_pool"][untouched])
    if DEVICE == "cuda":
        monkeypatch.undo()
        _known_calls.calls.clear()
        check("gdn-raw", x, "hopper")


@runs
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16], ids=str)
def test_heads_of_128(launched, pool):
    """Few prompts run in halves, others whole: of the launches one finds that it is meant."""
    x = mixed(pool=pool, K=128, V=128, HV=1)
    few = make_prefill("gdn-raw", (3, 66, 1, 2), **(TINY | {"HV": 1, "K": 128, "V": 128}))
    for call, forms in ((x, [1, 2]), (x | {"max_prompts": 4}, [2]), (few, [1, 2])):
        check("gdn-raw", call, "hopper")
        assert launched() in (None, forms)


@runs
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_what_is_no_slot_is_padding(launched, batch_invariant):
    """Whatever the indices are; a sequence that starts from zeros needs no slot to read."""
    x = mixed() | {"batch_invariant": batch_invariant}
    x["read_indices"] = slots([-1, 2**31 + 5, 2, -(2**40), 40, 2**40, 6], x)
    x["write_indices"] = slots([7, 8, -3, 10, 11, 12, 2**33 + 1], x)
    x["checkpoint_indices"] = x["checkpoint_indices"].long()
    x["checkpoint_indices"][3] = slots([2**32 + 3, 39, -(2**35)], x)
    check("gdn-raw", x, "hopper")
    x["null_slot"] = 38
    x["read_indices"], x["write_indices"] = slots([0, 38, 2, 3, 4, 5, 6], x), slots([7, 8, 9, 10, 38, 12, 13], x)
    x["checkpoint_indices"][0], x["checkpoint_indices"][3] = slots([38, 37, 36], x), slots([35, 38, 34], x)
    o, pool = check("gdn-raw", x, "hopper")
    out = torch.full_like(o, float("nan"))
    same, same_pool = run("gdn-raw", x | {"out": out}, "hopper")
    assert same.data_ptr() == out.data_ptr()
    assert torch.equal(same, o)
    assert torch.equal(same_pool, pool)


@runs
def test_slots_with_gaps_and_indices_with_strides(launched):
    """And no slot to write."""
    x = mixed()
    pool = torch.randn(40, 2 * 64 * 64 + 24, device=DEVICE)[:, :-24].view(40, 2, 64, 64)
    check("gdn-raw", x | {"state_pool": pool}, "hopper")
    assert launched() in (None, [1])
    x |= {"write_indices": None, "read_indices": x["read_indices"].repeat_interleave(2)[::2]}
    x["checkpoint_indices"] = x["checkpoint_indices"].T.contiguous().T
    check("gdn-raw", x, "hopper")


@runs
def test_nothing_is_written_behind_and_between(launched):
    """What lies between slots keeps its bits."""
    x, size = mixed(), 2 * 64 * 64
    store = torch.randn(40, size + 8, device=DEVICE)
    before = store.clone()
    x["state_pool"] = store[:, :size].view(40, 2, 64, 64)
    OPS["gdn-raw"](**x, backend="hopper")
    assert torch.equal(store[:, size:], before[:, size:])
    assert not torch.equal(store, before)


@runs
@pytest.mark.parametrize("lengths", [(), (0, 0), (5, 0, 3), (0, 90)])
def test_nothing_to_do(launched, lengths):
    check("gdn", make_prefill("gdn", lengths, behind=20, slots=8, **TINY), "hopper")


@runs
def test_a_sequence_alone_gives_its_bits(launched):
    """And cut at 64, too, from a float32 checkpoint."""
    x = mixed() | {"batch_invariant": True}
    o, pool = run("gdn-raw", x, "hopper")
    for n in (0, 3, 4):
        start, stop = x["cu_seqlens"][n : n + 2].tolist()
        alone, alone_pool = run("gdn-raw", sequence(x, n), "hopper")
        assert torch.equal(alone, o[:, start:stop])
        assert torch.equal(alone_pool[7 + n], pool[7 + n])
    rest = sequence(x, 0) | {name: x[name][:, 64:70] for name in TOKENS} | {"cu_seqlens": bounds([6], x)}
    rest |= {"state_pool": pool, "read_indices": slots([16], x), "has_initial_state": None}
    o_rest, after = run("gdn-raw", rest | {"checkpoint_indices": None, "checkpoint_every": None}, "hopper")
    assert torch.equal(o_rest, o[:, 64:70])
    assert torch.equal(after[7], pool[7])


@runs
@pytest.mark.parametrize("v_first", [False, True], ids=["k-first", "v-first"])
@pytest.mark.parametrize(
    ("length", "changes"),
    [
        (200, {}),
        (200, {"K": 64, "V": 64}),
        (130, {"has_initial_state": [0], "read_indices": [-1], "pool": torch.bfloat16}),
        (200, {"pool": torch.float16, "write_indices": None}),
        (200, {"write_indices": [4]}),
        (140, {"read_indices": [-1]}),
        (140, {"write_indices": [1], "null_slot": 1}),
        (16, {"write_indices": [0]}),
        (0, {}),
    ],
)
def test_a_prompt_alone_in_parts(launched, monkeypatch, length, changes, v_first):
    """What is no slot, and what `decode` runs."""
    cut_prompts_at(monkeypatch, 2, 1, 16)
    pool = changes.get("pool", torch.float32)
    shape = TINY | {"K": changes.get("K", 128), "V": changes.get("V", 128), "pool": pool, "v_first": v_first}
    x = make_prefill("gdn-raw", (length,), behind=9, **shape)
    for name in ("read_indices", "write_indices", "has_initial_state"):
        if name in changes:
            x[name] = changes[name] and slots(changes[name], x)
    x |= {name: changes[name] for name in ("null_slot",) if name in changes}
    if "has_initial_state" in changes:
        x["has_initial_state"] = x["has_initial_state"].bool()
    check("gdn-raw", x, "hopper")
    starts = [None, None] if length > 128 else []
    assert launched() in (None, [*starts, shape["K"] // 64])


@runs
@pytest.mark.parametrize(
    ("shape", "pool", "v_first"),
    [
        ({}, torch.float32, False),
        ({}, torch.float16, True),
        ({"K": 128, "V": 128, "HV": 1}, torch.bfloat16, False),
        ({"K": 128, "V": 128, "HV": 1}, torch.float32, True),
    ],
    ids=str,
)
def test_no_bit_of_a_prompt_in_parts_depends_on_others(launched, monkeypatch, shape, pool, v_first):
    """Nor on their order, on checkpoints, or on ``batch_invariant``."""
    cut_prompts_at(monkeypatch, 2, 1, 3)
    lengths = (70, 330, 1, 192, 0, 17)
    x = make_prefill("gdn-raw", lengths, behind=9, slots=40, **(TINY | shape | {"pool": pool, "v_first": v_first}))
    x["has_initial_state"] = slots([1, 1, 1, 0, 1, 1], x).bool()
    x["g"] = x["g"] - 6  # with gates that forget, a start has the bits that it would have in one scan
    o, after = check("gdn-raw", x, "hopper")
    kept = {"checkpoint_indices": slots([range(12 + 4 * n, 16 + 4 * n) for n in range(6)], x), "checkpoint_every": 64}
    for changes in (kept, {"batch_invariant": True}):
        same, pools = check("gdn-raw", x | changes, "hopper")
        for n in (0, 1, 3, 5):
            start, stop = x["cu_seqlens"][n : n + 2].tolist()
            assert torch.equal(same[:, start:stop], o[:, start:stop])
            assert torch.equal(pools[6 + n], after[6 + n])
    turned = x | {"cu_seqlens": bounds([192, 330], x)}
    for name in ("read_indices", "write_indices", "has_initial_state"):
        turned[name] = x[name][[3, 1]]
    begins = x["cu_seqlens"].tolist()
    for name in TOKENS:
        turned[name] = torch.cat([x[name][:, begins[n] : begins[n + 1]] for n in (3, 1)], 1)
    turned_o, turned_pool = run("gdn-raw", turned, "hopper")
    alone, alone_pool = run("gdn-raw", sequence(x, 1), "hopper")
    assert torch.equal(turned_o[:, :192], o[:, begins[3] : begins[4]])
    assert torch.equal(turned_o[:, 192:], o[:, begins[1] : begins[2]])
    assert torch.equal(alone, o[:, begins[1] : begins[2]])
    assert torch.equal(turned_pool[[7, 9]], after[[7, 9]])
    assert torch.equal(alone_pool[7], after[7])


@runs
def test_prompts_in_parts_in_place(launched, monkeypatch):
    """The last part may be scanned before the first one, whose state it overwrites."""
    cut_prompts_at(monkeypatch, 2, 1, 16)
    x = make_prefill("gdn-raw", (330, 70, 320), slots=8, **TINY)
    apart, pools = run("gdn-raw", x, "hopper")
    o, after = run("gdn-raw", x | {"write_indices": x["read_indices"]}, "hopper")
    assert torch.equal(o, apart)
    assert torch.equal(after[:3], pools[3:6])


@runs
@pytest.mark.parametrize("v_first", [False, True], ids=["k-first", "v-first"])
@pytest.mark.parametrize("initial", [False, True], ids=["zeros", "states"])
def test_without_a_pool(launched, monkeypatch, initial, v_first):
    """If only the device knows the lengths of packed sequences, they have the bits that they have on a pool."""
    cut_prompts_at(monkeypatch, 2, 1, 3)
    x = make_prefill("gdn-raw", (70, 330, 1, 0, 192), behind=9, **(TINY | {"v_first": v_first}))
    x["has_initial_state"] = torch.full((5,), initial, device=DEVICE)
    want, pool = check("gdn-raw", x | {"batch_invariant": True}, "hopper")
    assert launched() in (None, [None, None, 1])
    if DEVICE == "cpu":
        take_every_call(monkeypatch, backend.forward)
        monkeypatch.setattr(plan, "choose_forward", lambda p, chip: None)  # a host knows bounds in its own memory
    given = {name: t for name, t in x.items() if name in signature(chunk_gated_delta_rule).parameters}
    states = x["state_pool"][:5] if initial else None
    o, final = chunk_gated_delta_rule(**given, initial_state=states, output_final_state=True, backend="hopper")
    assert launched() in (None, [None, None, 1])
    assert torch.equal(o, want)
    assert torch.equal(final, pool[5:10])


def problem(**changes):
    p = Problem(
        "prefill_gated_delta_rule", 1, 32768, 2, 8, 128, 128, 1, torch.bfloat16, torch.device("cuda", 0),
        Gate("scalar"), "decayed", 1.0, packed=True, pools=Pools(),
    )  # fmt: skip
    return changed(p, **changes)


def test_which_prompts_are_cut():
    """Only heads and chip decide, and then a prompt's own length."""
    cut = cut_prompts(problem(), 132)
    assert cut == Cut(50, 16, 16)
    for changes in ({"T": 512}, {"N": 2}, {"batch_invariant": True}, {"checkpoint_every": 64}, {"max_prompts": 1}):
        assert cut_prompts(problem(**changes), 132) == cut
    for heads, expected in ((4, (37, 8, 16)), (16, (84, 16, 8)), (32, (220, 16, 4))):
        assert cut_prompts(problem(HV=heads), 132) == expected
    assert cut_prompts(problem(HV=48), 132) is None, "there is no room for three parts"
    assert [part_length(n, cut) for n in (0, 1, 64 * 50 - 1, 64 * 50, 8192, 32768)] == [0, 1, 50, 17, 16, 32]
    assert count_starts(problem(), cut) == (16, 1)
    assert count_starts(problem(T=64 * 50 - 1), cut) == (0, 0)
    assert count_starts(problem(N=101, T=39168), cut) == (612 // 16, 612 // 50)
    assert count_starts(problem(N=101, T=39168, max_prompts=2), cut) == (32, 12)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
@pytest.mark.parametrize("room", [1000, 5], ids=["room", "no-room"])
def test_the_list_of_parts(room):
    """Every chunk of every prompt once, in parts as the host and the kernel of inverses find them. Without room, which
    only wrong bounds can bring about, prompts are whole."""
    cut, draw = Cut(5, 2, 4), random.Random(3)
    lengths = [int(draw.lognormvariate(5, 1.5)) * (draw.random() > 0.1) for _ in range(200)]
    N, bounds = len(lengths), torch.tensor([0, *lengths]).cumsum(0)
    index = torch.arange(N).where(torch.rand(N) < 0.7, -1)
    prompts, parts = (torch.full((2 + 10 * (N + room),), -7, dtype=torch.int32) for _ in range(2))
    list_parts(prompts, parts, (index, index + 1000), bounds, N, (cut, room, 100))
    prompts, lines, starts, cuts = prompts.tolist(), parts[2:].view(-1, 5).tolist(), 0, []
    own = emulated("flash_delta.kernels.hopper", "device.segment_bounds").part_length
    found = 0
    for n, tokens in enumerate(lengths):
        if index[n] < 0 or tokens <= 16:
            continue
        length, chunks = part_length(tokens, cut), -(-tokens // 64)
        assert (length, (-(-chunks // length) - 1) * length) == own(tokens, cut)
        if room < 1000 and prompts[3 + 3 * found] >= 0:
            length = chunks
        count = -(-chunks // length)
        for j in range(count):
            m, start = found + j, 100 + 2 * (starts + j) if count > 1 else -1
            assert prompts[1 + 3 * m : 4 + 3 * m] == [n, -1 if j else n, n + 1000 if j == count - 1 else -1]
            assert lines[m][:3] == [j * length, min((j + 1) * length, chunks), start]
            assert count == 1 or lines[starts + j][3] == m
        cuts += [starts] * (count > 1)
        found, starts = found + count, starts + count * (count > 1)
    assert (prompts[0], parts[:2].tolist()) == (found, [starts, len(cuts)])
    assert [line[4] for line in lines[: len(cuts)]] == cuts
    assert starts > 5 if room > 5 else 0 < starts <= 5
    assert {x for line in lines[max(found, starts) :] for x in line} == {-7}, "nothing is written after the list"


def list_parts(prompts, parts, indices, bounds, N, cutting):
    import triton
    import triton.language as tl

    @triton.jit
    def listing(
        prompts, parts, read, write, cu_seqlens, N, T, cut, room, before, HV: tl.constexpr, SHORT: tl.constexpr
    ):
        tables, slots = (read, write, None, 1, 1, 0), (2000, -1)
        prompt_list.write_prompt_list(
            prompts, parts, tables, cu_seqlens, N, T, slots, (*cut, room, before), HV, 64, SHORT
        )

    listing[(1,)](prompts, parts, *indices, bounds, N, int(bounds[-1]), *cutting, 2, 16)


def test_launches_for_the_prompts_that_there_may_be():
    p = problem(T=64 + 2048, H=16, HV=32, N=65)

    def launches(processors=132, every=False, starts=0, **changes):
        return pool_loops(changed(p, **changes), Chip("sm_90", processors), every=every, starts=starts)

    assert launches() == (PoolLaunch(NARROW, 2, 0, 2), PoolLaunch(WIDE, 65, 3))
    assert launches(max_prompts=1) == (PoolLaunch(NARROW, 1),)
    assert launches(max_prompts=40) == (PoolLaunch(WIDE, 40),)
    assert launches(max_prompts=0) == launches(T=16) == launches(N=1) == (PoolLaunch(NARROW, 1),)
    assert launches(HV=256) == (PoolLaunch(WIDE, 65),)
    assert launches(batch_invariant=True) == launches(), "both forms give the same bits"
    for changes in ({"max_prompts": 1}, {"T": 65}):
        assert launches(batch_invariant=True, **changes) == launches(), "and short sequences are walked, too"
    assert launches(K=64, V=64) == (PoolLaunch(SLIM, 65),)
    assert launches(HV=8, N=1, starts=16) == (PoolLaunch(NARROW, 8, 0, 8), PoolLaunch(WIDE, 17, 9)), "in parts"
    assert launches(HV=8, N=1, starts=7) == (PoolLaunch(NARROW, 8),)
    assert launches(HV=8, max_prompts=1, starts=16) == launches(HV=8, N=1, starts=16)
    assert launches(HV=8, max_prompts=9, starts=16) == (PoolLaunch(WIDE, 25),), "nine prompts do not fit as halves"
    assert launches(every=True) == (PoolLaunch(WIDE, 65, 0, ANY), PoolLaunch(NARROW, 65, 0, ANY))


def allocated(monkeypatch, plan, groups):
    """The bytes that a call on a GPU allocates: for results and copies, and at once for all other memory."""
    monkeypatch.setattr(Replay, "__init__", lambda self, steps, tensors, spare, *_: setattr(self, "size", spare[0]))
    launches = runner.Launched(plan._replace(steps=()), runner.given_to(plan, groups), (), groups)
    apart = (groups[i][j].new_empty(shape, dtype=dtype) for i, j, shape, dtype in launches.makes)
    return sum(t.nbytes for t in apart) + launches.size


FORMS = ["prefill", "prefill fresh stride", "prefill invariant", "prefill offset", "prefill conv norm"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stride", [4096, 4100], ids=["described", "copied"])
@pytest.mark.parametrize(("T", "N"), [(1, 1), (64, 1), (5000, 1), (5040, 70), (40000, 1)])
def test_workspace_is_what_a_call_asks_for(monkeypatch, T, N, stride, form):
    """To the byte, for every form: what only kernels use is one allocation, in which a part's end is rounded up."""
    chip = Chip("sm_90", 132)
    monkeypatch.setattr(backend, "chip_of", lambda device: chip)
    more = {"batch_invariant": True} if "invariant" in form else {}
    op, arguments = example(form, "gdn", (4, 8, 128, 128), N, T // N, device="meta", **more)
    memory = arguments["q"].new_empty(T * stride)
    arguments["q"] = memory.as_strided(arguments["q"].shape, (T * stride, stride, 128, 1))
    call = op(**arguments, backend=Explain("triton"))
    plan = plan_prefill(call.problem, chip, *map(layouts_of, call.groups))
    copies = 3 * ("conv" in form) or int(stride == 4100)
    assert len(plan.memory) - 1 - copies == 6 + 2 * (T >= 5000), "those for parts only of long prompts"
    asked = allocated(monkeypatch, plan, call.groups)
    assert asked == arguments["v"].nbytes + backend.workspace_bytes(call.problem, *call.groups)
