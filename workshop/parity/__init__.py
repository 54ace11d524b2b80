"""Loss parity: the same model, seed and data order, trained by PyTorch in float32, by this library and by fla."""
