"""Prompts of Kimi Delta Attention on a pool, by name on the Hopper backend: on a GPU of that kind, or with its kernels
emulated, and `list_prompts` and `decode` in Triton's interpreter."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from example_calls import example
from hostile_bounds import HOSTILE, T, hostile, leave_unread
from prefill_truth import OPS, WITH_GATES, bounds, check, make_prefill, run, sequence
from prompt_truth import check_resumed, make_prompts, on_cpu, prompts_truth, run_prompts
from serving_truth import slots
from test_hopper_pool import DEVICE, LENGTHS, allocated, allow_by_name, runs, take
from test_hopper_pool import TINY as SCALAR

from flash_delta.kernels.hopper import backend
from flash_delta.kernels.hopper.channel import prepare, prompts, scan
from flash_delta.kernels.hopper.channel.prefill import plan_prefill
from flash_delta.kernels.hopper.plans import splits
from flash_delta.kernels.hopper.plans.splits import channel_pool_launches
from flash_delta.kernels.hopper.plans.tiles import CHANNEL_HALF, CHANNEL_WHOLE
from flash_delta.kernels.runtime import run as runner
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.plan import layouts_of
from flash_delta.kernels.runtime.pool_launches import ANY, PoolLaunch
from flash_delta.ops import _known_calls
from flash_delta.ops._backend import Explain
from flash_delta.problem import Gate, Pools, Problem
from flash_delta.testing import allowed, products_in, relative_error
from tests.changed import changed
from tests.gluon_emulator import Kernel, emulated

TINY = SCALAR | {"K": 128, "V": 128}
KINDS = ("kda-bounded", "kda-raw", "kda")
FEW = (70, 1, 0, 130, 17, 2, 64)  # with few tokens for `decode`, each of which takes long in the interpreter


@pytest.fixture(params=["loop", "scan_channels"])
def launched(monkeypatch, request):
    """The loop scans all prompts, or `prepare` and the scan do, or "both": these a single prompt, the loop several.
    Without a GPU the kernels are emulated. A function that says what was launched since it was asked before: the number
    of halves of a state per program of the loop, or 0 for the scan. None on a GPU."""
    _known_calls.calls.clear()
    way, noted, root = request.param, [], "flash_delta.kernels.hopper"
    monkeypatch.setattr(splits, "may_scan_channels", lambda p, chip: way != "loop")
    if DEVICE == "cpu" or way == "both":
        chip = Chip("interpreter" if DEVICE == "cpu" else "sm_90", {"loop": 3, "scan_channels": 132, "both": 5}[way])
        monkeypatch.setattr(runner, "chip_of", lambda device: chip)
    if DEVICE == "cpu":
        for module, name in ((prompts, "channel_prompts"), (prepare, "prepare"), (scan, "scan_channels")):
            function = vars(emulated(root, module.__name__.removeprefix(f"{root}.")))[name]
            halves = {"channel_prompts": lambda own: [own["HALVES"]], "scan_channels": lambda own: [0]}
            of = halves.get(name, lambda own: [])
            monkeypatch.setattr(module, name, Kernel(function, lambda own, of=of: noted.extend(of(own))))
        allow_by_name(monkeypatch)
    yield partial(take, noted) if DEVICE == "cpu" else lambda: None
    _known_calls.calls.clear()


def mixed(kind="kda-bounded", lengths=LENGTHS, **changes):
    """Prompts beside decoding rows and rows that are none, with checkpoints, and NaN behind all."""
    x = make_prefill(kind, lengths, behind=9, slots=40, **(TINY | changes))
    N = len(lengths)
    table = [[2 * N + 2 + 3 * n + m for m in range(3)] for n in range(N)]
    table[3 % N][1] = -1
    x |= {"checkpoint_indices": slots(table, x, torch.int32), "checkpoint_every": 64}
    x["has_initial_state"] = slots([n % 3 != 2 for n in range(N)], x).bool()
    for name in x.keys() & set(WITH_GATES):
        x[name][:, sum(lengths) :] = float("nan")
    return x


@runs
@pytest.mark.parametrize(("v_first", "batch_invariant"), [(False, False), (True, True)], ids=["k-first", "v-first"])
@pytest.mark.parametrize(
    ("kind", "pool"),
    [(kind, torch.float32) for kind in KINDS]
    + [("kda-bounded", torch.bfloat16), ("kda-raw", torch.float16)]
    + [("gdn2-bounded", torch.float32), ("gdn2-raw", torch.bfloat16), ("gdn2", torch.float32)],
)
def test_against_the_recurrence(launched, kind, pool, v_first, batch_invariant):
    check(kind, mixed(kind, pool=pool, v_first=v_first) | {"batch_invariant": batch_invariant}, "hopper")
    assert launched() in (None, [0], [2])


@runs
@pytest.mark.parametrize(("kind", "H"), [("kda", 1), ("kda", 3), ("gdn2", 1)])
def test_gates_in_float32(launched, kind, H):
    """Several states per program; key heads that value heads share or do not; sequences that go on in their own slots,
    so that it shows if two kernels scan one of them."""
    x = mixed(kind, (40, 2, 33), H=H, HV=3)
    x["write_indices"] = x["read_indices"]
    x["g"] = x["g"].float() * 1.001
    check(kind, x, "hopper")
    assert launched() in (None, [0], [2])


@runs
@pytest.mark.parametrize("decay", [-3.0, -40.0, -1000.0])
def test_checkpoints_between_pieces(launched, decay):
    """Where 32 tokens fall too far they come in pieces; states are left after the last one of them."""
    x = mixed("kda", (130, 3, 64), v_first=False)
    x["g"][:, :, :, 5:] *= -decay
    check("kda", x, "hopper")


def at_offsets(x, *offsets):
    """Returns the call with one checkpoint of each sequence. The first sequence goes on in its own slot."""
    write = x["write_indices"].clone()
    write[0] = x["read_indices"][0]
    x = x | {"write_indices": write, "checkpoint_indices": x["checkpoint_indices"][:, 0], "checkpoint_every": None}
    return x | {"checkpoint_offsets": slots(offsets, x)}


@runs
@pytest.mark.parametrize(("kind", "batch_invariant"), [("kda-bounded", True), ("kda-raw", False), ("gdn2-raw", False)])
def test_checkpoints_at_offsets(launched, kind, batch_invariant):
    """A stride's bits at multiples of 64, the final state's at the end; outputs are those without them."""
    x = mixed(kind, HV=2 if kind == "kda-bounded" else 1) | {"batch_invariant": batch_invariant}
    o, strided = run(kind, x, "hopper")
    kept = x["checkpoint_indices"][:, 0]
    same, found = check(kind, at_offsets(x, 65, 1, 0, 64, 17, 3, 64), "hopper")
    again, ends = check(kind, at_offsets(x, 0, 2**31, -1, 130, 16, 16, 63), "hopper")
    assert torch.equal(same, o)
    assert torch.equal(again, o)
    assert torch.equal(found[kept[3]], strided[kept[3]])
    assert torch.equal(found[kept[[1, 4, 6]]], strided[[8, 11, 13]])
    assert torch.equal(ends[kept[[0, 3, 5]]], torch.stack([x["state_pool"][0], strided[10], strided[12]]))


@runs
@pytest.mark.parametrize("kind", ["kda-bounded", "kda-raw", "gdn2-raw"])
def test_a_sequence_alone_gives_its_bits(launched, kind):
    """And cut at 64, too, from a float32 checkpoint."""
    x = mixed(kind) | {"batch_invariant": True}
    o, pool = run(kind, x, "hopper")
    for n in (0, 3, 4):
        start, stop = x["cu_seqlens"][n : n + 2].tolist()
        alone, alone_pool = run(kind, sequence(x, n), "hopper")
        assert torch.equal(alone, o[:, start:stop])
        assert torch.equal(alone_pool[7 + n], pool[7 + n])
    rest = {name: x[name][:, 64:70] for name in WITH_GATES if name in x}
    rest = sequence(x, 0) | rest | {"cu_seqlens": bounds([6], x)}
    rest |= {"state_pool": pool, "read_indices": slots([16], x), "has_initial_state": None}
    o_rest, after = run(kind, rest | {"checkpoint_indices": None, "checkpoint_every": None}, "hopper")
    assert torch.equal(o_rest, o[:, 64:70])
    assert torch.equal(after[7], pool[7])


@runs
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_what_is_no_slot_is_padding(launched, batch_invariant):
    """Whatever the indices are; a sequence that starts from zeros needs no slot to read."""
    x = mixed(lengths=FEW) | {"batch_invariant": batch_invariant}
    x["read_indices"] = slots([-1, 2**31 + 5, 2, -(2**40), 40, 2**40, 6], x)
    x["write_indices"] = slots([7, 8, -3, 10, 11, 12, 2**33 + 1], x)
    x["checkpoint_indices"] = x["checkpoint_indices"].long()
    x["checkpoint_indices"][3] = slots([2**32 + 3, 39, -(2**35)], x)
    check("kda-bounded", x, "hopper")
    x["null_slot"] = 38
    x["read_indices"], x["write_indices"] = slots([0, 38, 2, 3, 4, 5, 6], x), slots([7, 8, 9, 10, 38, 12, 13], x)
    x["checkpoint_indices"][0], x["checkpoint_indices"][3] = slots([38, 37, 36], x), slots([35, 38, 34], x)
    o, pool = check("kda-bounded", x, "hopper")
    out = torch.full_like(o, float("nan"))
    same, same_pool = run("kda-bounded", x | {"out": out}, "hopper")
    assert same.data_ptr() == out.data_ptr()
    assert torch.equal(same, o)
    assert torch.equal(same_pool, pool)


@runs
@pytest.mark.parametrize("name", HOSTILE)
def test_wrong_bounds_write_to_no_other_slot(launched, monkeypatch, name):
    leave_unread(monkeypatch)
    wrong = hostile(name, DEVICE)
    lengths = (T, *(0 for _ in wrong[2:]))
    x = make_prefill("kda-bounded", lengths, slots=20, **(TINY | {"HV": 1}))
    _, pool = run("kda-bounded", x | {"cu_seqlens": wrong}, "hopper")
    N = len(lengths)
    untouched = [*range(N), *range(2 * N, 20)]
    assert torch.equal(pool[untouched], x["state_pool"][untouched])


@runs
@pytest.mark.parametrize("launched", ["loop"], indirect=True)
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16], ids=str)
def test_halves(launched, pool):
    """Few prompts run in halves, others whole: of the launches one finds that it is meant. Here, where there is no
    compiler, both give the same bits."""
    x = mixed(lengths=FEW, HV=1, pool=pool)
    whole = run("kda-bounded", x, "hopper")
    assert launched() in (None, [1, 2])
    few = make_prefill("kda-bounded", (3, 66, 1, 2), **(TINY | {"HV": 1, "pool": pool}))
    for call, forms in ((x, [1, 2]), (x | {"max_prompts": 4}, [2]), (x | {"max_prompts": 1}, [1]), (few, [1, 2])):
        found = check("kda-bounded", call, "hopper")
        assert launched() in (None, forms)
        assert call is few or all(map(torch.equal, found, whole))


@runs
@pytest.mark.parametrize("launched", ["both"], indirect=True)
def test_one_prompt_or_several(launched):
    """The scan takes one and the loop several, in their own slots, so that it shows if two kernels scan one of them.
    More prompts than promised are scanned, too."""
    several, alone = mixed("kda-raw", FEW), make_prefill("kda-raw", (3, 130, 1, 0), **TINY)
    for x, most in ((several, None), (alone, None), (several, 4), (several, 1), (alone, 1), (alone, 2)):
        call = x | {"write_indices": x["read_indices"], "max_prompts": most}
        check("kda-raw", call, "hopper")
        assert launched() in (None, {None: [0, 2], 1: [0]}.get(most, [2]))
    assert not torch.equal(*(run("kda-raw", several | {"max_prompts": most}, "hopper")[1] for most in (None, 1)))
    for most in (None, 2):
        same = map(torch.equal, *(run("kda-raw", alone | {"max_prompts": of}, "hopper") for of in (most, 1)))
        assert all(same) == (most is None), "the scan has other bits than the loop"


@runs
def test_slots_with_gaps_and_indices_with_strides(launched):
    """And no slot to write. What lies between slots keeps its bits."""
    x, size = mixed(lengths=FEW), 2 * 128 * 128
    store = torch.randn(40, size + 24, device=DEVICE)
    before = store.clone()
    x["state_pool"] = store[:, :size].view(40, 2, 128, 128)
    check("kda-bounded", x, "hopper")
    OPS["kda-bounded"](**x, backend="hopper")
    assert torch.equal(store[:, size:], before[:, size:])
    assert not torch.equal(store, before)
    x |= {"write_indices": None, "read_indices": x["read_indices"].repeat_interleave(2)[::2]}
    x["checkpoint_indices"] = x["checkpoint_indices"].T.contiguous().T
    check("kda-bounded", x, "hopper")


@runs
@pytest.mark.parametrize("kind", ["kda-bounded", "gdn2-bounded"])
def test_convolution_and_norm(launched, kind):
    """From slices of a projection that no descriptor describes, and such gates. As accurate as `check` wants it."""
    x = make_prompts(kind, (70, 1, 66, 0), behind=3, slots=20, **TINY)
    x["q"], x["k"] = torch.cat([x["q"], x["k"], x["q"][..., :1]], 3)[..., :256].split(128, 3)
    x["g"] = torch.cat([x["g"], x["g"][..., :1]], 3)[..., :128]
    x["null_slot"] = 1
    got, want = [y.cpu() for y in run_prompts(kind, x, "hopper")], prompts_truth(kind, x)
    assert launched() in (None, [0], [2])
    with products_in(torch.bfloat16):
        reference = run_prompts(kind, on_cpu(x), "torch")
    before = x["state_pool"].cpu()
    written = (want[1] != before.double()).flatten(1).any(1)
    assert relative_error(got[0], want[0]) <= allowed(relative_error(reference[0], want[0]), torch.bfloat16)
    errors = [relative_error(of[1][written], want[1][written]) for of in (got, reference)]
    assert errors[0] <= allowed(errors[1], torch.bfloat16)
    assert torch.equal(got[1][~written], before[~written])
    assert torch.equal(got[0] == 0, want[0] == 0)
    assert torch.equal(got[2].view(torch.int16), want[2].view(torch.int16))


@runs
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_prompt_goes_on_from_any_checkpoint(launched, batch_invariant):
    """With its window. With ``batch_invariant`` it has the bits of the run that was not cut, from a multiple of 64."""
    x = make_prompts("kda-bounded", (150,), behind=3, slots=6, **TINY) | {"batch_invariant": batch_invariant}
    for cut in (1, 64, 70, 150):
        whole, rest = check_resumed("kda-bounded", x, cut, "hopper")
        if batch_invariant and cut % 64 == 0:
            assert torch.equal(rest[0], whole[0][:, cut:])
            assert torch.equal(rest[1][1], whole[1][1])


@runs
@pytest.mark.parametrize("lengths", [(), (0, 0), (5, 0, 3), (0, 90)])
def test_nothing_to_do(launched, lengths):
    check("kda", make_prefill("kda", lengths, behind=20, slots=8, **TINY), "hopper")


def test_launches_for_the_prompts_that_there_may_be():
    p = Problem(
        "prefill_kda", 1, 64 + 2048, 64, 64, 128, 128, 65, torch.bfloat16, torch.device("cuda", 0), Gate("channel"),
        "decayed", 1.0, packed=True, pools=Pools(),
    )  # fmt: skip

    def launches(every=False, **changes):
        return channel_pool_launches(changed(p, **changes), Chip("sm_90", 132), every=every)

    assert launches() == (PoolLaunch(CHANNEL_HALF, 1, 0, 1), PoolLaunch(CHANNEL_WHOLE, 65, 2))
    assert launches(max_prompts=1) == launches(T=16) == (PoolLaunch(CHANNEL_HALF, 1),)
    assert launches(max_prompts=40) == (PoolLaunch(CHANNEL_WHOLE, 40),)
    assert launches(every=True) == (PoolLaunch(CHANNEL_HALF, 65, 0, ANY), PoolLaunch(CHANNEL_WHOLE, 65, 0, ANY))
    for HV, most in ((32, 2), (16, 4), (8, 8), (59, 1)):
        assert launches(HV=HV) == (PoolLaunch(None, most, 0, most), PoolLaunch(CHANNEL_WHOLE, 65, most + 1))
        assert launches(HV=HV, max_prompts=most) == (PoolLaunch(None, most),)
        assert launches(HV=HV, max_prompts=most + 1) == (PoolLaunch(CHANNEL_WHOLE, most + 1),)
    assert launches(HV=60)[0].tile == CHANNEL_HALF
    for HV, tile in ((64, CHANNEL_WHOLE), (32, None)):
        for changes in ({}, {"max_prompts": 1}, {"T": 65}, {"every": True}):
            assert {t.tile for t in launches(HV=HV, batch_invariant=True, **changes)} == {tile}


FORMS = ["prefill", "prefill fresh stride", "prefill conv norm"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stride", [4096, 4100], ids=["described", "copied"])
@pytest.mark.parametrize("HV", [32, 64])
def test_workspace_is_what_a_call_asks_for(monkeypatch, stride, form, HV):
    """To the byte: what only kernels use is one allocation, in which a part's end is rounded up."""
    chip = Chip("sm_90", 132)
    monkeypatch.setattr(backend, "chip_of", lambda device: chip)
    op, arguments = example(form, "kda", (HV, HV, 128, 128), 70, 72, device="meta")
    for name in ("q", "g"):
        size = arguments[name].shape
        arguments[name] = arguments["q"].new_empty(5040 * 8192).as_strided(size, (5040 * stride, stride, 128, 1))
    call = op(**arguments, backend=Explain("triton"))
    plan = plan_prefill(call.problem, chip, *map(layouts_of, call.groups))
    asked = allocated(monkeypatch, plan, call.groups)
    assert asked == arguments["v"].nbytes + backend.workspace_bytes(call.problem, *call.groups)
    handed = sum(m.nbytes for m in plan.memory if m.name.startswith("Prepared."))
    assert handed > 2**28 if HV == 32 else handed == 0, "memory for what `prepare` hands to the scan"
