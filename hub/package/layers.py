"""What ``kernelize`` gives to models of transformers: a forward for each name that their modelling code registers.

``kernels`` wants layers without state and without anything of their own but ``forward``, whose arguments are as many
as those of the one that is replaced, and of the same kinds. What stands in ``kwargs`` and concerns other layers is
dropped.
"""

from torch import nn

from flash_delta.integrations.transformers import functions

RULES, CONVOLUTIONS = functions.RULES, functions.CONVOLUTIONS


class chunk_gated_delta_rule(nn.Module):
    can_torch_compile = True

    def forward(
        self,
        query,
        key,
        value,
        g,
        beta,
        chunk_size=64,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        return RULES["torch_chunk_gated_delta_rule"](
            query, key, value, g, beta, chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel, **kwargs
        )


class fused_recurrent_gated_delta_rule(nn.Module):
    can_torch_compile = True

    def forward(
        self,
        query,
        key,
        value,
        g,
        beta,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        return RULES["torch_recurrent_gated_delta_rule"](
            query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, **kwargs
        )


class chunk_kda(nn.Module):
    can_torch_compile = True

    def forward(
        self,
        query,
        key,
        value,
        g,
        beta,
        chunk_size=64,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        return RULES["chunk_kimi_delta_attention"](
            query, key, value, g, beta, chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel, **kwargs
        )


class fused_recurrent_kda(nn.Module):
    can_torch_compile = True

    def forward(
        self,
        query,
        key,
        value,
        g,
        beta,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        return RULES["recurrent_kimi_delta_attention"](
            query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, **kwargs
        )


class causal_conv1d_fn(nn.Module):
    can_torch_compile = True

    def forward(self, hidden_states, weight, bias=None, activation=None, **kwargs):
        return CONVOLUTIONS["causal_conv1d_fn"](hidden_states, weight, bias, activation, **kwargs)


class causal_conv1d_update(nn.Module):
    can_torch_compile = True

    def forward(self, hidden_states, conv_state, weight, bias=None, activation=None):
        return functions.causal_conv1d_update(hidden_states, conv_state, weight, bias, activation)


class RMSNormGated(nn.Module):
    can_torch_compile = True
    forward = functions.gated_norm
