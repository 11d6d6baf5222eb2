"""One step, and the ways to drive it. Knows no tensors: it is handed a core and an executor already built."""
