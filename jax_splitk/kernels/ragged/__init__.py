"""Grouped matrix products, whose rows belong to groups of sizes that only the device knows (`lax.ragged_dot`)."""
