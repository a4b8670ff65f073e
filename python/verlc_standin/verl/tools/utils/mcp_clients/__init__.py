"""verl.tools.utils.mcp_clients, as it was until verl 0.7.1."""
