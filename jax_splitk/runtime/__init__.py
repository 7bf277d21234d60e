"""How it runs: plans, compilation, files, targets, custom calls."""
