"""SGLang's own dispatchers under the plugin, beside its own Triton kernels, which Triton's interpreter runs."""

import contextlib
import importlib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_tables import missing

from flash_delta.integrations.sglang import plugin, replay, tracked
from flash_delta.integrations.sglang.calls import fill_tracked

if find_spec("sglang") is None or find_spec("triton") is None:
    pytest.skip("it needs SGLang and Triton", allow_module_level=True)

import fla_interpreter
from sglang_stubs import put_stubs, repair

pytestmark = pytest.mark.filterwarnings("ignore")
H, HV, K, V, SLOTS = 2, 4, 32, 32, 9
RULES = ("gated_delta_rule", "kda")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
ROUNDED = {"rtol": 4e-3, "atol": 4e-3}  # of prompts, whose q, k and v SGLang takes in 16 bits only


@pytest.fixture(scope="module")
def dispatchers():
    """By rule: SGLang's, made after it has applied our hooks."""
    put_stubs()
    fla_interpreter.prepare()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(plugin.VARIABLE, "1")
        patch.setattr(torch.cpu, "device", lambda *_: contextlib.nullcontext(), raising=False)
        plugin.register()
        assert {*plugin.FEATURES} <= {*plugin._active}
        importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
        triton = importlib.import_module(f"{plugin.BACKENDS}.utils").LinearAttnKernelBackend.TRITON
        made = {}
        for rule, path in zip(RULES, plugin.DISPATCHERS, strict=True):
            module, _, name = path.rpartition(".")
            made[rule] = getattr(importlib.import_module(module), name)(triton, triton, triton)
        importlib.import_module(replay.CIRCULAR.partition(":")[0])
        importlib.import_module(replay.EXACT.partition(":")[0])
        repair()
        fla_interpreter.repair()
        yield made


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def index(*values):
    return torch.tensor(values, dtype=torch.int32)


def layer(rule):
    return {"A_log": torch.randn(HV), "dt_bias": torch.randn(HV * (K if rule == "kda" else 1)) - 2}


def tokens(rule, n):
    heads = HV if rule == "kda" else H
    q, k = torch.randn(2, 1, n, heads, K)
    return {
        "q": q, "k": k, "v": torch.randn(1, n, HV, V), "a": torch.randn(n, HV * (K if rule == "kda" else 1)),
        "b": torch.randn(n, HV),
    }  # fmt: skip


def ran_here(dispatcher):
    forms = vars(dispatcher)["_flash_delta_forms"]
    return bool(forms) and not any(forms.values()) and "_flash_delta_reasons" not in vars(dispatcher)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_decode(dispatchers, rule, packed):
    """The last row is padding. SGLang's packed kernels do not run in the interpreter: its other one stands for them."""
    d, x, pool = dispatchers[rule], tokens(rule, 3), torch.randn(SLOTS, HV, V, K)
    pools = [pool, pool.clone()]
    more = {**layer(rule), "cache_indices": index(4, 2, -1)}
    bounds = {"query_start_loc": index(0, 1, 2, 3)}
    theirs = d.decode_kernel.decode(**x, **more, **bounds, ssm_states=pools[1])
    if packed:
        mixed = torch.cat([x.pop(name)[0].flatten(1) for name in "qkv"], -1)
        bounds = {"mixed_qkv": mixed, "scale": K**-0.5, "num_v_heads": HV, "head_v_dim": V}
    ours = (d.packed_decode if packed else d.decode)(**x, **more, **bounds, ssm_states=pools[0])
    assert ran_here(d)
    torch.testing.assert_close(ours[:, :2], theirs[:, :2], **CLOSE)
    torch.testing.assert_close(*pools, **CLOSE)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_target_verify(dispatchers, rule, tree):
    d, T, buffer = dispatchers[rule], 4, torch.zeros(4, 4, HV, V, K)
    parents = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]) if tree else None
    more = {"intermediate_states_buffer": buffer, "retrieve_parent_token": parents, "cache_steps": T}
    more |= {"cache_indices": index(2, 5), "query_start_loc": index(0, 4, 8), **tokens(rule, 8), **layer(rule)}
    more |= {"intermediate_state_indices": index(1, 0, 2), "ssm_states": torch.randn(SLOTS, HV, V, K)}
    ours = d.target_verify(**more)
    states = buffer.clone()
    buffer.zero_()
    theirs = d.verify_kernel.target_verify(**more)
    assert ran_here(d)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(states, buffer, **CLOSE)


def backend_of(rule, dispatcher):
    """SGLang's backend of a dispatcher, without a model."""
    name = "GDNAttnBackend" if rule == "gated_delta_rule" else "KDAAttnBackend"
    cls = getattr(importlib.import_module(f"{plugin.BACKENDS}.{name[:3].lower()}_backend"), name)
    backend = object.__new__(cls)
    backend.kernel_dispatcher = dispatcher
    tracked.introduce(backend)
    return backend


@pytest.mark.parametrize(("rule", "graph"), [("gated_delta_rule", False), ("kda", False), ("kda", True)])
def test_extend(dispatchers, rule, graph):
    """The radix cache keeps states after 64 and 128 tokens, and the last one of the second sequence. SGLang copies them
    to their slots by itself. With the plugin its buffer is not read."""
    d, bounds, chunks, n = dispatchers[rule], index(0, 70, 71, 201), index(1, -1, 2), 201
    x, rows, to = tokens(rule, n), index(4, 2, 6), torch.tensor([8, 1, 3])
    kept = [torch.full((3, HV, V, K), torch.nan), torch.zeros(3, HV, V, K)]
    more = {"q": x["q"], "k": x["k"], "v": x["v"], "query_start_loc": bounds, "cache_indices": rows}
    more |= {"ssm_states": torch.randn(SLOTS, HV, V, K), "track_chunk_idx": chunks}
    if rule == "kda":
        more |= {"g": x["a"].view(1, n, HV, K), "beta": x["b"][None], "beta_is_raw": True, **layer(rule)}
        more["return_intermediate_states"] = not graph
    else:
        more |= {"g": -torch.rand(1, n, HV), "beta": torch.rand(1, n, HV)}
    more |= {name: more[name].half() for name in ("q", "k", "v")}
    pools = [more["ssm_states"].clone() for _ in range(2)]
    backend = backend_of(rule, d)
    metadata = importlib.import_module("sglang.srt.layers.attention.mamba.mamba2_metadata").ForwardMetadata(
        query_start_loc=bounds, mamba_cache_indices=rows, mamba_track_indices=to, track_chunk_idx=chunks,
        track_ssm_h_src=torch.tensor([1, 5]), track_ssm_h_dst=to[::2], track_ssm_h_batch_src=torch.tensor([0, 2]),
        track_ssm_final_src=rows[1:2].long(), track_ssm_final_dst=to[1:2], has_mamba_track_mask=True,
    )  # fmt: skip
    if graph:
        in_graph = importlib.import_module(tracked.GRAPH)
        backend.prefill_graph_metadata = SimpleNamespace(cache_indices=rows, track_dst=to, track_chunk_idx=chunks)
        assert vars(backend.prefill_graph_metadata).keys() < {*in_graph.KDAPrefillGraphMetadata.__struct_fields__}
        metadata, mode = None, index(2, 1, 2)
    backend.forward_metadata = metadata
    ours = d.extend(**more | {"ssm_states": pools[0], "track_state": kept[0]})
    theirs = d.extend_kernel.extend(**more | {"ssm_states": pools[1], "track_state": kept[1]})
    if rule != "kda":
        fill_tracked(theirs[2], bounds, kept[1], chunks)
    for pool, buffer in zip(pools, kept, strict=True):
        if graph:
            in_graph.kda_track_ssm_state(
                ssm_pool=pool, h_track=buffer, track_mode=mode, track_dst=to, cache_indices=rows
            )
        else:
            backend._track_mamba_state_extend(None, None, pool, metadata, h_track_buf=buffer)
    assert ran_here(d)
    torch.testing.assert_close(*((o if graph else o[0]) for o in (ours, theirs)), **ROUNDED)
    torch.testing.assert_close(*pools, **ROUNDED)
    assert kept[0].isnan().all()


def test_the_guide_names_what_sglang_has():
    """In the files that say how its layers are called."""
    root = Path(find_spec("sglang").submodule_search_locations[0]) / "srt"
    linear = [root / f"layers/attention/linear/{name}.py" for name in ("gdn_backend", "kda_backend", "linear_metadata")]
    batch = [root / "model_executor/forward_batch_info.py", root / "mem_cache/memory_pool.py"]
    assert not missing("SGLang", [*linear, *batch, root / "layers/attention/hybrid_linear_attn_backend.py"])
