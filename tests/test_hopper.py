"""The Hopper backend: what it runs, when it goes first, and on a GPU of that kind, what it computes."""

import gc
import inspect
import os
import weakref
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

import flash_delta
from flash_delta.kernels.hopper import again, backend, launch, layouts
from flash_delta.kernels.hopper.launches import CASES as CASES_COMPILED
from flash_delta.kernels.hopper.tiles import NARROW, WIDE, tiles
from flash_delta.kernels.triton.launcher import make_call
from flash_delta.kernels.triton.tiles import Chip
from flash_delta.ops import _backend
from flash_delta.problem import Inputs, Problem
from flash_delta.testing import CASES, MEMBERS, Case, allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import products_in, recurrence

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
RAW = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True}


def problem(**changes) -> Problem:
    described = Problem(
        "chunk_gated_delta_rule", 1, 8192, 16, 32, 128, 128, 4, torch.bfloat16, torch.device("cuda", 0), "scalar",
        "decayed", 1.0, packed=True,
    )  # fmt: skip
    return described._replace(**changes)


@pytest.fixture
def on_a_card(monkeypatch):
    """A Hopper GPU of 132 multiprocessors, for all that only asks what there is."""
    monkeypatch.setattr(backend, "chip_of", lambda device: Chip("sm_90", 132))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float16, "l2norm": True, "raw_gate": True, "raw_beta": True}, None),
        ({"gate": "none", "packed": False, "B": 4, "state_v_first": True}, None),
        ({"device": torch.device("cpu")}, "a Hopper GPU"),
        ({"needs_grad": True}, "no backward"),
        ({"recurrent": True}, "whole sequences"),
        ({"pool": torch.float32}, "whole sequences"),
        ({"gate": "channel"}, "one decay per value head"),
        ({"erase": "undecayed"}, "keys erase"),
        ({"erase": None}, "keys erase"),
        ({"keep_states": True}, "states of chunks"),
        ({"dtype": torch.float32}, "16 bits"),
        ({"K": 64}, "have to be 128, they are 64 and 128"),
        ({"scale": -1.0}, "scale has to be positive, it is -1.0"),
        ({"T": 0}, "no tokens"),
        ({"N": 0}, "no tokens"),
    ],
)
def test_what_it_cannot_run_it_says(on_a_card, changes, reason):
    said = backend.unsupported(problem(**changes))
    assert (said is None) if reason is None else (reason in said)


def test_other_chips_are_not_for_it(monkeypatch):
    monkeypatch.setattr(backend, "chip_of", lambda device: Chip("sm_100", 148))
    assert "a Hopper GPU" in backend.unsupported(problem())


def test_it_is_there_to_be_asked_for(on_a_card, monkeypatch):
    monkeypatch.setattr(_backend, "refusal", lambda name, problem, load=None: None)
    assert _backend.choose_backend(problem(), None) == "triton"
    assert _backend.choose_backend(problem(), "hopper") == "hopper"


def test_a_choice_is_made_once_for_calls_that_are_alike(on_a_card, monkeypatch):
    asked = []
    monkeypatch.setattr(_backend, "refusal", lambda name, problem, load=None: asked.append(name))
    p = problem(memo={})
    for wish in (None, "hopper", None, "hopper"):
        assert _backend.choose_backend(p, wish) == (wish or "triton")
    assert asked == ["triton", "hopper"]


def test_half_a_state_per_program_as_long_as_all_run_at_once():
    chip = Chip("sm_90", 132)
    assert tiles(problem(N=2), chip, every=False) == (NARROW,)
    assert tiles(problem(N=3), chip, every=False) == (WIDE,)
    assert set(tiles(problem(N=2), chip, every=True)) == {NARROW, WIDE}, "a length must not compile anything"


def test_a_ragged_descriptor_names_the_rows_of_a_sequence():
    """Row e - i of a sequence that ends before row e, in bytes modulo 2^64; behind the end, it is outside."""
    q = torch.empty(2, 40, 3, 512, dtype=torch.bfloat16)[..., :128]
    described, clip = launch.ragged(q, 128), layouts.RAGGED.value
    for start, length, row, head in ((0, 40, 0, 0), (5, 30, 29, 2), (launch.token_stride(q) + 7, 9, 8, 1)):
        at = (clip, start + length, clip - length + row, head * q.stride(2))
        assert all(place < size for place, size in zip(at, described.shape, strict=True))
        number = sum(place * stride for place, stride in zip(at, described.strides, strict=True))
        assert 2 * number % 2**64 == 2 * ((start + row) * q.stride(1) + head * q.stride(2))
        assert clip - length + length == described.shape[2], "the row behind the last one"


def test_what_the_copy_engine_cannot_describe_is_copied():
    rows = torch.randn(2, 8, 3, 257).bfloat16()
    heads = rows[..., :256].contiguous()[..., :128]
    assert backend._described(heads) is heads
    for other in (rows[..., :256:2], rows[..., 1:129], heads.transpose(0, 1), heads[:, :1].expand(2, 8, 3, 128)):
        copy = backend._described(other)
        assert copy.data_ptr() != other.data_ptr()
        assert torch.equal(copy, other)
        assert backend._described(copy) is copy


def call(form="packed"):
    """Of the compile gate's, on tensors that are nowhere."""
    p, x = CASES_COMPILED[form]()
    c = make_call(p, x, ("test",))._replace(direct=False)
    return c, torch.empty_like(x.v), torch.empty(p.state_shape, device="meta"), launch.new_rates(p)


@pytest.fixture
def compiled(monkeypatch):
    """The loop as if compiled: what is known of each descriptor, and what the driver got."""
    element = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "fp4_padded": False}
    descriptors, given = [element | {"block_size": [1, 1, 64, 64 + n]} for n in range(7)], []
    made: list[SimpleNamespace] = []

    def launcher_of(source, metadata):
        made.append(source)
        assert not metadata.tensordesc_meta
        return lambda *arguments: given.append((list(source.signature.values()), arguments))

    fill = lambda *arguments: ("map", *arguments)  # noqa: E731
    tools = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    target = SimpleNamespace(backend="cuda", arch=90)
    active = SimpleNamespace(utils=tools, launcher_cls=launcher_of, get_current_target=lambda: target)
    monkeypatch.setattr(driver, "_active", active)
    metadata = namedtuple("Metadata", "tensordesc_meta")(descriptors)
    kinds = dict.fromkeys(range(7), "tensordesc<..>") | dict.fromkeys(range(7, 26), "i32")

    class Compiled:
        src, run, function, packed_metadata = SimpleNamespace(signature=kinds), None, 7, 8

    known = Compiled()
    known.metadata = metadata
    monkeypatch.setattr(again, "compiled_as", lambda name: known)
    return descriptors, given, made


def test_the_driver_gets_what_tritons_launcher_hands_over(compiled):
    descriptors, given, _ = compiled
    c, o, final, rates = call()
    tensors = (*c.x, o, final, rates)
    at = [SimpleNamespace(data_ptr=lambda n=n: 1024 * n) for n in range(len(tensors))]
    numbers = {id(t): n for n, t in reversed(list(enumerate(tensors)))}  # one tensor may be q and k
    steps, plans = [], []
    with pytest.MonkeyPatch.context() as m:
        m.setattr(launch, "launch_described", lambda c, kernel, made, options: plans.extend(made()))
        launch.run_loop(c, o, final, rates, NARROW)
    again.launch(c._replace(steps=steps, tensors=tensors), launch.forward_loop, lambda: plans, {})
    steps[0].launch(5, [1024 * n for n in range(len(tensors))])
    steps[0].launch(5, [1024 * n for n in range(len(tensors))])
    (signature, first), (_, second) = given
    assert first == second
    assert first[:9] == (1, 2, 1, 5, 7, 8, None, None, None)
    wanted, described = [], iter(descriptors)
    more = (None,) * (len(inspect.signature(nvidia.make_tensordesc_arg).parameters) - 2)
    for value in (*plans[0].arguments, *plans[0].constants.values()):
        if isinstance(value, again.TensorDescriptor):
            value.base = at[numbers[id(value.base)]]
            wanted += nvidia.make_tensordesc_arg(value, next(described), *more)
        else:
            wanted.append(1024 * numbers[id(value)] if torch.is_tensor(value) else value)
    assert list(first[9:]) == wanted
    assert signature[:9] == ["nvTmaDesc", *4 * ["i32"], *4 * ["i64"]]
    assert signature.count("nvTmaDesc") == 7


def test_a_launcher_is_made_once_for_all_lengths(compiled):
    for _ in range(2):
        c, o, final, rates = call()
        c = c._replace(steps=[], tensors=(*c.x, o, final, rates))
        launch.run_loop(c, o, final, rates, NARROW)
    assert len(compiled[2]) == 1


def test_what_is_remembered_of_a_launch_holds_no_tensor(compiled):
    c, o, final, rates = call()
    inputs = Inputs(*(None if t is None else t.clone() for t in c.x))
    steps, alive = [], [weakref.ref(t) for t in (*inputs, o, final, rates) if t is not None]
    made = c._replace(x=inputs, tensors=(*inputs, o, final, rates), steps=steps)
    launch.run_loop(made, o, final, rates, NARROW)
    del made, inputs, o, final, rates
    gc.collect()
    assert len(steps) == 1
    assert not any(ref() is not None for ref in alive)


BY_NAME = {case.name: case for case in CASES}
WIDTHS = {"K": 128, "V": 128}
FORMS = ("ragged", "aligned", "one-token", "packed", "all-empty", "no-initial-state", "grouped-by-3", "correlated-keys")
OPTIONS = ("in-kernel", "in-kernel-packed", "negative-eigenvalues", "state-v-first", "scale", "extreme-decay")


def wide(case: Case) -> Case:
    return Case(**(vars(case) | WIDTHS))


@needs_hopper
@pytest.mark.parametrize(
    ("tile", "length"), [(WIDE, None), (NARROW, None), (WIDE, 64)], ids=["wide", "narrow", "segments"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMS + OPTIONS)
@torch.no_grad()
def test_against_the_recurrence(monkeypatch, name, dtype, tile, length):
    monkeypatch.setattr(launch, "tiles", lambda p, chip, every: (tile,))
    monkeypatch.setattr(backend, "split_length", lambda p, processors: length)
    kind = ("hopper", tile, length)  # of its own: what was launched is remembered
    monkeypatch.setattr(backend, "FORWARD", kind)
    member, case = MEMBERS["gdn"], wide(BY_NAME[name])
    x = make_inputs(case, member, dtype)
    wanted = recurrence(
        member, {n: t.double() for n, t in x.items() if torch.is_tensor(t) and t.is_floating_point()}, x
    )
    with products_in(dtype):
        reference = member.op(**x, backend="torch")
    on_gpu = make_inputs(case, member, dtype, "cuda")
    results = member.op(**on_gpu, backend="hopper")
    again = member.op(**on_gpu, backend="hopper")
    for got, same, want, rounded in zip(results, again, wanted, reference, strict=True):
        assert relative_error(got.cpu(), want) <= allowed(relative_error(rounded, want), dtype)
        assert torch.equal(got, same)


@needs_hopper
@torch.no_grad()
def test_no_call_leaves_memory_behind_and_no_number_of_states_compiles_anything():
    """WIDE or NARROW, as the number of states has it; the second call of its kind goes past Triton's launcher."""

    def inputs(B):
        q, v = (torch.randn(B, 128, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (2, 32))
        return {"q": q, "k": q, "v": v, "g": -torch.rand(B, 128, 32, device="cuda")} | {"beta": v[..., 0].sigmoid()}

    flash_delta.chunk_gated_delta_rule(**inputs(1), backend="hopper")
    before = torch.cuda.memory_allocated()
    with flash_delta.forbid_compilation():
        for B in (1, 2, 5, 3):
            flash_delta.chunk_gated_delta_rule(**inputs(B), backend="hopper")
            assert torch.cuda.memory_allocated() == before


@needs_hopper
@torch.no_grad()
def test_slices_of_a_projection_need_no_copy_and_rows_behind_the_last_sequence_are_zero():
    T, bounds = 300, torch.tensor([0, 70, 70, 201], dtype=torch.int32, device="cuda")
    rows = torch.randn(1, T, 8, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = rows[:, :, :2], rows[:, :, 2:4], rows[:, :, 4:]
    g, beta = -torch.rand(1, T, 4, device="cuda"), torch.rand(1, T, 4, device="cuda")
    call = {"g": g, "beta": beta, "cu_seqlens": bounds, "use_qk_l2norm_in_kernel": True, "output_final_state": True}
    sliced = flash_delta.chunk_gated_delta_rule(q, k, v, **call, backend="hopper")
    whole = flash_delta.chunk_gated_delta_rule(*(t.contiguous() for t in (q, k, v)), **call, backend="hopper")
    assert all(torch.equal(a, b) for a, b in zip(sliced, whole, strict=True))
    assert not sliced[0][:, 201:].any()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
@pytest.mark.parametrize("raw", [False, True], ids=["given", "raw"])
def test_rates(raw):
    """Two packed sequences of 70 and 5 tokens, an empty one between them, and rows behind the last one."""
    T, H, HV, lengths = 80, 1, 2, (70, 0, 5)
    torch.manual_seed(0)
    q, k, v = torch.randn(1, T, H, 128), torch.randn(1, T, H, 128), torch.randn(1, T, HV, 128)
    x = Inputs(q, k, v, torch.randn(1, T, HV) if raw else -torch.rand(1, T, HV), torch.rand(1, T, HV))
    x = x._replace(cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))
    if raw:
        x = x._replace(A_log=torch.rand(HV), dt_bias=torch.randn(HV))
    p = problem(T=T, H=H, HV=HV, N=3, dtype=q.dtype, device=q.device, scale=0.3, l2norm=raw, raw_gate=raw, raw_beta=raw)
    o, out = torch.empty(1, T, HV, 128), launch.new_rates(p)
    launch.run_rates(make_call(p, x, ("test",)), o, out)
    g, beta = x.g[0], x.beta[0]
    if raw:
        g = -x.A_log.exp() * torch.nn.functional.softplus(g + x.dt_bias)
        beta = beta.sigmoid()
    lengths_of = [1 / (t[0, :, 0].square().sum(-1) + 1e-6).sqrt() if raw else torch.ones(T) for t in (q, k)]
    for slot, first, stop in ((0, 0, 64), (1, 64, 70), (3, 70, 75)):
        everything = out.view(-1, HV, 8, 64)[slot]
        got, b = everything[..., : stop - first], beta[first:stop].T
        G = g[first:stop].cumsum(0).T / torch.log(torch.tensor(2.0))
        r_q, r_k = (r[first:stop].expand(HV, -1) for r in lengths_of)
        last = G[:, -1:]
        want = [
            G + (0.3 * r_q).log2(), G - r_k.log2(), -b * r_k / (0.3 * r_q), b,
            -r_k * G.exp2(), 0.3 * r_q * G.exp2(), r_k * (last - G).exp2(), last.exp2().expand_as(G),
        ]  # fmt: skip
        torch.testing.assert_close(got, torch.stack(want, 1), rtol=2e-5, atol=2e-5)
        beyond = everything[..., stop - first :]
        assert not beyond[:, 2:4].any(), "a row behind the end writes nothing"
        assert (beyond[:, 7] == got[:, 7, -1:]).all(), "and decays nothing"
    assert not o[:, 75:].any()
