"""Random packings and pools on a GPU, each sequence of them against the recurrence in float64.

RANDOM_PACKINGS=10000 pytest tests/test_random_packings_gpu.py -n 0 -s    as many draws as that; each on every backend
"""

import os
from itertools import product

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from random_packings import FORMS, Round

DRAWS = int(os.environ.get("RANDOM_PACKINGS", "640"))
TOGETHER = 40  # draws of at most 3,000 tokens in a round
BACKENDS = ("hopper", "triton") if torch.cuda.get_device_capability()[0] == 9 else ("triton",)


CUT = [form for form in FORMS if form.member == "gdn"]  # of which `hopper` cuts long sequences


@pytest.mark.parametrize(("form", "tokens"), [*product(FORMS, [3000]), *product(CUT, [20000])], ids=str)
def test_no_draw_misses(form, tokens):
    together = -(-TOGETHER * 3000 // tokens)
    rounds, wrong, worst = -(-DRAWS // (TOGETHER * len(FORMS))), [], dict.fromkeys(BACKENDS, 0.0)
    for number in range(rounds):
        made = Round(form, together, 1000 * FORMS.index(form) + number, "cuda", tokens=tokens)
        for backend in BACKENDS:
            missed, ratio = made.judge(*made.run(backend))
            wrong += [f"{backend}: {told}" for told in missed]
            worst[backend] = max(worst[backend], ratio)
    told = ", ".join(f"{backend} {ratio:.2f}" for backend, ratio in worst.items())
    done = f"{form}, {tokens} tokens: {rounds * together} draws, {len(wrong)} misses"
    print(f"{done}; the worst over what is allowed: {told}", flush=True)
    assert not wrong, "\n".join([f"{len(wrong)} misses", *wrong[:20]])
