"""Calls on several streams at once, on a second GPU, and of very many sequences, which only a GPU can show."""

import threading
from functools import partial

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from prefill_truth import OPS, make_prefill
from serving_truth import KINDS, make_call

import flash_delta
from flash_delta.modules import causal_conv1d, rms_norm
from flash_delta.testing import Workload, allowed, make_tensors, products_in, relative_error
from flash_delta.testing.large import output_gradient, run_workload

HOPPER = torch.cuda.get_device_capability()[0] == 9
BACKENDS = ["triton", *(["hopper"] if HOPPER else [])]
STREAMS, ROUNDS = 8, 5
DELAY = 20_000_000  # clock cycles, in which the host queues a round
HEADS = {"H": 2, "HV": 4, "K": 128, "V": 128, "dtype": torch.bfloat16}


def training(member, backend, seed, device="cuda"):
    w = Workload("streams", "training", member, 2, 2, 2, 300)
    x = make_tensors(w, device, seed)
    return partial(run_workload, w, x, output_gradient(x), backend)


def prefill(kind, backend, seed, device="cuda"):
    x = make_prefill(kind, (300, 4, 70), seed=seed, **HEADS, device=device)

    def call():
        pool = x["state_pool"].clone()
        return {"o": OPS[kind](**(x | {"state_pool": pool}), backend=backend), "pool": pool}

    return call


def decode(kind, backend, seed, device="cuda"):
    x = make_call(kind, B=8, T=1, slots=9, seed=seed, **HEADS, device=device)

    def call():
        pool = x["state_pool"].clone()
        given = x | {"state_pool": pool, "write_indices": x["read_indices"]}
        return {"o": KINDS[kind][0](**given, backend=backend), "pool": pool}

    return call


def around(seed, device="cuda"):
    gen = torch.Generator(device).manual_seed(seed)
    x, w = (torch.randn(shape, generator=gen, device=device) for shape in ((2, 300, 512), (512, 4)))
    return lambda: {"norm": rms_norm(x, w[:, 0], 1e-5), "convolution": causal_conv1d(x, w)[0]}


KINDS_OF_CALLS = {
    **{f"{m}-{b}-training": partial(training, m, b) for m in ("gdn", "kda") for b in BACKENDS},
    **{f"{k}-{b}-prefill": partial(prefill, k, b) for k in ("gdn-raw", "kda-bounded") for b in BACKENDS},
    "gdn-raw-decode": partial(decode, "gdn-raw", "triton"),
    "kda-bounded-decode": partial(decode, "kda-bounded", "triton"),
    "around": around,
}


def in_stream(stream, call, found, rounds=ROUNDS):
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY)
        found += [call() for _ in range(rounds)]


@pytest.mark.parametrize("threads", [False, True], ids=["one-thread", "threads"])
@pytest.mark.parametrize("kind", KINDS_OF_CALLS)
def test_eight_streams_at_once(kind, threads):
    """A call gives the bits that it gives alone."""
    calls = [KINDS_OF_CALLS[kind](seed=seed) for seed in range(STREAMS)]
    alone = [call() for call in calls]
    streams, found = [torch.cuda.Stream() for _ in calls], [[] for _ in calls]
    torch.cuda.synchronize()
    work = [threading.Thread(target=in_stream, args=given) for given in zip(streams, calls, found, strict=True)]
    for thread in work:
        thread.start() if threads else thread.run()
    for thread in work if threads else ():
        thread.join()
    torch.cuda.synchronize()
    for results, want in zip(found, alone, strict=True):
        assert len(results) == ROUNDS
        for got in results:
            assert got.keys() == want.keys()
            assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", KINDS_OF_CALLS)
def test_a_second_gpu(kind):
    """The first one is current. New and known calls give the same bits on both, in turns."""
    calls = [KINDS_OF_CALLS[kind](seed=0, device=f"cuda:{number}") for number in (0, 1)]
    want, *found = [{name: t.cpu() for name, t in call().items()} for call in (*calls, *calls, *calls)]
    for got in found:
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("kind", ["gdn-raw", "kda-bounded"])
def test_two_streams_share_a_pool(kind):
    """One decodes, the other runs prompts, each on its own slots."""
    steps = make_call(kind, B=4, T=1, slots=16, **HEADS, device="cuda")
    prompts = make_prefill(kind, (300, 4), slots=16, **HEADS, device="cuda")
    steps |= {"write_indices": steps["read_indices"]}  # slots 0 to 3
    prompts |= {"read_indices": prompts["read_indices"] + 8, "write_indices": prompts["read_indices"] + 8}

    def results(streams):
        pool, found = steps["state_pool"].clone(), ([], [])
        torch.cuda.synchronize()
        step = partial(KINDS[kind][0], **(steps | {"state_pool": pool}))
        prompt = partial(OPS[kind], **(prompts | {"state_pool": pool}))
        for stream, call, o in zip(streams, (step, prompt), found, strict=True):
            in_stream(stream, call, o, 20)
        torch.cuda.synchronize()
        return [pool, *found[0], *found[1]]

    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    for got, want in zip(results((one, other)), results((one, one)), strict=True):
        assert torch.equal(got, want)


MANY = [
    ("chunk_gated_delta_rule", "triton", 65_534, 16, False),
    ("chunk_gated_delta_rule", "triton", 32_767, 16, True),
    ("chunk_kda", "triton", 32_767, 16, True),
    *([("chunk_gated_delta_rule", "hopper", 70_000, 64, True), ("chunk_kda", "hopper", 70_000, 128, False)] * HOPPER),
]


@pytest.mark.parametrize(("op", "backend", "count", "width", "trains"), MANY)
@pytest.mark.parametrize("long", [2, 40_000])
def test_very_many_sequences(op, backend, count, width, trains, long):
    """The last of them, after one that is long enough to be split, are as accurate as alone."""
    gen = torch.Generator("cuda").manual_seed(0)
    T, channels, last = 2 * (count - 1) + long, (width,) if op == "chunk_kda" else (), 100  # tokens of the last 50

    def randn(*shape):
        return torch.randn(1, T, 1, *shape, generator=gen, device="cuda").bfloat16()

    x = {name: randn(width) for name in "qkv"} | {"g": -randn(*channels).abs(), "beta": randn().sigmoid()}
    bounds = [0, *range(long, T + 1, 2)]
    call = partial(getattr(flash_delta, op), use_qk_l2norm_in_kernel=True, output_final_state=True)

    def results(x, bounds, backend):
        x = {name: t.detach().requires_grad_(trains) for name, t in x.items()}
        o, final = call(**x, cu_seqlens=torch.tensor(bounds, device="cuda"), cu_seqlens_cpu=bounds, backend=backend)
        found = {"o": o[:, -last:], "final_state": final[-last // 2 :]}
        if trains:
            gradients = torch.autograd.grad(o, [*x.values()], x["v"].detach())
            found |= {name: d[:, -last:] for name, d in zip(x, gradients, strict=True)}
        return {name: t.detach() for name, t in found.items()}

    got = results(x, bounds, backend)
    alone, own = {name: t[:, -last:] for name, t in x.items()}, list(range(0, last + 1, 2))
    want = results({name: t.double() for name, t in alone.items()}, own, "torch")
    with products_in(torch.bfloat16):
        reference = results(alone, own, "torch")
    for name in want:
        error, limit = (relative_error(of[name], want[name]) for of in (got, reference))
        assert error <= allowed(limit, torch.bfloat16), name
