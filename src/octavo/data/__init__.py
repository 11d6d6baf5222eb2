"""Plain data that packages exchange. Standard library only."""
