"""Gluon kernels on a CPU: every role a thread, every tensor a torch tensor, every copy done when it is asked for.

It knows no layouts and no order of memory, which the compiler and a GPU have to get right; it does know arithmetic and
its roundings, indices, where the copy engine clips, what lies in shared memory (NaN at first), how many bytes a barrier
expects, and who waits for whom: a role that waits for ever is an error.
"""

import importlib
import sys
import threading
from functools import cache, partial
from inspect import signature
from itertools import product as product_of
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
from triton import experimental

SECONDS = 8  # that a role may wait
HERE = threading.local()  # program ids
KERNELS = []  # all that were made: launchers know a kernel by its id, so none may be freed


class Value:
    """A tensor in registers."""

    def __init__(self, t):
        self.t, self.type = t, SimpleNamespace(layout=None)

    shape = property(lambda self: list(self.t.shape))
    dtype = property(lambda self: self.t.dtype)

    def __getitem__(self, at):
        return Value(self.t[at])

    def to(self, dtype, bitcast=False):
        return Value(self.t.view(dtype) if bitcast else self.t.to(dtype))

    def reshape(self, shape):
        return Value(self.t.reshape(shape))

    def permute(self, order):
        return Value(self.t.permute(order))

    def expand_dims(self, axis):
        return Value(self.t.unsqueeze(axis))

    def split(self):
        return Value(self.t[..., 0]), Value(self.t[..., 1])

    def __neg__(self):
        return Value(-self.t)


def _operator(name):
    def apply(self, other):
        return Value(getattr(self.t, name)(bare(other)))

    return apply


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "truediv", "rtruediv", "mod"),
    *("xor", "rshift", "and", "or", "gt", "ge", "lt", "le", "eq", "ne"),
):
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))


class Number(int):
    """A scalar in registers."""

    def to(self, dtype):
        return self


def _scalar_operator(name):
    def apply(self, other):
        result = getattr(int(self), name)(other)
        return result if result is NotImplemented or isinstance(result, Value) else Number(result)

    return apply


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "rshift", "and"):
    setattr(Number, f"__{_name}__", _scalar_operator(f"__{_name}__"))


class Memory:
    """A tile of shared memory."""

    def __init__(self, t):
        self.t, self.dtype, self.shape = t, t.dtype, list(t.shape)

    def index(self, i):
        return Memory(self.t[i])

    def slice(self, start, length, dim=0):
        return Memory(self.t.narrow(dim, start, length))

    def permute(self, order):
        return Memory(self.t.permute(order))

    def load(self, layout):
        return Value(self.t.clone())

    def store(self, value):
        assert (value.dtype, value.shape) == (self.dtype, self.shape), "what is stored has the tile's type and shape"
        self.t.copy_(value.t)

    def reinterpret(self, dtype, shape, layout):
        count = torch.Size(shape).numel()
        return Memory(self.t.view(-1).view(dtype)[:count].view(shape))


class Barrier:
    def __init__(self):
        self.changed, self.phases, self.bytes = threading.Condition(), 0, 0

    def index(self, i):
        return self

    def init(self, count):
        self.count = self.left = count

    def arrive(self, count=1, bytes=0):
        with self.changed:
            self.left, self.bytes = self.left - count, self.bytes + bytes
            assert self.left >= 0, "more arrivals than a phase has"
            if self.left == 0 and self.bytes == 0:
                self.left, self.phases = self.count, self.phases + 1
                self.changed.notify_all()

    def wait(self, parity, pred=True):
        with self.changed:
            if pred and not self.changed.wait_for(lambda: self.phases % 2 != parity, SECONDS):
                raise TimeoutError("a role waits for ever")

    def invalidate(self):
        assert self.bytes == 0, "the copy engine has not brought all that a barrier expects"
        del self.count, self.left  # it can be used no more


class Descriptor:
    """What a ``TensorDescriptor`` describes, in the tensor's own memory."""

    def __init__(self, d):
        self.dtype, self.shape, self.strides = d.base.dtype, d.shape, d.strides
        offset = d.base.storage_offset()
        size = d.base.untyped_storage().nbytes() // d.base.itemsize
        self.memory = torch.as_strided(d.base, (size - offset,), (1,), offset)
        self.space = 2**64 // d.base.itemsize

    def inside(self, at, tile):
        """The part of a tile that lies in the tensor, and its memory."""
        assert at[-1] + tile.shape[-1] <= self.shape[-1], "columns are never clipped here"
        at, sizes = [int(p) for p in at], zip(tile.shape, self.shape, strict=True)
        part = tile.t[tuple(slice(max(0, -p), max(0, min(n, m - p))) for p, (n, m) in zip(at, sizes, strict=True))]
        start = sum(max(0, p) * s for p, s in zip(at, self.strides, strict=True)) % self.space if part.numel() else 0
        strides = [s if n > 1 else 0 for n, s in zip(part.shape, self.strides, strict=True)]
        return part, self.memory.as_strided(part.shape, strides, self.memory.storage_offset() + start)

    def load(self, at, bar, tile):
        part, source = self.inside(at, tile)
        if part.shape != tile.t.shape:
            tile.t.zero_()
        part.copy_(source)
        bar.arrive(0, bytes=-tile.t.numel() * tile.t.itemsize)

    def store(self, at, tile):
        part, target = self.inside(at, tile)
        target.copy_(part)


class Pointer:
    def __init__(self, t, at=0):
        self.t, self.at, self.dtype = t, at, SimpleNamespace(element_ty=t.dtype)

    def __add__(self, offset):
        return Pointer(self.t, offset + self.at)

    def add_to(self, value):
        """One number; what it was before."""
        before = self.load()
        self.store(before + value)
        return before

    def memory(self):
        """From the tensor's first number on, in the order of addresses."""
        first = self.t.storage_offset()
        return self.t.as_strided((self.t.untyped_storage().nbytes() // self.t.itemsize - first,), (1,), first)

    def load(self, mask=None, other=None):
        if mask is not None:
            return Value(torch.where(mask.t, self.memory()[torch.where(mask.t, bare(self.at), 0)], other))
        if isinstance(self.at, Value):
            return Value(self.memory()[self.at.t])
        number = self.t.as_strided((), (), self.t.storage_offset() + self.at)
        return Value(number.clone()) if number.dtype.is_floating_point else Number(number.item())

    def store(self, value, mask=None):
        at = bare(self.at)
        if isinstance(at, int):  # one number
            at, value = torch.tensor(at), Value(torch.as_tensor(bare(value)))
        assert at.shape == value.t.shape
        if mask is not None:
            at, value = at[mask.t], Value(value.t[mask.t])
        assert ((at >= 0) & (at < self.t.numel())).all(), "a store outside of the tensor"
        self.t.view(-1)[at] = value.t.to(self.t.dtype)


def bare(x):
    return x.t if isinstance(x, Value | Memory) else x


def product(a, b, acc, use_acc=True, is_async=False):
    a, b = bare(a), bare(b)
    assert a.dtype == b.dtype
    result = a.float() @ b.float()
    return Value(result + acc.t if use_acc else result)


def specialize(roles, warps, registers):
    ids, errors = HERE.ids, []
    HERE.roles = True

    def run(role, arguments):
        HERE.ids = ids
        try:
            with torch.no_grad():  # which a new thread does not inherit
                role(*arguments)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=role, daemon=True) for role in roles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def allocate(dtype, shape, layout):
    if layout == "barrier":
        HERE.barriers += (made := Barriers([Barrier() for _ in range(shape[0])]))
        return made
    return Memory(torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype))


class Barriers(list):
    shape = property(lambda self: [len(self), 1])

    def index(self, i):
        return self[i]


def layout(*arguments):
    return None


def maximum(a, b):
    if isinstance(a, Value):
        return Value(a.t.clamp(min=b)) if isinstance(b, int | float) else Value(torch.maximum(a.t, b.t))
    return Number(max(a, b))


def minimum(a, b):
    if isinstance(a, Value):
        return Value(a.t.clamp(max=b)) if isinstance(b, int | float) else Value(torch.minimum(a.t, b.t))
    return Number(min(a, b))


def choose(c, a, b):
    return Value(torch.where(c.t, bare(a), bare(b))) if isinstance(c, Value) else (a if c else b)


def sums_up_to(x, axis, combine):
    assert combine.__name__ == "add"
    return Value(x.t.cumsum(axis))


def total(x, axis):
    """A number, of a tensor with one axis."""
    if x.t.ndim > 1:
        return Value(x.t.sum(axis))
    return x.t.sum().item() if x.dtype.is_floating_point else Number(x.t.sum())


def largest(x, axis):
    """A number, of a tensor with one axis."""
    return Value(x.t.amax(axis)) if x.t.ndim > 1 else x.t.max().item()


def smallest(x, axis):
    """A number, of a tensor with one axis."""
    if x.t.ndim > 1:
        return Value(x.t.amin(axis))
    return x.t.min().item() if x.dtype.is_floating_point else Number(x.t.min())


def assembled(code, constraints, arguments, dtype, is_pure, pack):
    """What kernels write in assembly: float16 without infinities, and the bits of bfloat16 where a mask is 0; a sigmoid
    of -x log 2; and the two ends of a hand-over. Programs run one after the other, so a flag that is not there would
    never come."""
    if "cp.async.bulk.wait_group" in code:
        return arguments[0]
    if "ld.acquire" in code:
        assert (arguments[0].load().t != 0).all(), "a program waits for one that has not started"
        return arguments[0]
    if "ex2.approx" in code:
        return Value(1 / (1 + arguments[0].t.exp2()))
    assert "cvt.rn.satfinite.f16x2.f32" in code
    most = torch.finfo(torch.float16).max
    half = arguments[0].t.clamp(-most, most).half()
    if len(arguments) > 1:
        other, mask = arguments[1:]
        half = torch.where(mask.t != 0, half, other.t.bfloat16().view(torch.float16))
    return Value(half)


LANGUAGE = {
    "constexpr": lambda x: x, "allocate_shared_memory": allocate, "warp_specialize": specialize, "static_range": range,
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16,
    "int32": torch.int32, "int64": torch.int64,
    "program_id": lambda axis: Number(HERE.ids[axis]), "num_programs": lambda axis: HERE.ids[3 + axis],
    "barrier": lambda: None, "shared_memory_descriptor": Memory,
    "arange": lambda start, stop, layout: Value(torch.arange(start, stop)),
    "zeros": lambda shape, dtype, layout: Value(torch.zeros(shape, dtype=dtype)),
    "where": choose, "exp2": lambda x: Value(torch.as_tensor(bare(x)).exp2()), "rsqrt": lambda x: Value(x.t.rsqrt()),
    "inline_asm_elementwise": assembled, "associative_scan": sums_up_to, "int16": torch.int16,
    "sum": total, "join": lambda a, b: Value(torch.stack((a.t, b.t), -1)),
    "broadcast": lambda a, b: tuple(map(Value, torch.broadcast_tensors(a.t, b.t))),
    "convert_layout": lambda x, layout: x, "permute": lambda x, order: x.permute(order),
    "atomic_add": lambda p, x: p.add_to(x),
    "store": lambda p, x, **mask: p.store(x, **mask), "load": lambda p, **mask: p.load(**mask),
    "log2": lambda x: Value(x.t.log2()),
    "minimum": minimum, "maximum": maximum, "max": largest, "min": smallest, "abs": lambda x: Value(x.t.abs()),
    "full": lambda shape, x, dtype, layout: Value(torch.full(shape, x, dtype=dtype)), "bfloat16": torch.bfloat16,
    "BlockedLayout": layout, "NVMMADistributedLayout": layout, "NVMMASharedLayout": layout,
    "SwizzledSharedLayout": layout, "SliceLayout": layout, "DotOperandLayout": layout,
    "DistributedLinearLayout": layout,
}  # fmt: skip
TMA = SimpleNamespace(
    async_load=lambda d, at, bar, tile: d.load(at, bar, tile),
    async_store=lambda d, at, tile: d.store(at, tile),
    store_wait=lambda n: None,
)
MBARRIER = SimpleNamespace(
    MBarrierLayout=lambda: "barrier",
    init=lambda bar, count: bar.init(count),
    expect=lambda bar, bytes: bar.arrive(1, bytes),
    arrive=lambda bar, count, pred=True: bar.arrive(count) if pred else None,
    wait=lambda bar, parity, pred=True: bar.wait(parity, pred),
    invalidate=lambda bar: bar.invalidate(),
)
HOPPER = {
    "fence_async_shared": lambda: None,
    "mbarrier": MBARRIER,
    "tma": TMA,
    "warpgroup_mma": product,
    "warpgroup_mma_wait": lambda n, deps: deps[0] if len(deps) == 1 else tuple(deps),
}


@cache
def emulated(package, name):
    """The module ``package.name``, whose kernels are plain functions; `Kernel` calls them. It is imported once."""

    def module(path, members):
        made = ModuleType(path)
        vars(made).update(members)
        return made

    def jit(function=None, **options):
        return (lambda f: f) if function is None else function

    root = "triton.experimental.gluon"
    language = module(f"{root}.language", LANGUAGE)
    fakes = {
        root: module(root, {"jit": jit, "language": language}),
        f"{root}.language": language,
        f"{root}.language.nvidia.hopper": module("hopper", HOPPER),
        f"{root}.language.nvidia.ampere": module("ampere", {"mma_v2": product}),
        "triton.language.extra.cuda": module("cuda", {"gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None}),
    }
    own = [path for path in sys.modules if path.startswith(f"{package}.") or path.endswith(".kernels.device.gates")]
    with patch.dict(sys.modules, fakes), patch.object(experimental, "gluon", fakes[root]):
        for path in own:
            del sys.modules[path]
        made = importlib.import_module(f"{package}.{name}")
    return made


class Kernel:
    """A function of `emulated` as launchers take it: ``kernel[grid](...)`` runs one program after the other."""

    OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl", "maxnreg")  # for a compiler

    def __init__(self, function, note=lambda constants: None):
        self.fn, self.note, self.arg_names = function, note, list(signature(function).parameters)
        KERNELS.append(self)

    def __getitem__(self, grid):
        return partial(self.run, (*grid, 1)[:3])

    def run(self, grid, *arguments, **constants):
        constants = {name: value for name, value in constants.items() if name not in self.OPTIONS}
        self.note(constants)
        arguments = [self.convert(x) for x in arguments]
        for ids in product_of(*map(range, grid)):
            HERE.ids, HERE.barriers, HERE.roles = (*ids, *grid), [], False
            self.fn(*arguments, **constants)
            ended = not any(hasattr(bar, "count") for bar in HERE.barriers)
            assert ended or not HERE.roles, "a program with roles ends all its barriers"

    @staticmethod
    def convert(x):
        if hasattr(x, "block_shape"):
            return Descriptor(x)
        return Pointer(x) if isinstance(x, torch.Tensor) else x


def emulate(monkeypatch, *kernels):
    """Puts emulated kernels in the place of those of the Hopper backend. ``kernels``: pairs of a module and a name."""
    for module, name in kernels:
        path = module.__name__.removeprefix("flash_delta.kernels.hopper.")
        monkeypatch.setattr(module, name, Kernel(getattr(emulated("flash_delta.kernels.hopper", path), name)))


def launch(plan, *groups):
    """Launches a plan on the CPU. Returns its results, and all memory that it makes, by name."""
    from flash_delta.kernels.runtime.run import ByTriton, given_to

    with_memory = plan._replace(results=(*plan.results, *plan.memory))
    found = ByTriton(with_memory, given_to(plan, groups))(torch.device("cpu"), groups)
    count = len(plan.results)
    return found[:count], dict(zip([m.name for m in plan.memory], found[count:], strict=True))


def take_every_call(monkeypatch, forward, backward=None):
    """``forward`` in the place of the Hopper backend's, and that backend as the choice of every call; ``backward``: by
    default that of ``triton``."""
    from flash_delta.kernels.triton import backend
    from flash_delta.ops import _backend, _function

    taken = SimpleNamespace(
        forward=lambda p, x, known: forward(p, x),
        backward=backward or backend.backward,
        unsupported=lambda p: None,
        preference=lambda p: (0, None),
        takes_steps=lambda p: 64 % p.steps == 0,
    )
    monkeypatch.setattr(_function, "load_backend", lambda name: taken)
    monkeypatch.setattr(_backend, "_find", lambda name, on_cpu, load: taken)
