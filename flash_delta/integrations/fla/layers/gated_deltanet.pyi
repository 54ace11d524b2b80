from flash_delta.integrations.fla.mixers import GatedDeltaNet as GatedDeltaNet
