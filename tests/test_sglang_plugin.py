"""The plugin for SGLang without SGLang: its dispatchers and its hooks are stand-ins with the same names and arguments.
tests/engines has the real ones."""

import logging
import sys
from dataclasses import dataclass
from enum import Enum
from pkgutil import resolve_name
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from flash_delta.integrations.sglang import plugin, replay, tracked
from flash_delta.reference.activation import NORM_EPS

H, HV, K, V, SLOTS = 2, 4, 16, 16, 9
THEIRS = "SGLang's own code"
RULES = ("gated_delta_rule", "kda")


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    """Hooks are applied when they are registered."""

    @staticmethod
    def register(path, hook, kind):
        assert kind is HookType.AROUND
        owner, _, name = path.rpartition(".")
        owner = sys.modules[owner] if owner in sys.modules else resolve_name(":".join(owner.rsplit(".", 1)))
        theirs = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: hook(theirs, *args, **kwargs))


class TritonGDNKernel:
    supports_track_state_snapshot = False


class TritonKDAKernel:
    supports_track_state_snapshot = True
    supports_fused_chain_verify = True


class Dispatcher:
    def __init__(self, kernel):
        self.decode_kernel = self.extend_kernel = self.verify_kernel = kernel

    def packed_decode(
        self, mixed_qkv, a, b, *, A_log, dt_bias, scale, ssm_states, cache_indices, num_v_heads, head_v_dim, **kwargs
    ):
        return THEIRS

    def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, **kwargs):
        return THEIRS

    def extend(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, **kwargs):
        """States before each chunk, which are numbered."""
        chunks = int(((query_start_loc.diff() + 63) // 64).sum())
        return THEIRS, None, torch.arange(chunks).view(1, -1, 1, 1, 1).expand(1, -1, HV, V, K)

    def target_verify(self, A_log, dt_bias, q, k, v, a, b, *, ssm_states, cache_indices, query_start_loc, **kwargs):
        return THEIRS


@dataclass
class BatchMetadata:
    """The metadata of the running batch, if it is not in a CUDA graph."""

    mamba_cache_indices: torch.Tensor
    mamba_track_indices: torch.Tensor | None
    track_chunk_idx: torch.Tensor
    track_ssm_h_src: torch.Tensor  # the sequences whose states are copied from the buffer


@dataclass(frozen=True)
class State:
    """The tensors of a pool that drafts need."""

    temporal: torch.Tensor
    conv: list
    intermediate_conv_window: list
    replayssm_d: torch.Tensor | None = None
    replayssm_k: torch.Tensor | None = None
    replayssm_g: torch.Tensor | None = None
    replayssm_rawv: torch.Tensor | None = None
    replayssm_rawk: torch.Tensor | None = None
    replayssm_beta: torch.Tensor | None = None

    def at_layer_idx(self, n):
        tensors = vars(self).values()
        return State(*([x[n] for x in t] if isinstance(t, list) else t if t is None else t[n] for t in tensors))


class Backend:
    """Its batch is in a CUDA graph or not."""

    forward_metadata = prefill_graph_metadata = None

    def __init__(self, dispatcher, pool=None):
        self.kernel_dispatcher = dispatcher
        self.req_to_token_pool = SimpleNamespace(mamba_pool=pool or SimpleNamespace(enable_linear_replayssm_spec=False))

    def _track_mamba_state_extend(
        self, forward_batch, h, ssm_states, forward_metadata, track_states=None, *, h_track_buf=None
    ):
        m = forward_metadata
        if m.track_ssm_h_src.numel() > 0:
            source = m.track_ssm_h_src
            ssm_states[m.mamba_track_indices[source]] = h_track_buf[source].to(ssm_states.dtype)


def kda_track_ssm_state(ssm_pool, h_track, track_mode, track_dst, cache_indices):
    for mode, row in ((1, ssm_pool[cache_indices.long()]), (2, h_track.to(ssm_pool.dtype))):
        ssm_pool[track_dst[track_mode == mode]] = row[track_mode == mode]


def theirs(path):
    """A function of SGLang's with the parameters that it has there."""
    scope = {}
    exec(f"def function({', '.join(replay.PARAMETERS[path].split())}): return {THEIRS!r}", scope)
    return scope["function"]


def fresh():
    """SGLang's modules, as far as the plugin asks for them."""
    base = type("MambaAttnBackendBase", (Backend,), {})
    made = {
        "sglang.srt.mem_cache.memory_pool": {"MambaPool": type("MambaPool", (), {"SpeculativeState": State})},
        **{path.partition(":")[0]: {path.partition(":")[2]: theirs(path)} for path in replay.FOLDED},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        f"{tracked.ATTENTION}.hybrid_linear_attn_backend": {"MambaAttnBackendBase": base},
        f"{plugin.BACKENDS}.kda_prefill_graph": {"kda_track_ssm_state": kda_track_ssm_state} | tracked.MODES,
    }  # fmt: skip
    for name, kernel in (("GDN", TritonGDNKernel), ("KDA", TritonKDAKernel)):
        made[f"{plugin.BACKENDS}.{name.lower()}_backend"] = {
            f"{name}KernelDispatcher": type(f"{name}KernelDispatcher", (Dispatcher,), {}),
            f"Triton{name}Kernel": kernel,
            f"{name}AttnBackend": type(
                f"{name}AttnBackend", (base,), {"_replayssm_target_verify": theirs(replay.VERIFY)}
            ),
        }
    for name, values in made.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        yield name, module


@pytest.fixture
def engine(monkeypatch):
    for name, module in fresh():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin, "_active", [])
    monkeypatch.setattr(plugin, "_version", lambda: "0.5.23")
    monkeypatch.setenv(plugin.VARIABLE, "1")
    torch.manual_seed(0)


def dispatcher_class(rule):
    path = list(plugin.DISPATCHERS)[RULES.index(rule)]
    module, _, name = path.rpartition(".")
    return getattr(sys.modules[module], name)


def make(rule, kernel=None):
    plugin.register()
    kernel = kernel or {"gated_delta_rule": TritonGDNKernel, "kda": TritonKDAKernel}[rule]
    return dispatcher_class(rule)(kernel())


def index(*values):
    return torch.tensor(values, dtype=torch.int32)


def layer(rule):
    """Parameters of the gate, in the shapes that SGLang has."""
    if rule == "kda":
        return {"A_log": torch.randn(1, 1, HV, 1), "dt_bias": torch.randn(HV * K) - 2}
    return {"A_log": torch.randn(HV), "dt_bias": torch.randn(HV) - 2}


def tokens(rule, n):
    """q, k, v [1, n, ...], raw a and b."""
    heads = HV if rule == "kda" else H
    q, k = torch.randn(2, 1, n, heads, K)
    return q, k, torch.randn(1, n, HV, V), torch.randn(n, HV * (K if rule == "kda" else 1)), torch.randn(n, HV)


def gates(rule, x, parameters, lower_bound=None):
    """Log decays [n, HV, 1 or K] and strengths [n, HV], in float64."""
    a, b = (t.double() for t in x[3:])
    z = a.view(len(a), HV, -1) + parameters["dt_bias"].double().view(HV, -1)
    rate = parameters["A_log"].double().view(HV, 1).exp()
    return (-rate * F.softplus(z) if lower_bound is None else lower_bound * torch.sigmoid(rate * z)), b.sigmoid()


def step(S, x, t, g, beta):
    """The state [HV, V, K] after token t, and its output, in float64."""
    unit = (
        y / (y.square().sum(-1, keepdim=True) + NORM_EPS).sqrt() for y in (x[0][0, t].double(), x[1][0, t].double())
    )
    q, k = (y.repeat_interleave(HV // len(y), 0) for y in unit)
    S = S * g[t].exp()[:, None]
    S = S + (beta[t][:, None] * (x[2][0, t].double() - (S * k[:, None]).sum(-1)))[..., None] * k[:, None]
    return S, (S * q[:, None]).sum(-1) * K**-0.5


def walk(S, x, g, beta, begin, end):
    """All states, the first one included, and outputs of a sequence."""
    states, outputs = [S.double()], []
    for t in range(begin, end):
        S, o = step(states[-1], x, t, g, beta)
        states.append(S)
        outputs.append(o)
    return states, outputs


def close(got, want, off=2e-5):
    torch.testing.assert_close(got.double(), want.double(), rtol=off, atol=off)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("rule", "bound"), [("gated_delta_rule", None), ("kda", None), ("kda", -5.0)])
def test_decode(engine, rule, bound, packed):
    """The third row is padding."""
    x, parameters, pool, rows = tokens(rule, 3), layer(rule), torch.randn(SLOTS, HV, V, K), index(4, 2, -1)
    before, more = pool.clone(), parameters | ({} if bound is None else {"lower_bound": bound})
    more |= {"ssm_states": pool, "cache_indices": rows}
    if packed:
        mixed = torch.cat([t[0].flatten(1) for t in x[:3]], -1)
        ring = dict.fromkeys(("replayssm_d", "replayssm_k", "replayssm_g", "replayssm_write_pos"))
        more |= {"scale": K**-0.5, "num_v_heads": HV, "head_v_dim": V}
        o = make(rule).packed_decode(mixed, *x[3:], **more, **ring)
    else:
        o = make(rule).decode(*x, **more, query_start_loc=index(0, 1, 2, 3))
    assert o.shape == (1, 3, HV, V)
    assert not o[0, 2].any()
    gate = gates(rule, x, parameters, bound)
    for n, slot in enumerate((4, 2)):
        S, want = step(before[slot].double(), x, n, *gate)
        close(o[0, n], want)
        close(pool[slot], S)
        before[slot] = pool[slot]
    assert torch.equal(pool, before)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_target_verify(engine, rule, tree):
    """The pool is only read. Roots have no parent. The last row is padding, and SGLang's tables are longer."""
    T, x, parameters, pool = 4, tokens(rule, 12), layer(rule), torch.randn(SLOTS, HV, V, K)
    before, buffer = pool.clone(), torch.zeros(6, T, HV, V, K)
    parents = torch.tensor([[7, 0, 0, 1], [0, 0, 1, 1], [5, 5, 5, 5]]) if tree else None
    o = make(rule).target_verify(
        **parameters, q=x[0], k=x[1], v=x[2], a=x[3], b=x[4][None], ssm_states=pool, cache_indices=index(2, 5, -1, -1),
        query_start_loc=index(0, 4, 8, 12), intermediate_states_buffer=buffer, cache_steps=T,
        intermediate_state_indices=index(3, 1, 0, 2, 4), retrieve_parent_token=parents, stable_rows=False,
    )  # fmt: skip
    assert torch.equal(pool, before)
    assert not o[0, 8:].any()
    gate = gates(rule, x, parameters)
    for n, (slot, row) in enumerate(((2, 3), (5, 1))):
        states = []
        for t in range(T):
            parent = -1 if t == 0 else int(parents[n, t]) if tree else t - 1
            S, want = step(before[slot].double() if parent < 0 else states[parent], x, n * T + t, *gate)
            states.append(S)
            close(o[0, n * T + t], want)
            close(buffer[row, t], S)
    assert not buffer[[0, 2, 4, 5]].any()


def extend(rule, x, parameters, dispatcher=None, **more):
    """A call as SGLang makes it: its own gate for Gated DeltaNet, raw ones for KDA."""
    if rule == "kda":
        g, beta = x[3].view(1, -1, HV, K), x[4][None]
        more |= parameters | {"beta_is_raw": True, "lower_bound": None, "is_spec_decode": False}
    else:
        g, beta = (t.float().squeeze(-1)[None] for t in gates(rule, x, parameters))
    return (dispatcher or make(rule)).extend(q=x[0], k=x[1], v=x[2], g=g, beta=beta, **more)


def make_backend(rule, *pool, kernel=None):
    """A backend, and with it its dispatcher."""
    dispatcher, name = make(rule, kernel), "GDN" if rule == "gated_delta_rule" else "KDA"
    return getattr(sys.modules[f"{plugin.BACKENDS}.{name.lower()}_backend"], f"{name}AttnBackend")(dispatcher, *pool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tracked", [None, "eager", "graph"])
@pytest.mark.parametrize("rule", RULES)
def test_extend(engine, rule, tracked, dtype):
    """Sequences of 70, 1, 130 and no tokens. The radix cache keeps the states after 64 and 128 tokens, in a graph also
    the last one of the second sequence. SGLang's buffer is not written, and its NaN do not reach the pool."""
    x, parameters, pool = tokens(rule, 201), layer(rule), torch.randn(SLOTS, HV, V, K).to(dtype)
    before, bounds, rows, to = pool.clone(), [0, 70, 71, 201, 201], index(4, 2, 6, -1), torch.tensor([8, 1, 3, 0])
    kept, chunks, backend = torch.full((4, HV, V, K), torch.nan), index(1, -1, 2, -1), make_backend(rule)
    more = {"return_intermediate_states": tracked == "eager"} if rule == "kda" else {"num_state_checkpoints": 0}
    if tracked:
        more |= {"track_state": kept, "track_chunk_idx": chunks}
        backend.forward_metadata = BatchMetadata(rows, to, chunks, torch.tensor([0, 2]))
    if tracked == "graph":
        backend.forward_metadata = BatchMetadata(rows.clone(), None, chunks.clone(), torch.tensor([0, 2]))
        backend.prefill_graph_metadata = SimpleNamespace(cache_indices=rows, track_dst=to, track_chunk_idx=chunks)
    found = extend(
        rule, x, parameters, ssm_states=pool, cache_indices=rows, query_start_loc=index(*bounds),
        dispatcher=backend.kernel_dispatcher, **more,
    )  # fmt: skip
    o = found[0] if isinstance(found, tuple) else found
    if tracked == "eager":
        backend._track_mamba_state_extend(None, None, pool, backend.forward_metadata, h_track_buf=kept)
    elif tracked == "graph":
        copy = sys.modules[f"{plugin.BACKENDS}.kda_prefill_graph"].kda_track_ssm_state
        copy(ssm_pool=pool, h_track=kept, track_mode=index(2, 1, 2, 0), track_dst=to, cache_indices=rows)
    gate, off = gates(rule, x, parameters), 2e-5 if dtype == torch.float32 else 1e-2
    for n, (slot, offset) in enumerate(((4, 64), (2, 1 if tracked == "graph" else None), (6, 128))):
        states, want = walk(before[slot], x, *gate, bounds[n], bounds[n + 1])
        close(o[0, bounds[n] : bounds[n + 1]], torch.stack(want))
        close(pool[slot], states[-1], off)
        before[slot] = pool[slot]
        if tracked and offset is not None:
            close(pool[to[n]], states[offset], off)
            before[to[n]] = pool[to[n]]
    assert torch.equal(pool, before)


@pytest.mark.parametrize("rule", RULES)
def test_prompts_whose_tracked_states_have_no_known_slots_run_on_sglangs_own_code(engine, caplog, rule):
    """The states are gathered ones, not those in the pool. SGLang then copies what its kernel wrote."""
    x, parameters, backend = tokens(rule, 70), layer(rule), make_backend(rule)
    rows, chunks, kept = index(4), index(1), torch.zeros(1, HV, V, K)
    backend.forward_metadata = BatchMetadata(rows, torch.tensor([8]), chunks, torch.tensor([0]))
    more = {"cache_indices": index(0), "query_start_loc": index(0, 70), "ssm_states": torch.randn(1, HV, V, K)}
    with caplog.at_level(logging.WARNING):
        found = extend(
            rule, x, parameters, dispatcher=backend.kernel_dispatcher, track_state=kept, track_chunk_idx=chunks, **more
        )
    assert found[0] == THEIRS
    assert "track_state: expected" in caplog.text
    pool = torch.zeros(SLOTS, HV, V, K)
    backend._track_mamba_state_extend(None, None, pool, backend.forward_metadata, h_track_buf=torch.ones_like(kept))
    assert (pool[8] == 1).all()


def test_a_version_with_other_copies_keeps_its_own_prompts(engine, caplog):
    module = sys.modules[f"{plugin.BACKENDS}.kda_prefill_graph"]
    module.TRACK_CHUNK_STATE = 3
    with caplog.at_level(logging.WARNING):
        backend = make_backend("kda")
    assert "TRACK_CHUNK_STATE have other values" in caplog.text
    assert module.kda_track_ssm_state is kda_track_ssm_state
    assert not hasattr(backend.kernel_dispatcher, "_flash_delta_backend")


def test_extend_that_only_reads(engine, problems):
    """Items of one query share its state."""
    rule, pool = "gated_delta_rule", torch.randn(SLOTS, HV, V, K)
    x, parameters, before = tokens(rule, 50), layer(rule), pool.clone()
    o, *_ = extend(
        rule, x, parameters, ssm_states=pool, cache_indices=index(3, 3), query_start_loc=index(0, 20, 50),
        inplace_update=False,
    )  # fmt: skip
    assert torch.equal(pool, before)
    close(o[0, 20:], torch.stack(walk(pool[3], x, *gates(rule, x, parameters), 20, 50)[1]))
    assert problems[-1].most_beta == 1  # SGLang gives sigmoids
