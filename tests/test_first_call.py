"""How a first call compiles: kernels' first code in turns, the largest kernels first, both passes in one go."""

import contextlib
import gc
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import patch

import pytest
import torch
from example_output import EXAMPLES

pytest.importorskip("triton", reason="Triton is not installed")

from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime._allocation import NullAllocator, _allocator

from flash_delta import chunk_delta_rule
from flash_delta.kernels.runtime import launch, run, turns
from flash_delta.kernels.runtime.together import compile_together

ROWS = {"gdn": 0, "kda": 3}  # of training_step.ROWS


def test_threads_make_first_code_in_turns():
    inside, most = [], []

    def make(number):
        inside.append(number)
        most.append(len(inside))
        time.sleep(0.001)
        inside.remove(number)
        return number

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(turns._in_turn(make), range(50))) == list(range(50))
    assert max(most) == 1


def test_one_that_fails_leaves_its_turn():
    def fail():
        raise ValueError("no code")

    with pytest.raises(ValueError, match="no code"), ThreadPoolExecutor(1) as thread:
        thread.submit(turns._in_turn(fail)).result()
    assert turns._in_turn(threading.get_ident)() == threading.get_ident()


def test_both_languages_take_turns_and_triton_is_afterwards_as_it_was(monkeypatch):
    before = ASTSource.make_ir, GluonASTSource.make_ir
    with turns.taking_turns():
        assert tuple(make.__wrapped__ for make in (ASTSource.make_ir, GluonASTSource.make_ir)) == before
    with contextlib.suppress(ValueError), turns.taking_turns():
        raise ValueError("no code")
    assert before == (ASTSource.make_ir, GluonASTSource.make_ir)
    with turns.taking_turns():
        monkeypatch.setattr(ASTSource, "make_ir", len)
    assert (ASTSource.make_ir, GluonASTSource.make_ir) == (len, before[1]), "what other code has set stays"


def test_an_allocator_is_set_for_a_launch_only_and_never_instead_of_the_callers():
    assert isinstance(_allocator.get(), NullAllocator)
    with launch.memory_for_descriptors():
        assert _allocator.get() is launch._scratch
    assert isinstance(_allocator.get(), NullAllocator)
    before = _allocator.set(len)
    try:
        with launch.memory_for_descriptors():
            assert _allocator.get() is len
        assert _allocator.get() is len
    finally:
        _allocator.reset(before)


def test_no_garbage_is_collected_in_a_turn():
    def fail():
        assert not gc.isenabled()
        raise ValueError("no code")

    assert gc.isenabled()
    assert turns._in_turn(turns._in_turn(gc.isenabled))() is False
    assert gc.isenabled()
    with pytest.raises(ValueError, match="no code"):
        turns._in_turn(fail)()
    assert gc.isenabled()
    gc.disable()
    try:
        turns._in_turn(gc.isenabled)()
        assert not gc.isenabled(), "whoever switched it off wants it off"
    finally:
        gc.enable()


class Kernel:
    """Stands for one with so many descriptors, of so many characters."""

    def __init__(self, descriptors, size, asked):
        self.given = [object.__new__(TensorDescriptor) for _ in range(descriptors)]
        self.src, self.asked = size * " ", asked

    def warmup(self, *given, grid):
        self.asked.append(self)
        return self, grid


def test_large_kernels_are_compiled_first(monkeypatch):
    """Those with many descriptors before others, whatever the order of launches."""
    monkeypatch.setattr(launch.fastcall, "API", None)
    asked = []
    small, large, by_hand, longer = (Kernel(*of, asked) for of in ((0, 1), (0, 9), (2, 5), (2, 7)))
    whole = Kernel(3, 5, asked)
    kernels = small, by_hand, large, whole, longer
    wanted = {(id(kernel),): partial(kernel.warmup, *kernel.given, grid=2) for kernel in kernels}
    assert launch.compile_all(wanted) == {(id(kernel),): (kernel, 2) for kernel in asked}
    assert asked == [whole, longer, by_hand, large, small]


def compilations(place, row, changes):
    """How many kernels a step compiles, each time that it compiles any."""
    sys.path.append(EXAMPLES)
    import training_step

    from flash_delta.compiler.pretended_gpu import pretended_gpu

    found, compile_all = [], run.compile_all

    def noting(wanted):
        found.append(len(wanted))
        return compile_all(wanted)

    workload = training_step.ROWS[row]
    with pretended_gpu(place), patch.object(run, "compile_all", noting), patch.object(run, "compiled", {}):
        step = training_step.make_step(workload, torch.device("cpu"))
        op = partial(workload.op.op, *step.tensors, **changes)
        torch.autograd.grad(op()[0], step.tensors, torch.zeros_like(step.tensors[2]))
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="a driver is there, and cannot be pretended")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("changes", [{}, {"disable_recompute": True}], ids=str)
@pytest.mark.parametrize("member", ROWS)
def test_the_backward_pass_is_compiled_beside_the_forward_pass(process, place, member, changes):
    assert len(process.submit(compilations, place, ROWS[member], changes).result()) == 1


def failures():
    """What comes of three kernels, two of which cannot be compiled at first: errors, how often each was compiled, and
    the kernels."""
    import triton
    from faulty_kernels import product

    from flash_delta.compiler.offline import offline

    failing, compiled, compile_ = {32: [OSError("disk"), MemoryError()], 64: [OSError()]}, [], triton.compiler.compile

    def compile_one(src, **options):
        compiled.append(width := src.constants[(4,)])
        if failing.get(width):
            raise failing[width].pop(0)
        return compile_(src, **options)

    a, o = torch.empty(9, 64, 64, dtype=torch.bfloat16, device="meta"), torch.empty(64, 64, device="meta")
    wanted = [
        partial(product.warmup, a, a, o, 9, width, 16, 16, "ieee", grid=(1,), num_stages=1) for width in (16, 32, 64)
    ]
    errors = []
    with offline("sm_80"), patch.object(triton.compiler, "compile", compile_one):
        for _ in range(3):
            try:
                kernels = compile_together(wanted, beside=int)
            except Exception as error:
                errors.append(repr(error))
    return errors, sorted(compiled), [type(kernel).__name__ for kernel in kernels]


def test_what_could_not_be_compiled_is_compiled_by_the_next_call(process):
    """Each call says what happened to it."""
    errors, compiled, kernels = process.submit(failures).result()
    assert errors == ["OSError('disk')", "MemoryError()"]
    assert compiled == [16, 32, 32, 32, 64, 64]
    assert kernels == 3 * ["CompiledKernel"]


def test_kernels_get_into_the_cache_when_they_are_complete():
    from triton.runtime._async_compile import active_mode

    cache, fails = {}, [KeyboardInterrupt()]

    def compile_it():
        if fails:
            raise fails.pop()
        return "compiled"

    def ask(name):
        mode = active_mode.get()
        return (
            cache[name] if name in cache else mode.submit("source", compile_it, partial(cache.__setitem__, name), None)
        )

    wanted = [partial(ask, "a"), partial(ask, "b")]
    with pytest.raises(KeyboardInterrupt):
        compile_together(wanted, beside=int)
    assert (cache, active_mode.get()) == ({}, None)
    assert compile_together(wanted, beside=int) == ["compiled", "compiled"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_call_whose_assembler_was_killed(tmp_path, monkeypatch):
    from triton import knobs

    q, k, v, beta = (torch.randn(1, 64, 2, *width, device="cuda") for width in ((24,), (24,), (40,), ()))
    call = partial(chunk_delta_rule, q, k, v, beta.sigmoid(), use_qk_l2norm_in_kernel=True)
    killed = tmp_path / "ptxas"
    killed.write_text(f'#!/bin/sh\ncase "$*" in *--version*) exec {knobs.nvidia.ptxas.path} "$@";; esac\nkill -9 $$\n')
    killed.chmod(0o755)
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path / "cache")
        with monkeypatch.context() as m:
            m.setenv("TRITON_PTXAS_PATH", str(killed))
            m.setenv("TRITON_PTXAS_BLACKWELL_PATH", str(killed))  # newer Triton's, for all chips
            for _ in range(2):
                with pytest.raises(Exception, match="ptxas"):
                    call(backend="triton")
        o, _ = call(backend="triton")
    torch.testing.assert_close(o, call(backend="torch")[0], rtol=1e-4, atol=1e-4)
