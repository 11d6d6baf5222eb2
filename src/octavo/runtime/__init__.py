"""Services for every process."""
