"""Rows of their own lengths, packed: each gives the bits that it gives beside rows of one length."""

import pytest
import torch
from hostile_bounds import HOSTILE, T, hostile, leave_unread
from serving_truth import DEVICES, KINDS, bits, needs_triton, slots
from test_serving_step import make_step, run_step

from flash_delta.ops.serving import Convolution

backends = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
TOKENS = ("q", "k", "v", "g", "beta")
LENGTHS = [3, 0, 1, 4, 2]  # of five rows


def packed(x, lengths, behind=0):
    """Returns the call, packed. ``behind`` the last row are tokens that are nobody's, which are NaN."""
    bounds = torch.tensor([0, *lengths], dtype=torch.int32, device=x["q"].device).cumsum(0, dtype=torch.int32)

    def pack(t):
        rows = torch.cat([row[:length] for row, length in zip(t, lengths, strict=True)])
        return torch.cat([rows, rows.new_full((behind, *rows.shape[1:]), float("nan"))]).unsqueeze(0)

    norm = x["output_norm"]._replace(gate=pack(x["output_norm"].gate))
    x = x | {name: pack(x[name]) for name in x.keys() & {*TOKENS, "b", "w"}}
    return x | {"cu_seqlens": bounds, "output_norm": norm}


def padded(o, lengths):
    """Returns the outputs of a packed call as rows, [B, T, ...]."""
    rows = o.new_zeros(len(lengths), max(lengths), *o.shape[2:])
    for row, part in zip(rows, o[0].split([*lengths, o.shape[1] - sum(lengths)]), strict=False):
        row[: len(part)] = part
    return rows


def cut(t, lengths):
    """Without what is after a row's last token."""
    return torch.where(torch.arange(t.shape[1])[None, :] < torch.tensor(lengths)[:, None], t.cpu(), -1).to(t.device)


FORMS = ["last", "each", "tree", "counted", "rows"]


@backends
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["gdn-raw", "kda-bounded", "gdn2-raw"])
def test_a_row_gives_the_bits_of_a_padded_call(kind, form, backend):
    """In o, states and windows; with each form of the indices. Tokens after the last row give zeros."""
    pool = torch.bfloat16 if kind == "gdn-raw" else torch.float32
    x, conv = make_step(kind, B=5, T=4, H=1, HV=2, V=8, slots=32, pool=pool, device=DEVICES[backend])
    table = cut(slots([range(5 + 4 * b, 9 + 4 * b) for b in range(5)], x), LENGTHS)
    x["write_indices"] = table
    if form == "tree":
        x["parent_idx"] = slots([[-1, 0, 0, 1], [-1] * 4, [-1] * 4, [-1, -1, 1, 0], [-1, -1, 0, 0]], x)
    if form == "counted":
        read = slots([[30, 0], [1, 30], [31, 2], [3, 30], [4, 30]], x)
        x |= {"read_indices": read, "num_accepted_tokens": slots([2, 1, 2, 1, 3], x)}
    if form == "rows":
        x["write_pool"] = torch.full_like(x["state_pool"][:25].unflatten(0, (5, 5)), float("nan"))
        conv = (*conv, torch.full_like(conv[0][:25].unflatten(0, (5, 5)), float("nan")))
        x["write_indices"] = slots([4, -1, 2, 0, 1], x)
    want, *expected = run_step(kind, x, conv, backend)
    for b, length in enumerate(LENGTHS):
        want[b, length:] = 0
        if form == "rows" and length > 0:
            for pool in expected:
                pool[x["write_indices"][b], length:] = float("nan")
    ragged = packed(x, LENGTHS, behind=3)
    if form == "last":
        ends = [max(0, length - 1) for length in LENGTHS]
        ragged["write_indices"] = slots([row[end] for row, end in zip(table.tolist(), ends, strict=True)], x)
        for pool, before in zip(expected, (x["state_pool"], conv[0]), strict=True):
            for row, end in zip(table.tolist(), ends, strict=True):
                pool[row[:end]] = before[row[:end]]
    o, *pools = run_step(kind, ragged, conv, backend)
    assert not o[0, sum(LENGTHS) :].any()
    assert torch.equal(padded(o, LENGTHS), want)
    for pool, same in zip(pools, expected, strict=True):
        assert torch.equal(bits(pool), bits(same))


@backends
def test_a_row_of_too_many_tokens_is_padding(backend):
    """It gives zeros and writes nothing, by the width of a table and, without one, by the 16 tokens of a call."""
    x, conv = make_step("gdn-raw", B=3, T=17, H=1, HV=2, V=8, slots=9, device=DEVICES[backend])
    for lengths, write in (([2, 3, 2], slots([[3, 4], [5, 6], [7, 8]], x)), ([2, 17, 16], slots([3, 4, 5], x))):
        o, pool, windows = run_step("gdn-raw", packed(x | {"write_indices": write}, lengths), conv, backend)
        rows = padded(o, lengths)
        assert not rows[1].any()
        assert rows[[0, 2], :2].flatten(2).any(-1).all()
        ours = write[[0, 2]].flatten()
        for after, before in ((pool, x["state_pool"]), (windows, conv[0])):
            changed = (after != before).flatten(1).any(1)
            assert changed.nonzero().flatten().tolist() == sorted(ours.tolist())


@backends
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_nothing_to_do(lengths, backend):
    x, conv = make_step("gdn-raw", B=len(lengths), T=1, V=8, device=DEVICES[backend])
    for behind in (0, 2):
        call = x | {name: x[name].new_full((1, behind, *x[name].shape[2:]), 1.0) for name in TOKENS}
        call["output_norm"] = x["output_norm"]._replace(gate=call["v"])
        call["cu_seqlens"] = slots([0, *lengths], x)
        call["write_indices"] = x["read_indices"]
        o, pool, _ = run_step("gdn-raw", call, conv, backend)
        assert o.shape == (1, behind, *x["v"].shape[2:])
        assert not o.any()
        assert torch.equal(pool, x["state_pool"])


@needs_triton
@pytest.mark.parametrize("form", ["rule", "step", "rolling", "apart"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bounds(name, form, monkeypatch):
    """Results are undefined, but nothing outside of the tensors changes, nor a slot that no row names."""
    leave_unread(monkeypatch)
    device = DEVICES["triton"]
    wrong = hostile(name, device)
    N = len(wrong) - 1
    L = 17 if form == "rolling" else 3
    x, conv = make_step("gdn-raw", B=1, T=T, L=L, H=1, HV=1, K=8, V=8, slots=4 * N, device=device)
    norm = x.pop("output_norm")
    memory = {n: torch.full((1, T + 64, *x[n].shape[2:]), float("nan"), device=device) for n in TOKENS}
    for n in TOKENS:
        memory[n][:, 32:-32] = x[n]
        x[n] = memory[n][:, 32:-32]
    out = torch.full((T + 64, 1, 8), 7.0, device=device)
    x |= {"cu_seqlens": wrong, "out": out[32:-32].unsqueeze(0), "read_indices": torch.arange(N, device=device)}
    x["write_indices"] = torch.arange(2 * N, device=device).view(N, 2) + N
    before, windows = x["state_pool"].clone(), conv[0].clone()
    if form == "apart":
        x["write_pool"] = torch.full_like(x["state_pool"], 7.0)
    if form != "rule":
        target = torch.full_like(conv[0], 7.0) if form == "apart" else None
        x |= {"output_norm": norm, "convolution": Convolution(*conv, target, form == "rolling")}
    KINDS["gdn-raw"][0](**x, backend="triton")
    written = range(N, 3 * N)
    if form == "apart":
        assert torch.equal(x["state_pool"], before)
        assert torch.equal(conv[0], windows)
        before, windows = torch.full_like(before, 7.0), torch.full_like(windows, 7.0)
    others = [slot for slot in range(4 * N) if slot not in written]
    assert torch.equal((x["write_pool"] if form == "apart" else x["state_pool"])[others], before[others])
    if form == "rolling":  # a row's slot is that which it reads
        assert torch.equal(conv[0][N:], windows[N:])
    elif form != "rule":
        assert torch.equal((target if form == "apart" else conv[0])[others], windows[others])
    assert (out[:32] == 7).all()
    assert (out[-32:] == 7).all()
