"""Shapes and layouts that the roles of a kernel agree on. Every warp group holds 64 rows of S^T [V, K]."""

from triton.experimental.gluon import language as gl

C = gl.constexpr(64)  # tokens of a chunk
# In registers: accumulators of one warp group. Warp w holds rows 16 w to 16 w + 15.
ROWS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # [64, 64]
NARROW_ROWS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))  # [64, 32]
BLOCKS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))  # [4, 16, 16]: one block per warp
# In shared memory, as wgmma and the copy engine need them.
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
HALF = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))  # [.., 32]
BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))  # TILE, as `boxes.ragged` describes it,
STEP_BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, 5))  # with an axis for steps, too
FLOATS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))  # of float32,
FLOAT_BOX = gl.constexpr(gl.NVMMASharedLayout(128, 32, 4))  # and as `boxes.ragged` describes it
STATE = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))  # of float32
ROW_STATE = gl.constexpr(gl.NVMMASharedLayout(128, 32, 3))  # a pool of float32, as `boxes.pool` describes it
ROW_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))  # a pool of 16 bits with states [K, V]
ROW_HALF = gl.constexpr(gl.NVMMASharedLayout(64, 16, 3))  # a pool of 16 bits with states [V, K]
LINES = gl.constexpr(gl.NVMMASharedLayout(0, 32, 2))  # of float32, one row; several rows would not be contiguous
PAIRS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
# Layouts of numbers that roles pass to each other.
FLAGS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # of a warp group
TOKENS = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [1, 1], [1, 0]))  # [1, 64] of one warp
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # of one warp
BY_WARP = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))  # [4, 64]: a row per warp
# Makes the copy engine clip at the end of any sequence, not only of the tensor (`boxes.ragged`).
RAGGED = gl.constexpr(2**30)
