"""Problem types, and the same operations in plain lax."""
