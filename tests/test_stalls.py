"""What calls of ever new lengths leave behind: little for Python's collector, and what comes again stays known.

On a GPU that is none (pretended_gpu.py); how long they take on one: test_stalls_gpu.py.
"""

import gc
import shutil
from itertools import pairwise

import pytest

from flash_delta.ops import _known_calls

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

KINDS = ("forward", "training", "prefill", "decode", "convolution", "norm")
LENGTHS, OBJECTS = 50, 8  # of which the collector scans through so many a length, at the most


def tracked():
    gc.collect()  # it stops tracking tuples that hold no containers
    gc.collect()
    return len(gc.get_objects())


def objects_left(kind, place):
    """By each of some new lengths."""
    from new_lengths import MOST, Calls

    from flash_delta.compiler.pretended_gpu import pretended_gpu

    with pretended_gpu(place):
        make = getattr(Calls(), kind)
        first, sizes = (3000, range(3008, 3008 + LENGTHS)) if kind != "decode" else (8, range(16, 16 + LENGTHS))
        for size in (1, 2, first, MOST):
            make(size)()
        calls, before = [make(size) for size in sizes], tracked()
        for call in calls:
            call()
        return (tracked() - before) / LENGTHS


@pytest.mark.parametrize("kind", KINDS)
def test_a_length_leaves_few_objects(process, place, kind):
    assert 0 < process.submit(objects_left, kind, place).result() <= OBJECTS


def looked_at(prompts, place):
    """How often decoding is, and prefill, among so many prompts of new lengths; and how many calls' launches stay."""
    from new_lengths import Calls

    from flash_delta.compiler.pretended_gpu import pretended_gpu
    from flash_delta.kernels.runtime import cuda_driver
    from flash_delta.ops.serving import _run

    def kept():
        return sum(isinstance(o, cuda_driver.Replay) for o in gc.get_objects())

    _known_calls.calls.clear()
    described, describe, before = [], _run.describe, kept()
    _run.describe = lambda *call: described.append(call[-1].op) or describe(*call)
    with pretended_gpu(place):
        calls = Calls()
        step = calls.decode(64)
        step(), step()  # by Python's key, and by C's
        described.clear()
        for length in range(17, 17 + prompts):
            calls.prefill(length)()
            step()
    _run.describe = describe
    return *(described.count(f"{op}_gated_delta_rule") for op in ("decode", "prefill")), kept() - before


@pytest.mark.parametrize("prompts", [2500, pytest.param(5000, marks=pytest.mark.long)])
def test_decoding_stays_known_among_new_prompts(process, place, prompts):
    decodings, prefills, kept = process.submit(looked_at, prompts, place).result()
    assert decodings == 0
    assert prefills == prompts
    assert kept <= 2 * _known_calls.MOST


def served(kind, place):
    """How often three known calls reach their backend."""
    from unittest.mock import patch

    from new_lengths import Calls

    from flash_delta.compiler.pretended_gpu import pretended_gpu
    from flash_delta.ops.serving import _run

    _known_calls.calls.clear()
    with pretended_gpu(place):
        call = getattr(Calls(), kind)(64)
        call(), call()
        with patch.object(_run, "serve", wraps=_run.serve) as counted:
            call(), call(), call()
    return counted.call_count


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_known_serving_calls_only_launch(process, place, kind):
    assert process.submit(served, kind, place).result() == 0


def compiled_by(options, place):
    """How many kernels the first forward pass compiles, and how many its backward pass."""
    import torch
    from new_lengths import Calls

    from flash_delta.compiler import pretended_gpu
    from flash_delta.kernels.runtime import run

    _known_calls.calls.clear()
    run.compiled.clear()
    with pretended_gpu.pretended_gpu(place):
        call = Calls().training(3000)
        q, counts = call.keywords["q"], [len(pretended_gpu.kept)]
        o, _ = call(**options)
        counts.append(len(pretended_gpu.kept))
        torch.autograd.grad(o, q, torch.ones_like(o))
        counts.append(len(pretended_gpu.kept))
    return [after - before for before, after in pairwise(counts)]


@pytest.mark.parametrize("options", [{}, {"disable_recompute": True}], ids=["", "kept"])
def test_a_backward_pass_by_hand_is_compiled_beside_its_forward_pass(process, place, options):
    forward, backward = process.submit(compiled_by, options, place).result()
    assert forward > 8
    assert backward == 0


def first_of_a_thread(place):
    """The context that a forward pass finds whose thread has not used CUDA, as autograd's may have not."""
    from concurrent.futures import ThreadPoolExecutor
    from ctypes import c_void_p

    from new_lengths import Calls

    from flash_delta.compiler.pretended_gpu import pretended_gpu

    _known_calls.calls.clear()
    with pretended_gpu(place) as driver, ThreadPoolExecutor(1) as thread:
        thread.submit(Calls().forward(3001)).result()
        return c_void_p.in_dll(driver, "context").value


def test_a_thread_gets_a_context_before_tensors_are_described(process, place):
    assert process.submit(first_of_a_thread, place).result() == 16
