"""Wrong bounds of packed sequences touch no memory but the call's: in Triton's interpreter, which watches every address
(workshop/check/bounds.py), and on a GPU (see also test_hopper_gpu.py and test_sanitizer.py).

What comes out is undefined. The call after it is right.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from hostile_bounds import HOSTILE, T, hostile, leave_unread
from prefill_truth import check, make_prefill, run
from prompt_truth import make_prompts, run_prompts
from serving_truth import slots

import flash_delta
from flash_delta.kernels.runtime.chip import Tile
from flash_delta.kernels.triton import backend
from flash_delta.kernels.triton.tiles import Segments
from flash_delta.modules import causal_conv1d
from flash_delta.testing import MEMBERS, make_inputs
from flash_delta.testing.accuracy import TENSORS
from flash_delta.testing.cases import Case

# Memory that no kernel has written is NaN here, and the interpreter's maximum of such a row warns.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
FEW = ("first-above-0", "down-and-up", "all")  # for what takes long in the interpreter
every = pytest.mark.parametrize("name", HOSTILE)
some = pytest.mark.parametrize(
    "name", [name if GPU or name in FEW else pytest.param(name, marks=pytest.mark.long) for name in HOSTILE]
)


@pytest.fixture(autouse=True)
def unread(monkeypatch):
    leave_unread(monkeypatch)


def call(member, name, dtype, scale=1, **options):
    """Forward and backward; ``scale``: times as many tokens, and bounds as wrong."""
    bounds = hostile(name, DEVICE) * scale
    case = Case("", "", B=1, T=T * scale, H=1, HV=1, V=16, lengths=(T * scale, *(0 for _ in bounds[2:])))
    x = make_inputs(case, MEMBERS[member], dtype, DEVICE) | options | {"cu_seqlens": bounds}
    o, final = MEMBERS[member].op(**x, backend="triton")
    torch.autograd.grad((o, final), [x[n] for n in TENSORS if n in x], (torch.ones_like(o), torch.ones_like(final)))
    if GPU:
        torch.cuda.synchronize()
    return x


@pytest.mark.parametrize(
    ("member", "dtype", "options"),
    [
        ("gdn", torch.bfloat16, {}),
        ("gdn", torch.float32, {"disable_recompute": True}),
        ("comba", torch.bfloat16, {}),
        ("kda", torch.bfloat16, {}),
        ("kda", torch.float32, {}),
        ("simple-gla", torch.bfloat16, {}),
        ("gdn-recurrent", torch.float32, {}),
        ("kda-recurrent", torch.float32, {}),
    ],
    ids=["gdn", "gdn-saved", "comba", "kda", "kda-halved", "simple-gla", "gdn-recurrent", "kda-recurrent"],
)
@some
def test_forward_and_backward(member, dtype, options, name):
    call(member, name, dtype, **options)


@every
def test_segments(name, monkeypatch):
    """On a GPU so long ones that it splits them by itself."""
    if not GPU:
        tile = Tile(4, 1, 16)
        monkeypatch.setattr(backend, "plan_segments", lambda p, chip: Segments(64, tile, tile, tile))
    x = call("gdn", name, torch.bfloat16, scale=512 if GPU else 1)
    reasons = flash_delta.explain(flash_delta.chunk_gated_delta_rule, **x, backend="triton").reasons
    assert "segments" in reasons["triton"]


@every
@pytest.mark.parametrize("offset", [None, 70], ids=["stride", "offset"])
@pytest.mark.parametrize("kind", ["gdn-raw", "kda"])
def test_prefill(kind, offset, name, monkeypatch):
    """Nothing but the slots that the sequences write has changed, and a good call after it is right."""
    N = len(HOSTILE[name][0]) - 1
    x = make_prefill(kind, (T, *(0 for _ in range(N - 1))), slots=3 * N + 2, H=1, HV=1, V=16, device=DEVICE)
    table = [[2 * N + n] for n in range(N)]
    x |= {"checkpoint_indices": slots(table, x, torch.int32), "checkpoint_every": 64}
    if offset:
        x |= {"checkpoint_indices": x["checkpoint_indices"][:, 0], "checkpoint_every": None}
        x["checkpoint_offsets"] = slots([offset] * N, x)
    _, pool = run(kind, x | {"cu_seqlens": hostile(name, DEVICE)}, "triton")
    untouched = [*range(N), 3 * N, 3 * N + 1]
    assert torch.equal(pool[untouched], x["state_pool"][untouched])
    if GPU or name == "all":
        monkeypatch.undo()
        check(kind, x, "triton")


@every
@pytest.mark.parametrize("offset", [None, 70], ids=["stride", "offset"])
def test_prompts(offset, name):
    """With a convolution and a norm around the rule: windows are written to no other slot either."""
    N = len(HOSTILE[name][0]) - 1
    x = make_prompts("gdn-raw", (T, *(0 for _ in range(N - 1))), slots=3 * N + 2, H=1, HV=1, V=16, device=DEVICE)
    table = [[2 * N + n] for n in range(N)]
    x |= {"checkpoint_indices": slots(table, x, torch.int32), "checkpoint_every": 64}
    if offset:
        x |= {"checkpoint_indices": x["checkpoint_indices"][:, 0], "checkpoint_every": None}
        x["checkpoint_offsets"] = slots([offset] * N, x)
    _, pool, windows = run_prompts("gdn-raw", x | {"cu_seqlens": hostile(name, DEVICE)}, "triton")
    untouched = [*range(N), 3 * N, 3 * N + 1]
    assert torch.equal(pool[untouched], x["state_pool"][untouched])
    assert torch.equal(windows[untouched], x["convolution"].pool[untouched])


@every
def test_convolution(name):
    bounds, N = hostile(name, DEVICE), len(HOSTILE[name][0]) - 1
    x, weight, state = (
        torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((1, T, 5), (5, 4), (N, 5, 4))
    )
    y, final = causal_conv1d(x, weight, None, "silu", state, True, bounds, backend="triton")
    torch.autograd.grad((y, final), (x, weight, state), (torch.ones_like(y), torch.ones_like(final)))
    if GPU:
        torch.cuda.synchronize()
