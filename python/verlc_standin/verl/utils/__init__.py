"""See verl/__init__.py."""
