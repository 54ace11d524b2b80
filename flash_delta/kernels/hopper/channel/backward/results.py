"""What `chunk_back` stores from registers: gradients of values and of strengths, and sums over tokens. The copy engine
stores those of q, k, g and b."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_delta.kernels.hopper.channel.backward.blocks import OF_CHANNELS, K, empty_tile
from flash_delta.kernels.hopper.channel.gates import strength_back, strengths_of
from flash_delta.kernels.hopper.device.layouts import C
from flash_delta.kernels.hopper.device.segment_bounds import load_bound

ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))  # [64, 128]

Results = namedtuple("Results", "dq dk dv dg dbeta db dw dA_log ddt_bias")  # the gradients' addresses


@gluon.jit
def store_nothing(slot, hv, results, cu_seqlens, N, T, HV):
    """Stores zeros for a slot without a chunk: for tokens after the last sequence, and in sums over slots."""
    dq, dg, dbeta = results.dq, results.dg, results.dbeta
    i, c = gl.arange(0, C, layout=gl.SliceLayout(1, ROWS)), gl.arange(0, K, layout=gl.SliceLayout(0, ROWS))
    nothing = gl.zeros([C, K], gl.float32, ROWS)
    end = load_bound(cu_seqlens, N, T)
    first = end + (slot - end // C - N) * C
    if first >= end:
        line = (first + i).to(gl.int64) * HV + hv
        at, some = line[:, None] * K + c[None, :], ((first + i) < T)[:, None] & (c >= 0)[None, :]
        gl.store(dq + at, nothing.to(dq.dtype.element_ty), mask=some)
        gl.store(results.dk + at, nothing.to(dq.dtype.element_ty), mask=some)
        gl.store(results.dv + at, nothing.to(dq.dtype.element_ty), mask=some)
        gl.store(dg + at, nothing.to(dg.dtype.element_ty), mask=some)
        if results.db is not None:
            gl.store(results.db + at, nothing.to(dq.dtype.element_ty), mask=some)
            gl.store(results.dw + at, nothing.to(dq.dtype.element_ty), mask=some)
        if dbeta is not None:
            gl.store(dbeta + line, gl.sum(nothing, 1).to(dbeta.dtype.element_ty), mask=first + i < T)
    store_sums(slot * HV + hv, results, gl.sum(empty_tile(), 1), gl.sum(empty_tile(), 1))


@gluon.jit
def store_sums(head, results, dA, dbias):
    at = head.to(gl.int64) * K + gl.arange(0, K, layout=OF_CHANNELS)
    if results.dA_log is not None:
        gl.store(results.dA_log + at, dA)
    if results.ddt_bias is not None:
        gl.store(results.ddt_bias + at, dbias)


@gluon.jit
def of_rows(lines, n: gl.constexpr, layout: gl.constexpr):
    """Line n, [64, 1]."""
    return lines.index(n).permute([1, 0]).load(layout)


@gluon.jit
def take_values(values, chunk, HV):
    """v and w of a chunk as given. ``values``: their addresses, the tokens between batch rows, and the strides between
    tokens and heads."""
    v, w, v_batch, w_batch, v_strides, w_strides = values
    i, c = gl.arange(0, C, layout=gl.SliceLayout(1, ROWS))[:, None], gl.arange(0, K, layout=gl.SliceLayout(0, ROWS))
    token, hv, some = chunk.start + chunk.first, chunk.item % HV, (chunk.first + i < chunk.size) & (c >= 0)[None, :]
    of_v = (chunk.row * v_batch + token).to(gl.int64) * v_strides[0] + hv * v_strides[1]
    of_w = (chunk.row * w_batch + token).to(gl.int64) * w_strides[0] + hv * w_strides[1]
    x = gl.load(v + of_v + (i * v_strides[0] + c[None, :]), mask=some, other=0.0)
    return x, gl.load(w + of_w + (i * w_strides[0] + c[None, :]), mask=some, other=0.0)


@gluon.jit
def store_values(slam, sr, taken, values, lines, results, chunk, T, HV, beta_top, RAW_BETA: gl.constexpr):
    """Stores dv, and dbeta or dw. ``values``: v and w, if the strength is per channel."""
    dv, dbeta = results.dv, results.dbeta
    first = chunk.first
    i, c = gl.arange(0, C, layout=gl.SliceLayout(1, ROWS)), gl.arange(0, K, layout=gl.SliceLayout(0, ROWS))
    lam, b = slam.load(ROWS).to(gl.float32), of_rows(lines, 3, ROWS)
    line = (chunk.row.to(gl.int64) * T + chunk.start + first + i) * HV + chunk.item % HV
    some = first + i < chunk.size
    at, of_channel = line[:, None] * K + c[None, :], some[:, None] & (c >= 0)[None, :]
    if values is not None:
        b = strengths_of(values[1], 1.0, RAW_BETA)
        dw = strength_back(lam * values[0].to(gl.float32), b, 1.0, RAW_BETA)
        gl.store(results.dw + at, dw.to(dv.dtype.element_ty), mask=of_channel)
    gl.store(dv + at, (lam * b).to(dv.dtype.element_ty), mask=of_channel)
    if dbeta is not None:
        db = gl.sum(lam * sr.load(ROWS).to(gl.float32), 1) - gl.convert_layout(taken, gl.SliceLayout(1, ROWS))
        if RAW_BETA:
            b = gl.sum(b, 1)
            db *= b * (1.0 - b / beta_top)
        gl.store(dbeta + line, db.to(dbeta.dtype.element_ty), mask=some)
