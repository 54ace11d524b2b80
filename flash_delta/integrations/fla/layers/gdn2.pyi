from flash_delta.integrations.fla.mixers import GatedDeltaNet2 as GatedDeltaNet2
