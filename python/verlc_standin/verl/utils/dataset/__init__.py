"""verl.utils.dataset under verlc: see rl_dataset.py."""

from verl.utils.dataset.rl_dataset import RLHFDataset  # noqa: F401
