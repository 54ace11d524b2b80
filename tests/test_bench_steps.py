"""Whole steps of layers in the benchmark: right in every form, in turns, and told apart in tables."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from flash_delta.integrations.transformers import disable
from flash_delta.layers import GatedDeltaNet
from flash_delta.testing import Workload, output_gradient
from workshop.bench import Group, Result, runner, taking_part
from workshop.bench.contestants import load
from workshop.bench.entry import Costs, Entry, Samples
from workshop.bench.floor import floor
from workshop.bench.speed import compared
from workshop.bench.steps import further, host, memory, times
from workshop.bench.tables import accuracy, of, remarks
from workshop.bench.timing import Spread
from workshop.bench.workloads import WORKLOADS
from workshop.check.layer import make_layer, results_of_layer

CPU = torch.device("cpu")
LAYER = {"packed": False, "states": False, "hidden": 24, "K": 16, "V": 16, "form": "called"}
STEP = Workload("step", "training", "gdn", 1, 2, 1, 70, "float32", of_fla=True, **LAYER)
STEPS = {
    "training": STEP,
    "forward": replace(STEP, kind="forward"),
    "packed": replace(STEP, N=3, packed=True),
    "padded": replace(STEP, N=3, lengths=(70, 31, 5)),
    "layers": replace(STEP, layers=2),
    "frozen": replace(STEP, frozen=True),
}


@pytest.fixture
def eager_compiler(monkeypatch):
    """Traces and compiles with no code of its own. Returns the modes of the calls."""
    modes, compile_ = [], torch.compile

    def compiler(module, *, dynamic, mode):
        modes.append(mode)
        return compile_(module, dynamic=dynamic, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", compiler)
    yield modes
    torch._dynamo.reset()


def judged(name, workload):
    """An entry whose results are right. Another function is off by more than 1e-4."""
    entry = Entry(name, CPU)
    _, errors = entry.prepare(workload)
    assert max(error for error, _ in errors.values()) < 2e-5
    return entry, errors


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_our_layer_is_judged_and_timed(name):
    workload = STEPS[name]
    entry, errors = judged("flash_delta", workload)
    gradients = {"forward": 0, "frozen": 1, "layers": 2 * 13 + 1}.get(name, 14)
    assert len(errors) == 1 + gradients
    samples, costs = entry.sample(), entry.costs()
    assert samples.host_us > 0
    assert samples.eager_ms
    assert (costs.saved_mb is not None) == (workload.kind == "training")


def test_saved_bytes_leave_parameters_out():
    """Twice the tokens save twice the bytes."""
    one, two = (judged("flash_delta", replace(STEP, T=T))[0].costs().saved_mb for T in (64, 128))
    assert two == pytest.approx(2 * one, rel=0.02)


@pytest.mark.parametrize("name", ["training", "packed", "padded", "layers"])
def test_a_step_of_a_layer_of_transformers_is_judged(name):
    """Its own code cannot keep packed sequences apart."""
    pytest.importorskip("transformers")
    for contestant in ("flash_delta",) if name == "packed" else ("transformers", "flash_delta"):
        try:
            entry, _ = judged(contestant, replace(STEPS[name], of_fla=False))
            assert entry.sample().host_us > 0
        finally:
            disable()


class FlaLayer(GatedDeltaNet):
    """Takes bounds in the documented dtype and returns what fla's layers return."""

    def forward(self, hidden, attention_mask=None, cu_seqlens=None):
        assert cu_seqlens is None or cu_seqlens.dtype == torch.int64
        return super().forward(hidden, attention_mask, cu_seqlens=cu_seqlens), None, None


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_a_layer_of_fla_is_judged(name, monkeypatch):
    for variable in ("FLA_FLASH_QLA", "FLA_FLASH_KDA", "FLA_TILELANG"):
        monkeypatch.setenv(variable, "0")  # which the adapter would set for good
    fla = ModuleType("fla")
    fla.layers = SimpleNamespace(GatedDeltaNet=FlaLayer, KimiDeltaAttention=None)
    monkeypatch.setitem(sys.modules, "fla", fla)
    report = SimpleNamespace(left=[])
    monkeypatch.setattr("flash_delta.integrations.fla.register", lambda: report)
    judged("fla", STEPS[name])
    entry, _ = judged("registered", STEPS[name])
    report.left.append("a call")
    with pytest.raises(RuntimeError, match="expected no call left to fla"):
        entry.run()


@pytest.mark.parametrize(("form", "mode"), [("compiled", "default"), ("reduce-overhead", "reduce-overhead")])
def test_a_compiled_step(form, mode, eager_compiler):
    entry, _ = judged("flash_delta", replace(STEP, form=form))
    assert eager_compiler == [mode]
    assert (entry.costs().saved_mb is None) == (form == "reduce-overhead")


def test_a_graphed_step_gets_inputs_like_its_own(monkeypatch):
    samples = []
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda module, inputs: samples.append(inputs) or module)
    entry, _ = judged("flash_delta", replace(STEP, form="graphed"))
    ((sample,),) = samples
    hidden = entry.call.inputs["hidden_states"]
    assert sample.requires_grad
    assert sample.shape == hidden.shape
    assert not torch.equal(sample, hidden)


def test_a_form_that_repeats_itself_wrongly_gets_no_time(monkeypatch):
    """A graph does so that replays other numbers than it has captured."""

    def graphed(module, inputs):
        calls = []
        return lambda hidden: module(hidden) * (1 if calls else calls.append(1) or 2)

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graphed)
    with pytest.raises(RuntimeError, match=r"a replay's o is .* away from the first call's"):
        Entry("flash_delta", CPU).prepare(replace(STEP, form="graphed"))


def test_padding_is_no_part_of_the_result():
    """Rows by themselves give the same outputs and gradients."""
    padded = STEPS["padded"]
    x = make_layer(padded, CPU)
    dy = output_gradient(x)
    together = results_of_layer(padded, x, dy)
    one = replace(padded, N=1, lengths=())
    total = torch.zeros_like(x["q_proj.weight"])
    for row, length in enumerate(padded.lengths):
        own = {name: t for name, t in x.items() if name != "attention_mask"}
        own["hidden_states"] = x["hidden_states"][row : row + 1, :length]
        alone = results_of_layer(one, own, dy[row : row + 1, :length])
        torch.testing.assert_close(together["o"][row : row + 1, :length], alone["o"])
        assert not together["o"][row, length:].any()
        total += alone["dq_proj.weight"]
    torch.testing.assert_close(together["dq_proj.weight"], total)


def test_fla_s_layer_on_this_library_needs_fla():
    assert load("registered").unsupported(STEP, CPU) == "the layer is one of fla, which is not installed"
    assert load("flash_delta").unsupported(STEP, CPU) is None
    installed = dict.fromkeys(("flash_delta", "fla", "flashinfer", "transformers"), "1.0")
    assert taking_part("step", installed).keys() == {"flash_delta", "fla", "registered"}
    assert taking_part("step", {"flash_delta": "1.0"}) == {"flash_delta": "1.0"}
    assert taking_part("step-transformers", installed).keys() == {"flash_delta", "fla", "transformers"}


def test_rows_of_steps():
    names = {f"{w.kind} {w.name}" for w in WORKLOADS if w.group == "step"}
    assert len(names) == 6 * 4 + 5 * 3
    for name in (
        "training 2048 wide, 16/32 8x1024, called",
        "training 2048 wide, 16/32 1x8192, frozen weights, compiled",
        "training 2048 wide, 16/32 1x2048 + 1x1536 + 1x1024 + 1x512 padded, graphed",
        "forward 4 layers, 2048 wide, 16/32 1x1024, reduce-overhead",
    ):
        assert name in names


def test_floors_of_steps():
    """Without gradients of weights a third of the projections' products is left out."""
    step = replace(STEP, hidden=2048, H=16, HV=32, T=8192, K=128, V=128, dtype="bfloat16")
    weights = 2 * 8192 * 2048 * (2 * 16 * 128 + 3 * 32 * 128 + 2 * 32)
    assert floor(step).flops - floor(replace(step, frozen=True)).flops == weights
    assert floor(replace(step, layers=4)).flops == pytest.approx(4 * floor(step).flops, rel=1e-6)


class Stub:
    """Answers like a worker, and each of its rounds takes longer."""

    process, rounds = None, 0

    def __init__(self, contestant, device, timeout_s, keep_caches):
        self.contestant = contestant

    def call(self, question, *arguments):
        self.rounds += question == "sample"
        answers = {
            "prepare": (3.0, {"o": (1e-7, 1e-7)}),
            "sample": Samples([1.0], [2.0], None, 100.0 * self.rounds),
            "costs": Costs(20.0, 1.0, None),
        }
        return answers[question]

    def stop(self):
        pass


def test_hosts_are_timed_in_ten_turns_or_more(monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "Worker", Stub)
    (result,) = runner.run_group([STEP], ["flash_delta"], CPU, None, 1.0)
    assert runner.STEP_ROUNDS >= 10
    assert result.host_us.median == 50.0 * (1 + runner.STEP_ROUNDS)
    group = Group("step", {}, {"flash_delta": "1.0"}, None, [result])
    group.write(tmp_path / "step.json")
    assert Group.read(tmp_path / "step.json") == group


def test_errors_of_all_layers_are_in_one_column():
    errors = {"o": 1e-3, "d0.A_log": 1e-3, "d1.A_log": 2e-3}
    group = Group("step", {}, {"flash_delta": "1.0"}, None, [Result(STEP, "flash_delta", errors=errors)])
    head, rows = accuracy(group)
    assert head[1:] == ["o", "dA_log"]
    assert rows == [["flash_delta", "1.0e-03", "2.0e-03"]]


def measured(workload, name, ms, us, graph=None):
    graph = graph and Spread(graph, graph, graph)
    costs = Costs(us, 30.0, 10.0)
    return Result(workload, name, graph_ms=graph, eager_ms=Spread(ms, ms, ms), host_us=Spread(us, us, us), costs=costs)


def test_tables_of_steps():
    """A line for every contestant, a column for every form."""
    compiled, four = replace(STEP, form="compiled"), replace(STEP, layers=4)
    results = [
        measured(STEP, "flash_delta", 3.0, 2000.0, 1.0),
        measured(STEP, "registered", 6.0, 3000.0, 2.0),
        measured(STEP, "fla", 4.0, 1000.0, 2.0),
        measured(compiled, "flash_delta", 2.0, 1500.0),
        Result(compiled, "fla", "it cannot"),
        measured(four, "flash_delta", 9.0, 5000.0, 2.5),
    ]
    names = ("flash_delta", "fla", "registered")
    group = Group("step", {}, dict.fromkeys(names, "1.0"), None, results)
    row, stack = "training 24 wide, 1/2 1x70, K = 16, V = 16 float32", "training 4 layers, 24 wide, 1/2 1x70"
    table = times(group)
    assert table.head == ["step, ms", "contestant", "CUDA graph", "eager", "torch.compile"]
    assert table.rows[:3] == [
        [row, "flash_delta", "1.000", "3.000", "2.000"],
        [row, "registered", "2.000", "6.000", ""],
        [row, "fla", "2.000", "4.000", ""],
    ]
    assert table.rows[3][0].startswith(stack)
    assert [line[2:] for line in host(group).rows[:3]] == [
        ["2,000 (1.00x)", "1,500 (1.00x)"],
        ["3,000 (1.50x)", ""],
        ["1,000 (0.50x)", ""],
    ]
    assert memory(group).rows[1] == [row, "registered", "10.0", "", "30.0", "", "67%"]
    (line,) = further(group).rows
    assert line == [row, "flash_delta", "0.500", "2.000", "1,000"]
    assert len(of(group)) == 6
    assert not any("†" in remark for remark in remarks(group)), "a compiled step needs no graph"
    assert {kind for kind, _ in compared(group)} == {"training"}
    assert {peer for _, peers in compared(group) for peer in peers} == {"fla"}, "this library is no peer of its own"
