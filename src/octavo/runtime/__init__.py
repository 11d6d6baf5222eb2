"""Services for all processes."""
