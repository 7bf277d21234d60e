"""Reading of model checkpoints: safetensors files, and the formats of quantized weights in them."""
