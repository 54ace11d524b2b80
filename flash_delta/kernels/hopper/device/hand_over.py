"""A state, or its gradient, goes from one program to the next (tape.py), through memory, with a flag.

The copy engine moves the state. So the program that hands it over waits until its copies are in memory, and not only
until they have been read from shared memory. Then it makes them visible to all programs, and sets the flag. The program
that takes the state over waits for the flag. Then it makes what it has seen visible to the copy engine.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_delta.kernels.hopper.device.gluon_compat import barrier
from flash_delta.kernels.hopper.device.layouts import THREADS

# Without ``.read``, which the copy engine's wait in Gluon has.
STORED = gl.constexpr("cp.async.bulk.wait_group 0; fence.proxy.async; fence.acq_rel.gpu; mov.u32 $0, $1;")
# $0: whether the flag came. It looks $2 times. If the flag does not come, it sets the word at $3.
LOOK = gl.constexpr(
    "{ .reg .pred come, more; .reg .u32 looks; .reg .u64 flag; mov.u32 looks, $2; look: ld.acquire.gpu.global.u64 flag,"
    " [$1]; setp.ne.u64 come, flag, 0; sub.u32 looks, looks, 1; setp.ne.and.u32 more, looks, 0, !come; @more bra look;"
    " selp.u32 $0, 1, 0, come; @!come st.global.u32 [$3], 1; fence.proxy.async; }"
)


@gluon.jit
def flag_of(work, u, half):
    """The address of a flag of program u. ``work``: `Work` (work_items.py)."""
    return work.tape + (5 + 2 * gl.num_programs(0)) + half * gl.num_programs(0) + u


@gluon.jit
def hand_over(flag):
    """Says that the state is in memory. It is called after `store_state`."""
    i = gl.arange(0, 128, layout=THREADS)
    stored = gl.inline_asm_elementwise(STORED, "=r,r", [i], gl.int32, False, 1)
    barrier()  # all warps of this group, among them the one that has asked for the copies
    gl.store(flag + 0 * stored, (0 * stored + 1).to(gl.int64), mask=i < 1)


@gluon.jit
def take_over(flag, work):
    """Waits until the state is in memory. It is called before `load_state`. Returns 0, or NaN if the state never
    comes."""
    i = gl.arange(0, 128, layout=THREADS)
    looks, word = gl.load(work.tape + 1).to(gl.int32), gl.load(work.tape + 2)
    arguments = [flag + 0 * i, looks + 0 * i, word + 0 * i]
    gl.inline_asm_elementwise(LOOK, "=r,l,r,l", arguments, gl.int32, False, 1)
    barrier()  # all warps of this group have seen the flag
    return gl.where(gl.load(flag) != 0, 0.0, float("nan"))
