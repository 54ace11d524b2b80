"""Models of transformers on two processes, each with a part of a row, are the model on one with the whole row."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip("transformers")

from parallel_models import ATTENTION, alone, work
from test_integrations_transformers import tokens
from test_parallel import in_order
from tiny_transformers import FAMILIES, build

from flash_delta.integrations.transformers import enable
from flash_delta.parallel import ContextParallel
from flash_delta.testing import assert_accurate

INDEXED = ("qwen4_exp", "glm5_next")
SLIDING = ("lara_mini",)
SPLIT = [name for name in FAMILIES if name not in INDEXED + SLIDING]


def test_two_ranks_are_one(tmp_path):
    mp.spawn(work, (2, str(tmp_path), SPLIT), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for family in SPLIT:
        want = alone(family)
        for split in ("runs", "bounds on the device", "heads and tails"):
            parts = [rank[family, split] for rank in ranks]
            for name, t in want.items():
                got = in_order(t, parts, "y") if name == "y" else sum(part[name] for part in parts)
                assert_accurate(f"{family}, {split}: {name}", got, t, torch.float64)


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    store = tmp_path_factory.mktemp("alone") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield ContextParallel(dist.group.WORLD, [0, 4, 9])
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.ones(1, 9)}, "attention_mask: expected None with cp_context, got a Tensor"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, "cu_seq_lens_q: expected None with cp_context"),
        ({"cache": object()}, "cache: expected None with cp_context"),
        ({"past_key_values": object()}, "past_key_values: expected None with cp_context"),
        ({"use_cache": True}, "use_cache: expected False with cp_context"),
        ({"cp_context": 2}, "cp_context: expected a flash_delta.parallel.ContextParallel, got int"),
        ({"input_ids": tokens(1, 8)}, r"input_ids: expected this rank's tokens \[1, 9\] with cp_context, got .*1, 8"),
    ],
)
def test_what_a_model_refuses(context, arguments, message):
    model = build("qwen3_5")
    with enable(model):
        model.set_attn_implementation(ATTENTION)
        with pytest.raises(ValueError, match=message):
            model.model(**{"input_ids": tokens(1, 9), "cp_context": context} | arguments)


def test_attention_that_sees_one_rank_is_refused(context):
    model = build("qwen3_5")
    with enable(model):
        with pytest.raises(
            ValueError, match=r"expected a model after set_attn_implementation.'gathered_keys'.*'eager'"
        ):
            model(tokens(1, 9), cp_context=context)
        model.set_attn_implementation(ATTENTION)
        with pytest.raises(ValueError, match="cp_context: expected a ContextParallel with the attention"):
            model(tokens(1, 9), use_cache=False)
    for family in set(INDEXED) & set(FAMILIES):
        model = build(family)
        with enable(model), pytest.raises(ValueError, match=r"cp_context: expected None .the indexed attention"):
            model(tokens(1, 9), cp_context=context)
    for family in set(SLIDING) & set(FAMILIES):
        model = build(family)
        with enable(model):
            model.set_attn_implementation(ATTENTION)
            with pytest.raises(ValueError, match="sliding_window: expected None with cp_context, got 512"):
                model(tokens(1, 9), cp_context=context)
