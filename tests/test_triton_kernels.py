"""The Triton backend against the recurrence in float64, in Triton's interpreter; on a GPU: `flash-delta check`."""

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU: `flash-delta check --device cuda` runs the compiled kernels", allow_module_level=True)

import flash_delta
from flash_delta.compiler.targets import TARGETS
from flash_delta.kernels import require_triton
from flash_delta.kernels.runtime.arguments import draft_of, fits_tma, strides
from flash_delta.kernels.runtime.chip import COMPILED, Chip, Tile, family
from flash_delta.kernels.runtime.plan import Layout, Making, layouts_of
from flash_delta.kernels.runtime.run import ByTriton, given_to
from flash_delta.kernels.runtime.workspace import Factors, Residual, make_groups
from flash_delta.kernels.triton import backend
from flash_delta.kernels.triton.backward.scan_backward import run_scan_backward
from flash_delta.kernels.triton.forward.plan import plan_forward
from flash_delta.kernels.triton.forward.scan_launches import copies
from flash_delta.kernels.triton.tiles import widest_float32, widest_key
from flash_delta.problem import Inputs, Pools
from flash_delta.testing import CASES, MEMBERS, Standard, make_inputs
from flash_delta.testing.accuracy import run
from workshop.gate.cases.rule import Kernels, RuleCase, problem_of

H200 = Chip("sm_90", 132)

BY_NAME = {case.name: case for case in CASES}
HEADS = {"H": 1, "HV": 2}  # the interpreter takes seconds for each: a batch and more groups are in some cells
ROW = {"B": 1} | HEADS
CELLS = [
    *(("gdn", "packed", dtype, {}) for dtype in ("bfloat16", "float32")),
    *(("gdn", case, dtype, ROW) for case in ("in-kernel-strong", "saved") for dtype in ("bfloat16", "float32")),
    ("gdn", "grouped-by-3", "bfloat16", {"B": 1}),
    *(("gdn", case, "bfloat16", ROW) for case in ("wide-keys", "state-v-first", "correlated-keys", "zero-beta")),
    *(("gdn", case, "float32", ROW) for case in ("extreme-decay", "zero-keys")),
    *(("gdn", case, "float32", {}) for case in ("no-tokens", "no-sequences", "all-empty")),
    ("gdn", "ragged", "float16", {}),
    *((member, "rising", "bfloat16", HEADS) for member in ("gdn", "comba")),
    ("gdn", "rising", "float32", HEADS),
    *(("gdn", "odd-widths", dtype, {"T": 66, "H": 1, "HV": 1}) for dtype in ("bfloat16", "float32")),
    ("comba", "odd-widths", "bfloat16", {"T": 66, "H": 1, "HV": 1}),
    ("gdn", "widest-values", "bfloat16", {"T": 20, "HV": 1, "K": 12}),
    *((member, "packed", "float32", HEADS) for member in ("delta-rule", "comba", "simple-gla")),
    *((member, "ragged", "bfloat16", HEADS) for member in ("delta-rule", "comba", "simple-gla")),
    ("comba", "in-kernel-packed", "float32", HEADS),
]


@pytest.mark.parametrize(("name", "case", "dtype", "changes"), CELLS)
def test_against_the_recurrence(name, case, dtype, changes):
    """Every output and gradient is as near as a kernel's may be."""
    member, case, dtype = MEMBERS[name], replace(BY_NAME[case], **changes), getattr(torch, dtype)
    x = make_inputs(case, member, dtype)
    standard, got = Standard(case, member, x), run(member, x, "triton")
    assert got.keys() == standard.want.keys()
    assert not standard.wrong(got)


def without_names(step):
    """A launch on tensors like these, wherever they are."""
    layouts = ((a.shape, a.strides, a.dtype, a.offset) if isinstance(a, Layout) else a for a in step.arguments)
    return step._replace(arguments=tuple(layouts))


def test_calls_with_and_without_gradients_are_not_launched_alike():
    """Nor is anything compiled anew: they differ in the memory that the launches are given."""
    p, x = problem_of(RuleCase())
    plain, training = (plan_forward(p._replace(needs_grad=needs), H200, layouts_of(x)) for needs in (False, True))
    assert plain.steps != training.steps
    assert list(map(without_names, plain.steps)) == list(map(without_names, training.steps))


def arguments(dtype=torch.float32, **changes):
    """Two packed sequences of 70 and 33 tokens and seven rows behind them."""
    torch.manual_seed(0)
    T, H, HV, K, V = 110, 1, 2, 16, 24
    q, k = (torch.nn.functional.normalize(torch.randn(1, T, H, K), dim=-1) for _ in range(2))
    x = {"q": q, "k": k, "v": torch.randn(1, T, HV, V), "g": -torch.rand(1, T, HV), "beta": torch.rand(1, T, HV)}
    x = {name: t.to(dtype).requires_grad_() for name, t in x.items()}
    return x | {"cu_seqlens": torch.tensor([0, 70, 103])} | changes


def results(x, **options):
    o, state = flash_delta.chunk_gated_delta_rule(**x, output_final_state=True, backend="triton", **options)
    leaves = [t for t in x.values() if t.requires_grad]
    return o, state, *torch.autograd.grad(o.sum() + state.sum(), leaves)


def test_strides_are_taken_as_they_are():
    """Heads before tokens, slices of a wide projection, gates side by side with strengths: the same bits, no copy."""
    x = arguments()
    plain = results(x)
    wide = torch.randn(1, 110, 1, 3 * 16)
    gates = torch.randn(1, 110, 2, 2)
    views = {
        "q": wide[..., :16],
        "k": wide[..., 32:],
        "v": torch.empty(1, 2, 110, 24).transpose(1, 2),
        "g": gates[..., 0],
        "beta": gates[..., 1],
    }
    with torch.no_grad():
        for name, view in views.items():
            view.copy_(x[name])
            assert not view.is_contiguous()
    strided = results({name: views[name].detach().requires_grad_() for name in views} | {"cu_seqlens": x["cu_seqlens"]})
    for a, b in zip(plain, strided, strict=True):
        assert torch.equal(a, b)


def test_rows_behind_the_last_sequence_are_zero():
    o, _, *gradients = results(arguments())
    for t in (o, *gradients):
        assert not t[:, 103:].any()
        assert t[:, :103].any()


def scanned(p, inputs, tile):
    """What scans write: o, the final states, the gradient of the initial ones, and for each chunk what is saved, which
    the backward pass also computes again."""
    kernels = Kernels(p, inputs)
    made, saved, chain = kernels.made, kernels.residual, kernels.chain
    kernels.chunks()
    results, dinitial = kernels.scan(True, tile), made.new("dinitial_state", p.state_shape, torch.float32)
    again = Residual._make([made.like(f"{t.name} again", t) for t in saved])
    run_scan_backward(
        kernels.c, kernels.channels, kernels.solved, kernels.factors, again, kernels.x.v, None, chain, dinitial, tile,
        recompute=True,
    )  # fmt: skip
    for t in (*saved, *again, *chain):
        t.filled = 0.0  # slots without a chunk stay as they are
    plan = kernels.c.plan(*results, dinitial, *again, *chain, *saved)
    *found, states, R, U = ByTriton(plan, given_to(plan, kernels.groups))(p.device, kernels.groups)
    assert all(torch.equal(a, b) and a.any() for a, b in zip((states, R, U), found[3:6], strict=True))
    return found


@pytest.mark.parametrize(("V", "columns"), [(24, 16), (136, 16), (192, 128)])
def test_descriptors_and_pointers_load_the_same(V, columns):
    """Hopper's whole tiles, which a CPU does not choose; and what the backward pass computes again is the same. No tile
    of a state reaches into the next head's."""
    x = arguments(torch.bfloat16)
    x["v"] = torch.randn(*x["v"].shape[:3], V, dtype=torch.bfloat16)
    p = flash_delta.explain(flash_delta.chunk_gated_delta_rule, **x, backend="triton").problem
    given = (x[n].detach() for n in ("q", "k", "v", "g", "beta"))
    inputs = Inputs(*given, initial_state=torch.randn(p.state_shape), cu_seqlens=x["cu_seqlens"])
    for a, b in zip(*(scanned(p, inputs, Tile(4, 1, columns, tma=tma)) for tma in (False, True)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("raw", [False, True])
def test_descriptors_and_pointers_load_the_same_write_gates(raw):
    """Beside values, of packed sequences; w is given or a logit."""
    case = replace(BY_NAME["packed"], B=1, H=1, HV=2, T=76, lengths=(0, 66, 7))
    x = make_inputs(case, MEMBERS["gdn2"], torch.bfloat16)
    p = flash_delta.explain(flash_delta.chunk_gdn2, **x, use_beta_sigmoid_in_kernel=raw, backend="triton").problem
    inputs = Inputs(*(t.detach() if torch.is_tensor(t := x.get(name)) else t for name in Inputs._fields))
    for a, b in zip(*(scanned(p, inputs, Tile(4, 1, 16, tma=tma)) for tma in (False, True)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("op", "changes", "reason"),
    [
        ("chunk_gated_delta_rule", {"k": 7}, "in torch.float32 K has to be from 8 to 128 and V from 8 to 512"),
        ("chunk_gated_delta_rule", {"dtype": torch.float64}, "it computes in float32, the tensors are torch.float64"),
        ("chunk_kda", {"return_intermediate_states": True, "chunk_size": 16}, "it returns the states of chunks of 64"),
        ("fused_recurrent_gated_delta_rule", {"g": None}, "token by token it runs the delta rule with a decay"),
        ("fused_recurrent_gated_delta_rule", {"T": 2**27}, "token by token it counts a tensor's numbers in 32 bits"),
    ],
)
def test_what_it_cannot_do_it_says(op, changes, reason):
    K, dtype = changes.get("k", 16), changes.get("dtype", torch.float32)
    q, v = torch.randn(1, 4, 1, K, dtype=dtype), torch.randn(1, 4, 1, 16, dtype=dtype)
    x = {"q": q, "k": q, "v": v, "beta": torch.rand(1, 4, 1), "g": -torch.rand(1, 4, 1)}
    if op == "chunk_kda":
        x |= {"g": -torch.rand(1, 4, 1, K)} | changes
    if "g" in changes:
        x |= changes
    if "T" in changes:  # of no memory
        x = {name: t[:, :1].expand(1, changes["T"], *t.shape[2:]) for name, t in x.items()}
    with pytest.raises(ValueError, match=f"backend 'triton' cannot run this: {reason}"):
        getattr(flash_delta, op)(**x, backend="triton")


def test_more_sequences_than_a_grid_has_room_for():
    """Prefill on a pool looks for its prompts, and decoding has another grid."""
    p = flash_delta.explain(flash_delta.chunk_gated_delta_rule, **arguments(), backend="triton").problem
    assert backend.unsupported(p._replace(N=32_767)) is None
    said = "with gradients it scans up to 32,767 sequences side by side, there are 32,768"
    assert backend.unsupported(p._replace(N=32_768)) == said
    p = p._replace(needs_grad=False)
    assert backend.unsupported(p._replace(HV=65_535)) is None
    said = "it scans up to 65,535 heads side by side, there are 65,536"
    assert backend.unsupported(p._replace(HV=65_536, pools=Pools())) == said
    many = p._replace(N=65_535)
    said = "it scans up to 65,534 sequences side by side, there are 65,535"
    assert backend.unsupported(many._replace(N=65_534)) is None
    assert backend.unsupported(many) == said
    assert backend.unsupported(many._replace(pools=Pools(), batch_invariant=True)) == said
    assert backend.unsupported(many._replace(pools=Pools())) is None
    assert backend.unsupported(many._replace(recurrent=True, needs_grad=False)) is None


def test_float32_heads_that_fit_no_tile_are_known():
    assert [widest_float32(Chip(target, 1)) for target in ("sm_90", "gfx942", "sm_80", "sm_100")] == [128, 128, 64, 64]


def test_comba_heads_that_fit_no_tile_are_known():
    """Its gradients of 256 channels take more shared memory than some chips have."""
    p = problem_of(RuleCase(256, erase="undecayed"))[0]._replace(needs_grad=True)
    assert [widest_key(p, Chip(target, 1)) for target in ("sm_80", "sm_89", "sm_90", "sm_120")] == [256, 128, 256, 128]
    assert widest_key(p._replace(needs_grad=False), Chip("sm_89", 1)) == 256


def test_what_was_compiled_is_what_the_gate_compiles():
    assert set(COMPILED) == {target.removesuffix("a") for target in TARGETS}


@pytest.mark.parametrize(("target", "like"), [("sm_75", "sm_80"), ("sm_130", "sm_80"), ("gfx1201", "gfx942")])
def test_a_new_chip_takes_careful_tiles_and_is_named(target, like, monkeypatch):
    assert family(target) == like
    monkeypatch.setattr(backend, "chip_of", lambda device: Chip(target, 8))
    p = flash_delta.explain(flash_delta.chunk_gated_delta_rule, **arguments(), backend="triton").problem
    assert f"{target} is new to these kernels, which take their tiles for {like}" in backend.remark(p)
    monkeypatch.setattr(backend, "chip_of", lambda device: Chip(like, 8))
    assert "is new" not in (backend.remark(p) or "")


@pytest.mark.parametrize(
    ("version", "said"), [("3.5.1", "is needed"), ("3.6.0", None), ("3.9.2", None), ("4.0.0", "tested")]
)
def test_the_version_of_triton_is_looked_at(version, said, monkeypatch):
    monkeypatch.setattr("triton.__version__", version)
    look = require_triton.__wrapped__
    if said is None:
        look()
    else:
        with pytest.raises((ModuleNotFoundError, RuntimeWarning), match=said):
            look()


@pytest.mark.parametrize(
    ("case", "number", "copied"),
    [
        (RuleCase(), 16, (True, True)),
        (RuleCase(100), 4, (True, False)),
        (RuleCase(60, gate="channel"), 4, (True, False)),
        (RuleCase(gap=1), 1, (False, False)),
    ],
    ids=["128", "100", "60", "gaps"],
)
def test_what_is_known_of_strides(case, number, copied):
    """The unit that loads are as wide as, and what the copy engine moves: the workspace, what the caller laid out."""
    p, x = problem_of(case)
    c = draft_of(p, H200, layouts_of(x))
    assert strides(c.x.v)[4].value == number
    assert tuple(copies(c, Tile(4, 2, 64, tma=True), c.x.v).values()) == copied


def test_rows_of_the_workspace_are_whole_units():
    p, _ = problem_of(RuleCase(100, values=60))
    factors, residual = make_groups(Making(), p, Factors, Residual)
    assert factors.X.shape[2:] == (64, 104)
    assert residual.states.shape[2:] == (64, 104)
    assert residual.R.shape[2:] == (64, 64)


def test_inference_keeps_no_state_per_chunk():
    """Nothing of chunks x K x V, and no chunk's values: a chunk leaves C (K + 2 C + 8) numbers a head in memory."""
    p = flash_delta.explain(flash_delta.chunk_gated_delta_rule, **arguments(), backend="triton").problem
    p = p._replace(T=8192, K=128, V=256, packed=False, N=1, needs_grad=False)
    keys, values, gates = (Making().new("", (1, p.T, *of), p.dtype) for of in ((p.H, p.K), (p.HV, p.V), (p.HV,)))
    plan = plan_forward(p, H200, layouts_of(Inputs(keys, keys, values, gates, gates)))
    assert plan.workspace_bytes == 4 * 128 * p.HV * 64 * (128 + 2 * 64 + 8)
    assert backend.empty_saved(p, None)[0].numel() == 4 * 128 * p.HV * 64 * (64 + 4)


def test_one_tensor_that_comes_as_q_and_as_k_is_two_pointers():
    """The next call of the same sizes may have two."""
    x = arguments(torch.bfloat16)
    p = flash_delta.explain(flash_delta.chunk_gated_delta_rule, **x, backend="triton").problem
    q, k, v, g, beta, bounds = (t.detach() for t in x.values())
    one, two = (plan_forward(p, H200, layouts_of(Inputs(q, keys, v, g, beta, cu_seqlens=bounds))) for keys in (q, k))
    assert [t.name for t in one.steps[0].arguments[:2]] == ["q", "k"]
    assert one == two


@pytest.mark.parametrize(("K", "V", "fits"), [(64, 64, True), (60, 64, False), (64, 60, False)])
def test_the_copy_engine_takes_rows_of_whole_16_bytes(K, V, fits):
    """The output's rows lie side by side, so widths count, even where a caller's own rows have gaps."""
    p, x = problem_of(RuleCase(64, gate="channel"))
    assert fits_tma(p._replace(K=K, V=V), layouts_of(x).v) == fits


def test_explain_says_that_rows_go_without_the_copy_engine(monkeypatch):
    monkeypatch.setattr(backend, "chip_of", lambda device: Chip("sm_90", 132))
    p = problem_of(RuleCase())[0]._replace(needs_grad=True, disable_recompute=True)  # such calls are not split
    assert backend.remark(p) is None
    assert "without the copy engine" in backend.remark(p._replace(V=100))
    assert backend.remark(p._replace(V=100, dtype=torch.float32)) is None
