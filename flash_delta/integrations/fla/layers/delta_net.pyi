from flash_delta.integrations.fla.mixers import DeltaNet as DeltaNet
from flash_delta.layers.delta_net import sum_norm as sum_norm
