"""The host's side of `dequantize.cuh`: packed weights to the A registers of tensor-core products on 16-bit types."""

FORMAT_CODES = {"int4": 0, "uint4": 1, "int8": 2, "float8_e4m3fn": 3, "float4_e2m1fn": 4, "nf4": 5}  # macro FORMAT
