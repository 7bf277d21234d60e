"""Public operations: their arguments, primitives and lowering, and functions that examine traces."""
