"""verl.tools.utils, as it was until verl 0.7.1."""
