"""The key of a call, in C and in Python: they tell the same calls apart, and the same ones not."""

import gc
import random
import shutil
import sys
import threading
from contextlib import suppress
from itertools import product

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from flash_delta.kernels.runtime import fastcall
from flash_delta.modules.convolution import causal_conv1d
from flash_delta.modules.norm import rms_norm
from flash_delta.ops import _elementwise as _modules
from flash_delta.ops import _known_calls
from flash_delta.ops._check.elementwise import describe_norm
from flash_delta.problem import ENVIRONMENT, Normalized

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("gcc", "clang", "cc"))), reason="needs a compiler of C")
DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


@pytest.fixture(scope="module")
def c(tmp_path_factory):
    """What C has, without leaving it to other tests."""
    with knobs.cache.scope(), pytest.MonkeyPatch.context() as m:
        knobs.cache.dir = str(tmp_path_factory.mktemp("cache"))
        m.setattr(fastcall, "loaded", None)
        m.setattr(fastcall, "key", fastcall.look)
        m.delenv(ENVIRONMENT, raising=False)
        yield fastcall.load()


def views(dtype):
    """Yields views of every kind, each like another one in all but one thing, or in all."""
    base = torch.zeros(4096, dtype=dtype)
    start = -base.data_ptr() % 16 // dtype.itemsize
    base = base[start:]
    x = base[:96].view(2, 3, 16)
    yield from (base[n : n + 96].view(2, 3, 16) for n in range(18))  # alignments
    yield from (x, x.clone(), x.mT, x.mT.contiguous(), x[:, :2], x[:, ::2], x[..., :8], x[..., 1:9], x[:1], x[1:2])
    yield from (x.transpose(0, 1), x[:, :1].expand(2, 3, 16), x[:1].expand(2, 3, 16), x[0, 0, 0], x.flatten())
    yield from (x[:, :1], x[:, :1].contiguous(), x.view(1, 2, 3, 16), x.view(2, 1, 3, 16), x.view(6, 16))
    yield from (x.as_strided((1, 16), (s, 1)) for s in (1, 16, 99))  # a stride that says nothing
    yield from (x.as_strided((2, 1), s) for s in ((1, 7), (2, 7), (1, 1)))
    yield from (x[:0], x[:, :0], x[..., :0], base[1:1], x.as_strided((0, 4), (9, 9)), x.as_strided((3, 0), (9, 9)))


def equal_alike(c, gradients, first, second):
    equal = fastcall.look(gradients, *first) == fastcall.look(gradients, *second)
    assert (c.key(gradients, *first) == c.key(gradients, *second)) == equal, (first, second)
    return equal


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_are_equal_where_signatures_are(c, dtype):
    every = list(views(dtype))
    found = [equal_alike(c, False, ((a,),), ((b,),)) for a, b in product(every, repeat=2)]
    assert len(every) < sum(found) < len(found)


def test_dtypes_and_what_is_missing(c):
    tensors = [torch.zeros(2, 8).to(dtype) for dtype in DTYPES]
    for a, b in product([*tensors, None], repeat=2):
        equal_alike(c, False, ((a, None),), ((b, None),))
        equal_alike(c, False, ((a, None),), ((None, b),))
        equal_alike(c, False, ((a, b),), ((b, a),))


def test_calls_of_many_tensors(c):
    """Drawn at random: alike, alike but for one tensor, and in other groups."""
    draw = random.Random(0)
    pool = [t for dtype in DTYPES[:4] for t in views(dtype)] + [None] * 40
    for _ in range(500):
        call = [draw.choice(pool) for _ in range(draw.randint(1, 12))]
        other = list(call)
        other[draw.randrange(len(call))] = draw.choice(pool)
        cut = draw.randrange(len(call))
        equal_alike(c, False, (tuple(call),), (tuple(other[:cut]), tuple(other[cut:])))
        assert c.key(False, tuple(call)) == c.key(False, tuple(call[:cut]), tuple(call[cut:]))


def test_gradients(c):
    """They matter only where autograd is on, and whose they are does not."""
    x, w = torch.randn(4, 8), torch.nn.Parameter(torch.randn(8))
    calls = [(x, w), (x, w.detach()), (x.clone().requires_grad_(), w), (x * w, w.detach())]
    for gradients, a, b in product((True, False), calls, calls):
        equal_alike(c, gradients, (a,), (b,))
    assert c.key(True, calls[0]) == c.key(True, calls[2]) != c.key(True, calls[1]) == c.key(False, calls[0])
    with torch.inference_mode():
        assert c.key(False, (torch.zeros(4, 8), w)) == c.key(False, calls[1])


def test_the_environment_is_part_of_it(c, monkeypatch):
    x = (torch.randn(3),)
    keys = {key(False, x) for key in (c.key, fastcall.look)}
    for wish in ("torch", "triton"):
        monkeypatch.setenv(ENVIRONMENT, wish)
        keys |= {key(False, x) for key in (c.key, fastcall.look)}
    assert len(keys) == 6
    monkeypatch.setenv(ENVIRONMENT, "")
    assert {key(False, x) for key in (c.key, fastcall.look)} < keys


class Strange(torch.Tensor):
    pass


def test_what_is_no_plain_tensor_is_looked_at_in_python(c):
    """So are tensors that say too much; and what Python cannot look at has Python's error."""
    x = torch.randn(4, 8)
    for t in (x.as_subclass(Strange), torch.randn(2, 3, device="meta")):
        assert c.key(False, (x, t)) == fastcall.look(False, (x, t))
    many = tuple(x[:, :4].view(1, 1, 1, 1, 4, 4) for _ in range(64))
    assert c.key(False, many) == fastcall.look(False, many)
    for wrong, error in ((3, AttributeError), ("q", AttributeError), ([x], AttributeError)):
        with pytest.raises(error):
            c.key(False, (x, wrong))
        with pytest.raises(error):
            fastcall.look(False, (x, wrong))
    for key in (c.key, fastcall.look):
        with pytest.raises(RuntimeError):
            key(False, (x.to_sparse(),))
        with pytest.raises(RuntimeError):
            torch.vmap(lambda t, key=key: key(False, (t,)))(x)


def test_arguments_that_are_none(c):
    for arguments in ((), (False, [torch.randn(2)]), (False, torch.randn(2))):
        with pytest.raises(TypeError, match="key: expected"):
            c.key(*arguments)
    for arguments in ((), (0, 0, None), (1 << 70, 0, None)):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            c.launch(*arguments)


def test_nothing_is_kept(c):
    """Neither of tensors, nor of tuples, nor of what Python is asked."""
    x, strange, number = torch.randn(4, 8), torch.randn(4, 8).as_subclass(Strange), 77777
    held = (x, strange, number, (x, strange), (x, number), fastcall.look, Strange)

    def counts():
        return [sys.getrefcount(one) for one in held]

    def calls(number):
        for _ in range(number):
            c.key(True, (x, None), (x,))
            c.key(False, held[3])
            with suppress(AttributeError):
                c.key(False, held[4])
            with suppress(TypeError):
                c.launch(0, 0, None)
        gc.collect()  # what torch's subclasses leave
        return sys.getallocatedblocks()

    def leaked():
        """By torch itself: 2.11 forgets the class of a subclass that is asked whether it is contiguous."""
        count = sys.getrefcount(Strange)
        for _ in range(10):
            strange.is_contiguous()
        return sys.getrefcount(Strange) > count

    if leaked():
        held = held[:-1]
    before, blocks = counts(), calls(100)
    assert calls(2000) - blocks < 1000
    assert counts() == before


def test_two_threads_load_one_module(c, monkeypatch):
    monkeypatch.setattr(fastcall, "loaded", None)
    found, meet = [], threading.Barrier(4)
    threads = [threading.Thread(target=lambda: (meet.wait(10), found.append(fastcall.load()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert fastcall.key is found[0].key


def test_an_op_takes_whichever_is_there(c, monkeypatch):
    """A call that Python has looked at is looked at once more, by C's key, and no more."""
    described, choose = [], _modules.choose_backend
    monkeypatch.setattr(_modules, "choose_backend", lambda *x: described.append(x) or choose(*x))
    monkeypatch.setattr(_known_calls, "calls", _known_calls.Remembered())
    x, w = torch.randn(1, 5, 8), torch.randn(8, 4)
    for key, count in ((fastcall.look, 1), (c.key, 2)):
        monkeypatch.setattr(fastcall, "key", key)
        for _ in range(3):
            causal_conv1d(x, w)
        assert len(described) == count
    with pytest.raises(ValueError, match="weight: expected a tensor"):
        causal_conv1d(x, w[:4])
    assert c.key(False, Normalized(x, w)) == c.key(False, (x, w, None))


def test_only_plain_calls_are_recalled(c, monkeypatch):
    monkeypatch.setattr(_known_calls, "calls", _known_calls.Remembered())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x, given = Normalized(torch.randn(3, 8), torch.randn(8)), (None, describe_norm, "rms_norm", None, 1e-5)
    strange = x._replace(x=x.x.as_subclass(Strange))
    with torch.no_grad():
        for key, count in ((fastcall.look, 0), (c.key, 1)):  # Python's key is also that of tensors without memory
            monkeypatch.setattr(fastcall, "key", key)
            assert _known_calls.recall(given, x) is None
            for tensors in (x, strange):
                rms_norm(tensors.x, x.weight, 1e-5)
            assert (_known_calls.recall(given, x) is not None) == count
            assert _known_calls.recall(given, strange) is None
        assert _known_calls.recall(([],), x) is None
        assert _known_calls.recall(given, x._replace(weight="weight")) is None
        with forward_ad.dual_level():
            assert _known_calls.recall(given, x) is None
        with FakeTensorMode():
            assert _known_calls.recall(given, x) is None
        found = _known_calls.recall(given, x)
    assert found is not None
    assert _known_calls.recall(given, x) is found, "nobody wants a gradient"
    wanted = x._replace(weight=torch.nn.Parameter(x.weight))
    assert _known_calls.recall(given, wanted) is None
    rms_norm(wanted.x, wanted.weight, 1e-5)
    assert _known_calls.recall(given, wanted).needs_grad
