"""States at rest in int8: the bound of the error, the bits of the definition, and nothing else is touched."""

import math
import re

import pytest
import torch
from serving_truth import DEVICES, GPU, make_call, needs_triton

import flash_delta
from flash_delta.ops.serving import Int8States, dequantize_states, quantize_states
from flash_delta.testing import relative_error

BACKENDS = ["torch", pytest.param("triton", marks=needs_triton)]
backends = pytest.mark.parametrize("backend", BACKENDS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pools = pytest.mark.parametrize("dtype", DTYPES, ids=str)
scales = pytest.mark.parametrize("scale", DTYPES[:2], ids=str)
axes = pytest.mark.parametrize("axis", [-1, -2], ids=["by-row", "by-column"])
LAYERS, SLOTS, STORED, HV, V, K = 2, 5, 7, 2, 24, 40
NAN = float("nan")


def make_pool(dtype=torch.float32, device="cpu", seed=0, slots=SLOTS, layers=LAYERS, heads=(HV, V, K)):
    """States whose columns differ in size, as key channels do."""
    gen = torch.Generator().manual_seed(seed)
    size = torch.exp(2 * torch.randn(layers, slots, heads[0], 1, heads[2], generator=gen))
    return (size * torch.randn(layers, slots, *heads, generator=gen)).to(device, dtype)


def make_store(pool, axis, scale=torch.float32, slots=STORED):
    """A store without values: 99 in int8, and scales of NaN."""
    shape = [pool.shape[0], slots, *pool.shape[2:]]
    narrow = shape.copy()
    narrow[axis] = 1
    states = torch.full(shape, 99, dtype=torch.int8, device=pool.device)
    return Int8States(states, torch.full(narrow, NAN, dtype=scale, device=pool.device))


def index(pool, *values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=pool.device)


def keep(pool, axis, scale, backend):
    """All slots of the pool in a store with as many slots, and what comes back."""
    rows, store = torch.arange(pool.shape[1], device=pool.device), make_store(pool, axis, scale, pool.shape[1])
    quantize_states(pool, rows, store, rows, backend=backend)
    back = torch.full_like(pool, NAN)
    dequantize_states(store, rows, back, rows, backend=backend)
    return store, back


def same(a, b):
    """Whether the numbers have the same bits. All NaN are alike."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@backends
@pools
@scales
@axes
def test_against_float64(dtype, scale, axis, backend):
    pool = make_pool(dtype, DEVICES[backend])
    store, back = keep(pool, axis, scale, backend)
    x, q, s = pool.double(), store.states.double(), store.scale.double()
    amax = x.abs().amax(axis, keepdim=True)
    changed = 2.0**-16 if scale == torch.float32 else 2.0**-8  # of a scale, when it is rounded
    assert ((127 * s / amax - 1).abs() <= changed).all()
    assert (scale != torch.float32) or (127 * s <= amax).all()
    assert (q.abs().amax(axis) == 127).all()
    assert ((x - q * s).abs() <= s * (0.5 + 2.0**-16)).all()
    assert same(back, (q * s).to(dtype))
    assert dtype != torch.float32 or same(back.double(), q * s)  # q s is exact
    if axis == -2:  # a scale for each channel, and channels differ in size
        assert 0.003 < relative_error(back, x) < 0.008


@backends
@scales
@axes
def test_kept_again_the_same_bits(scale, axis, backend):
    """Also next to the ends of float32, where scales are rounded to the least one or almost overflow."""
    pool = make_pool(device=DEVICES[backend], layers=1, slots=3)
    pool[:, 1] *= 2.0**-124
    pool[:, 2] *= torch.finfo(torch.float32).max / pool[:, 2].abs().max()
    store, back = keep(pool, axis, scale, backend)
    again, last = keep(back, axis, scale, backend)
    assert back.isfinite().all()
    assert torch.equal(again.states, store.states)
    assert torch.equal(again.scale, store.scale)
    assert torch.equal(last, back)


@scales
def test_every_mantissa_of_a_scale(scale):
    """The largest q is 127 for each amax, so the scale follows from what comes back."""
    exponents = torch.tensor([0, -100, 127 - 7]).view(1, -1, 1, 1, 1)
    mantissas = 1 + torch.arange(2**17) / 2**17 + 2.0**-23 * torch.randint(64, (2**17,))
    pool = mantissas.view(1, 1, 2, -1, 1) * torch.exp2(exponents.float())
    store, back = keep(pool, -1, scale, "torch")
    again, _ = keep(back, -1, scale, "torch")
    assert (store.states == 127).all()
    assert torch.equal(again.scale, store.scale)
    assert back.isfinite().all()


@backends
@pools
@scales
@axes
def test_rows_that_are_no_numbers(dtype, scale, axis, backend):
    """Rows with NaN or infinity are NaN, rows of zeros are zeros, and so are those that are too small for a scale."""
    pool = torch.ones(1, 1, 1, 24, 40, dtype=dtype, device=DEVICES[backend])
    rows = pool[0, 0, 0] if axis == -1 else pool[0, 0, 0].mT
    rows[0, 3], rows[1, 4], rows[2, 5] = NAN, math.inf, -math.inf
    rows[3] = 0
    rows[4, 1:] = 0
    rows[5] = 2.0**-127 if dtype != torch.float16 else 0
    rows[6] = -1.5 * 2.0**-127 if dtype != torch.float16 else -1
    rows[7, 1:] = 1e-7  # far below the row's scale
    rows[8] = -0.0
    store, back = keep(pool, axis, scale, backend)
    found = back[0, 0, 0] if axis == -1 else back[0, 0, 0].mT
    assert found[:3].isnan().all()
    assert not found[[3, 5, 8]].any()
    assert found[3:].isfinite().all()
    assert float(found[4, 0]) == pytest.approx(1, abs=0.004)
    assert not found[4, 1:].any()
    wanted = -1 if dtype == torch.float16 else -(2.0**-126)
    assert found[6].tolist() == pytest.approx([wanted] * len(found[6]), rel=0.004)
    assert not found[7, 1:].any()
    assert (found[9:] == found[9, 0]).all()
    assert not store.states[store.scale.isnan().expand_as(store.states)].any()


@needs_triton
@pools
@scales
@axes
def test_the_bits_of_the_definition(dtype, scale, axis):
    pool = make_pool(dtype, seed=3, slots=2)
    pool[0, 0, 0, 2, 3], pool[1, 0, 1, 5, 6], pool[1, 1, 0] = NAN, math.inf, 0
    if dtype == torch.float16:
        pool.clamp_(-60000, 60000)
    else:
        pool[0, 1] *= 2.0**-125
    wanted, wanted_back = keep(pool, axis, scale, "torch")
    found, back = keep(pool.to(DEVICES["triton"]), axis, scale, "triton")
    assert torch.equal(found.states.cpu(), wanted.states)
    assert same(found.scale.cpu(), wanted.scale)
    assert same(back.cpu(), wanted_back)


@needs_triton
@axes
@pytest.mark.parametrize("heads", [(1, 1, 1), (1, 1, 70), (3, 33, 1), (1, 300, 20)], ids=str)
def test_sizes(heads, axis):
    pool = make_pool(heads=heads)
    wanted, found = (keep(pool.to(DEVICES[b]), axis, torch.float32, b) for b in ("torch", "triton"))
    assert torch.equal(found[0].states.cpu(), wanted[0].states)
    assert torch.equal(found[1].cpu(), wanted[1])


@backends
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_padding(dtype, backend):
    """A row with an index that names no slot, or with the null slot, moves nothing. Rows may read the same slot."""
    pool = make_pool(device=DEVICES[backend])
    store, last = make_store(pool, -2), 2**31 - 1 if dtype == torch.int32 else 2**40 + 1
    read = index(pool, 1, -1, 2, 5, 0, 4, 1, last, dtype=dtype)
    write = index(pool, 6, 1, -3, 2, 3, 0, 4, 5, dtype=dtype)
    quantize_states(pool, read, store, write, 0, backend=backend)
    assert (store.states[:, [0, 1, 2, 3, 5]] == 99).all()
    assert store.scale[:, [0, 1, 2, 3, 5]].isnan().all()
    whole, _ = keep(pool, -2, torch.float32, backend)
    for slot in (6, 4):
        assert torch.equal(store.states[:, slot], whole.states[:, 1])
        assert torch.equal(store.scale[:, slot], whole.scale[:, 1])
    before = pool.clone()
    read, write = index(pool, 6, 6, 0, 7, 4, last, dtype=dtype), index(pool, 3, 4, 2, 1, 0, 2, dtype=dtype)
    dequantize_states(store, read, pool, write, 0, backend=backend)
    assert torch.equal(pool[:, :3], before[:, :3])
    for slot in (3, 4):
        assert torch.equal(pool[:, slot], (store.states[:, 6].float() * store.scale[:, 6]))


@backends
def test_no_rows(backend):
    pool = make_pool(device=DEVICES[backend])
    store, before = make_store(pool, -1), pool.clone()
    quantize_states(pool, index(pool), store, index(pool), backend=backend)
    dequantize_states(store, index(pool), pool, index(pool), backend=backend)
    assert (store.states == 99).all()
    assert torch.equal(pool, before)


@backends
@axes
def test_layers_are_one_call(axis, backend):
    pool = make_pool(device=DEVICES[backend])
    store, whole = keep(pool, axis, torch.float32, backend)
    rows = torch.arange(SLOTS, device=pool.device)
    for layer in range(LAYERS):
        one = Int8States(*(torch.zeros_like(t[layer]) for t in store))
        quantize_states(pool[layer], rows, one, rows, backend=backend)
        assert torch.equal(one.states, store.states[layer])
        assert torch.equal(one.scale, store.scale[layer])
        back = torch.zeros_like(pool[layer])
        dequantize_states(one, rows, back, rows, backend=backend)
        assert torch.equal(back, whole[layer])


def apart(t):
    """A copy with gaps between all axes, whose last two axes lie the other way around. What is between is 7."""
    shape = [n + 1 for n in t.shape]
    wide = torch.full((*shape[:-2], shape[-1], shape[-2]), 7, dtype=t.dtype, device=t.device).mT
    inner = wide[tuple(slice(n) for n in t.shape)]
    inner.copy_(t)
    return inner, wide


@backends
@axes
def test_gaps(axis, backend):
    """Pools and stores may lie anyhow, and nothing is written between their states."""
    pool = make_pool(device=DEVICES[backend])
    store, back = keep(pool, axis, torch.float32, backend)
    rows = torch.arange(2 * SLOTS, device=pool.device)[::2] // 2
    source, _ = apart(pool)
    (states, all_states), (scale, all_scales) = (apart(torch.zeros_like(t)) for t in store)
    quantize_states(source, rows, Int8States(states, scale), rows, backend=backend)
    assert torch.equal(states, store.states)
    assert torch.equal(scale, store.scale)
    target, whole = apart(torch.zeros_like(pool))
    dequantize_states(Int8States(states, scale), rows, target, rows, backend=backend)
    assert torch.equal(target, back)
    for t, inner in ((all_states, states), (all_scales, scale), (whole, target)):
        inner.fill_(7)
        assert (t == 7).all()


@backends
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_layout_of_sglang(dtype, backend):
    """Its checkpoints are int8 [L, slots, H, V, K], with scales [L, slots, H, 1, K] in the dtype of states. Its
    scales in float32 are not cut. So few numbers differ from ours, and by 1."""
    pool = make_pool(dtype, DEVICES[backend])
    store, back = keep(pool, -2, dtype, backend)
    amax = pool.float().abs().amax(-2, keepdim=True).clamp(min=1e-8)
    scale = (amax / 127).to(dtype)
    q = torch.round(pool.float() / scale.float()).clamp(-127, 127)
    assert store.scale.shape == scale.shape
    assert (store.states - q).abs().max() <= 1
    assert (store.states != q).float().mean() < 0.002
    assert relative_error(back, q * scale.float()) < 3e-3
    theirs = Int8States(q.to(torch.int8), scale)  # restored by this library
    rows = torch.arange(SLOTS, device=pool.device)
    dequantize_states(theirs, rows, back, rows, backend=backend)
    assert torch.equal(back, (q * scale.float()).to(dtype))


@pytest.mark.skipif(GPU, reason="a GPU does not look at indices before a call")
def test_a_slot_is_written_once():
    pool = make_pool()
    store = make_store(pool, -1)
    with pytest.raises(ValueError, match="quantize_states: write_indices: expected different slots, got slot 3 twice"):
        quantize_states(pool, index(pool, 0, 1, 2), store, index(pool, 3, 4, 3), backend="torch")
    with pytest.raises(ValueError, match="dequantize_states: write_indices: expected different slots, got slot 1 twi"):
        dequantize_states(store, index(pool, 0, 0), pool, index(pool, 1, 1), backend="torch")
    assert (store.states == 99).all()


POOL = make_pool()
STORE, ROWS = make_store(POOL, -2), index(POOL, 0, 1)
CALL = {"state_pool": POOL, "read_indices": ROWS, "store": STORE, "write_indices": ROWS}
WRONG = [
    ({"state_pool": POOL[0, 0]}, "state_pool: expected a tensor [slots, HV, rows, columns], got shape [2, 24, 40]"),
    ({"state_pool": POOL.double()}, "state_pool: expected dtype torch.float16 or torch.bfloat16 or torch.float32, got"),
    ({"state_pool": POOL[:0]}, "state_pool: expected no axis of size 0, except that of slots, got shape [0, 5,"),
    ({"state_pool": POOL[0]}, "store.states: expected a tensor [slots, 2, 24, 40], got shape [2, 7, 2, 24, 40]"),
    ({"state_pool": POOL[:1].expand(2, -1, -1, -1, -1)}, "state_pool: expected no stride of 0 (slots have numbers of"),
    ({"state_pool": POOL.clone().requires_grad_()}, "state_pool: expected a tensor without gradient"),
    ({"store": tuple(STORE)}, "store: expected an Int8States, got tuple"),
    ({"store": STORE._replace(states=None)}, "store.states: expected a tensor [2, slots, 2, 24, 40], got None"),
    ({"store": STORE._replace(states=STORE.states.float())}, "store.states: expected dtype torch.int8, got torch.fl"),
    ({"store": STORE._replace(states=STORE.states.to("meta"))}, "expected a tensor on cpu like state_pool, got one on"),
    ({"store": STORE._replace(scale=None)}, "store.scale: expected a tensor [2, 7, 2, 24, 1] (a scale per row) or"),
    ({"store": STORE._replace(scale=STORE.scale[:, :6])}, "or [2, 7, 2, 1, 40] (a scale per column), got shape [2, 6"),
    ({"store": STORE._replace(scale=STORE.scale.half())}, "or torch.bfloat16 (float16 rounds small scales to 0), got"),
    ({"store": STORE._replace(scale=STORE.scale.double())}, "store.scale: expected dtype torch.float32 or torch.bfl"),
    ({"read_indices": None}, "read_indices: expected a tensor [N], got None"),
    ({"write_indices": ROWS[:1]}, "write_indices: expected a tensor [2], got shape [1]"),
    ({"write_indices": ROWS.float()}, "write_indices: expected dtype torch.int32 or torch.int64, got torch.float32"),
    ({"null_slot": -1}, "null_slot: expected a number of at least 0 or None"),
    ({"backend": "gpu"}, "backend: expected one of triton, hopper, torch, got 'gpu'"),
]


@pytest.mark.parametrize("op", [quantize_states, dequantize_states])
@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_bad_calls(op, change, message):
    prefix = "" if "backend" in change else f"{op.__name__}: .*"
    with pytest.raises(ValueError, match=f"^{prefix}{re.escape(message)}"):
        op(**CALL | change)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@scales
def test_states_of_16_bits_are_kept_again(dtype, scale):
    """For every largest number that comes back finite, and parts of it."""
    most = torch.arange(1, torch.tensor(torch.inf, dtype=dtype).view(torch.int16).item(), dtype=torch.int16).view(dtype)
    parts = torch.tensor([1, -0.73, 0.51, 0.0139, -0.004, 0])
    pool = (most.double()[:, None] * parts).to(dtype)[None, None, None]
    store, back = keep(pool, -1, scale, "torch")
    again, _ = keep(back, -1, scale, "torch")
    finite = back.isfinite().all(-1, keepdim=True)
    assert finite.float().mean() > 0.99
    assert torch.equal(store.scale.where(finite, 0), again.scale.where(finite, 0))
    assert torch.equal(store.states.where(finite, 0), again.states.where(finite, 0))


def test_slots_span_fewer_than_2_to_the_31_numbers():
    """Kernels count in 32 bits within a slot."""
    shape = 2, 2, 2, 24, 40
    wide, narrow = (
        torch.empty_strided(shape, (1, 1, 2**31, 40, 1), dtype=dtype, device="meta")
        for dtype in (torch.float32, torch.int8)
    )
    of_zeros, rows = make_store(torch.zeros(shape), -1, slots=2), index(POOL, 0).to("meta")
    store = Int8States(*(t.to("meta") for t in of_zeros))
    for change in ({"state_pool": wide}, {"store": store._replace(states=narrow)}):
        call = {"state_pool": torch.empty(shape, device="meta"), "store": store} | change
        with pytest.raises(ValueError, match=r"expected every slot to span fewer than 2\^31 numbers"):
            quantize_states(read_indices=rows, write_indices=rows, **call)


@needs_triton
def test_states_that_are_too_wide():
    pool = torch.zeros(1, 1, 2, 8200, device=DEVICES["triton"])
    store, rows = Int8States(pool.to(torch.int8), pool[..., :1].clone()), index(pool, 0)
    with pytest.raises(ValueError, match="it rounds states of up to 8192 rows and columns, they have 8200"):
        quantize_states(pool, rows, store, rows, backend="triton")


def test_under_torch_compile():
    """One operator for each op, also with a backend that traces nothing else."""

    def step(pool, store, rows):
        quantize_states(pool, rows, store, rows)
        dequantize_states(store, rows, pool, rows.flip(0))
        return pool + 1

    pool, compiled = make_pool(), torch.compile(step, backend="eager", fullgraph=True)
    store, other, mine = make_store(pool, -2), make_store(pool, -2), pool.clone()
    assert torch.equal(compiled(pool, store, ROWS), step(mine, other, ROWS))
    assert torch.equal(store.states, other.states)
    assert torch.equal(pool, mine)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@scales
def test_a_sequence_goes_on(kind, scale):
    """A prompt of 256 tokens is kept in int8 with a scale per key channel, and 64 tokens follow. Their outputs are
    nearer to the exact ones than those of a bfloat16 pool, which is rounded at each token."""
    op = {"gdn": flash_delta.fused_recurrent_gated_delta_rule, "kda": flash_delta.fused_recurrent_kda}[kind]
    x = make_call(kind, B=2, T=320, H=2, HV=2, K=32, V=32, slots=2)
    x = {name: x[name].double() for name in ("q", "k", "v", "g", "beta")}
    x["g"] /= 16  # states remember more than a prompt's last tokens
    before, after = ({name: t[:, part] for name, t in x.items()} for part in (slice(256), slice(256, None)))
    _, S = op(**before, output_final_state=True, state_v_first=True)
    truth, _ = op(**after, initial_state=S, state_v_first=True)
    _, back = keep(S.float().unsqueeze(0), -2, scale, "torch")
    o, _ = op(**after, initial_state=back[0].double(), state_v_first=True)
    S, rounded = S.bfloat16(), []
    for t in range(64):
        token = {name: y[:, t : t + 1] for name, y in after.items()}
        out, S = op(**token, initial_state=S.double(), output_final_state=True, state_v_first=True)
        S = S.bfloat16()
        rounded.append(out)
    error = relative_error(o, truth)
    assert 1e-4 < error < 0.004
    assert error < relative_error(torch.cat(rounded, 1), truth)
