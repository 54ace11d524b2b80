"""The tape of the Hopper backend's loop: the pieces of all programs are every item once, and no bit depends on them."""

import os
import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flash_delta.kernels.hopper.plans import lost
from flash_delta.kernels.hopper.plans import tape as tapes
from flash_delta.kernels.hopper.plans.lost import _words, check_states, word_of
from flash_delta.kernels.hopper.plans.tiles import (
    NARROW,
    SLIM,
    WIDE,
    Pace,
    backward_needs_tape,
    needs_tape,
)
from flash_delta.kernels.runtime.plan import Making
from flash_delta.testing import MEMBERS
from tests.hostile_bounds import HOSTILE, hostile
from tests.test_hopper_loop import on_cpu  # noqa: F401

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
PACE = Pace(10)
DRAW = random.Random(5)
LENGTHS = (900, 130, 0, 64, 700, 1, 300)


def laid(bounds, N, T, HV, programs, prompts=None, pace=PACE):
    """The borders of a tape, as pairs. A tape has other numbers before."""
    p = SimpleNamespace(N=N, HV=HV, K=1, V=1, device=torch.device("cpu"))
    tape = tapes.new_tape(Making(), p, programs, pace)
    table, marks = (torch.full(t.shape, -7, dtype=t.dtype) for t in (tape.table, tape.marks))
    most = tapes.PROGRAMS
    if prompts is None:
        numbers = (*tape.numbers, N, T, HV, 64, bounds is not None, False, most, False)
        tapes.lay_tape[(1,)](table, marks, bounds, *numbers)
    else:
        lay_listed()[(1,)](table, marks, bounds, prompts, *tape.numbers, N, T, HV, most)
    assert table[:3].tolist() == [0, tapes.PATIENCE, word_of(p.device)]
    assert not handed_over(table).any()
    return table[3 : 5 + 2 * programs].view(-1, 2).tolist()


def handed_over(table):
    """The flags of a tape's table."""
    return table[(len(table) + 5) // 2 :]


def lay_listed():
    import triton
    import triton.language as tl

    @triton.jit
    def listed(table, marks, cu_seqlens, prompts, a, b, c, d, e, f, N, T, HV: tl.constexpr, PROGRAMS: tl.constexpr):
        tapes.lay(table, marks, (a, b, c, d, e, f), cu_seqlens, prompts, None, N, T, HV, 64, True, PROGRAMS)

    return listed


def pieces_of(borders, chunks):
    """By program, in the order of its work: (item, first chunk, chunk after the last)."""
    found = []
    for (low, entry), (high, leave) in pairwise(borders):
        items = range(high if leave else high - 1, low - 1, -1)
        found.append([(i, entry if i == low else 0, min(leave, chunks[i]) if i == high else chunks[i]) for i in items])
    return found


def check(lengths, HV, programs, borders):
    """Every item is scanned once. A program waits only for the first piece of the program before it. No program has
    much more than its share. Returns how many items are cut."""
    chunks = [-(-n // 64) for n in lengths for _ in range(HV)]
    pieces, walked = pieces_of(borders, chunks), {}
    for u, mine in enumerate(pieces):
        for number, (item, begin, end) in enumerate(mine):
            assert begin < end or chunks[item] == 0
            if begin > 0:
                assert (number, pieces[u - 1][0]) == (len(mine) - 1, (item, 0, begin))
            if end < chunks[item]:
                assert (number, pieces[u + 1][-1]) == (0, (item, end, chunks[item]))
            walked[item] = walked.get(item, 0) + end - begin
    assert walked == dict(enumerate(chunks))
    if len(chunks) > programs:
        ticks = [PACE.item + PACE.chunk * n for n in chunks]
        most = max(sum(PACE.item * (a == 0) + PACE.chunk * (b - a) for _, a, b in mine) for mine in pieces)
        share = max(*ticks, -(-sum(ticks) // programs))
        assert most <= share + max(PACE.cut + share // 31, 2 * PACE.chunk + PACE.item)
    return sum(begin > 0 for mine in pieces for _, begin, _ in mine)


def drawn():
    """Lengths, heads and programs."""
    yield from [([4096] * 5, 32, 132), ([540] * 36 + [560], 32, 132), ([0, 0, 0], 2, 132), ([1], 1, 3)]
    yield from [([64] * 7, 1, 3), ([0] * 300 + [5000], 4, 132), ([32768] + [64] * 100, 8, 132)]
    for _ in range(20):
        lengths = [int(DRAW.lognormvariate(5, 1.5)) * (DRAW.random() > 0.1) for _ in range(DRAW.randint(1, 400))]
        yield lengths, DRAW.choice([1, 2, 3, 8, 32]), DRAW.choice([1, 2, 3, 78, 132, 144])


def test_every_item_is_walked_once():
    cuts = 0
    for lengths, HV, programs in drawn():
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        T = int(bounds[-1]) + 5
        cuts += check(lengths, HV, programs, laid(bounds, len(lengths), T, HV, programs))
        kept = [n for n in range(len(lengths)) if DRAW.random() < 0.5]
        prompts = torch.tensor([len(kept), *(x for n in kept for x in (n, 3, 4))], dtype=torch.int32)
        listed = laid(bounds, len(lengths), T, HV, programs, prompts)
        cuts += check([lengths[n] for n in kept], HV, programs, listed)
    assert cuts > 500


@pytest.mark.parametrize(("N", "T", "HV", "programs"), [(5, 4096, 32, 132), (3, 100, 2, 7), (9, 2048, 16, 132)])
def test_rows_of_a_batch(N, T, HV, programs):
    check([T] * N, HV, programs, laid(None, N, T, HV, programs))


@pytest.mark.parametrize("name", HOSTILE)
def test_wrong_bounds(name):
    """Borders stay inside of what the loop makes of such bounds."""
    bounds = hostile(name, "cpu")
    N, T, HV, programs = len(bounds) - 1, 200, 3, 5
    inside = bounds.clamp(0, T)
    chunks = [-(-max(0, int(b - a)) // 64) for a, b in pairwise(inside) for _ in range(HV)]
    borders = laid(bounds, N, T, HV, programs)
    assert borders[0] == [0, 0]
    assert borders == sorted(borders)
    assert all(0 <= item <= N * HV and (cut == 0 or cut < chunks[item]) for item, cut in borders)
    pieces = pieces_of(borders, chunks)
    for u, mine in enumerate(pieces):
        assert all(pieces[u - 1][0] == (item, 0, begin) for item, begin, _ in mine if begin > 0)


def test_where_a_tape_is_needed():
    def needs(N, T, HV, lengths=None, packed=True, programs=132):
        return needs_tape(SimpleNamespace(N=N, T=T, HV=HV, lengths=lengths, packed=packed), programs, PACE)

    assert not needs(4, 16384, 32)  # an item for each program
    assert needs(5, 16384, 32)  # lengths that only the device knows
    assert not needs(8, 4096, 32, packed=False)  # 256 items: two rounds, nearly full
    assert needs(5, 4096, 32, packed=False)  # 160 items
    assert not needs(8, 32768, 32, (4096,) * 8)
    assert needs(8, 32768, 32, (4096,) * 7 + (4000,))
    assert not needs(2**22, 2**22, 64)  # numbers would not fit


def test_where_a_walk_needs_a_tape():
    def needs(N, HV, lengths=None, packed=True):
        p = SimpleNamespace(N=N, T=N * 1024, HV=HV, lengths=lengths, packed=packed)
        return backward_needs_tape(p, 132, PACE)

    assert needs(5, 32)  # lengths that only the device knows
    assert not needs(37, 32)  # nine items per program
    assert not needs(37, 32, (1000,) * 36 + (1888,))
    assert needs(17, 32, (1024,) * 17)  # four rounds, and 16 items in a fifth one
    assert needs(17, 32, packed=False)


@pytest.mark.parametrize(
    ("form", "width", "tile"),
    [("packed", 128, WIDE), ("rows", 128, WIDE), ("packed", 128, NARROW), ("given", 128, NARROW), ("packed", 64, SLIM)],
)
def test_no_bit_depends_on_borders(on_cpu, form, width, tile):  # noqa: F811
    """States that are handed over are those that programs would have kept, for several numbers of programs."""
    torch.manual_seed(0)
    packed, B, T, HV = form != "rows", 4, 900, 2
    if packed:
        B, T = 1, sum(LENGTHS) + 3

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16)

    N = len(LENGTHS) if packed else B
    x = {
        "q": draw(B, T, 1, width), "k": torch.nn.functional.normalize(draw(B, T, 1, width), dim=-1),
        "v": draw(B, T, HV, width),
        "g": -torch.rand(B, T, HV), "beta": 2 * torch.rand(B, T, HV), "output_final_state": True,
        "initial_state": torch.randn(N, HV, width, width) if form != "given" else None,
        "use_qk_l2norm_in_kernel": form == "packed",
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0) if packed else None,
    }  # fmt: skip
    on_cpu(tile, 1)
    with torch.no_grad():
        wanted = MEMBERS["gdn"].op(**x)
    cuts = []
    for programs in (3, 5):
        made = on_cpu(tile, programs * (128 // (64 * tile.groups) if width == 128 else 1), taped=True)
        with torch.no_grad():
            got = MEMBERS["gdn"].op(**x)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        cuts += [int(handed_over(memory["table of tape"]).sum()) for memory in made]
    assert sum(cuts) >= 2


def test_a_lost_state_is_reported_by_the_next_call():
    device = torch.device("cpu")
    word_of(device)
    check_states("an_op")
    _words[device][0].fill_(1)
    with pytest.raises(RuntimeError, match="an_op: an earlier call on cpu lost a state between two programs"):
        check_states("an_op")
    check_states("an_op")


def test_the_devices_word_is_in_the_hosts_memory(monkeypatch):
    """Wherever PyTorch makes tensors by default."""
    monkeypatch.setattr(lost, "_words", {})
    with torch.device("meta"):
        assert word_of(torch.device("cuda", 7)) != 0
