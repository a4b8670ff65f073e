"""See verl/utils/dataset/__init__.py."""

from verl.utils.dataset import RLHFDataset  # noqa: F401
