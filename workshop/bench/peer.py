"""Runs a peer on the named cases of the accuracy tests that its op has arguments for."""

from dataclasses import replace

import torch

from flash_delta.testing import MEMBERS, Case, Standard, Workload, first_line, make_inputs, with_gradients
from flash_delta.testing.judging import PeerAnswer
from flash_delta.testing.workload import LOWER_BOUND
from workshop.bench import contestants

DESCRIBED = {"use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "lower_bound"}


class Peer:
    """One library on one device, in a process of its own."""

    def __init__(self, contestant: str, device: torch.device):
        self.module, self.device = contestants.load(contestant), device

    def case(self, name: str, case: Case, dtype: str) -> PeerAnswer:
        """Measures its errors as ours are. Without a backward pass, only outputs are compared."""
        workload = _workload(name, case, dtype)
        if workload is None:
            return PeerAnswer({}, "peers' ops have no words for it")
        reason = self.module.unsupported(workload, self.device)
        if reason is not None:
            workload = replace(workload, kind="forward")
            refusal = self.module.unsupported(workload, self.device)
            if refusal is not None:
                return PeerAnswer({}, refusal)
        member = MEMBERS[name]
        inputs = make_inputs(case, member, getattr(torch, dtype), self.device)
        call = self.module.prepare(workload, {n: t.detach() for n, t in inputs.items() if isinstance(t, torch.Tensor)})
        o, state = call.run()
        o, state = o.reshape(inputs["v"].shape), state.mT if call.state_v_first else state
        got = {"o": o.detach(), "final_state": state.detach()}
        if workload.kind == "training":
            try:
                got = with_gradients(o, state, call.inputs, o.dtype)
            except RuntimeError as error:  # fla's backward on Hopper
                reason = first_line(error)
        standard = Standard(case, member, inputs, kernels=False)
        want = standard.want
        return PeerAnswer({t: standard.error(t, got[t].reshape(want[t].shape)) for t in want if t in got}, reason)


def _workload(name: str, case: Case, dtype: str) -> Workload | None:
    """The case as a workload, or None if a workload cannot describe it."""
    raw, bound = case.options.get("use_gate_in_kernel", False), case.options.get("lower_bound")
    l2norm = case.options.get("use_qk_l2norm_in_kernel", False)
    as_described = case.initial_state and case.options.keys() <= DESCRIBED
    if name not in ("gdn", "kda") or not as_described or bound not in (None, LOWER_BOUND):
        return None
    packed = case.lengths is not None
    gates = "unbounded" if name == "kda" and raw and bound is None else ""
    N, activations = len(case.lengths) if packed else case.B, {"l2norm": l2norm, "raw": raw, "gates": gates}
    sizes = {"H": case.H, "HV": case.HV, "N": N, "T": case.T, "K": case.K, "V": case.V}
    kind = "forward" if case.forward_only else "training"
    return Workload("check", kind, name, **sizes, dtype=dtype, packed=packed, **activations)
