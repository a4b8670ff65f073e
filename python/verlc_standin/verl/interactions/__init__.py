"""verl.interactions under verlc: what answers the policy as a user, as verl had it until 0.7.1."""
