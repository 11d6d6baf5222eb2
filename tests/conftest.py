"""Makes `fakes` importable from every test: pytest puts this file's directory on the path."""
