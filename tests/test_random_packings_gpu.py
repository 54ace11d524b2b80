"""Random packings and pools on a GPU, each sequence of them against the recurrence in float64.

RANDOM_PACKINGS=10000 pytest tests/test_random_packings_gpu.py -n 0 -s    as many draws as that; each on every backend
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from random_packings import FORMS, Round

DRAWS = int(os.environ.get("RANDOM_PACKINGS", "640"))
TOGETHER = 40  # draws of a round
BACKENDS = ("hopper", "triton") if torch.cuda.get_device_capability()[0] == 9 else ("triton",)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_no_draw_misses(form):
    rounds, wrong, worst = -(-DRAWS // (TOGETHER * len(FORMS))), [], dict.fromkeys(BACKENDS, 0.0)
    for number in range(rounds):
        made = Round(form, TOGETHER, 1000 * FORMS.index(form) + number, "cuda")
        for backend in BACKENDS:
            missed, ratio = made.judge(*made.run(backend))
            wrong += [f"{backend}: {told}" for told in missed]
            worst[backend] = max(worst[backend], ratio)
    told = ", ".join(f"{backend} {ratio:.2f}" for backend, ratio in worst.items())
    print(f"{form}: {rounds * TOGETHER} draws, {len(wrong)} misses; the worst over what is allowed: {told}", flush=True)
    assert not wrong, "\n".join([f"{len(wrong)} misses", *wrong[:20]])
