"""A row, the heads of a layer and the parameters of a model over two GPUs, by NCCL, are those of one process.

The same tests run on a CPU by gloo. Results are compared with float64 on a CPU. An error may be as large as the rule of
`testing.allowed` says: for the ops beside the torch backend, for layers and models beside one process on the device.
"""

import math
from functools import cache
from itertools import product

import pytest
import torch
import torch.multiprocessing as mp
from gpu_ranks import work
from parallel_ranks import WIDE, Heads, LayerSplit, Split, global_inputs
from test_parallel import check_heads, check_layer, check_op, judge, whole_heads, whole_layer
from training_ranks import MIXERS, assert_gradients_in_bfloat16, gradients_alone
from training_ranks import WIDE as WIDE_MODEL

from flash_delta.testing import MEMBERS, Case, allowed, relative_error
from flash_delta.testing.accuracy import products_in, run, truth

KINDS = ("gdn", "kda")
DTYPES = (torch.float32, torch.bfloat16)
RAW = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True}
ROW = {"B": 1, "K": 64, "V": 64, "options": RAW}
SPLITS = [
    Split(Case("one", "one sequence over both ranks", T=300, **ROW)),
    Split(Case("runs", "documents across ranks, empty ones, padding of NaN", T=310, lengths=(0, 130, 3, 0, 150), **ROW),
          tokens=(100, 210)),
    Split(Case("heads-and-tails", "of all documents, also short ones", T=300, lengths=(180, 0, 1, 119), **ROW),
          fragments="sequences"),
    Split(Case("heads-and-tails-of-a-row", "documents end anywhere", T=300, lengths=(20, 151, 129), **ROW),
          fragments="row"),
]  # fmt: skip
REPLAYED = [
    LayerSplit(f"{kind}, {lengths}, {dtype}", f"{kind}-wide", lengths, (141, 59), False, dtype=dtype, on_device=True)
    for kind in KINDS
    for lengths in ((140, 2, 58), (0, 200, 0), (141, 0, 40))
    for dtype in DTYPES
]
LAYERS = [
    LayerSplit(f"{kind}, {fragments}, {dtype}", f"{kind}-wide", (140, 2, 58), tokens, fragments=fragments, dtype=dtype)
    for kind in KINDS
    for tokens, fragments in (((141, 59), None), (None, "sequences"))
    for dtype in DTYPES
] + REPLAYED
HEADS = Heads(WIDE, 150)
OF_HEADS = {"gdn": ("dA_log", "ddt_bias"), "kda": ("dA_log",)}  # gradients of one number per head
OF_KIND = pytest.mark.parametrize("kind", KINDS)
OF_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module", params=["nccl", pytest.param("gloo", marks=pytest.mark.long)])
def backend(request):
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("it needs two GPUs")
    return request.param


@pytest.fixture(scope="module")
def ranks(backend, tmp_path_factory):
    """What both ranks got, by kind and dtype. Each of these has two processes. On GPUs they mostly compile, so all of
    them run at the same time."""
    started = {}

    def start(*job):
        folder = tmp_path_factory.mktemp("ranks")
        started[job] = folder, mp.spawn(work, (2, folder, backend, *job, (SPLITS, LAYERS, HEADS)), nprocs=2, join=False)

    def results(*job):
        if job not in started:
            start(*job)
        folder, processes = started[job]
        while not processes.join():
            pass
        return [torch.load(folder / f"{rank}.pt") for rank in range(2)]

    for job in product((*KINDS, "graph", "model"), DTYPES) if backend == "nccl" else ():
        start(*job)
    yield results
    for _, processes in started.values():
        for process in processes.processes:
            process.join()


@pytest.fixture
def device(backend):
    return "cuda" if backend == "nccl" else "cpu"


def limits(found, want, dtype):
    """The allowed errors, by the errors of what was ``found`` by one process."""
    return {name: allowed(relative_error(found[name].cpu(), t), dtype) for name, t in want.items()}


@cache
def one_process(case, kind, dtype):
    """What is right, and the errors of the torch backend with products in ``dtype``. ``case``: a name of `SPLITS`."""
    (split,) = (split for split in SPLITS if split.case.name == case)
    x, bounds = global_inputs(split, kind, dtype)
    x["cu_seqlens"] = torch.tensor(bounds)
    with products_in(dtype):
        alone = run(MEMBERS[kind], x, "torch")
    want = truth(MEMBERS[kind], x)
    return want, {name: relative_error(alone[name], t) for name, t in want.items()}


@OF_DTYPE
@OF_KIND
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.case.name)
def test_ops_on_a_row(ranks, split, kind, dtype):
    parts = [rank[split.case.name, kind, dtype] for rank in ranks(kind, dtype)]
    _, errors = one_process(split.case.name, kind, dtype)
    elsewhere = dict.fromkeys(OF_HEADS[kind], math.inf)
    check_op(split, kind, dtype, parts, {name: allowed(error, dtype) for name, error in errors.items()} | elsewhere)


def root_mean_square(errors):
    return math.hypot(*errors) / math.sqrt(len(errors))


@OF_DTYPE
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in OF_HEADS[kind]])
def test_gradients_of_a_number_per_head(ranks, kind, name, dtype):
    """Over all splits together. Errors of so few numbers scatter: those of one process from 3e-4 to 5e-3."""
    found, alone = [], []
    for case in (split.case.name for split in SPLITS):
        want, errors = one_process(case, kind, dtype)
        found.append(relative_error(sum(rank[case, kind, dtype][name] for rank in ranks(kind, dtype)), want[name]))
        alone.append(errors[name])
    assert root_mean_square(found) <= allowed(root_mean_square(alone), dtype), found


def judge_layer(split, device, found):
    alone, want = whole_layer(split, device=device), whole_layer(split, torch.float64)
    check_layer(split, [rank[split.name] for rank in found], limits(alone, want, split.dtype))


@pytest.mark.parametrize("split", LAYERS, ids=lambda split: split.name)
def test_layers_on_a_row(ranks, device, split):
    judge_layer(split, device, ranks(split.layer.removesuffix("-wide"), split.dtype))


@pytest.mark.parametrize("split", REPLAYED, ids=lambda split: split.name)
def test_a_graph_of_a_step_serves_other_bounds(ranks, device, split):
    if device == "cpu":
        pytest.skip("a graph is of a GPU")
    judge_layer(split, device, ranks("graph", split.dtype))


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="FSDP2 takes one dtype")
def test_bfloat16_weights_with_float32_gates(ranks, device):
    for found in ranks("weights", torch.bfloat16):
        assert_gradients_in_bfloat16(found, device, MIXERS[:2], WIDE_MODEL)


@OF_DTYPE
@OF_KIND
def test_heads(ranks, device, kind, dtype):
    alone, want = whole_heads(kind, HEADS, dtype, device=device), whole_heads(kind, HEADS, dtype, torch.float64)
    parts = [rank["heads"][kind, dtype] for rank in ranks(kind, dtype)]
    check_heads(kind, HEADS, dtype, parts, limits(alone, want, dtype))


@OF_DTYPE
def test_parameters(ranks, device, dtype):
    """Under FSDP2: the losses of two rows, and every gradient of their mean."""
    alone, want = gradients_alone(2, device, dtype), gradients_alone(2, "cpu", torch.float64)
    allowed_errors = limits(alone, want, dtype)
    for rank, found in enumerate(ranks("model", dtype)):
        assert found.keys() == want.keys()
        for name, t in want.items():
            t = t[rank] if name == "loss" else t
            judge(f"{dtype}: {name}", found[name], t, dtype, allowed_errors[name])
