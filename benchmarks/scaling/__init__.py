"""How time, peak memory and FLOPs of the algorithms grow with the length. Run `python -m benchmarks.scaling`."""
