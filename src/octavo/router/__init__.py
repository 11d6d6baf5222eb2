"""Many engines behind one address: which of them a request goes to, and what becomes of it when one is lost."""
