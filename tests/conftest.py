import os
from importlib.util import find_spec

import pytest
import torch

# Without a GPU kernels run in Triton's interpreter, on CPU tensors. Triton reads this when a kernel is defined.
if not torch.cuda.is_available() and find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"
    from workshop.check.bounds import watch_bounds
    from workshop.check.interpreter import repair_interpreter

    repair_interpreter()
    watch_bounds()

# What PyTorch's deterministic mode asks of cuBLAS, before its first call.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# The workers of pytest-xdist share the cores: more threads than cores make small operators several times slower.
torch.set_num_threads(1)


LONG = {  # of tests with many cases, those that take long: beside each of them a quicker one stays
    "test_batch_invariance.py::test_other_sequences_change_no_bit[kda-triton-given]",
    "test_compiled_models.py::test_layers[gdn-grouped-padded]",
    "test_compiled_models.py::test_layers[kda-bounded-batch]",
    "test_compiled_models.py::test_layers[kda-packed]",
    "test_compiled_models.py::test_models[batch-mixers0-aot_eager]",
    "test_examples.py::test_a_row_over_two_ranks[kda]",
    "test_mix.py::test_packed_projection[2-False-whole]",
    "test_mix.py::test_packed_projection[2-True-packed]",
    "test_mix.py::test_packed_projection[3-False-packed]",
    "test_mix.py::test_packed_projection[3-True-whole]",
    "test_mix.py::test_packed_projection[one-False-whole]",
    "test_mix.py::test_packed_projection[one-True-packed]",
    "test_packs.py::test_no_call_of_a_model_misses[Qwen3.5]",
    "test_parallel.py::test_ranks_equal_one_device[4]",
    "test_prefill.py::test_batch_invariance[kda-triton]",
    "test_prefill.py::test_checkpoints[kda-raw-False-triton]",
    "test_prefill.py::test_how_many_prompts_there_are_changes_no_result[kda-triton]",
    "test_prefill.py::test_lengths[kda-True-triton]",
    "test_serving_ring.py::test_random_engine[gdn-raw-1-torch]",
    "test_serving_ring.py::test_random_engine[gdn-raw-2-torch]",
    "test_serving_ring.py::test_random_engine[gdn-raw-3-torch]",
    "test_serving_ring.py::test_random_engine[kda-bounded-2-torch]",
    "test_serving_ring.py::test_random_engine[kda-bounded-3-torch]",
    "test_torch_compile.py::test_a_layer_may_be_compiled_before_it_ever_ran[gdn-grouped]",
    "test_training_ranks.py::test_ranks_train_as_one_process_does[4]",
    "test_transforms.py::test_what_a_nan_reaches[kda-g-triton]",
    "test_transforms.py::test_what_a_nan_reaches[kda-v-triton]",
    "test_triton_kda.py::test_a_promise_that_holds_changes_nothing[dtype1-0.00390625]",
    "test_triton_kda.py::test_against_the_recurrence[in-kernel-packed-float32-changes2]",
    "test_triton_kda.py::test_states_of_chunks[ragged-float32-changes1-True]",
    "test_triton_kernels.py::test_against_the_recurrence[gdn-packed-float32-changes1]",
    "test_warmup.py::test_scratch_of_descriptors[sm_100]",
}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.removeprefix("tests/") in LONG:
            item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    """``torch.empty`` comes filled with NaN: whatever an op forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def problems(monkeypatch):
    """All that reach the torch backend."""
    from flash_delta.reference import backend
    from flash_delta.reference import elementwise as modules

    seen = []
    for module, names in (
        (backend, ("forward", "step", "decode", "prefill")),
        (modules, ("normalize", "convolve", "convolve_token", "gate")),
    ):
        for name in names:
            run = getattr(module, name)
            monkeypatch.setattr(module, name, lambda p, *more, run=run: seen.append(p) or run(p, *more))
    return seen


@pytest.fixture(scope="module")
def process():
    """In which Triton compiles. Its imports take longer than most of what is asked of it."""
    from flash_delta.compiler.pool import clean_processes

    with clean_processes(1) as (pool, _):
        yield pool


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder where a pretended GPU compiles its driver and our C once."""
    return tmp_path_factory.mktemp("driver")
