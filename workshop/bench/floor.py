"""The least time that the hardware needs: bytes over bandwidth or operations over the tensor cores' rate, whichever is
longer.

Per token, ``e`` bytes an element of q, k, v and o, and ``a`` bytes an element of the gate and of beta:

* forward bytes: ``e (2 H K + 2 HV V) + a HV (1 + channels)``, channels = K for a gate per channel, else 1; every tensor
  is moved once;
* backward bytes: ``e (4 H K + 3 HV V) + 2 a HV (1 + channels)``: q, k, v, do, gate and beta are read, dq, dk, dv and
  the gates' gradients written;
* with convolution and norm around the rule, also ``e HV V`` for the norm's gate, and two windows of the convolution per
  sequence;
* states, per sequence and value head: ``K V`` numbers in their dtype for each state that is read or written. A draft
  writes one after every token;
* forward multiply-adds per value head: ``3 K V + 2 C K + C V`` with C = 64: the state read by k and by q and updated,
  the scores q k and k k, the output inside the chunk; decoding: ``3 K V``. Simple GLA has neither the product of the
  state and k nor k k, and no beta; the delta rule has no gate; Comba also moves the keys that erase; GDN-2 has
  ``e HV (K + V)`` bytes of b and w in place of beta; Gated DeltaProduct has several k, v and beta per token, whose
  products count as often, except those of q;
* a layer of width ``hidden`` has other bytes than the rule: weights, input, output and the float32 states that it
  keeps; backward weights, input, dy and the gradients. Its projections add a multiply-add per token and weight, and two
  in the backward pass. There are ``hidden (2 H K + 3 HV V + 2 HV)`` weights; with a gate per channel there are
  ``hidden (2 H K + 2 HV V + HV) + V (2 hidden + HV K + HV V)``. Several layers have as many times the weights and the
  rule's products. Frozen weights have no gradients;
* backward multiply-adds: 10/3 of the forward ones. There are 30 products, and the forward pass has 9: 8 for recomputed
  states and factors, 7 for the chain, and 15 that are parallel over chunks.

Rates are measured on this GPU in the same run. If an earlier run on such a GPU measured more, that rate counts instead,
so that a GPU that is slow at the moment does not make results look good.
"""

from typing import NamedTuple

import torch

from flash_delta.testing import Workload
from workshop.bench.timing import milliseconds
from workshop.check.drawn import TAPS

C = 64  # tokens per chunk
BACKWARD_PRODUCTS = 30 / 9
# The highest rates that `ceilings` measured, by the GPU's name: bytes/s in kda-training.json, bf16 FLOP/s in
# decode.json.
HIGHEST = {"NVIDIA H200": (4.26548e12, 809.875e12)}


class Ceilings(NamedTuple):
    """Rates of this GPU."""

    bytes_per_s: float
    flops_per_s: float
    measured_bytes_per_s: float
    measured_flops_per_s: float


class Floor(NamedTuple):
    bytes: int
    flops: int

    def ms(self, ceilings: Ceilings) -> float:
        return 1e3 * max(self.bytes / ceilings.bytes_per_s, self.flops / ceilings.flops_per_s)


def floor(workload: Workload) -> Floor:
    """The floor of one call, from its bytes and operations."""
    w = workload
    e = getattr(torch, w.dtype).itemsize
    if w.hidden:
        return _layer_floor(w, e)
    a = e if w.raw else 4
    channels = {"none": 0, "scalar": 1, "channel": w.K}[w.gate]
    strengths = e * (w.K + w.V) if w.op.channel_strength else a * w.op.delta * w.updates
    tokens, gates, products = w.tokens, w.HV * (strengths + a * channels), _products(w)
    keys = (1 + w.updates + w.op.erase_keys) * w.H * w.K  # of q, of k, and of keys that erase
    values = w.updates * w.HV * w.V
    moved = tokens * (e * (keys + values + w.HV * w.V) + gates)
    if w.kind == "training":
        moved += tokens * (e * (2 * keys + 2 * values + w.HV * w.V) + 2 * gates)
        products += round(BACKWARD_PRODUCTS * products)
    if w.around:
        moved += e * (tokens * w.HV * w.V + 2 * w.N * TAPS * (2 * w.H * w.K + w.HV * w.V))
    if w.states:
        states = 2 * w.N
        if w.kind == "decode":
            states = w.N + w.tokens
        if w.checkpoint_every:
            states += sum(length // w.checkpoint_every for length in w.lengths or [w.T] * w.N)
        moved += states * w.HV * getattr(torch, w.state_dtype).itemsize * w.K * w.V
    return Floor(moved, 2 * products)


def _products(w: Workload) -> int:
    """Multiply-adds of the rule's forward pass."""
    updates = w.updates
    keys = 1 + w.op.delta * updates  # q meets state and chunk, and with a delta rule k does, too
    inside = 0 if w.kind == "decode" else keys * C * w.K + C * w.V
    return w.tokens * w.HV * ((updates + keys) * w.K * w.V + inside)


def _layer_floor(w: Workload, e: int) -> Floor:
    weights, products = w.hidden * (2 * w.H * w.K + 3 * w.HV * w.V + 2 * w.HV), _products(w)
    if w.gate == "channel":  # the gates' projections have a rank of V
        low = w.V * (2 * w.hidden + w.HV * w.K + w.HV * w.V)
        weights = w.hidden * (2 * w.H * w.K + 2 * w.HV * w.V + w.HV) + low
    weights, products, uses = w.layers * weights, w.layers * products, 1
    moved = e * (weights + 2 * w.tokens * w.hidden)
    if w.kind == "training":  # the backward pass reads weights, input and its gradient, and writes their gradients
        uses += 1 if w.frozen else 2
        moved += e * ((uses - 1) * weights + 3 * w.tokens * w.hidden)
        products += round(BACKWARD_PRODUCTS * products)
    elif w.kind != "forward":
        moved += 4 * (1 + (w.kind == "decode")) * w.N * w.HV * w.K * w.V  # states, in float32
    return Floor(moved, 2 * (products + uses * w.tokens * weights))


def ceilings(device: torch.device) -> Ceilings:
    """Copies 2 GB and multiplies two random 8192 x 8192 bfloat16 matrices, ten times each, and takes the best times."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    x, y = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    copied = 2 * source.nbytes / (1e-3 * min(milliseconds(lambda: target.copy_(source), device, repeats=10)))
    multiplied = 2 * 8192**3 / (1e-3 * min(milliseconds(lambda: x @ y, device, repeats=10)))
    highest = HIGHEST.get(torch.cuda.get_device_name(device), (0.0, 0.0))
    return Ceilings(max(copied, highest[0]), max(multiplied, highest[1]), copied, multiplied)
