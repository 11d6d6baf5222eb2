"""octavo over HTTP: the APIs of one engine."""
