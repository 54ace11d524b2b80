"""The names of fla 0.6.0 that this library has: for each path, the modules that define them. A module without a dot is
a file of the folder ``fla``.

`_fla_mirror.py` makes a module for each path after ``flash_delta.integrations.fla``, and ``fla/stand_in.py`` after
``fla``. Type checkers read a stub for each path. After a change run ``python tests/fla_stubs.py``, which writes them.
"""

FLA = "flash_delta.integrations.fla"

PATHS = {
    "layers": {
        "mixers": "Comba DeltaNet GatedDeltaNet GatedDeltaNet2 GatedDeltaProduct KimiDeltaAttention"
        " SimpleGatedLinearAttention"
    },
    "layers.comba": {"mixers": "Comba"},
    "layers.delta_net": {"mixers": "DeltaNet", "flash_delta.layers.delta_net": "sum_norm"},
    "layers.gated_deltanet": {"mixers": "GatedDeltaNet"},
    "layers.gated_deltaproduct": {"mixers": "GatedDeltaProduct"},
    "layers.gdn2": {"mixers": "GatedDeltaNet2"},
    "layers.kda": {"mixers": "KimiDeltaAttention"},
    "layers.simple_gla": {"mixers": "SimpleGatedLinearAttention"},
    "layers.utils": {
        "padding": "get_layer_cache get_unpad_data get_unpad_indices_and_cu index_first_axis index_put_first_axis"
        " pad_input repad_hidden_states require_cache_layer_idx unpad_hidden_states unpad_input update_layer_cache"
    },
    "modules": {"convolution": "ShortConvolution", "norms": "FusedRMSNormGated L2Norm RMSNorm"},
    "modules.causal_conv1d": {
        "convolution": "ShortConvolution causal_conv1d causal_conv1d_bwd causal_conv1d_fwd causal_conv1d_update"
        " causal_conv1d_update_states"
    },
    "modules.norm": {"norms": "FusedRMSNormGated L2Norm RMSNorm"},
    "modules.norm.fused_norm_gate": {"norms": "FusedRMSNormGated rms_norm_gated"},
    "modules.norm.l2norm": {"norms": "L2Norm l2_norm l2norm l2norm_bwd l2norm_fwd"},
    "modules.norm.layernorm": {"norms": "RMSNorm rms_norm"},
    "ops": {
        "calls": "chunk_comba chunk_delta_rule chunk_gated_delta_rule chunk_gdn chunk_kda chunk_simple_gla"
        " fused_chunk_delta_rule fused_chunk_simple_gla fused_recurrent_comba fused_recurrent_delta_rule"
        " fused_recurrent_gated_delta_rule fused_recurrent_gdn fused_recurrent_kda fused_recurrent_simple_gla"
        " parallel_simple_gla"
    },
    "ops.comba": {"calls": "chunk_comba fused_recurrent_comba", "naive": "naive_chunk_comba naive_recurrent_comba"},
    "ops.comba.chunk": {"calls": "chunk_comba"},
    "ops.comba.fused_recurrent": {"calls": "fused_recurrent_comba"},
    "ops.comba.naive": {"naive": "naive_chunk_comba naive_recurrent_comba"},
    "ops.cp": {"context": "FLACPContext build_cp_context conv_cp_send_recv_bwd conv_cp_send_recv_fwd"},
    "ops.cp.comm": {"context": "conv_cp_send_recv_bwd conv_cp_send_recv_fwd"},
    "ops.cp.context": {"context": "FLACPContext build_cp_context get_cp_cu_seqlens"},
    "ops.delta_rule": {"calls": "chunk_delta_rule fused_chunk_delta_rule fused_recurrent_delta_rule"},
    "ops.delta_rule.chunk": {"calls": "chunk_delta_rule"},
    "ops.delta_rule.fused_chunk": {"calls": "fused_chunk_delta_rule"},
    "ops.delta_rule.fused_recurrent": {"calls": "fused_recurrent_delta_rule"},
    "ops.delta_rule.naive": {"naive": "delta_rule_chunkwise delta_rule_recurrence"},
    "ops.gated_delta_product": {"calls": "chunk_gated_delta_product"},
    "ops.gated_delta_product.chunk": {"calls": "chunk_gated_delta_product"},
    "ops.gated_delta_product.naive": {"naive": "naive_recurrent_gated_delta_product"},
    "ops.gated_delta_rule": {
        "calls": "chunk_gated_delta_rule chunk_gdn fused_recurrent_gated_delta_rule fused_recurrent_gdn",
        "naive": "naive_chunk_gated_delta_rule naive_recurrent_gated_delta_rule",
    },
    "ops.gated_delta_rule.chunk": {
        "calls": "chunk_gated_delta_rule chunk_gdn",
        "passes": "chunk_gated_delta_rule_bwd chunk_gated_delta_rule_fwd",
    },
    "ops.gated_delta_rule.fused_recurrent": {"calls": "fused_recurrent_gated_delta_rule fused_recurrent_gdn"},
    "ops.gated_delta_rule.gate": {"flash_delta.ops": "fused_gdn_gate naive_gdn_gate"},
    "ops.gated_delta_rule.naive": {"naive": "naive_chunk_gated_delta_rule naive_recurrent_gated_delta_rule"},
    "ops.gdn2": {"calls": "chunk_gdn2 fused_recurrent_gdn2", "naive": "naive_chunk_gdn2 naive_recurrent_gdn2"},
    "ops.gdn2.chunk": {"calls": "chunk_gdn2"},
    "ops.gdn2.fused_recurrent": {"calls": "fused_recurrent_gdn2"},
    "ops.gdn2.naive": {"naive": "naive_chunk_gdn2 naive_recurrent_gdn2"},
    "ops.kda": {"calls": "chunk_kda fused_recurrent_kda"},
    "ops.kda.chunk": {"calls": "chunk_kda"},
    "ops.kda.fused_recurrent": {"calls": "fused_recurrent_kda"},
    "ops.kda.gate": {"flash_delta.ops": "fused_kda_gate naive_kda_gate naive_kda_lowerbound_gate"},
    "ops.kda.naive": {"naive": "naive_chunk_kda naive_recurrent_kda"},
    "ops.simple_gla": {
        "calls": "chunk_simple_gla fused_chunk_simple_gla fused_recurrent_simple_gla parallel_simple_gla"
    },
    "ops.simple_gla.chunk": {"calls": "chunk_simple_gla"},
    "ops.simple_gla.fused_chunk": {"calls": "fused_chunk_simple_gla"},
    "ops.simple_gla.fused_recurrent": {"calls": "fused_recurrent_simple_gla"},
    "ops.simple_gla.naive": {"naive": "naive_chunk_simple_gla naive_parallel_simple_gla naive_recurrent_simple_gla"},
    "ops.simple_gla.parallel": {"calls": "parallel_simple_gla"},
}
SECOND_PATHS = {  # to the same names
    "modules.causal_conv1d.ops": "modules.causal_conv1d",
    "modules.convolution": "modules.causal_conv1d",
    "modules.fused_norm_gate": "modules.norm.fused_norm_gate",
    "modules.l2norm": "modules.norm.l2norm",
    "modules.layernorm": "modules.norm.layernorm",
}
PATHS |= {path: PATHS[first] for path, first in SECOND_PATHS.items()}
ABOUT = {  # packages, for help()
    "layers": "the token mixers of this library's members",
    "modules": "convolutions and norms that layers use around their ops",
    "ops": "the members of the gated delta rule's family",
    "ops.cp": "one packed row on many ranks",
    "ops.simple_gla": "all are :func:`flash_delta.chunk_simple_gla`, since they differ only in the order of sums",
}
