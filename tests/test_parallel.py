"""A row split over ranks equals the row on one device: gloo on processes of this machine, results against float64."""

import random as python_random
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as mp
from parallel_ranks import Heads, LayerSplit, Split, global_inputs, heads_inputs, layer_inputs, states_of, work
from tiny_layers import DELTA_LAYERS, D, random
from tiny_model import build, tokens

import flash_delta
from flash_delta.layers import tensor_parallel_plan
from flash_delta.parallel import ContextParallel, head_tail
from flash_delta.parallel.split import Split as Plan
from flash_delta.testing import MEMBERS, Case, assert_accurate, make_inputs, relative_error, truth

RAW = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True}
ALL = (torch.float64, torch.float32, torch.bfloat16)
KIN = ("delta-rule", "comba", "simple-gla", "gdn2")


def case(name, why, lengths, T=None, **options):
    return Case(name, why, B=1, T=sum(lengths) if T is None else T, lengths=lengths, **{"K": 8, "V": 12} | options)


SPLITS = {
    2: [
        Split(case("one", "one sequence, even split", (150,), options=RAW), dtypes=ALL),
        Split(case("border", "a sequence ends where a rank does", (70, 80)), tokens=(70, 80)),
        Split(case("all-left", "a rank has nothing", (30,)), tokens=(30, 0)),
        Split(case("all-right", "the first rank has nothing", (0, 30, 0)), tokens=(0, 30)),
        Split(case("heads-and-tails", "parts 0 and 3, and 1 and 2, of one sequence", (150,), options=RAW), dtypes=ALL,
              fragments="sequences"),
        Split(case("of-documents", "of all, also empty and short ones", (30, 0, 3, 50, 1), options=RAW), dtypes=ALL,
              fragments="sequences"),
        Split(case("of-a-row", "of a row whose documents end anywhere, and padding", (20, 0, 41, 17), T=80),
              fragments=(((0, 20), (60, 80)), ((20, 60),))),
        Split(case("values-first", "states are [N, HV, V, K]", (90,), options={"state_v_first": True})),
        Split(case("device", "bounds on the device: one sequence", (150,), options=RAW), tokens=(75, 75), dtypes=ALL,
              on_device=True),
        Split(case("device-border", "a sequence ends where a rank does", (70, 0, 80)), tokens=(70, 80), on_device=True),
        Split(case("device-left", "the same context: one ends before, and padding", (40, 20, 60), T=150),
              tokens=(70, 80), on_device=True),
        Split(case("device-nothing", "a rank has nothing", (30, 0), options={"state_v_first": True}), ("gdn",), (0, 30),
              on_device=True),
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
        Split(case("zigzag", "heads and tails of sequences", (67, 2, 40), options=RAW), (*KIN[:1], "gdn", "kda"),
              dtypes=ALL, fragments="sequences"),
        Split(case("zigzag-row", "heads and tails of the row", (50, 0, 51)), fragments="row"),
        Split(case("scattered", "any fragments, one rank with none", (0, 60, 30), T=95),
              fragments=(((0, 5), (30, 31), (70, 95)), ((31, 33), (60, 70)), ((5, 30), (33, 60)), ((40, 40),))),
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
            case("kin-raw", "activations and norms in the op", (100,), options=RAW),
            members=("comba", "gdn2"), dtypes=ALL[:2],
        ),
        Split(
            case("kin-norm", "norms and the sigmoid in the op", (9, 80),
                 options={name: RAW[name] for name in list(RAW)[:2]}),
            members=("delta-rule",), dtypes=ALL[:2],
        ),
        Split(case("device-packed", "bounds on the device: as packed", (0, 30, 0, 50, 1, 0), T=90, options=RAW),
              tokens=(30, 1, 40, 19), dtypes=ALL, on_device=True),
        Split(case("device-one", "the same context: one over all ranks", (0, 0, 90, 0, 0, 0)), tokens=(30, 1, 40, 19),
              on_device=True),
        Split(case("device-none", "the same context: nothing but padding", (0,) * 6, T=90), tokens=(30, 1, 40, 19),
              on_device=True),
        Split(case("device-uneven", "shards of 0, 1 and 2 tokens inside a sequence", (98, 2)), tokens=(97, 0, 1, 2),
              on_device=True),
        Split(case("device-states", "states start from zero", (10, 60), initial_state=False), tokens=(5, 30, 30, 5),
              on_device=True),
        Split(case("device-kin", "other members", (0, 30, 50, 1), T=90), KIN, (30, 1, 40, 19), on_device=True),
        Split(case("device-strided", "a group that is not the world", (75, 5)), tokens=(30, 20, 30), ranks=(0, 2, 3),
              on_device=True),
    ],
}  # fmt: skip
LAYERS = {
    2: [
        LayerSplit("layer-even", "gdn", (40,), (20, 20)),
        LayerSplit("layer-heads-and-tails", "gdn", (40, 3), None, fragments="sequences"),
        LayerSplit("layer-bare", "gdn-bare", (9, 12), (15, 6)),
        LayerSplit("layer-delta", "delta", (9, 12), (15, 6)),
        LayerSplit("layer-comba", "comba", (9, 12), (15, 6)),
        LayerSplit("layer-gla", "gla-grouped", (9, 12), (15, 6)),
        LayerSplit("layer-updates", "gdp", (40, 3), None, fragments="sequences"),
        LayerSplit("device-even", "gdn", (40,), (20, 20), on_device=True),
        LayerSplit("device-bare", "gdn-bare", (9, 12), (15, 6), on_device=True),
        LayerSplit("device-updates", "gdp", (21, 0), (15, 6), on_device=True),
        LayerSplit("device-attention", "attention", (9, 12), (15, 9), states=False, on_device=True),
        LayerSplit("attention-by-heads", "attention", (9, 0, 12), (15, 9), states=False),
        LayerSplit("attention-of-one", "attention", (40,), None, states=False, fragments="sequences"),
        LayerSplit("attention-alone", "attention", (12,), (0, 12), states=False),
    ],
    4: [
        LayerSplit("layer-gates", "gdn2-grouped", (9, 12), (5, 10, 6, 0)),
        LayerSplit("layer-3-updates", "gdp-grouped", (9, 12), (5, 10, 9, 0)),
        LayerSplit("layer-zigzag", "kda", (23, 0, 41), None, fragments="sequences"),
        LayerSplit("layer-short-pieces", "gdn-grouped", (12, 9), None, fragments="row"),
        LayerSplit("layer-tiny", "gdn-grouped", (12,), (1, 0, 2, 9)),
        LayerSplit("layer-packed", "kda-bounded", (2, 0, 30, 1, 7), (1, 3, 28, 11)),
        LayerSplit("layer-stateless", "kda", (6, 20), (7, 1, 1, 17), states=False),
        LayerSplit("device-tiny", "gdn-grouped", (12,), (1, 0, 2, 9), on_device=True),
        LayerSplit("device-packed", "kda-bounded", (2, 0, 30, 1, 7), (1, 3, 28, 11), on_device=True),
        LayerSplit("device-short", "gdn-grouped", (6, 3), (2, 1, 1, 5), on_device=True),
        LayerSplit("device-short-again", "gdn-grouped", (3, 6), (2, 1, 1, 5), on_device=True),
        LayerSplit("device-stateless", "kda", (6, 20), (7, 1, 1, 17), states=False, on_device=True),
        LayerSplit("device-gathered", "attention", (9, 0, 12), (5, 10, 9, 0), states=False, on_device=True),
        LayerSplit("attention-gathered", "attention", (9, 0, 12), (5, 10, 9, 0), states=False),
    ],
}
MESH = LayerSplit("mesh", "gdn-grouped", (13, 22), None, states=False, fragments="sequences")


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
    for kind in Heads().layers:
        check_heads(kind, Heads(), torch.float32, [rank["heads"][kind, torch.float32] for rank in ranks])


def check_op(split, member, dtype, parts, limits=None):
    """``limits``: the errors that are allowed, by name. Default: those of the torch backend."""
    x, bounds = global_inputs(split, member, dtype)
    want = truth(MEMBERS[member], x | {"cu_seqlens": torch.tensor(bounds)})
    for name, t in (want | {"o again": want["o"]}).items():
        if name == "final_state":
            got = ended(t, parts, lambda part: part["final_state"])
        elif name == "dinitial_state":
            got = sum_of_rows(t, parts, lambda part: part["dinitial_state"])
        elif name in ("dA_log", "ddt_bias"):
            got = sum(part[name] for part in parts)
        else:
            got = in_order(t, parts, name)
        judge(f"{split.case.name}, {member}, {dtype}: {name}", got, t, dtype, (limits or {}).get(name.split()[0]))


def judge(name, got, want, dtype, limit=None):
    """``limit``: the allowed error, if it is not that of the torch backend."""
    if limit is None:
        assert_accurate(name, got, want, dtype)
    else:
        error = relative_error(got, want)
        assert error <= limit, f"{name}: relative L2 error {error:.2e}, allowed {limit:.2e}"


def in_order(like, parts, name):
    """The whole row's tokens."""
    whole = torch.full_like(like, torch.nan, dtype=parts[0][name].dtype)
    for part in parts:
        lengths = [stop - start for start, stop in part["held"]]
        for (start, stop), t in zip(part["held"], part[name].split(lengths, 1), strict=True):
            whole[:, start:stop] = t
    return whole


def ended(like, parts, of):
    """The final states of all sequences."""
    whole = torch.full_like(like, torch.nan, dtype=of(parts[0]).dtype)
    for part in parts:
        whole[part["ended"]] = of(part)
    return whole


def sum_of_rows(like, parts, of):
    """Ranks' rows [n, ...], added up by their sequences."""
    return sum(torch.zeros_like(like).index_add(0, torch.tensor(p["rows"]).long(), of(p).to(like.dtype)) for p in parts)


def whole_layer(split, dtype=None, device="cpu"):
    """All results of a layer on one device, by name."""
    layer, x, past = layer_inputs(split, dtype, device)
    given = states_of(past)
    y = layer(x, state=past, cu_seqlens=split.bounds.to(device))
    finals = states_of(past)
    dys = [random(*x.shape, seed=8).to(x), *(random(*s.shape, seed=9).to(s) for s in finals)]
    named = dict(layer.named_parameters())
    names = ["dx", *named, *(f"initial state {i}" for i in range(len(given)))]
    gradients = torch.autograd.grad((y, *finals), [x, *named.values(), *given], dys)
    results = {"y": y, **dict(zip(names, gradients, strict=True))}
    return results | {f"final state {i}": final for i, final in enumerate(finals)}


def check_layer(split, parts, limits=None):
    """``limits``: the errors that are allowed, by name. Default: those of the torch backend."""
    want = whole_layer(split, torch.float64)
    names = [name for name, _ in layer_inputs(split)[0].named_parameters()]
    got = {name: in_order(want[name], parts, name) for name in ("y", "dx")}
    for i, name in enumerate(names):
        got[name] = sum(p["dparameters"][i].double() for p in parts)
    for i in range(len(parts[0]["finals"])):
        final, initial = f"final state {i}", f"initial state {i}"
        got[final] = ended(want[final], parts, lambda part, i=i: part["finals"][i])
        got[initial] = sum_of_rows(want[initial], parts, lambda part, i=i: part["dstates"][i])
    assert got.keys() == want.keys()
    for name, t in want.items():
        judge(f"{split.name}: {name}", got[name], t, split.dtype, (limits or {}).get(name))


def check_mesh(parts):
    """FSDP2 over one dimension of a mesh, context parallel over the other."""
    layer, x, _ = layer_inputs(MESH)
    ys = [layer((1 + row) * x, cu_seqlens=MESH.bounds) for row in range(2)]
    gradients = torch.autograd.grad(sum(y.square().sum() for y in ys), list(layer.parameters()))
    for row, y in enumerate(ys):
        got = in_order(y, [p for p in parts if p["row"] == row], "y")
        assert_accurate("mesh: y", got, y, torch.float64)
    for part in parts:
        for (name, _), got, want in zip(layer.named_parameters(), part["dparameters"], gradients, strict=True):
            assert_accurate(f"mesh: {name}", got, want, torch.float64)
        assert "group: expected a DeviceMesh of one dimension, such as mesh['cp'], got" in part["refusal"]


def whole_heads(kind, heads, dtype, wide=None, device="cpu"):
    """All results of a layer on one device, by name; arguments as of `heads_inputs`."""
    layer, x, dy = heads_inputs(kind, heads, dtype, wide, device)
    y = layer(x.requires_grad_())
    names, parameters = zip(*layer.named_parameters(), strict=True)
    gradients = torch.autograd.grad(y, [x, *parameters], dy)
    return {"y": y, **dict(zip(("dx", *names), gradients, strict=True))}


def check_heads(kind, heads, dtype, parts, limits=None):
    """On every rank the whole, or on four its row of two. ``limits``: as of `check_layer`."""
    for rank, part in enumerate(parts):
        row = slice(None) if len(parts) == 2 else slice(rank // 2, rank // 2 + 1)
        for name, want in whole_heads(kind, heads, dtype, torch.float64).items():
            want = want[row] if name in ("y", "dx") else want
            judge(f"{kind} on {len(parts)}, {dtype}: {name}", part[name], want, dtype, (limits or {}).get(name))


def test_heads_that_do_not_divide_are_refused():
    layer, *_ = heads_inputs("gdn", Heads(), torch.float32)
    style = tensor_parallel_plan(layer)[""]
    with pytest.raises(ValueError, match="num_heads: expected a multiple of the 3 ranks, got 2"):
        style._apply(layer, SimpleNamespace(size=lambda: 3))
    gla, *_ = heads_inputs("gla", Heads(), torch.float32)
    with pytest.raises(ValueError, match="num_kv_heads: expected a multiple of the 4 ranks, got 2"):
        tensor_parallel_plan(gla)[""]._apply(gla, SimpleNamespace(size=lambda: 4))
    with pytest.raises(ValueError, match=r"layer: expected a layer of flash_delta\.layers, got Linear"):
        tensor_parallel_plan(torch.nn.Linear(2, 2))


def inputs(T):
    x = make_inputs(Case("", "", B=1, T=T), MEMBERS["kda"], torch.float64)
    x.pop("output_final_state")
    return x


def test_one_rank_is_one_device(alone):
    """One rank gives the bits of one device, which is told of the same sequences by cu_seqlens."""
    x = inputs(9)
    state = x.pop("initial_state").expand(2, -1, -1, -1)
    context = ContextParallel(alone, [0, 4, 9])
    o, final = flash_delta.chunk_kda(**x, initial_state=state, output_final_state=True, cp_context=context)
    want = flash_delta.chunk_kda(
        **x, initial_state=state, output_final_state=True, cu_seqlens=context.local_bounds(o.device)
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


def test_attention_takes_autocasts_dtype_or_one(alone):
    context = ContextParallel(alone, [0, 9])
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert context.attend(q, k, v.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"k, v: expected the dtype of q, torch.float32, got .*float32 and .*bfloat16"):
        context.attend(q, k, v.bfloat16())


def test_attention_on_one_rank_is_the_packed_one(alone):
    model, ids = build("hybrid"), tokens(1, 9)
    want = model(ids, cu_seqlens=torch.tensor([0, 4, 7, 9])).logits
    got = model(ids, cp_context=ContextParallel(alone, [0, 4, 7, 9])).logits
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)  # on some CPUs the last bit of an attention differs


def test_shard_refuses(alone):
    with pytest.raises(ValueError, match=r"x: expected 9 tokens, .* in axis 1, got shape \[1, 8\]"):
        ContextParallel(alone, [0, 9]).shard(torch.zeros(1, 8))


@pytest.mark.parametrize("seed", range(40))
def test_every_split_is_a_partition(seed):
    """Rows, bounds, neighbours and histories against a list of each token's sequence and place."""
    draw = python_random.Random(seed)
    lengths = [draw.choice((0, 0, 1, 2, 5, 17)) for _ in range(draw.randint(0, 6))]
    bounds = (0, *accumulate(lengths))
    total, ranks = bounds[-1] + draw.randint(0, 3), draw.randint(1, 4)
    cuts = [0, *sorted(draw.choices(range(total + 1), k=draw.randint(0, 8))), total]
    held = [[] for _ in range(ranks)]
    for pair in pairwise(cuts):
        draw.choice(held).append(pair)
    plan = Plan(bounds, [own or [(0, 0)] for own in held])
    sequence = [n for n, length in enumerate(lengths) for _ in range(length)]
    assert plan.total == total
    tokens, seen = {}, []
    for rank, own in enumerate(held):
        here = [t for pair in own for t in range(*pair)]
        assert plan.tokens(rank) == len(here)
        rows, inside = plan.rows[rank], plan.bounds(rank)
        assert len(inside) == len(rows) + 1
        assert (inside[0], inside[-1]) == (0, sum(t < bounds[-1] for t in here))
        for piece, a, b in zip(rows, inside, inside[1:], strict=False):
            assert (piece.start, piece.stop, piece.rank) == (a, b, rank)
            tokens[piece] = here[a:b]
            assert {sequence[t] for t in here[a:b]} <= {piece.sequence}
        seen += [piece.sequence for piece in rows if not piece.continued]
    assert sorted(seen) == list(range(len(lengths)))
    for n, chain in enumerate(plan.chains):
        assert [t for piece in chain for t in tokens[piece]] == list(range(*bounds[n : n + 2]))
        assert all(tokens[piece] for piece in chain) or len(chain) == 1
        for place, piece in enumerate(chain):
            assert (plan.left(piece), plan.right(piece)) == (chain[:place], chain[place + 1 :])
            assert plan.continues(piece) == (piece in plan.sent) == (piece is not chain[-1])
            assert piece.continued == (piece in plan.taken) == (place > 0)
            past = [t for other, count in plan.history(piece, 4) for t in (tokens[other][::-1] + [-1] * 4)[:count]]
            before = list(range(bounds[n], tokens[piece][0]))[::-1] if tokens[piece] else []
            assert past == (before + [-1] * 4)[:4] if place else past == []
    for numbers, most in ((plan.sent, plan.most_continuing), (plan.taken, plan.most_continued)):
        assert len({*numbers.values()}) == len(numbers)
        assert all(piece.rank * most <= number < (piece.rank + 1) * most for piece, number in numbers.items())


def test_heads_and_tails():
    """Parts r and 2 R - 1 - r of every sequence, also of such that do not divide."""
    assert head_tail(torch.tensor([0, 9, 9, 12]), 2) == (((0, 3), (7, 10)), ((3, 7), (10, 12)))


@pytest.mark.parametrize(
    ("fragments", "message"),
    [
        ([], "fragments: expected a list for each of 1 ranks, got 0"),
        ([[(4, 9), (0, 4)]], r"fragments: expected at least one pair .* in the order of the row, got .* for rank 0"),
        ([[(0, 4), (5, 9)]], "fragments: expected every token once, got a fragment from 5 on after 4 tokens"),
        ([[(0, 8)]], r"fragments: expected all cu_seqlens\[-1\] = 9 tokens, got 8"),
    ],
)
def test_fragments_are_checked(alone, fragments, message):
    with pytest.raises(ValueError, match=message):
        ContextParallel(alone, [0, 9], fragments=fragments)
    with pytest.raises(ValueError, match="tokens_per_rank: expected None with fragments"):
        ContextParallel(alone, [0, 9], [9], [[(0, 9)]])
