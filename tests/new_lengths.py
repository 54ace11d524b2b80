"""Calls of one length after the other, on a GPU or on one that is none, and what they take of the host."""

import random
import time
from functools import partial
from statistics import median

import torch

import flash_delta
from flash_delta.modules.convolution import causal_conv1d
from flash_delta.modules.norm import rms_norm

H, HV, K, V = 16, 32, 128, 128
RAW = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
MOST = 8192  # tokens


class Calls:
    """By kind and length, on slices of tensors that are there, so that a call makes its outputs only."""

    def __init__(self, **options):
        self.options = options
        self.x = torch.zeros(MOST * HV * V, dtype=torch.bfloat16, **options)
        self.w = torch.zeros(4 * HV * V, dtype=torch.bfloat16, **options)
        self.A_log = torch.zeros(HV, **options)
        self.pool = torch.zeros(16, HV, V, K, **options)

    def like(self, *shape):
        return self.x[: torch.Size(shape).numel()].view(shape)

    def tokens(self, B, T):
        gates = {"g": self.like(B, T, HV), "beta": self.like(B, T, HV), "A_log": self.A_log, "dt_bias": self.A_log}
        return RAW | {"q": self.like(B, T, H, K), "k": self.like(B, T, H, K), "v": self.like(B, T, HV, V)} | gates

    def forward(self, T):
        return partial(flash_delta.chunk_gated_delta_rule, **self.tokens(1, T), output_final_state=True)

    def training(self, T):
        x = self.tokens(1, T)
        return partial(flash_delta.chunk_gated_delta_rule, **(x | {"q": x["q"].detach().requires_grad_()}))

    def prefill(self, T, N=3):
        bounds = torch.tensor([T * n // N for n in range(N + 1)], dtype=torch.int32).to(**self.options)
        return partial(flash_delta.prefill_gated_delta_rule, **self.tokens(1, T), **self.slots(N), cu_seqlens=bounds)

    def decode(self, B):
        return partial(flash_delta.decode_gated_delta_rule, **self.tokens(B, 1), **self.slots(B))

    def slots(self, rows):
        numbers = torch.arange(rows, dtype=torch.int32).to(**self.options)
        return {"state_pool": self.pool, "read_indices": numbers, "write_indices": numbers, "state_v_first": True}

    def convolution(self, T):
        return partial(causal_conv1d, self.like(1, T, HV * V), self.w.view(-1, 4))

    def norm(self, T):
        return partial(rms_norm, self.like(1, T, HV, V), self.w[:V], 1e-6)


def lengths(number, seed=0):
    """Each of them once; the longest first, whose memory and whose kernels the others find."""
    return [MOST, *random.Random(seed).sample(range(17, MOST), number)]


def host_us(calls, wait=lambda: None):
    """Returns the microseconds until each call returns. It waits after every few calls, so that no queue is ever
    full."""
    found = []
    for number, call in enumerate(calls):
        if number % 16 == 0:
            wait()
        start = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - start))
    return found


def told(name, us):
    return f"{name}: {len(us)} calls, median {median(us):.0f} us, worst {max(us) / 1e3:.2f} ms"
