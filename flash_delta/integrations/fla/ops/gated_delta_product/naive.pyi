from flash_delta.integrations.fla.naive import (
    naive_recurrent_gated_delta_product as naive_recurrent_gated_delta_product,
)
