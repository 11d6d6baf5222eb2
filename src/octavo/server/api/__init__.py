"""The APIs: requests, answers and endpoints. Each API has a package or a file; shared modules are next to them."""
