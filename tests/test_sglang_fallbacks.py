"""What of the plugin for SGLang goes to SGLang's own code, and what it says of it."""

import logging
import sys

import pytest
import torch
from test_sglang_plugin import (
    HV,
    RULES,
    SLOTS,
    THEIRS,
    HookRegistry,
    K,
    TritonGDNKernel,
    TritonKDAKernel,
    V,
    dispatcher_class,
    engine,  # noqa: F401  a fixture
    extend,
    index,
    layer,
    make,
    tokens,
)

from flash_delta.integrations.sglang import plugin

pytestmark = pytest.mark.usefixtures("engine")


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "sglang.flash_delta" and r.levelno == logging.WARNING]


def decode(dispatcher, rule, pool, **more):
    """A call of three rows."""
    return dispatcher.decode(
        *tokens(rule, 3), **layer(rule), ssm_states=pool, cache_indices=index(4, 2, 6),
        query_start_loc=index(0, 1, 2, 3), **more,
    )  # fmt: skip


def verify(dispatcher, T, **more):
    rule = "gated_delta_rule"
    q, k, v, a, b = tokens(rule, T)
    return dispatcher.target_verify(
        **layer(rule), q=q, k=k, v=v, a=a, b=b, ssm_states=torch.randn(SLOTS, HV, V, K), cache_indices=index(2),
        query_start_loc=index(0, T), intermediate_states_buffer=torch.zeros(2, T, HV, V, K), cache_steps=T,
        intermediate_state_indices=index(0, 1), **{"retrieve_parent_token": None} | more,
    )  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_an_argument_that_is_not_known(rule, caplog):
    """The log says so once, and other calls still run here."""
    dispatcher, pool = make(rule), torch.randn(SLOTS, HV, V, K)
    before = pool.clone()
    for _ in range(2):
        assert decode(dispatcher, rule, pool, new=torch.zeros(3)) == THEIRS
    assert torch.equal(pool, before)
    (warning,) = warnings(caplog)
    assert warning == (
        "FLASH_DELTA_SGLANG: SGLang's own code runs this call of decode: new: expected None, got a Tensor"
    )
    assert decode(dispatcher, rule, pool, new=None).shape == (1, 3, HV, V)


def test_what_the_ops_refuse(caplog):
    dispatcher = make("gated_delta_rule")
    for _ in range(2):
        assert decode(dispatcher, "gated_delta_rule", torch.zeros(SLOTS, HV, V, K).long()) == THEIRS
    (warning,) = warnings(caplog)
    assert "of decode: decode_gated_delta_rule: state_pool: " in warning
    assert warning.endswith("got torch.int64")


def test_long_drafts(caplog):
    dispatcher = make("gated_delta_rule")
    assert verify(dispatcher, 17) == THEIRS
    assert warnings(caplog)[0].endswith("of target_verify: cache_steps: expected at most 16, got 17")
    assert verify(dispatcher, 16).shape == (1, 16, HV, V)


def test_a_refused_prompt_leaves_its_tracked_states():
    """SGLang's kernel for Gated DeltaNet returns the states before all chunks: here their numbers."""
    rule, n, kept = "gated_delta_rule", 70 + 1 + 130, torch.full((3, HV, V, K), -1.0)
    found = extend(
        rule, tokens(rule, n), layer(rule), ssm_states=torch.zeros(SLOTS, HV, V, K), cache_indices=index(4, 2, 6),
        query_start_loc=index(0, 70, 71, n), track_state=kept, track_chunk_idx=index(1, -1, 2), new=torch.zeros(3),
    )  # fmt: skip
    assert found[0] == THEIRS
    assert kept[:, 0, 0, 0].tolist()[::2] == [1, 2 + 1 + 2]


class FlashInferGDNKernel:
    pass


def test_a_kernel_that_somebody_chose(caplog):
    dispatcher = make("gated_delta_rule", FlashInferGDNKernel)
    assert decode(dispatcher, "gated_delta_rule", torch.randn(SLOTS, HV, V, K)) == THEIRS
    assert not hasattr(dispatcher.extend_kernel, "supports_track_state_snapshot")
    assert warnings(caplog) == [
        f"FLASH_DELTA_SGLANG: SGLang was told to run FlashInferGDNKernel as {name}_kernel"
        for name in ("decode", "extend", "verify")
    ]


def test_trees_have_a_kernel_of_their_own():
    """A dispatcher may have a kernel for trees only, as SGLang's has for Gated DeltaNet."""
    dispatcher = make("gated_delta_rule", FlashInferGDNKernel)
    dispatcher.tree_verify_kernel = TritonGDNKernel()
    assert verify(dispatcher, 4) == THEIRS
    parents = torch.tensor([[-1, 0, 0, 1]])
    assert verify(dispatcher, 4, retrieve_parent_token=parents).shape == (1, 4, HV, V)


def test_what_sglang_asks_its_kernels_and_what_the_log_says(caplog):
    with caplog.at_level(logging.INFO, "sglang.flash_delta"):
        gdn, kda = make("gated_delta_rule"), make("kda")
    assert gdn.extend_kernel.supports_track_state_snapshot
    assert not kda.verify_kernel.supports_fused_chain_verify
    assert not TritonGDNKernel.supports_track_state_snapshot
    assert TritonKDAKernel.supports_fused_chain_verify
    first, second = (r.getMessage() for r in caplog.records if r.name == "sglang.flash_delta")
    assert first.endswith("in SGLang 0.5.23 (tested): GDNKernelDispatcher: decode, extend, verify")
    assert second.endswith("in SGLang 0.5.23 (tested): KDAKernelDispatcher: decode, extend, verify")


def test_a_second_call_changes_nothing(monkeypatch):
    plugin.register()
    cls, hooked = dispatcher_class("kda"), vars(dispatcher_class("kda")).copy()
    monkeypatch.setattr(HookRegistry, "register", None)
    plugin.register()
    assert vars(cls) == hooked


@pytest.mark.parametrize("wish", [None, "0"])
def test_off_unless_it_is_asked_for(monkeypatch, wish):
    monkeypatch.delenv(plugin.VARIABLE) if wish is None else monkeypatch.setenv(plugin.VARIABLE, wish)
    plugin.register()
    assert not plugin._active
    assert "decode" not in vars(dispatcher_class("kda"))


def test_without_sglang_nothing_happens(monkeypatch):
    monkeypatch.setattr(plugin, "_version", lambda: None)
    plugin.register()
    assert not plugin._active


def test_other_methods_are_left_alone(caplog):
    def decode(self, hidden_states):
        return THEIRS

    dispatcher_class("kda").decode = decode
    plugin.register()
    assert dispatcher_class("kda").decode is decode
    assert plugin._active == [next(iter(plugin.DISPATCHERS)), *plugin.FEATURES]
    assert warnings(caplog)[0].endswith("KDAKernelDispatcher: decode takes self, hidden_states")


def test_a_version_without_tracked_states_is_left_alone(monkeypatch, caplog):
    monkeypatch.delattr(TritonKDAKernel, "supports_track_state_snapshot")
    monkeypatch.delitem(sys.modules[f"{plugin.BACKENDS}.gdn_backend"].__dict__, "GDNKernelDispatcher")
    plugin.register()
    assert not plugin._active
    gdn, kda = warnings(caplog)
    assert "GDNKernelDispatcher" in gdn
    assert kda.endswith("TritonKDAKernel says nothing of states that the radix cache keeps")
