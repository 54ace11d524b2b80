"""Checkpoints in int8 (``--enable-int8-mamba-checkpoint``): SGLang's own pools, between tokens that the plugin runs."""

import importlib
from importlib.util import find_spec

import pytest
import torch

if find_spec("sglang") is None or find_spec("triton") is None:
    pytest.skip("it needs SGLang and Triton", allow_module_level=True)

from test_sglang import RULES, dispatchers, index  # noqa: F401  a fixture
from test_sglang_drafts import HEADS, HV, LAYERS, SLOTS, K, backend_of, forward, layers_of, pool_of

from flash_delta.ops.serving import Int8States, dequantize_states, quantize_states
from flash_delta.testing import relative_error

pytestmark = pytest.mark.filterwarnings("ignore")
BEFORE, AFTER = 8, 4  # tokens


def checkpoints_of(pool):
    """SGLang's pool of checkpoints for this pool of states."""
    cache = pool.mamba_cache
    return importlib.import_module("sglang.srt.mem_cache.mamba_checkpoint_pool").MambaCheckpointPool(
        num_layers=LAYERS, num_slots=6, num_heads=HV, head_v_dim=K, head_k_dim=K,
        conv_shapes=[t.shape[2:] for t in cache.conv], conv_dtype=cache.conv[0].dtype, device="cpu",
        temporal_dtype=cache.temporal.dtype,
    )  # fmt: skip


def tokens_of(rule):
    """One request's tokens for every layer."""
    torch.manual_seed(0)
    wide, gates = (2 * HEADS[rule] + HV) * K, HV * (K if rule == "kda" else 1)
    return layers_of(rule), [
        [(torch.randn(1, 1, wide).bfloat16(), torch.randn(1, 1, gates), torch.randn(1, 1, HV)) for _ in range(LAYERS)]
        for _ in range(BEFORE + AFTER)
    ]


def decode(backend, layers, tokens, slot):
    run = [[forward(backend, layer, x, index(slot), 1) for layer, x in zip(layers, y, strict=True)] for y in tokens]
    return torch.stack([torch.cat(outputs) for outputs in run])


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_a_request_goes_on_from_a_checkpoint(dispatchers, rule, states):  # noqa: F811
    """The plugin runs a request. SGLang keeps its state in int8, loads it to another slot, and the plugin goes on."""
    layers, tokens = tokens_of(rule)
    pool = pool_of(rule, states, drafts=False)
    backend, checkpoints, other = backend_of(rule, dispatchers[rule], pool), checkpoints_of(pool), torch.tensor([5])
    decode(backend, layers, tokens[:BEFORE], 3)
    kept = checkpoints.alloc(1)
    checkpoints.store_from_active(pool, torch.tensor([3]), kept)
    checkpoints.load_to_active(pool, kept, other)
    wanted, found = (decode(backend, layers, tokens[BEFORE:], slot) for slot in (3, 5))
    assert 0 < relative_error(found, wanted) < 0.02


@pytest.mark.usefixtures("dispatchers")
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
def test_its_store_is_an_int8_store(states):
    """Its tensors fit our ops: what it keeps we restore with the bits that it has, and the other way around."""
    pool = pool_of("kda", states, drafts=False)
    temporal, checkpoints = pool.mamba_cache.temporal, checkpoints_of(pool)
    store, rows = Int8States(checkpoints.temporal.qdata, checkpoints.temporal.scale), torch.tensor([2, 4])
    slots = checkpoints.alloc(2)
    assert temporal.shape == (LAYERS, SLOTS, HV, K, K)
    checkpoints.temporal.store_from_pool(temporal, rows, slots)
    loaded, back = checkpoints.temporal.load(slots, states), torch.zeros_like(temporal)
    dequantize_states(store, slots, back, rows, null_slot=0)
    assert torch.equal(back[:, rows], loaded)
    assert relative_error(back[:, rows], temporal[:, rows]) < 0.01
    quantize_states(temporal, rows, store, slots, null_slot=0)
    dequantize_states(store, slots, back, rows, null_slot=0)
    assert torch.equal(checkpoints.temporal.load(slots, states), back[:, rows])
    assert relative_error(back[:, rows], temporal[:, rows]) < 0.01
