"""The Hopper backend: what it runs, when it goes first, how it is launched. What it computes: test_hopper_gpu.py."""

import os
import re
from dataclasses import replace
from struct import pack
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime.driver import driver

import flash_delta
from flash_delta.kernels.device.chunk import count_slots
from flash_delta.kernels.hopper import backend
from flash_delta.kernels.hopper.channel import plan as by_channel
from flash_delta.kernels.hopper.channel import prefill as channel_prefill
from flash_delta.kernels.hopper.device import layouts
from flash_delta.kernels.hopper.plans import boxes
from flash_delta.kernels.hopper.plans.columns import as_heads, joined
from flash_delta.kernels.hopper.plans.splits import loop_tile, loop_tiles
from flash_delta.kernels.hopper.plans.tiles import BY_HAND, NARROW, SAVING, SLIM, WIDE
from flash_delta.kernels.hopper.scalar import choices
from flash_delta.kernels.hopper.scalar.backward import plan as by_hand
from flash_delta.kernels.hopper.scalar.forward import loop, rates
from flash_delta.kernels.hopper.scalar.segments.memory import new_maps
from flash_delta.kernels.runtime import cuda_driver
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.plan import Descriptor, Making, layout_of, layouts_of
from flash_delta.kernels.triton import backend as triton
from flash_delta.kernels.triton.backward.results import OutputGradients
from flash_delta.ops import _backend
from flash_delta.problem import Gate, Inputs, Pools, Problem, gate_of
from flash_delta.reference import backend as torch_backend
from flash_delta.testing import MEMBERS, make_inputs
from flash_delta.testing.cases import CASES
from tests.changed import changed
from tests.gluon_emulator import launch
from workshop.gate.cases.hopper import CASES as CASES_COMPILED
from workshop.gate.cases.hopper import ByHand
from workshop.gate.cases.rule import Planned

BY_NAME = {case.name: case for case in CASES}
BOUNDED, FREE = (Gate("channel", True, bound, torch.bfloat16) for bound in (-5.0, None))
HALF, LOGS = BOUNDED._replace(dtype=torch.float16), Gate("channel", False, -5.0, torch.float32)
KDA = {"gate": BOUNDED}


def problem(**changes) -> Problem:
    described = Problem(
        "chunk_gated_delta_rule", 1, 8192, 16, 32, 128, 128, 4, torch.bfloat16, torch.device("cuda", 0),
        Gate("scalar"), "decayed", 1.0, packed=True, most_beta=1.0,
    )  # fmt: skip
    return described._replace(**changes)


@pytest.fixture
def on_a_card(monkeypatch):
    """A Hopper GPU of 132 multiprocessors, for all that only asks what there is."""
    for module in (backend, by_channel, channel_prefill):
        monkeypatch.setattr(module, "chip_of", lambda device: Chip("sm_90", 132))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float16, "l2norm": True, "gate": Gate("scalar", True), "raw_beta": True}, None),
        ({"gate": Gate("none"), "packed": False, "B": 4, "state_v_first": True}, None),
        ({"device": torch.device("cpu")}, "a Hopper GPU"),
        ({"K": 64, "V": 64}, None),
        ({"K": 256, "V": 256}, None),
        ({"needs_grad": True}, None),
        ({"needs_grad": True, "disable_recompute": True}, None),
        ({"recurrent": True}, "chunk by chunk"),
        ({"pools": Pools()}, None),
        ({"pools": Pools(dtype=torch.float16, checkpoint_every=64), "K": 64, "V": 64}, None),
        (
            {"pools": Pools(dtype=torch.bfloat16), "K": 256, "V": 256},
            "on a pool K and V have to be 64 or 128, both; they are 256",
        ),
        ({"pools": Pools(plain=False)}, "gaps inside of its slots, or slots that do not begin at"),
        ({"pools": Pools(dtype=torch.float64)}, "its states are float32, the pool is torch.float64"),
        (KDA, None),
        ({"gate": FREE}, None),
        ({"gate": LOGS}, None),
        (KDA | {"needs_grad": True, "disable_recompute": True}, None),
        ({"gate": HALF}, "g has to be torch.bfloat16 or torch.float32, it is torch.float16"),
        (KDA | {"pools": Pools()}, None),
        ({"gate": FREE, "pools": Pools(dtype=torch.bfloat16, checkpoint_offsets=True)}, None),
        (KDA | {"pools": Pools(dtype=torch.float64)}, "its states are float32, the pool is torch.float64"),
        (KDA | {"pools": Pools(plain=False)}, "gaps inside of its slots, or slots that do not begin at"),
        (KDA | {"pools": Pools(), "K": 64, "V": 64}, "heads of 128 in bfloat16; they are 64 and 64"),
        (KDA | {"dtype": torch.float16}, "heads of 128 in bfloat16; they are 128 and 128 in torch.float16"),
        (KDA | {"K": 64, "V": 64}, "heads of 128 in bfloat16; they are 64 and 64"),
        (KDA | {"keep_states": True}, "states of chunks"),
        ({"erase": "undecayed"}, "keys erase"),
        ({"erase": None}, "keys erase"),
        ({"keep_states": True}, "states of chunks"),
        ({"dtype": torch.float32}, "16 bits"),
        ({"K": 64}, None),
        ({"K": 256, "V": 512}, None),
        ({"V": 64}, None),
        ({"K": 100, "V": 100, "needs_grad": True}, None),
        ({"K": 60, "V": 100, "dtype": torch.float16, "needs_grad": True}, None),
        ({"K": 100, "V": 100, "needs_grad": True, "disable_recompute": True}, None),
        ({"K": 100, "V": 100, "needs_grad": True, "disable_recompute": True, "dtype": torch.float16}, None),
        ({"K": 100, "V": 100, "pools": Pools()}, "or both up to 128 without a pool; they are 100 and 100"),
        ({"K": 160, "V": 160}, "K has to be one of 64, 128, 256, and V a multiple of it up to 512, or both up to 128"),
        (KDA | {"K": 100, "V": 100}, "heads of 128 in bfloat16; they are 100 and 100"),
        ({"V": 640}, "up to 512"),
        ({"K": 64, "needs_grad": True}, None),
        ({"K": 64, "needs_grad": True, "disable_recompute": True}, None),
        ({"K": 64, "pools": Pools()}, "on a pool K and V have to be 64 or 128, both; they are 64 and 128"),
        ({"scale": -1.0}, "scale has to be positive, it is -1.0"),
        ({"H": 65_536, "HV": 65_536}, "up to 65,535 heads"),
        ({"N": 70_000}, None),
        ({"N": 70_000, "needs_grad": True}, None),
        ({"N": 40_000, "needs_grad": True, "dtype": torch.float16}, "with gradients it scans up to 32,767 sequences"),
        (KDA | {"N": 70_000}, None),
        (KDA | {"N": 70_000, "batch_invariant": True}, "it scans up to 65,534 sequences"),
        (KDA | {"N": 40_000, "needs_grad": True}, "with gradients it scans up to 32,767 sequences"),
    ],
)
def test_what_it_cannot_run_it_says(on_a_card, changes, reason):
    said = backend.unsupported(problem(**changes))
    assert (said is None) if reason is None else (reason in said)


def test_of_every_chunk_its_inverse_its_state_and_u_are_saved():
    p = problem(needs_grad=True, disable_recompute=True)
    numbers = 3 * 64 * 32 + 128 * 128 + 64 * 128
    assert choices.saved_bytes(p) == count_slots(p) * p.HV * 2 * numbers


def test_what_else_is_said_of_a_call(on_a_card):
    assert backend.remark(problem()) is None
    said = backend.remark(problem(most_beta=2.0))
    assert said == "where a beta is above 1, it keeps the inverse of a chunk in two parts"
    assert backend.remark(problem(needs_grad=True)) is None
    wide = backend.remark(problem(needs_grad=True, K=256, V=256))
    assert wide == (
        "its backward pass is that of 'triton', for which it saves nothing: K and V have to be 64 or 128, both; they"
        " are 256 and 256"
    )
    said = backend.remark(problem(T=32768, N=1, HV=8, needs_grad=True))
    assert said == (
        "it scans sequences in segments of 2048 tokens, up to 16 of them side by side; so does its backward pass"
    )
    assert backend.remark(problem(T=32768, N=1, HV=8, K=256, V=256)) is None, "wide heads are not split"
    padded = backend.remark(problem(T=32768, N=1, HV=8, K=60, V=100))
    assert padded == (
        "it pads heads of 60 and 100 to 128 columns, in copies of q, k, v and o; it scans sequences in segments of "
        "2048 tokens, up to 16 of them side by side"
    )
    columns = backend.remark(problem(T=32768, N=1, HV=4, V=256))
    assert columns == (
        "it scans every head's 256 values as 2 heads of 128; it scans sequences in segments of 2048 tokens, "
        "up to 16 of them side by side"
    )
    unknown = problem(T=32768, N=5, HV=8)
    parts = "it scans sequences of 3200 tokens or more in up to 16 parts, side by side"
    assert backend.remark(unknown) == parts
    for known in ({"lengths": (32000, 500, 200, 60, 8)}, {"needs_grad": True}, {"batch_invariant": True}):
        assert backend.remark(unknown._replace(**known)) != parts
    prompt = problem(T=32768, N=1, HV=8, pools=Pools())
    parts = "it scans prompts of 3200 tokens or more in up to 16 parts, side by side"
    assert backend.remark(prompt) == backend.remark(prompt._replace(batch_invariant=True, N=5)) == parts
    assert backend.remark(prompt._replace(HV=48)) is None
    assert backend.remark(problem(T=32768, N=1, HV=8, batch_invariant=True)) is None
    prompts = problem(**KDA, pools=Pools())
    assert backend.remark(prompts._replace(HV=64)) == "one kernel scans the prompts"
    assert backend.remark(changed(prompts, max_prompts=3)) == "one kernel scans the prompts"
    halves = "it scans half a state per program"
    assert backend.remark(prompts) == f"{halves}; one kernel scans more than 2 prompts"
    for alone in ({"N": 2}, {"max_prompts": 1}, {"batch_invariant": True}):
        assert backend.remark(changed(prompts, **alone)) == halves
    parts = "it scans half a state per program; where gates forget one kernel does it all in 4 parts"
    assert backend.remark(problem(**KDA, N=1)) == parts
    assert backend.remark(problem(**KDA, N=8)) == "one kernel does it all"
    logs = {"gate": FREE._replace(dtype=torch.float32)}
    assert backend.remark(problem(**logs, N=8)) == "one kernel does it all"
    assert backend.remark(problem(**KDA, N=1, HV=64)) == "one kernel does it all", "with half a state per program"
    assert backend.remark(problem(**KDA, N=1, batch_invariant=True)) == "'triton' scans the states"
    said = backend.remark(problem(**KDA, N=8, needs_grad=True))
    assert "'triton' scans the states back, and finds the gradients of chunks: by hand they are found for" in said
    said = backend.remark(problem(**KDA, T=32768, N=1, HV=4, H=4))
    assert said.startswith("'triton' scans sequences in segments of")


@pytest.mark.parametrize("name", ["packed", "in-kernel", "state-v-first", "no-initial-state"])
@pytest.mark.parametrize("member", ["gdn", "delta-rule"])
def test_columns_are_heads(member, name):
    """By the torch backend, in float64."""
    case = replace(BY_NAME[name], K=8, V=24)
    x = make_inputs(case, MEMBERS[member], torch.float64)
    p = flash_delta.explain(MEMBERS[member].op, **x).problem._replace(needs_grad=False)
    tensors = {n: t.detach() for n, t in x.items() if n in Inputs._fields and torch.is_tensor(t)}
    given = Inputs(**(dict.fromkeys(Inputs._fields) | tensors))
    whole, parts = torch_backend.forward(p, given), torch_backend.forward(*as_heads(p, given))
    found = joined(p, parts)
    assert found.final_state.shape == p.state_shape
    torch.testing.assert_close((found.o, found.final_state), (whole.o, whole.final_state))


@pytest.mark.parametrize("sizes", [{"B": 2, "N": 2, "T": 0, "packed": False}, {"N": 0, "T": 5}])
@pytest.mark.parametrize("begun", [True, False])
def test_without_tokens_states_stay_as_they_are(sizes, begun):
    p = problem(**sizes, HV=4, H=2, device=torch.device("cpu"), needs_grad=True)
    q, v = (torch.empty(p.B, p.T, heads, 128, dtype=p.dtype) for heads in (2, 4))
    states = torch.randn(p.state_shape) if begun else None
    x = Inputs(q, q, v, v[..., 0].float(), v[..., 0], initial_state=states)
    x = x._replace(cu_seqlens=torch.zeros(1, dtype=torch.int32) if p.packed else None)
    o, final, saved, *_ = backend.forward(p, x)
    assert o.shape == v.shape
    assert not o.any()
    assert torch.equal(final, torch.zeros(p.state_shape) if states is None else states)
    if os.environ.get("TRITON_INTERPRET") == "1":
        d = backend.backward(p, x, saved, o, final)
        assert not any(t.any() for t in (d.q, d.k, d.v, d.g, d.beta)), "what was saved is not read"
        assert states is None or torch.equal(d.initial_state, final)


def test_other_chips_are_not_for_it(monkeypatch):
    monkeypatch.setattr(backend, "chip_of", lambda device: Chip("sm_100", 148))
    assert "a Hopper GPU" in backend.unsupported(problem())


@pytest.mark.parametrize(
    "changes", [{}, {"HV": 1}, {"HV": 1, "K": 256, "V": 512}, {"K": 64, "V": 64}, {"HV": 1, "K": 64, "V": 64}]
)
def test_it_goes_first(on_a_card, monkeypatch, changes):
    """Whatever the lengths and the number of sequences: another one must not compile another backend."""
    for sizes in ({"T": 64, "N": 1}, {"T": 32768, "N": 1}, {"T": 8192, "N": 4, "B": 4, "packed": False}):
        p = problem(**changes | sizes)
        assert backend.preference(p) > triton.preference(p)
    for module in (backend, triton):
        monkeypatch.setattr(module, "remark", lambda problem: None)
    monkeypatch.delenv(_backend.ENVIRONMENT, raising=False)
    assert _backend.choose_backend(p, None) == "hopper"
    assert _backend.choose_backend(p, "triton") == "triton", "a wish is obeyed"
    assert _backend.Explain().of(p).reasons["hopper"] == "chosen, the first that can"


@pytest.mark.parametrize("HV", [2, 16, 64])
def test_prompts_of_any_number_of_heads(on_a_card, HV):
    p = problem(HV=HV, pools=Pools())
    assert backend.preference(p) > triton.preference(p)


@pytest.mark.parametrize(
    "changes",
    [{"HV": 64}, {"HV": 32}, {"HV": 8, "batch_invariant": True}, {"HV": 64, "gate": FREE}],
)
def test_prompts_with_a_decay_per_channel_come_here(on_a_card, monkeypatch, changes):
    for module in (backend, triton):
        monkeypatch.setattr(module, "remark", lambda problem: None)
    monkeypatch.delenv(_backend.ENVIRONMENT, raising=False)
    p = problem(**KDA | changes, pools=Pools())
    assert _backend.choose_backend(p, None) == "hopper"


@pytest.mark.parametrize(
    ("changes", "padded"),
    [
        ({"K": 100, "V": 100}, True),
        ({"K": 60, "V": 100, "dtype": torch.float16}, True),
        ({"K": 96, "V": 96}, False),
        ({"K": 96, "V": 96, "needs_grad": True}, True),
        ({"K": 96, "V": 96, "needs_grad": True, "dtype": torch.float16}, False),
        ({"K": 32, "V": 32, "needs_grad": True}, False),
    ],
)
def test_heads_are_padded_where_that_was_faster(on_a_card, changes, padded):
    p = problem(**changes)
    assert backend.unsupported(p) is None
    assert (backend.preference(p) > triton.preference(p)) is padded
    assert (backend.preference(p)[1] is None) is padded, "why not is said"


def test_what_it_cannot_run_others_do(on_a_card, monkeypatch):
    monkeypatch.setattr(triton, "unsupported", lambda problem: None)
    assert _backend.choose_backend(problem(keep_states=True), None) == "triton"


def test_half_a_state_per_program_if_the_longest_sequence_takes_longest():
    chip = Chip("sm_90", 132)
    assert loop_tile(problem(N=2), chip, False) == NARROW
    assert loop_tile(problem(N=3), chip, False) == WIDE
    one_long = problem(N=9, T=8192, lengths=(7680, *(64,) * 8))
    assert loop_tile(one_long, chip, False) == NARROW
    assert loop_tile(one_long._replace(lengths=None), chip, False) == WIDE, "they may be equal"
    assert set(loop_tiles(128, False)) == {NARROW, WIDE}, "a length must not compile anything"
    assert loop_tile(problem(K=64, V=64), chip, False) == SLIM
    assert loop_tile(problem(), chip, True) == SAVING[128]


def test_a_ragged_descriptor_names_the_rows_of_a_sequence():
    """Row e - i of a sequence that ends before row e, in bytes modulo 2^64; behind the end, it is outside."""
    q = layout_of(torch.empty(2, 40, 3, 512, dtype=torch.bfloat16)[..., :128])
    described, clip = boxes.ragged(q, 128), layouts.RAGGED.value
    for start, length, row, head in ((0, 40, 0, 0), (5, 30, 29, 2), (boxes.token_stride(q) + 7, 9, 8, 1)):
        at = (clip, start + length, clip - length + row, head * q.stride(2))
        assert all(place < size for place, size in zip(at, described.shape, strict=True))
        number = sum(place * stride for place, stride in zip(at, described.strides, strict=True))
        assert 2 * number % 2**64 == 2 * ((start + row) * q.stride(1) + head * q.stride(2))
        assert clip - length + length == described.shape[2], "the row behind the last one"


def test_what_the_copy_engine_cannot_describe_is_copied():
    rows = torch.randn(2, 8, 3, 257).bfloat16()
    heads = rows[..., :256].contiguous()[..., :128]
    made, given = Making(), layout_of(heads)
    assert boxes.describe(made, given) is given
    others = rows[..., :256:2], rows[..., 1:129], heads.transpose(0, 1), heads[:, :1].expand(2, 8, 3, 128)
    for number, other in enumerate(others):
        given = layout_of(other, f"x{number}")
        copy = boxes.describe(made, given)
        assert copy.filled is given
        assert copy.whole
        assert copy.shape == given.shape
        assert boxes.describe(made, copy) is copy
    assert len(made) == len(others)


class Compiled(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.fixture
def compiled(monkeypatch):
    """The loop as if compiled."""
    element = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "fp4_padded": False}
    boxes = [element | {"block_size": [1, 1, 64, 64 + n]} for n in range(7)]
    kinds = dict.fromkeys(range(10), "tensordesc<..>") | dict.fromkeys(range(5, 8), "constexpr")
    kinds |= dict.fromkeys((10, 11, 13, 14, 15), "constexpr") | {12: "*i32"}  # no tape, no pool
    kinds |= dict.fromkeys(range(16, 28), "i32") | {28: ("i32",) * 3, 29: "i32"}
    kinds |= dict.fromkeys(range(30, 45), "constexpr")
    kinds = dict(sorted(kinds.items()))
    metadata = {
        "num_warps": 4,
        "shared": 8,
        "launch_pdl": True,
        "global_scratch_size": 0,
        "tensordesc_meta": boxes,
    }
    known = Compiled(
        name="loop", src=SimpleNamespace(signature=kinds), metadata=SimpleNamespace(**metadata), function=7
    )
    target = SimpleNamespace(backend="cuda", arch=90)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: target))
    monkeypatch.setattr(cuda_driver, "load", lambda facts, kernel: kernel.function)
    return known, boxes


def test_a_launch_knows_its_descriptors_and_numbers_but_not_its_addresses(compiled):
    """test_cuda_launch.py tests the bytes of a launch."""
    kernel, sizes = compiled
    kernels = ByHand("packed")
    x, (o, final) = kernels.x, kernels.results()
    loop.run_loop(kernels.c, o, final, kernels.rates, None, NARROW)
    (step,) = kernels.c.steps
    assert (step.grid, step.tile) == ((1, 2, 1), BY_HAND)
    found = cuda_driver.kernel_of(kernel)
    assert found[:5] == ("loop", 7, 128, 8, True)
    kinds = re.sub(r"M(i+)(q+)", "M", found.letters.decode().replace("(", "").replace(")", ""))
    assert kinds == "MMMMMxxxMMxxPxxx" + 12 * "i" + "iii" + "i" + 15 * "x"
    described = [value for value in step.arguments if type(value) is Descriptor]
    tensors = [x.q, x.k, x.v, o, kernels.rates, x.initial_state, final]
    assert all(d.tensor is t for d, t in zip(described, tensors, strict=True))
    tiles = [(9, 2, 3, 4, *reversed(size["block_size"]), 1) for size in sizes]
    assert found.tiles == b"".join(pack("9I", *tile) for tile in tiles)
    assert described[1] == boxes.ragged(x.k, 128)
    assert step.arguments[12] is x.cu_seqlens


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_a_backward_pass_begins_with_a_launch_that_waits(compiled, split, left):
    """For what came before, which may have written what the next kernel looks at first: the copies of padded heads."""
    p, x = CASES_COMPILED["saving" if left else "training"]()
    made, length = Making(), 128 if split else None
    do, saved = (
        made.new("do", (p.B, p.T, p.HV, p.V), p.dtype),
        made.new("saved", (choices.saved_bytes(p),), torch.uint8),
    )
    kept = by_hand.Kept(saved, new_maps(made, p, length) if split and left else None)
    after, choice = OutputGradients(do, None), by_hand.ScanBack(length)
    first, *more = by_hand.plan_backward(p, Chip("sm_90", 132), layouts_of(x), after, kept, choice=choice).steps
    assert first.kernel is rates.rates
    assert not first.follows
    assert len(more) > 1
    assert all(step.follows for step in more[:-2]), "the last ones sum the gradients of vectors"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
@pytest.mark.parametrize(
    ("raw", "HV"), [(False, 2), (True, 2), (False, 1), (False, 8)], ids=["given", "raw", "one-head", "two-programs"]
)
def test_rates(raw, HV):
    """Two packed sequences of 70 and 5 tokens, an empty one between them, and rows behind the last one."""
    T, H, lengths = 80, 1, (70, 0, 5)
    torch.manual_seed(0)
    q, k, v = torch.randn(1, T, H, 128), torch.randn(1, T, H, 128), torch.randn(1, T, HV, 128)
    x = Inputs(q, k, v, torch.randn(1, T, HV) if raw else -torch.rand(1, T, HV), torch.rand(1, T, HV))
    x = x._replace(cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))
    if raw:
        x = x._replace(A_log=torch.rand(HV), dt_bias=torch.randn(HV))
    p = problem(T=T, H=H, HV=HV, N=3, dtype=q.dtype, device=q.device, scale=0.3, l2norm=raw)
    p = p._replace(gate=gate_of(("scalar", raw, None), x.g, x.A_log, x.dt_bias), raw_beta=raw)
    kernels = Planned(p, x)
    rates.run_rates(kernels.c, kernels.results().o, rates.new_rates(kernels.made, p))
    _, memory = launch(kernels.c.plan(), x)
    o, out = memory["o"], memory["rates"]
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
        got[:, 7, 1], largest = got[:, 7, 0], got[:, 7, 1].clone()
        torch.testing.assert_close(got, torch.stack(want, 1), rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(largest, b.amax(1))
        beyond = everything[..., stop - first :]
        assert not beyond[:, 2:4].any(), "a row behind the end writes nothing"
        assert (beyond[:, 7] == got[:, 7, -1:]).all(), "and decays nothing"
    assert not o[:, 75:].any()
