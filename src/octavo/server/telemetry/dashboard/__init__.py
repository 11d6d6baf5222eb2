"""The live dashboard."""
