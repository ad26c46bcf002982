"""The measure of speed: ours and the peers on the same work in one run. `make bench`, or `python -m benchmarks`."""
