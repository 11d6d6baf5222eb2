"""Who runs next, and on which blocks: a pure machine, standard library only, clock and randomness injected."""
