"""Model families, and how their checkpoints are read. Broken or unsupported files raise `ModelError`."""
