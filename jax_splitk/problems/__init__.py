"""What is to be computed: problem types and the same operations in plain lax."""
