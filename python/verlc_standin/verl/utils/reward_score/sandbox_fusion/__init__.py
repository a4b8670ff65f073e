"""verl.utils.reward_score.sandbox_fusion under verlc: a program run by a SandboxFusion service (utils.py). Rewards by it are
verlc's own (reward.sandbox_fusion.url)."""
