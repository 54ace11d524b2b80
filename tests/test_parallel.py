"""A row split over ranks equals the row on one device: gloo on processes of this machine, results against float64."""

import random as python_random

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from parallel_ranks import LayerSplit, Split, global_inputs, layer_inputs, states_of, work
from tiny_layers import DELTA_LAYERS, D, random
from tiny_model import build, tokens

import flash_delta
from flash_delta.parallel import ContextParallel
from flash_delta.parallel.split import Split as Plan
from flash_delta.testing import MEMBERS, Case, assert_accurate, make_inputs, truth

RAW = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True}
ALL = (torch.float64, torch.float32, torch.bfloat16)
KIN = ("delta-rule", "comba", "simple-gla")


def case(name, why, lengths, T=None, **options):
    return Case(name, why, B=1, T=sum(lengths) if T is None else T, lengths=lengths, **{"K": 8, "V": 12} | options)


SPLITS = {
    2: [
        Split(case("one", "one sequence, even split", (150,), options=RAW), dtypes=ALL),
        Split(case("border", "a sequence ends where a rank does", (70, 80)), tokens=(70, 80)),
        Split(case("all-left", "a rank has nothing", (30,)), tokens=(30, 0)),
        Split(case("all-right", "the first rank has nothing", (0, 30, 0)), tokens=(0, 30)),
        Split(case("values-first", "states are [N, HV, V, K]", (90,), options={"state_v_first": True})),
    ],
    4: [
        Split(case("uneven", "shards of 0, 1 and 2 tokens inside a sequence", (100,)), tokens=(97, 0, 1, 2)),
        Split(
            case("packed", "sequences across ranks, empty ones at borders, NaN rows behind", (0, 30, 0, 50, 1, 0), T=90,
                 options=RAW),
            tokens=(30, 1, 40, 19), dtypes=ALL,
        ),
        Split(case("padding", "ranks with nothing but padding", (20, 5), T=60), tokens=(22, 8, 20, 10)),
        Split(case("short", "fewer tokens than ranks", (1, 2))),
        Split(case("grouped", "a group that is no power of two", (130,), HV=6, options=RAW), tokens=(65, 2, 1, 62)),
        Split(case("strong", "little is left of a state after a token", (40, 90), decay="strong"), dtypes=ALL[:2]),
        Split(case("undecayed", "everything is left of it", (140,), decay="zero"), dtypes=ALL[:2]),
        Split(case("no-state", "states start from zero", (10, 60), initial_state=False), tokens=(5, 30, 30, 5)),
        Split(case("no-sequences", "N = 0", (), T=4), members=("gdn",), tokens=(2, 0, 1, 1)),
        Split(
            case("bounded", "negative eigenvalues, the bounded gate", (64, 66),
                 options=RAW | {"lower_bound": -5.0, "allow_neg_eigval": True}),
            members=("kda",),
        ),
        Split(case("strided", "a group that is not the world", (75,)), ranks=(0, 2, 3)),
        Split(case("kin", "sequences across ranks, other members", (0, 30, 50, 1), T=90), KIN, (30, 1, 40, 19), ALL),
        Split(
            case("kin-raw", "activations and norms in the op", (100,), options=RAW), members=("comba",), dtypes=ALL[:2],
        ),
        Split(
            case("kin-norm", "norms and the sigmoid in the op", (9, 80),
                 options={name: RAW[name] for name in list(RAW)[:2]}),
            members=("delta-rule",), dtypes=ALL[:2],
        ),
    ],
}  # fmt: skip
LAYERS = {
    2: [
        LayerSplit("layer-even", "gdn", (40,), (20, 20)),
        LayerSplit("layer-bare", "gdn-bare", (9, 12), (15, 6)),
        LayerSplit("layer-delta", "delta", (9, 12), (15, 6)),
        LayerSplit("layer-comba", "comba", (9, 12), (15, 6)),
        LayerSplit("layer-gla", "gla-grouped", (9, 12), (15, 6)),
    ],
    4: [
        LayerSplit("layer-tiny", "gdn-grouped", (12,), (1, 0, 2, 9)),
        LayerSplit("layer-packed", "kda-bounded", (2, 0, 30, 1, 7), (1, 3, 28, 11)),
        LayerSplit("layer-stateless", "kda", (6, 20), (7, 1, 1, 17), states=False),
    ],
}
MESH = LayerSplit("mesh", "gdn-grouped", (13, 22), (20, 15), states=False)


@pytest.mark.parametrize("size", SPLITS)
def test_ranks_equal_one_device(tmp_path, size):
    """Starting processes takes longer than all their cases together, so one start runs them all."""
    mesh = MESH if size == 4 else None
    mp.spawn(work, (size, str(tmp_path), SPLITS[size], LAYERS[size], mesh), nprocs=size)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for split in SPLITS[size]:
        for member in split.members:
            for dtype in split.dtypes:
                key = split.case.name, member, dtype
                check_op(split, member, dtype, [ranks[r][key] for r in split.ranks or range(size)])
    for split in LAYERS[size]:
        check_layer(split, [rank[split.name] for rank in ranks])
    if mesh is not None:
        check_mesh([rank[mesh.name] for rank in ranks])


def check_op(split, member, dtype, parts):
    x, bounds = global_inputs(split, member, dtype)
    want = truth(MEMBERS[member], x | {"cu_seqlens": torch.tensor(bounds)})
    for name, t in want.items():
        if name == "final_state":
            got = torch.cat([part[name] for part in parts])
        elif name == "dinitial_state":
            got = sum_of_rows(t, parts, name)
        elif name in ("dA_log", "ddt_bias"):
            got = sum(part[name] for part in parts)
        else:
            got = torch.cat([part[name] for part in parts], dim=1)
        assert_accurate(f"{split.case.name}, {member}, {dtype}: {name}", got, t, dtype)


def sum_of_rows(like, parts, name):
    """Ranks' rows [n, ...] from ``first`` on, added up."""
    total = torch.zeros_like(like)
    for part in parts:
        total[part["first"] :][: len(part[name])] += part[name]
    return total


def check_layer(split, parts):
    def check(name, got, want):
        assert_accurate(f"{split.name}: {name}", got, want, torch.float64)

    layer, x, past = layer_inputs(split)
    given = states_of(past)
    y = layer(x, state=past, cu_seqlens=split.bounds)
    finals = states_of(past)
    dys = [random(*x.shape, seed=8), *(random(*s.shape, seed=9) for s in finals)]
    leaves = [x, *layer.parameters(), *given]
    dx, *gradients = torch.autograd.grad((y, *finals), leaves, dys)
    check("y", torch.cat([p["y"] for p in parts], dim=1), y)
    check("dx", torch.cat([p["dx"] for p in parts], dim=1), dx)
    for i, (name, _) in enumerate(layer.named_parameters()):
        check(name, sum(p["dparameters"][i] for p in parts), gradients.pop(0))
    for i, final in enumerate(finals):
        check("final state", torch.cat([p["finals"][i] for p in parts]), final)
        dstates = [{"first": p["first"], "d": p["dstates"][i]} for p in parts]
        check("initial state", sum_of_rows(gradients[i], dstates, "d"), gradients[i])


def check_mesh(parts):
    """FSDP2 over one dimension of a mesh, context parallel over the other."""
    layer, x, _ = layer_inputs(MESH)
    ys = [layer((1 + row) * x, cu_seqlens=MESH.bounds) for row in range(2)]
    gradients = torch.autograd.grad(sum(y.square().sum() for y in ys), list(layer.parameters()))
    for row, y in enumerate(ys):
        got = torch.cat([p["y"] for p in parts if p["row"] == row], dim=1)
        assert_accurate("mesh: y", got, y, torch.float64)
    for part in parts:
        for (name, _), got, want in zip(layer.named_parameters(), part["dparameters"], gradients, strict=True):
            assert_accurate(f"mesh: {name}", got, want, torch.float64)
        assert "group: expected a DeviceMesh of one dimension, such as mesh['cp'], got" in part["refusal"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    store = tmp_path_factory.mktemp("alone") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def inputs(T):
    x = make_inputs(Case("", "", B=1, T=T), MEMBERS["kda"], torch.float64)
    x.pop("output_final_state")
    return x


def test_one_rank_is_one_device(alone):
    """The same bits, and sequences that one device would be told of by cu_seqlens."""
    x = inputs(9)
    state = x.pop("initial_state").expand(2, -1, -1, -1)
    context = ContextParallel(alone, [0, 4, 9])
    o, final = flash_delta.chunk_kda(**x, initial_state=state, output_final_state=True, cp_context=context)
    want = flash_delta.chunk_kda(
        **x, initial_state=state, output_final_state=True, cu_seqlens=context.cu_seqlens(o.device)
    )
    assert torch.equal(o, want[0])
    assert torch.equal(final, want[1])
    assert flash_delta.chunk_kda(**x, cp_context=context)[1] is None
    assert flash_delta.explain(flash_delta.chunk_kda, **x, cp_context=context).backend == "torch"


def test_second_derivatives_are_refused(alone):
    """Also of a sum, whose own gradient is a constant."""
    x = inputs(9)
    x.pop("initial_state")
    x["q"] = x["q"].detach().requires_grad_()
    o, _ = flash_delta.chunk_kda(**x, cp_context=ContextParallel(alone, [0, 4, 9]))
    (dq,) = torch.autograd.grad(o.sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="chunk_kda: a second derivative is asked for"):
        torch.autograd.grad(dq.sum(), x["q"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("group", [0, 9]), "group: expected a ProcessGroup or a DeviceMesh, got str"),
        ((None, [1, 9]), r"cu_seqlens: expected bounds \[N \+ 1\] from 0 on that do not decrease, got \[1, 9\]"),
        ((None, [0, 9, 4]), "cu_seqlens: .* got .0, 9, 4"),
        ((None, []), "cu_seqlens: .* got "),
        ((None, torch.empty(3, device="meta")), "cu_seqlens: expected bounds on the CPU.* got a tensor on meta"),
        ((None, [0, 9], [3, 6]), r"tokens_per_rank: expected 1 numbers of tokens.* got \[3, 6\]"),
        ((None, [0, 9], [8]), r"tokens_per_rank: .* at least cu_seqlens\[-1\] = 9, got \[8\]"),
    ],
)
def test_context_refuses(alone, arguments, message):
    group, *others = arguments
    with pytest.raises(ValueError, match=message):
        ContextParallel(group or alone, *others)


@pytest.mark.parametrize(
    ("T", "arguments", "message"),
    [
        (9, {"cp_context": "ring"}, "chunk_kda: cp_context: expected a flash_delta.parallel.ContextParallel, got str"),
        (8, {}, r"chunk_kda: q: expected a tensor \[1, 9, H, K\], got shape \[1, 8, 2, 16\]"),
        (9, {"cu_seqlens": torch.tensor([0, 9])}, "chunk_kda: cu_seqlens: expected None .cp_context has the bounds"),
        (9, {"cu_seqlens_cpu": [0, 9]}, "chunk_kda: cu_seqlens_cpu: expected None .cp_context has the bounds"),
        (9, {"return_intermediate_states": True}, "chunk_kda: return_intermediate_states: expected False with cp_con"),
    ],
)
def test_op_refuses(alone, T, arguments, message):
    arguments = {"cp_context": ContextParallel(alone, [0, 9])} | arguments
    with pytest.raises(ValueError, match=message):
        flash_delta.chunk_kda(**inputs(T) | arguments)


@pytest.mark.parametrize(
    ("layer", "arguments", "message"),
    [
        (
            "gdn",
            {"hidden_states": random(1, 8, D)},
            r"hidden_states: expected this rank's tokens \[1, 9, D\] .* \[1, 8, ",
        ),
        ("gdn", {"attention_mask": torch.ones(1, 9)}, "attention_mask: expected None with cp_context"),
        ("gdn", {"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens: expected None with cp_context"),
        ("gdn-stepped", {}, "cp_context: expected None in a layer with mode 'fused_recurrent'"),
    ],
)
def test_layer_refuses(alone, layer, arguments, message):
    arguments = {"hidden_states": random(1, 9, D), "cp_context": ContextParallel(alone, [0, 9])} | arguments
    with pytest.raises(ValueError, match=message):
        DELTA_LAYERS[layer]().double()(**arguments)


def test_model_refuses(alone):
    model, ids, context = build("gdn"), tokens(1, 9), ContextParallel(alone, [0, 9])
    with pytest.raises(ValueError, match="labels: expected None with cp_context"):
        model(ids, labels=ids, cp_context=context)
    with pytest.raises(ValueError, match="use_cache: expected False with cp_context"):
        model(ids, use_cache=True, cp_context=context)


def test_attention_on_one_rank_is_the_packed_one(alone):
    model, ids = build("hybrid"), tokens(1, 9)
    want = model(ids, cu_seqlens=torch.tensor([0, 4, 7, 9])).logits
    assert torch.equal(model(ids, cp_context=ContextParallel(alone, [0, 4, 7, 9])).logits, want)


def test_shard_refuses(alone):
    with pytest.raises(ValueError, match=r"x: expected 9 tokens, .* in axis 1, got shape \[1, 8\]"):
        ContextParallel(alone, [0, 9]).shard(torch.zeros(1, 8))


@pytest.mark.parametrize("seed", range(20))
def test_every_split_is_a_partition(seed):
    """Rows, bounds, neighbours and histories against a list of each token's sequence and rank."""
    draw = python_random.Random(seed)
    lengths = [draw.choice((0, 0, 1, 2, 5, 17)) for _ in range(draw.randint(0, 6))]
    cuts = sorted(draw.choices(range(sum(lengths) + 3), k=draw.randint(0, 5)))
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    plan = Plan(tuple(bounds), (0, *cuts, max([*cuts[-1:], bounds[-1]])))
    ranks = range(len(plan.starts) - 1)
    sequence = [n for n, length in enumerate(lengths) for _ in range(length)]
    seen = []
    for rank in ranks:
        start, end = plan.starts[rank : rank + 2]
        rows, own = plan.rows(rank), plan.bounds(rank)
        assert len(own) == len(rows) + 1
        assert own[0] == 0
        for row, a, b in zip(rows, own, own[1:], strict=False):
            assert [start + t for t in range(a, b)] == [t for t in range(start, end) if sequence[t : t + 1] == [row]]
        inside = 0 < start < len(sequence) and sequence[start - 1] == sequence[start]
        assert plan.crossed(rank) == inside
        seen += rows[plan.crossed(rank) :]
        holders = {
            r
            for r in ranks
            for t in range(*plan.starts[r : r + 2])
            if inside and sequence[t : t + 1] == [sequence[start]]
        }
        assert {r for r in plan.left(rank) if plan.tokens(r)} == {r for r in holders if r < rank}
        if inside:
            assert {r for r in plan.right(rank - 1) if plan.tokens(r)} == {r for r in holders if r >= rank}
            assert sum(count for _, count in plan.history(rank, 4)) == 4
    assert seen == list(range(len(lengths)))
