"""Rows of rules as layers call them: every member, ours and those whose ops have no activations of their own."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import flash_delta
from flash_delta.testing import Workload, make_tensors
from workshop.bench import taking_part
from workshop.bench.entry import Entry
from workshop.bench.floor import floor
from workshop.bench.workloads import IN_OP, WORKLOADS

CPU = torch.device("cpu")
TINY = {"dtype": "float32", "states": False, "K": 16, "V": 24}
ROWS = {
    "gdn": Workload("t", "training", "gdn", 2, 4, 2, 70, packed=False, **IN_OP, **TINY),
    "kda": Workload("t", "training", "kda", 2, 2, 2, 70, **IN_OP, **TINY),
    "comba": Workload("t", "training", "comba", 2, 2, 2, 70, **IN_OP, **TINY),
    "delta-rule": Workload("t", "training", "delta-rule", 2, 2, 2, 70, **IN_OP, **TINY),
    "simple-gla": Workload("t", "training", "simple-gla", 2, 2, 2, 70, packed=False, **TINY),
}
LEAVES = {
    "gdn": {"q", "k", "v", "g", "beta", "A_log", "dt_bias"},
    "kda": {"q", "k", "v", "g", "beta", "A_log", "dt_bias"},
    "comba": {"q", "k", "v", "p", "g", "beta", "A_log", "dt_bias"},
    "delta-rule": {"q", "k", "v", "beta"},
    "simple-gla": {"q", "k", "v", "g"},
}


def assert_right(name, workload):
    _, errors = Entry(name, CPU).prepare(workload)
    assert errors.keys() == {"o", *(f"d{leaf}" for leaf in LEAVES[workload.member])}
    assert max(error for error, _ in errors.values()) < 5e-6


@pytest.mark.parametrize("member", ROWS)
def test_every_member_is_judged_with_all_gradients(member):
    assert_right("flash_delta", ROWS[member])
    assert Entry("flash_delta", CPU).prepare(replace(ROWS[member], kind="forward"))[1].keys() == {"o"}


def library(monkeypatch, module, function, arguments):
    """A module with one op of this library that takes so many arguments only."""
    op = getattr(flash_delta, function)

    def stand_in(**given):
        assert given.keys() <= set(arguments.split())
        return op(**given)

    names = module.split(".")
    for i in range(len(names)):
        monkeypatch.setitem(sys.modules, ".".join(names[: i + 1]), ModuleType(names[i]))
    setattr(sys.modules[module], function, stand_in)
    if len(names) > 1:
        setattr(sys.modules[names[0]], names[1], sys.modules[module])


TOKENS = "q k v beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens"
FLA = {
    "comba": f"{TOKENS} p g cu_seqlens_cpu",
    "delta-rule": f"{TOKENS} cu_seqlens_cpu",
    "simple-gla": "q k v g g_gamma scale initial_state output_final_state state_v_first cu_seqlens cu_seqlens_cpu",
}


@pytest.mark.parametrize("member", FLA)
def test_fla_gets_the_arguments_that_its_ops_have(member, monkeypatch):
    for variable in ("FLA_FLASH_QLA", "FLA_FLASH_KDA", "FLA_TILELANG"):
        monkeypatch.setenv(variable, "0")  # which the adapter would set for good
    library(monkeypatch, "fla.ops", ROWS[member].op.name, FLA[member])
    assert_right("fla", ROWS[member])


def test_flash_qla_gets_log_decays_and_strengths(monkeypatch):
    library(monkeypatch, "flash_qla", "chunk_gated_delta_rule", f"{TOKENS} g")
    assert_right("flash_qla", ROWS["gdn"])
    bare = replace(ROWS["gdn"], raw=False)
    _, errors = Entry("flash_qla", CPU).prepare(bare)
    assert errors.keys() == {"o", "dq", "dk", "dv", "dg", "dbeta"}


def test_transformers_gets_log_decays_and_strengths():
    pytest.importorskip("transformers")
    _, errors = Entry("transformers", CPU).prepare(ROWS["gdn"])
    assert len(errors) == 8
    assert max(error for error, _ in errors.values()) < 1e-5


def test_a_fresh_layer_of_comba_erases_a_share_of_what_it_writes():
    x = make_tensors(ROWS["comba"], CPU)
    torch.testing.assert_close(x["p"], x["k"] * torch.tensor(1.0).sigmoid(), rtol=1e-3, atol=1e-6)


def test_floors_count_what_a_member_has():
    """Bytes of a token and head: Comba's p, the delta rule without gates, simple GLA without write strengths."""
    gdn, *others = (
        floor(Workload("t", "forward", member, 1, 1, 1, 64, states=False))
        for member in ("gdn", "comba", "delta-rule", "simple-gla")
    )
    assert [(other.bytes - gdn.bytes) // 64 for other in others] == [2 * 128, -4, -4]
    assert [other.flops == gdn.flops for other in others] == [True, True, False]
    assert others[2].flops == 2 * 64 * (2 * 128 * 128 + 2 * 64 * 128)


def test_rows_as_layers_call_them():
    installed = dict.fromkeys(("flash_delta", "fla", "flash_qla", "transformers", "cudnn"), "1.0")
    for group in ("comba", "delta-rule", "simple-gla"):
        assert taking_part(group, installed).keys() == {"flash_delta", "fla"}
        assert len([w for w in WORKLOADS if w.group == group]) == 6
    assert all(w.raw and w.l2norm for w in WORKLOADS if w.group.endswith("-models"))
    wide = [w.T for w in WORKLOADS if w.group == "gdn-widths" and w.dtype == "float16"]
    assert (min(wide), max(wide)) == (256, 16384)
