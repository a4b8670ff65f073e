"""verl.workers.rollout under verlc."""
