"""Speed: DDNF and its peers on the same work in one run. `make bench`, or `python -m benchmarks`."""
