from flash_delta.integrations.fla.mixers import GatedDeltaProduct as GatedDeltaProduct
