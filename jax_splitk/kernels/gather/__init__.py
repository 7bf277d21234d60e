"""Kernel families that gather windows from shared memory: few or odd channels, exact float32."""
