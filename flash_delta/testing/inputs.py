"""Random arguments of a named case."""

import math
from typing import Any

import torch
from torch import Tensor

from flash_delta.testing.cases import OF_UPDATES, Case, Member


def make_inputs(
    case: Case, member: Member, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """Arguments for ``member.op``, with gradients. Random numbers are drawn on the CPU, so all devices get the same."""
    gen = torch.Generator().manual_seed(seed)
    B, T, H, HV, K, V = case.B, case.T, case.H, case.HV, case.K, case.V
    n = member.updates
    options = {name: value for name, value in case.options.items() if name in member.options}
    x = {"q": _randn(gen, B, T, H, K), "k": _keys(case, gen, B, n * T, H, K), "v": _randn(gen, B, n * T, HV, V)}
    if member.erase_keys:  # with equal keys a p of its own is no contraction: states would grow without bound
        x["p"] = x["k"].clone() if case.keys == "correlated" else _keys(case, gen, B, T, H, K)
    if member.gate != "none":
        shape = (B, T, HV, K) if member.gate == "channel" else (B, T, HV)
        x |= _gate(case, gen, shape, raw="use_gate_in_kernel" in options)
    if member.delta:
        strengths = {"b": (K,), "w": (V,)} if member.channel_strength else {"beta": ()}
        raw = "use_beta_sigmoid_in_kernel" in options
        x |= {name: _beta(case, gen, (B, n * T, HV, *width), raw) for name, width in strengths.items()}
    if case.keys == "stretching":
        x |= _stretching(case, gen)
    N = B if case.lengths is None else len(case.lengths)
    if case.initial_state:
        state = _randn(gen, N, HV, K, V) * (case.floors is None)
        x["initial_state"] = state.mT.contiguous() if options.get("state_v_first") else state
    if case.lengths is not None:
        for name in x.keys() & {"q", "k", "v", "p", "g", "beta", "b", "w"}:
            rows = n if name in OF_UPDATES else 1
            x[name][:, rows * sum(case.lengths) :] = math.nan
        bounds = torch.tensor([0, *case.lengths]).cumsum(0)
        options |= {"cu_seqlens": bounds.to(device), "cu_seqlens_cpu": bounds}
        options = {n: v for n, v in options.items() if n != "cu_seqlens_cpu" or torch.device(device).type != "cpu"}
    if n > 1:
        options |= {"num_householder": n} | ({} if "g" in x else {"g": None})
    wide = {"A_log", "dt_bias"}  # parameters and mostly states are kept in at least float32
    wide |= (set() if case.gaps else {"initial_state"}) | ({"g"} if case.wide_gates else set())
    wide |= set() if case.floors is None else {"beta"}  # in 16 bits 1.999 is 2
    dtypes = {name: torch.promote_types(dtype, torch.float32) if name in wide else dtype for name in x}
    x = {name: t.to(device, dtypes[name]) for name, t in x.items()}
    x = {name: with_gaps(t) for name, t in x.items()} if case.gaps else x
    return {name: t.requires_grad_() for name, t in x.items()} | options | {"output_final_state": True}


def with_gaps(t: Tensor) -> Tensor:
    """Returns the numbers with three numbers between rows (in a vector, one between numbers)."""
    return torch.nn.functional.pad(t, (0, 3))[..., :-3] if t.dim() > 1 else t.repeat_interleave(2)[::2]


def _randn(gen: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=gen, dtype=torch.float64)


def _keys(case: Case, gen: torch.Generator, B: int, T: int, H: int, K: int) -> Tensor:
    if case.floors is not None:
        return _repeated_keys(case, gen, B, T, H, K)
    x = _randn(gen, B, T, H, K)
    if case.keys == "correlated":
        x = 0.1 * x + _randn(gen, K)
    x = torch.nn.functional.normalize(x, dim=-1)
    if case.keys == "some zero":
        x[:, ::3] = 0
    return x


def _repeated_keys(case: Case, gen: torch.Generator, B: int, T: int, H: int, K: int) -> Tensor:
    """Keys of a hard case. Equal keys are equal in all bits. Lengths are drawn from 0.5 to 2, one for each key.

    "one", "two" in turn, "16" in random order; "signs": one key and its negative; "direction": one with noise;
    "turning": a walk, in which two neighbours have a cosine of about 0.95.
    """
    count = {"two": 2, "16": 16, "turning": T}.get(case.keys, 1)
    own = _randn(gen, B, count, H, K)
    if case.keys == "turning":
        for t in range(1, T):
            own[:, t] = 0.95 * own[:, t - 1] + math.sqrt(1 - 0.95**2) * own[:, t]
    order = torch.arange(T) % count
    if case.keys == "16":
        order = torch.randint(count, (T,), generator=gen)
    x = torch.nn.functional.normalize(own, dim=-1)[:, order]
    if case.keys == "direction":
        x = x + case.noise * torch.nn.functional.normalize(_randn(gen, B, T, H, K), dim=-1)
        count, order = T, torch.arange(T)
    if case.keys == "signs":
        x = x * (1 - 2 * torch.randint(2, (B, T, H, 1), generator=gen))
    return x * (0.5 + 1.5 * torch.rand(B, count, H, 1, generator=gen, dtype=torch.float64))[:, order]


def _stretching(case: Case, gen: torch.Generator) -> dict[str, Tensor]:
    """Two unit keys in turn, which have the same directions in the first and in the second half of the channels. Each
    erases with one half alone. At these angles they stretch a state most."""
    B, T, H, HV, K = case.B, case.T, case.H, case.HV, case.K
    most, *angles = (2.0, 116, 26) if case.beta == "to 2" else (1.0, 24, 66)
    turn = torch.tensor(angles, dtype=torch.float64).deg2rad()[torch.arange(T) % 2, None, None]
    halves = torch.nn.functional.normalize(_randn(gen, 2, B, 1, H, K // 2), dim=-1)
    b = torch.zeros(B, T, HV, K, dtype=torch.float64)
    b[:, ::2, :, K // 2 :] = b[:, 1::2, :, : K // 2] = most
    return {"k": torch.cat([turn.cos() * halves[0], turn.sin() * halves[1]], -1), "b": b}


def _gate(case: Case, gen: torch.Generator, shape: tuple[int, ...], raw: bool) -> dict[str, Tensor]:
    HV, channels = shape[2], math.prod(shape[2:])
    if raw:
        g = _randn(gen, *shape)
        A_log = torch.rand(HV, generator=gen, dtype=torch.float64).mul_(math.log(16))
        dt_bias = _randn(gen, channels) - 2
        return {"g": 5 * g if case.decay == "strong" else g, "A_log": A_log, "dt_bias": dt_bias}
    if case.decay == "slow":
        return {"g": -torch.nn.functional.softplus(_randn(gen, *shape)) / 64}
    if isinstance(case.decay, float):
        return {"g": torch.full(shape, case.decay, dtype=torch.float64)}
    g = -torch.rand(shape, generator=gen, dtype=torch.float64)
    scale = {"mild": 0.2, "zero": 0.0, "strong": 100.0, "extreme": 0.2, "rising": 0.16}[case.decay]
    g = g * scale
    if case.decay == "rising":
        g += 0.12
    if case.decay == "extreme":
        g[:, 3::5], g[:, 4::29] = -1000.0, -math.inf
    return {"g": g}


def _beta(case: Case, gen: torch.Generator, shape: tuple[int, ...], raw: bool) -> Tensor:
    if raw:
        return _randn(gen, *shape)
    if case.beta == "to 2":
        return 2 * torch.sigmoid(_randn(gen, *shape))
    if isinstance(case.beta, float):
        return torch.full(shape, case.beta, dtype=torch.float64)
    beta = torch.rand(shape, generator=gen, dtype=torch.float64)
    if case.beta == "one":
        beta.fill_(1)
    if case.beta == "some zero":
        beta[:, ::4] = 0
    return beta
