"""Before the first request: all that calls like the examples can need is compiled, and then nothing compiles."""

import gc
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod

import pytest
import torch
from early_end import compiled_to
from example_calls import example
from forks import in_fork
from serving_truth import DEVICES, needs_triton
from serving_truth import make_call as make_decode

import flash_delta
from flash_delta.compiler.pool import clean_processes
from flash_delta.ops.serving import (
    Int8States,
    Ring,
    commit,
    dequantize_states,
    quantize_states,
    warmup,
    workspace_bytes,
)
from flash_delta.ops.serving.around import NOTHING
from flash_delta.problem import Inputs, Slots

SMALL = (1, 2, 16, 24)  # H, HV, K, V
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.fixture(autouse=True)
def unfrozen():
    """Other tests' objects are collected as ever."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Returns a folder for what is compiled once."""
    return tmp_path_factory.mktemp("driver")


def test_what_is_there_is_not_collected_again():
    """Nor what was garbage before kept alive by that."""
    loop = Loop()
    loop.own, garbage = loop, weakref.ref(loop)
    del loop
    before = gc.get_freeze_count()
    assert warmup([], "cpu") == []
    assert gc.get_freeze_count() > before + 10_000
    assert garbage() is None
    assert len(gc.get_objects()) < 10_000


class Loop:
    own = None


FORMS = {
    "decode": [
        "decode", "decode reads raw", "decode each counted", "decode raw each counted tree", "decode conv norm",
        "decode paged conv norm", "decode packed", "decode packed each counted rolling conv norm",
        "decode packed each counted paged rolling conv norm", "decode apart each conv", "decode apart rows",
        "decode apart rows tree norm",
    ],
    "prefill": [
        "prefill", "prefill reads", "prefill raw fresh stride", "prefill fresh offset", "prefill raw fresh conv norm",
        "prefill paged fresh conv norm",
    ],
}  # fmt: skip
LATER = {  # rows, tokens of a row, slots
    "decode": [(1, 1, 1), (1, 2, 4), (1, 4, 9), (3, 1, 9), (16, 3, 99)],
    "prefill": [(1, 1, 1), (1, 2, 3), (1, 3, 3), (1, 16, 9), (2, 65, 9), (70, 7, 9), (3, 1000, 5), (1, 16384, 2)],
}


def compiled_later(place, backend, rule, sizes, forms, wide):
    """Which kernels calls compile before, during and after a ban; these are calls of other sizes, and one of another
    dtype."""
    from flash_delta.compiler.pretended_gpu import pretended_compiler

    counts = []
    for form in forms:
        make = partial(example, form, rule, sizes, wide=wide, backend=backend)
        later = LATER[form.split()[0]]
        with pretended_compiler(place) as names:
            warmup([make(2, 3, 9)] + [make(1, 1, 9)] * (wide is not None))  # a row alone loses strides of a slice
            before = len(names)
            with flash_delta.forbid_compilation():
                for size in later:
                    op, x = make(*size)
                    op(**x)
                with pytest.raises(RuntimeError, match="which forbid_compilation"):
                    op(**x | {"beta": x["beta"].float()})
            assert len(names) == before, form
            counts.append(before)
    return counts


@needs_triton
@needs_gcc
@pytest.mark.parametrize(
    ("backend", "kind", "rule", "sizes"),
    [
        ("triton", "decode", "gdn", (2, 4, 64, 64)),
        ("triton", "decode", "gdn", (1, 1, 16, 24)),
        ("triton", "decode", "kda", (1, 3, 40, 64)),
        ("triton", "prefill", "gdn", (1, 1, 16, 24)),
        ("triton", "prefill", "kda", (4, 4, 128, 128)),
        ("hopper", "prefill", "gdn", (2, 4, 128, 128)),
        ("hopper", "prefill", "gdn", (16, 32, 64, 64)),
        ("hopper", "prefill", "kda", (4, 4, 128, 128)),
        (None, "prefill", "gdn", (4, 4, 64, 64)),
    ],
)
@pytest.mark.parametrize("wide", [None, 7], ids=["own", "slices"])
def test_later_calls_compile_nothing(process, place, backend, kind, rule, sizes, wide):
    """Whatever their sizes. Triton decides what it would compile, for a GPU that is none."""
    counts = process.submit(compiled_later, place, backend, rule, sizes, FORMS[kind], wide).result()
    assert all(counts)


def on_states(rows, slots, layers, dtype, device="cpu", checkpoints=False):
    """Calls of the ops on states of all layers, with padding."""
    new = partial(torch.zeros, device=device)
    lead = () if layers is None else (layers,)
    index = torch.full((rows,), -1, dtype=torch.int32, device=device)
    pool = new(*lead, slots, 4, 64, 32, dtype=dtype)
    ring = Ring(*(new(*lead, slots, *size) for size in ((3, 2, 32), (3, 4, 64), (3, 4))), None, index, index)
    more = {"checkpoint_indices": index, "checkpoint_offsets": index} if checkpoints else {}
    yield commit, {"state_pool": pool, "ring": ring, "slots": index, "state_v_first": True} | more
    for size in ((1, 32), (64, 1)):
        store = Int8States(new(*lead, slots, 4, 64, 32, dtype=torch.int8), new(*lead, slots, 4, *size))
        moved = {"store": store, "read_indices": index, "write_indices": index, "state_pool": pool}
        yield quantize_states, moved
        yield dequantize_states, moved


def compiled_on_states(place, layers, dtype, checkpoints):
    from flash_delta.compiler.pretended_gpu import pretended_compiler

    with pretended_compiler(place) as names:
        warmup(on_states(2, 5, layers, dtype, checkpoints=checkpoints))
        before = len(names)
        for rows, slots in ((1, 1), (7, 3), (16, 64)):
            with flash_delta.forbid_compilation():
                for op, x in on_states(rows, slots, layers, dtype, checkpoints=checkpoints):
                    op(**x)
        return before, len(names)


@needs_triton
@needs_gcc
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("layers", "checkpoints"), [(None, False), (3, True)])
def test_later_calls_on_states_compile_nothing(process, place, layers, dtype, checkpoints):
    before, after = process.submit(compiled_on_states, place, layers, dtype, checkpoints).result()
    assert 5 <= before == after  # at least a kernel for each call


@pytest.mark.parametrize("layers", [None, 3])
def test_examples_on_states_may_be_on_meta_and_are_not_touched(layers):
    assert len(warmup(on_states(2, 5, layers, torch.float32, "meta"), "cpu")) == 5
    calls = list(on_states(2, 5, layers, torch.float32))
    for _, x in calls:
        for name in ("slots", "read_indices", "write_indices"):
            if name in x:
                x[name].fill_(1)
        x["state_pool"].fill_(2)
        if "store" in x:
            x["store"].states.fill_(3)
    warmup(calls, "cpu")
    for _, x in calls:
        assert x["state_pool"].eq(2).all()
        assert "store" not in x or x["store"].states.eq(3).all()
    (op, x), *_ = calls
    with pytest.raises(ValueError, match=r"commit: slots: expected"):
        warmup([(op, x | {"slots": x["slots"].float()})], "cpu")
    with pytest.raises(TypeError, match="missing"):
        warmup([(op, {"slots": x["slots"]})], "cpu")


def compiled_by_threads(place, count):
    """What threads compile that warm up with the same examples."""
    from flash_delta.compiler.pretended_gpu import pretended_compiler

    calls = [example(form, "gdn", (2, 4, 64, 64), 2, 3, backend="triton") for form in ("decode", "prefill fresh")]
    with pretended_compiler(place) as names, ThreadPoolExecutor(count) as threads:
        for future in [threads.submit(warmup, calls) for _ in range(count)]:
            assert len(future.result()) == 2
    return sorted(names)


@needs_triton
@needs_gcc
def test_threads_may_warm_up(process, place):
    assert (
        process.submit(compiled_by_threads, place, 4).result() == process.submit(compiled_by_threads, place, 1).result()
    )


OPTIONS = {"wide": 2, "dtype": torch.float32, "backend": "triton"}
OTHER_SIZES = (((2, 9), (1, 17)), ((1, 2), (3, 4)))  # of prefill, and of decode


@needs_triton
@pytest.mark.parametrize("rule", ["gdn", "kda"])
@pytest.mark.parametrize(
    "form",
    ["decode raw each counted tree", "decode paged packed each counted rolling conv norm", "prefill fresh offset"],
)
def test_examples_on_meta_stand_for_calls_of_the_device(rule, form):
    """Kernels run on what stands in, and leave its bounds alone."""
    device = DEVICES["triton"]
    warmup([example(form, rule, SMALL, 2, 3, device="meta", **OPTIONS)], device)
    for rows, tokens in OTHER_SIZES["decode" in form]:
        op, x = example(form, rule, SMALL, rows, tokens, device=device, **OPTIONS)
        op(**x)


def compiled_after_meta(place, form, rule):
    """The kernels that are compiled by a warm-up with an example on "meta", then by calls of other sizes, and then by
    one with another pool."""
    from flash_delta.compiler.pretended_gpu import pretended_compiler

    counts = []
    with pretended_compiler(place) as names:
        op, x = example(form, rule, SMALL, 2, 3, device="meta", **OPTIONS)
        assert {t.device.type for t in x.values() if isinstance(t, torch.Tensor)} == {"meta"}
        warmup([(op, x)], "cuda:0")
        counts.append(len(names))
        for rows, tokens in OTHER_SIZES["decode" in form]:
            op, x = example(form, rule, SMALL, rows, tokens, **OPTIONS)
            op(**x)
        counts.append(len(names) - sum(counts))
        op(**x | {"state_pool": x["state_pool"].to(torch.bfloat16)})
        counts.append(len(names) - sum(counts))
    return counts


@needs_triton
@needs_gcc
@pytest.mark.parametrize("rule", ["gdn", "kda"])
@pytest.mark.parametrize(
    ("form", "kernels"),
    [
        ("decode raw each counted tree", 2),  # for one token and for several
        ("decode paged packed each counted rolling conv norm", 3),
        ("prefill fresh offset", 9),  # two for chunks, two for offsets, four scans, and `decode`
    ],
)
def test_examples_on_meta_compile_what_calls_need(process, place, form, kernels, rule):
    first, later, other = process.submit(compiled_after_meta, place, form, rule).result()
    assert first == kernels
    assert not later
    assert other


@pytest.mark.parametrize("rule", ["gdn", "kda"])
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("form", ["decode raw each apart conv norm", "prefill raw fresh stride conv norm"])
def test_an_example_is_not_touched(rule, backend, form):
    """Also if its indices are real, its parameters are a module's, and it has an output."""
    op, x = example(form, rule, SMALL, 2, 3, dtype=torch.float32, backend=backend, device=DEVICES[backend])
    x |= {name: x[name].fill_(1) for name in x if name.endswith("_indices")}
    x |= {name: torch.nn.Parameter(x[name]) for name in ("A_log", "dt_bias")}
    x["out"] = torch.zeros_like(x["v"])
    tensors = [t for value in x.values() for t in (value if isinstance(value, tuple) else [value])]
    tensors = [t.detach() for t in tensors if isinstance(t, torch.Tensor)]
    for t in tensors:
        t.copy_(torch.ones_like(t) if t.is_floating_point() else t)
    before, versions = [t.clone() for t in tensors], [t._version for t in tensors]
    assert [0 < s < 60 for s in warmup([(op, x)], DEVICES[backend])] == [True]
    assert all(map(torch.equal, tensors, before))
    assert [t._version for t in tensors] == versions


@pytest.mark.parametrize("form", ["decode paged packed conv norm", "prefill paged fresh stride conv norm"])
def test_what_stands_in_is_small(monkeypatch, form):
    """For prompts of gigabytes, pools of terabytes, and slots that lie a gigabyte apart."""
    asked, empty = [], torch.empty
    op, x = example(form, "gdn", (16, 32, 128, 128), 2**12, 2**8, 2**20, device="meta")
    pool = x["state_pool"]
    x["state_pool"] = torch.empty_strided(pool.shape, (2**28, *pool.stride()[1:]), device="meta")
    monkeypatch.setattr(torch, "empty", lambda *size, **options: asked.append(empty(*size, **options)) or asked[-1])
    warmup([(op, x | {"backend": "torch"})], "cpu")
    assert sum(t.nbytes for t in asked if t.device.type == "cpu") < 50e6


def test_calls_that_cannot_be():
    op, x = example("decode raw", "kda", SMALL, 2, 1, device="meta")
    with pytest.raises(ValueError, match=r"warmup: op: expected one of decode_gated_delta_rule, .*, got chunk_kda"):
        warmup([(flash_delta.chunk_kda, x)], "cpu")
    with pytest.raises(ValueError, match=r"decode_kda: lower_bound: expected a number in \[-5, 0\), got -6"):
        warmup([(op, x | {"lower_bound": -6.0})], "cpu")
    with pytest.raises(ValueError, match=r"decode_kda: k: expected a tensor on meta like q, got one on cpu"):
        warmup([(op, x | {"k": torch.zeros(2, 1, 1, 16)})], "cpu")
    for place in ("meta", "cuda:99", *["cuda"] * (not torch.cuda.is_available())):
        with pytest.raises(ValueError, match=f"warmup: device: expected a device that .*, got {place}$"):
            warmup([(op, x)], place)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'state_pool'"):
        warmup([(op, {name: value for name, value in x.items() if name != "state_pool"})], "cpu")
    with pytest.raises(TypeError, match="unexpected keyword argument 'slots'"):
        warmup([(op, x | {"slots": 3})], "cpu")
    with pytest.raises(ValueError, match="workspace_bytes: device: expected a GPU, got cpu"):
        workspace_bytes(op, **x, device="cpu")
    with pytest.raises(ValueError, match="workspace_bytes: op: expected one of decode_gated_delta_rule, "):
        workspace_bytes(flash_delta.chunk_kda, **x)


@needs_triton
@pytest.mark.parametrize("form", ["decode", "decode norm", "decode conv"])
@pytest.mark.parametrize("rule", ["gdn", "kda"])
def test_workspace_of_a_decoding_step(rule, form, monkeypatch):
    """That of what is between a convolution and the rule, whose parts' ends are rounded up."""
    from flash_delta.kernels.runtime.chip import Chip
    from flash_delta.kernels.runtime.plan import layouts_of
    from flash_delta.kernels.triton import backend
    from flash_delta.kernels.triton.serving.rows import plan_decode
    from flash_delta.ops._backend import Explain

    chip = Chip("sm_90", 132)
    monkeypatch.setattr("flash_delta.ops.serving.memory.choose_backend", lambda problem, wish: "triton")
    monkeypatch.setattr(backend, "chip_of", lambda device: chip)
    op, x = example(form, rule, SMALL, 3, 5, device="meta")
    call = op(**x, backend=Explain("triton"))
    plan = plan_decode(call.problem, chip, *map(layouts_of, call.groups))
    assert len(plan.memory) == 1 + 3 * ("conv" in form)
    assert workspace_bytes(op, **x, device="cuda:0") == plan.workspace_bytes
    assert (plan.workspace_bytes > 0) == ("conv" in form)


def refused(compiled_for, changes):
    """What a call says that would compile, when calls as ``compiled_for`` were compiled; and whose kernels pass."""
    from faulty_kernels import multiply

    from flash_delta.compiler.offline import offline
    from flash_delta.kernels.runtime import run
    from flash_delta.kernels.runtime.forbid import PlannedCall
    from flash_delta.kernels.runtime.plan import layouts_of
    from flash_delta.kernels.triton.serving.rows import plan_decode
    from flash_delta.ops._backend import Explain

    def call(form="decode raw", k=None, start=0, **options):
        op, x = example(form, "gdn", (16, 32, 128, 128), 1, 1, device="meta", **options)
        if k is not None:
            x["k"] = torch.empty(k, dtype=torch.bfloat16, device="meta").as_strided((1, 1, 16, 128), (k, k, 128, 1))
        x["q"] = x["q"].as_strided(x["q"].shape, x["q"].stride(), start)
        p = op(**x, backend=Explain("triton")).problem
        groups = [kind(**{name: x.get(name) for name in kind._fields}) for kind in (Inputs, Slots)] + [NOTHING]
        run.run(plan_decode, p, *groups)
        layouts = tuple(map(layouts_of, groups))
        run.calls_that_compiled.append(PlannedCall(p, plan_decode, layouts))

    with offline("sm_90a") as compiled:
        if compiled_for is not None:
            call(**compiled_for)
        before = len(compiled)
        with flash_delta.forbid_compilation() as outer, flash_delta.forbid_compilation():
            if compiled_for is not None:
                call(**compiled_for)
            multiply(64, 64, 64, steps=16)
            assert len(compiled) == before + 1
            with pytest.raises(RuntimeError) as error:
                call(**changes)
        assert not outer.switch.forbid(False)
        call(**changes)
        assert len(compiled) == before + 2
        return str(error.value)


@pytest.fixture(scope="module")
def untouched():
    """A process that is only copied: what one test compiles no other one knows."""
    with clean_processes(1) as (pool, _):
        yield pool


@needs_triton
@pytest.mark.parametrize(
    ("compiled_for", "changes", "why"),
    [
        (None, {}, "nothing of its kind was compiled before"),
        ({}, {"dtype": torch.float16},
         "q is torch.float16, compiled was torch.bfloat16, k is torch.float16, compiled was torch.bfloat16, v is torch."
         "float16, compiled was torch.bfloat16"),
        ({"wide": 64}, {"wide": 64, "state_v_first": False}, "state_v_first is False, compiled was True"),
        ({}, {"index": torch.int64}, "read_indices is torch.int64, compiled was torch.int32, write_indices is"),
        ({}, {"k": 2052}, "k has strides [2052, 2052, 128, 1], for which other code is compiled"),
        ({}, {"start": 4, "wide": 64}, "q starts at no multiple of 16 bytes"),
        ({}, {"form": "decode raw reads"}, "write_indices is None"),
    ],
)  # fmt: skip
def test_forbidden(untouched, compiled_for, changes, why):
    message = untouched.submit(in_fork, refused, compiled_for, changes).result()
    start = "decode_gated_delta_rule: kernel decode would have to be compiled, which forbid_compilation() forbids: "
    assert message.startswith(start)
    assert message.removeprefix(start).startswith(why)
    assert changes.keys() != {"state_v_first"} or message == start + why


def test_forbidding_needs_no_triton(monkeypatch):
    monkeypatch.setattr("flash_delta.ops._compilation._switch", lambda: None)
    with flash_delta.forbid_compilation():
        assert flash_delta.decode_gated_delta_rule(**make_decode()).shape == (2, 3, 2, 24)


def variants():
    """How many kernels decoding compiles for slices of tables at any address, of any width."""
    from flash_delta.compiler.offline import offline
    from flash_delta.kernels.runtime.run import run
    from flash_delta.kernels.triton.serving.rows import plan_decode
    from flash_delta.ops._backend import Explain

    op, x = example("decode each counted tree", "kda", (16, 32, 128, 128), 1, 1, device="meta")
    with compiled_to("ttgir"), offline("sm_90a") as compiled:
        for W, start in ((1, 0), (2, 3), (7, 1), (16, 4)):
            table = torch.empty(100, dtype=torch.int32, device="meta")[start:]
            now = x | {"read_indices": table[:W].view(1, W), "num_accepted_tokens": table[:1]}
            now |= {name: table[:1].view(1, 1) for name in ("write_indices", "parent_idx")}
            p = op(**now, backend=Explain("triton")).problem
            inputs, slots = (kind(**{name: now.get(name) for name in kind._fields}) for kind in (Inputs, Slots))
            run(plan_decode, p, inputs, slots, NOTHING)
        return len(compiled)


@needs_triton
def test_tables_of_slots_compile_nothing(process):
    assert process.submit(variants).result() == 1


def scratch(target):
    """Returns what is planned for scans with descriptors, and what the compiler asks for."""
    from flash_delta.compiler.offline import offline
    from flash_delta.kernels.runtime.chip import Chip
    from flash_delta.kernels.runtime.plan import layouts_of
    from flash_delta.kernels.runtime.pool_launches import PoolLaunch
    from flash_delta.kernels.triton.forward import scan_launches
    from flash_delta.kernels.triton.tiles import scan_tiles
    from flash_delta.problem import Pools
    from workshop.gate.cases import rule, serving

    def scratch_bytes(p, x):
        return scan_launches.scratch_bytes(p, layouts_of(x), chip)

    found, sizes = [], {}
    for case in (rule.RuleCase(), rule.RuleCase(64), rule.RuleCase(gate="channel"), rule.RuleCase(erase=None)):
        p, x = rule.problem_of(case)
        for processors in (1, 8, 16, 132):
            chip = Chip(target.removesuffix("a"), processors)
            (t,) = scan_tiles("scan", p, chip, every=False)
            if (case, t) not in sizes:
                with compiled_to("llir"), offline(target) as compiled:
                    rule.call("scan", case, False, t)
                sizes[case, t] = compiled[0].kernel.metadata.global_scratch_size
            programs = prod(scan_launches.scan_grid(p, PoolLaunch(t, p.N)))
            found.append((scratch_bytes(p, x), programs * sizes[case, t]))
    for pool in (serving.PREFILLS["prefill-gdn-128"], serving.PREFILLS["prefill-kda-128"]):
        p, x = rule.problem_of(pool.model)
        p = p._replace(pools=Pools(dtype=pool.dtype))
        asked = []
        for w in scan_launches.pool_scans(p, chip, every=False):
            with compiled_to("llir"), offline(target) as compiled:
                serving.call_prefill(pool, w.tile)
            asked.append(prod(scan_launches.scan_grid(p, w)) * compiled[0].kernel.metadata.global_scratch_size)
        found.append((scratch_bytes(p, x), max(asked)))
    assert scratch_bytes(*rule.problem_of(rule.RuleCase(gap=1))) == 0
    return found


@needs_triton
@pytest.mark.parametrize("target", ["sm_90a", "sm_100"])
def test_scratch_of_descriptors(process, target):
    found = process.submit(scratch, target).result()
    assert [planned for planned, _ in found] == [asked for _, asked in found]
    assert len({planned for planned, _ in found}) > 4
