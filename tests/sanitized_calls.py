"""Small calls on a GPU, for compute-sanitizer: `python sanitized_calls.py decode | prefill | layers | bounds`, or
`out-of-bounds`, which is wrong.

Every pool is an allocation of its own (PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that what lies beside it is nobody's. What
is not for the GPU to compute is made and compared on the CPU: under the sanitizer each kernel takes long.
"""

import sys

import torch
import triton
import triton.language as tl
from hostile_bounds import HOSTILE, T, hostile
from serving_truth import KINDS, make_call, slots
from test_serving import BAD, BAD_64, TREES
from test_serving import hostile as hostile_indices

import flash_delta
from flash_delta.modules import causal_conv1d
from flash_delta.modules.norm import gated_rms_norm
from flash_delta.ops.serving import Convolution, OutputNorm
from flash_delta.testing import MEMBERS, Case, make_inputs
from flash_delta.testing.accuracy import infer, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU for Triton's interpreter
CALLED = [
    ("gdn-raw", {"H": 1, "HV": 2, "K": 16, "V": 24, "v_first": True}),
    ("kda", {"H": 1, "HV": 2, "K": 24, "V": 16, "v_first": False}),
    ("gdn", {"H": 1, "HV": 2, "K": 64, "V": 64, "dtype": torch.bfloat16, "pool": torch.bfloat16, "v_first": False}),
    ("kda-bounded", {"H": 1, "HV": 1, "K": 64, "V": 64, "dtype": torch.bfloat16, "pool": torch.bfloat16}),
]


def on_device(x):
    return {name: t.to(DEVICE, copy=True) if torch.is_tensor(t) else t for name, t in x.items()}


def call(op, x, owned):
    """o; of the pool nothing but slots ``owned`` may have changed."""
    before, given = x["state_pool"].clone(), on_device(x)
    o = op(**given, backend="triton").cpu()
    after = given["state_pool"].cpu()
    assert not torch.equal(after[owned], before[owned]), "nothing was written"
    before[owned] = after[owned]
    bits = {4: torch.int32, 2: torch.int16}[before.itemsize]
    assert torch.equal(after.view(bits), before.view(bits)), "a canary has changed"
    return o


def decode(kind, sizes):
    op = KINDS[kind][0]
    x = make_call(kind, B=4, T=7, slots=40, **sizes)
    write = torch.arange(28).view(4, 7)
    call(op, x | {"read_indices": slots([30, 31, 32, 33], x), "write_indices": write[:, -1]}, write[:, -1])
    counted = {"read_indices": write, "num_accepted_tokens": slots([1, 7, 3, 8], x)}
    call(op, x | counted | {"write_indices": write}, write[:3].flatten())
    call(op, x | {"read_indices": write[:, 0], "write_indices": write, "parent_idx": slots(TREES, x)}, write.flatten())
    drafts(op, x, write)
    steps(op, x, write)
    for where in BAD:
        for dtype in (torch.int32, torch.int64):
            x = make_call(kind, B=1 + len(BAD[where]) + (len(BAD_64) if dtype == torch.int64 else 0), **sizes)
            x |= hostile_indices(where, dtype, x)
            owned = x["write_indices"][0].reshape(-1)
            o = call(op, x, owned)
            assert not o[1:].any()


def drafts(op, x, write):
    """Runs drafts of four rows of seven tokens: to rows of another pool, and packed, with rolling windows, under wrong
    bounds."""
    inner = x["state_pool"].shape[1:]
    target = torch.full((4, 9, *inner), 7.0, dtype=x["state_pool"].dtype)[:, :7]
    for tree in ({}, {"parent_idx": slots(TREES, x)}):
        given = on_device(x | {"write_indices": slots([2, 0, 3, 4], x)} | tree | {"write_pool": target})
        op(**given, backend="triton")
        assert torch.equal(given["state_pool"].cpu(), x["state_pool"]), "a pool that is only read has changed"
        after = given["write_pool"].cpu()
        assert (after[1] == 7).all()
        assert not (after[[0, 2, 3]] == 7).flatten(2).all(2).any()
    flat = {name: x[name].flatten(0, 1)[None] for name in ("q", "k", "v", "g", "beta")}
    D = sum(flat[name][0, 0].numel() for name in ("q", "k", "v"))
    pool, weight = (torch.randn(*shape, dtype=x["q"].dtype) for shape in ((40, D, 9), (D, 4)))
    for bounds, counts in (([0, 7, 9, 9, 28], [7, 1, 2, 1]), ([2**40, 3, -(2**31), 21, 12], [8, 0, 2**31 - 1, 3])):
        windows = pool.to(DEVICE)
        convolution = Convolution(windows, weight.to(DEVICE), rolling=True)
        given = flat | {"read_indices": write, "write_indices": write, "num_accepted_tokens": slots(counts, x)}
        given = on_device(x | given | {"cu_seqlens": torch.tensor(bounds)})
        op(**given, convolution=convolution, backend="triton")
        assert torch.equal(given["state_pool"][28:].cpu(), x["state_pool"][28:])
        others = [slot for slot in range(40) if slot not in (0, 7, 14, 21)]
        assert torch.equal(windows.cpu()[others], pool[others])


def steps(op, x, write):
    """With a convolution, whose windows are the states' slots, and a norm: chains and trees, also to other pools."""
    D = sum(x[name][0, 0].numel() for name in ("q", "k", "v"))
    given = x | {"write_indices": write, "read_indices": slots([30, 31, 99, 33], x)}
    windows, weight = (torch.randn(*shape, dtype=x["q"].dtype) for shape in ((40, D, 3), (D, 4)))
    norm = OutputNorm(torch.randn(x["v"].shape).to(DEVICE), torch.ones(x["v"].shape[3], device=DEVICE))
    for tree in ({}, {"parent_idx": slots(TREES, x)}):
        pool = windows.to(DEVICE)
        around = {"convolution": Convolution(pool, weight.to(DEVICE)), "output_norm": norm}
        call(op, given | tree | around, write[[0, 1, 3]].flatten())
        assert torch.equal(pool.cpu()[28:], windows[28:])
        assert torch.equal(pool.cpu()[14:21], windows[14:21])
        inner = x["state_pool"].shape[1:]
        target = torch.full((4, 7, D, 3), 7.0, dtype=x["q"].dtype, device=DEVICE)
        around["convolution"] = Convolution(windows.to(DEVICE), weight.to(DEVICE), write_pool=target)
        apart = {"write_pool": torch.full((4, 7, *inner), 7.0), "write_indices": slots([2, 0, 1, 99], x)}
        op(**on_device(given | tree | apart), **around, backend="triton")
        assert (target[[1, 3]] == 7).all()
        assert not (target[[0, 2]] == 7).flatten(2).all(2).any()


def prefill(kind, sizes):
    """Runs nine sequences. The first four are well. The others have an invalid index, of which many are tried."""
    op = flash_delta.prefill_kda if kind.startswith("kda") else flash_delta.prefill_gated_delta_rule
    lengths = [0, 1, 70, 130, 5, 70, 3, 66, 2]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    x = make_call(kind, B=1, T=int(bounds[-1]) + 3, slots=20, **sizes)
    x["v"][:, bounds[-1] :] = float("nan")
    x |= {"cu_seqlens": bounds, "checkpoint_every": 64}
    (T, H, K), (HV, V) = x["q"].shape[1:], x["v"].shape[2:]
    gate, D = torch.randn(1, T, HV, V), 2 * H * K + HV * V
    convolution = Convolution(torch.randn(20, D, 3).to(x["q"].dtype).to(DEVICE), torch.randn(D, 4, device=DEVICE))
    layer = {"convolution": convolution, "output_norm": OutputNorm(gate.to(DEVICE), torch.ones(V, device=DEVICE))}
    x["has_initial_state"] = torch.tensor([True, False, False, True, True, True, False, False, True])
    for bad in (-1, 20, *BAD["read"][2:], *BAD_64):
        dtype = torch.int64 if bad in BAD_64 else torch.int32
        x |= {
            "read_indices": slots([15, bad, bad, 16, bad, bad, 17, 17, 17], x, dtype),
            "write_indices": slots([0, 1, 2, 3, 18, 18, bad, bad, bad], x, dtype),
            "checkpoint_indices": slots([[19, 19]] * 2 + [[4, 19], [bad, 5]] + [[19, 19]] * 5, x, dtype),
        }
        at_offsets = {"checkpoint_indices": slots([6, 7, 8, 9, *[19] * 5], x, dtype), "checkpoint_every": None}
        at_offsets["checkpoint_offsets"] = slots([0, 1, 65, 131 if bad == 20 else bad] + [2] * 5, x, dtype)
        for around in ({}, layer) if bad == -1 else ({},):
            o = call(op, x | around, [0, 1, 2, 3, 4, 5])
            assert o[:, : bounds[4]].flatten(2).any(-1).all()
            assert not o[:, bounds[4] :].any()
            same = call(op, x | around | at_offsets, [0, 1, 2, 3, 6, 7, 8])
            assert torch.equal(same, o)


def layers(kind, sizes):
    """Inference and training of the same sizes, and what is around the rule, packed up to the end of memory."""
    member = MEMBERS["kda" if kind.startswith("kda") else "gdn"]
    heads = {name: size for name, size in sizes.items() if name in ("H", "HV", "K", "V")}
    case = Case(kind, "", B=1, T=160, lengths=(100, 60), **heads)
    dtype = sizes.get("dtype", torch.float32)
    x = make_inputs(case, member, dtype, DEVICE)
    before, trained, after = infer(member, x, "triton"), run(member, x, "triton"), infer(member, x, "triton")
    assert all(torch.equal(before[name], y) for name, y in after.items())
    assert not any(t.isnan().any() for t in trained.values())
    rows, weight = (
        torch.randn(*shape, dtype=dtype, device=DEVICE, requires_grad=True) for shape in ((1, 160, 64), (64, 4))
    )
    y, _ = causal_conv1d(rows, weight, None, "silu", cu_seqlens=x["cu_seqlens"], backend="triton")
    gated_rms_norm(y, rows, weight[:, 0], 1e-5, "silu", "triton").sum().backward()


def bounds(kind, sizes):
    """Wrong ones: forward, backward, convolution and prefill, of which undefined values come."""
    heads = {name: size for name, size in sizes.items() if name in ("H", "HV", "K", "V")}
    member, dtype = MEMBERS["kda" if kind.startswith("kda") else "gdn"], sizes.get("dtype", torch.float32)
    for name in HOSTILE:
        wrong = hostile(name, DEVICE)
        case = Case(kind, "", B=1, T=T, lengths=(T, *(0 for _ in wrong[2:])), **heads)
        run(member, make_inputs(case, member, dtype, DEVICE) | {"cu_seqlens": wrong})
        rows, weight = (torch.randn(*s, dtype=dtype, device=DEVICE, requires_grad=True) for s in ((1, T, 64), (64, 4)))
        causal_conv1d(rows, weight, None, "silu", None, True, wrong, backend="triton")[0].sum().backward()
        N = len(wrong) - 1
        op = flash_delta.prefill_kda if kind.startswith("kda") else flash_delta.prefill_gated_delta_rule
        x = make_call(kind, B=1, T=T, slots=3 * N, **sizes) | {"cu_seqlens": wrong, "checkpoint_every": 64}
        x |= {name: torch.arange(N) + i * N for i, name in enumerate(("read_indices", "write_indices"))}
        before, given = x["state_pool"].clone(), on_device(x | {"checkpoint_indices": torch.arange(N)[:, None] + 2 * N})
        op(**given)
        given |= {"checkpoint_indices": given["checkpoint_indices"][:, 0], "checkpoint_every": None}
        op(**given, checkpoint_offsets=torch.full((N,), 70, device=DEVICE))
        assert torch.equal(given["state_pool"][:N].cpu(), before[:N]), "a slot that is only read has changed"


@triton.jit
def write_behind(x, size):
    tl.store(x + size + tl.arange(0, 1024), 1.0)


def main(calls):
    if calls == "out-of-bounds":  # a mistake, for the sanitizer to find
        write_behind[(1,)](torch.zeros(64, device=DEVICE), 64)
        torch.cuda.synchronize()
        return
    for kind, sizes in CALLED:
        {"decode": decode, "prefill": prefill, "layers": layers, "bounds": bounds}[calls](kind, sizes)
    print(f"{calls}: all calls returned")


if __name__ == "__main__":
    main(sys.argv[1])
