from flash_delta.integrations.fla.mixers import Comba as Comba
