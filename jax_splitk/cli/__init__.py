"""The commands of `python -m jax_splitk`, one module for each."""
