"""Running a kernel: plans, compilation, files, targets, custom calls."""
