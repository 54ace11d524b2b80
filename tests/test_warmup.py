"""Before the first request: all that calls can need is compiled, what they take is known, and then nothing compiles."""

import gc
import weakref
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod

import pytest
import torch
from serving_truth import DEVICES, KINDS, needs_triton
from serving_truth import make_call as make_decode
from test_serving_packed import packed
from test_serving_step import make_step

import flash_delta
from flash_delta.compiler.pool import clean_processes
from flash_delta.ops.serving import Convolution, DecodeCalls, PrefillCalls, Serving, Slice, warmup, workspace_bytes
from flash_delta.ops.serving.around import NOTHING
from flash_delta.ops.serving.warmup import calls, decode_call, prefill_call
from flash_delta.problem import Inputs, Slots

RAW = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
EVERY = tuple(DecodeCalls(*form) for form in product((True, False), repeat=3) if form[0] or not form[2])
SPECS = {
    "gdn": Serving("gated_delta_rule", 1, 2, 16, 24, True, torch.float32, decode=EVERY),
    "kda-bounded": Serving("kda", 1, 2, 16, 24, True, torch.float32, **RAW, lower_bound=-5.0, decode=EVERY),
}


@pytest.fixture(autouse=True)
def unfrozen():
    """Other tests' objects are collected as ever."""
    yield
    gc.unfreeze()


def test_what_is_there_is_not_collected_again():
    """Nor what was garbage before kept alive by that."""
    loop = Loop()
    loop.own, garbage = loop, weakref.ref(loop)
    del loop
    before = gc.get_freeze_count()
    warmup(replace(SPECS["gdn"], decode=(), prefill=()), "cpu")
    assert gc.get_freeze_count() > before + 10_000
    assert garbage() is None
    assert len(gc.get_objects()) < 10_000


class Loop:
    own = None


@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_what_was_warmed_up_is_told(rule):
    spec = Serving(rule, 1, 2, 16, 24, False, decode=(DecodeCalls(), DecodeCalls(True, True, True)))
    forms = (
        PrefillCalls(),
        PrefillCalls(True, True, True, True),
        PrefillCalls(checkpoint_offsets=True),
        PrefillCalls(False, convolution=True, output_norm=True),
    )
    spec = replace(spec, prefill=forms)
    seconds = warmup(spec, "cpu")
    assert all(0 < s < 60 for s in seconds.values())
    assert [name.removeprefix("decode_").removeprefix("prefill_") for name in seconds] == [
        f"{rule}(write_indices)",
        f"{rule}(write_indices, num_accepted_tokens, parent_idx)",
        f"{rule}(write_indices)",
        f"{rule}(write_indices, has_initial_state, checkpoint_indices, batch_invariant)",
        f"{rule}(write_indices, checkpoint_offsets)",
        f"{rule}(convolution, output_norm)",
    ]
    assert warmup(replace(spec, decode=(), prefill=()), "cpu") == {}


def test_descriptions_that_cannot_be():
    with pytest.raises(ValueError, match="Serving: rule: expected 'gated_delta_rule' or 'kda', got 'gdn'"):
        Serving("gdn", 1, 2, 16, 24, True)
    with pytest.raises(ValueError, match="Serving: lower_bound: expected None with rule 'gated_delta_rule', got -5"):
        Serving("gated_delta_rule", 1, 2, 16, 24, True, lower_bound=-5.0)
    with pytest.raises(ValueError, match=r"decode_kda: lower_bound: expected a number in \[-5, 0\), got -6"):
        warmup(Serving("kda", 1, 2, 16, 24, True, use_gate_in_kernel=True, lower_bound=-6.0), "cpu")
    with pytest.raises(ValueError, match="workspace_bytes: device: expected a GPU, got cpu"):
        workspace_bytes(SPECS["gdn"], 8, 1, "cpu")


def keys():
    from flash_delta.kernels.runtime import compile_key

    return dict(compile_key.numbers)


@needs_triton
@pytest.mark.parametrize("kind", SPECS)
def test_calls_as_described_depend_on_nothing_new(kind):
    """Any batch, number of tokens, table and pool: what the launcher knows compiled code by is there already."""
    device = DEVICES["triton"]
    warmup(replace(SPECS[kind], prefill=()), device, "triton")
    before = keys()
    for form, (B, T, W, slots) in product(EVERY, [(1, 1, 1, 9), (3, 1, 7, 30), (2, 5, 5, 11), (1, 16, 3, 64)]):
        x = make_decode(kind, B=B, T=T, slots=slots, device=device)
        x |= {"scale": 0.1}
        if kind == "kda-bounded":
            x |= {"allow_neg_eigval": False, "dt_bias": x["dt_bias"].view(2, 16)}
        table = torch.arange(B * max(T, W), dtype=torch.int32, device=device).view(B, -1) % slots
        x["read_indices"] = table[:, 0].contiguous()
        if form.num_accepted_tokens:
            x |= {"read_indices": table[:, :W], "num_accepted_tokens": table[:, 0].contiguous()}
        if form.write_indices:
            x["write_indices"] = table[:, :T]
        if form.parent_idx:
            x["parent_idx"] = table[:, :T].contiguous()
        KINDS[kind][0](**x, backend="triton")
        if form == DecodeCalls():
            KINDS[kind][0](**(x | {"write_indices": x["read_indices"]}), backend="triton")
    assert keys() == before
    KINDS[kind][0](**(x | {"g": x["g"].to(torch.bfloat16)}), backend="triton")
    assert len(keys()) == len(before) + 1


@needs_triton
def test_slices_of_a_projection_are_described():
    """q, k and v of one, g and beta of another, a pool whose slots have gaps."""
    device, widths = DEVICES["triton"], (16, 16, 48)
    where = {"q": Slice(90), "k": Slice(90, 16), "v": Slice(90, 32), "g": Slice(5, 1), "beta": Slice(5, 3)}
    warmup(replace(SPECS["gdn"], **where, slot=1000, decode=(DecodeCalls(),), prefill=()), device, "triton")
    before = keys()
    for T in (1, 4):
        x = make_decode("gdn", B=3, T=T, device=device)
        q, k, v = torch.randn(3 * T, 90, device=device)[:, : sum(widths)].split(widths, 1)
        g, beta = (-torch.rand(3 * T, 5, device=device))[:, 1:].split(2, 1)
        x |= {"q": q.view(3, T, 1, 16), "k": k.view(3, T, 1, 16), "v": v.unflatten(0, (3, T)).unflatten(2, (2, 24))}
        x |= {"g": g.view(3, T, 2), "beta": beta.view(3, T, 2)}
        x["state_pool"] = torch.zeros(9, 1000, device=device)[:, : 2 * 24 * 16].view(9, 2, 24, 16)
        x["read_indices"] = x["write_indices"] = x["read_indices"].int()
        flash_delta.decode_gated_delta_rule(**x, backend="triton")
        assert keys() == before
    flash_delta.decode_gated_delta_rule(**(x | {"q": x["q"].contiguous()}), backend="triton")
    assert len(keys()) == len(before) + 1


@needs_triton
def test_whole_steps_are_described():
    """With a convolution and an output norm; without them, or with other taps, it is another kernel."""
    device, form = DEVICES["triton"], DecodeCalls(convolution=True, output_norm=True)
    spec = replace(SPECS["gdn"], conv_bias=True, conv_inputs=3, decode=(form,), prefill=())
    warmup(spec, device, "triton")
    before = keys()
    for B, T, slots in ((1, 1, 9), (3, 1, 20), (2, 3, 11)):
        x, conv = make_step("gdn", L=3, B=B, T=T, slots=slots, device=device)
        x["read_indices"] = x["write_indices"] = x["read_indices"].int()
        flash_delta.decode_gated_delta_rule(**x, convolution=Convolution(*conv), backend="triton")
        assert keys() == before
    flash_delta.decode_gated_delta_rule(**x, backend="triton")
    assert len(keys()) == len(before) + 1
    shorter = Convolution(conv[0], conv[1][:, 1:].contiguous(), conv[2])
    flash_delta.decode_gated_delta_rule(**x, convolution=shorter, backend="triton")
    assert len(keys()) == len(before) + 2


@needs_triton
def test_packed_rows_and_rolling_windows_are_described():
    """In a pool of another dtype than q. Longer slots, or other windows, are another kernel's."""
    device, forms = DEVICES["triton"], (DecodeCalls(True, True, convolution=True, output_norm=True, cu_seqlens=True),)
    conv = {"conv_bias": True, "conv_inputs": 7, "conv_pool_dtype": torch.bfloat16, "conv_rolling": True}
    warmup(replace(SPECS["gdn"], **conv, decode=forms, prefill=()), device, "triton")
    before = keys()
    for lengths, W in (([1], 1), ([2, 0, 3], 5)):
        T, B = max(lengths), len(lengths)
        x, windows = make_step("gdn", B=B, T=T, L=7, windows=torch.bfloat16, device=device)
        index = torch.arange(B * W, dtype=torch.int32, device=device).view(B, W)
        x |= {"read_indices": index, "write_indices": index, "num_accepted_tokens": index[:, 0] * 0 + 1}
        x = packed(x, lengths, behind=2)
        KINDS["gdn"][0](**x, convolution=Convolution(*windows, rolling=True), backend="triton")
        assert keys() == before
    longer = torch.cat([windows[0], windows[0]], 2)
    KINDS["gdn"][0](**x, convolution=Convolution(longer, *windows[1:], rolling=True), backend="triton")
    KINDS["gdn"][0](**x, convolution=Convolution(longer.float(), *windows[1:], rolling=True), backend="triton")
    KINDS["gdn"][0](**x, convolution=Convolution(longer[:, :, :4], *windows[1:]), backend="triton")
    assert len(keys()) == len(before) + 3


def pages(count, drafts, D, device):
    """vLLM's windows: blocks ``[W - 1 + drafts, D]`` on pages that are larger, as calls get them."""
    page = (3 + drafts) * D + 80
    return torch.zeros(count, page, device=device)[:, : (3 + drafts) * D].view(count, 3 + drafts, D).mT


@needs_triton
@pytest.mark.parametrize("drafts", [0, 3], ids=["tokens", "drafts"])
def test_windows_of_vllm_are_described(drafts):
    """Transposed, with gaps between blocks; with drafts they roll. A pool of another layout is another kernel's."""
    device, D = torch.device(DEVICES["triton"]), 2 * 16 + 2 * 24
    conv = {"conv_inputs": 3 + drafts, "conv_slot": (3 + drafts) * D + 80, "conv_channels_last": True}
    form = DecodeCalls(True, drafts > 0, convolution=True, output_norm=True, cu_seqlens=drafts > 0)
    prompts = PrefillCalls(True, True, convolution=True, output_norm=True)
    spec = replace(SPECS["gdn"], **conv, conv_rolling=drafts > 0, decode=(form,), prefill=(prompts,))
    assert {pool.stride() for pool in described(spec, device)} == {pages(2, drafts, D, device).stride()}
    warmup(spec, device, "triton")
    before = keys()
    for B in (1, 3):
        x, windows = make_step("gdn", B=B, T=1 + drafts, slots=9, bias=False, device=device)
        index = torch.arange(B * (1 + drafts), dtype=torch.int32, device=device).view(B, 1 + drafts) % 9
        x |= {"read_indices": index if drafts else index[:, 0], "write_indices": index if drafts else index[:, 0]}
        if drafts:
            x = packed(x | {"num_accepted_tokens": index[:, 0] * 0 + 1}, [1 + drafts] * B)
        convolution = Convolution(pages(9, drafts, D, device), windows[1], rolling=drafts > 0)
        KINDS["gdn"][0](**x, convolution=convolution, backend="triton")
        assert keys() == before
    op, x = prefill_call(spec, prompts, 17, 2, device)  # rows of g lie as those of one token, modulo 16
    pool = torch.zeros(4, *x["state_pool"].shape[1:], device=device)
    x |= {"state_pool": pool, "convolution": x["convolution"]._replace(pool=pages(4, drafts, D, device))}
    op(**x, backend="triton")
    assert keys() == before
    dense = x["convolution"].pool.contiguous()
    op(**(x | {"convolution": x["convolution"]._replace(pool=dense)}), backend="triton")
    assert len(keys()) > len(before)


def described(spec, device):
    return [x["convolution"].pool for _, _, x in calls(spec, device)]


@needs_triton
@pytest.mark.parametrize("form", [DecodeCalls(), DecodeCalls(output_norm=True), DecodeCalls(convolution=True)])
@pytest.mark.parametrize("kind", SPECS)
def test_workspace_of_a_decoding_step(kind, form, monkeypatch):
    """That of what is between a convolution and the rule, whose parts' ends are rounded up."""
    from flash_delta.kernels.triton import backend
    from flash_delta.ops._backend import Explain

    monkeypatch.setattr("flash_delta.ops.serving.memory.choose_backend", lambda problem, wish: "triton")
    kept = []
    monkeypatch.setattr(backend, "make_call", lambda *args, **options: None)
    monkeypatch.setattr(backend, "remember", lambda *args: None)
    monkeypatch.setattr(backend, "run", lambda call, kernels, o, spare: kept.extend(spare))
    meta = torch.device("meta")
    spec = replace(SPECS[kind], decode=(form,), prefill=())
    op, x = decode_call(spec, form, 5, meta)
    p = op(**x, backend=Explain("triton")).problem._replace(B=3, N=3, device=meta)
    backend.decode(p, Inputs(**{n: x.get(n) for n in Inputs._fields}), Slots(None, None), NOTHING)
    assert len(kept) == 3 * form.convolution
    want = sum(-(-t.nbytes // 256) * 256 for t in kept)
    assert workspace_bytes(spec, 15, 3, "cuda:0") == want
    assert workspace_bytes(spec, 1000, 1, "cuda:0") == workspace_bytes(spec, 16, 2, "cuda:0")
    assert (want > 0) == form.convolution


@needs_triton
@pytest.mark.parametrize("rows", [True, False])
def test_drafts_are_described(rows):
    """Which write another pool, in another dtype; in one of the other shape it is another kernel."""
    device, form = DEVICES["triton"], DecodeCalls(convolution=True, output_norm=True, write_pool=True)
    forms = form, form._replace(parent_idx=True)
    spec = replace(SPECS["gdn"], conv_bias=True, write_dtype=torch.bfloat16, write_rows=rows, decode=forms, prefill=())
    warmup(spec, device, "triton")
    before = keys()
    for B, T, tree in ((1, 1, False), (3, 2, False), (2, 3, True)):
        x, conv = make_step("gdn", B=B, T=T, device=device)
        places = (5,) if rows else ()
        target, windows = (t.new_zeros(9, *places, *t.shape[1:]) for t in (x["state_pool"], conv[0]))
        index = torch.arange(B * T, dtype=torch.int32, device=device).view(B, T)
        x |= {"read_indices": x["read_indices"].int(), "write_pool": target.bfloat16()}
        x |= {"write_indices": index[:, 0] if rows else index} | ({"parent_idx": index} if tree else {})
        KINDS["gdn"][0](**x, convolution=Convolution(*conv, windows), backend="triton")
        assert keys() == before
    KINDS["gdn"][0](**(x | {"write_pool": target}), convolution=Convolution(*conv, windows), backend="triton")
    assert len(keys()) == len(before) + 1


@needs_triton
@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_prefill_as_described_depends_on_nothing_new(rule):
    device, form = torch.device(DEVICES["triton"]), PrefillCalls(True, True, True)
    # With 16 heads: how far g's and beta's rows lie apart, T HV, is a multiple of 16 whatever T is.
    spec = Serving(rule, 2, 16, 8, 8, False, torch.float32, **RAW, decode=(), prefill=(form,))
    warmup(spec, device, "triton")
    before = keys()
    for T, N in ((17, 2), (20, 3)):
        op, x = prefill_call(spec, form, T, N, device)
        op(**(x | {"checkpoint_indices": torch.full((N, 5), -1, dtype=torch.int32, device=device)}), backend="triton")
        assert keys() == before
    op(**(x | {"batch_invariant": True}), backend="triton")
    assert len(keys()) > len(before)
    form = form._replace(checkpoint_offsets=True)
    warmup(replace(spec, prefill=(form,)), device, "triton")
    before = keys()
    for T, N in ((32, 2), (48, 3)):
        op, x = prefill_call(spec, form, T, N, device)
        op(**x, backend="triton")
    assert keys() == before


@needs_triton
def test_prompts_with_what_is_around_them_are_described():
    """Numbers of tokens, sequences and prompts compile nothing; a call without the norm is another one."""
    device, form = torch.device(DEVICES["triton"]), PrefillCalls(True, True, convolution=True, output_norm=True)
    spec = Serving(
        "gated_delta_rule", 2, 16, 8, 8, False, torch.float32, **RAW, conv_bias=True, decode=(), prefill=(form,)
    )
    warmup(spec, device, "triton")
    before = keys()
    for T, N in ((19, 2), (32, 3)):
        op, x = prefill_call(spec, form, T, N, device)
        op(**(x | {"max_prompts": 1}), backend="triton")
        assert keys() == before
    op(**(x | {"output_norm": None}), backend="triton")
    assert len(keys()) == len(before) + 1


def refused(compiled_for, changes):
    """What a call says that would compile, when calls as ``compiled_for`` were compiled; and whose kernels pass."""
    from faulty_kernels import multiply

    from flash_delta.compiler.offline import offline
    from flash_delta.kernels.runtime import launch
    from flash_delta.kernels.runtime.calls import make_call
    from flash_delta.kernels.runtime.compile_key import DECODE
    from flash_delta.kernels.triton.serving import decode
    from flash_delta.ops._backend import Explain

    spec = Serving("gated_delta_rule", 16, 32, 128, 128, True, **RAW)

    def call(changes):
        _, op, x = next(calls(replace(spec, **changes), torch.device("meta")))
        p = op(**x, backend=Explain("triton")).problem
        inputs, slots = (kind(**{name: x.get(name) for name in kind._fields}) for kind in (Inputs, Slots))
        o = torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device="meta")
        c = make_call(p, inputs, DECODE, *slots)._replace(direct=False)
        launch.run(c, partial(decode.run_decode, o=o), o)
        launch._ready.add(c.shape.key)

    with offline("sm_90a") as compiled:
        if compiled_for is not None:
            call(compiled_for)
        before = len(compiled)
        with flash_delta.forbid_compilation() as outer, flash_delta.forbid_compilation():
            if compiled_for is not None:
                call(compiled_for)
            multiply(64, 64, 64, steps=16)
            assert len(compiled) == before + 1
            with pytest.raises(RuntimeError) as error:
                call(changes)
        assert not outer.switch.forbid(False)
        call(changes)
        assert len(compiled) == before + 2
        return str(error.value)


PROJECTION = {"q": Slice(8192), "k": Slice(8192, 2048), "v": Slice(8192, 4096), "g": Slice(64, 32), "slot": 2**20}


@needs_triton
@pytest.mark.parametrize(
    ("compiled_for", "changes", "why"),
    [
        (None, {}, "nothing of its kind was compiled before"),
        ({}, {"dtype": torch.float16, "g_dtype": torch.bfloat16, "beta_dtype": torch.bfloat16},
         "q is torch.float16, compiled was torch.bfloat16, k is torch.float16, compiled was torch.bfloat16, v is torch."
         "float16, compiled was torch.bfloat16"),
        (PROJECTION, {"state_v_first": False}, "state_v_first is False, compiled was True"),
        ({}, {"index_dtype": torch.int64}, "read_indices is torch.int64, compiled was torch.int32, write_indices is"),
        ({}, {"k": Slice(2052)}, "k has strides [2052, 2052, 128, 1], for which other code is compiled"),
        ({}, PROJECTION | {"q": Slice(2048, 4)}, "q starts at no multiple of 16 bytes"),
        ({}, {"decode": (DecodeCalls(False),)}, "write_indices is None"),
    ],
)  # fmt: skip
def test_forbidden(compiled_for, changes, why):
    with clean_processes(1) as (pool, _):
        message = pool.submit(refused, compiled_for, changes).result()
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
    from flash_delta.kernels.runtime.calls import make_call
    from flash_delta.kernels.runtime.compile_key import DECODE
    from flash_delta.kernels.triton.serving import decode
    from flash_delta.ops._backend import Explain

    spec = Serving("kda", 16, 32, 128, 128, True, decode=(DecodeCalls(True, True, True),))
    _, op, x = next(calls(spec, torch.device("meta")))
    with offline("sm_90a") as compiled:
        for W, start in ((1, 0), (2, 3), (7, 1), (16, 4)):
            table = torch.empty(100, dtype=torch.int32, device="meta")[start:]
            now = x | {"read_indices": table[:W].view(1, W), "num_accepted_tokens": table[:1]}
            now |= {name: table[:1].view(1, 1) for name in ("write_indices", "parent_idx")}
            p = op(**now, backend=Explain("triton")).problem
            inputs, slots = (kind(**{name: now.get(name) for name in kind._fields}) for kind in (Inputs, Slots))
            o = torch.empty(p.B, p.T, p.HV, p.V, dtype=p.dtype, device="meta")
            decode.run_decode(make_call(p, inputs, DECODE, *slots)._replace(direct=False), o)
        return len(compiled)


@needs_triton
def test_tables_of_slots_compile_nothing(process):
    assert process.submit(variants).result() == 1


def scratch(target):
    """Returns what is planned for scans with descriptors, and what the compiler asks for."""
    from flash_delta.compiler.cases import rule, serving
    from flash_delta.compiler.offline import offline
    from flash_delta.kernels.runtime.chip import Chip
    from flash_delta.kernels.runtime.pool_launches import PoolLaunch
    from flash_delta.kernels.triton.forward import scan_launches
    from flash_delta.kernels.triton.tiles import scan_tiles

    found, sizes = [], {}
    for case in (rule.RuleCase(), rule.RuleCase(64), rule.RuleCase(gate="channel"), rule.RuleCase(erase=None)):
        p, x = rule.problem_of(case)
        for processors in (1, 8, 16, 132):
            chip = Chip(target.removesuffix("a"), processors)
            (t,) = scan_tiles("scan", p, chip, every=False)
            if (case, t) not in sizes:
                with offline(target) as compiled:
                    rule.call("scan", case, False, t)
                sizes[case, t] = compiled[0].kernel.metadata.global_scratch_size
            programs = prod(scan_launches.scan_grid(p, PoolLaunch(t, p.N)))
            found.append((scan_launches.scratch_bytes(p, x, chip), programs * sizes[case, t]))
    for pool in (serving.PREFILLS["prefill-gdn-128"], serving.PREFILLS["prefill-kda-128"]):
        p, x = rule.problem_of(pool.model)
        p = p._replace(pool=pool.dtype)
        asked = []
        for w in scan_launches.pool_scans(p, chip, every=False):
            with offline(target) as compiled:
                serving.call_prefill(pool, w.tile)
            asked.append(prod(scan_launches.scan_grid(p, w)) * compiled[0].kernel.metadata.global_scratch_size)
        found.append((scan_launches.scratch_bytes(p, x, chip), max(asked)))
    assert scan_launches.scratch_bytes(*rule.problem_of(rule.RuleCase(gap=1)), chip) == 0
    return found


@needs_triton
@pytest.mark.parametrize("target", ["sm_90a", "sm_100"])
def test_scratch_of_descriptors(process, target):
    found = process.submit(scratch, target).result()
    assert [planned for planned, _ in found] == [asked for _, asked in found]
    assert len({planned for planned, _ in found}) > 4
