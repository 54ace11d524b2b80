"""The benchmark keeps itself honest: floors, isolation, no time for wrong results, comparisons, the generated page."""

import html
import os
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from flash_delta.integrations.transformers import disable
from flash_delta.layers import GatedDeltaNet, KimiDeltaAttention
from flash_delta.page import MARKDOWN, Picture
from flash_delta.testing import (
    Isolated,
    Lost,
    Refused,
    Workload,
    allowed,
    judge,
    make_tensors,
    output_gradient,
)
from flash_delta.testing import isolated as isolation
from flash_delta.testing.large import run_workload
from workshop.bench import Group, Result, changed, changes, digests, runner, select, taking_part
from workshop.bench.contestants import load
from workshop.bench.contestants.flash_delta import prefill
from workshop.bench.entry import Costs, Entry, Lengths, Samples, drawn
from workshop.bench.floor import Ceilings, floor
from workshop.bench.page import _machine, write_benchmarks
from workshop.bench.results import is_used
from workshop.bench.speed import CHART, SpeedUp, chart, fullest, kinds, on_the_chart, summary
from workshop.bench.tables import bandwidth, choices, eager, number, of, refusals, remarks, times
from workshop.bench.timing import Spread
from workshop.bench.workloads import GROUPS, WORKLOADS, documents
from workshop.check.layer import INPUTS, judge_layer, make_layer
from workshop.cli.app import app

H200 = Ceilings(4.3e12, 790e12, 4.2e12, 700e12)
CPU = torch.device("cpu")
SMALL = [
    Workload("small", "forward", "gdn", 2, 4, 2, 70, "float32", K=16, V=24),
    Workload("small", "training", "gdn", 2, 4, 1, 70, "float32", packed=False, states=False, l2norm=True, K=16, V=24),
    Workload("small", "training", "kda", 2, 2, 2, 70, "float32", l2norm=True, raw=True, K=16, V=24),
    Workload("small", "decode", "gdn", 2, 4, 3, 1, "float32", packed=False, l2norm=True, raw=True, K=16, V=24),
    Workload("small", "decode", "kda", 2, 2, 3, 1, "float32", packed=False, l2norm=True, raw=True, K=16, V=24),
]


LAYER = {"packed": False, "states": False, "hidden": 24, "K": 16, "V": 16}
LAYERS = [
    Workload("layer", "prefill", "gdn", 1, 2, 2, 70, "float32", **LAYER),
    Workload("layer", "training", "gdn", 1, 2, 2, 70, "float32", **LAYER),
    Workload("layer", "decode", "gdn", 2, 2, 3, 1, "float32", **LAYER),
]


OF_FLA = [
    Workload("of-fla", "forward", "gdn", 2, 4, 3, 70, "float32", of_fla=True, **LAYER | {"V": 24, "packed": True}),
    Workload("of-fla", "training", "gdn", 2, 2, 2, 70, "float32", of_fla=True, **LAYER),
    Workload("of-fla", "forward", "kda", 2, 4, 2, 70, "float32", of_fla=True, **LAYER),
    Workload("of-fla", "training", "kda", 2, 2, 3, 70, "float32", of_fla=True, **LAYER | {"V": 24, "packed": True}),
]


def rows(group):
    return {w.name: w for w in WORKLOADS if w.group == group}


@pytest.mark.parametrize(
    ("group", "name", "ms"),
    [  # the hardware's floors as they were derived by hand, see docs/notes
        ("gdn-prefill", "16/32 1x32768", 0.196),
        ("gdn-prefill", "2/8 8x1024", 0.0122),
        ("kda-forward", "96/96 1x8192", 0.237),
        ("kda-gates", "64/64 8x1024, dt_bias = 0", 0.171),
        ("kda-gates", "64/64 8x1024, log decays", 0.203),
        ("kda-training", "64/64 8x1024", 0.532),
        ("gdn-training", "16/32 1x8192", 0.212),
        ("decode", "16/32 batch 128", 0.125),
        ("decode", "16/32 batch 128, bfloat16 states", 0.0629),
        ("kda-decode", "32/32 batch 128", 0.126),
        ("gdn-pools", "2/4 batch 64", 0.0078),
        ("gdn-pools", "4/8 16x1000", 0.0270),
        ("serving", "16/32 batch 32, drafts of 4", 0.0788),
        ("serving", "16/32 batch 32, drafts of 1 to 7", 0.0788),
        ("serving", "16/32 batch 32, trees of 4", 0.0788),
        ("serving", "16/32 1x32768, a checkpoint every 1024", 0.205),
        ("prompts", "16/32 1x8192", 0.0639),
        ("steps", "16/32 batch 128", 0.1297),
        ("kda-steps", "32/32 batch 128", 0.1322),
        ("layer", "2048 wide, 16/32 1x8192", 2.31),
        ("layer", "2048 wide, 16/32 batch 32", 0.0470),
        ("fla-gdn-forward", "2048 wide, 16/32 1x8192", 0.748),
        ("fla-kda-training", "2304 wide, 32/32 8x1024", 2.67),
    ],
)
def test_floors(group, name, ms):
    assert floor(rows(group)[name]).ms(H200) == pytest.approx(ms, rel=0.02)


def test_rows_have_names_of_their_own():
    assert len({(w.group, w.kind, w.name) for w in WORKLOADS}) == len(WORKLOADS)
    assert len(rows("gdn-prefill")) == 16


def test_select_refuses_unknown_names():
    assert list(select(None, CPU)) == ["cpu"]
    with pytest.raises(ValueError, match=r"groups: expected names among gdn-prefill, .*, got 'gdn'"):
        select(["gdn"], CPU)
    with pytest.raises(ValueError, match="rows: expected a part of a row's name"):
        select(["cpu"], CPU, "no such row")


@pytest.mark.parametrize("workload", SMALL, ids=lambda w: f"{w.member}-{w.kind}")
def test_the_judge_passes_right_results_and_sees_wrong_ones(workload):
    x = make_tensors(workload, CPU)
    results = run_workload(workload, x, output_gradient(x), "torch")
    errors = judge(workload, x, results)
    assert errors.keys() == results.keys()
    assert all(error < 2e-6 for error, _ in errors.values())
    for name, value in results.items():
        broken = results | {name: value.roll(1, dims=0 if value.dim() < 3 else 2) * (1 + 1e-3)}
        assert judge(workload, x, broken)[name][0] > 1e-4, name


@pytest.mark.parametrize("workload", SMALL, ids=lambda w: f"{w.member}-{w.kind}")
def test_an_entry_measures_a_row(workload):
    entry = Entry("flash_delta", CPU)
    first_call_s, errors = entry.prepare(workload)
    assert first_call_s > 0
    assert max(error for error, _ in errors.values()) < 2e-6
    samples = entry.sample()
    assert samples.eager_ms
    assert not samples.graph_ms
    saved = entry.costs().saved_mb
    assert (saved is not None) == (workload.kind == "training")
    entry.drop()


@pytest.mark.parametrize("workload", LAYERS, ids=lambda w: w.kind)
def test_a_layer_of_transformers_on_our_ops_and_on_its_own(workload):
    """All gradients, too. A layer with another parameter is another function."""
    pytest.importorskip("transformers")
    for name in ("transformers", "flash_delta"):
        entry = Entry(name, CPU)
        try:
            _, errors = entry.prepare(workload)
            assert max(error for error, _ in errors.values()) < 2e-6
            assert len(errors) == (9 if workload.kind == "training" else 1)
            assert entry.sample().eager_ms
            x = entry.x | {"A_log": entry.x["A_log"] + 0.1}
            assert (
                judge_layer(
                    workload, x, {"o": entry.first_o, **dict.fromkeys(errors, entry.first_o)}, x["hidden_states"]
                )["o"][0]
                > 1e-4
            )
        finally:
            disable()


@pytest.mark.parametrize("workload", OF_FLA, ids=lambda w: f"{w.member}-{w.kind}")
def test_layers_of_fla_are_judged_by_what_ours_compute(workload):
    """Ours have the parameters of fla's. A layer with another parameter is another function."""
    x = make_layer(workload, CPU)
    kind = KimiDeltaAttention if workload.member == "kda" else GatedDeltaNet
    layer = kind(24, expand_v=workload.V / 16, head_dim=16, num_heads=workload.H, num_v_heads=workload.HV)
    layer.load_state_dict({name: t for name, t in x.items() if name not in INPUTS})
    hidden, dy = x["hidden_states"].clone().requires_grad_(), output_gradient(x)
    y = layer(hidden, cu_seqlens=x.get("cu_seqlens"))
    leaves = {"hidden_states": hidden} | dict(layer.named_parameters())
    results = {"o": y.detach()}
    if workload.kind == "training":
        gradients = torch.autograd.grad(y, list(leaves.values()), dy)
        results |= {f"d{name}": d for name, d in zip(leaves, gradients, strict=True)}
    errors = judge_layer(workload, x, results, dy)
    assert errors.keys() == results.keys()
    assert max(error for error, _ in errors.values()) < 2e-6
    assert judge_layer(workload, x | {"A_log": x["A_log"] + 0.1}, results, dy)["o"][0] > 1e-4


def test_states_are_judged_in_their_dtype():
    """With half the bits of a state, the roundings that nothing can avoid are allowed, and no others."""
    workload = replace(SMALL[3], dtype="bfloat16", state_dtype="bfloat16")
    _, errors = Entry("flash_delta", CPU).prepare(workload)
    error, reference = errors["final_state"]
    assert 1e-3 < error <= allowed(reference, torch.bfloat16) < 1e-2
    x = make_tensors(workload, CPU)
    rounded = run_workload(workload, x, None, "torch")
    rounded["final_state"] = rounded["final_state"].to(torch.float8_e5m2).to(torch.bfloat16)
    error, reference = judge(workload, x, rounded)["final_state"]
    assert error > 5 * allowed(reference, torch.bfloat16)


def test_a_graph_that_replays_stale_numbers_is_refused(monkeypatch):
    entry = Entry("flash_delta", CPU)
    entry.prepare(SMALL[0])
    graph = type("Graph", (), {"replay": lambda self: None})()
    for o, right in ((entry.first_o.clone(), True), (entry.first_o.roll(1, dims=1), False)):
        monkeypatch.setattr("workshop.bench.timing.captured", lambda run, device, o=o: (graph, (o, None)))
        if right:
            assert entry._captured() is graph
        else:
            with pytest.raises(RuntimeError, match=r"a replay's o is .* away from the first call's"):
                entry._captured()


class Rough:
    """Does what contestants do."""

    def answer(self, x):
        print("noise that nobody asked for")
        return x + 1

    def refuse(self):
        raise RuntimeError("no kernel for this\nsecond line")

    def crash(self):
        os.write(2, b"illegal instruction, perhaps\n")
        os._exit(1)

    def hang(self):
        time.sleep(60)

    def lose_the_gpu(self):
        isolation._context_is_lost = torch.cuda.is_initialized = lambda: True
        raise RuntimeError("an illegal memory access")

    def cache(self):
        return os.environ["SOME_CACHE_DIR"]

    def threads(self):
        return torch.get_num_threads()


def test_isolation(capfd):
    isolated = Isolated(Rough, timeout_s=20, caches=("SOME_CACHE_DIR",), threads=3)
    try:
        assert isolated.call("threads") == 3
        assert isolated.call("answer", 1) == 2
        first = isolated.process.pid
        with pytest.raises(Refused, match=r"^RuntimeError: no kernel for this$") as refused:
            isolated.call("refuse")
        assert refused.value.log.startswith("Traceback")
        assert refused.value.log.endswith("no kernel for this\nsecond line")
        assert isolated.process.pid == first
        folder = isolated.call("cache")
        with pytest.raises(Lost, match="illegal instruction, perhaps") as lost:
            isolated.call("crash")
        assert lost.value.log == "illegal instruction, perhaps", "what calls before it printed is not its own"
        assert isolated.call("answer", 2) == 3
        assert isolated.call("cache") != folder
        with pytest.raises(Refused, match=r"^RuntimeError: an illegal memory access$") as refused:
            isolated.call("lose_the_gpu")
        assert refused.value.log.endswith("an illegal memory access")
        assert isolated.call("answer", 3) == 4, "a new process, since the GPU of the other was lost"
        isolated.timeout_s = 0.2
        with pytest.raises(Lost, match=r"no answer within 0\.2 s"):
            isolated.call("hang")
    finally:
        isolated.stop()
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(("group", "least"), [("gdn-prefill", 1), ("fla-gdn-forward", 65)])
def test_random_lengths_make_the_call_that_was_timed(group, least):
    """For few tokens, fla's layers call other ops. So their calls get no fewer than 65."""
    draw, (workload, *_) = random.Random(0), rows(group).values()
    sizes = [(w.N, w.N * w.T) for w in (drawn(workload, draw) for _ in range(3000))]
    assert {N for N, _ in sizes} == {*range(1, 17)}
    assert least <= min(tokens for _, tokens in sizes) < 65 + 16
    assert 8000 < max(tokens for _, tokens in sizes) <= 8192


def test_random_batches_of_rows_with_drafts_have_one_token_each():
    draw = random.Random(0)
    found = [drawn(w, draw) for w in rows("serving").values() if w.kind == "decode"]
    assert {(w.T, w.lengths, w.tree) for w in found} == {(1, (), False)}


class Stub:
    """Answers like a worker, in this process."""

    process = None

    def __init__(self, contestant, device, timeout_s, keep_caches):
        self.contestant = contestant

    def call(self, question, *arguments):
        off = {"flash_delta": 1e-7, "fla": 1e-3, "flash_qla": 0.5}.get(self.contestant)
        if off is None:
            raise Lost("its process died: illegal address")
        slow = 2.0 if self.contestant == "fla" else 1.0
        return {
            "prepare": (3.0, {"o": (off, 1e-7)}),
            "sample": Samples([slow], [slow + 0.5]),
            "costs": Costs(20.0, 1.0, None),
            "lengths": Lengths(50, 0, 0.0, 0),
        }[question]

    def stop(self):
        pass


class Full(Stub):
    """Fills the GPU when it is asked for lengths."""

    stopped = False

    def call(self, question, *arguments):
        if question == "lengths":
            raise Refused("OutOfMemoryError: CUDA out of memory.")
        return super().call(question, *arguments)

    def stop(self):
        self.stopped = True


def test_a_process_that_has_filled_the_gpu_makes_room():
    worker, result = Full("fla", CPU, 1.0, False), Result(next(iter(rows("gdn-prefill").values())), "fla")
    runner._finish(worker, result, with_lengths=True)
    assert worker.stopped
    assert result.notes == ["no lengths: OutOfMemoryError: CUDA out of memory."]
    assert result.costs is not None


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setattr(runner, "Worker", Stub)
    monkeypatch.setattr(
        runner.contestants, "load", lambda name: type("", (), {"unsupported": staticmethod(lambda w, d: None)})
    )
    names = ("flash_delta", "fla", "flash_qla", "flashinfer")
    group = Group("gdn-prefill", {"gpu": "Some GPU"}, dict.fromkeys(names, "1.0"), H200, remark="Of two runs.")
    group.results += runner.run_group(list(rows("gdn-prefill").values())[:2], names, CPU, H200, 1.0)
    return group


def test_a_wrong_result_and_a_crash_get_a_reason_and_no_time(group):
    first = {r.contestant: r for r in group.results[:4]}
    assert first["flash_delta"].graph_ms == Spread(1.0, 1.0, 1.0)
    assert first["fla"].graph_ms.median == 2.0
    assert first["flash_qla"].reason == "wrong: o is off by 5.0e-01 (2.0e-02 allowed)"
    assert first["flashinfer"].reason == "its process died: illegal address"
    assert first["flash_qla"].ms is None
    assert first["flashinfer"].ms is None
    assert len(group.results) == 8
    assert len({r.run for r in group.results}) == 1
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", first["fla"].run)


def test_results_survive_their_file(group, tmp_path):
    group.write(tmp_path / "gdn-prefill.json")
    read = Group.read(tmp_path / "gdn-prefill.json")
    assert [(r.contestant, r.graph_ms, r.reason) for r in read.results] == [
        (r.contestant, r.graph_ms, r.reason) for r in group.results
    ]
    read.write(tmp_path / "gdn-prefill.json")
    assert Group.read(tmp_path / "gdn-prefill.json") == read
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="results: expected a file that `flash-delta-dev bench` wrote"):
        Group.read(tmp_path / "other.json")


def test_a_broken_run_goes_on_with_the_rows_it_lacks(group):
    workloads = list(rows("gdn-prefill").values())[:3]
    group.results.pop()  # of the second row
    assert group.missing(workloads) == workloads[1:]
    assert [r.workload for r in group.results] == [workloads[0]] * 4


def test_changes_above_five_percent_are_marked(group, tmp_path):
    group.write(tmp_path / "old.json")
    old = Group.read(tmp_path / "old.json")
    assert not list(changes(old, group))
    ours, fla = group.results[0], group.results[1]
    ours.graph_ms, fla.graph_ms = Spread(1.06, 1.0, 1.1), Spread(1.96, 1.9, 2.0)
    (change,) = changes(old, group)
    assert (change.contestant, change.slower, change.faster) == ("flash_delta", True, False)
    ours.graph_ms = ours.eager_ms = None
    assert next(changes(old, group)).slower


def test_the_page_shows_every_row_and_every_refusal(group, tmp_path):
    group.write(tmp_path / "results" / "some-gpu" / "gdn-prefill.json")
    (tmp_path / "docs").mkdir()
    markdown, page, *drawings = write_benchmarks(tmp_path / "results", tmp_path / "docs")
    for text in (markdown.read_text(), page.read_text()):
        for words in ("forward 16/32 1x32768", "flash_qla", "illegal address", "Some GPU", "2.00x", "Of two runs."):
            assert words in text
    assert "**1.000**" in markdown.read_text()
    assert "<b>" not in markdown.read_text()
    assert [drawing.name for drawing in drawings] == ["speed-light.svg", "speed-dark.svg"]
    text = page.read_text()
    assert "http" not in text.replace("http://www.w3.org", "")
    assert text.count("<img") == 5  # the chart, and four of the group
    assert text.index("<img") < text.index("<h2"), "the chart comes first"
    assert "<strong>1.000</strong>" in text
    assert "<code>workshop/bench/floor.py</code>" in text
    assert not re.search(r"\*\*|`", text), "Markdown that nobody rendered"


def test_another_librarys_error_is_no_markdown(group, tmp_path):
    reason = "ValueError: `__call__(q: Tensor<n0>, **more"
    for result in group.results:
        if result.contestant == "flashinfer":
            result.reason = reason
    group.write(tmp_path / "results" / "some-gpu" / "gdn-prefill.json")
    markdown, page, *_ = write_benchmarks(tmp_path / "results", tmp_path / "docs")
    assert html.escape(reason) in page.read_text()
    (line,) = [line for line in markdown.read_text().splitlines() if "ValueError" in line]
    assert html.escape(reason) in MARKDOWN.render(line)


def without_pictures(page):
    return re.sub(r'(src|srcset)="data:[^"]*"|srcset=""|src="Figure[^"]*"', "", page)


def test_the_committed_pages_and_drawings_are_those_of_the_committed_results(tmp_path, monkeypatch):
    """Every picture is drawn, and only the charts are written: that takes most of the time, and the test above has
    it."""
    monkeypatch.setattr(
        "workshop.bench.page.picture", lambda title, reading, draw: Picture(title, reading, str(draw()), "")
    )
    root = Path(__file__).parent.parent
    written = write_benchmarks(root / "benchmarks" / "results", tmp_path / "docs")
    assert {path.name for path in written} == {"benchmarks.md", "benchmarks.html", "speed-light.svg", "speed-dark.svg"}
    for path in written:
        committed = (root / "docs" / path.name).read_text()
        assert without_pictures(path.read_text()) == without_pictures(committed), "run flash-delta-dev report"


def test_the_chart_shows_every_shape_and_who_is_ahead(group):
    """fla takes twice our time, then half of it in another run, then ten times. FlashQLA takes more in the last one."""
    first, second = list(rows("gdn-prefill").values())[2:4]
    for workload, ms, run in ((first, 0.5, "2026-01-02T03:04:05Z"), (second, 10.0, "2026-01-03T03:04:05Z")):
        spread = Spread(ms, ms, ms)
        group.results.append(Result(workload, "flash_delta", graph_ms=Spread(1.0, 1.0, 1.0), run=run))
        group.results.append(Result(workload, "fla", graph_ms=spread, run="2026-01-03T03:04:05Z"))
    group.results.append(Result(second, "flash_qla", graph_ms=Spread(11.0, 11.0, 11.0), run="2026-01-03T03:04:05Z"))
    for result in group.results[:8]:
        result.run = "2026-01-02T03:04:05Z"
    (kind,) = kinds([group])
    assert kind.fastest == [SpeedUp(2.0, False), SpeedUp(2.0, False), SpeedUp(0.5, True), SpeedUp(10.0, False)]
    assert kind.beside == ["fla", "flash_qla"]
    assert kind.ahead == {"fla": 1}
    for scheme in ("light", "dark"):
        drawing = chart([group], scheme)
        ElementTree.fromstring(drawing)
        assert "Some GPU, measured 2026-01-02 to 2026-01-03." in drawing
        assert len(re.findall(r'<circle class="ahead"', drawing)) == 2
        assert len(re.findall(r'<circle class="behind apart"', drawing)) == 1
        assert len(re.findall(r'<path class="ahead"', drawing)) == 1
        assert re.search(r'class="end ahead".*>2\.11x<', drawing)
        assert ">fla, flash_qla</text>" in drawing
        assert not re.search(r"<script|href|url\(", drawing)


def test_the_committed_chart_has_ten_lines_with_their_peers_and_hides_no_row_that_is_behind():
    root = Path(__file__).parent.parent
    drawing = (root / "docs" / "speed-light.svg").read_text()
    paths = (root / "benchmarks/results").glob("nvidia-*/*.json")
    groups = fullest(Group.read(path) for path in paths if path.stem in GROUPS)
    shown = on_the_chart(groups)
    assert {kind.name for kind in shown} == set(CHART)
    assert len(shown) == 10
    assert len(kinds(groups)) > 10
    named = re.findall(r'<text class="group".*>(.*)</text>\n<text class="quiet" .*>(.*)</text>', drawing)
    assert dict(named) == {kind.name: ", ".join(kind.beside) for kind in shown}
    shapes = [speed_up for kind in shown for speed_up in kind.fastest]
    assert len(re.findall(r"<(?:circle|path) ", drawing)) == len(shapes)
    behind = sum(speed_up.ratio < 1 for speed_up in shapes)
    assert behind
    assert len(re.findall(r'<(?:circle|path) class="behind', drawing)) == behind


def test_of_a_group_on_two_gpus_the_fullest_run_counts():
    workload = rows("kda-forward")["32/32 1x8192"]

    def measured(gpu, ours, run):
        results = [
            Result(workload, name, graph_ms=Spread(ms, ms, ms), run=run)
            for name, ms in (("flash_delta", ours), ("fla", 2.0))
        ]
        return Group("kda-forward", {"gpu": gpu}, dict.fromkeys(("flash_delta", "fla"), "1.0"), H200, results)

    old = measured("NVIDIA H200", 1.0, "2026-01-02T03:04:05Z")
    new = measured("NVIDIA H100 80GB HBM3", 0.5, "2026-01-02T04:04:05Z")
    other = replace(old, group="decode")
    assert fullest([old, new, other]) == fullest([new, old, other]) == [new, other]
    part = replace(new, results=new.results[:1])
    assert fullest([old, part, other]) == fullest([part, old, other]) == [old, other]
    assert summary(kinds([new, other])).rows == [
        ["KDA forward", "H100, 1.0", "fla", "4.00x", "none"],
        ["GDN decode", "H200, 1.0", "fla", "2.00x", "none"],
    ]
    new.versions["flash_delta"] = "0.9 and 1.0"
    drawing = chart([other, new], "light")
    assert "GDN decode 2.00x beside fla; KDA forward 4.00x beside fla" in drawing
    assert ">KDA forward, H100<" in drawing
    assert "flash_delta\N{NO-BREAK SPACE}0.9 and 1.0" in drawing


def test_the_summary_names_the_peers_that_ran_and_leaves_out_code_without_kernels():
    """The best peers of two rows are 2.0 and 8.0 times as slow. One of them is of another run."""

    def timed(row, **times):
        return [
            Result(rows("gdn-training")[row], name, graph_ms=Spread(ms, ms, ms), run="then" if ms == 8 else "now")
            for name, ms in times.items()
        ]

    results = timed("16/32 1x8192", flash_delta=1.0, fla=2.0, transformers=50.0)
    results += timed("16/32 1x32768", flash_delta=1.0, flash_qla=8.0, transformers=90.0)
    versions = dict.fromkeys(("flash_delta", "fla", "flash_qla", "transformers"), "1.0")
    group = Group("gdn-training", {"gpu": "NVIDIA H200"}, versions, H200, results)
    line = ["GDN training", "H200, 1.0", "fla, transformers, flash_qla", "4.00x (2.00x to 8.00x) ‡", "none"]
    assert summary(kinds([group])).rows == [line]
    group.results = [r for r in results if r.contestant in ("flash_delta", "transformers")]
    assert not kinds([group])
    group.machine = {"cpu": "x86", "threads": "2"}
    assert [line[2] for line in summary(kinds([group])).rows] == ["transformers"]


def test_no_results_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="results: expected a folder that `flash-delta-dev bench` wrote"):
        write_benchmarks(tmp_path / "nothing", tmp_path)


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", "cpu", "--device", "cpu", *map(str, arguments)])


def test_the_command_measures_resumes_and_compares(tmp_path):
    rows = ("--rows", "batch 1 float32", "--contestants", "flash_delta")
    ran = bench(*rows, "--results", tmp_path)
    assert ran.exit_code == 0, ran.output
    file = tmp_path / "cpu" / "cpu.json"
    (result,) = Group.read(file).results
    assert result.eager_ms.low > 0
    assert result.errors["o"] < 2e-6
    assert Group.read(file).kernels == {}, "a CPU runs none of them"
    before = file.read_text()
    assert bench(*rows, "--results", tmp_path, "--resume").exit_code == 0
    assert file.read_text() == before, "there was nothing left to measure"
    assert bench(*rows, "--results", tmp_path / "kept", "--keep-caches").exit_code == 0
    (kept,) = Group.read(tmp_path / "kept" / "cpu" / "cpu.json").results
    assert kept.ms is not None
    assert kept.first_call_s is None
    assert result.first_call_s > 0
    old = Group.read(file)
    old.results[0].eager_ms = Spread(1e-6, 1e-6, 1e-6)
    old.write(tmp_path / "old" / "cpu.json")
    ran = bench(*rows, "--results", tmp_path, "--compare", tmp_path / "old" / "cpu.json")
    assert ran.exit_code == 1
    assert "slower: flash_delta, decode 4/8 batch 1 float32: 0.000 ms -> " in ran.output
    for what, changed_there in (("machine", {"torch": "another"}), ("kernels", {"triton": "another"})):
        old = Group.read(tmp_path / "kept" / "cpu" / "cpu.json")
        getattr(old, what).update(changed_there)
        old.write(file)
        ran = bench(*rows, "--results", tmp_path, "--resume")
        assert ran.exit_code == 2
        assert f"resume: expected the {what} of the results" in ran.output


def test_kernels_that_have_changed_since_are_named(group, tmp_path):
    assert _machine(group).endswith("Of two runs.")
    assert changed(group) == [], "nothing is known of them"
    group.kernels = digests()
    assert changed(group) == []
    assert {"device", "hopper/scalar/forward", "triton/serving"} <= group.kernels.keys()
    group.kernels |= {"hopper/gone": "", **dict.fromkeys(("hopper/scalar/forward", "hopper/channel", "runtime"), "")}
    group.write(tmp_path / "gdn-prefill.json")
    read = Group.read(tmp_path / "gdn-prefill.json")
    assert changed(read) == ["hopper/gone", "hopper/scalar/forward"], "what the forward pass of this rule launches"
    assert "Changed since then: hopper/gone, hopper/scalar/forward. Of two runs." in _machine(read)


@pytest.mark.parametrize(
    ("group", "row", "kernels"),
    [
        ("gdn-training", 0, {"device", "triton", "triton/forward", "triton/backward", "hopper", "hopper/scalar"}),
        ("kda-forward", 0, {"device", "triton", "triton/forward", "hopper", "hopper/channel"}),
        ("gdn-pools", 0, {"device", "triton", "triton/forward", "triton/serving", "hopper", "hopper/scalar"}),
        ("decode", 0, {"device", "triton", "triton/serving"}),
        ("prompts", 0, {"device", "triton", "triton/forward", "triton/serving", "triton/elementwise", "hopper",
                        "hopper/scalar"}),
    ],
)  # fmt: skip
def test_what_a_row_may_launch(group, row, kernels):
    workload = list(rows(group).values())[row]
    found = {name for name in digests() if is_used(name, workload)}
    assert {name for name in found if name.count("/") < 2} - {"hopper/device", "hopper/plans"} == kernels


def test_the_command_refuses():
    assert "contestants: expected installed ones" in bench("--contestants", "fla").output
    assert "contestant: expected one of flash_delta, " in bench("--contestants", "flash_attention").output


def test_tables(group):
    table = times(group)
    assert table.head == ["row, ms", "flash_delta", "fla", "floor", "best / floor", "ours against the best peer"]
    assert table.rows[0] == ["forward 16/32 1x32768", "**1.000**", "2.000", "0.196", "5.1", "2.00x"]
    assert table.rows[-1][-1] == "2.00x"
    assert "flashinfer, all rows: its process died: illegal address" in list(refusals(group))
    assert [number(x) for x in (None, 0.01234, 0.1234, 12.34, 12345.6)] == ["", "0.0123", "0.123", "12.3", "12,346"]


def test_times_of_another_run_and_inputs_made_ready_are_marked():
    workload = rows("kda-forward")["32/32 1x8192"]
    results = [
        Result(workload, "flash_delta", graph_ms=Spread(1.0, 1.0, 1.0), run="today"),
        Result(workload, "fla", eager_ms=Spread(3.0, 3.0, 3.0), run="today"),
        Result(workload, "cudnn", graph_ms=Spread(2.0, 2.0, 2.0), run="yesterday"),
    ]
    group = Group("kda-forward", {}, dict.fromkeys(("flash_delta", "fla", "cudnn"), "1.0"), H200, results)
    assert times(group).rows == [
        ["forward 32/32 1x8192", "**1.000**", "3.000 †", "2.000 ‡ §", "2.00x ‡"],
        ["forward, geometric mean", "", "", "", "2.00x ‡"],
    ]
    graph, run, ready = remarks(group)
    assert graph.startswith("† eager calls")
    assert run.startswith("‡ measured in another run than flash_delta")
    assert ready.startswith("§ cudnn: its gates and write strengths come in float32")
    results[2].run = "today"
    results[2].workload = rows("kda-training")["32/32 1x8192"]  # whose gates are float32 for everybody
    assert not any("‡" in remark or "§" in remark for remark in remarks(group))


def test_decoding_is_measured_by_the_copy_rate(group):
    """In 0.25 ms 64 states of 32 heads, 2.1 MB each, come and go: 270 MB of the 1.05 GB that could be copied."""
    assert bandwidth(group).rows == []
    assert len(of(group)) == 3
    workload = rows("decode")["16/32 batch 64"]
    results = [
        Result(workload, "flash_delta", graph_ms=Spread(0.25, 0.2, 0.3)),
        Result(workload, "fla", "it cannot"),
        Result(rows("decode")["16/32 batch 64, bfloat16 states"], "fla", graph_ms=Spread(0.25, 0.2, 0.3)),
    ]
    table = bandwidth(Group("decode", {}, dict.fromkeys(("flash_delta", "fla"), "1.0"), H200, results))
    assert table == (
        ["share of the copy rate", "flash_delta", "fla"],
        [["decode 16/32 batch 64", "26%", "-"], ["decode 16/32 batch 64, bfloat16 states", "-", "13%"]],
    )


def test_a_copy_of_the_rows_own_bytes_stands_beside_the_copy_rate():
    """16.8 MB of states come and go in 10 us: 3.37 of 4.2 TB/s. A copy of as many bytes takes 9 us."""
    workload = rows("gdn-pools")["2/4 batch 64"]
    results = [Result(workload, "flash_delta", graph_ms=Spread(0.01, 0.01, 0.01), costs=Costs(5.0, 1.0, None, 0.009))]
    table = bandwidth(Group("gdn-pools", {}, {"flash_delta": "1.0"}, H200, results))
    assert table.head == ["share of the copy rate", "flash_delta", "a copy of as many bytes"]
    assert table.rows == [["decode 2/4 batch 64", "80%", "89%"]]


def test_the_chosen_backend_is_compared_with_those_by_name():
    """They are no peers: no mean, chart or summary counts them."""
    workload = rows("gdn-pools")["4/8 1x32768"]
    times_ms = {"flash_delta": 0.6, "flashinfer": 0.3, "hopper": 0.2, "triton": 0.7}
    results = [Result(workload, name, graph_ms=Spread(ms, ms, ms)) for name, ms in times_ms.items()]
    pools = Group("gdn-pools", {"gpu": "NVIDIA H200"}, dict.fromkeys(times_ms, "1.0"), H200, results)
    assert choices(pools).rows == [["prefill 4/8 1x32768", "hopper", "3.00x"]]
    assert times(pools).rows[0][-1] == "0.50x"
    assert [(kind.beside, kind.fastest) for kind in kinds([pools])] == [(["flashinfer"], [SpeedUp(0.5, False)])]
    assert "hopper" not in chart([pools], "light")
    pools.results = results[:2]
    assert choices(pools).rows == []


POOLS = [
    Workload("pools", "prefill", "gdn", 2, 4, 3, 70, "float32", lengths=(1, 70, 20), l2norm=True, raw=True, K=16, V=24),
    Workload("pools", "prefill", "kda", 2, 2, 2, 70, "float32", l2norm=True, raw=True, gates="unbounded", K=16, V=24),
]


@pytest.mark.parametrize("workload", POOLS, ids=lambda w: w.member)
def test_a_backend_by_name_runs_the_row_or_says_why_not(workload, monkeypatch):
    """On a CPU it is the torch backend by name: `hopper` and `triton` refuse, and their refusal is a result."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in ("hopper", "triton"):
        with pytest.raises(ValueError, match="needs a GPU"):
            Entry(name, CPU).prepare(workload)
    assert "not compared on decoding" in load("hopper").unsupported(replace(workload, kind="decode"), CPU)
    call = prefill(workload, make_tensors(workload, CPU), "torch")
    entry = Entry("flash_delta", CPU)
    _, errors = entry.prepare(workload)
    assert max(error for error, _ in errors.values()) < 2e-6
    assert torch.equal(call.run()[0], entry.first_o)


@pytest.mark.parametrize("member", ["gdn", "kda"])
def test_lengths_that_only_the_device_knows_are_not_given(member):
    known = Workload("packed", "forward", member, 2, 2, 3, 70, lengths=(1, 70, 20), l2norm=True, raw=True, K=16, V=16)
    hidden = replace(known, on_device=True)
    assert hidden.name == "2/2 1x1 + 1x70 + 1x20, K = 16, V = 16, lengths on the device"
    for workload in (known, hidden):
        call = load("flash_delta").prepare(workload, make_tensors(workload, CPU))
        assert ("cu_seqlens_cpu" in call.inputs) == (workload is known)


def test_random_documents_are_the_same_ones_again():
    lengths = documents(37, 20000)
    assert len(lengths) == 37
    assert sum(lengths) == 20000
    assert lengths == documents(37, 20000) != documents(37, 20000, seed=2)
    assert list(lengths) not in (sorted(lengths), sorted(lengths, reverse=True))
    assert "16/32 37x76 to 1981" in rows("gdn-packed")


def test_serving_is_compared_with_plain_calls(group):
    assert taking_part("serving", group.versions).keys() == {"flash_delta", "plain"}
    assert taking_part("decode", group.versions) == group.versions
    installed = dict.fromkeys(("flash_delta", "fla", "flashinfer", "flash_kda", "transformers"), "1.0")
    assert taking_part("kda-gates", installed) == installed
    assert "flash_kda" not in taking_part("gdn-prefill", installed)
    assert taking_part("gdn-packed", installed).keys() == installed.keys() - {"flash_kda"}
    assert taking_part("kda-pools", installed).keys() == installed.keys() | {"hopper", "triton"}
    assert taking_part("gdn-pools", {"fla": "1.0"}) == {"fla": "1.0"}
    assert taking_part("prompts", installed).keys() == {"flash_delta", "fla", "flashinfer", "plain"}
    assert taking_part("kda-steps", installed).keys() == {"flash_delta", "fla", "flashinfer", "plain"}
    assert taking_part("drafts", installed).keys() == {"flash_delta", "records", "fla", "flashinfer"}
    assert taking_part("family-gdn2", installed).keys() == {"flash_delta", "triton", "fla"}
    assert eager(group).rows == []
    results = [
        Result(rows("serving")["16/32 64x1 + 1x2048"], name, eager_ms=Spread(ms, ms, ms))
        for name, ms in (("flash_delta", 0.5), ("plain", 0.6))
    ]
    serving = Group("serving", {}, dict.fromkeys(("flash_delta", "plain"), "1.0"), H200, results)
    assert eager(serving).rows == [["prefill 16/32 64x1 + 1x2048", "0.500", "0.600", "1.20x"]]
    assert len(times(serving).rows) == 1, "a mean of unlike things"


@pytest.mark.parametrize("group", ["drafts", "kda-drafts"])
def test_records_are_judged_by_the_states_that_follow_from_them(group):
    draft = replace(rows(group)[f"{'32/32' if 'kda' in group else '16/32'} batch 8, drafts of 4"], N=2, H=1, HV=2)
    entry = Entry("records", torch.device("cpu"))
    _, errors = entry.prepare(draft)
    assert errors.keys() == {"o", "final_state"}
    assert all(error <= allowed(reference, torch.bfloat16) for error, reference in errors.values())
    assert load("records").unsupported(replace(draft, tree=True), entry.device) is not None
    assert load("records").unsupported(draft, entry.device) is None


def test_a_call_without_a_graph_is_compared_with_eager_calls():
    def result(eager, graph=None):
        return Result(SMALL[0], "fla", eager_ms=Spread(eager, 0.0, 9.0), graph_ms=graph and Spread(graph, 0.0, 9.0))

    assert result(6.0, 4.0).over(result(3.0, 1.0)) == 4.0
    assert result(6.0).over(result(3.0, 1.0)) == result(6.0, 4.0).over(result(3.0)) == 2.0


def test_result_needs_no_time():
    assert Result(SMALL[0], "fla", "it cannot").ms is None
