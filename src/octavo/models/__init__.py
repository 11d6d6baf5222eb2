"""Model families and checkpoint readers. Unusable files raise `ModelError`."""
