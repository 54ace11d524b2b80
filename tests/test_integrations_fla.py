"""fla's names over this library's functions: docs/fla.md against the signatures, values, refusals, layers."""

import importlib
import importlib.util
import inspect
import itertools
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import flash_delta
from flash_delta import layers as own_layers
from flash_delta import modules as own_modules
from flash_delta.integrations.fla import layers, modules, ops
from flash_delta.integrations.fla.__main__ import absent
from flash_delta.integrations.fla.__main__ import main as compare
from flash_delta.integrations.fla.modules import l2norm
from flash_delta.integrations.fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update
from flash_delta.integrations.fla.modules.causal_conv1d import ops as conv_ops
from flash_delta.integrations.fla.ops import comba, cp, gated_delta_rule, gdn2
from flash_delta.integrations.fla.ops.gated_delta_product import naive as gdp_naive
from flash_delta.integrations.fla.ops.gated_delta_rule import gate as gdn_gate
from flash_delta.integrations.fla.ops.kda import gate as kda_gate
from flash_delta.integrations.fla.ops.kda import naive as kda_naive
from flash_delta.integrations.fla.ops.simple_gla import naive as gla_naive
from flash_delta.testing import ALLOWED, assert_accurate

HERE = "flash_delta.integrations.fla"
DOC = (Path(__file__).parent.parent / "docs" / "fla.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", DOC, re.DOTALL | re.MULTILINE))
B, T, H, HV, K, V = 2, 70, 2, 4, 8, 16


def table(section, header):
    """Rows of the table under a section: [(names of the first cell, second cell)]."""
    (rows,) = re.findall(rf"^\| {header}.*\n\|[-|]+\n((?:\|.*\n)+)", SECTIONS[section], re.MULTILINE)
    cells = [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows.splitlines()]
    return [(re.findall(r"`([\w.]+)`", first), second.strip()) for first, second, *_ in cells]


FUNCTIONS = [
    pytest.param(section, name, arguments.strip("`").split(), id=f"{name}")
    for section in ("Ops", "Gates", "Modules", "Layers")
    for (name,), arguments in table(section, "function")
]
PATHS = [(path, re.findall(r"`(\w+)`", names)) for paths, names in table("What is there", "module") for path in paths]

ONLY_HERE = {(".layers", "SimpleGatedLinearAttention")}  # fla has it at .layers.simple_gla


def named(section, name, root=HERE):
    """The callable of a row of docs/fla.md, here or in fla itself."""
    first, *rest = name.split(".")
    for path, names in PATHS:
        if first in names and not (root == "fla" and (path, first) in ONLY_HERE):
            found = getattr(importlib.import_module(root + path), first)
            return getattr(found, *rest) if rest else found
    raise AssertionError(f"{name} is at no path of docs/fla.md")


def arguments_of(function):
    return {name: p for name, p in inspect.signature(function).parameters.items() if name != "self"}


@pytest.mark.parametrize(("section", "name", "documented"), FUNCTIONS)
def test_documented_signature(section, name, documented):
    ours, spelled = arguments_of(named(section, name)), []
    for argument, p in ours.items():
        assert p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY), f"{argument}: no argument hides here"
        if p.kind is p.KEYWORD_ONLY and "*" not in spelled:
            spelled.append("*")
        spelled.append(argument)
    assert spelled == documented


@pytest.mark.parametrize("section", ["Ops", "Gates", "Modules", "Layers"])
def test_every_argument_has_its_row(section):
    rows = [name for names, _ in table(section, "argument") for name in names]
    taken = {argument for _, arguments in table(section, "function") for argument in arguments.strip("`").split()}
    assert len(rows) == len(set(rows))
    assert set(rows) == taken - {"*"}


@pytest.mark.parametrize(("path", "names"), PATHS, ids=lambda x: x if isinstance(x, str) else "")
def test_documented_paths(path, names):
    module = importlib.import_module(HERE + path)
    defined = {
        n for n, found in vars(module).items() if n[0] != "_" and getattr(found, "__module__", "") == HERE + path
    }
    exported = set(getattr(module, "__all__", defined))
    documented = {row[0][0] for section in ("Ops", "Gates", "Modules", "Layers") for row in table(section, "function")}
    aliases = {"chunk_gdn", "fused_recurrent_gdn", "fused_chunk_delta_rule", "l2_norm", "FLACPContext"}
    if path == ".ops":
        members = [
            group
            for p, group in PATHS
            if p.count(".") == 2
            and p.startswith(".ops")
            and p.split(".")[2] not in ("cp", "gated_delta_product", "gdn2")
        ]
        names = [name for group in members for name in group if not name.startswith("naive")]
    assert exported == set(names)
    assert exported <= documented | aliases | {"causal_conv1d", "causal_conv1d_update"}


def test_examples_of_the_page():
    for example in re.findall(r"```python\n(.*?)```", DOC, re.DOTALL):
        if "\ninstall()" in example and importlib.util.find_spec("fla"):
            continue
        exec(compile(example, "docs/fla.md", "exec"), {})


@pytest.fixture
def x():
    gen = torch.Generator().manual_seed(0)
    q, k, p = nn.functional.normalize(torch.randn(3, B, T, H, K, generator=gen), dim=-1)
    return {
        "q": q,
        "k": k,
        "p": p,
        "v": torch.randn(B, T, HV, V, generator=gen),
        "g": -torch.rand(B, T, HV, generator=gen),
        "beta": torch.rand(B, T, HV, generator=gen),
        "initial_state": torch.randn(B, HV, K, V, generator=gen),
        "output_final_state": True,
    }


def take(x, *without):
    return {name: value for name, value in x.items() if name not in without}


def assert_close(actual, expected, error=2e-5):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=error, atol=error)


def test_most_names_are_our_own_functions():
    for name in ops.__all__:
        own = getattr(flash_delta, name, None)
        assert own is None or inspect.unwrap(getattr(ops, name)) is own
    assert ops.chunk_gdn is ops.chunk_gated_delta_rule
    assert ops.fused_recurrent_gdn is ops.fused_recurrent_gated_delta_rule
    assert gdn_gate.fused_gdn_gate is flash_delta.fused_gdn_gate
    assert kda_gate.fused_kda_gate is flash_delta.fused_kda_gate


def test_ops_of_several_names(x):
    bare = take(x, "p", "g")
    assert_close(ops.fused_recurrent_delta_rule(**bare), flash_delta.chunk_delta_rule(**bare))
    once = ops.fused_recurrent_delta_rule(**take(bare, "beta"))
    assert_close(once, flash_delta.chunk_delta_rule(**(bare | {"beta": torch.ones(B, T, HV)})))
    positions = [x[name] for name in ("q", "k", "p", "v", "g", "beta")]
    rest = {name: x[name] for name in ("initial_state", "output_final_state")}
    assert_close(ops.fused_recurrent_comba(*positions, **rest), flash_delta.chunk_comba(**x))
    linear = take(x, "p", "beta")
    expected = flash_delta.chunk_simple_gla(**linear)
    assert_close(ops.fused_recurrent_simple_gla(**linear), expected)
    assert_close(ops.fused_chunk_simple_gla(**linear), expected)
    o, weights = ops.parallel_simple_gla(**take(linear, "initial_state", "output_final_state"))
    assert weights is None
    assert_close([o], flash_delta.chunk_simple_gla(**take(linear, "initial_state"))[:1])


def test_the_page_names_all_functions_that_are_flash_deltas_own():
    names = [name for (name,), _ in table("Ops", "function")]
    own = {name for name in names if named("Ops", name) is vars(flash_delta).get(name)}
    sentence = re.search(r"These are the functions of `flash_delta` themselves: ([^.]*)\.", SECTIONS["Ops"])[1]
    assert set(re.findall(r"`(\w+)`", sentence)) == own


def test_naive_references(x):
    gdn = take(x, "p")
    expected = flash_delta.chunk_gated_delta_rule(**gdn)
    assert_close(gated_delta_rule.naive_recurrent_gated_delta_rule(**gdn), expected)
    half = gdn | {name: gdn[name].bfloat16() for name in "qkv"}
    assert gated_delta_rule.naive_chunk_gated_delta_rule(**half, chunk_size=16)[0].dtype == torch.float32
    expected = flash_delta.chunk_comba(**x)
    assert_close(comba.naive_chunk_comba(**x, chunk_size=32), expected)
    assert_close(comba.naive_recurrent_comba(**x), expected)
    per_channel = gdn | {"g": x["g"][..., None].expand(-1, -1, -1, K)}
    expected = flash_delta.chunk_kda(**per_channel)
    assert_close(kda_naive.naive_chunk_kda(**per_channel, chunk_size=32), expected)
    assert_close(kda_naive.naive_recurrent_kda(**per_channel), expected)
    gates = {"b": torch.rand(B, T, HV, K), "w": torch.rand(B, T, HV, V)}
    of_gates = take(per_channel, "beta") | gates
    expected = flash_delta.chunk_gdn2(**of_gates)
    assert_close(gdn2.naive_chunk_gdn2(**of_gates, chunk_size=32), expected)
    assert_close(gdn2.naive_recurrent_gdn2(**of_gates), expected)
    of_pairs = gdn | {name: gdn[name][:, ::2] for name in "qg"} | {"scale": 0.3, "num_householder": 2}
    expected = flash_delta.chunk_gated_delta_product(**of_pairs)
    assert_close(gdp_naive.naive_recurrent_gated_delta_product(**take(of_pairs, "output_final_state")), expected)
    linear = take(gdn, "beta")
    expected = flash_delta.chunk_simple_gla(**linear)
    assert_close(gla_naive.naive_chunk_simple_gla(**linear, chunk_size=16), expected)
    half = {name: t.bfloat16() if name in "qkv" else t for name, t in linear.items()}
    o, state = gla_naive.naive_recurrent_simple_gla(**half)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert_close((o.float(), state), expected, 0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_l2norm(dtype):
    x = torch.randn(3, 5, 8, dtype=dtype)
    y = l2norm.L2Norm(eps=0.0)(x)
    assert y.dtype == dtype
    assert_close(
        [y], [nn.functional.normalize(x.double(), dim=-1).to(dtype)], 1e-2 if dtype == torch.bfloat16 else 1e-6
    )
    assert l2norm.l2norm(torch.zeros(4, dtype=dtype), output_dtype=torch.float32).eq(0).all()


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("size", [1.0, 1e-3], ids=["usual", "near eps"])
def test_l2norm_in_two_passes(monkeypatch, backend, dtype, size):
    """By autograd, and as in operators of torch.library, also of rows whose norm is not much larger than eps."""
    if (backend, dtype) == ("triton", torch.float64):
        pytest.skip("kernels compute in float32")
    monkeypatch.setenv("FLASH_DELTA_BACKEND", backend)
    x, dy = (torch.randn(3, 5, 12, dtype=torch.float64).mul(s).to(dtype) for s in (size, 1.0))
    x.requires_grad_()
    wide = x.detach().double().requires_grad_()
    want = wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    (dwant,) = torch.autograd.grad(want, wide, dy.double())
    y = l2norm.l2norm(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    with torch._C._AutoDispatchBelowAutograd():
        alone, rstd = l2norm.l2norm_fwd(x)
        dalone = l2norm.l2norm_bwd(alone, rstd, dy)
    assert not alone.requires_grad
    assert (rstd.dtype, rstd.shape) == (torch.promote_types(dtype, torch.float32), (3, 5))
    for name, got, t in (("y", y, want), ("dx", dx, dwant), ("y alone", alone, want), ("dx alone", dalone, dwant)):
        assert got.dtype == dtype
        assert_accurate(name, got, t, dtype)
    assert_accurate("float32", l2norm.l2norm(x, output_dtype=torch.float32), want, torch.float32)


KINDS_OF_ROWS = pytest.mark.parametrize("bounds", [None, [0, 3, 3, 70]], ids=["batch", "packed"])


@KINDS_OF_ROWS
@pytest.mark.parametrize("raw", [False, True], ids=["decays", "raw"])
def test_rule_in_two_passes(x, bounds, raw):
    """fla's autograd calls both passes like this. What they hand over may be anything."""
    rows = B if bounds is None else 1
    call = {n: (x[n][:rows] if n != "initial_state" else x[n]) for n in ("q", "k", "v", "g", "beta", "initial_state")}
    options = {"scale": 0.3, "state_v_first": True}
    if bounds is not None:
        options["cu_seqlens"] = torch.tensor(bounds)
        call["initial_state"] = torch.randn(3, HV, K, V)
    call["initial_state"] = call["initial_state"].mT.contiguous()
    gate = {"A_log": torch.randn(HV), "dt_bias": torch.randn(HV)} if raw else {}
    call = {n: t.double().requires_grad_() for n, t in (call | gate).items()}
    options["use_gate_in_kernel"] = raw
    expected = flash_delta.chunk_gated_delta_rule(**call, **options, output_final_state=True)
    outer = [torch.randn_like(t) for t in expected]
    gradients = dict(zip(call, torch.autograd.grad(expected, [*call.values()], outer), strict=True))

    chunk = importlib.import_module(f"{HERE}.ops.gated_delta_rule.chunk")
    with torch._C._AutoDispatchBelowAutograd():  # as in operators of torch.library
        g, o, A, final, initial, g_input = chunk.chunk_gated_delta_rule_fwd(**call, **options, output_final_state=True)
        kept = call | {"g": g, "A": A, "initial_state": initial}
        found = chunk.chunk_gated_delta_rule_bwd(**kept, **options, do=outer[0], dht=outer[1], g_input=g_input)
    assert A.shape == (rows, T, HV, 64)
    assert_close([o, final], [t.detach() for t in expected], 1e-12)
    names = ("q", "k", "v", "beta", "g", "initial_state", "A_log", "dt_bias")
    wanted = [gradients[n] for n in names if n in call]
    assert_close([t for t in found if t is not None], wanted, 1e-10)
    if not raw:  # what fla's forward pass returns as g and A
        sums = [part.cumsum(1) for part in call["g"].detach().tensor_split([64] if bounds is None else [3, 67], 1)]
        kept |= {"g": torch.cat(sums, 1) / math.log(2), "A": torch.zeros_like(A)}
        found = chunk.chunk_gated_delta_rule_bwd(**kept, **options, do=outer[0], dht=outer[1])
        assert_close([t for t in found if t is not None], wanted, 1e-10)


@KINDS_OF_ROWS
@pytest.mark.parametrize("whole", [False, True], ids=["bare", "all"])
def test_convolution_in_two_passes(bounds, whole):
    rows = 2 if bounds is None else 1
    call = {"x": torch.randn(rows, T, 6), "weight": torch.randn(6, 4)}
    if whole:
        more = {"bias": torch.randn(6), "residual": torch.randn(rows, T, 6)}
        call |= more | {"initial_state": torch.randn(rows if bounds is None else 3, 6, 4)}
    call = {n: t.double().requires_grad_() for n, t in call.items()}
    options = {"activation": "swish" if whole else None, "cu_seqlens": None if bounds is None else torch.tensor(bounds)}
    expected = causal_conv1d(**call, **options, output_final_state=True)
    outer = [torch.randn_like(t) for t in expected]
    gradients = dict(zip(call, torch.autograd.grad(expected, [*call.values()], outer), strict=True))

    given = {"bias": None, "residual": None} | call
    with torch._C._AutoDispatchBelowAutograd():
        y, final = conv_ops.causal_conv1d_fwd(**given, **options, output_final_state=True)
        found = conv_ops.causal_conv1d_bwd(**given, **options, dy=outer[0], dht=outer[1])
        dx, *_ = conv_ops.causal_conv1d_bwd(**given, **options, dy=outer[0], dht=None)
    assert_close([y, final], [t.detach() for t in expected], 1e-12)
    names = ("x", "weight", "bias", "residual", "initial_state")
    assert_close([t for t in found if t is not None], [gradients[n] for n in names if n in call], 1e-12)
    alone = causal_conv1d(**call, **options)[0]
    assert_close([dx], torch.autograd.grad(alone, call["x"], outer[0]), 1e-12)


BOUNDS_OF_ROWS = [[0, 13, 40, 70], [0, 35, 35, 36, 70], [0, 70], [0, 1, 2, 69, 70]]


def context_of_rank(patch, bounds, rank, ranks, layout="contiguous"):
    """Made as on that rank of a group."""
    store = torch.distributed.HashStore()
    group = torch.distributed.ProcessGroup(store, 0, 1)
    patch.setattr(torch.distributed, "get_rank", lambda _: rank)
    patch.setattr(torch.distributed, "get_world_size", lambda _: ranks)
    return cp.build_cp_context(torch.tensor(bounds), group, conv1d_kernel_size=4, layout=layout)


OF_A_RANK = ("pre_num_conv_tokens", "pre_num_ranks", "post_num_ranks", "is_first_rank", "is_last_rank")


@pytest.mark.parametrize("bounds", BOUNDS_OF_ROWS, ids=str)
def test_context_of_a_row(monkeypatch, bounds):
    x = torch.arange(70)
    sequence = torch.bucketize(x, torch.tensor(bounds), right=True)
    for ranks in (2, 5):
        for rank, own in enumerate(x.chunk(ranks)):
            context = context_of_rank(monkeypatch, bounds, rank, ranks)
            local = context.cu_seqlens.tolist()
            starts = [0, *(sequence[own].diff().nonzero() + 1).flatten().tolist(), len(own)]
            assert (local, context.cu_seqlens.dtype) == (starts, torch.int32)
            assert context.conv1d_kernel_size == 4
            assert [getattr(context, name) for name in OF_A_RANK] == around(sequence, x.chunk(ranks), rank)
            assert (context.layout, context.num_seqs, context.part_len) == ("contiguous", len(local) - 1, None)


def around(sequence, parts, place):
    """What `OF_A_RANK` names, counted token by token."""
    first, last = (sequence == sequence[parts[place][end]] for end in (0, -1))
    before, after = (
        sum(int(same[p].any()) for p in ps) for same, ps in ((first, parts[:place]), (last, parts[place + 1 :]))
    )
    return [int(first[: parts[place][0]].sum()), before, after, before == 0, after == 0]


@pytest.mark.parametrize("bounds", BOUNDS_OF_ROWS, ids=str)
def test_context_of_a_row_in_zigzag(monkeypatch, bounds):
    x = torch.arange(70)
    sequence = torch.bucketize(x, torch.tensor(bounds), right=True)
    for ranks in (1, 5, 7):
        parts = x.chunk(2 * ranks)
        for rank in range(ranks):
            context, places = context_of_rank(monkeypatch, bounds, rank, ranks, "zigzag"), (rank, 2 * ranks - 1 - rank)
            own = torch.cat([parts[place] for place in places])
            assert torch.equal(context.context.shard(x, dim=0), own)
            borders = (sequence[own].diff() != 0) | (torch.arange(1, len(own)) == len(own) // 2)
            assert context.cu_seqlens.tolist() == [0, *(borders.nonzero() + 1).flatten().tolist(), len(own)]
            counted = zip(*(around(sequence, parts, place) for place in places), strict=True)
            names = [f"{name.removesuffix('_rank')}_by_part" for name in OF_A_RANK]
            assert [getattr(context, name) for name in names] == list(counted)
            assert context.front_num_seqs == len(sequence[parts[rank]].unique())
            assert (context.layout, context.part_len, context.pre_num_ranks) == ("zigzag", len(own) // 2, None)


def test_copies_and_contexts_without_a_group(monkeypatch, x):
    bounds = torch.tensor([0, 13, 40, 70])
    made = cp.context.get_cp_cu_seqlens(bounds, world_size=5, rank=2)
    assert (made.is_cp_enabled, made.group) == (False, None)
    inside = context_of_rank(monkeypatch, bounds.tolist(), 2, 5)
    assert (inside.is_cp_enabled, inside.cu_seqlens.tolist()) == (True, made.cu_seqlens.tolist())
    other = inside.copy_for_backward()
    inside.cu_seqlens.zero_()
    assert other.cu_seqlens.tolist() == made.cu_seqlens.tolist()
    assert (other.context, other.pre_num_ranks) == (inside.context, inside.pre_num_ranks)
    call = {name: x[name][:1, :14] for name in ("q", "k", "v", "g", "beta")}
    with pytest.raises(ValueError, match=r"cp_context: expected a flash_delta.parallel.ContextParallel"):
        flash_delta.chunk_gated_delta_rule(**call, cp_context=made)


def test_context_refuses(monkeypatch):
    with pytest.raises(ValueError, match=r"cu_seqlens: expected a number of tokens above 0 that 3 ranks divide"):
        context_of_rank(monkeypatch, [0, 70], 0, 3)
    with pytest.raises(ValueError, match=r"a number of tokens above 0 that 6 parts, two for each rank, divide, got 70"):
        context_of_rank(monkeypatch, [0, 70], 0, 3, "zigzag")
    with pytest.raises(ValueError, match=r"layout: expected 'contiguous' or 'zigzag', got 'striped'"):
        context_of_rank(monkeypatch, [0, 70], 0, 1, "striped")
    with pytest.raises(ValueError, match=r"build_cp_context: group: expected a process group, got None"):
        cp.build_cp_context(torch.tensor([0, 70]), None)
    for wrong, bounds, numbers in (
        ("group: expected a process group, or numbers as world_size and rank, got None", [0, 70], {}),
        ("world_size: expected at least 1, got 0", [0, 70], {"world_size": 0, "rank": 0}),
        ("rank: expected a number from 0 to 1, got 5", [0, 70], {"world_size": 2, "rank": 5}),
        ("cu_seqlens: expected bounds that start at 0 and do not decrease", [0, 9, 8], {"world_size": 2, "rank": 0}),
    ):
        with pytest.raises(ValueError, match=wrong):
            cp.context.get_cp_cu_seqlens(torch.tensor(bounds), **numbers)
    group = context_of_rank(monkeypatch, [0, 70], 0, 2).group
    with pytest.raises(ValueError, match=r"rank: expected None or the group's, 0, got 1"):
        cp.context.get_cp_cu_seqlens(torch.tensor([0, 70]), rank=1, group=group)
    with pytest.raises(ValueError, match="use_tf32x3_affine_chain: expected True, got False"):
        cp.context.get_cp_cu_seqlens(torch.tensor([0, 70]), use_tf32x3_affine_chain=False)


def test_rule_on_a_row_of_ranks(x):
    """The row has one rank. `make engines` tests more."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        call, bounds = {name: x[name][:1] for name in ("q", "k", "v", "g", "beta")}, torch.tensor([0, 33, 70])
        context = cp.build_cp_context(bounds, torch.distributed.group.WORLD, cu_seqlens_cpu=bounds)
        conv, rows = modules.ShortConvolution(6, 4), torch.randn(1, T, 6)
        for split in (context, context.context):
            y, state = conv(rows, residual=rows, cp_context=split)
            assert state is None
            assert_close([y], [conv(rows, residual=rows, cu_seqlens=bounds)[0]], 0)
        for argument in ({"output_final_state": True}, {"cu_seqlens": bounds}, {"cache": torch.zeros(2, 6, 4)}):
            with pytest.raises(ValueError, match=r"causal_conv1d: \w+: expected .*cp_context"):
                conv(rows, **argument, cp_context=context)
        o, _ = flash_delta.chunk_gated_delta_rule(**call, cp_context=context)
        assert_close([o], [flash_delta.chunk_gated_delta_rule(**call, cu_seqlens=bounds)[0]])
        for exchange in (cp.conv_cp_send_recv_fwd, cp.conv_cp_send_recv_bwd):
            assert exchange(o, torch.distributed.group.WORLD).eq(0).all()
    finally:
        torch.distributed.destroy_process_group()


def test_recurrent_delta_rule_has_gradients(x):
    bare = take(x, "p", "g")
    for name in ("q", "k", "v", "beta"):
        bare[name] = bare[name].requires_grad_()
    names = [bare[name] for name in ("q", "k", "v", "beta")]
    actual = torch.autograd.grad(ops.fused_recurrent_delta_rule(**bare)[0].sum(), names)
    assert_close(actual, torch.autograd.grad(flash_delta.chunk_delta_rule(**bare)[0].sum(), names), 1e-4)


def test_old_and_idle_names(x):
    gdn = take(x, "p")
    expected = flash_delta.chunk_gated_delta_rule(**gdn)
    turned = gdn | {"initial_state": x["initial_state"].mT, "transpose_state_layout": True}
    for op in (ops.chunk_gated_delta_rule, ops.fused_recurrent_gated_delta_rule):
        with pytest.warns(DeprecationWarning, match="state_v_first"):
            o, state = op(**turned)
        assert_close((o, state.mT), expected)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        o, state = ops.fused_recurrent_simple_gla(**take(turned, "beta"))
    assert_close((o, state.mT), flash_delta.chunk_simple_gla(**take(gdn, "beta")))
    idle = ops.chunk_gated_delta_rule(**gdn, chunk_indices=torch.zeros(3, 2, dtype=torch.long), chunk_size=64)
    assert_close(idle, expected, 0)
    kda = gdn | {"g": x["g"][..., None].expand(-1, -1, -1, K)}
    graphed = ops.chunk_kda(**kda, use_graph=True, max_num_seqs=B, safe_gate=True)
    assert_close(graphed, flash_delta.chunk_kda(**kda), 0)
    _, _, states = ops.chunk_kda(**kda, return_intermediate_states=True)
    assert states.shape == (B, 2, HV, K, V)
    kda |= {"initial_state": kda["initial_state"].mT, "state_v_first": True}
    _, _, other = ops.chunk_kda(**kda, return_intermediate_states=True)
    assert_close(other, states.mT, 0)


REFUSED = {
    "chunk_gated_delta_rule": [{"cp_context": object()}, {"chunk_size": 128}],
    "chunk_delta_rule": [{"head_first": True}],
    "chunk_simple_gla": [{"head_first": True}],
    "fused_recurrent_gated_delta_rule": [{"gv": torch.zeros(1)}],
    "chunk_kda": [{"cp_context": object()}, {"max_num_seqs": 9}, {"lower_bound": -9.0}],
    "fused_recurrent_simple_gla": [{"reverse": True}],
    "parallel_simple_gla": [{"output_attentions": True}],
}


@pytest.mark.parametrize(
    ("name", "option"), [pytest.param(n, o, id=f"{n}-{next(iter(o))}") for n, many in REFUSED.items() for o in many]
)
def test_refused(x, name, option):
    op = getattr(ops, name)
    given = {n: value for n, value in x.items() if n in inspect.signature(op).parameters}
    if name == "chunk_kda":
        given["g"] = x["g"][..., None].expand(-1, -1, -1, K)
    (argument,) = option
    with pytest.raises(ValueError, match=f"^{name}: {argument}: expected .*, got "):
        op(**given, **option)


def test_convolution():
    torch.manual_seed(0)
    x, residual = torch.randn(2, 3, 9, 6)
    conv = modules.ShortConvolution(6, 4, bias=True, activation="swish", use_fast_conv1d=True)
    own = own_modules.ShortConvolution(6, 4, bias=True)
    own.load_state_dict(conv.state_dict())
    y, state = own(x, output_final_state=True)
    assert_close(conv(x, residual, output_final_state=True), (y + residual, state), 0)
    assert conv(x)[1] is None
    heads = causal_conv1d(x.unflatten(-1, (2, 3)), conv.weight.squeeze(1), conv.bias, activation="silu", backend="mix")
    assert_close([heads[0]], [y.unflatten(-1, (2, 3))], 0)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[0, :4] = 0
    assert_close([conv(x, mask=mask)[0][0, 4:]], [own(x[:1, 4:])[0][0]], 1e-6)
    with pytest.raises(ValueError, match=r"mask: expected bool or integers, .* got torch.float32"):
        conv(x, mask=torch.zeros(3, 9))
    assert conv.state_size == 24
    assert conv.kernel_size == (4,)
    assert modules.ShortConvolution(6, 4, device="meta", dtype=torch.bfloat16).weight.is_meta


@pytest.mark.parametrize("packed", [False, True])
def test_convolution_updates_its_cache(packed):
    torch.manual_seed(0)
    x, conv = torch.randn(3, 7, 6), modules.ShortConvolution(6, 4)
    expected, last = conv(x, output_final_state=True)
    _, cache = conv(x[:, :-1], output_final_state=True)
    cache, token, bounds = cache.detach(), x[:, -1:], None
    if packed:
        token, bounds = token.transpose(0, 1), torch.arange(4)
    with torch.no_grad():
        y, none = conv(token, cache=cache, cu_seqlens=bounds)
        again, returned = conv.step(token, None, cache, output_final_state=True, cu_seqlens=bounds)
    assert none is None
    assert returned is cache
    assert_close([y.reshape(3, 6)], [expected[:, -1]], 1e-6)
    assert_close([cache[..., -2], cache[..., 0]], [last[..., -1], last[..., 1]], 0)
    weight, cache = conv.weight.squeeze(1), last.detach().roll(1, -1)
    one, same = causal_conv1d_update(token, cache, token, weight, activation="silu")
    assert same is cache
    assert one.shape == again.shape == token.shape


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("cp_context", lambda c, x: c(x, cp_context=object())),
        ("seq_idx", lambda c, x: c(x, seq_idx=torch.zeros(1))),
        ("mask", lambda c, x: c(x[:1], mask=torch.ones(1, 5), cu_seqlens=torch.tensor([0, 5]))),
        ("mask", lambda c, x: c(x, mask=torch.ones(2, 4))),
        ("cu_seqlens", lambda c, x: c(x[:1], cu_seqlens=[0, 5])),
        ("weight", lambda c, x: causal_conv1d(x)),
        ("weight", lambda c, x: causal_conv1d_update(x[:, 0], torch.zeros(2, 6, 4))),
        ("backend", lambda c, x: modules.ShortConvolution(6, 4, backend="tilelang")),
        ("bias", lambda c, x: modules.RMSNorm(6, bias=True)),
    ],
)
def test_modules_refuse(argument, call):
    with pytest.raises(ValueError, match=f": {argument}: expected "):
        call(modules.ShortConvolution(6, 4), torch.randn(2, 5, 6))


@pytest.mark.parametrize("gated", [False, True])
def test_norms(gated):
    torch.manual_seed(0)
    x, g, residual = torch.randn(3, 5, 6)
    gate = (g,) if gated else ()
    norm = (modules.FusedRMSNormGated if gated else modules.RMSNorm)(6, dtype=torch.bfloat16)
    own = (own_modules.GatedRMSNorm if gated else own_modules.RMSNorm)(6)
    assert norm.weight.dtype == torch.bfloat16
    assert norm.state_dict().keys() == own.state_dict().keys()
    assert_close([norm(x, *gate)], [own(x, *gate)], 0)
    y, total = norm(x, *gate, residual, prenorm=True)
    assert_close([y, total], [own(x + residual, *gate), x + residual], 0)
    half, total = norm(x.bfloat16(), *gate, prenorm=True, residual_in_fp32=True)
    assert (half.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    bare = type(norm)(6, elementwise_affine=False)
    assert_close([bare(x, *gate)], [own(x, *gate)], 0)
    assert not bare.state_dict()
    assert not list(bare.parameters())


KINDS = {
    "gdn": ("GatedDeltaNet", {"num_v_heads": 4, "conv_bias": True}),
    "gdn-bare": ("GatedDeltaNet", {"use_gate": False, "use_short_conv": False, "allow_neg_eigval": True}),
    "gdn2": ("GatedDeltaNet2", {"num_v_heads": 4, "expand_v": 2, "allow_neg_eigval": True}),
    "gdp": ("GatedDeltaProduct", {"num_v_heads": 4, "conv_bias": True, "num_householder": 3}),
    "kda": ("KimiDeltaAttention", {"num_v_heads": 4, "expand_v": 2, "safe_gate": True, "lower_bound": -5.0}),
}
HEADS = {"hidden_size": 12, "head_dim": 4, "num_heads": 2, "layer_idx": 1}


class States(list):
    """The least that fla's protocol for caches asks of one."""

    def update(self, recurrent_state, conv_state, layer_idx, offset):
        self[layer_idx : layer_idx + 1] = [{"recurrent_state": recurrent_state, "conv_state": conv_state}]


@pytest.fixture(params=KINDS)
def pair(request):
    torch.manual_seed(0)
    name, options = KINDS[request.param]
    theirs = getattr(layers, name)(**HEADS, **options)
    ours = getattr(own_layers, name)(**HEADS, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs.double(), ours.double()


def test_layer_computes_what_ours_does(pair):
    theirs, ours = pair
    assert theirs.A_log._no_weight_decay
    assert theirs.dt_bias._no_weight_decay
    x, mask = torch.randn(2, 20, 12, dtype=torch.float64), torch.ones(2, 20, dtype=torch.bool)
    mask[0, :7] = 0
    y, weights, cache = theirs(x, attention_mask=mask)
    assert weights is None
    assert cache is None
    assert_close([y], [ours(x, attention_mask=mask)], 0)
    bounds = torch.tensor([0, 3, 20])
    assert_close(theirs(x[:1], cu_seqlens=bounds)[:1], [ours(x[:1], cu_seqlens=bounds)], 0)


def test_layer_continues_from_a_cache(pair):
    layer, _ = pair
    x, cache = torch.randn(2, 20, 12, dtype=torch.float64), States([None])
    expected, _, _ = layer(x)
    parts = [layer(part, past_key_values=cache, use_cache=True)[0] for part in x.split([11, 8, 1], 1)]
    assert_close([torch.cat(parts, 1)], [expected], 1e-10)
    state = cache[1]["recurrent_state"]
    widths = (layer.head_v_dim, layer.head_k_dim)
    assert state.shape == (2, layer.num_v_heads, *(widths if layer.state_v_first else widths[::-1]))
    layer(x, past_key_values=cache)
    assert cache[1]["recurrent_state"] is state


def test_layer_refuses():
    layer, x = layers.GatedDeltaNet(**(HEADS | {"layer_idx": None})), torch.randn(1, 3, 12)
    with pytest.raises(ValueError, match="GatedDeltaNet: layer_idx: expected"):
        layer(x, past_key_values=States())
    with pytest.raises(ValueError, match="GatedDeltaNet: output_attentions: expected False"):
        layer(x, output_attentions=True)
    with pytest.raises(ValueError, match="attention_mask: expected None together with cu_seqlens"):
        layer(x, torch.ones(1, 3), cu_seqlens=torch.tensor([0, 3]))


# Beside fla itself, where it can be imported; its kernels are not asked.


@pytest.fixture(scope="module")
def fla():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the missing GPU
        return pytest.importorskip("fla.layers")


@pytest.mark.parametrize(("section", "name", "documented"), FUNCTIONS)
def test_signature_covers_fla(fla, section, name, documented):
    theirs, ours = (named(section, name, root) for root in ("fla", HERE))
    if inspect.isbuiltin(theirs) or inspect.ismethod(theirs):
        pytest.skip("fla has an autograd function's apply")
    taken = {n: p for n, p in arguments_of(theirs).items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    mine = arguments_of(ours)
    assert list(mine)[: len(taken)] == list(taken)
    defaults = {n: p.default for n, p in taken.items() if p.default is not p.empty}
    assert {n: mine[n].default for n in defaults} == defaults
    source = inspect.getsource(theirs.__init__ if inspect.isclass(theirs) else inspect.unwrap(theirs))
    hidden = set(re.findall(r"""kwargs\.(?:get|pop)\(\s*['"](\w+)|['"](\w+)['"] in kwargs""", source))
    assert {n for pair in hidden for n in pair if n} <= mine.keys()


@pytest.mark.parametrize(("path", "names"), PATHS, ids=lambda x: x if isinstance(x, str) else "")
def test_paths_are_those_of_fla(fla, path, names):
    module = importlib.import_module("fla" + path)
    assert all(hasattr(module, name) for name in names if (path, name) not in ONLY_HERE)


def test_context_is_that_of_fla(fla, monkeypatch):
    theirs = importlib.import_module("fla.ops.cp.context").get_cp_cu_seqlens
    for bounds, layout in itertools.product(BOUNDS_OF_ROWS, ("contiguous", "zigzag")):
        for rank in range(5):
            options = {"world_size": 5, "rank": rank, "conv1d_kernel_size": 4, "layout": layout}
            expected = vars(theirs(torch.tensor(bounds), **options))
            found = context_of_rank(monkeypatch, bounds, rank, 5, layout)
            left = {"group", "pre_num_ranks_dev", "post_num_ranks_dev"}
            for name in expected.keys() - left:
                ours, wanted = getattr(found, name), expected[name]
                assert ours.tolist() == wanted.tolist() if isinstance(wanted, torch.Tensor) else ours == wanted, name


@pytest.mark.parametrize("q_len", [4, 3, 1])
def test_padding_is_that_of_fla(fla, q_len):
    theirs, ours = (importlib.import_module(f"{root}.layers.utils") for root in ("fla", HERE))
    mask, x = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]]), torch.randn(2, q_len, 5)
    found, wanted = (utils.unpad_hidden_states(x, None, mask, q_len) for utils in (ours, theirs))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    rows, indices, _ = found
    padded = (utils.repad_hidden_states(rows, indices, 2, q_len) for utils in (ours, theirs))
    assert torch.equal(*padded)


def test_absences_are_listed(fla):
    listed = tuple(f".{name}" for names, _ in table("What is not there", "module") for name in names)
    assert [module for module, _ in absent(Path(fla.__file__).parents[1]) if not module.startswith(listed)] == []


def test_naive_references_are_those_of_fla(fla, x):
    equal = x | {name: x[name].repeat_interleave(HV // H, 2) for name in ("q", "k", "p")}
    theirs = importlib.import_module("fla.ops.gated_delta_rule.naive")
    for name in ("naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule"):
        given = take(equal, "p")
        assert_close(getattr(gated_delta_rule, name)(**given), getattr(theirs, name)(**given), 1e-4)
    theirs = importlib.import_module("fla.ops.comba.naive")
    assert_close(comba.naive_chunk_comba(**equal), theirs.naive_chunk_comba(**equal), 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_is_that_of_fla(fla, kind):
    name, options = KINDS[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the missing convolution
        theirs = getattr(fla, name)(**HEADS, **options)
    ours = getattr(layers, name)(**HEADS, **options)
    assert {n: p.shape for n, p in ours.state_dict().items()} == {n: p.shape for n, p in theirs.state_dict().items()}
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    cache = importlib.import_module("fla.models.utils").Cache()
    x = torch.randn(2, 20, HEADS["hidden_size"])
    parts = [ours(part, past_key_values=cache, use_cache=True)[0] for part in x.split([11, 9], 1)]
    assert_close([torch.cat(parts, 1)], ours(x)[:1])
    assert cache.get_seq_length(HEADS["layer_idx"]) == 20


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("norm", [modules.RMSNorm, modules.FusedRMSNormGated])
def test_what_code_for_fla_reads_of_a_norm(norm, affine):
    """It looks at ``bias``, ``hidden_size`` and ``elementwise_affine``, and initialises again."""
    made = norm(6, elementwise_affine=affine)
    assert made.bias is None
    assert (made.hidden_size, made.elementwise_affine) == (6, affine)
    assert "bias" not in made.state_dict()
    with torch.no_grad():
        made.weight.zero_()
    made.reset_parameters()
    assert made.weight.eq(1).all()


def test_what_is_absent(tmp_path):
    """Modules, names and arguments that users of fla have; not its kernels and insides."""
    kda = tmp_path / "ops" / "kda"
    kda.mkdir(parents=True)
    (tmp_path / "layers").mkdir()
    (kda / "__init__.py").write_text("def nobody_looks_here(): ...")
    (kda / "chunk.py").write_text(
        "def chunk_kda(q, k, novel): ...\n@triton.jit\ndef chunk_step(x): ...\ndef chunk_kda_fwd(q): ...\n"
        "def _hidden(): ...\ndef chunk_again(q): ...\nclass ChunkFunction: ...\n"
    )
    (kda / "wy_fast.py").write_text("def inside(q): ...")
    (kda / "naive.py").write_text("def naive_chunk_kda(q, k): ...")
    (tmp_path / "layers" / "kda.py").write_text(
        "class KimiDeltaAttention:\n    def __init__(self, hidden_size, novel): ..."
    )
    (tmp_path / "layers" / "comba.py").write_text("class Novel: ...")
    (tmp_path / "layers" / "utils.py").write_text("class Index(torch.autograd.Function): ...\ndef novel(x): ...")
    (tmp_path / "ops" / "cp").mkdir()
    (tmp_path / "ops" / "cp" / "context.py").write_text("def build_cp_context(cu_seqlens, group, novel): ...")
    (tmp_path / "ops" / "comba").mkdir()
    (tmp_path / "ops" / "comba" / "novel.py").write_text("def comba_of_another_kind(q): ...")
    assert list(absent(tmp_path)) == [
        (".ops.comba.novel", ["comba_of_another_kind"]),
        (".ops.cp.context", ["build_cp_context(novel)"]),
        (".ops.kda.chunk", ["chunk_kda(novel)", "chunk_again"]),
        (".layers.comba", ["Novel"]),
        (".layers.kda", ["KimiDeltaAttention(novel)"]),
        (".layers.utils", ["novel"]),
    ]


@pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="fla is installed")
def test_without_fla_there_is_nothing_to_compare_with(capsys):
    assert compare() == 2
    assert "expected an installed fla" in capsys.readouterr().err
