"""Plain data that packages exchange: requests, steps and their results, events, figures. Standard library only."""
