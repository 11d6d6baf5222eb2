"""HTTP for server and router: sockets, connections, bodies, keys, limits, errors, the audit log. Knows no engine."""
