import gc
import os
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

# Without a GPU kernels run in Triton's interpreter, on CPU tensors. Triton reads this when a kernel is defined.
if not torch.cuda.is_available() and find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"
    from workshop.check.bounds import watch_bounds
    from workshop.check.interpreter import repair_interpreter

    repair_interpreter()
    watch_bounds()

# What PyTorch's deterministic mode asks of cuBLAS, before its first call.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# No test asks a hub. Where there is no network, a question would wait for a minute.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The workers of pytest-xdist share the cores: more threads than cores make small operators several times slower.
torch.set_num_threads(1)

# Interpreted kernels make many objects, and few of them in circles.
gc.set_threshold(20_000, 20)


WIDE = ("heads-of-64", "heads-of-128", "long", "values-of-192", "widest-values")
PRODUCTS = "gdp-recurrent", "gdp-ungated"  # with three updates of the state per token, beside "gdp" with two
LONG = {  # of tests with many cases, those that take long: beside each of them a quicker one stays
    *(f"test_accuracy.py::test_float64[{op}-{case}]" for op in PRODUCTS for case in WIDE),
    *(
        f"test_accuracy.py::test_working_dtypes[{op}-heads-of-128-torch.{dtype}]"
        for op in PRODUCTS
        for dtype in ("float32", "bfloat16", "float16")
    ),
    "test_batch_invariance.py::test_other_sequences_change_no_bit[kda-triton-given]",
    "test_compiled_models.py::test_layers[gdn-grouped-padded]",
    "test_compiled_models.py::test_layers[kda-bounded-batch]",
    "test_compiled_models.py::test_layers[kda-packed]",
    "test_compiled_models.py::test_models[batch-mixers0-aot_eager]",
    "test_examples.py::test_a_row_over_two_ranks[kda]",
    "test_hopper_backward.py::test_against_the_recurrence[packed-segments]",
    "test_hopper_checkpoints.py::test_a_checkpoint_may_take_the_slot_that_is_read[40]",
    "test_hopper_checkpoints.py::test_a_prompt_goes_on_from_any_checkpoint[1]",
    "test_hopper_checkpoints.py::test_offsets[pool1-False-dtype1]",
    "test_hopper_gdn2.py::test_gradients[logs]",
    "test_hopper_gdn2.py::test_gradients[shared]",
    "test_hopper_kda_backward.py::test_against_the_recurrence[extreme-raw]",
    "test_hopper_kda_pool.py::test_a_prompt_goes_on_from_any_checkpoint[loop-False]",
    "test_hopper_kda_pool.py::test_a_prompt_goes_on_from_any_checkpoint[scan_channels-True]",
    "test_hopper_kda_pool.py::test_checkpoints_at_offsets[loop-gdn2-raw-False]",
    "test_hopper_kda_pool.py::test_checkpoints_at_offsets[scan_channels-gdn2-raw-False]",
    "test_hopper_kda_pool.py::test_checkpoints_at_offsets[scan_channels-kda-raw-False]",
    "test_hopper_pool.py::test_checkpoints_at_offsets[torch.bfloat16-False-False]",
    "test_hopper_pool.py::test_checkpoints_at_offsets[torch.float32-True-True]",
    "test_hopper_pool.py::test_heads_of_128[torch.float32]",
    "test_hopper_pool.py::test_no_bit_of_a_prompt_in_parts_depends_on_others"
    "[{'K': 128, 'V': 128, 'HV': 1}-torch.float32-True]",
    "test_hopper_pool.py::test_no_bit_of_a_prompt_in_parts_depends_on_others[{}-torch.float32-False]",
    "test_hopper_pool.py::test_without_a_pool[states-v-first]",
    "test_hopper_pool.py::test_without_a_pool[zeros-k-first]",
    "test_hopper_steps.py::test_against_the_equation[norms]",
    "test_hopper_steps.py::test_against_the_equation[segments]",
    "test_hopper_tape.py::test_no_bit_depends_on_borders[packed-128-tile0]",
    "test_hopper_tape.py::test_no_bit_depends_on_borders[rows-128-tile1]",
    "test_mix.py::test_a_layer_mixes[kda]",
    "test_mix.py::test_packed_projection[2-False-whole]",
    "test_mix.py::test_packed_projection[2-True-packed]",
    "test_mix.py::test_packed_projection[2-True-whole]",
    "test_mix.py::test_packed_projection[3-False-packed]",
    "test_mix.py::test_packed_projection[3-False-whole]",
    "test_mix.py::test_packed_projection[3-True-whole]",
    "test_mix.py::test_packed_projection[one-False-packed]",
    "test_mix.py::test_packed_projection[one-False-whole]",
    "test_mix.py::test_packed_projection[one-True-packed]",
    "test_mix.py::test_separate_projections[channel-whole]",
    "test_packs.py::test_no_call_of_a_model_misses[Qwen3.5]",
    "test_parallel.py::test_ranks_equal_one_device[4]",
    "test_prefill.py::test_batch_invariance[kda-triton]",
    "test_prefill.py::test_checkpoints[kda-raw-False-triton]",
    "test_prefill.py::test_how_many_prompts_there_are_changes_no_result[kda-triton]",
    "test_prefill.py::test_lengths[kda-True-triton]",
    "test_prompts.py::test_a_prompt_goes_on_from_any_checkpoint[gdn-raw-dtype0-cuts0-False-triton]",
    "test_prompts.py::test_a_prompt_goes_on_from_any_checkpoint[kda-raw-dtype1-cuts1-True-triton]",
    "test_segments.py::test_gradients_against_the_recurrence[gdn2-packed]",
    "test_serving_random.py::test_steps_of_an_engine[gdn-raw-dtype0-True-around0-torch]",
    "test_serving_random.py::test_steps_of_an_engine[kda-raw-dtype2-False-None-torch]",
    "test_serving_ring.py::test_random_engine[gdn-raw-1-torch]",
    "test_serving_ring.py::test_random_engine[gdn-raw-2-torch]",
    "test_serving_ring.py::test_random_engine[gdn-raw-3-torch]",
    "test_serving_ring.py::test_random_engine[kda-bounded-1-torch]",
    "test_serving_ring.py::test_random_engine[kda-bounded-2-torch]",
    "test_serving_ring.py::test_random_engine[kda-bounded-3-torch]",
    "test_torch_compile.py::test_a_layer_may_be_compiled_before_it_ever_ran[gdn-grouped]",
    "test_torch_compile.py::test_compiled_is_eager[gdn-recurrent-no-initial-state]",
    "test_torch_compile.py::test_compiled_is_eager[gdp-recurrent-in-kernel-packed]",
    "test_torch_compile.py::test_compiled_is_eager[gdp-recurrent-no-initial-state]",
    "test_training_ranks.py::test_ranks_train_as_one_process_does[4]",
    "test_transforms.py::test_meta_tensors_have_the_shapes_of_real_ones[gdp-recurrent-packed]",
    "test_transforms.py::test_meta_tensors_have_the_shapes_of_real_ones[gdp-recurrent-saved]",
    "test_transforms.py::test_what_a_nan_reaches[kda-g-triton]",
    "test_transforms.py::test_what_a_nan_reaches[kda-v-triton]",
    "test_triton_gdn2.py::test_gates_of_all_sizes_and_keys_that_repeat[dtype0-1e-06-2-1.0]",
    "test_triton_gdn2.py::test_gates_of_all_sizes_and_keys_that_repeat[dtype0-1e-06-2-2.0]",
    "test_triton_gdn2.py::test_gates_of_all_sizes_and_keys_that_repeat[dtype1-0.012-1-1.0]",
    "test_triton_gdn2.py::test_gates_of_all_sizes_and_keys_that_repeat[dtype1-0.012-2-1.0]",
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


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A process group of this process."""
    store = tmp_path_factory.mktemp("alone") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder where a pretended GPU compiles its driver and our C once."""
    return tmp_path_factory.mktemp("driver")
