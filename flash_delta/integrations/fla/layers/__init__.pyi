from flash_delta.integrations.fla.mixers import Comba as Comba
from flash_delta.integrations.fla.mixers import DeltaNet as DeltaNet
from flash_delta.integrations.fla.mixers import GatedDeltaNet as GatedDeltaNet
from flash_delta.integrations.fla.mixers import GatedDeltaNet2 as GatedDeltaNet2
from flash_delta.integrations.fla.mixers import GatedDeltaProduct as GatedDeltaProduct
from flash_delta.integrations.fla.mixers import KimiDeltaAttention as KimiDeltaAttention
from flash_delta.integrations.fla.mixers import SimpleGatedLinearAttention as SimpleGatedLinearAttention
