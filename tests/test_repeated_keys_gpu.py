"""Cases where keys repeat, on a GPU and at full size: 16 heads with keys of their own."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from dataclasses import replace
from functools import lru_cache

import flash_delta
from flash_delta.testing import HARD, MEMBERS, Standard, make_inputs, relative_error, run
from flash_delta.testing.accuracy import infer
from flash_delta.testing.cases import Floors
from flash_delta.testing.rule import run_wide

BACKENDS = ["triton", *(["hopper"] if torch.cuda.get_device_capability()[0] == 9 else [])]
BY_NAME = {case.name: case for case in HARD}
ROWS = [(name, case.name) for name in ("gdn", "kda") for case in HARD] + [("delta-rule", "signs-1.999")]
LENGTHS = (512, 1, 300, 64, 500, 65, 0, 447, 700, 256, 256, 128, 640)
POOL = {"gdn": flash_delta.prefill_gated_delta_rule, "kda": flash_delta.prefill_kda}


ROUNDED = pytest.mark.xfail(
    strict=True,
    reason="Hopper's inference rounds A diag(b) to bfloat16 where no beta of a chunk is above 1 (docs/notes)",
)


def known(request, fault, *cells):
    """Marks cells of a test as known faults."""
    if request.node.callspec.id in cells:
        request.applymarker(fault)


@lru_cache(1)
def call_of(name, case, dtype=torch.bfloat16, lengths=None):
    """The inputs and the truth, which both backends have in common."""
    case, member = BY_NAME[case], MEMBERS[name]
    if lengths is not None:
        case = replace(case, T=sum(lengths), lengths=lengths)
    x = make_inputs(case, member, dtype, "cuda")
    return x, Standard(case, member, x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "case"), ROWS)
def test_outputs_and_gradients(request, name, case, backend):
    known(request, ROUNDED, "gdn-one-key-0.9-hopper")
    x, standard = call_of(name, case)
    assert not standard.wrong(infer(MEMBERS[name], x, backend))
    if "dq" in standard.want:
        got = run(MEMBERS[name], x, backend)
        assert got.keys() == standard.want.keys()
        assert not standard.wrong(got)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "case"), [("gdn", "one-key-1.999"), ("kda", "signs-1.999"), ("gdn", "16-keys-1.9")])
def test_packed_sequences(name, case, backend):
    """Enough of them that they are scanned as they are, not in segments; the same as prefill on a pool."""
    x, standard = call_of(name, case, lengths=LENGTHS)
    assert not standard.wrong(infer(MEMBERS[name], x, backend))
    assert not standard.wrong(run(MEMBERS[name], x, backend))
    assert not standard.wrong(prefilled(name, x, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["one-key-1.999", "one-key-0.9", "direction-1.9"])
@pytest.mark.parametrize("name", POOL)
def test_prefill_on_a_pool(request, name, case, backend):
    known(request, ROUNDED, "gdn-one-key-0.9-hopper")
    x, standard = call_of(name, case, lengths=(1024,))
    assert not standard.wrong(prefilled(name, x, backend))


@torch.no_grad()
def prefilled(name, x, backend):
    """The results of prefill. Sequence n starts from slot n, and its last state goes to slot N + n."""
    states = x["initial_state"].detach()
    N = len(states)
    pool, slots = torch.cat([states, torch.full_like(states, torch.nan)]), torch.arange(2 * N, device=states.device)
    tokens = {n: x[n] for n in ("q", "k", "v", "g", "beta", "cu_seqlens", "use_qk_l2norm_in_kernel")}
    slots = {"read_indices": slots[:N], "write_indices": slots[N:]}
    o = POOL[name](**tokens, state_pool=pool, **slots, state_v_first=False, backend=backend)
    return {"o": o, "final_state": pool[N:]}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "case"), [("gdn", "one-key-1.999"), ("gdn", "16-keys-1.9"), ("kda", "signs-1.999")])
def test_float16(name, case, backend):
    """Hopper runs it without a decay per channel, and without a backward pass."""
    x, standard = call_of(name, case, torch.float16)
    if backend == "triton":
        assert not standard.wrong(run(MEMBERS[name], x, backend))
    if backend == "triton" or name == "gdn":
        assert not standard.wrong(infer(MEMBERS[name], x, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["one-key-1.999", "signs-1.999", "16-keys-1.9"])
@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_nothing_diverges(name, case, backend):
    """After 16,384 tokens results are off by at most four times as much as after 1,024."""
    long, member = replace(BY_NAME[case], T=16384, floors=Floors(0, 0)), MEMBERS[name]
    x = make_inputs(long, member, torch.bfloat16, "cuda")
    errors = []
    for T in (1024, 16384):
        part = {n: y[:, :T] if n in ("q", "k", "v", "g", "beta") else y for n, y in x.items()}
        want, got = run_wide(long, member, part), infer(member, part, backend)
        errors.append({n: relative_error(got[n], want[n]) for n in want})
    short, whole = errors
    assert all(whole[n] <= 4 * short[n] for n in whole), errors
