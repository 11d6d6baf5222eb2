"""Who may come in: sockets, connections, bodies, keys, tenants, limits, the audit log. Knows no engine and no route."""
