"""Model families and checkpoint readers. Broken or unsupported files raise `ModelError`."""
