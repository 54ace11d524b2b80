"""The first calls of a process, from several threads at once. It ends with an error if a call does, or if the same call
gives another result later."""

import sys
import threading
from functools import partial

import torch

import flash_delta
from flash_delta.layers import GatedDeltaNet, KimiDeltaAttention
from flash_delta.modules import causal_conv1d, rms_norm

DEVICE = sys.argv[1]
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
WIDTH = 64 if DEVICE == "cuda" else 16


def randn(*shape):
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def trained(op, *inputs):
    inputs = [x.requires_grad_() for x in inputs]

    def call():
        o, _ = op(*inputs, use_qk_l2norm_in_kernel=True)
        return o, *torch.autograd.grad(o, inputs, torch.ones_like(o))

    return call


def rows(*channels, T=70):
    q, k, v = (randn(1, T, 2, WIDTH) for _ in range(3))
    return q, k, v, -randn(1, T, 2, *channels).abs(), randn(1, T, 2).sigmoid()


def decoded():
    pool, slots = torch.randn(3, 2, WIDTH, WIDTH, device=DEVICE), torch.tensor([1], device=DEVICE)
    tokens = rows(T=1)
    return lambda: flash_delta.decode_gated_delta_rule(*tokens, pool.clone(), slots, slots, state_v_first=True)


def layer(kind):
    made, x = kind(hidden_size=64, num_heads=2, head_dim=32).to(DEVICE), torch.randn(1, 70, 64, device=DEVICE)
    return lambda: made(x)[0]


torch.manual_seed(0)
CALLS = [
    trained(flash_delta.chunk_gated_delta_rule, *rows()),
    trained(flash_delta.chunk_gated_delta_rule, *rows()),  # the same kernels as in the first thread
    trained(flash_delta.chunk_kda, *rows(WIDTH)),
    partial(flash_delta.fused_recurrent_gated_delta_rule, *rows(T=3)[:4], beta=rows(T=3)[4]),
    decoded(),
    layer(GatedDeltaNet),
    layer(KimiDeltaAttention),
    partial(causal_conv1d, randn(1, 70, 32), randn(32, 4)),
    partial(rms_norm, randn(1, 70, 32), randn(32), 1e-5),
]
start, found, errors = threading.Barrier(len(CALLS)), {}, []


def work(number):
    start.wait()
    try:
        found[number] = CALLS[number]()
    except BaseException as error:
        errors.append(error)


threads = [threading.Thread(target=work, args=(number,)) for number in range(len(CALLS))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for error in errors:
    raise error
for number, call in enumerate(CALLS):
    for got, want in zip(found[number], call(), strict=True):
        assert got is want is None or torch.equal(got, want), number
