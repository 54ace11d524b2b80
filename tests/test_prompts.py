"""Prompts on pools with their convolution and output norm, against float64 and against decoding; both backends."""

import pytest
import torch
from prefill_truth import OPS, TOKENS
from prompt_truth import (
    BITS,
    as_in_vllm,
    check_prompts,
    check_resumed,
    convolved,
    make_prompts,
    part_of,
    prompts_truth,
    run_prompts,
)  # fmt: skip
from serving_truth import DEVICES, GPU, KINDS, coarser, needs_triton, slots
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_delta.ops._backend import Explain
from flash_delta.ops.serving import Convolution, OutputNorm
from flash_delta.ops.serving.around import around_of
from flash_delta.problem import Inputs, Slots
from flash_delta.testing import assert_accurate

BACKENDS = ["torch", pytest.param("triton", marks=needs_triton)]
backends = pytest.mark.parametrize("backend", BACKENDS)
TINY = {"H": 1, "HV": 1, "K": 16, "V": 16}
FORMS = [  # kind, dtype, that of the pool, layout
    ("gdn-raw", torch.float32, torch.float32, True),
    ("kda-raw", torch.float32, torch.float16, False),
    ("gdn-raw", torch.bfloat16, torch.bfloat16, False),
    ("kda-raw", torch.float32, torch.bfloat16, True),
    ("gdn-raw", torch.float16, torch.float16, True),
]


@backends
@pytest.mark.parametrize(("kind", "dtype", "pool", "v_first"), FORMS)
def test_against_the_definitions(kind, dtype, pool, v_first, backend):
    """Long, short and no sequences, and rows behind them; some go on in their own slots, and some start from zeros."""
    lengths = (70, 1, 0, 20, 2, 0, 3)
    x = make_prompts(
        kind, lengths, behind=2, dtype=dtype, pool=pool, v_first=v_first, device=DEVICES[backend],
        activation="sigmoid" if kind == "kda-raw" else "silu",
    )  # fmt: skip
    x["write_indices"][[0, 1, 4]] = x["read_indices"][[0, 1, 4]]
    x |= {"has_initial_state": slots([1, 1, 1, 0, 1, 0, 0], x).bool(), "scale": 0.3}
    for t in (*(x[name] for name in TOKENS), x["output_norm"].gate):
        t[:, -2:] = float("nan")
    check_prompts(kind, x, backend)


@backends
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_lengths(batch_invariant, backend):
    """Around the window, around what decoding runs, and around one and two chunks."""
    lengths = (*range(6), 15, 16, 17, 64, 65)
    x = make_prompts("gdn-raw", lengths, device=DEVICES[backend], **TINY) | {"batch_invariant": batch_invariant}
    check_prompts("gdn-raw", x, backend)


@backends
@pytest.mark.parametrize(("W", "L"), [(4, 3), (3, 4), (2, 1), (1, 1)])
def test_taps_and_windows(W, L, backend):
    """With more value heads than key heads, and widths that no tile has."""
    x = make_prompts("gdn-raw", (66, 2, 0), W=W, L=L, bias=W % 2 == 0, H=2, HV=4, K=24, V=17, device=DEVICES[backend])
    check_prompts("gdn-raw", x, backend)


@backends
@pytest.mark.parametrize(
    ("dtype", "windows", "rolling"),
    [(torch.float32, torch.bfloat16, False), (torch.bfloat16, torch.float32, True), (torch.float32, None, True)],
)
def test_windows_that_roll_and_pools_of_another_dtype(dtype, windows, rolling, backend):
    """Inputs are rounded as the pool is; where windows roll, what lies behind the first W - 1 inputs stays."""
    L = 7 if rolling else 3
    sizes = {"dtype": dtype, "windows": windows, "rolling": rolling, "L": L, "slots": 12}
    x = make_prompts("gdn-raw", (66, 2, 0), device=DEVICES[backend], **sizes, **TINY)
    x |= {"checkpoint_indices": slots([[10], [11], [9]], x), "checkpoint_every": 64}
    x["write_indices"][1] = x["read_indices"][1]
    check_prompts("gdn-raw", x, backend)


@backends
@pytest.mark.parametrize("without", ["convolution", "output_norm"])
def test_one_without_the_other(without, backend):
    x = make_prompts("gdn-raw", (66, 2), behind=1, device=DEVICES[backend], **TINY) | {without: None}
    check_prompts("gdn-raw", x, backend)


@backends
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_windows_at_checkpoints(batch_invariant, backend):
    """Windows are kept as far as a sequence reaches, where there is a slot, as states are. A prompt goes on from
    one."""
    x = make_prompts("gdn-raw", (128, 65, 16), slots=24, device=DEVICES[backend], **TINY)
    table = [[10, 11, 12], [14, -1, 0], [0, 1, 2]]
    x |= {"checkpoint_indices": slots(table, x), "checkpoint_every": 64, "batch_invariant": batch_invariant}
    o, states, windows = check_prompts("gdn-raw", x, backend)
    rest = part_of(x, 64, 128, read_indices=[10], write_indices=[19]) | {"state_pool": states}
    rest |= {"convolution": x["convolution"]._replace(pool=windows), "checkpoint_indices": None}
    tail, *after = run_prompts("gdn-raw", rest | {"checkpoint_every": None}, backend)
    if batch_invariant:
        assert torch.equal(tail, o[:, 64:128])
        assert torch.equal(after[0][19], states[3])
    assert_accurate("o", tail, o[:, 64:128], torch.float32)
    assert torch.equal(after[1][19], windows[3])


@backends
@pytest.mark.parametrize("write", [True, False])
def test_windows_at_offsets(write, backend):
    """After any number of tokens, none and all of them too; also in the slot that the sequence reads."""
    lengths = (70, 66, 2, 3, 0, 1, 20)
    x = make_prompts("gdn-raw", lengths, slots=24, device=DEVICES[backend], **TINY) | {"checkpoint_every": None}
    x["checkpoint_indices"] = slots([14, 1, 2, 17, 18, 19, -1], x)
    x["checkpoint_offsets"] = slots([65, 64, 1, 3, 0, -1, 5], x)
    x["write_indices"] = x["write_indices"] if write else None
    check_prompts("gdn-raw", x, backend)


CUTS = (0, 1, 3, 16, 63, 64, 65, 127, 128, 130, 148, 149, 150)


@backends
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "cuts"), [("gdn-raw", torch.float32, CUTS), ("kda-raw", torch.bfloat16, (3, 64, 70))]
)
def test_a_prompt_goes_on_from_any_checkpoint(kind, dtype, cuts, batch_invariant, backend):
    """With its window. From a multiple of 64 of a float32 pool it has the bits of the run that was not cut."""
    x = make_prompts(kind, (150,), behind=2, slots=6, dtype=dtype, pool=dtype, device=DEVICES[backend], **TINY)
    x |= {"batch_invariant": batch_invariant}
    for cut in cuts:
        whole, rest = check_resumed(kind, x, cut, backend)
        if batch_invariant and cut % 64 == 0 and dtype == torch.float32:
            assert torch.equal(rest[0], whole[0][:, cut:])
            assert torch.equal(rest[1][1], whole[1][1])


@backends
def test_checkpoints_alone_are_written(backend):
    x = make_prompts("gdn-raw", (66, 3), slots=6, device=DEVICES[backend], **TINY)
    x |= {"checkpoint_indices": slots([[5], [2]], x), "checkpoint_every": 64, "write_indices": None}
    check_prompts("gdn-raw", x, backend)


@backends
def test_a_prompt_in_pieces_is_a_prompt(backend):
    """In one slot, wherever it is cut: also after fewer tokens than a window has."""
    x = make_prompts("gdn-raw", (100,), device=DEVICES[backend], **TINY)
    x |= {"read_indices": slots([1], x), "write_indices": slots([1], x)}
    want_o, want_states, want_windows = prompts_truth("gdn-raw", x)
    pieces, again = [], x
    for start, stop in ((0, 1), (1, 3), (3, 8), (8, 77), (77, 78), (78, 100)):
        o, states, windows = run_prompts("gdn-raw", part_of(again, start, stop), backend)
        pieces.append(o)
        again = again | {"state_pool": states, "convolution": x["convolution"]._replace(pool=windows)}
    assert_accurate("o", torch.cat(pieces, 1), want_o, torch.float32)
    assert_accurate("state_pool", states[1], want_states[1], torch.float32)
    assert torch.equal(windows.cpu(), want_windows)


@backends
@pytest.mark.parametrize("kind", ["gdn-raw", "kda-raw"])
def test_batch_invariance(kind, backend):
    """Bitwise: each sequence alone, and in pieces cut at multiples of 64, is what it is among others."""
    lengths = (90, 1, 66, 12)
    x = make_prompts(kind, lengths, device=DEVICES[backend], **TINY) | {"batch_invariant": True}
    o, states, windows = run_prompts(kind, x, backend)
    start = 0
    for n, length in enumerate(lengths):
        alone = part_of(x, start, start + length) | {
            name: x[name][n : n + 1] for name in ("read_indices", "write_indices")
        }
        same = run_prompts(kind, alone, backend)
        assert torch.equal(same[0], o[:, start : start + length])
        assert torch.equal(same[1][4 + n], states[4 + n])
        assert torch.equal(same[2][4 + n], windows[4 + n])
        start += length
    first = part_of(x, 0, 64, read_indices=[0], write_indices=[4])
    one, half, seen = run_prompts(kind, first, backend)
    rest = part_of(x, 64, 90, read_indices=[4], write_indices=[4]) | {"state_pool": half}
    two, whole, last = run_prompts(kind, rest | {"convolution": x["convolution"]._replace(pool=seen)}, backend)
    assert torch.equal(torch.cat([one, two], 1), o[:, :90])
    assert torch.equal(whole[4], states[4])
    assert torch.equal(last[4], windows[4])


@backends
@pytest.mark.parametrize(("kind", "dtype", "pool", "v_first"), FORMS[:2])
def test_tokens_are_what_decoding_makes_of_them(kind, dtype, pool, v_first, backend):
    """A draft, a token at a time: the same windows, and the rest within the accuracy rule."""
    x = make_prompts(kind, (20,), dtype=dtype, pool=pool, v_first=v_first, device=DEVICES[backend], **TINY)
    o, states, windows = run_prompts(kind, x, backend)
    rows, norm = x | {"write_indices": x["read_indices"] + 1}, x["output_norm"]
    del rows["cu_seqlens"]
    pools, decoded = [x["state_pool"].clone(), x["convolution"].pool.clone()], []
    for t in range(20):
        token = {name: x[name][:, t : t + 1] for name in TOKENS} | {"state_pool": pools[0]}
        token["convolution"] = x["convolution"]._replace(pool=pools[1])
        token["output_norm"] = norm._replace(gate=norm.gate[:, t : t + 1])
        decoded.append(KINDS[kind][0](**(rows | token), backend=backend))
        rows["read_indices"] = rows["write_indices"]
    assert_accurate("o", o, torch.cat(decoded, 1), coarser(dtype, pool))
    assert_accurate("state_pool", states[1], pools[0][1], pool)
    assert torch.equal(windows[1], pools[1][1])


@backends
def test_what_is_no_slot_is_padding(backend):
    """Zeros, and no canary changed, whatever such rows and their gates hold."""
    bad = [-1, 12, -(2**31), 2**31 - 1, 2**32 + 1, 11]
    lengths = (66, *(0, 3, 17) * 4)
    x = make_prompts("gdn-raw", lengths, slots=12, device=DEVICES[backend], **TINY)
    count = len(lengths) - 1
    x["read_indices"] = slots([0, *(bad + [7] * 6)[:count]], x)
    x["write_indices"] = slots([1, *([8] * 6 + bad)[:count]], x)
    x |= {"checkpoint_indices": slots([[2], *[[9]] * count], x), "checkpoint_every": 64, "null_slot": 11}
    for t in (x["v"], x["q"], x["output_norm"].gate):
        t[:, 66:] = float("nan")
    pool = x["convolution"].pool
    memory = torch.full((16, pool.shape[1] + 1, 7), float("nan"), device=pool.device)
    windows = memory[2:14, 1:, 1:5]
    windows.copy_(pool)
    before, states = memory.clone(), x["state_pool"].clone()
    given = x | {"state_pool": states, "convolution": x["convolution"]._replace(pool=windows)}
    o = OPS["gdn-raw"](**given, backend=backend)
    want_o, want_states, want_windows = prompts_truth("gdn-raw", x)
    assert_accurate("o", o[:, :66], want_o[:, :66], torch.float32)
    assert not o[:, 66:].any()
    assert_accurate("state_pool", states, want_states, torch.float32)
    assert torch.equal(windows.cpu(), want_windows)
    before[[3, 4], 1:, 1:5] = memory[[3, 4], 1:, 1:5]  # the slots that are written
    assert torch.equal(before.view(BITS[4]), memory.view(BITS[4]))


@backends
def test_projections_as_they_lie(backend):
    """Slices of one fused projection, heads in front of tokens, parameters of other dtypes: the same bits."""
    x = make_prompts("gdn-raw", (70, 4), H=1, HV=2, K=16, V=24, device=DEVICES[backend])
    o, states, windows = run_prompts("gdn-raw", x, backend)
    T, device = x["q"].shape[1], x["q"].device
    fused, views = torch.randn(1, T, 16 + 16 + 48 + 5, device=device), {}
    views["q"], views["k"] = fused[..., :16].unflatten(2, (1, 16)), fused[..., 16:32].unflatten(2, (1, 16))
    views["v"] = torch.randn(1, 2, T, 24, device=device).transpose(1, 2)
    gate = torch.randn(1, T, 2, 24, 2, device=device)[..., 1]
    for name, view in (views | {"gate": gate}).items():
        view.copy_(x["output_norm"].gate if name == "gate" else x[name])
        assert not view.is_contiguous()
    again = run_prompts("gdn-raw", x | views | {"output_norm": x["output_norm"]._replace(gate=gate)}, backend)
    for a, b in zip(again, (o, states, windows), strict=True):
        assert torch.equal(a, b)


@backends
def test_windows_lie_as_in_vllm(backend):
    """Transposed, with gaps between slots: the same bits, and nothing is written between them."""
    x = make_prompts("gdn-raw", (70, 2, 1), L=3, slots=12, device=DEVICES[backend], **TINY)
    x |= {"checkpoint_indices": slots([[8], [9], [10]], x), "checkpoint_every": 64}
    o, states, windows = run_prompts("gdn-raw", x, backend)
    pool = as_in_vllm(x["convolution"].pool)
    again = OPS["gdn-raw"](**(x | {"convolution": x["convolution"]._replace(pool=pool)}), backend=backend)
    assert torch.equal(again, o)
    assert torch.equal(x["state_pool"], states)
    assert torch.equal(pool, windows)
    (count, D, L), page = pool.shape, pool.stride(0)
    assert pool.as_strided((count - 1, page - L * D), (page, 1), L * D).isnan().all()


@backends
@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_without_tokens(lengths, backend):
    """States and windows move on, or are zeros; the tokens behind are zeros."""
    x = make_prompts("gdn-raw", lengths, behind=3, device=DEVICES[backend], **TINY)
    check_prompts("gdn-raw", x, backend)
    if backend == "triton" and not GPU:  # the interpreter divides by the number of chunks
        return
    empty = {name: x[name][:, :0] for name in TOKENS}
    empty |= {"output_norm": x["output_norm"]._replace(gate=x["output_norm"].gate[:, :0])}
    check_prompts("gdn-raw", x | empty, backend)


@backends
def test_how_many_prompts_there_are_changes_no_result(backend):
    x = make_prompts("gdn-raw", (2, 20, 18), device=DEVICES[backend], **TINY)
    expected = run_prompts("gdn-raw", x, backend)
    for a, b in zip(run_prompts("gdn-raw", x | {"max_prompts": 1}, backend), expected, strict=True):
        assert torch.equal(a, b)


def test_compiled_and_without_values():
    """One operator, which writes both pools; fake tensors have shapes and checks."""
    x = make_prompts("gdn-raw", (20, 3), behind=1, **TINY)
    expected = run_prompts("gdn-raw", x, "torch")
    compiled = torch.compile(lambda x: run_prompts("gdn-raw", x, "torch"), backend="eager", fullgraph=True)
    for a, b in zip(compiled(x), expected, strict=True):
        assert torch.equal(a, b)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(t) if torch.is_tensor(t) else t for name, t in x.items()}
        assert OPS["gdn-raw"](**fake).shape == expected[0].shape
        with pytest.raises(ValueError, match=r"convolution\.pool: expected a tensor"):
            OPS["gdn-raw"](**(fake | {"convolution": x["convolution"]._replace(pool=x["state_pool"])}))


@backends
def test_outputs_go_where_the_caller_says(backend):
    x = make_prompts("gdn-raw", (20, 3), behind=1, device=DEVICES[backend], **TINY)
    o, *_ = run_prompts("gdn-raw", x, backend)
    out = torch.full_like(o, float("nan"))
    assert run_prompts("gdn-raw", x | {"out": out}, backend)[0].data_ptr() == out.data_ptr()
    assert torch.equal(out, o)


@needs_triton
def test_launches():
    """At most two more than those of the rule, and without what is around it none."""
    from flash_delta.kernels.runtime.chip import Chip
    from flash_delta.kernels.runtime.plan import layouts_of
    from flash_delta.kernels.triton.serving.prefill import plan_prefill

    x, found = make_prompts("gdn-raw", (21, 2), device=DEVICES["triton"], **TINY), []
    for without in ((), ("output_norm",), ("convolution",), ("convolution", "output_norm")):
        call = x | dict.fromkeys(without)
        p = OPS["gdn-raw"](**call, backend=Explain("triton")).problem
        around, *_ = around_of(p.op, call["convolution"], call["output_norm"])
        groups = *(kind(**{name: call.get(name) for name in kind._fields}) for kind in (Inputs, Slots)), around
        plan = plan_prefill(p, Chip("sm_90", 132), *map(layouts_of, groups))
        found.append([step.kernel.__name__ for step in plan.steps])
    rule = found[-1]
    assert "convolve_prompts" not in rule
    assert found[0] == found[1] == ["convolve_prompts", *rule, "finish_prompts"]
    assert found[2] == [*rule, "finish_prompts"]


def test_the_truth_is_the_definition():
    """The first token of a sequence without a window meets the last tap alone."""
    x = make_prompts("gdn", (2,), bias=False) | {"has_initial_state": torch.tensor([False])}
    q, *_ = convolved(x, x["convolution"])
    first = x["q"][0, 0].double() * x["convolution"].weight[:16, -1].double()
    assert_accurate("q", q[0, 0], torch.nn.functional.silu(first), torch.float64)


WRONG = {
    "taps": ("convolution.weight: expected 1 to 4 taps", lambda c, n: (c._replace(weight=c.weight.repeat(1, 2)), n)),
    "slots": ("convolution.pool: expected a tensor", lambda c, n: (c._replace(pool=c.pool[1:]), n)),
    "gate": ("output_norm.gate: expected a tensor", lambda c, n: (c, n._replace(gate=n.gate[:, :1]))),
    "eps": ("output_norm.eps: expected a number of at least 0", lambda c, n: (c, n._replace(eps=-1.0))),
    "tuple": ("convolution: expected a Convolution", lambda c, n: (tuple(c), n)),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name):
    message, change = WRONG[name]
    x = make_prompts("gdn-raw")
    convolution, norm = change(Convolution(*x["convolution"]), OutputNorm(*x["output_norm"]))
    with pytest.raises(ValueError, match=f"prefill_gated_delta_rule: {message}"):
        OPS["gdn-raw"](**(x | {"convolution": convolution, "output_norm": norm}))
