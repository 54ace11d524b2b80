"""Inputs whose keys repeat."""

import torch

from flash_delta.testing import MEMBERS, make_inputs
from flash_delta.testing.cases import Case

NORM = {"use_qk_l2norm_in_kernel": True}


def repeated(beta, decay=0.0, member="gdn", K=128, **options):
    """One key and its negative, in random order, as two heads of it. Rounding errors then add up."""
    case = Case("", "", B=1, T=256, H=2, HV=2, K=K, V=K, initial_state=False, options=NORM | options)
    x = make_inputs(case, MEMBERS[member], torch.bfloat16)
    signs = 1 - 2 * torch.randint(2, (1, case.T, 2, 1), generator=torch.Generator().manual_seed(2))
    x["k"].data[:] = 0.9 * x["k"][:, :1] * signs
    x["beta"] = torch.full((1, case.T, 2), beta).requires_grad_()
    x["g"] = torch.full_like(x["g"], decay, dtype=torch.float32).requires_grad_()
    return x
