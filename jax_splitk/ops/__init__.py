"""Public operations: their arguments, primitives, lowering, and what looks at them."""
