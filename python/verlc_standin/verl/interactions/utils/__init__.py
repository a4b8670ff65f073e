"""See verl/interactions/__init__.py."""
